"""Where the bottleneck moves from 8 to 1,024 devices: a discrete-event model, fed with costs that a small run here has.

Nothing but the small run is measured: `cluster=ray` on this machine with one device that trains and one that samples,
the demo's task with the calculator of slow_tool.py, in step and at `rollout.max_staleness` 1 and 2. The costs are those
of the run in step; the model then says how long a step of each of the three takes.

    scaling.model_error   the largest of |seconds that the model says / seconds measured - 1| of the three

The model: a server decodes a token for each of its n open requests in `alone_s + each_s * n` seconds; a tool answers
after a time that slow_tool.py draws; the controller has one core, and `turn_s` of it are used for each turn;
groups are admitted and batches chosen as `rollout/stream.py` does. Training takes `token_s` for each sampled token,
over the ranks, and `all_reduce_s` for each doubling of ranks; a push takes `push_s`, whatever the number of servers.
Assumed, not measured: that devices are alike, that a step's tasks grow with the devices (`TASKS` a device), that a
quarter of them trains, the network (`all_reduce_s`), and that servers go on during a
push, and that the disk gives weights to all of them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from record import finish, load
from slow_tool import delay_s

from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.model.traits import ordinary_tokens
from mtgrpo.types import Sampling
from mtgrpo.weights.source import ModelWeights

HERE = Path(__file__).resolve().parent
COUNTS, STALENESS = (8, 16, 32, 64, 128, 256, 512, 1024), (0, 1, 2, 4)
TASKS, TRAIN, STEPS, AHEAD = 1, 4, 8, 1.5  # tasks a device; one device of so many trains; steps; `rollout.ahead`
PROMPTS, GROUP, MODEL = 8, 4, "tiny-calculator"
ALL_REDUCE_S = 0.005  # assumed, for each doubling of ranks
WORDS = ("recipe=calculator", "engine=local", "eval.every_steps=0", "eval.tasks=1", "eval.samples=1", "cluster=ray",
         "cluster.address=local", f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP}",
         f"environment.tools=[{HERE / 'slow_tool.py'}:calculator]", "trainer.idle_steps=0")  # fmt: skip
CLOCK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Costs:
    """In seconds; `shapes`: of each conversation the tokens of its turns."""

    shapes: list[list[int]]
    alone_s: float
    each_s: float
    turn_s: float
    token_s: float
    push_s: float
    group: int
    all_reduce_s: float = 0.0


class Server:
    """Decodes its open requests together: each gets its next token at the same time."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.tokens, self.at_s, self.busy_s = costs, 0.0, 0.0, 0.0
        self.ends: list[tuple[float, int]] = []  # when `tokens` has come there, and whose request is done

    def advance(self, now_s: float) -> None:
        if self.ends:
            self.tokens += (now_s - self.at_s) / self.pace_s
            self.busy_s += now_s - self.at_s
        self.at_s = now_s

    @property
    def pace_s(self) -> float:
        return self.costs.alone_s + self.costs.each_s * len(self.ends)

    def next_s(self) -> float:
        return self.at_s + max(0.0, self.ends[0][0] - self.tokens) * self.pace_s if self.ends else math.inf


class Cluster:
    """Steps of a run; times in seconds since its beginning."""

    def __init__(self, costs: Costs, ranks: int, servers: int, tasks: int, staleness: int, seed: int = 0) -> None:
        self.costs, self.ranks, self.tasks, self.staleness = costs, ranks, tasks, staleness
        self.servers = [Server(costs) for _ in range(servers)]
        self.random, self.number, self.now_s, self.core_s = random.Random(seed), itertools.count(), 0.0, 0.0
        self.events: list[tuple[float, int, Any, Any]] = []
        self.stamps = [0] * servers  # only the last event of a server counts
        self.open: dict[int, Iterator[tuple[int, float]]] = {}  # conversations: the rest of their turns
        self.pending: list[list[Any]] = []  # groups: version, conversations left, whether overtaken, sampled tokens
        self.group_of: dict[int, list[Any]] = {}
        self.names, self.turns, self.place_of = itertools.count(), dict[int, tuple[int, float]](), list[int]()
        self.finished, self.changed, self.core_used_s, self.trained_s = 0, False, 0.0, 0.0

    def at(self, time_s: float, what: Any, *which: Any) -> None:
        heapq.heappush(self.events, (time_s, next(self.number), what, which))

    def core(self, then: Any, *which: Any) -> None:
        """The controller's core does its part of a turn, in turn."""
        self.core_s = max(self.core_s, self.now_s) + self.costs.turn_s
        self.core_used_s += self.costs.turn_s
        self.at(self.core_s, then, *which)

    def plan(self, number: int) -> None:
        self.stamps[number] += 1
        if (ends_s := self.servers[number].next_s()) < math.inf:
            self.at(ends_s, self.done, number, self.stamps[number])

    def ask(self, name: int) -> None:
        number = self.place_of[name // self.costs.group]  # where its siblings are
        server = self.servers[number]
        server.advance(self.now_s)
        heapq.heappush(server.ends, (server.tokens + self.turns[name][0], name))
        self.plan(number)

    def done(self, number: int, stamp: int) -> None:
        if stamp != self.stamps[number]:
            return
        server = self.servers[number]
        server.advance(self.now_s)
        _, name = heapq.heappop(server.ends)
        self.plan(number)
        self.at(self.now_s + self.turns[name][1], self.core, self.turn, name)

    def turn(self, name: int) -> None:
        """The next turn of a conversation, or its end."""
        following = next(self.open[name], None)
        if following is not None:
            self.turns[name] = following
            self.ask(name)
            return
        group = self.group_of.pop(name)
        group[1] -= 1
        self.finished += not group[1]
        self.changed |= not group[1]

    def admit(self, version: int) -> None:
        most = min((self.staleness + 1) * self.tasks, math.ceil(AHEAD * self.tasks) if self.staleness else self.tasks)
        while len(self.pending) < most + sum(group[2] for group in self.pending) and (
            len(self.pending) < (self.staleness + 1) * self.tasks
        ):
            group = [version, self.costs.group, False, 0]
            self.pending.append(group)
            self.place_of.append(len(self.place_of) % len(self.servers))
            for _ in range(self.costs.group):
                tokens, name = self.random.choice(self.costs.shapes), next(self.names)
                group[3] += sum(tokens)
                waits_s = [*(delay_s(self.random) for _ in tokens[1:]), 0.0]
                self.open[name], self.group_of[name] = iter([*zip(tokens, waits_s, strict=True)]), group
                self.core(self.turn, name)

    def choose(self, version: int) -> list[list[Any]] | None:
        done = [group for group in self.pending if not group[1]][: self.tasks]
        chosen = {id(group) for group in done}
        left = [group[0] + self.staleness for group in self.pending if id(group) not in chosen]
        in_time = all(last > version + n // self.tasks for n, last in enumerate(left))
        return done if len(done) == self.tasks and in_time else None

    def run(self, steps: int) -> dict[str, float]:
        """Seconds of a step, and what was idle or busy for which share of the time; the first step is left out."""
        version, trains = 0, False
        costs, ranks, ends = self.costs, self.ranks, list[float]()
        self.admit(0)
        while len(ends) < steps:
            looks = self.changed and not trains and self.finished >= self.tasks
            if looks and (chosen := self.choose(version)) is not None:
                self.finished -= self.tasks
                last = self.pending.index(chosen[-1])
                for group in self.pending[:last]:
                    group[2] = True
                taken = {id(group) for group in chosen}
                self.pending = [group for group in self.pending if id(group) not in taken]
                train_s = costs.token_s * sum(group[3] for group in chosen) / ranks
                train_s += costs.all_reduce_s * math.log2(max(1, ranks))
                self.at(self.now_s + train_s + costs.push_s, "trained")
                self.trained_s, trains = self.trained_s + train_s, True
            self.changed = self.changed and trains
            self.now_s, _, what, which = heapq.heappop(self.events)
            if what == "trained":
                version, trains = version + 1, False
                ends.append(self.now_s)
                self.admit(version)
            else:
                what(*which)
        busy_s = sum(server.busy_s for server in self.servers) / len(self.servers)
        shares = {"ranks": self.trained_s, "servers": busy_s, "controller": self.core_used_s}
        return {"step_s": (ends[-1] - ends[0]) / (steps - 1), **{n: min(1.0, s / ends[-1]) for n, s in shares.items()}}


def processor_s(pid: int) -> float:
    """Of a process and its threads so far."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) * CLOCK_S


def small_run(folder: Path, staleness: int, steps: int) -> tuple[list[dict[str, Any]], float]:
    """The rows of a run on this machine, and the controller's processor time for a step of it."""
    command = [sys.executable, "-m", "mtgrpo", "train", *WORDS, f"rollout.max_staleness={staleness}"]
    command += [f"trainer.steps={steps}", f"hydra.run.dir={folder}"]
    process, used, rows = subprocess.Popen(command, stdout=subprocess.DEVNULL), list[float](), list[dict[str, Any]]()
    while process.poll() is None:
        path = folder / "metrics.jsonl"
        read = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        rows = [row for row in read if "time/train_s" in row]
        if len(rows) > len(used):
            used += [processor_s(process.pid)] * (len(rows) - len(used))
        time.sleep(0.1)
    assert process.returncode == 0
    return rows, (used[-1] - used[1]) / (len(used) - 2)


def pace(open_requests: int, tokens: int = 64) -> float:
    """Seconds in which the local engine decodes a token for each of so many requests."""
    source = ModelWeights(load(MODEL))
    engine = Local().start(source, False, 512)

    async def ask() -> float:
        context, sampling = ordinary_tokens(source.config, 64).tolist(), Sampling(max_new_tokens=tokens)
        for _ in range(2):  # the first time all is new
            began = time.perf_counter()
            keys = [Key(0, "", str(number), 0) for number in range(open_requests)]
            await asyncio.gather(*(engine.answer(key, context, sampling, n) for n, key in enumerate(keys)))
        return (time.perf_counter() - began) / tokens

    return asyncio.run(ask())


def costs_of(folder: Path, rows: list[dict[str, Any]], core_s: float) -> Costs:
    """Those of the run in step, by its own record, and of the engine by itself."""
    told = [json.loads(line) for path in folder.glob("trajectories/step_*.jsonl") for line in path.open()]
    shapes = [[turn["output_tokens"] for turn in one["turns"]] for one in told]
    one_s, many_s = (statistics.median(pace(count) for _ in range(3)) for count in (1, 32))
    each_s = max(0.0, (many_s - one_s) / 31)
    later = rows[1:]
    return Costs(
        shapes=shapes,
        alone_s=one_s - each_s,
        each_s=each_s,
        turn_s=core_s * len(rows) / sum(map(len, shapes)),
        token_s=sum(row["time/train_s"] for row in later) * len(rows) / len(later) / sum(map(sum, shapes)),
        push_s=statistics.median(row["engine/push_s"] for row in later),
        group=GROUP,
    )


def main() -> None:
    """Measure, check the model, and let it go on to many devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--json", default="scaling.json")
    given = parser.parse_args()
    measured: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for staleness in (0, 1, 2):
            rows, core_s = small_run(Path(place, str(staleness)), staleness, given.steps)
            if not staleness:
                costs = costs_of(Path(place, "0"), rows, core_s)
            measured[staleness] = statistics.mean(row["time/rollout_s"] + row["time/train_s"] for row in rows[1:])
    small = {s: Cluster(costs, 1, 1, PROMPTS, s).run(given.steps) for s in measured}
    errors = {s: small[s]["step_s"] / measured[s] - 1 for s in measured}
    network = replace(costs, all_reduce_s=ALL_REDUCE_S)
    many = {
        count: {
            s: Cluster(network, count // TRAIN, count - count // TRAIN, TASKS * count, s).run(STEPS) for s in STALENESS
        }
        for count in COUNTS
    }
    detail = {
        "measured_step_s": measured,
        "modelled_step_s": {s: found["step_s"] for s, found in small.items()},
        "errors": errors,
        "costs": {name: value for name, value in asdict(network).items() if name != "shapes"},
        "conversations": len(costs.shapes),
        "load": os.getloadavg(),
        "devices": many,
    }
    finish("scaling", {"scaling.model_error": max(map(abs, errors.values()))}, detail, given.json)


if __name__ == "__main__":
    main()
