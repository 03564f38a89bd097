"""How many cores are free, with how many threads a run therefore computes, and what becomes of that."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtgrpo.commands import doctor
from mtgrpo.config.compose import compose, parse
from mtgrpo.record.curve import Curve
from mtgrpo.rewards import Reward
from mtgrpo.runtime import resources
from mtgrpo.runtime.resources import fit_openmp, free_cores, read_cpu_times, threads_for
from mtgrpo.runtime.workers import Workers
from mtgrpo.stages import threads, trainer
from mtgrpo.types import LEARNING, Trajectory

SMALL = [
    *("trainer.steps=3", "sft.steps=1", "sft.batch_size=2", "rollout.prompts_per_step=2", "rollout.group_size=2"),
    *("sampling.max_new_tokens=8", "eval.tasks=1", "eval.samples=1", "eval.every_steps=0", "log=[jsonl]"),
    *("checkpoint.every_steps=1", "optimizer.schedule=constant", f"reward={__file__}:Tokens"),
]
VARIABLES = sorted(resources.THREADS_SET | resources.WAITING_SET)


class Tokens(Reward):
    """Every conversation has a worth of its own, so that each step trains."""

    def reward(self, trajectory: Trajectory) -> float:
        return float(sum(token % 7 for turn in trajectory.turns for token in turn.output))


class Machine:
    """Files of a kernel that count what four cores do; a fifth is not for this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ticks = [[0, 0] for _ in range(5)]  # idle, busy

    def work(self, *busy: int, own: int = 0, child: int = 0) -> None:
        """A second passes, in which each core was busy for so many of its 100 ticks."""
        for ticks, spent in zip(self.ticks, (*busy, 100), strict=True):
            ticks[0] += 100 - spent
            ticks[1] += spent
        lines = [
            f"cpu{n} {busy - busy // 2} 0 {busy // 2} {idle} 0 0 0 0 0 0" for n, (idle, busy) in enumerate(self.ticks)
        ]
        (self.folder / "stat").write_text("\n".join(["cpu  1 1 1 1 1 1 1 1 1 1", *lines, "intr 5 0 0", ""]))
        for process, ticks, children in ((os.getpid(), own, "7"), (7, child, "")):
            task = self.folder / str(process) / "task" / "1"
            task.mkdir(parents=True, exist_ok=True)
            (task / "children").write_text(children)
            # utime, stime, cutime and cstime are fields 14 to 17
            (self.folder / str(process) / "stat").write_text(f"{process} (a) b) R {'0 ' * 10}{ticks} 0 0 0 0 0\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """With nothing set in the environment, and torch as if it had not been imported."""
    for name in ("proc", "cgroup/cpu", "cpus"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(resources, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(resources, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(resources, "_CPUS", tmp_path / "cpus")
    monkeypatch.setattr(resources, "_SAMPLE_S", 0.0)
    monkeypatch.setattr(free_cores, "__defaults__", (0.0,))  # seconds
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = Machine(tmp_path / "proc")
    found.work(50, 50, 50, 50)
    threads_before = torch.get_num_threads()
    yield found
    torch.set_num_threads(threads_before)


@pytest.mark.parametrize(
    ("busy", "own", "child", "free", "fit"),
    [
        ((0, 0, 0, 0), 0, 0, 4.0, 4),
        ((100, 0, 0, 0), 100, 0, 4.0, 4),  # this process itself
        ((100, 100, 0, 0), 100, 100, 4.0, 4),  # and one that it started
        ((100, 0, 0, 0), 0, 0, 3.0, 3),
        ((20, 0, 0, 0), 0, 0, 3.8, 4),
        ((30, 0, 0, 0), 0, 0, 3.7, 3),
        ((100, 100, 100, 100), 100, 0, 1.0, 1),
        ((100, 100, 100, 100), 0, 0, 0.0, 1),
    ],
)
def test_a_core_is_free_where_only_this_process_uses_it(
    busy: tuple[int, ...], own: int, child: int, free: float, fit: int, machine: Machine
) -> None:
    before = read_cpu_times()
    machine.work(*busy, own=own, child=child)
    assert free_cores(before) == pytest.approx(free)
    assert threads_for(free) == fit


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ],
)
def test_a_container_has_what_it_is_given(files: dict[str, str], free: float, tmp_path: Path, machine: Machine) -> None:
    for name, text in files.items():
        (tmp_path / "cgroup" / name).write_text(text)
    before = read_cpu_times()
    machine.work(0, 0, 0, 0)
    assert free_cores(before) == free


def test_a_kernel_that_counts_nothing_leaves_all_cores(machine: Machine) -> None:
    assert free_cores(read_cpu_times()) == 4.0
    (machine.folder / "stat").unlink()
    assert free_cores(read_cpu_times()) == 4.0


def test_what_ends_soon_costs_no_thread(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_cpu_times()
    machine.work(100, 0, 0, 0)
    assert free_cores(before) == 3.0
    monkeypatch.setattr(resources.time, "sleep", lambda seconds: machine.work(0, 0, 0, 0))
    assert free_cores(before, longest_s=60.0) == pytest.approx(3.75)  # after three further seconds


def test_two_hardware_threads_are_one_core(tmp_path: Path, machine: Machine) -> None:
    for number in range(4):
        place = tmp_path / "cpus" / f"cpu{number}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{number % 2},{number % 2 + 2}\n")
    assert (resources.cores(), threads_for(4.0), threads_for(1.0)) == (2, 2, 1)


@pytest.mark.parametrize(
    ("busy", "given", "added"),
    [
        (0, {}, {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "10000"}),
        (100, {}, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}),
        (100, {"OMP_NUM_THREADS": "4"}, {"OMP_WAIT_POLICY": "passive"}),
        (0, {"MKL_NUM_THREADS": "2"}, {"GOMP_SPINCOUNT": "10000"}),
        (0, {"OMP_NUM_THREADS": "1"}, {}),
        (0, {"OMP_WAIT_POLICY": "passive"}, {"OMP_NUM_THREADS": "4"}),
        (0, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_torch_is_loaded_with_what_fits_and_what_the_user_set_stays(
    busy: int, given: dict[str, str], added: dict[str, str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(resources, "sys", SimpleNamespace(modules={}))
    before, environment = read_cpu_times(), dict(os.environ)
    machine.work(busy, busy, busy, busy)
    with fit_openmp(before):
        assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == given | added
    assert dict(os.environ) == environment  # processes that are started later have the user's
    monkeypatch.setattr(resources, "sys", SimpleNamespace(modules={"torch": torch}))
    with fit_openmp(before):
        assert dict(os.environ) == environment


async def test_workers_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in resources.WAITING_SET:
        monkeypatch.delenv(name, raising=False)
    with closing(Workers()) as workers:
        assert await workers.run(os.getenv, "OMP_WAIT_POLICY") == "passive"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    with closing(Workers()) as workers:
        assert await workers.run(os.getenv, "OMP_WAIT_POLICY") is None


def test_the_doctor_says_with_how_many_threads_a_run_would_compute(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> doctor.Check:
        return next(check for check in doctor.examine() if check.name == name)

    times = read_cpu_times()
    monkeypatch.setattr(doctor, "read_cpu_times", lambda: times)
    machine.work(90, 20, 0, 0)
    said = found("OpenMP threads")
    assert (said.state, said.found) == (doctor.State.ok, "2.9 of 4 cores are free: a run would take 3")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    said = found("OpenMP threads")
    assert (said.state, said.cure) == (doctor.State.broken, "unset OMP_NUM_THREADS")
    assert said.found == "OMP_NUM_THREADS=4; 2.9 of 4 cores are free"


def ran(folder: Path, *words: str) -> dict[str, str]:
    """The versions of a run, which has its notes beside them."""
    asyncio.run(trainer.train(compose(parse([*SMALL, *words])).experiment, folder, Curve()))
    return json.loads((folder / "versions.json").read_text())


def notes(folder: Path) -> list[str]:
    lines = (folder / "notes.txt").read_text().splitlines()
    return [line for line in lines if "threads: " in line or "threads wait" in line]


def digits(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    learning = [row for row in rows if row["stage"] == LEARNING]
    return [{n: v for n, v in row.items() if not n.startswith(("time/", "perf/"))} for row in learning]


@pytest.mark.real
def test_a_run_goes_on_with_the_threads_that_it_had(tmp_path: Path, machine: Machine) -> None:
    torch.set_num_threads(2)
    assert ran(tmp_path / "whole")["threads"] == "2"
    assert notes(tmp_path / "whole") == ["threads: 2 on 4 cores"]
    cut = tmp_path / "cut"
    ran(cut, "trainer.steps=1")
    torch.set_num_threads(1)
    assert ran(cut, "resume=true")["threads"] == "2"
    assert notes(cut)[1:] == ["threads: 2 as before, for the same digits; the free cores have room for 1"]
    assert torch.get_num_threads() == 1
    assert digits(cut) == digits(tmp_path / "whole")
    assert len(digits(cut)) == 3


@pytest.mark.real
@pytest.mark.parametrize(("variable", "word"), [("OMP_NUM_THREADS", "seed=0"), ("", "trainer.deterministic=false")])
def test_another_number_of_threads_is_said(
    variable: str, word: str, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    ran(tmp_path, "trainer.steps=1", word)
    torch.set_num_threads(1)
    if variable:
        monkeypatch.setenv(variable, "1")
    assert ran(tmp_path, "trainer.steps=2", "resume=true", word)["threads"] == "1"
    assert notes(tmp_path)[1].startswith(
        f"threads: 1 on 4 cores{variable and f' ({variable})'}, and 2 before: sums are made in another order"
    )


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "given", "left", "cure"),
    [
        ((), "", [2, 2, 2], "end them, or interrupt the run and go on with OMP_NUM_THREADS=1 and resume=true"),
        (
            ("trainer.deterministic=false",),
            "",
            [2, 1, 2],
            "as many threads as cores are free compute from here on, now 1",
        ),
        (("trainer.deterministic=false",), "2", [2, 2, 2], "end them, or interrupt the run"),
    ],
)
def test_a_neighbour_that_comes_later_is_said_once_and_followed_where_digits_may_change(
    words: tuple[str, ...],
    given: str,
    left: list[int],
    cure: str,
    tmp_path: Path,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the second step and after it: of four cores then one is free, and in the third step all are again."""
    monkeypatch.setattr(threads, "WINDOW_S", 0.0)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    seen: list[int] = []
    end_step = threads.Neighbours.end_step

    def ended(self: threads.Neighbours) -> list[str]:
        busy = 100 if len(seen) == 1 else 0
        machine.work(busy, busy, busy, 0)
        said = end_step(self)
        seen.append(torch.get_num_threads())
        return said

    monkeypatch.setattr(threads.Neighbours, "end_step", ended)
    torch.set_num_threads(2)
    ran(tmp_path, *words)
    assert seen == left
    (_, said) = notes(tmp_path)
    assert said.startswith(f"step 2: other processes use cores that the run's 2 threads wait for: {cure}")


@pytest.mark.real
def test_beside_a_process_that_burns_a_run_computes_with_one_thread(place: Path) -> None:
    allowed = os.sched_getaffinity(0)
    two = sorted(allowed)[:2]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-m", "mtgrpo", "train", *SMALL, "trainer.steps=1"]
    burn = f"import os; os.sched_setaffinity(0, {{{two[0]}}}); print(flush=True)\nwhile True: pass"
    burner = subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE)
    assert burner.stdout is not None
    try:
        burner.stdout.readline()
        os.sched_setaffinity(0, two)  # what is started now has these two
        subprocess.run([*command, "hydra.run.dir=by_itself"], env=environment, check=True)
        subprocess.run([*command, "hydra.run.dir=asked"], env=environment | {"OMP_NUM_THREADS": "2"}, check=True)
    finally:
        os.sched_setaffinity(0, allowed)
        burner.kill()
        burner.communicate()
    found = {name: json.loads(Path(name, "versions.json").read_text())["threads"] for name in ("by_itself", "asked")}
    assert found == {"by_itself": "1", "asked": "2"}


def test_the_command_looks_at_the_cores_before_it_imports_torch() -> None:
    """And for as long as it takes to read the configuration, so that nobody waits for it."""
    code = "import sys; from mtgrpo import cli; print('torch' in sys.modules, cli._BEGAN.cores != {})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", str(Path("/proc/stat").exists())]


FREED = """
import resource, sys
from mtgrpo.runtime.resources import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keeps":
    keep_freed_memory()
for _ in range(5):
    began = faults()
    blocks = [bytearray(1 << 20) for _ in range(40)]
    del blocks
print(faults() - began)  # of 40 MiB that were there before
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone is told what to keep")
def test_freed_memory_is_taken_again() -> None:
    def last_faults(word: str, **environment: str) -> int:
        told = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | environment
        run = subprocess.run([sys.executable, "-c", FREED, word], env=told, check=True, capture_output=True)
        return int(run.stdout)

    pages = (40 << 20) // resource.getpagesize()
    assert last_faults("keeps") < pages / 20
    assert last_faults("gives back") > pages / 2
    assert last_faults("keeps", MALLOC_TRIM_THRESHOLD_="131072") > pages / 2  # as the user wants it
