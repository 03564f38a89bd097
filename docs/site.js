// A table that is wider than the screen can be scrolled by the keyboard too.
addEventListener("load", () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap")) table.tabIndex = 0;
});
