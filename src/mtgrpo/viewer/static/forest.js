// The token forest of a step as an icicle, and the times of its turns.
import { go, hideTip, key, name_of, read, showTip } from "./app.js";
import { canvas, colour, file_name, h, num, plural, signed } from "./dom.js";

export async function forest(run, file) {
  const [found, title] = await Promise.all([read(`${run}/${file}/forest`), name_of(run)]);
  const place = `/r/${run}/${file}`, runs = found.depth.length;
  const deepest = found.depth.reduce((most, depth, i) => Math.max(most, depth + found.length[i]), 1);
  const leaves = found.leaf.reduce((most, leaf, i) => Math.max(most, leaf + found.leaves[i]), 1);
  const pushed = found.push.reduce((most, push) => Math.max(most, Math.abs(push ?? 0)), 1e-12);
  const box = (i, width, height) => [(found.depth[i] / deepest) * width, (found.leaf[i] / leaves) * height, (found.length[i] / deepest) * width, (found.leaves[i] / leaves) * height];
  const picture = canvas(Math.max(320, Math.min(1400, leaves * 9)), (context, width, height) => {
    const [good, bad, plain, rule] = ["--good", "--bad", "--context", "--back"].map(colour);
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
    context.strokeStyle = rule;
  }, { "aria-label": "the token forest" });
  const at = (event) => {
    const { clientWidth: width, clientHeight: height } = picture;
    for (let i = runs - 1; i >= 0; i--) {
      const [x, y, wide, tall] = box(i, width, height);
      if (event.offsetX >= x && event.offsetX < x + Math.max(wide, 2) && event.offsetY >= y && event.offsetY < y + tall) return i;
    }
    return -1;
  };
  picture.addEventListener("pointermove", (event) => {
    const i = at(event);
    if (i < 0) return hideTip();
    showTip([`${plural(found.length[i], "token")}, ${found.sampled[i] ? `sampled ${num(found.sampled[i])} times, push ${signed(found.push[i])}` : "not sampled"}; ${plural(found.leaves[i], "leaf").replace("leafs", "leaves")} below`, found.text[i].slice(0, 200)], event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", hideTip);
  picture.addEventListener("click", (event) => { const i = at(event); if (i >= 0 && found.line[i] !== undefined) go(`${place}/c/${found.line[i]}`); });
  const [rows, nodes] = found.whole;
  return {
    where: [[title, `/curves/${run}`], [file_name(file), place], ["forest"]], keys: { t: key("step", () => go(place)) },
    content: [h("h1", `${num(rows)} tokens in rows, ${num(nodes)} nodes: ${num(rows / Math.max(1, nodes))}×`),
      h("p.muted", `Each distinct token in its context was computed once. Drawn are ${plural(found.conversations, "conversation")} with ${num(found.nodes)} nodes, from their first token on the left; a bar is as tall as many rows share it. Grey was not sampled; green is made likelier, red less likely. A click opens a conversation.`),
      picture],
  };
}

export async function timeline(run, file) {
  const [found, title, list] = await Promise.all([read(`${run}/${file}/timeline`), name_of(run), read(`${run}/${file}/list`)]);
  const name = (lane) => `${list.rows[lane.line]?.task ?? ""}, sample ${list.rows[lane.line]?.sample ?? lane.line}`;
  const place = `/r/${run}/${file}`, end = (lane) => lane.turns.reduce((most, turn) => Math.max(most, turn[1]), 0);
  const lanes = found.lanes.filter((lane) => end(lane) > 0).sort((a, b) => end(b) - end(a));
  const last = lanes.length ? end(lanes[0]) : 1, tall = 12, left = 70;
  if (!lanes.length) return { where: [[title, `/curves/${run}`], [file_name(file), place], ["timeline"]], content: [h("p.empty", "when its turns were is not known: they were taken back from the journal")] };
  const picture = canvas(lanes.length * tall + 24, (context, width, height) => {
    const x = (seconds) => left + (seconds / last) * (width - left - 8);
    const [decode, aside, wait, text] = ["--accent", "--aside", "--rule", "--muted"].map(colour);
    context.font = "11px system-ui";
    lanes.forEach((lane, i) => {
      const y = i * tall;
      context.fillStyle = wait;
      context.fillRect(x(lane.turns[0][0]), y + tall / 2 - 1, x(end(lane)) - x(lane.turns[0][0]), 2);
      context.fillStyle = text;
      if (i % 2 === 0) context.fillText(name(lane).replace(", sample ", ":").slice(-11), 0, y + 10);
      for (const [asked, ended, , , flags] of lane.turns) {
        context.fillStyle = flags & 16 ? aside : decode;
        context.fillRect(x(asked), y + 2, Math.max(1.5, x(ended) - x(asked) - 0.5), tall - 4);
      }
    });
    context.fillStyle = text;
    for (let i = 0; i <= 4; i++) context.fillText(`${num((last * i) / 4, 2)} s`, Math.min(width - 40, x((last * i) / 4)), height - 6);
  }, { "aria-label": "timeline" });
  const at = (event) => lanes[Math.floor(event.offsetY / tall)];
  picture.addEventListener("pointermove", (event) => {
    const lane = at(event), seconds = ((event.offsetX - left) / (picture.clientWidth - left - 8)) * last;
    if (!lane) return hideTip();
    const number = lane.turns.findIndex((turn) => seconds >= turn[0] && seconds <= turn[1]), turn = lane.turns[number];
    showTip([`${name(lane)}: ${plural(lane.turns.length, "turn")}, ended after ${num(end(lane))} s`, turn ? `turn ${number + 1}: ${plural(turn[2], "token")} in ${num(turn[1] - turn[0])} s, version ${turn[3]}` : "a tool, the environment or a queue"], event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", hideTip);
  picture.addEventListener("click", (event) => { const lane = at(event); if (lane) go(`${place}/c/${lane.line}`); });
  return {
    where: [[title, `/curves/${run}`], [file_name(file), place], ["timeline"]], keys: { t: key("step", () => go(place)) },
    content: [h("h1", `${num(last)} s from the first turn to the last`), h("p.muted", "A lane for each recorded conversation, the slowest first: bars are turns that the policy was asked for, lines what lies between them (tools, the environment, a queue)."), picture],
  };
}
