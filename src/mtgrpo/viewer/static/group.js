// The siblings of a task beside one another, and where each parts from the one that it is compared with.
import { go, key, link, name_of, read } from "./app.js";
import { file_name, h, highest, num, plural } from "./dom.js";
import { chooser, colour_keys, coloured_by, context_of, hover, legend, messages_of, scale_of, tokens_of } from "./conversation.js";
import { groups_of, squares } from "./step.js";

const MOST = 32; // siblings beside one another; the squares lead to the others

export async function group(run, file, number) {
  const [list, title] = await Promise.all([read(`${run}/${file}/list`), name_of(run)]);
  const all = groups_of(list.rows), place = `/r/${run}/${file}`, at = all.findIndex((one) => one.number === Number(number));
  if (at < 0) throw new Error(`${file} has no group ${number}`);
  const one = all[at], most = highest(list.rows.map((row) => Math.abs(row.reward ?? 0)), 1e-9);
  const loaded = await Promise.all(one.siblings.slice(0, MOST).map((row) => read(`${run}/${file}/${row.line}`)));
  const columns = h("div.siblings"), top = h("div");
  let base = 0; // the sibling that the others are compared with
  const draw = () => {
    const scale = scale_of(loaded, coloured_by()), prompt = loaded[0]?.tokens?.turns[0]?.context;
    top.replaceChildren(loaded.some((found) => found.tokens) ? h("div.row", chooser(draw, loaded), legend(coloured_by(), scale)) : h("p.muted", "the tokens of this group are not kept: record.tokens.groups says of how many groups of a step they are"),
      prompt ? h("details", { open: top.querySelector("details")?.open }, h("summary", loaded[0].facts.asked || "the prompt"), context_of(prompt, "the prompt that they share, not trained")) : "");
    columns.replaceChildren(...loaded.map((found, i) => column(found, i, prompt)));
  };
  const column = (found, i, prompt) => {
    const where = [], parting = i === base ? -1 : parts_at(found.tokens, loaded[base].tokens), facts = found.facts;
    const body = found.tokens ? found.tokens.turns.map((turn, t) => {
      const first = where.length;
      turn.ids.forEach((_, k) => where.push([turn, k]));
      return [t === 0 && turn.context === prompt ? null : context_of(turn.context, turn.parent < 0 && t ? "a new context" : ""), h("div.tokens", tokens_of(turn, () => scale_of(loaded, coloured_by()), first, parting))];
    }) : messages_of(found.row).slice(1);
    return h(`section.panel${i === base ? ".base" : ""}`, h("header", link(`${place}/c/${facts.line}`, h("b", `sample ${facts.sample}`)), h("span", `reward ${num(facts.reward)}`),
      facts.status === "completed" ? null : h("span.tag.bad", [facts.status, facts.reason].filter(Boolean).join(": ")),
      i === base ? h("span.muted", "the others are compared with it") : h("button.quiet", { title: "compare the others with this one", onclick: () => { base = i; draw(); } }, parting < 0 ? "the same tokens" : `parts at token ${parting}`)),
      hover(h("div", body), where));
  };
  draw();
  const beside = (by) => all[at + by] && go(`${place}/g/${all[at + by].number}`);
  return {
    where: [[title, `/curves/${run}`], [file_name(file), place], [one.task]],
    keys: { k: key("before", () => beside(-1)), j: key("next", () => beside(1)), t: key("step", () => go(place)), ...colour_keys(draw) },
    content: [h("div.row", h("h1", one.task), squares(one.siblings, place, most), h("p.muted", `${plural(one.siblings.length, "sibling")}, mean reward ${num(one.mean)}`), link(`/r/${run}/task/${encodeURIComponent(one.task)}`, "over steps")),
      one.why ? h("p", h("span.tag.warn", `left out of training: ${one.why}`)) : "", top, columns],
  };
}

// The number of the first sampled token that differs from the other's, or follows a context that does; -1: none.
export function parts_at(mine, other) {
  let number = 0;
  if (!mine || !other) return -1;
  for (let t = 0; t < mine.turns.length; t++) {
    const turn = mine.turns[t], twin = other.turns[t];
    if (!twin || turn.context !== twin.context || turn.parent !== twin.parent) return number;
    for (let i = 0; i < turn.ids.length; i++, number++) if (turn.ids[i] !== twin.ids[i]) return number;
    if (turn.ids.length !== twin.ids.length) return number - 1;
  }
  return -1;
}
