// The runs, and the curves of some of them.
import { go, key, link, read } from "./app.js";
import { ago, canvas, colour, file_name, h, isNumber, num, percent, plural, spark, step_of } from "./dom.js";

const RENEWS_MS = 3000;
const FIRST = ["reward/mean", "eval/success", "policy/entropy", "policy/grad_norm", "policy/clip_fraction", "policy/kl",
  "policy/mismatch/kl", "batch/shared", "rollout/turns", "rollout/sampled_tokens", "rollout/truncated", "rollout/failed"];
const chosen = new Set();
let wanted = ""; // what the names of curves must contain

export async function runs() {
  const found = await read("runs");
  const compare = h("button", { onclick: () => go(`/curves/${[...chosen].sort((a, b) => a - b).join(",")}`) });
  const renew = () => Object.assign(compare, { disabled: chosen.size < 1, textContent: chosen.size > 1 ? `compare ${chosen.size} runs` : "curves of the chosen run" });
  renew();
  const success = (estimate) => (estimate ? h("span", { title: "held-out success with its 95 % interval" }, percent(estimate[0]),
    h("small", ` ${(100 * estimate[1]).toFixed(0)}–${(100 * estimate[2]).toFixed(0)}`)) : h("span.muted", "–"));
  const rows = found.map((run, number) => h("tr",
    h("td", h("input", { type: "checkbox", checked: chosen.has(number), "aria-label": `choose ${run.name}`,
      onchange: (event) => { event.target.checked ? chosen.add(number) : chosen.delete(number); renew(); } })),
    h("td.run", link(`/curves/${number}`, h("b", run.name)), h("div.muted", [run.recipe, run.algorithm, run.model].filter(Boolean).join(" · "))),
    h("td", h("span", run.steps ? `${num(run.step)} of ${num(run.steps)}` : num(run.step)),
      h("progress", { max: Math.max(1, run.steps || run.step), value: run.step, "aria-label": "steps" })),
    h("td.num", { "data-name": "success before" }, success(run.before)), h("td.num", { "data-name": "after" }, success(run.after)),
    h("td", spark(run.rewards)),
    h("td", run.ended ? h("span.tag.good", "ended") : h("span.tag", `wrote ${ago(Date.now() / 1000 - run.written)}`)),
    h("td.notes", run.notes ? link(`/curves/${number}`, run.warnings ? h("span.tag.warn", plural(run.warnings, "warning")) : "", plural(run.notes, "note")) : "none", run.newest.map((note) => h("div", { title: note }, noted(note, number)))),
  ));
  const head = ["choose", "run", "step", "success before", "after", "reward", "state", "notes"];
  return {
    where: [["runs"]], keys: {}, renews: found.every((run) => run.ended) ? 0 : RENEWS_MS,
    content: [h("div.row", h("h1", plural(found.length, "run")), compare), ...meanings(found),
      h("div.scroll", { tabIndex: 0 }, h("table.hover", h("thead", h("tr", head.map((name, i) => h(i === 3 || i === 4 ? "th.num" : "th", name)))), h("tbody", rows)))],
  };
}

// What a success is, once for all runs where it is the same.
const meanings = (found) => [...new Set(found.map((run) => run.success))].map((meaning, _, all) => h("p.muted", all.length > 1 ? `${found.filter((run) => run.success === meaning).map((run) => run.name).join(", ")}: ` : "", meaning));
// A note, linked to the place that it points to, or to its step.
function noted(note, number) {
  const [, step] = note.match(/^step (\d+):/) ?? [], [, place] = note.match(/ --at ([\w/]+)$/) ?? [null, step && `step_${step.padStart(6, "0")}`];
  return place ? link(`/r/${number}/${place}`, note.replace(/; see mtgrpo view .*/, "")) : note;
}

export async function curves(list) {
  const numbers = list.split(",").map(Number);
  const [found, indexes] = await Promise.all(["metrics", "index"].map((what) => Promise.all(numbers.map((number) => read(`${number}/${what}`)))));
  const names = [...new Set(found.flatMap((run) => Object.keys(run.columns)))].sort();
  const charts = h("div.charts"), drawn = [];
  const search = h("input", { type: "search", placeholder: `one of ${names.length} metrics`, value: wanted, "aria-label": "search metrics",
    oninput: (event) => { wanted = event.target.value; draw(); } });
  const draw = () => {
    drawn.splice(0).forEach((plot) => plot.destroy());
    const picked = wanted ? names.filter((name) => name.includes(wanted)).slice(0, 40) : FIRST.filter((name) => names.includes(name));
    charts.replaceChildren(...picked.map((name) => h("figure", h("figcaption", name), h("div"))));
    picked.forEach((name, i) => drawn.push(plot(name, found, numbers, charts.children[i].lastChild)));
  };
  const single = found.length === 1;
  return {
    where: [[single ? found[0].name : `${found.length} runs`]], renews: found.every((run) => run.ended) || wanted ? 0 : 2 * RENEWS_MS,
    keys: single ? { g: key("newest groups", () => newest(indexes[0]) && go(`/r/${numbers[0]}/${newest(indexes[0])}`)) } : {},
    ready: draw,
    content: [
      h("div.row", h("h1", single ? found[0].name : "curves"), search, h("p.muted", "a click on a curve opens that step")), ...meanings(found),
      single ? null : h("ul.legend", found.map((run, i) => h("li", h(`i.line${i % 6}`), run.name))),
      charts,
      ...found.map((run, i) => about(run, indexes[i], numbers[i], single)),
      single ? null : differing(found),
    ].filter(Boolean),
  };
}

const newest = (index) => index.files.filter((file) => step_of(file.name)).at(-1)?.name;

// The curves of one metric, which share their cursor with the others.
function plot(name, found, numbers, place) {
  const steps = [...new Set(found.flatMap((run) => run.steps))].filter(isNumber).sort((a, b) => a - b);
  const column = (run) => steps.map((step) => run.columns[name]?.[run.steps.indexOf(step)] ?? null);
  const series = found.map((run, i) => ({ label: found.length > 1 ? run.name : name, stroke: colour(`--line${i % 6}`), width: 2, spanGaps: true,
    points: { show: steps.length < 30 || name.startsWith("eval/") }, value: (_, value) => num(value, 4) }));
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const chart = new uPlot({
    width: Math.max(240, place.clientWidth), height: 190, series: [{ label: "step", value: (_, value) => num(value) }, ...series],
    axes: [{ ...axis, size: 30 }, { ...axis, size: 56, values: (_, values) => values.map((value) => num(value)) }],
    scales: { x: { time: false }, y: { range: (_, low, high) => (low === null || low === high ? [Math.min(0, low ?? 0), (high ?? 0) + 1] : uPlot.rangeNum(low, high, 0.1, true)) } }, cursor: { sync: { key: "curves" }, points: { size: 7 } }, legend: { live: true },
  }, [steps, ...found.map(column)], place);
  chart.over.addEventListener("click", () => {
    const at = steps[chart.cursor.idx];
    if (isNumber(at)) go(`/r/${numbers[0]}/${at ? `step_${String(at).padStart(6, "0")}` : "evaluation_before"}`);
  });
  new ResizeObserver(() => chart.setSize({ width: Math.max(240, place.clientWidth), height: 190 })).observe(place);
  return chart;
}

// The rest of what is known of a run.
function about(run, index, number, open) {
  const [steps, others] = [true, false].map((is) => index.files.filter((file) => Boolean(step_of(file.name)) === is));
  const recorded = new Set(index.recorded);
  const item = (file) => link(`/r/${number}/${file.name}`, file_name(file.name), recorded.has(step_of(file.name)) ? h("i.dot", { title: "its tokens are kept" }) : "");
  return h("details.about", { open }, h("summary", run.name),
    steps.length ? h("section", h("h2", "rewards, step by step"), histogram(steps, number)) : null,
    h("section", h("h2", "conversations"), h("p.files", others.map(item), steps.slice(-60).map(item))),
    run.notes.length ? h("section", h("h2", "notes"), h("pre.plain", run.notes.slice(-40).map((note) => [noted(note, number), "\n"]))) : null,
    h("section", h("h2", "made with"), h("pre.plain", [run.overrides.join(" ") || "the defaults", Object.entries(run.versions).map((pair) => pair.join(" ")).join(", ")].join("\n"))),
  );
}

// How many conversations had which reward, step by step; darker is more.
function histogram(files, number) {
  const values = files.flatMap((file) => file.rewards).filter(isNumber);
  const low = values.reduce((a, b) => Math.min(a, b), 0), high = values.reduce((a, b) => Math.max(a, b), 1), bins = 12;
  const counts = files.map((file) => {
    const row = new Array(bins).fill(0);
    for (const value of file.rewards) if (isNumber(value)) row[Math.min(bins - 1, Math.floor(((value - low) / (high - low)) * bins))] += 1;
    return row.map((count) => count / Math.max(1, file.rewards.length));
  });
  const left = 44;
  return canvas(150, (context, width, height) => {
    const wide = (width - left) / files.length, tall = (height - 20) / bins;
    context.fillStyle = colour("--accent");
    counts.forEach((row, x) => row.forEach((share, y) => {
      context.globalAlpha = Math.sqrt(share);
      context.fillRect(left + x * wide, (bins - 1 - y) * tall, Math.max(1, wide - 1), tall - 1);
    }));
    context.globalAlpha = 1;
    context.fillStyle = colour("--muted");
    context.font = "12px system-ui";
    context.fillText(num(high), 0, 12);
    context.fillText(num(low), 0, height - 22);
    context.fillText(file_name(files[0].name), left, height - 4);
    context.fillText(file_name(files.at(-1).name), Math.max(left, width - 60), height - 4);
  }, {
    "aria-label": "rewards by step", title: "a click opens the step",
    onclick: (event) => go(`/r/${number}/${files[Math.max(0, Math.min(files.length - 1, Math.floor(((event.offsetX - left) / (event.target.clientWidth - left)) * files.length)))].name}`),
  });
}

// The settings in which runs differ.
function differing(found) {
  const names = [...new Set(found.flatMap((run) => Object.keys(run.settings)))].filter((name) => new Set(found.map((run) => run.settings[name])).size > 1);
  if (!names.length) return h("p.muted", "their settings are the same");
  return h("section", h("h2", "where their settings differ"), h("div.scroll", { tabIndex: 0 }, h("table",
    h("thead", h("tr", h("th", "setting"), found.map((run) => h("th", run.name)))),
    h("tbody", names.slice(0, 60).map((name) => h("tr", h("td", h("code", name)), found.map((run) => h("td", h("code", run.settings[name] ?? "–")))))))));
}
