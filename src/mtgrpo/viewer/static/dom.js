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

export function svg(tag, attributes, ...inside) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...inside);
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
export const isNumber = (value) => typeof value === "number";

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

export function spark(values, width = 120, height = 28) {
  const known = values.filter(isNumber);
  if (known.length < 2) return h("span.muted", known.length ? num(known[0]) : "–");
  const low = Math.min(...known), span = Math.max(...known) - low || 1;
  const place = (value, i) => `${(2 + (i * (width - 4)) / (known.length - 1)).toFixed(1)},${(height - 3 - ((value - low) / span) * (height - 6)).toFixed(1)}`;
  const line = svg("polyline", { points: known.map(place).join(" "), class: "spark" });
  const title = svg("title", {}, `${num(known[0])} to ${num(known.at(-1))}`);
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, title, line);
}

// The colour that a CSS variable has now, for what is drawn on a canvas.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const step_of = (file) => (file.startsWith("step_") ? Number(file.slice(5)) : null);
export const file_name = (file) => (step_of(file) === null ? file.replaceAll("_", " ") : `step ${step_of(file)}`);

// A canvas of this size in points, drawn by `draw(context, width, height)` now and whenever its width changes.
export function canvas(height, draw, attributes = {}) {
  const element = h("canvas.wide", { role: "img", ...attributes });
  const paint = () => {
    const width = element.clientWidth;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    element.width = width * scale;
    element.height = height * scale;
    element.style.height = `${height}px`;
    const context = element.getContext("2d");
    context.scale(scale, scale);
    draw(context, width, height);
  };
  new ResizeObserver(paint).observe(element);
  return element;
}
