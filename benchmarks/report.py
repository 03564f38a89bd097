"""Writes the tables of BENCHMARKS.md and README.md from benchmarks/results: `make bench-report`.

A table stands between `<!-- NAME -->` and `<!-- end -->`; a test compares both files with the results. A line after it
says which of its results are older than the code that they measure, as it was when the files were written.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from age import age
from record import RESULTS

ROOT = Path(__file__).resolve().parent.parent
FILES = (ROOT / "BENCHMARKS.md", ROOT / "README.md")
SOURCES: list[str] = []  # the results that the last table was made of
LABELS = {"2m": "2.2 M", "30m": "30 M"}
FOREST = {
    "A": "A: 4 groups of 8, prompt 256, completions 30-250",
    "B": "B: 1 group of 8, prompt 1,024, completions 80-120",
    "C": "C: 2 conversations of 10 turns, history only grows",
    "D": "D: 8 conversations of 10 turns, condensed at each",
}
WORKLOADS = {
    "multi_turn": "4 groups of 8, prompt 250, 1-3 turns with a tool",
    "single_turn": "64 requests, a shared prefix of 256",
}
CASES = {
    "2m_280": "2.2 M, prompts of 280, up to 3 turns",
    "2m_1000": "2.2 M, prompts of 1,000, up to 3 turns",
    "30m_280": "30 M, prompts of 280, up to 3 turns",
    "2m_turns": "2.2 M, prompts of 200, up to 9 turns",
}

PLANS = {
    "memory.1.7b_full_gb": "Qwen3-1.7B, all weights",
    "memory.8b_lora_32k_gb": "Qwen3-8B, LoRA of rank 16",
    "memory.8b_nf4_gb": "Qwen3-8B, LoRA of rank 16 over NF4",
    "memory.8b_full_offload_gb": "Qwen3-8B, all weights, optimiser on the host",
}
SHARING = {
    "one": "one process, one thread",
    "one_2_threads": "one process, two threads",
    "ddp": "`ddp`",
    "fsdp2_whole": "`fsdp2`, `reshard=false`",
    "fsdp2_resharded": "`fsdp2`, `reshard=true`",
}
OUTAGES = {
    "never": "no attempt fails",
    "anew": "the conversation is run again, then left out",
    "told": "the model gets an error message",
    "fail": "4 more attempts, then the conversation again (the default)",
    "observe": "4 more attempts, then an error message",
}


def read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ratios and detail of one benchmark."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    SOURCES.append(name)
    return found["ratios"], found["detail"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def forest() -> str:
    """Training on the token forest against padded and packed rows."""
    _, detail = read("forest")

    def cell(side: dict[str, Any]) -> str:
        memory = f", {side['peak_mb']:,} MB" if side["peak_mb"] >= 0 else ""
        return f"{side['ms']:,.0f} ms{memory}"

    rows: list[list[str]] = []
    for size in LABELS:
        for name, by in detail[size].items():
            sides = [cell(by[side]) for side in ("merged_padded", "per_turn_packed", "forest")]
            rows.append([FOREST[name], LABELS[size], *sides, f"{by['per_turn_packed']['fraction']:.0%}"])
    return table(["batch", "model", "padded rows", "packed rows, one per turn", "forest", "of the ideal"], rows)


def condensation() -> str:
    """Per-turn rows against the forest where the context is condensed at every turn."""
    _, detail = read("condensation")
    rows: list[list[str]] = []
    for case in detail["cases"].values():
        added = detail["summary"] + detail["sampled"] + detail["observed"]
        times = [f"{statistics.median(case['ms'][side]):,.0f} ms" for side in ("per_turn_packed", "forest")]
        speedup = "{:.2f} ({:.2f}-{:.2f})".format(case["speedup"], *case["quartiles"])
        batch = f"{case['siblings']} x {case['turns']} turns"
        ratios = [f"{case['tokens']:.2f}", f"{case['ideal']:.2f}", speedup, f"{case['fraction']:.0%}"]
        rows.append([batch, f"{case['prompt'] / added:g}", *times, *ratios])
    head = ["batch", "p / s", "packed rows, one per turn", "forest", "tokens", "operations", "time", "of the ideal"]
    return table(head, rows)


def rollout() -> str:
    """Sampling against vLLM and transformers."""
    _, detail = read("rollout")
    sides = ("engine", "vllm", "vllm_tuned", "generate", "continuous_batching")
    rows: list[list[str]] = []
    for size, label in LABELS.items():
        for name, workload in WORKLOADS.items():
            speeds = detail[size][name]["tokens_per_s"]
            rows.append([workload, label, *(f"{statistics.median(speeds[side]):,.0f}" for side in sides)])
    names = ["this engine", "vLLM 0.32", "vLLM, tuned by hand", "`generate` per turn", "continuous batching"]
    return table(["workload", "model", *names], rows)


def versus_trl() -> str:
    """Whole steps against TRL."""
    ratios, detail = read("versus_trl")

    def cell(side: dict[str, Any] | None) -> str:
        if side is None:
            return ""
        return f"{side['seconds']:.2f} s ({side['rollout_s']:.2f} + {side['train_s']:.2f})"

    rows: list[list[str]] = []
    for name, label in CASES.items():
        by = detail[name]
        keys = (f"versus_trl.{name}", f"versus_trl.{name}_best")
        times = [f"{ratios[key]:.1f}" for key in keys if key in ratios]
        memory = " / ".join(
            f"{by[side]['memory_bytes'] / 2**20:,.0f}" for side in ("ours", "trl", "trl_best") if side in by
        )
        rows.append([label, *(cell(by.get(side)) for side in ("ours", "trl", "trl_best")), " / ".join(times), memory])
    head = ["model and tasks", "mtgrpo", "TRL", "TRL at its best", "TRL / mtgrpo", "MiB, mtgrpo / TRL / best"]
    return table(head, rows)


def versus_trl_135m() -> str:
    """Whole steps of a real model against TRL."""
    ratios, cases = read("versus_trl_135m")
    rows: list[list[str]] = []
    for name, detail in ((name, found) for name, found in cases.items() if isinstance(found, dict)):
        against = {"trl": f"versus_trl.{name}", "trl_best": f"versus_trl.{name}_best"}
        sides = {"ours": "mtgrpo", "trl": "TRL", "trl_best": f"TRL, {detail['rows']} rows a micro-batch"}
        for side, label in sides.items():
            by = detail[side]
            times = [f"{by[part]:.1f} s" for part in ("seconds", "rollout_s", "train_s")]
            ratio = f"{ratios[against[side]]:.1f}" if side in against else ""
            memory = f"{by['peak_bytes'] / 2**30:.1f} GiB"
            rows.append([f"{detail['prompt_tokens']:.0f}", label, *times, ratio, memory, str(len(by["every_step_s"]))])
    return table(["prompt", "", "a step", "rollouts", "training", "of ours", "peak memory", "steps"], rows)


def smollm2() -> str:
    """Held-out success of a real model before and after every arm, and the curves."""
    _, detail = read("smollm2")

    def cell(found: dict[str, Any] | None) -> str:
        if found is None:
            return ""
        low, high = found["interval"]
        return f"{found['success']:.3f} ({low:.2f}-{high:.2f})"

    rows: list[list[str]] = []
    for recipe, seeds in detail["recipes"].items():
        for seed, arms in seeds.items():
            points = f"{arms['grpo']['gain']['points']:+.0f}"
            length = f"{arms['grpo']['steps']} steps, {arms['grpo']['seconds'] / 60:.0f} min"
            others = [cell(arms.get(arm)) for arm in ("shuffled", "own", "lora")]
            rows.append([f"`{recipe}`", seed, cell(arms["before"]), cell(arms["grpo"]), points, length, *others])
    head = ["recipe", "seed", "before", "GRPO", "points", "in", "advantages shuffled", "own successes imitated", "LoRA"]
    return f"![success over steps](docs/smollm2.png)\n\n{table(head, rows)}"


def search() -> str:
    """Held-out success of the recipe that learns to search, and of its controls; gains in points."""
    _, detail = read("search")

    def cell(arm: dict[str, Any], prefix: str = "") -> str:
        _, low, high = arm[f"{prefix}gain"]
        return f"{arm[f'{prefix}before']:.3f} to {arm[f'{prefix}after']:.3f} ({low:+.0f} to {high:+.0f})"

    rows: list[list[str]] = []
    for seed, arms in detail["seeds"].items():
        by = arms["grpo"]
        greedy, searched = f"{by['greedy_before']:.2f} to {by['greedy_after']:.2f}", by["searched"]
        others = [cell(by, "no_tools_"), cell(arms["shuffled"]), cell(arms["no_tools"])]
        minutes = f"{arms['warm_start_s'] / 60:.0f} + {by['seconds'] / 60:.0f}"
        rows.append([seed, cell(by), greedy, f"{searched[0]:.2f} to {searched[-1]:.2f}", *others, minutes])
    tools = ["conversations that search", "the same policy without its tool"]
    controls = ["advantages shuffled", "trained without the tool"]
    return table(["seed", "GRPO", "greedy", *tools, *controls, "minutes, warm start + GRPO"], rows)


def learning() -> str:
    """Both trainers on the embedded default."""
    _, detail = read("versus_trl_learning")
    rows: list[list[str]] = []
    for seed, by in detail["seeds"].items():
        cells = [seed]
        for side in ("ours", "trl"):
            reached = by[side]["seconds_to_goal"]
            cells.append("not reached" if reached is None else f"{reached:.0f} s")
        cells += [f"{statistics.mean(by[side]['reward'][-10:]):.3f}" for side in ("ours", "trl")]
        rows.append(cells)
    head = ["seed", "to 0.85, mtgrpo", "to 0.85, TRL", "last 10 rewards, mtgrpo", "last 10 rewards, TRL"]
    return table(head, rows)


def smolgrpo() -> str:
    """The first lesson of courses: time and reward of both trainers."""
    ratios, detail = read("smolgrpo")
    size = detail["steps"] // len(detail["ours"]["parts"])
    rows: list[list[str]] = []
    for side, label in {"ours": "mtgrpo", "trl": "TRL"}.items():
        by = detail[side]
        times = [f"{by[part]:.1f} s" for part in ("seconds", "rollout_s", "train_s")]
        rows.append([label, *times, f"{by['minutes']:.1f}", *(f"{reward:.0f}" for reward in by["parts"])])
    starts = [1 + size * part for part in range(len(detail["ours"]["parts"]))]
    head = ["", "a step", "rollouts", "training", "minutes", *(f"reward from step {start}" for start in starts)]
    said = f"A step of TRL's takes {ratios['smolgrpo.seconds_ratio']:.1f} times as long as ours.\n"
    return f"{table(head, rows)}\n{said}"


def agent_rl() -> str:
    """Every algorithm on every small task, and which of them differ."""
    ratios, detail = read("table")

    def cell(found: dict[str, Any]) -> str:
        return f"{found['mean']:.3f} ± {found['half_interval']:.3f}"

    tasks = detail["before"]
    rows = [["before training", *(f"{success:.3f}" for success in tasks.values()), ""]]
    for name, found in detail["algorithms"].items():
        rows.append([f"`{name}`", *(cell(found["tasks"][task]) for task in tasks), cell(found["overall"])])
    spread, differ, count = detail["spread"], detail["differ"], detail["pairs"]
    named = "; ".join(f"{pair['better']} over {pair['worse']} by {cell(pair)}" for pair in differ[:3])
    said = (
        f"Best and worst, {spread['better']} and {spread['worse']}, differ by {cell(spread)} in the mean over tasks; "
        f"{len(differ)} of {count} pairs do by more than their interval{f' ({named})' if named else ''}. "
        f"By chance alone about {0.05 * count:.0f} would, with {ratios['table.seeds']} seeds.\n"
    )
    return f"{table(['algorithm', *(f'`{task}`' for task in tasks), 'mean'], rows)}\n{said}"


def headline() -> str:
    """The ratios that matter when choosing a trainer."""
    ratios: dict[str, float] = {}
    for name in ("versus_trl", "versus_trl_135m", "versus_trl_learning", "rollout", "forest"):
        if (RESULTS / f"{name}.json").exists():
            ratios |= read(name)[0]
    rows = (
        ("a whole training step, prompts of 280 / 1,000 tokens", "TRL", ("versus_trl.2m_280", "versus_trl.2m_1000")),
        ("the same, TRL at its best", "TRL", ("versus_trl.2m_280_best", "versus_trl.2m_1000_best")),
        ("the same, SmolLM2-135M-Instruct", "TRL / TRL at its best", ("versus_trl.135m", "versus_trl.135m_best")),
        (
            "the same with four worked examples in the prompt",
            "TRL / TRL at its best",
            ("versus_trl.135m_4_shot", "versus_trl.135m_4_shot_best"),
        ),
        ("time to 85 % success on the demo's task", "TRL, 8 rows per micro-batch", ("versus_trl.time_to_085",)),
        ("rollouts of several turns, 2 M / 30 M", "vLLM", tuple(f"rollout.multi_turn_vs_vllm.{s}" for s in LABELS)),
        ("the same, 2 M / 30 M", "vLLM tuned by hand", tuple(f"rollout.multi_turn_vs_vllm_tuned.{s}" for s in LABELS)),
        ("forward and backward, prompts of 256 / 1,024 tokens", "padded rows", ("forest.A", "forest.B")),
        ("the same", "padded rows at their best", ("forest.A_best", "forest.B_best")),
    )
    measured = [row for row in rows if all(name in ratios for name in row[2])]
    cells = [(what, rival, " / ".join(f"{ratios[name]:.1f}x" for name in names)) for what, rival, names in measured]
    return table(["what", "against", "faster"], cells)


def staleness() -> str:
    """Rollouts ahead of the trainer with slow tools."""
    _, detail = read("async")
    rows: list[list[str]] = []
    for k, runs in detail["runs"].items():
        reached = [run["seconds_to_goal"] for run in runs]
        times = ", ".join("not reached" if seconds is None else f"{seconds:.0f}" for seconds in reached)
        old = statistics.mean(run["token_staleness"] for run in runs)
        success = ", ".join(f"{run['success_after']:.3f}" for run in runs)
        rows.append([k, times, f"{old:.2f}", success])
    return table(["max_staleness", "seconds to 0.85, by seed", "updates a token is old", "held-out success"], rows)


def overlap() -> str:
    """Conversations whose tools take log-normal times."""
    ratios, detail = read("overlap")
    median = {name: statistics.median(values) for name, values in detail["seconds"].items()}
    rows = [
        ["all conversations, slow tools", f"{median['everything']:.2f} s"],
        ["the same tokens, tools that take no time", f"{median['decoding']:.2f} s"],
        ["the longest conversation by itself", f"{median['longest']:.2f} s"],
        ["a turn at a time for all, at least", f"{detail['lockstep_s']:.2f} s"],
        ["all / the larger of the two bounds", f"{ratios['rollout.tool_overlap']:.2f}"],
    ]
    return table(["what", "measured"], rows)


def arms(group: str, label: str) -> str:
    """Held-out success and tool use of every arm of benchmarks/algorithms.py, by seed."""
    _, detail = read(group)
    rows: list[list[str]] = []
    for name, runs in detail["runs"].items():
        success = ", ".join(f"{run['before']:.3f} -> {run['after']:.3f}" for run in runs)
        tools = ", ".join(f"{run['tool_rate_before']:.2f} -> {run['tool_rate_after']:.2f}" for run in runs)
        rows.append([name, success, tools])
    return table([label, "held-out success, by seed", "conversations with a tool call"], rows)


def algorithms() -> str:
    """Every algorithm with its defaults."""
    return arms("algorithms", "algorithm")


def advantages() -> str:
    """Rewards for turns against the outcome alone."""
    return arms("advantages", "rewards")


def corrections() -> str:
    """What the ratio compares with, four updates behind."""
    return arms("stale", "rollout.max_staleness=4 with")


def ledger() -> str:
    """Conversations that the window does not hold."""
    _, detail = read("ledger")
    rows: list[list[str]] = []
    for name, runs in detail["runs"].items():
        success = ", ".join(f"{run['before']:.2f} -> {run['after']:.2f}" for run in runs)
        contexts = statistics.mean(run["segments"] for run in runs)
        cut = statistics.mean(run["truncated"] for run in runs)
        rows.append([f"`condenser={name}`", success, f"{contexts:.1f}", f"{cut:.0%}"])
    head = ["", "held-out success by seed, before and after GRPO", "contexts a conversation", "cut by the window"]
    return table(head, rows)


def unseen() -> str:
    """The recipes from scratch, on seeds that nothing was calibrated on."""
    _, detail = read("unseen")
    rows: list[list[str]] = []
    for arm, by in detail["runs"].items():
        after = {seed: found["after"] for seed, found in by.items()}
        reached = sum(success >= detail["goals"][arm] for success in after.values())
        runs = ", ".join(f"{found['before']:.2f} -> {found['after']:.2f}" for found in by.values())
        worst = min(after, key=lambda seed: after[seed])
        goal = f"{detail['goals'][arm]:.2f}"
        rows.append([f"`{arm}`", runs, goal, f"{reached} of {len(after)}", f"{after[worst]:.3f} (seed {worst})"])
    head = ["recipe", "held-out success by seed, before and after GRPO", "goal", "reached by", "worst"]
    return table(head, rows)


def outages() -> str:
    """A frozen policy with a calculator that fails."""
    _, detail = read("outages")
    rows: list[list[str]] = []
    for name, run in detail["runs"].items():
        arm, _, rate = name.partition(".")
        cells = ["{:.3f} ({:.3f}-{:.3f})".format(*run[measure]) for measure in ("tool_rate", "turns", "success")]
        push = "{:.3f} ({:.3f}-{:.3f})".format(*run["push"])
        rows.append([f"{float(rate or 0):.0%}", OUTAGES[arm], *cells, push, f"{run['failed']:.1%}"])
    head = ["attempts that fail", "what happens then", "call", "turns", "success", "calling and reward", "left out"]
    return table(head, rows)


def outages_learned() -> str:
    """Training with a calculator that fails."""
    _, detail = read("outages")
    rows = [
        [OUTAGES[arm], ", ".join(f"{success:.3f}" for success in found), f"{statistics.mean(found):.3f}"]
        for arm, found in detail["learned"].items()
    ]
    return table(["what happens then", "held-out success, by seed", "mean"], rows)


def memory() -> str:
    """Planned for one GPU, by phase."""
    _, detail = read("memory")
    rows: list[list[str]] = []
    for name, plan in detail["plans"].items():
        phases = [f"{gb:.1f}" for gb in plan["peak_gb"].values()]
        cache = next(row for row in plan["rows"] if row.startswith("KV cache")).removeprefix("KV cache, ")
        layers = "twice" if plan["checkpointing"] else "once"
        rows.append([PLANS[name], f"{plan['device_gb']:.0f}", *phases, f"{plan['token_budget']:,}", layers, cache])
    return table(
        ["", "GPU, GB", "sampling", "training", "update", "token budget", "layers are computed", "KV cache"], rows
    )


def memory_small() -> str:
    """Planned and measured on a CPU."""
    _, detail = read("memory")
    rows = [
        [name, f"{row['planned'] / 1e6:,.0f}", f"{row['measured'] / 1e6:,.0f}", f"{row['error']:+.1%}"]
        for name, row in detail["small"].items()
    ]
    return table(["", "planned, MB", "measured, MB", ""], rows)


def server() -> str:
    """vLLM over HTTP against the same vLLM asked in Python."""
    ratios, detail = read("server")
    rows: list[list[str]] = []
    for size, name in LABELS.items():
        found = detail[size]
        took = {side: statistics.median(seconds) for side, seconds in found["seconds"].items()}
        rates = [f"{found['tokens'] / took[side]:,.0f}" for side in ("http", "in_process")]
        beside = [f"{found['beside'][f'tokens_per_s_{when}']:,.0f}" for when in ("alone", "while_training")]
        rows.append([name, *rates, f"{ratios[f'server.http_overhead.{size}']:.1%}", *beside])
    head = ["model", "over HTTP", "in Python", "overhead", "without end, alone", "while a thread trains"]
    return table(head, rows)


def decode_step() -> str:
    """What a decoding step asks of the host."""
    ratios, detail = read("decode_step")
    rows = [[name, f"{sum(counts.values())}"] for name, counts in detail["kernels"].items()]
    step, queue = (f"{ratios[name]:.1f}" for name in ("decode.step_ms", "decode.queue_ms"))
    rows += [["processor time, ms", step], [f"the same with {detail['waiting']} requests waiting, ms more", queue]]
    return table(["28 layers, four conversations", "kernels"], rows)


def shares() -> str:
    """How evenly ranks share a batch, and the order of passes that they have in common."""
    _, detail = read("parallel")
    names = ("max_over_mean", "max_over_bound", "passes")
    rows = [[ranks, *(f"{worst[name]:.3f}" for name in names)] for ranks, worst in detail["shares"].items()]
    return table(["ranks", "cost, most / mean", "cost, most / lower bound", "passes, common / most"], rows)


def sharing() -> str:
    """Updates of two ranks against those of one process, and how far whole runs are apart."""
    _, detail = read("parallel")
    rows: list[list[str]] = []
    for side, label in SHARING.items():
        found = detail["updates"][side]
        apart = [f"{max(distances.values()):.0e}" for distances in detail["apart"].get(side, {}).values()]
        sent = f"{found['sent_bytes'] / 1e6:.1f}"
        seconds = [f"{found[name]:.2f} s" for name in ("wall_s", "processor_s")]
        shares = [f"{max(found[name], 0):.0%}" for name in ("waiting", "uneven")]
        rows.append([label, *seconds, *shares, sent, " / ".join(apart)])
    head = ["", "an update", "processor time", "waiting", "uneven", "MB sent by each rank", "apart, 2 / 3 ranks"]
    return table(head, rows)


def scaling() -> str:
    """Seconds of a step as modelled, and which share of the time the controller's core is busy."""
    _, detail = read("scaling")
    rows: list[list[str]] = []
    for count, found in detail["devices"].items():
        cells = [f"{of['step_s']:.2f} s, {of['controller']:.0%}" for of in found.values()]
        rows.append([f"{int(count):,}", *cells])
    return table(["devices", *(f"staleness {s}" for s in detail["devices"]["8"])], rows)


def gpu() -> str:
    """The figures of one GPU, or why there are none."""
    rows: list[list[str]] = []
    for benchmark in ("gpu_first", "gpu_learn"):
        ratios, detail = read(benchmark)
        rows += [
            [f"`{name}`", detail.get("reason", "not known") if v is None else f"{v:.3g}"] for name, v in ratios.items()
        ]
    return table(["figure", "one H200"], rows)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        forest,
        condensation,
        rollout,
        versus_trl,
        versus_trl_135m,
        smollm2,
        search,
        smolgrpo,
        learning,
        headline,
        staleness,
        overlap,
        algorithms,
        agent_rl,
        advantages,
        corrections,
        ledger,
        unseen,
        outages,
        outages_learned,
        memory,
        memory_small,
        server,
        decode_step,
        shares,
        sharing,
        scaling,
        gpu,
    )
}


def filled(text: str) -> str:
    """`text` with its tables rewritten."""

    def replace(match: re.Match[str]) -> str:
        try:
            written = TABLES[match[1]]()
        except FileNotFoundError:
            written = "Not measured yet.\n"
        return f"<!-- {match[1]} -->\n{written}<!-- end -->"

    return re.sub(rf"<!-- ({'|'.join(TABLES)}) -->\n.*?<!-- end -->", replace, text, flags=re.DOTALL)


def dated(text: str) -> str:
    """`text` with a line after each table whose results are older than their code."""

    def replace(match: re.Match[str]) -> str:
        SOURCES.clear()
        with suppress(FileNotFoundError):
            TABLES[match[1]]()
        ages = {name: age(RESULTS / f"{name}.json") for name in dict.fromkeys(SOURCES)}
        said = "; ".join(f"{name} {old}" for name, old in ages.items() if old)
        return match[2] + (f"\n_Older than the code: {said}._" if said else "")

    names = "|".join(TABLES)
    return re.sub(rf"(?s)(?=<!-- ({names}) -->)(.*?<!-- end -->)(\n_Older than [^\n]*_)?", replace, text)


def main() -> None:
    """Rewrite both files."""
    for file in FILES:
        file.write_text(dated(filled(file.read_text())))


if __name__ == "__main__":
    main()
