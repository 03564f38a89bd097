// The groups of a step or of an evaluation; one task over steps.
import { go, key, link, name_of, read } from "./app.js";
import { file_name, h, highest, isNumber, lowest, num, plural, shade, signed, step_of, sum } from "./dom.js";

const PER_PAGE = 100;
let sorting = "order", search = "", only = "";

const SORTS = {
  order: () => 0,
  spread: (group) => -group.spread,
  "ratio − 1": (group) => -group.apart,
  troubles: (group) => -sum(group.troubles.map(([often]) => often)),
  tokens: (group) => -group.tokens,
  "reward, lowest": (group) => group.mean,
};

// What the siblings of a task have in common.
export function groups_of(rows) {
  const by = new Map();
  for (const row of rows) by.has(row.group) ? by.get(row.group).push(row) : by.set(row.group, [row]);
  return [...by].map(([number, siblings]) => {
    const rewards = siblings.filter((row) => row.status !== "failed").map((row) => row.reward).filter(isNumber);
    const count = (what) => siblings.filter(what).length;
    const troubles = [
      [count((row) => row.status === "failed"), "failed"], [count((row) => row.status === "truncated"), "truncated"],
      [sum(siblings.map((row) => row.retried)), "retried"], [sum(siblings.map((row) => row.outages)), "outages"],
      [sum(siblings.map((row) => row.unreadable)), "unreadable calls"], [sum(siblings.map((row) => row.errors)), "tool errors"],
    ].filter(([often]) => often);
    const range = (name) => {
      const known = siblings.map((row) => row[name]).filter(Boolean);
      return known.length ? [lowest(known.map((r) => r[0])), highest(known.map((r) => r[1]))] : null;
    };
    const apart = range("apart");
    return {
      number, siblings, rewards, troubles, advantage: range("advantage"), task: siblings[0].task, asked: siblings[0].asked,
      mean: rewards.length ? sum(rewards) / rewards.length : Number.NaN,
      spread: rewards.length ? highest(rewards) - lowest(rewards) : 0,
      apart: apart ? highest(apart.map((difference) => Math.abs(Math.exp(difference) - 1))) : 0,
      recorded: siblings.some((row) => row.recorded), clipped: sum(siblings.map((row) => row.clipped ?? 0)),
      tokens: sum(siblings.map((row) => row.tokens)), turns: sum(siblings.map((row) => row.turns)) / siblings.length,
      why: siblings[0].untrained_because,
    };
  });
}

// How much rewards go with another number of conversations, from -1 to 1.
function goes_with(rows, name, of = (row) => row.reward) {
  const pairs = rows.filter((row) => row.status !== "failed" && isNumber(of(row))).map((row) => [of(row), row[name]]);
  const [x, y] = [0, 1].map((side) => { const mean = sum(pairs.map((pair) => pair[side])) / pairs.length; return pairs.map((pair) => pair[side] - mean); });
  const size = Math.sqrt(sum(x.map((value) => value * value)) * sum(y.map((value) => value * value)));
  return size ? signed(sum(x.map((value, i) => value * y[i])) / size, 2) : "–";
}

// A square for each sibling, as full as its reward is high among those of the step.
export function squares(rows, place, most, here) {
  return h("span.squares", rows.map((row) => h(`a.square${row.status === "failed" ? ".failed" : ""}${row.line === here ? ".here" : ""}.${shade(row.reward, most) || "zero"}`, {
    href: `#${place}/c/${row.line}`, title: `sample ${row.sample}: reward ${num(row.reward)}, ${row.status}${row.reason ? `, ${row.reason}` : ""}`,
    "aria-label": `sample ${row.sample}, reward ${num(row.reward)}`,
  })));
}

export async function step(run, file) {
  const [found, index, title] = await Promise.all([read(`${run}/${file}/list`), read(`${run}/index`), name_of(run)]);
  const place = `/r/${run}/${file}`, all = groups_of(found.rows);
  const most = highest(found.rows.map((row) => Math.abs(row.reward ?? 0)), 1e-9);
  const files = index.files.map((one) => one.name).filter((one) => (step_of(one) === null) === (step_of(file) === null));
  const beside = (by) => files[files.indexOf(file) + by];
  const body = h("tbody"), more = h("p.muted");
  let shown = PER_PAGE;
  const draw = () => {
    const text = search.toLowerCase();
    const fits = (group) => (!text || group.siblings.some((row) => `${row.task} ${row.asked} ${row.said} ${row.reason}`.toLowerCase().includes(text)))
      && (!only || { mixed: group.spread > 0, "all equal": group.spread === 0, troubled: group.troubles.length > 0, "left out": Boolean(group.why), "with tokens": group.recorded }[only]);
    const picked = all.filter(fits).map((group, i) => [SORTS[sorting](group), i, group]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map((triple) => triple[2]);
    body.replaceChildren(...picked.slice(0, shown).map((group) => line(group, place, most)));
    more.replaceChildren(...(picked.length > shown ? [h("button", { onclick: () => { shown += PER_PAGE; draw(); } }, `show more of ${picked.length}`)] : [picked.length ? "" : "no group is like that"]));
  };
  const pick = (options, value, label, set) => h("select", { "aria-label": label, onchange: (event) => { set(event.target.value); draw(); } },
    options.map(([text, one]) => h("option", { value: one, selected: one === value }, text)));
  draw();
  const rewards = found.rows.map((row) => row.reward).filter(isNumber), parts = Object.keys(found.rows[0]?.components ?? {});
  const number = step_of(file), has = index.recorded.includes(number);
  return {
    where: [[title, `/curves/${run}`], [file_name(file)]],
    keys: { k: key("before", () => beside(-1) && go(`/r/${run}/${beside(-1)}`)), j: key("next", () => beside(1) && go(`/r/${run}/${beside(1)}`)),
      g: key("first group", () => all.length && go(`${place}/g/${all[0].number}`)), "/": key("search", () => {}) },
    content: [
      h("div.row", h("h1", file_name(file)), h("p.muted", `${plural(all.length, "group")}, ${plural(found.rows.length, "conversation")}, mean reward ${num(sum(rewards) / Math.max(1, rewards.length))}`),
        h("p.muted", { title: "over all conversations here, from −1 to 1" }, `correlation of the reward with tokens ${goes_with(found.rows, "tokens")}, turns ${goes_with(found.rows, "turns")}, tool errors ${goes_with(found.rows, "errors")}${parts.map((part) => `; ${part} with tokens ${goes_with(found.rows, "tokens", (row) => row.components?.[part])}`).join("")}`),
        link(`${place}/timeline`, "timeline"), has ? link(`${place}/forest`, "forest") : h("span.muted", step_of(file) === null ? "" : "its tokens are not kept: record.tokens.last and every say whose are")),
      h("div.row", h("input", { type: "search", placeholder: "search tasks and answers", value: search, "aria-label": "search", oninput: (event) => { search = event.target.value; draw(); } }),
        h("label", "sort by ", pick(Object.keys(SORTS).map((name) => [name, name]), sorting, "sort by", (value) => { sorting = value; })),
        h("label", "show ", pick([["all", ""], ...["mixed", "all equal", "troubled", "left out", "with tokens"].map((name) => [name, name])], only, "show", (value) => { only = value; }))),
      h("div.scroll", { tabIndex: 0 }, h("table.hover", h("thead", h("tr", h("th", "task"), h("th", "rewards"), ["mean", "advantage", "turns", "tokens", "|ratio − 1|"].map((name) => h("th.num", name)), h("th", "remarks"))), body)), more,
    ],
  };
}

function line(group, place, most) {
  const marks = group.troubles.map(([often, what]) => h("span.tag.bad", `${often} ${often === 1 ? what.replace(/s$/, "") : what}`));
  if (group.why) marks.unshift(h("span.tag.warn", `left out: ${group.why}`));
  if (group.clipped) marks.push(h("span.tag", `${group.clipped} clipped`));
  return h("tr",
    h("td.task", link(`${place}/g/${group.number}`, h("b", group.task)), h("div.muted.clip", { title: group.asked }, group.asked)),
    h("td", squares(group.siblings, place, most)), h("td.num", { "data-name": "mean" }, num(group.mean)),
    h("td.num", { "data-name": "advantage" }, group.advantage?.some(Boolean) ? `${signed(group.advantage[0], 2)} … ${signed(group.advantage[1], 2)}` : h("span.muted", group.recorded ? "0" : "–")),
    h("td.num", { "data-name": "turns" }, num(group.turns)), h("td.num", { "data-name": "tokens" }, num(group.tokens)), h("td.num", { "data-name": "|ratio − 1|" }, group.apart > 1 ? h("span.tag.bad", num(group.apart, 2)) : group.apart ? num(group.apart, 2) : "–"), h("td", marks));
}

// One task in all files that have it: the rewards, and the answers of two of its conversations beside one another.
export async function task(run, name) {
  const [index, title] = await Promise.all([read(`${run}/index`), name_of(run)]);
  const number = index.tasks.indexOf(name);
  const found = index.files.flatMap((file) => {
    const lines = file.tasks.flatMap((one, line) => (one === number ? [line] : []));
    return lines.length ? [{ file: file.name, lines, rewards: lines.map((line) => file.rewards[line]) }] : [];
  });
  const most = highest(index.files.flatMap((file) => file.rewards.map((reward) => Math.abs(reward ?? 0))), 1e-9);
  const choices = found.flatMap((one) => one.lines.map((line, i) => [`${file_name(one.file)}, sample ${i}: reward ${num(one.rewards[i])}`, `${one.file}/${line}`]));
  const sides = [choices[0], choices.at(-1)].map((choice) => choice?.[1]);
  const both = h("div.sides");
  const draw = async () => {
    const texts = await Promise.all(sides.filter(Boolean).map(async (side) => said((await read(`${run}/${side}`)).row)));
    if (texts.length === 2) both.replaceChildren(...difference(texts[0], texts[1]).map((parts, i) => h("div.panel", picker(i), h("pre.said", parts.map(([text, own]) => (own ? h("mark", text) : text))))));
  };
  const picker = (i) => h("select", { "aria-label": `conversation ${i + 1}`, onchange: (event) => { sides[i] = event.target.value; draw(); } },
    choices.map(([text, value]) => h("option", { value, selected: value === sides[i] }, text)));
  await draw();
  return {
    where: [[title, `/curves/${run}`], [name]],
    content: [h("h1", name), found.length ? null : h("p.empty", "no conversation is about this task"),
      h("table.hover", h("thead", h("tr", h("th", "when"), h("th", "rewards"), h("th.num", "mean"))), h("tbody", found.map((one) => h("tr", h("td", link(`/r/${run}/${one.file}`, file_name(one.file))),
        h("td", squares(one.lines.map((line, i) => ({ line, sample: i, reward: one.rewards[i], status: "" })), `/r/${run}/${one.file}`, most)),
        h("td.num", num(sum(one.rewards.filter(isNumber)) / Math.max(1, one.rewards.filter(isNumber).length))))))),
      h("h2", "what was said; marked: in one of the two alone"), both].filter(Boolean),
  };
}

// What the policy said, message by message.
const said = (row) => (row.messages ?? []).filter((message) => message.role === "assistant" || message.role === "tool")
  .map((message) => [message.role === "tool" && "the tool:", message.reasoning, message.content, ...(message.tool_calls ?? []).map((call) => `→ ${call.name}(${JSON.stringify(call.arguments)})`)].filter(Boolean).join("\n")).join("\n\n");

// Two texts as pieces, [text, whether the other has it not], by their longest common sequence of words.
export function difference(one, other) {
  const [a, b] = [one, other].map((text) => text.slice(0, 20000).split(/(?<=\s)/).slice(0, 1500));
  const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  const left = [], right = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { left.push([a[i++], false]); right.push([b[j++], false]); }
    else if (j >= b.length || (i < a.length && best[i + 1][j] >= best[i][j + 1])) left.push([a[i++], true]);
    else right.push([b[j++], true]);
  }
  return [left, right];
}
