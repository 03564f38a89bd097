"""What sharing prefixes saves in training: forward and backward of one batch, laid out in four ways.

Every side computes the same loss and gradient (checked) from the same turns with the same weights:

    per_turn_padded   one padded row per turn, with its whole context
    merged_padded     one padded row per conversation, the way of TRL's synchronous trainer, with TRL's own fused head
    per_turn_packed   the per-turn rows without padding, each attending only to itself
    forest            every distinct token once

    A   4 groups of 8 siblings, prompt 256, completions of 30-250 tokens
    B   1 group of 8 siblings, prompt 1,024, completions of 80-120 tokens
    C   history that only grows: 10 turns, prompt 500, 75 tokens sampled and 175 observed in each
    D   context condensed at every turn to prompt 500, summary 100, observation 175; 75 sampled

"ideal" is the ratio of floating-point operations, "fraction" is how much of it is reached. Packed rows and the forest
are computed in a process that begins as the command does, padded rows in another with threads of their own choice.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import record  # before torch
import torch
from gate import serve
from sides import RIVAL, Side
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.batch.forest import Batch, Forest, build_batch, build_forest
from mtgrpo.batch.packing import Cost, Packing, pack
from mtgrpo.model import tiny
from mtgrpo.model.scorer import Scorer, flops_of
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

TASK = Task("benchmark", (Message("user", "?"),))
TOKEN_BUDGET = 16_384
PADDED_ROWS = 8  # per micro-batch where one micro-batch of all rows would not fit the memory: C and D
SIDES = ("per_turn_padded", "merged_padded", "per_turn_packed", "forest")
Step = Callable[[], float]  # forward and backward; returns the loss


@dataclass(frozen=True)
class Scenario:
    """Conversations of random tokens."""

    groups: int
    siblings: int
    prompt: int
    sampled: tuple[int, int]  # per turn, from-to
    turns: int = 1
    observed: int = 0  # between turns
    summary: int = 0  # in each context, when it is condensed at every turn
    padded_rows: int = 0  # rows per micro-batch of the padded sides; 0 = all

    def play(self, vocabulary: int) -> list[Trajectory]:
        """The same conversations whenever it is called."""
        rng = random.Random(11)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(10, vocabulary - 20) for _ in range(count)]

        found: list[Trajectory] = []
        for _ in range(self.groups):
            prompt = tokens(self.prompt)
            for _ in range(self.siblings):
                trajectory = Trajectory(TASK, reward=rng.gauss(0, 1))
                for number in range(self.turns):
                    output = tokens(rng.randint(*self.sampled))
                    extends = number > 0 and not self.summary
                    new = tokens(self.observed if number else 0) if extends or not number else []
                    if not extends:
                        new = prompt + (tokens(self.summary + self.observed) if self.summary else [])
                    logprobs = [-1.0] * len(output)
                    versions = [0] * len(output)
                    turn = Turn(
                        new,
                        output,
                        logprobs,
                        versions,
                        Finish.STOP,
                        Message("assistant"),
                        number - 1 if extends else -1,
                    )
                    trajectory.turns.append(turn)
                found.append(trajectory)
        return found


def scenarios(size: str, quick: bool) -> dict[str, Scenario]:
    """The four shapes; smaller where they would take too long."""
    small = size == "30m" or quick
    turns = 5 if small else 10
    return {
        "A": Scenario(1 if quick else 4, 8, 256, (30, 250)),
        "B": Scenario(1, 8, 1024, (80, 120)),
        "C": Scenario(1, 2, 500, (75, 75), turns, observed=175, padded_rows=PADDED_ROWS),
        "D": Scenario(1, 2 if small else 8, 500, (75, 75), turns, observed=175, summary=100, padded_rows=PADDED_ROWS),
    }


@dataclass(frozen=True)
class Operations:
    """The operations of a side, by counting."""

    tokens: int
    flops: float  # forward and backward, in a causal layout; recomputation does not count


def work(cost: Cost, lengths: Sequence[int], reads: int) -> Operations:
    """Of rows of these lengths (padding included) from which `reads` distributions are read."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return Operations(sum(lengths), 3 * (cost.token * sum(lengths) + cost.pair * pairs + cost.read * reads))


class Sides:
    """The steps of all sides for one scenario and model size."""

    def __init__(self, size: str, scenario: Scenario, token_budget: int) -> None:
        self._shape = tiny.SHAPES[f"tiny-{size}"]
        self.trajectories = scenario.play(self._shape.vocabulary)
        self.token_budget = token_budget
        self.padded_rows = scenario.padded_rows
        self.model = record.load(f"tiny-{size}")
        self.cost = flops_of(self.model)
        self._rival: PreTrainedModel | None = None
        self.turns = [
            (t.context(i), turn.output, t.reward) for t in self.trajectories for i, turn in enumerate(t.turns)
        ]
        self.sampled = sum(len(output) for _, output, _ in self.turns)

    @property
    def rival(self) -> PreTrainedModel:
        """The same weights, with plain attention and TRL's head."""
        if self._rival is None:
            from trl.trainer.utils import add_fused_lm_head  # noqa: PLC0415  (slow, and only these sides need it)

            self._rival = tiny.build_model(self._shape, 0).eval()
            self._rival.set_attn_implementation("sdpa")
            add_fused_lm_head(self._rival, outputs=("log_probs", "entropy"))
        return self._rival

    def step(self, side: str) -> Step:
        """Forward and backward of the whole batch, once."""
        if side == "forest":
            return lambda: self._packed(build_batch(self.trajectories))
        if side == "per_turn_packed":
            return lambda: self._packed(unshared(self.turns))
        return lambda: self._padded(self.rows(side))

    def rows(self, side: str) -> list[tuple[list[int], list[bool], float]]:
        """Token rows with a mask of what was sampled, and the reward of each."""
        if side == "per_turn_padded":
            return [
                (context + output, [False] * len(context) + [True] * len(output), r)
                for context, output, r in self.turns
            ]
        found: list[tuple[list[int], list[bool], float]] = []
        for trajectory in self.trajectories:
            for turn in trajectory.turns:
                if turn.parent < 0:
                    found.append(([], [], trajectory.reward))
                found[-1][0].extend([*turn.new_context, *turn.output])
                found[-1][1].extend([False] * len(turn.new_context) + [True] * len(turn.output))
        return found

    def work(self, side: str) -> Operations:
        """The operations of `side`."""
        if side == "forest":
            packing = self._pack(build_batch(self.trajectories))
            micros = packing.micro_batches
            return Operations(packing.computed, 3 * sum(micro.cost for micro in micros))
        if side == "per_turn_packed":
            return work(self.cost, [len(context) + len(output) - 1 for context, output, _ in self.turns], self.sampled)
        rows = self.rows(side)
        width = max(len(tokens) for tokens, _, _ in rows)
        return work(self.cost, [width] * len(rows), self.sampled)

    def _pack(self, batch: Batch) -> Packing:
        return pack(batch, torch.arange(len(batch)), self.token_budget, self.cost)[0]

    def _packed(self, batch: Batch) -> float:
        rewards = torch.tensor([t.reward for t in self.trajectories])[batch.trajectory]
        total = 0.0
        for micro in self._pack(batch).micro_batches:
            scores = Scorer(self.model)(micro, 1.0)
            loss = -(scores.logp[micro.target] * rewards[micro.entries]).sum() / self.sampled
            loss.backward()
            total += loss.item()
        return total

    def _padded(self, rows: list[tuple[list[int], list[bool], float]]) -> float:
        width = max(len(tokens) for tokens, _, _ in rows)
        size = self.padded_rows or len(rows)
        total = 0.0
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            ids = torch.zeros(len(part), width, dtype=torch.long)
            attended, sampled = ids.clone(), ids.bool()
            for i, (tokens, mask, _) in enumerate(part):
                ids[i, : len(tokens)] = torch.tensor(tokens)
                attended[i, : len(tokens)] = 1
                sampled[i, : len(tokens)] = torch.tensor(mask)
            labels = ids.masked_fill(~sampled, -100)
            found = self.rival(input_ids=ids, attention_mask=attended, labels=labels, fused_lm_head=True)
            rewards = torch.tensor([reward for _, _, reward in part])[:, None]
            loss = -(found.log_probs.masked_fill(~sampled[:, 1:], 0) * rewards).sum() / self.sampled
            loss.backward()
            total += loss.item()
        return total


def unshared(turns: Sequence[tuple[list[int], list[int], float]]) -> Batch:
    """A batch in which every turn is a tree of its own: packed rows."""
    rewards = list(dict.fromkeys(reward for _, _, reward in turns))
    parts = [build_forest([context + output]) for context, output, _ in turns]
    starts = torch.tensor([0, *(len(forest) for forest, _ in parts)]).cumsum(0).tolist()
    forest = Forest(
        token=torch.cat([f.token for f, _ in parts]),
        parent=torch.cat(
            [torch.where(f.parent < 0, -1, f.parent + s) for (f, _), s in zip(parts, starts[:-1], strict=True)]
        ),
        depth=torch.cat([f.depth for f, _ in parts]),
        subtree_end=torch.cat([f.subtree_end + s for (f, _), s in zip(parts, starts[:-1], strict=True)]),
    )
    node = [torch.arange(s + len(c), s + len(c) + len(o)) for (c, o, _), s in zip(turns, starts[:-1], strict=True)]
    counts = torch.tensor([len(output) for _, output, _ in turns])
    label = torch.tensor([rewards.index(reward) for _, _, reward in turns]).repeat_interleave(counts)
    logp = torch.zeros(int(counts.sum()), dtype=torch.float64)
    zeros = torch.zeros_like(label)
    return Batch(forest, torch.cat(node), logp, trajectory=label, turn=zeros, segment=label, version=zeros)


def gradient(model: PreTrainedModel) -> Tensor:
    """All gradients in one vector; clears them."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return flat


def check(size: str) -> None:
    """All sides have one gradient; this also warms up."""
    agree(Sides(size, Scenario(2, 3, 40, (10, 20), 3, observed=10), TOKEN_BUDGET), SIDES)


def agree(sides: Sides, names: Sequence[str]) -> None:
    """Asserts that these sides have one gradient."""
    found: list[Tensor] = []
    for side in names:
        sides.step(side)()
        found.append(gradient(sides.rival if side.endswith("padded") else sides.model))
    for side, flat in zip(names, found, strict=True):
        error = ((flat - found[0]).norm() / found[0].norm()).item()
        assert error < 1e-4, f"{side}: its gradient differs by {error}"


def timed(sides: Sides, names: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each side, alternating."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            step, model = sides.step(name), sides.rival if name.endswith("padded") else sides.model
            began = time.perf_counter()
            step()
            found[name].append((time.perf_counter() - began) * 1000)
            model.zero_grad(set_to_none=True)
    return found


def peak_mb(side: str, size: str, scenario: str, quick: bool) -> float:
    """Peak memory above the loaded model, in a process of its own."""
    command = [*started(side), "--memory-of", side, size, scenario] + ["--quick"] * quick
    out = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
    return float(out.strip().splitlines()[-1])


def print_memory(side: str, size: str, name: str, quick: bool) -> None:
    """The child's part of `peak_mb`: one micro-batch for all."""
    scenario = scenarios(size, quick)[name]
    sides = Sides(size, scenario, 10**9 if name in "AB" else TOKEN_BUDGET)
    warm = Sides(size, Scenario(1, 2, 8, (4, 4)), TOKEN_BUDGET)
    warm.step(side)()
    if side.endswith("padded"):
        _ = sides.rival
    before = record.resident("VmRSS")
    sides.step(side)()
    print((record.resident("VmHWM") - before) / 2**20)


def started(side: str) -> list[str]:
    """The words that start a process of this side."""
    return [RIVAL, __file__] if side.endswith("padded") else [__file__]


def step_for() -> None:
    """The process of our sides, or of padded rows: milliseconds of a step after a line."""
    warm: set[tuple[str, str]] = set()
    made: dict[str, Sides] = {}

    def step(side: str, size: str, values: dict[str, Any], threads: int) -> dict[str, float]:
        torch.set_num_threads(threads)
        if (side, size) not in warm:
            timed(Sides(size, Scenario(1, 2, 8, (4, 4)), TOKEN_BUDGET), [side], 1)
            warm.add((side, size))
        if (key := f"{size} {values}") not in made:
            made.clear()
            made[key] = Sides(size, Scenario(**values), TOKEN_BUDGET)
        return {"ms": timed(made[key], [side], 1)[side][0]}

    serve(step)


class Processes:
    """Of our sides, and of padded rows."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self) -> None:
        """Start them, anew for each batch: what one has freed it keeps, and two of 30 M would not fit the memory."""
        self._stack.close()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._by = {p: self._stack.enter_context(Side(p, [*started(p), "--serve"], folder)) for p in ("ours", "padded")}
        self.threads: dict[str, int] = {name: side.loaded["threads"] for name, side in self._by.items()}

    def step(self, side: str, size: str, scenario: Scenario, threads: int = 0) -> float:
        """Milliseconds of one step; threads: 0 = those of the process's own choice."""
        name = "padded" if side.endswith("padded") else "ours"
        return self._by[name].step(side, size, asdict(scenario), threads or self.threads[name])["ms"]


def best_rival(processes: Processes, size: str, name: str) -> dict[str, int]:
    """The rows per micro-batch and threads at which merged padded rows are fastest, on a quarter of the batch."""
    chosen = scenarios(size, quick=True)[name]
    quarter = Scenario(1, 2 if name == "B" else 8, chosen.prompt, chosen.sampled)
    timings: dict[tuple[int, int], float] = {}
    for threads in (1, 2):
        for rows in (1, 2, 4, 8):
            tried = replace(quarter, padded_rows=rows)
            timings[rows, threads] = min(processes.step("merged_padded", size, tried, threads) for _ in range(3))
    rows, threads = min(timings, key=timings.__getitem__)
    return {"padded_rows": rows, "threads": threads}


def against_best(processes: Processes, size: str, name: str, repeats: int, quick: bool) -> tuple[float, dict[str, int]]:
    """Merged padded rows at their best setting / forest, and the setting."""
    setting = best_rival(processes, size, name)
    scenario = replace(scenarios(size, quick)[name], padded_rows=setting["padded_rows"])
    rival: list[float] = []
    ours: list[float] = []
    for _ in range(repeats):
        rival.append(processes.step("merged_padded", size, scenario, setting["threads"]))
        ours.append(processes.step("forest", size, scenario))
    return statistics.median(rival) / statistics.median(ours), setting


def build_seconds_per_million() -> float:
    """Seconds to build the forest of a million tokens: 125 groups of 8 rows of 1,000 tokens, half of them shared."""
    rng = random.Random(0)
    rows: list[list[int]] = []
    for _ in range(125):
        prompt = [rng.randrange(50_000) for _ in range(500)]
        rows += [prompt + [rng.randrange(50_000) for _ in range(500)] for _ in range(8)]
    found: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        build_forest(rows)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def measure(processes: Processes, size: str, name: str, repeats: int, quick: bool) -> dict[str, dict[str, float]]:
    """One scenario at one size: a row per side."""
    processes.start()
    scenario = scenarios(size, quick)[name]
    sides = Sides(size, scenario, TOKEN_BUDGET)
    skipped = name in "AB" or size == "30m"  # with one turn they are the merged rows
    names = [side for side in SIDES if not (side == "per_turn_padded" and skipped)]
    if name in "AB" and size == "2m":
        repeats *= 3  # short, and so the more disturbed
    times: dict[str, list[float]] = {side: [] for side in names}
    for _ in range(repeats):
        for side in names:
            times[side].append(processes.step(side, size, scenario))
    forest_ms, forest_work = statistics.median(times["forest"]), sides.work("forest")
    table: dict[str, dict[str, float]] = {}
    for side in names:
        ms, needed = statistics.median(times[side]), sides.work(side)
        ratio, ideal = ms / forest_ms, needed.flops / forest_work.flops
        table[side] = {
            "ms": round(ms, 1),
            "tokens": needed.tokens,
            "gflops_per_s": round(needed.flops / ms / 1e6, 1),
            "ratio": round(ratio, 3),
            "ideal": round(ideal, 3),
            "fraction": round(ratio / ideal, 3),
            "peak_mb": round(peak_mb(side, size, name, quick)) if size == "2m" or name == "A" else -1,
        }
        print(f"{size:4s} {name} {side:16s}", *(f"{key} {value:>9}" for key, value in table[side].items()), flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller batches, one model, one repeat; writes no file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", default=["2m", "30m"])
    parser.add_argument("--scenarios", nargs="+", default=list("ABCD"))
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print_memory(*arguments.memory_of, arguments.quick)
    elif arguments.serve:
        step_for()
    else:
        with ExitStack() as stack:
            compare(arguments, Processes(stack))


def compare(arguments: argparse.Namespace, processes: Processes) -> None:
    """Measure and report."""
    repeats, sizes = (1, ["2m"]) if arguments.quick else (arguments.repeats, arguments.sizes)
    for size in sizes:
        check(size)
    complete = not arguments.quick and sizes == ["2m", "30m"] and arguments.scenarios == list("ABCD")
    detail = {
        size: {name: measure(processes, size, name, repeats, arguments.quick) for name in arguments.scenarios}
        for size in sizes
    }
    ratios: dict[str, float | None] = {
        f"forest.{name}": detail["2m"][name]["merged_padded"]["ratio"]
        for name in "AB"
        if "2m" in detail and name in detail["2m"]
    }
    if arguments.scenarios == list("ABCD"):
        at_2m = detail["2m"]
        best = {name: against_best(processes, "2m", name, 3 * repeats, arguments.quick) for name in "AB"}
        ratios |= {
            "forest.A_best": round(best["A"][0], 3),
            "forest.B_best": round(best["B"][0], 3),
            "forest.C_eta": at_2m["C"]["per_turn_packed"]["fraction"],
            "forest.D_eta": at_2m["D"]["per_turn_packed"]["fraction"],
            "forest.eta_min": min(t["per_turn_packed"]["fraction"] for by in detail.values() for t in by.values()),
            "forest.memory": round(at_2m["A"]["forest"]["peak_mb"] / at_2m["A"]["merged_padded"]["peak_mb"], 3),
            "forest.build_s_per_million": round(build_seconds_per_million(), 3),
        }
        detail["best"] = {name: setting for name, (_, setting) in best.items()}  # pyright: ignore[reportArgumentType]
    settings = {"token_budget": TOKEN_BUDGET, "padded_threads": processes.threads["padded"], "repeats": repeats}
    print(json.dumps(ratios, indent=1))
    record.finish(
        "forest", ratios, {**detail, **settings}, "forest.json" if complete else None, processes.threads["ours"]
    )


if __name__ == "__main__":
    main()
