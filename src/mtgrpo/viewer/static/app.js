// The frame of the page: where it is (the address after #), what it asks the server for, keys. Text of models is only
// ever set as text.
import { curves, runs } from "./runs.js";
import { step, task } from "./step.js";
import { conversation } from "./conversation.js";
import { group } from "./group.js";
import { forest, timeline } from "./forest.js";
import { h, hideTip } from "./dom.js";

const page = document.getElementById("page");
let secret = "";
let keys = {}; // of the present screen: key -> function
let shown = 0; // counts the screens, so that one that comes late is not shown
let again = 0; // the timer of a screen that renews itself

async function fetched(name) {
  const answer = await fetch(`api/${name}.json`, { headers: secret ? { "X-View-Secret": secret } : {} });
  if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).slice(0, 500)}`);
  return answer.json();
}

// What a page of files (`--out`) has in one file is read together: the last part of a name is a key in it.
const files = document.querySelector("meta[name=files]"), kept = new Map();
export async function read(name) {
  if (!files) return fetched(name);
  const cut = name.lastIndexOf("/"), place = cut < 0 ? "top" : name.slice(0, cut);
  if (!kept.has(place)) kept.set(place, fetched(place));
  const found = (await kept.get(place))[name.slice(cut + 1)];
  for (const old of [...kept.keys()].slice(0, -4)) kept.delete(old);
  if (found === undefined) throw new Error(`404: there is no ${name}`);
  return found;
}

let names; // of the runs
export async function name_of(run) {
  names ??= read("names");
  return (await names)[run] ?? run;
}

export const go = (path) => { location.hash = path; };
export const link = (path, ...inside) => h("a", { href: `#${path}` }, ...inside);

// Screens: a pattern of the address, and what makes it: content, where it stands (texts and addresses), keys.
const screens = [
  [/^\/?$/, runs],
  [/^\/curves\/([\d,]+)$/, curves],
  [/^\/r\/(\d+)\/task\/(.+)$/, task],
  [/^\/r\/(\d+)\/([\w-]+)$/, step],
  [/^\/r\/(\d+)\/([\w-]+)\/g\/(\d+)$/, group],
  [/^\/r\/(\d+)\/([\w-]+)\/c\/(\d+)(?:\/t\/(\d+))?$/, conversation],
  [/^\/r\/(\d+)\/([\w-]+)\/forest$/, forest],
  [/^\/r\/(\d+)\/([\w-]+)\/timeline$/, timeline],
];

async function show() {
  const [, given, path] = location.hash.match(/^#?(?:secret=([^/]*))?(.*)$/s);
  if (given !== undefined) {
    sessionStorage.setItem("secret", given);
    history.replaceState(null, "", location.pathname + (path && `#${path}`));
  }
  secret = sessionStorage.getItem("secret") ?? "";
  const found = screens.map(([pattern, make]) => [path.match(pattern), make]).find(([match]) => match);
  const turn = ++shown;
  clearTimeout(again);
  hideTip();
  page.classList.add("busy");
  let screen;
  try {
    screen = found ? await found[1](...found[0].slice(1).map((part) => part && decodeURIComponent(part))) : { content: [h("p.empty", "There is no such screen.")] };
  } catch (error) {
    screen = { content: [h("p.error", String(error.message ?? error))] };
  }
  if (turn !== shown) return;
  keys = screen.keys ?? {};
  frame(screen.where ?? []);
  const scroll = screen.renews && page.dataset.path === path ? scrollY : 0;
  page.replaceChildren(...screen.content);
  page.dataset.path = path;
  page.classList.remove("busy");
  screen.ready?.();
  scrollTo(0, scroll);
  screen.focus?.scrollIntoView({ block: "center" });
  if (screen.renews) again = setTimeout(() => (document.hidden ? addEventListener("visibilitychange", show, { once: true }) : show()), screen.renews);
}

function frame(where) {
  const steps = where.flatMap(([text, path]) => [h("span.sep", "/"), path ? link(path, text) : h("span", text)]);
  const named = Object.entries(keys).filter(([, act]) => act.does).sort(([one], [other]) => (one > "9" ? 0 : 1) - (other > "9" ? 0 : 1));
  const hint = named.map(([key, act]) => h("span", h("kbd", key), act.does));
  document.getElementById("bar").replaceChildren(
    h("nav", { "aria-label": "where" }, link("/", h("b", "mtgrpo")), ...steps),
    h("div.hints", { "aria-hidden": "true" }, ...hint),
  );
  document.title = ["mtgrpo", ...where.map(([text]) => text)].join(" / ");
}

// A key of a screen, with what it does in a word.
export const key = (does, act) => Object.assign(act, { does });

addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName), search = document.querySelector("input[type=search]");
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const act = event.key === "/" && search ? () => search.focus() : keys[event.key];
  if (act) { event.preventDefault(); act(); }
});

addEventListener("hashchange", show);
show(); // a module runs when the page has been read
