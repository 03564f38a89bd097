// The token forest of a step as an icicle, and the times of its turns.
import { go, key, name_of, read } from "./app.js";
import { canvas, colour, file_name, h, isNumber, num, picked, plural, signed, took, version_name } from "./dom.js";

export async function forest(run, file) {
  const [found, title] = await Promise.all([read(`${run}/${file}/forest`), name_of(run)]);
  const place = `/r/${run}/${file}`, runs = found.depth.length;
  const deepest = found.depth.reduce((most, depth, i) => Math.max(most, depth + found.length[i]), 1);
  const leaves = found.leaf.reduce((most, leaf, i) => Math.max(most, leaf + found.leaves[i]), 1);
  const pushed = found.push.reduce((most, push) => Math.max(most, Math.abs(push ?? 0)), 1e-12);
  const box = (i, width, height) => [(found.depth[i] / deepest) * width, (found.leaf[i] / leaves) * height, (found.length[i] / deepest) * width, (found.leaves[i] / leaves) * height];
  const picture = canvas(Math.max(320, Math.min(1400, leaves * 9)), (context, width, height) => {
    const [good, bad, plain] = ["--good", "--bad", "--context"].map(colour);
    for (let i = 0; i < runs; i++) {
      const [x, y, wide, tall] = box(i, width, height);
      context.fillStyle = plain;
      context.fillRect(x, y, Math.max(0.7, wide - 0.5), Math.max(0.7, tall - 0.5));
      if (!found.sampled[i]) continue;
      context.fillStyle = found.push[i] >= 0 ? good : bad;
      context.globalAlpha = found.push[i] ? 0.2 + 0.8 * Math.sqrt(Math.abs(found.push[i]) / pushed) : 0.12;
      context.fillRect(x, y, Math.max(0.7, wide - 0.5), Math.max(0.7, tall - 0.5));
      context.globalAlpha = 1;
    }
  }, { "aria-label": "the token forest" });
  const at = (event) => {
    const { clientWidth: width, clientHeight: height } = picture;
    for (let i = runs - 1; i >= 0; i--) {
      const [x, y, wide, tall] = box(i, width, height);
      if (event.offsetX >= x && event.offsetX < x + Math.max(wide, 2) && event.offsetY >= y && event.offsetY < y + tall) return i;
    }
    return -1;
  };
  const told = (i) => [`${plural(found.length[i], "token")}, ${found.sampled[i] ? `sampled ${num(found.sampled[i])} times, push ${signed(found.push[i])}` : "not sampled"}; ${plural(found.leaves[i], "leaf").replace("leafs", "leaves")} below`, found.text[i].slice(0, 200)];
  const [rows, nodes] = found.whole;
  return {
    where: [[title, `/curves/${run}`], [file_name(file), place], ["forest"]], keys: { t: key("step", () => go(place)) },
    content: [h("h1", `${num(rows)} tokens in rows, ${num(nodes)} nodes: ${num(rows / Math.max(1, nodes))}×`),
      h("p.muted", `Each distinct token in its context was computed once. Drawn are ${plural(found.conversations, "conversation")} with ${num(found.nodes)} nodes${found.runs > runs ? ` (the first ${num(runs)} of ${num(found.runs)} bars alone)` : ""}, from their first token on the left; a bar is as tall as different conversations go through it. Grey was not sampled; green was made likelier, red less likely. A click opens a conversation.`),
      picked(picture, at, told, (i) => found.line[i] !== undefined && go(`${place}/c/${found.line[i]}`))],
  };
}

// What a lane shows: its name, the colour, and the times of it that a lane has, [from, to, what to say].
const KINDS = [
  ["in the queue", "context", (lane) => (lane.times.queued_s ? [[lane.times.began_s - lane.times.queued_s, lane.times.began_s, `${took(lane.times.queued_s)} in the queue`]] : [])],
  ["the policy's turn", "line0", (lane) => turns_of(lane, false)],
  ["beside the conversation", "line3", (lane) => turns_of(lane, true)],
  ["a tool", "line2", (lane) => calls_of(lane, true)],
  ["a tool, in vain", "line4", (lane) => calls_of(lane, false)],
];
const turns_of = (lane, aside) => lane.turns.map((turn, i) => [turn, i]).filter(([turn]) => Boolean(turn.auxiliary) === aside).map(([turn, i]) =>
  [turn.asked_s, turn.ended_s, `turn ${i + 1}: ${plural(turn.output_tokens, "token")} in ${took(turn.ended_s - turn.asked_s)}, ${version_name(turn.version_min, turn.version_max)}`]);
const calls_of = (lane, good) => lane.calls.filter((call) => isNumber(call.began_s) && (call.outcome === "answered") === good).map((call) =>
  [call.began_s, call.began_s + (call.seconds ?? 0), `${call.name || "a call"} ${call.outcome} in ${took(call.seconds ?? 0)}${call.retries ? `, again ${call.retries} times` : ""}`]);

export async function timeline(run, file) {
  const [found, title, list] = await Promise.all([read(`${run}/${file}/timeline`), name_of(run), read(`${run}/${file}/list`)]);
  const name = (lane) => `${list.rows[lane.line]?.task ?? ""}, sample ${list.rows[lane.line]?.sample ?? lane.line}`;
  const place = `/r/${run}/${file}`, lanes = found.lanes, tall = 12, left = 70, head = 18;
  const where = [[title, `/curves/${run}`], [file_name(file), place], ["timeline"]], keys = { t: key("step", () => go(place)) };
  if (!lanes.length) return { where, keys, content: [h("p.empty", "when its turns were is not known: they were taken back from the journal, or the run is of an older version")] };
  const last = lanes[0].ended_s, bars = lanes.map((lane) => KINDS.map(([, , of]) => of(lane)));
  const used = KINDS.filter((_, kind) => bars.some((lane) => lane[kind].length));
  const picture = canvas(head + lanes.length * tall, (context, width, height) => {
    const x = (seconds) => left + (seconds / last) * (width - left - 8);
    const text = colour("--muted"), tint = new Map([...KINDS.map((kind) => kind[1]), "line1"].map((name) => [name, colour(`--${name}`)]));
    context.font = "11px system-ui";
    const fill = (kind, [from, to], y, high) => { context.fillStyle = tint.get(kind); context.fillRect(x(from), y, Math.max(1.5, x(to) - x(from) - 0.5), high); };
    lanes.forEach((lane, i) => {
      const y = head + i * tall, began = lane.times.began_s ?? lane.turns[0].asked_s;
      context.fillStyle = text;
      context.fillRect(x(began), y + tall / 2, x(lane.ended_s) - x(began), 0.5);
      if (i % 2 === 0) context.fillText(name(lane).replace(", sample ", ":").split("/").slice(-2).join("/").slice(-11), 0, y + 10);
      bars[i].forEach((times, kind) => times.forEach((bar) => fill(KINDS[kind][1], bar, y + 2, tall - 4)));
    });
    for (const push of found.pushes) fill("line1", [push.began_s, push.ended_s], head, lanes.length * tall);
    context.fillStyle = text;
    for (let i = 0; i <= 4; i++) context.fillText(`${num((last * i) / 4, 2)} s`, Math.min(width - 40, x((last * i) / 4)), 10);
  }, { "aria-label": "timeline" });
  const told = (i, event) => {
    const lane = lanes[i], scale = last / (picture.clientWidth - left - 8), seconds = (event.offsetX - left) * scale;
    const pushed = found.pushes.map((push) => [push.began_s, push.ended_s, `version ${push.version} of the weights came in ${took(push.ended_s - push.began_s)}`]);
    const said = [...bars[i].flat(), ...pushed].filter(([from, to]) => seconds >= from - scale && seconds <= to + scale).map((bar) => bar[2]);
    return [`${name(lane)}: ${plural(lane.turns.length, "turn")}, ended after ${num(lane.ended_s)} s`, ...(said.length ? said : ["between: the environment, or condensing"])];
  };
  const at = (event) => lanes.findIndex((_, i) => event.offsetY >= head + i * tall && event.offsetY < head + (i + 1) * tall);
  const legend = [...used, ...(found.pushes.length ? [["new weights come", "line1"]] : [])].map(([what, colour]) => h("li", h(`i.${colour}`), what));
  return { where, keys,
    content: [h("h1", `${num(last)} s from the first conversation to the last`), h("p.muted", `A lane for each conversation, the slowest first${found.count > lanes.length ? `: ${num(lanes.length)} of ${num(found.count)}` : ""}. The thin line is what comes between: the environment, or condensing. A click opens it.`), h("ul.legend", legend), picked(picture, at, told, (i) => go(`${place}/c/${lanes[i].line}`))] };
}
