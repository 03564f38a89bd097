"""A run whose processes Ray places has the digits of one process; what is killed or taken away comes back."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mtgrpo.cluster.keeper import Facts, versions
from mtgrpo.config.compose import preset
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.serve import SAMPLES, LocalServer
from mtgrpo.errors import ConfigError, RanksError
from mtgrpo.model.load import load_model
from mtgrpo.model.settings import DType, Head, ModelSettings
from mtgrpo.parallel.cluster import ray as settings
from mtgrpo.stages.restarts import restarting
from mtgrpo.types import Sampling
from mtgrpo.weights.saved import find_newest
from mtgrpo.weights.source import ModelWeights
from ranks import furthest_of_runs
from test_cluster import TESTS, WORDS, alive, ran, rows, start, steps

real, whole = pytest.mark.real, pytest.mark.timeout(2000)
BIN, PROJECT = Path(sys.executable).parent, TESTS.parent
STORE_BYTES = 80 * 2**20
PLACED = ["cluster=ray", "cluster.address=local"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"USAGE_STATS_ENABLED": "0", "AUTH_MODE": "token", "AUTH_TOKEN": "f" * 64}
    for name, value in settings.items():
        monkeypatch.setenv(f"RAY_{name}", value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


# --- a server of the local engine ---


async def test_a_server_of_the_local_engine_samples_what_that_does(tmp_path: Path) -> None:
    model = load_model(ModelSettings("tiny", DType.float64), 3)
    ModelWeights(model).save(tmp_path / "served")
    server = LocalServer(Local(), DType.float64, Head.fp32, 256)
    asked = server.routes()
    tokens, sampling = list(range(20, 50)), Sampling(max_new_tokens=12, top_p=0.5)
    words: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.5, "top_k": 0, "min_p": 0.0}
    body = {"token_ids": tokens, "sampling_params": {**words, "seed": 2**64 - 5}}
    with pytest.raises(Exception, match="Service Unavailable") as refused:
        await asked[f"POST {SAMPLES}"](body)
    assert refused.value.status == 503  # pyright: ignore[reportAttributeAccessIssue]

    read = {"kwargs": {"weights_path": str(tmp_path / "served")}}
    await asked["POST /collective_rpc"](read)
    await asked["POST /update_weight_version"]({"new_version": 7})
    engine = Local().start(ModelWeights(model), False, 256)
    expected = await engine.answer(Key(0, "", "", 0), tokens, sampling, 2**64 - 5)
    (choice,) = (await asked[f"POST {SAMPLES}"](body))["choices"]
    assert choice["token_ids"] == expected.tokens and choice["weight_versions"] == [{"version": "7"}]
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected.logprobs, abs=1e-12)
    assert [[one["token_id"] for one in entry["top_logprobs"]] for entry in entries] == [*map(list, expected.kept)]

    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    ModelWeights(model).save(tmp_path / "served")
    long = {"token_ids": tokens, "sampling_params": {**words, "max_tokens": 200}}
    with pytest.raises(Exception, match="Bad Request"):
        await asked[f"POST {SAMPLES}"]({"token_ids": tokens, "sampling_params": {**words, "max_tokens": 227}})
    under_way = asyncio.create_task(asked[f"POST {SAMPLES}"](long))
    await asyncio.sleep(0.05)
    await asked["POST /abort_requests"]({})
    (cut,) = (await under_way)["choices"]
    assert cut["finish_reason"] == "abort" and 0 < len(cut["token_ids"]) < 200
    await asked["POST /collective_rpc"](read)
    answer = await asked[f"POST {SAMPLES}"](
        {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 3}}
    )
    rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    for row, listed, token in zip(rows[:-1], answer["prompt_logprobs"][1:], tokens[1:], strict=True):
        assert len(listed) >= 3 and listed[token]["logprob"] == pytest.approx(row[token].item(), abs=1e-9)


# --- what is refused ---


def test_a_machine_that_is_not_fit_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    fit = Facts("10.0.0.7", "abc", versions(), sees=True)
    assert fit.checked(tmp_path) is fit
    other = {**versions(), "torch": "1.0"}
    with pytest.raises(ConfigError, match=r"^cluster=ray: machine 10\.0\.0\.7 has torch 1\.0, and here is \d.*install"):
        fit._replace(versions=other).checked(tmp_path)
    with pytest.raises(ConfigError, match=rf"^cluster=ray: machine 10\.0\.0\.7 does not see {tmp_path}: set hydra"):
        fit._replace(sees=False).checked(tmp_path)


def test_without_ray_it_is_said_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"cluster=ray needs the package ray: pip install 'mtgrpo\[ray\]'"):
        settings.Ray().check_machine()


def test_the_example_for_kubernetes_is_a_cluster_of_the_version_that_is_tested() -> None:
    cluster = yaml.safe_load((PROJECT / "configs/ray/kuberay.yaml").read_text())
    assert cluster["kind"] == "RayCluster" and cluster["spec"]["rayVersion"] == importlib.metadata.version("ray")


# --- restarts ---


async def test_restarts_are_counted_anew_after_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = preset("calculator", "cluster=ray", "cluster.restarts=2")
    seen: list[tuple[str, int]] = []
    saved = iter([0, 5, 5, 5])
    monkeypatch.setattr("mtgrpo.stages.restarts.find_newest", lambda *_: type("Found", (), {"step": next(saved)}))

    async def work(run: Any) -> None:
        seen.append((run.resume, run.cluster.restarted))
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(1)
        finally:
            raise RanksError("rank 1 was killed by signal 9")

    with pytest.raises(RanksError, match="rank 1 was killed"):
        await restarting(experiment, tmp_path, work)
    assert (
        seen == [("", 0), ("true", 1), ("true", 2), ("true", 3)]
        and capsys.readouterr().err.count("it goes on from step 5") == 2
    )
    seen.clear()
    monkeypatch.setattr("mtgrpo.stages.restarts.find_newest", find_newest)
    with pytest.raises(RanksError):
        await restarting(replace(experiment, resume="elsewhere"), tmp_path, work)
    assert seen == [("elsewhere", 0), ("elsewhere", 1), ("elsewhere", 2)]  # there is no checkpoint in its own folder
    seen.clear()
    with pytest.raises(RanksError):
        await asyncio.create_task(restarting(replace(experiment, cluster=preset("calculator").cluster), tmp_path, work))
    assert seen == [("", 0)]


# --- real clusters ---


def process_of(log: Path) -> int:
    """The program whose output goes to `log`; 0: there is none now."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "fd/1") == str(log):
                return int(entry.name)
        except OSError:
            continue
    return 0


def keeper_of(log: Path) -> int:
    """The actor that keeps it."""
    pid = process_of(log)
    while pid and not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
        pid = parent(pid)
    return pid


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


GATE = '''
import asyncio
from dataclasses import dataclass
from pathlib import Path

from mtgrpo.rewards import Reward


@dataclass
class Gate(Reward):
    """Lets as many tasks pass as a file says, so that a run goes no further than a test wants it to."""

    retries = 0

    async def rewards(self, siblings):
        *_, split, number = siblings[0].task.id.split("/")
        while split == "train" and int(number) >= int(Path("FILE").read_text()):
            await asyncio.sleep(0.02)
        return [sum(map(str.isalpha, one.final)) / max(1, len(one.final)) for one in siblings]
'''


class Run:
    """A run that goes no further than it is let through, two tasks for each step."""

    def __init__(self, place: Path, *words: str) -> None:
        (place / "gate.py").write_text(GATE.replace("FILE", str(place / "open")))
        self.folder, self._place, self._allowed = place / "run", place, 0
        self.words = [*words, f"reward={place}/gate.py:Gate", "eval.every_steps=0"]
        self.let_through(6)
        self.process = start(self.folder, "", *self.words)

    def let_through(self, more: int) -> None:
        self._allowed += more
        (self._place / "new").write_text(str(self._allowed))
        (self._place / "new").rename(self._place / "open")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def notes(self) -> str:
        return path.read_text() if (path := self.folder / "notes.txt").is_file() else ""

    def until(self, holds: Callable[[], Any]) -> None:
        ends = time.monotonic() + 600
        while not holds():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < ends
            time.sleep(0.05)

    def crawl(self, text: str, times: int = 1) -> None:
        """Go on step by step, less and less often, until a note is told, at the end of one."""
        wait_s = 0.5
        while self.notes().count(text) < times:
            done = steps(self.folder)
            self.let_through(2)
            self.until(lambda: steps(self.folder) > done)  # noqa: B023
            time.sleep(wait_s)
            wait_s = min(4.0, 1.5 * wait_s)

    def end(self) -> str:
        """Let it go on to its end, which must be a good one; what it printed."""
        self.let_through(10_000)
        said, _ = self.process.communicate(timeout=700)
        assert self.process.returncode == 0, said
        return said


@contextmanager
def running(place: Path, *words: str) -> Generator[Run]:
    """A run that does not outlive what is done within."""
    run = Run(place, *words)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        if run.process.stdout:
            run.process.stdout.close()


@real
@whole
def test_a_run_of_ray_has_the_digits_of_one_process_whatever_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, *PLACED, "devices.train.num=2", "devices.rollout.num=2", "trainer.steps=30") as run:
        run.until(lambda: steps(run.folder) >= 2)
        run.let_through(2)  # conversations begin
        os.kill(keeper_of(run.log("server_0")), signal.SIGKILL)  # with the server that it keeps
        run.crawl("server 0 is back")
        run.let_through(2)
        os.kill(process_of(run.log("server_1")), signal.SIGKILL)  # a server alone
        run.crawl("server 1 is back")
        os.kill(process_of(run.log("ranks/rank_1")), signal.SIGKILL)
        said = run.end()
    assert re.search(r"rank 1 was killed by signal 9; .*\n.*it goes on from step \d+", said)
    assert run.notes().count("engine: lost a server") == 2
    assert not any(map(process_of, map(run.log, ("server_0", "server_1", "ranks/rank_0", "ranks/rank_1"))))

    alone = ran(tmp_path / "alone", "", *run.words[-2:], "trainer.steps=30")
    apart, where = furthest_of_runs(alone, run.folder)
    assert apart < 1e-12, where
    assert restarts_of(run.folder) == 1


@contextmanager
def raylets(count: int, **head: Any) -> Generator[Any]:
    """A cluster of so many machines with one core each, in processes of this one."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415  takes seconds

    limits = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**limits, "include_dashboard": False, **head})
    try:
        for _ in range(count - 1):
            cluster.add_node(**limits)
        yield cluster
    finally:
        cluster.shutdown()


def restarts_of(folder: Path) -> float:
    """How often the run has begun again, as its last step says."""
    return [row["perf/restarts"] for row in rows(folder) if "policy/loss" in row][-1]


def tasks_of(folder: Path) -> tuple[set[int], set[int]]:
    """The tasks before the last position that were not trained, and those that were trained twice."""
    trained: Counter[int] = Counter()
    for path in sorted((folder / "trajectories").glob("step_*.jsonl")):
        trained.update({int(json.loads(line)["task"].rpartition("/")[2]) for line in path.read_text().splitlines()})
    last = find_newest(folder, print)
    assert last is not None
    stream = last.state["stream"]
    due = {*range(stream["first"]), *stream["trained"]}  # task number n is the n-th that is admitted
    return due - trained.keys(), {task for task, count in trained.items() if count > 1} | (trained.keys() - due)


@real
@whole
@pytest.mark.slow
def test_machines_come_and_go_and_no_group_is_lost_or_repeated(tmp_path: Path) -> None:
    with raylets(3) as cluster:
        words = ["cluster=ray", f"cluster.address={cluster.address}", "rollout.max_staleness=2", "trainer.steps=40"]
        refused = subprocess.run(
            [str(BIN / "mtgrpo"), "train", *WORDS, *words, "devices.rollout.num=7", f"hydra.run.dir={tmp_path}/none"],
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        *_, line = [line for line in refused.stderr.splitlines() if line.startswith("mtgrpo: ")]
        assert refused.returncode == 2 and line.startswith(
            "mtgrpo: cluster=ray: 1 to train and 7 to sample need 8 cores, and there are 3 cores, "
        )
        with running(tmp_path, *words, "devices.rollout.num=2") as run:
            run.until(lambda: steps(run.folder) >= 2)
            run.let_through(4)  # conversations begin
            os.kill(keeper_of(run.log("server_0")), signal.SIGKILL)
            run.crawl("server 0 is back")

            nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
            keepers = {parent(pid): pid for pid in map(keeper_of, map(run.log, ("server_0", "server_1")))}
            raylet = min(nodes.keys() & keepers.keys())  # one of them may be on the head
            drain = ["drain-node", "--address", cluster.address, "--node-id", nodes[raylet].node_id, "--reason"]
            drain += ["DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "300"]
            subprocess.run([str(BIN / "ray"), *drain], check=True, capture_output=True)
            run.crawl("leaves a machine that is about to go")
            run.until(lambda: not alive(keepers[raylet]))
            cluster.remove_node(nodes[raylet], allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
            run.crawl(" is back", 2)

            run.let_through(4)  # conversations that are ahead of the trainer, too
            os.kill(process_of(run.log("ranks/rank_0")), signal.SIGKILL)
            run.until(lambda: process_of(run.log("ranks/rank_0")) and steps(run.folder) and restarts_of(run.folder))

            run.let_through(4)
            servers = [process_of(run.log(f"server_{number}")) for number in (0, 1)]
            run.process.kill()  # the controller
            ends = time.monotonic() + 300
            while any(map(alive, servers)):
                assert time.monotonic() < ends
                time.sleep(0.1)
            at = steps(run.folder)
            run.let_through(10_000)
            ran(run.folder, "", *run.words, "resume=true")
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "policy/loss" in row] == [*range(1, 41)] and at < 40
    assert tasks_of(run.folder) == (set(), set())
    assert run.notes().count("engine: lost a server") == 2 and "goes on from" in run.notes()


@real
@whole
@pytest.mark.slow
def test_machines_that_only_a_network_joins_have_the_digits_of_one_process(
    network: list[list[str]], tmp_path: Path
) -> None:
    ray, head = str(BIN / "ray"), "10.77.0.1"
    joins = [["--head", "--port=6379", "--include-dashboard=false", "--num-cpus=3"], [f"--address={head}:6379"]]
    joins[1].append("--num-cpus=1")
    size = f"--object-store-memory={STORE_BYTES}"
    words = ["cluster=ray", f"cluster.address={head}:6379", "devices.train.num=2", "devices.rollout.num=2"]
    words += ["cluster.wait_s=100"]
    few = ["trainer.steps=3", "eval.every_steps=0"]
    machines: list[subprocess.Popen[bytes]] = []
    try:
        for number, (inside, how) in enumerate(zip(network, joins, strict=True), 1):
            address = f"--node-ip-address=10.77.0.{number}"
            machines.append(subprocess.Popen([*inside, ray, "start", "--block", address, size, *how]))
            answers = [*network[0], "bash", "-c", f"until exec 3<>/dev/tcp/{head}/6379; do sleep 0.2; done"]
            subprocess.run(answers, check=True, capture_output=True, timeout=400)
        command = [*network[0], str(BIN / "mtgrpo"), "train", *WORDS, *words, *few]
        done = subprocess.run([*command, f"hydra.run.dir={tmp_path}/run"], capture_output=True, text=True, timeout=800)
    finally:
        for machine in reversed(machines):
            machine.terminate()
            machine.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    alone = ran(tmp_path / "alone", "", *few)
    apart, where = furthest_of_runs(alone, tmp_path / "run")
    assert apart < 1e-12, where


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@real
@whole
def test_a_run_is_a_job_of_the_cluster_with_the_users_files(tmp_path: Path) -> None:
    files, folder, port = tmp_path / "files", tmp_path / "run", free_port()
    files.mkdir()
    (files / "own.py").write_text((TESTS / "newcomer/rewards.py").read_text())
    words = [word for word in WORDS if not word.startswith("reward=")]
    launch = [str(BIN / "mtgrpo"), "launch", "ray", *words, "trainer.steps=2", f"hydra.run.dir={folder}"]
    launch += [
        "--working-dir",
        str(files),
        "--address",
        f"http://127.0.0.1:{port}",
        "reward=own.py:Tidy",
        "--python",
        sys.executable,
    ]

    def launched(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*launch, *more], capture_output=True, text=True, timeout=800, cwd=tmp_path)

    absent = launched("reward=away.py:Tidy")
    assert absent.returncode == 2 and absent.stderr.count("mtgrpo: ") == 1 and "away.py" in absent.stderr
    nobody = launched()
    assert nobody.returncode == 2
    assert f"mtgrpo: --address=http://127.0.0.1:{port}: no Ray cluster answers" in nobody.stderr

    with raylets(1, num_cpus=2, include_dashboard=True, dashboard_port=port):
        done = launched()
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 2/2  reward" in done.stdout and steps(folder) == 2
        failed = launched("resume=true", "hydra.run.dir=/proc/nowhere")
        assert failed.returncode == 1 and re.search(
            r"mtgrpo: job \S+ has ended as FAILED: .*; to go on: ", failed.stderr
        )
