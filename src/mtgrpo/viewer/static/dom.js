// Elements and numbers. `h("td.num", {title: "..."}, "text", child)`: strings become text, never markup.
export function h(name, ...inside) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  const first = inside[0];
  if (first && typeof first === "object" && !(first instanceof Node) && !Array.isArray(first)) {
    inside.shift();
    for (const [key, value] of Object.entries(first)) {
      if (value === undefined || value === null || value === false) continue;
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (key in element && key !== "href" && !key.includes("-")) element[key] = value;
      else element.setAttribute(key, value);
    }
  }
  return add(element, ...inside);
}

export function add(element, ...inside) {
  for (const child of inside.flat(Infinity)) {
    if (child !== undefined && child !== null && child !== false && child !== "") element.append(child);
  }
  return element;
}

// A number for people.
export function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e12) return value.toLocaleString("en");
  if (size >= 1e6) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}
export const signed = (value, digits = 3) => (value > 0 ? "+" : "") + num(value, digits).replace("-", "−");
export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
export const took = (seconds) => (seconds < 0.1 ? `${num(1000 * seconds, 2)} ms` : `${num(seconds, 2)} s`);
export const plural = (count, what) => `${num(count)} ${what}${count === 1 ? "" : "s"}`;
export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const highest = (values, least = -Infinity) => values.reduce((most, value) => Math.max(most, value), least); // a call takes no 120,000 arguments
export const lowest = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);
export const isNumber = (value) => typeof value === "number";

export const version_name = (first, last) => `version ${first === last ? first : `${first}–${last}`} as the engine says`;

export function ago(seconds) {
  const [unit, name] = [[86400, "days"], [3600, "h"], [60, "min"], [1, "s"]].find(([unit]) => seconds >= 1.5 * unit) ?? [1, "s"];
  return `${Math.max(0, Math.round(seconds / unit))} ${name} ago`;
}

// The class of a colour: p1 to p8 above 0, n1 to n8 below, as strong as the root of the share of `most`.
export function shade(value, most, positive = "p", negative = "n") {
  if (!isNumber(value) || !most || !value) return "";
  const level = Math.min(8, Math.max(1, Math.ceil(8 * Math.sqrt(Math.abs(value) / most))));
  return (value > 0 ? positive : negative) + level;
}

// The colour that a CSS variable has now, for what is drawn on a canvas.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const step_of = (file) => (file.startsWith("step_") ? Number(file.slice(5)) : null);
export const file_name = (file) => (step_of(file) === null ? file.replaceAll("_", " ") : `step ${step_of(file)}`);

// A canvas of this height in points, drawn by `draw(context, width, height)` now and whenever its width changes.
export function canvas(height, draw, attributes = {}) {
  const element = h("canvas", { role: "img", ...attributes });
  new ResizeObserver(() => {
    const width = element.clientWidth, scale = devicePixelRatio || 1, context = element.getContext("2d");
    if (!width) return;
    Object.assign(element, { width: width * scale, height: height * scale }).style.height = `${height}px`;
    context.scale(scale, scale);
    draw(context, width, height);
  }).observe(element);
  return element;
}

// The course of some numbers, as a small line.
export function spark(values) {
  const known = values.filter(isNumber), low = lowest(known), span = highest(known) - low || 1;
  if (known.length < 2) return h("span.muted", known.length ? num(known[0]) : "–");
  return canvas(28, (context, width, height) => {
    Object.assign(context, { strokeStyle: colour("--accent"), lineWidth: 1.8, lineJoin: "round" });
    known.forEach((value, i) => context.lineTo(2 + (i * (width - 4)) / (known.length - 1), height - 3 - ((value - low) / span) * (height - 6)));
    context.stroke();
  }, { className: "spark", "aria-label": `from ${num(known[0])} to ${num(known.at(-1))}`, title: `${num(known[0])} to ${num(known.at(-1))}` });
}

// A canvas of things that are told of by the pointer and opened by a click: `at(event)` is the number of one, -1 of none.
export function picked(element, at, tell, open) {
  element.addEventListener("pointermove", (event) => { const one = at(event); one < 0 ? hideTip() : showTip(tell(one, event), event.clientX, event.clientY); });
  element.addEventListener("pointerleave", hideTip);
  element.addEventListener("click", (event) => { const one = at(event); if (one >= 0) open(one); });
  return element;
}

// One tip for the whole page: an element that has `tip` gives its lines.
const tip = document.getElementById("tip");
export const hideTip = () => { tip.hidden = true; };
export function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line) => h("div", line)));
  Object.assign(tip, { hidden: false }).style.left = 0; // where it is as wide as it wants to be
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 20 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 20}px`;
}
