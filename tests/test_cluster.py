"""Ranks and the controller: what all do alike is answered; where one fails all end, and the run says which and how."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import unused_port

from mtgrpo import preset
from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.batch.forest import build_batch
from mtgrpo.cluster import controller, launch, rank
from mtgrpo.cluster.controller import Ranks
from mtgrpo.cluster.keeper import Keeper
from mtgrpo.cluster.wire import Call, packed
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.launch import slurm
from mtgrpo.policy.step import at_once
from mtgrpo.policy.trainer import Stage
from mtgrpo.stages.policy_trainer import trainer_config
from ranks import furthest_of_runs
from scripted_rank import Config, Trainer, make_looping
from test_parallel_training import Case, play
from test_resume import rows

TESTS = Path(__file__).parent
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.timeout(240)  # nothing hangs


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncGenerator[Ranks]:
    ranks = Ranks(Trainer, Config(folder), (0, 1), **settings)  # type: ignore[arg-type]
    try:
        yield ranks
    finally:
        ranks.close()


def pids(folder: Path) -> list[int]:
    return [json.loads(path.read_bytes())["pid"] for path in sorted((folder / "ranks").glob("rank_*.json"))]


def wait_for(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 200
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_tensor_passes_as_the_bytes_that_it_has() -> None:
    whole = torch.arange(2_000_000, dtype=torch.bfloat16)
    parts = [whole[3:9:2], whole[:0], torch.tensor(7), whole[:6].reshape(2, 3).T, torch.tensor([True, False])]
    message = packed(Call("trainer", "updating", parts))
    assert len(message) < 2000
    for part, received in zip(parts, pickle.loads(message).arguments, strict=True):
        assert received.dtype is part.dtype and torch.equal(received, part)


class Opened:
    """Is opened where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_a_rank_unpickles_what_rank_0_of_its_run_has_sent_to_it_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reaches the port of a process group may be any rank of it, and send anything."""
    sent = list[torch.Tensor]()
    monkeypatch.setattr(rank.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(rank.dist, "broadcast", lambda tensor, *_: sent.append(tensor.clone()))
    ours, theirs = multiprocessing.Pipe()
    first = rank.Channel("training", theirs, b"key")
    calls = [Call("trainer", "begin", (n,)) for n in range(2)]
    for call in calls:
        ours.send_bytes(packed(call))
        assert first.hear() == call

    def heard(channel: rank.Channel, *tensors: torch.Tensor) -> Call | None:
        coming = iter(tensors)
        monkeypatch.setattr(rank.dist, "broadcast", lambda tensor, *_: tensor.copy_(next(coming)))
        return channel.hear()

    other = rank.Channel("training", None, b"key")
    assert [heard(other, *sent[:2]), heard(other, *sent[2:])] == calls
    evil = torch.frombuffer(bytearray(pickle.dumps(Opened(tmp_path / "opened"))), dtype=torch.uint8)
    forged, changed = torch.cat([sent[1][: rank.MAC_BYTES], evil]), sent[1].clone()
    changed[-1] ^= 1
    attacks = [evil, forged, changed, sent[3], sent[1][:5]]
    strangers = [rank.Channel("training", None, b"key") for _ in attacks]
    tries = [*zip(strangers, attacks, strict=True), (other, sent[1])]
    tries += [(rank.Channel("saving", None, b"key"), sent[1]), (rank.Channel("training", None, b"other"), sent[1])]
    for channel, content in tries:
        with pytest.raises(RunError, match="another process"):
            heard(channel, torch.tensor(len(content)), content)
    assert not (tmp_path / "opened").exists()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("set_by_user", [None, "eth7"])
def test_ranks_of_one_machine_share_a_secret_and_listen_to_no_other_machine(
    set_by_user: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[dict[str, str]]()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if set_by_user:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", set_by_user)
    monkeypatch.setattr(launch, "start_logged", lambda command, environment, *_: given.append(environment))
    for _ in range(2):
        for one in launch.Processes([0, 1], tmp_path).sockets:
            one.close()
    keys = [environment[launch.KEY] for environment in given]
    assert keys[0] == keys[1] != keys[2] == keys[3] and min(map(len, keys)) == 64 and launch.KEY not in os.environ
    interface = {environment["GLOO_SOCKET_IFNAME"] for environment in given}
    assert interface == {set_by_user} if set_by_user else interface <= {"lo", "lo0"}


async def test_all_ranks_do_what_is_asked_and_end_when_it_is_over(tmp_path: Path) -> None:
    async with opened(tmp_path) as ranks:
        assert ranks.begin("count") == (0, "0", 1) and ranks.notes == ["rank 0 begins"]
        for deed, kind, text in (
            ("config", ConfigError, "`lr` is wrong"),
            ("run", RunError, "the gradient is not finite"),
        ):
            with pytest.raises(kind) as caught:
                ranks.begin(deed)
            assert type(caught.value) is kind and str(caught.value) == text
        source = ranks.weights()
        assert (source.version, source.size, source.changes) == ("version", "size", 0)
        update = ranks.updating("count", 0)
        next(update)
        assert source.changes == 1  # known while it is under way
        assert at_once(update) == {"total": 2.0} and ranks.changes == source.changes == 2

        tensors = source.tensors(torch.bfloat16)
        assert next(tensors)[0] == "weight 0"
        assert (
            await asyncio.wait_for(asyncio.to_thread(lambda: ranks.changes), 10) == 2
        )  # while a server takes its time
        tensors.close()
        tensors = source.tensors(None)
        assert next(tensors)[0] == "weight 0"
        tensors.close()  # the rest comes, and is dropped
        received = dict(source.tensors(torch.bfloat16))
        assert received["weight 1"].dtype is torch.bfloat16 and received["weight 1"].tolist() == [3, 5, 7]
        assert ranks.begin("count") == (0, "0", 1)

        snapshot = ranks.snapshot()
        update = asyncio.create_task(asyncio.to_thread(at_once, ranks.updating("until saved", 2)))
        assert await asyncio.to_thread(snapshot.save, tmp_path) == {"rank": 0}  # while the update waits for it
        assert (tmp_path / "saved_1").exists() and snapshot.bytes == 12
        assert await update == {"total": 2.0}
        places = [f"rank {rank}: waiting, forward (4 passes)" for rank in (0, 1)]
        await asyncio.to_thread(wait_for, lambda: [place[: len(places[0])] for place in ranks.places] == places)
        processes = ranks._processes  # pyright: ignore[reportPrivateUsage]
        assert processes
        port = processes._store.port  # pyright: ignore[reportPrivateUsage]
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):  # at another address of this machine
            socket.create_connection(("127.0.0.2", port))
    assert [process.returncode for process in processes.started] == [0, 0]


async def test_what_all_raise_at_the_start_is_raised_and_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "unfit").touch()
    with pytest.raises(ConfigError, match=r"^the model does not fit$"):
        async with opened(tmp_path):
            pass
    wait_for(lambda: not any(map(alive, pids(tmp_path))))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("deed", "rank", "told"),
    [
        ("bug", 1, "rank 1 ended: ValueError: a bug;"),
        ("bug", 0, "rank 0 ended: ValueError: a bug;"),
        ("config", 1, "rank 1 ended: mtgrpo.errors.ConfigError: `lr` is wrong;"),  # others are in the sum meanwhile
        ("different", 2, "rank [01] ended: mtgrpo.errors.RunError: rank [01] says so;"),
        (
            "loop",
            1,
            r"rank 1 stands still, for 2 s: rank 0: updating, part 2, .* in all_reduce, .*; rank 1: updating, part 1",
        ),
    ],
)
async def test_one_rank_that_fails_ends_all_and_is_named(
    deed: str, rank: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "STILL_S", 2.0)
    with pytest.raises(RunError) as caught:
        async with opened(tmp_path) as ranks:
            at_once(ranks.updating(deed, rank))
    said = str(caught.value)
    assert re.match(told, said) and "\n" not in said
    log = re.search(r"; the end of what it printed is in (\S+rank_[01]\.log); ", said)
    assert log and said.endswith(f"go on with the same command and resume=true hydra.run.dir={tmp_path}")
    assert deed == "loop" or "Traceback" in Path(log[1]).read_text()
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "rank 1 was killed by signal 9;"),
        (signal.SIGTERM, "rank 1 was killed by signal 15;"),
        (signal.SIGSTOP, r"rank 1 has stopped: no sign of life for 2 s \(rank 1: (updating, part 1, .*|[a-z]+.*)\);"),
    ],
)
async def test_a_killed_rank_ends_all_whatever_goes_on(
    idle: bool, number: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "STOPPED_S", 2.0)

    async def run() -> None:
        async with opened(tmp_path) as ranks:
            update = ranks.updating("loop", 1)
            if not idle:
                next(update)
                wait_for(lambda: ranks.places[1].startswith("rank 1: updating, part 1"))
            os.kill(pids(tmp_path)[1], number)
            if idle:  # the controller samples, say
                await asyncio.Event().wait()
            await asyncio.to_thread(at_once, update)

    with pytest.raises(RunError, match=told):
        await run()
    assert not any(map(alive, pids(tmp_path)))


async def test_a_pass_may_take_many_times_what_passes_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "PASS_S", 0.5)
    passed: list[Any] = []
    with pytest.raises(RunError, match=r"rank 1 stands still, for 0.5 s: "):
        async with opened(tmp_path) as ranks:
            for _ in range(2):  # the first has no limit of this kind, and it has the second's
                passed.append(at_once(ranks.updating("slow", 1)))
            monkeypatch.setattr(controller, "PASS_RATIO", 0.0)
            at_once(ranks.updating("loop", 1))
    assert passed == [{"total": 2.0}] * 2, "one that takes five times the least limit was ended"


async def test_ranks_that_wait_for_a_call_do_not_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "PASS_S", 20.0)
    monkeypatch.setattr(controller, "PASS_RATIO", 0.0)
    faults: list[Any] = []
    async with opened(tmp_path) as ranks:
        assert at_once(ranks.updating("count", 1)) == {"total": 2.0}
        wait_for(lambda: all(": waiting" in place for place in ranks.places))

        def sent(call: Call) -> Any:
            faults.append(ranks._fault())  # pyright: ignore[reportPrivateUsage]
            return packed(call)

        for _ in range(100):  # looks, as long rollouts take
            assert ranks._fault() is None  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(controller, "packed", sent)
        assert at_once(ranks.updating("count", 1)) == {"total": 2.0}
    assert faults == [None]


@pytest.mark.real
async def test_a_rank_in_an_endless_loop_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "PASS_S", 3.0)
    monkeypatch.setattr(controller, "PASS_RATIO", 0.0)
    experiment = preset("calculator_from_scratch", "model.name=tiny", "parallel=ddp")
    config, groups = trainer_config(experiment, [1], None, tmp_path), play(10, Case())
    config = replace(config, learning=replace(config.learning, exact=False))
    batch = build_batch([trajectory for group in groups for trajectory in group.trajectories])
    rewards = rewards_of(groups, experiment.algorithm, batch.trajectory, batch.turn)
    ranks = Ranks(make_looping, config, (0, 1))
    ranks.begin(Stage.reinforcement)
    for version in range(2):
        at_once(ranks.updating(batch, rewards, version, version, None))
    update, began = ranks.updating(batch, rewards, 2, 2, None), time.monotonic()
    told = r"rank 1 stands still, for 3 s: rank 0: .*, in all_reduce, policy/.*; rank 1: updating, forward \(\d+ pass"
    with pytest.raises(RunError, match=told):
        await asyncio.to_thread(at_once, update)
    assert time.monotonic() - began < 100
    with suppress(RunError):
        ranks.close()
    assert not any(map(alive, pids(tmp_path)))


CONTROLLER = """
import asyncio, os, signal, sys
from pathlib import Path
from mtgrpo.cluster.controller import Ranks
from mtgrpo.cluster.keeper import Keeper
from scripted_rank import Config, Trainer

async def main():
    ranks = Ranks(Trainer, Config(Path(sys.argv[1])), (0, 1))
    update = ranks.updating("loop", 1)
    next(update)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("ends", ["killed", "exits"])
def test_ranks_end_with_the_controller(ends: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CONTROLLER, str(tmp_path), ends], timeout=200)
    wait_for(lambda: not any(map(alive, pids(tmp_path))))


WORDS = ["recipe=calculator_from_scratch", "log=[console,jsonl]", "sft.steps=2", "eval.tasks=2"]
WORDS += ["rollout.prompts_per_step=2", "rollout.group_size=3", "trainer.minibatch_trajectories=3", "kl.coef=0.1"]
WORDS += [
    f"reward={TESTS / 'newcomer/rewards.py'}:Tidy",
    "algorithm.truncated=keep",
]  # rewards that differ: else rounding alone is learned
WORDS += ["model.dtype=float64", "sft.optimizer.kind=adamw", "optimizer.kind=adamw"]
WORDS += ["engine.memory_fraction=0.1", "checkpoint.every_steps=2"]
LAUNCHED = {
    "own": ["mtgrpo", "train", "devices.train.num=2"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "mtgrpo", "train"],
    "accelerate": ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "-m", "mtgrpo", "train"],
}
real = pytest.mark.real
whole = pytest.mark.timeout(1500)


def start(folder: Path, launched: str, *words: str) -> subprocess.Popen[str]:
    program, *rest = [*LAUNCHED.get(launched, ["mtgrpo", "train"]), *WORDS, *words, f"hydra.run.dir={folder}"]
    pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([str(BIN / program), *rest], text=True, start_new_session=True, **pipe)


def ran(folder: Path, launched: str, *words: str) -> Path:
    process = start(folder, launched, *words)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    return ran(tmp_path_factory.mktemp("alone") / "run", "", "trainer.steps=10")


@real
@whole
@pytest.mark.parametrize("launched", LAUNCHED)
def test_ranks_learn_what_one_process_does_however_they_start(launched: str, alone: Path, tmp_path: Path) -> None:
    together = ran(tmp_path / "run", launched, "trainer.steps=10")
    apart, where = furthest_of_runs(alone, together)
    assert apart < 1e-12, where
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert sorted(path.name for path in (together / "ranks").glob("*.log")) == ["rank_0.log", "rank_1.log"]


SRUN = """#!{python}
import subprocess, sys
command = sys.argv[1:]
command[command.index("--rdzv-endpoint") + 1] = "127.0.0.1:{port}"
nodes = [subprocess.Popen(command) for _ in range(2)]
sys.exit(max(node.wait() for node in nodes))
"""


@real
@whole
def test_the_script_for_slurm_starts_what_two_nodes_train_together(alone: Path, tmp_path: Path) -> None:
    """With programs in the place of Slurm's, and both nodes on this machine."""
    programs, folder = tmp_path / "bin", tmp_path / "run"
    words = [*WORDS, "parallel=fsdp2", "trainer.steps=10", f"hydra.run.dir={folder}"]
    script = slurm.script(["nodes=2", "gpus=1", *words], sys.executable)
    programs.mkdir()
    (programs / "scontrol").write_text("#!/bin/sh\necho node-of-this-job\n")
    (programs / "srun").write_text(SRUN.format(python=sys.executable, port=unused_port()))
    for program in programs.iterdir():
        program.chmod(0o755)
    of_slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    job = subprocess.run(
        ["bash"], input=script, env={**os.environ, **of_slurm, "PATH": path}, text=True,
        capture_output=True, timeout=900, cwd=tmp_path,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    apart, where = furthest_of_runs(alone, folder)
    assert apart < 1e-12, where
    assert sorted(path.name for path in (folder / "ranks").glob("*.log")) == ["rank_0.log", "rank_1.log"]


def steps(folder: Path) -> int:
    return sum("policy/loss" in row for row in rows(folder)) if (folder / "metrics.jsonl").is_file() else 0


@real
@whole
@pytest.mark.parametrize("launched", ["own", "torchrun"])
def test_a_run_whose_rank_was_killed_ends_and_can_go_on(launched: str, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, launched, "trainer.steps=4000")
    wait_for(lambda: steps(folder) >= 3)
    os.kill(pids(folder)[1], signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    told = [line for line in said.splitlines() if line.startswith("mtgrpo: ") and "demonstrations" not in line]
    how = "by signal 9" if launched == "own" else "its process is gone"
    assert len(told) == 1 and re.search(f"rank 1 was killed.*{how}; .*rank_1.log; go on with .*resume=true", told[0])

    ran(folder, launched, "trainer.steps=10", "resume=true")
    apart, where = furthest_of_runs(alone, folder)
    assert apart < 1e-12, where


@real
@whole
@pytest.mark.parametrize("launched", ["own", "torchrun"])
def test_ctrl_c_saves_and_says_how_to_go_on(launched: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, launched, "trainer.steps=4000")
    wait_for(lambda: steps(folder) >= 3)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert "interrupted; saved in" in said and "resume=true" in said
    saved = max((folder / "checkpoints").glob("step_*"))
    assert int(saved.name.removeprefix("step_")) == steps(folder)
    assert not any(map(alive, pids(folder)))


@real
@whole
@pytest.mark.parametrize(
    ("words", "fails", "told"),
    [
        (["eval"], True, "mtgrpo: WORLD_SIZE=2: eval takes one process; start it without torchrun"),
        (["train", "seed=1,2", "-m"], True, "mtgrpo: torchrun starts the ranks of one run, not of --multirun"),
        (["train", "optimizer.lr=-1"], True, "mtgrpo: optimizer.lr must be > 0"),
        (["train", "--dry-run"], False, "no fault found"),
    ],
)
def test_what_a_launcher_starts_says_it_once(words: list[str], fails: bool, told: str, tmp_path: Path) -> None:
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "mtgrpo"]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert bool(done.returncode) == fails and (done.stdout + done.stderr).count(told) == 1
    assert not list(tmp_path.iterdir())


async def test_a_keeper_closes_its_door_once_all_are_in(tmp_path: Path) -> None:
    keeper = Keeper(lambda: ("127.0.0.1", "node"))
    door = keeper.door(b"key")
    log = str(tmp_path / "log")
    running = asyncio.to_thread(keeper.run, ["json.tool", "--help"], {}, log, 1)
    code, inside = await asyncio.gather(running, asyncio.to_thread(Client, door, authkey=b"key"))
    inside.close()
    assert code == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(door).close()
