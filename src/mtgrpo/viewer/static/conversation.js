// A conversation as the policy saw it, with its sampled tokens coloured by what is known of them.
import { go, key, link, name_of, read } from "./app.js";
import { add, file_name, h, hideTip, highest, isNumber, lowest, num, plural, shade, showTip, signed, step_of, took, version_name } from "./dom.js";
import { squares } from "./step.js";

export const FLAGS = ["clipped", "clamped", "rejected", "no advantage", "auxiliary", "not trained"];
const LONG = 1500; // characters of a context that are shown unasked
let by = 0; // by what tokens are coloured

const minus = (one, other) => (isNumber(one) && isNumber(other) ? one - other : null);
// Name, meaning, value of token i, and whether there is a middle (0) to depart from.
export const COLOURS = [
  ["advantage", "what the token was paid", (c, i) => c.advantage?.[i], true],
  ["surprise", "minus the log-probability by which it was sampled, in nats", (c, i) => -c.behaviour[i], false],
  ["ratio before", "trainer against sampler, before the update: log of the ratio", (c, i) => c.before?.[i], true],
  ["ratio after", "log of how much likelier the updates made it", (c, i) => minus((c.after ?? c.last)?.[i], c.before?.[i]), true],
  ["reference", "log of how much likelier it is than to the reference", (c, i) => minus(c.before?.[i], c.reference?.[i]), true],
  ["entropy", "of the distribution it was drawn from, in nats", (c, i) => c.entropy?.[i], false],
  ["version", "updates of the policy that sampled it, as the engine says, from the oldest here", (c, i) => c.version?.[i], false],
  ["mask", "what became of it in the loss", (c, i) => c.flags?.[i], false],
];

// The largest size of what tokens are coloured by, over these conversations; of versions above the least.
export function scale_of(conversations, chosen) {
  const scales = conversations.flatMap((found) => found.tokens?.turns ?? []).map((turn) => (turn.scales ??= [])[chosen] ??= turn.ids.reduce((scale, _, i) => {
    const value = COLOURS[chosen][2](turn.columns, i);
    return isNumber(value) ? { most: Math.max(scale.most, Math.abs(value)), least: Math.min(scale.least, value) } : scale;
  }, { most: 0, least: Infinity }));
  return { most: highest(scales.map((scale) => scale.most), 0), least: lowest(scales.map((scale) => scale.least)) };
}

function class_of(value, chosen, { most, least }) {
  const [name, , , centred] = COLOURS[chosen];
  if (!isNumber(value)) return "";
  if (name === "mask") return `m${[2, 1, 0, 5, 4, 3].find((bit) => value & (1 << bit)) ?? ""}`;
  if (name === "version") return most > least ? shade(value - least + 0.001, most - least + 0.001, "s") : "s1";
  return shade(value, most, centred ? "p" : "s", centred ? "n" : "s");
}

// The sampled tokens of a turn in parts, which end with lines: coloured where they are near what is seen, else as text.
// `first` is the number of the first token in the conversation, `parting` that of the one at which it parts from a sibling.
const PART = 60, AT_ONCE = 600, near = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) if (target.near !== isIntersecting) isIntersecting ? target.show(true) : (target.near = false);
}, { rootMargin: "400px" });
export function tokens_of(turn, scale, first, parting = -1) {
  const pieces = turn.pieces.map((piece) => (piece === "" ? "·" : piece.replaceAll("\n", "⏎\n"))), parts = [];
  for (let start = 0, end = 0; start < pieces.length; start = end) {
    for (end = start + 1; end < pieces.length && (end - start < PART || (end - start < 4 * PART && !pieces[end - 1].endsWith("\n")));) end++;
    parts.push(part_of(turn, pieces.slice(start, end), start, scale, first, parting));
  }
  return parts;
}

function part_of(turn, pieces, start, scale, first, parting) {
  const part = h("div.part"), lines = pieces.join("").trimEnd().split("\n").reduce((sum, line) => sum + Math.ceil(line.length / 110 || 1), 0);
  part.style.containIntrinsicHeight = `auto ${lines}lh`; // about as high as it will be
  part.has = (number) => number >= first + start && number < first + start + pieces.length;
  part.show = (isNear) => {
    part.near = isNear;
    if (!isNear) return part.firstElementChild || !part.firstChild ? part.replaceChildren(pieces.join("")) : null;
    const now = scale(), tokens = document.createDocumentFragment();
    pieces.forEach((piece, i) => {
      const token = tokens.appendChild(document.createElement("span"));
      token.className = `tok ${class_of(COLOURS[by][2](turn.columns, start + i), by, now)}${first + start + i === parting ? " parting" : ""}`;
      token.dataset.i = first + start + i;
      token.textContent = piece;
    });
    part.replaceChildren(tokens);
  };
  part.show(first + start < AT_ONCE);
  near.observe(part);
  return part;
}

// Colours the tokens of `place` anew.
export const repaint = (place) => place.querySelectorAll(".part").forEach((part) => part.show(part.near));

// The numbers of a token, line by line.
function facts_of(turn, i, number) {
  const c = turn.columns, at = (name) => c[name]?.[i], to = (name) => (isNumber(at(name)) ? num(c.behaviour[i] + at(name), 4) : "–");
  const ratio = (difference) => (isNumber(difference) ? `, ratio ${num(Math.exp(difference), 5)}` : "");
  return [
    `token ${number}  ${JSON.stringify(turn.pieces[i])}  id ${turn.ids[i]}, after ${num(turn.known_tokens + turn.context_tokens + i)} others`,
    isNumber(at("advantage")) ? `advantage ${signed(at("advantage"))}   weight ${num(at("weight"))}` : "",
    `sampled with log-probability ${num(c.behaviour[i], 4)}, by version ${at("version")} as the engine says`,
    isNumber(at("before")) ? `trainer before: ${to("before")}${ratio(at("before"))}` : "the trainer did not score it",
    ...["last", "after"].map((name) => isNumber(at(name)) && `${name === "last" ? "at its last update" : name}: ${to(name)}${ratio(minus(at(name), at("before")))}`),
    isNumber(at("reference")) ? `reference: ${to("reference")}` : "",
    ...["entropy", "value"].map((name) => isNumber(at(name)) && `${name} ${num(at(name))}`),
    FLAGS.filter((_, bit) => at("flags") & (1 << bit)).join(", "),
  ].filter(Boolean);
}

// Numbers on hover, of all tokens below `place`; where[i] = [turn, place in it].
export function hover(place, where) {
  place.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".tok");
    if (!token) return hideTip();
    const [turn, i] = where[token.dataset.i];
    showTip(facts_of(turn, i, token.dataset.i), event.clientX, event.clientY);
  });
  place.addEventListener("pointerleave", hideTip);
  return place;
}

export function legend(chosen, { most, least }) {
  const [name, meaning, , centred] = COLOURS[chosen];
  if (name === "mask") return h("p.key", FLAGS.map((flag, bit) => h(`span.tok.m${bit}`, flag)), h("small.muted", meaning));
  if (!most) return h("p.key", h("small.muted", `${meaning}: 0 everywhere, or not recorded`));
  const levels = centred ? [-1, -0.5, -0.2, -0.05, 0, 0.05, 0.2, 0.5, 1] : [0, 0.05, 0.2, 0.5, 1];
  const swatches = levels.map((share) => h(`span.swatch.${shade(share, 1, centred ? "p" : "s") || "none"}`));
  const bounds = name === "version" ? [num(least === Infinity ? null : least), num(most)] : [centred ? signed(-most) : "0", centred ? signed(most) : num(most)];
  return h("p.key", h("span", bounds[0]), swatches, h("span", bounds[1]), h("small.muted", meaning));
}

export function chooser(change, conversations) {
  return h("div.chooser", { role: "group", "aria-label": "colour by" }, COLOURS.map(([name, meaning], i) =>
    h("button", { title: `${meaning} (key ${i + 1})`, disabled: scale_of(conversations, i).least === Infinity, "aria-pressed": String(i === by), onclick: () => { by = i; change(); } }, name)));
}
export const colour_keys = (change) => Object.fromEntries(COLOURS.map((_, i) => [String(i + 1), key(i ? "" : "to 8: colours", () => { by = i; change(); })]));
export const coloured_by = () => by;

// Text that was not sampled: short, or opened by a click.
export function context_of(text, note) {
  const element = h("div.context"), body = h("pre");
  text = text.replace(/^\n/, "⏎\n");
  const cut = (open) => {
    body.textContent = open || text.length <= LONG ? text : `${text.slice(0, LONG * 0.6)}\n … \n${text.slice(-LONG * 0.3)}`;
    more.textContent = open ? "less" : `all ${num(text.length)} characters`;
    more.onclick = () => cut(!open);
  };
  const more = h("button.quiet");
  cut(false);
  add(element, note ? h("div.label", note) : null, body);
  if (text.length > LONG) element.append(more);
  return element;
}

export async function conversation(run, file, line, wanted) {
  const [found, title, list] = await Promise.all([read(`${run}/${file}/${line}`), name_of(run), read(`${run}/${file}/list`)]);
  const { row, facts, siblings, tokens } = found, place = `/r/${run}/${file}`;
  const main = h("article"), aside = h("aside"), where = [];
  let focus = null;
  main.replaceChildren(...(tokens ? turns_of(found, where, step_of(file)) : messages_of(row)));
  const draw = () => {
    const scale = scale_of([found], by);
    [...main.querySelectorAll(".part")].find((part) => part.has(Number(wanted)))?.show(true);
    repaint(main);
    focus = wanted === undefined ? null : main.querySelector(`[data-i="${Number(wanted)}"]`);
    focus?.classList.add("wanted");
    side.replaceChildren(tokens ? h("section", h("h2", "colour by"), chooser(draw, [found]), legend(by, scale)) : h("p.muted", step_of(file) === null ? "tokens are kept of training alone" : "its tokens are not kept: record.tokens.last, every and groups say whose are"));
  };
  const side = h("div"), most = highest(list.rows.map((one) => Math.abs(one.reward ?? 0)), 1e-9);
  const rows = list.rows.filter((one) => siblings.includes(one.line));
  const beside = (by_) => list.rows[Number(line) + by_];
  draw();
  hover(main, where);
  main.addEventListener("click", (event) => {
    const token = event.target.closest(".tok");
    if (token) history.replaceState(null, "", `#${place}/c/${line}/t/${token.dataset.i}`);
  });
  const tools = Array.isArray(row.tools) ? row.tools : [], parts = Object.entries(row.components ?? {}).map(([name, value]) => h("div", `${name} ${num(value)}`));
  add(aside,
    h("section.facts", h("h1", `reward ${num(row.reward)}`), parts, h("div", h(`span.tag${row.status === "failed" ? ".bad" : ""}`, row.status ?? ""), row.reason ? ` ${row.reason}` : ""),
      row.answer ? h("div.clip", { title: String(row.answer) }, `expected ${typeof row.answer === "string" ? row.answer : JSON.stringify(row.answer)}`) : null,
      facts.untrained_because ? h("div", h("span.tag.warn", `left out: ${facts.untrained_because}`)) : null,
      (row.retried ?? []).map((why) => h("div.muted", `tried again after: ${why}`)), (row.outages ?? []).map((why) => h("div.muted", `outage: ${why}`))),
    h("section", h("h2", "siblings"), squares(rows, place, most, Number(line)), h("div", link(`${place}/g/${facts.group}`, "side by side")), h("div", link(`/r/${run}/task/${encodeURIComponent(facts.task)}`, "this task over steps"))),
    side, chains(tokens, row), calls(row), folded(plural(tools.length, "tool"), tools.map((tool) => tool.function ?? tool)),
    folded("the task's metadata", Object.keys(row.metadata ?? {}).length ? [row.metadata] : []));
  return {
    where: [[title, `/curves/${run}`], [file_name(file), place], [facts.task, `${place}/g/${facts.group}`], [`sample ${facts.sample}`]],
    keys: { k: key("before", () => beside(-1) && go(`${place}/c/${beside(-1).line}`)), j: key("next", () => beside(1) && go(`${place}/c/${beside(1).line}`)),
      g: key("group", () => go(`${place}/g/${facts.group}`)), t: key("step", () => go(place)), ...colour_keys(draw) },
    content: [h("div.columns", main, aside)], get focus() { return focus; },
  };
}

function turns_of(found, where, step) {
  const { row, tokens } = found, paid = row.turn_rewards ?? [];
  return tokens.turns.map((turn, number) => {
    const c = turn.columns, first = where.length;
    turn.ids.forEach((_, i) => where.push([turn, i]));
    const about = [`turn ${number + 1}`, plural(turn.ids.length, "token"), version_of(c, step)];
    about.push(...[isNumber(c.advantage?.[0]) && `advantage ${signed(c.advantage[0])}`, isNumber(paid[number]) && `paid ${num(paid[number])}`, c.flags?.[0] & 16 && "beside the conversation"].filter(Boolean));
    const fresh = turn.parent < 0;
    const note = `${fresh ? (number ? "a new context" : "context") : turn.parent === number - 1 ? "then" : `after turn ${turn.parent + 1}`}, ${plural(turn.context_tokens, "token")}, not trained`;
    return h(`section.turn${fresh && number ? ".fresh" : ""}`, { id: `turn${number + 1}` }, context_of(turn.context, note),
      h("div.sampled", h("div.label", about.join(" · ")), h("div.tokens", tokens_of(turn, () => scale_of([found], by), first))));
  });
}

// The version that the engine names, and what the trainer's own computation says of it: by the same weights, or newer ones.
function version_of(c, step) {
  const versions = (c.version ?? []).filter(isNumber), apart = (c.before ?? []).filter(isNumber).map(Math.abs), later = step - 1 - lowest(versions);
  const found = `${version_name(lowest(versions), highest(versions))}${apart.length ? `, at most ${num(highest(apart), 2)} nats from the trainer's` : ""}`;
  return versions.length ? found + (apart.length && later > 0 ? `, ${plural(later, "update")} later` : "") : "";
}

const span_of = ({ tokens }) => (tokens?.length === 2 ? `· tokens ${num(tokens[0])} to ${num(tokens[1])}` : "");

export function messages_of(row) {
  return (row.messages ?? []).map((message) => h(`section.message.${/^\w+$/.test(message.role ?? "") ? message.role : "other"}`, h("div.label", [message.role, message.name, span_of(message)].filter(Boolean).join(" ")),
    message.reasoning ? h("pre.muted", message.reasoning) : null, context_of(message.content ?? "", "").querySelector("pre"),
    (message.tool_calls ?? []).map((call) => h("pre.call", `→ ${call.name}(${JSON.stringify(call.arguments)})`)), message.error ? h("p.error", message.error) : null));
}

// The contexts of a conversation as a tree: what continues what.
function chains(tokens, row) {
  const parents = tokens ? tokens.turns.map((turn) => turn.parent) : (row.turns ?? []).map((turn) => turn.parent ?? -1);
  if (parents.filter((parent) => parent < 0).length < 2) return null;
  const below = (parent, depth) => parents.flatMap((one, i) => (one === parent ? [h("li", { className: `depth${Math.min(depth, 6)}` }, h("button.quiet", { onclick: () => document.getElementById(`turn${i + 1}`)?.scrollIntoView() },
    `${parent < 0 ? "context from " : ""}turn ${i + 1}${tokens && parent < 0 ? ` (${num(tokens.turns[i].context_tokens)} tokens)` : ""}`)), ...below(i, parents.filter((p) => p === one).length > 1 && parent >= 0 ? depth + 1 : Math.max(depth, 1))] : []));
  return h("section", h("h2", "contexts"), h("ul.chains", below(-1, 0)));
}

// What became of its calls, and for what it waited.
const WAITS = { queued_s: "in the queue", sample_s: "for the policy", tool_s: "for tools", condense_s: "to condense" };
function calls(row) {
  const waits = Object.entries(WAITS).filter(([name]) => row.times?.[name]).map(([name, what]) => `${took(row.times[name])} ${what}`);
  const made = (row.calls ?? []).map((call) => h(`li${call.outcome === "answered" || call.outcome === "unseen" ? "" : ".bad"}`,
    [`${call.name || "a call"} ${call.outcome === "unseen" ? "called; what it answered was not seen" : call.outcome}`, isNumber(call.seconds) ? took(call.seconds) : "", call.retries ? `made again ${call.retries} times` : "", call.why].filter(Boolean).join(", ")));
  return made.length || waits.length ? h("section", h("h2", "calls and waiting"), h("ul.chains", made), waits.length ? h("p.muted", `it waited ${waits.join(", ")}`) : null) : null;
}

function folded(title, values) {
  return values.length ? h("details", h("summary", title), h("pre.plain", values.map((value) => JSON.stringify(value, null, 1)).join("\n\n").slice(0, 100000))) : null;
}
