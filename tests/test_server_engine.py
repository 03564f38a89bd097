"""Engines in processes of their own: what is pushed, how it is proven, what is refused; the rest needs real servers."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import socket
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mtgrpo.config.compose import preset
from mtgrpo.engines.auto import Auto
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.decoder import copy_bytes
from mtgrpo.engines.local.serve import LocalServer, cache_share, serve
from mtgrpo.engines.server import Server, Sync, local
from mtgrpo.engines.server import engine as server_engine
from mtgrpo.engines.server.push import Adapter, Files, Nothing, Proof, ProofError
from mtgrpo.engines.server.replica import HEAT, LostError
from mtgrpo.engines.server.vllm import VLLM, environment
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.memory import Phase, estimate
from mtgrpo.model.load import ModelSettings, load_model
from mtgrpo.model.rounding import Reference, plain_logprobs, reference
from mtgrpo.model.settings import DType, Head, LoRA, Quantization
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.model.traits import ordinary_tokens
from mtgrpo.parallel.placement import Placement
from mtgrpo.runtime import isolation
from mtgrpo.runtime.http import HttpClient, HttpError
from mtgrpo.weights.source import ModelWeights
from saving import save_model
from test_memory import named, row


def changed(model: PreTrainedModel, scale: float = 1e-2) -> PreTrainedModel:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(scale * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return model


def listed(model: PreTrainedModel, tokens: list[int], top: int = 20) -> list[dict[int, float]]:
    """As a server would answer that holds the weights of `model`."""
    logprobs = plain_logprobs(model, torch.tensor(tokens))[:-1]
    best = logprobs.topk(top, -1).indices.tolist()
    rows = zip(logprobs, best, tokens[1:], strict=True)
    hot = (plain_logprobs(model, torch.tensor(tokens))[-1] / HEAT).log_softmax(-1)
    return [*({t: row[t].item() for t in {*likeliest, own}} for row, likeliest, own in rows), {343: hot[343].item()}]


def adapted(folder: Path) -> PreTrainedModel:
    base = folder / "base"
    save_model(load_model(ModelSettings("tiny"), 0), load_tokenizer("tiny"), base)
    return changed(load_model(ModelSettings(str(base), lora=LoRA(4)), 0))


# --- the proof ---


def test_a_proof_accepts_the_same_weights_and_names_both_numbers_for_others() -> None:
    model = load_model(ModelSettings("tiny"), 0)
    tokens = ordinary_tokens(model.config, 64).tolist()
    proof = Proof(ModelWeights(model, 7), tokens)
    assert proof.check(listed(model, tokens), "server 0") < 1e-5
    stale = listed(model, tokens)
    proof = Proof(ModelWeights(changed(model, 1e-3), 8), tokens)  # about one optimiser step
    with pytest.raises(ProofError, match="server 0 does not hold the trainer's weights: after update 8") as failed:
        proof.check(stale, "server 0")
    found = re.search(r"by (\S+) nats, and (\S+) are accepted", str(failed.value))
    assert found and float(found[1]) > 3 * float(found[2]) == pytest.approx(3e-4)


def test_a_proof_fails_where_nothing_is_known() -> None:
    model = load_model(ModelSettings("tiny"), 0)
    proof = Proof(ModelWeights(model, 0), [5, 6, 7])
    right = listed(model, [5, 6, 7])
    cold = plain_logprobs(model, torch.tensor([5, 6, 7]))[-1, 343].item()  # not at the temperature that is sampled with
    for found in ([], right[1:], [*right[:-1], {343: math.nan}], [*right[:-1], {343: cold}]):
        with pytest.raises(ProofError):
            proof.check(found, "server 0")


def test_the_tolerance_follows_the_dtype() -> None:
    kinds = (DType.float32, DType.bfloat16, DType.float16)
    exact, *rounded = (
        Proof(ModelWeights(load_model(ModelSettings("tiny", kind), 0), 0), [5, 6, 7]).bound for kind in kinds
    )
    assert exact == 1e-4 and min(rounded) >= 1e-2


def test_a_proof_is_computed_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread begins with the first GPU, where kernels would be launched that are told no device."""
    model, within = load_model(ModelSettings("tiny"), 0), list[object]()

    @contextmanager
    def device_of(weight: object) -> Generator[None]:
        within.append(weight)
        yield
        within.clear()

    def forward(context: Sequence[int]) -> Reference:
        assert within == [next(model.parameters())]
        return reference(model, context)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    Proof(ModelWeights(model, forward=forward), [5, 6, 7])


# --- what is pushed ---


def test_files_are_a_model_whose_head_is_its_own(tmp_path: Path) -> None:
    model = load_model(ModelSettings("tiny", value_head=True), 0)
    push = Files(tmp_path, ModelWeights(model))
    for version in (1, 2):
        written = push.write(ModelWeights(changed(model), version))
    config = json.loads((tmp_path / "served/config.json").read_text())
    assert config["tie_word_embeddings"] is False and written > sum(w.nbytes for w in model.parameters())
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    tokens = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(served(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
    assert served.lm_head.weight.data_ptr() != served.model.embed_tokens.weight.data_ptr()


def test_files_are_written_in_the_dtype_of_the_servers(tmp_path: Path) -> None:
    model = load_model(ModelSettings("tiny", DType.bfloat16), 0)
    Files(tmp_path, ModelWeights(model)).write(ModelWeights(model, 1))
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype="bfloat16")
    assert torch.equal(served.model.norm.weight, model.base_model.norm.weight.bfloat16())


def test_an_adapter_alone_is_pushed_each_time_under_a_name_of_its_own(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    push = Adapter(tmp_path, ModelWeights(model))
    assert (push.served, push.rank) == (str(tmp_path / "base"), 4)
    sizes = [push.write(ModelWeights(model, 0)) for _ in range(2)]  # as before a warm start and after it
    assert sizes[0] < sum(w.nbytes for w in model.parameters()) / 4
    assert [path.name for path in sorted(tmp_path.glob("policy-*"))] == ["policy-2"]
    warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
    served = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(push.served), str(tmp_path / "policy-2"))
    tokens = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(served(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)


def test_each_way_refuses_what_it_cannot_push(tmp_path: Path) -> None:
    source = ModelWeights(load_model(ModelSettings("tiny"), 0))
    with pytest.raises(ConfigError, match=r"engine\.sync=adapter: the model has no adapter"):
        Adapter(tmp_path, source)
    assert Nothing(tmp_path, source).write(source) == 0


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": ["http://localhost:1"], "replicas": 2}, "`replicas=2` has no effect: servers at `url`"),
        ({"kind": "sglang"}, "`kind=sglang`: such servers are not started here"),
        ({"memory_fraction": 1.0}, "`memory_fraction` must be > 0 and < 1, got 1.0"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Server(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["sampling.top_p=0.9", "sampling.min_p=0.1", "sampling.top_k=5000"])
def test_tokens_that_were_kept_must_be_among_those_that_a_server_names(word: str) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.top_k=\d+: .* set sampling\.top_k between 1 and 1008"):
        preset("calculator_from_scratch", "engine=server", word)
    assert preset("calculator_from_scratch", "engine=server", "sampling.top_p=0.9", "sampling.top_k=1008")
    assert preset("calculator_from_scratch", "engine=auto", word), "which may turn out to be local"


@pytest.mark.parametrize(
    ("settings", "gpus", "shared", "replicas", "visible"),
    [
        (Server(), (0,), True, 1, ["4"]),
        (Server(replicas=2), (0,), True, 2, ["4", "4"]),
        (Server(), (1, 2), False, 2, ["5", "6"]),
        (Server(tensor_parallel=2), (0, 1, 2, 3), True, 2, ["4,5", "6,7"]),
        (Server(replicas=2, tensor_parallel=2), (3, 2, 1, 0), False, 2, ["7,6", "5,4"]),
        (Server(), (), True, 1, ["4,5,6,7"]),
    ],
)
def test_each_server_sees_its_own_gpus(
    settings: Server,
    gpus: tuple[int, ...],
    shared: bool,
    replicas: int,
    visible: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    placed = settings.placed(gpus, shared)
    assert (placed.replicas, placed.shares_gpu, settings.gpus) == (replicas, shared, ())
    seen = [environment(placed, number)["CUDA_VISIBLE_DEVICES"] for number in range(replicas)]
    assert seen == visible
    seen = [local.environment(placed, number)["CUDA_VISIBLE_DEVICES"] for number in range(replicas)]
    assert seen == visible


@pytest.mark.parametrize(
    ("given", "gpu", "shared", "told"),
    [
        (None, False, True, "0.1"),
        (0.2, False, True, "0.2"),
        (None, True, True, "0.5"),
        (None, True, False, "0.9"),
        (0.7, True, True, "0.7"),
    ],
)
def test_a_server_of_the_local_engine_is_told_the_memory_that_is_planned(
    given: float | None, gpu: bool, shared: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    settings = Server(kind="local", memory_fraction=given).placed((0,) if gpu else (), shared)
    words = local.command(settings, "tiny", "float32", 64, [])
    assert words[words.index("--memory-fraction") + 1] == told


def test_of_a_gpu_the_weights_take_their_part_of_a_servers_memory() -> None:
    model = load_model(ModelSettings("tiny"), 0)
    weights = sum(weight.nbytes for weight in model.parameters())
    copied = copy_bytes(model, "cuda")
    assert 0 < copied < weights
    assert cache_share(0.5, model, 10 * weights, "cuda") == pytest.approx(0.3 - copied / (10 * weights))
    assert cache_share(None, model, weights, "cuda") is None and cache_share(0.5, model, weights, "cpu") == 0.5
    with pytest.raises(ConfigError, match=r"engine\.memory_fraction=0\.1 of .* leaves nothing for the KV cache"):
        cache_share(0.1, model, 10 * weights, "cuda")


@pytest.mark.parametrize("settings", [Server(replicas=2), Server(tensor_parallel=2)])
def test_servers_on_another_number_of_gpus_than_they_take_are_refused(settings: Server) -> None:
    with pytest.raises(ConfigError, match=r"sample on \d GPUs, and 3 are there .*: set devices\.rollout\.num=2"):
        settings.placed((1, 2, 3), False)


def test_ways_that_need_a_gpu_of_ones_own_say_so() -> None:
    with pytest.raises(ConfigError, match=r"engine\.sync=ipc needs .*: leave devices\.rollout out"):
        preset("calculator_from_scratch", "engine=server", "engine.sync=ipc", "devices.rollout.num=1")
    with pytest.raises(ConfigError, match=r"engine\.sync=nccl needs .*: set devices\.rollout\.num=1"):
        preset("calculator_from_scratch", "engine=server", "engine.sync=nccl")


def test_no_interpreter_is_one_clear_line(tmp_path: Path) -> None:
    model = load_model(ModelSettings("tiny"), 0)
    with pytest.raises(ConfigError, match=r"engine\.python=\S+nowhere: there is no such interpreter.*engine\.url"):
        Server(python=str(tmp_path / "nowhere")).start(ModelWeights(model), True, 64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="servers of a GPU leave the cores to others")
def test_a_server_on_a_cpu_takes_all_cores_and_intels_openmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (openmp := tmp_path / "lib" / "libiomp5.so").touch()
    settings = Server(python=str(tmp_path / "bin" / "python"))
    cores = environment(settings, 0)["VLLM_CPU_OMP_THREADS_BIND"]
    assert {int(core) for core in cores.split(",")} == os.sched_getaffinity(0)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert environment(settings, 0)["LD_PRELOAD"] == str(openmp)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert environment(settings, 0)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    found = environment(settings, 0)
    assert (found["LD_PRELOAD"], found["VLLM_CPU_OMP_THREADS_BIND"]) == ("mine.so", "auto")


def test_no_server_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_engine, "CONNECT_S", 0.0)
    model = load_model(ModelSettings("tiny"), 0)
    with socket.socket() as taken:  # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def start() -> None:
            engine = Server(url=[url]).start(ModelWeights(model), True, 64, tmp_path)
            try:
                await engine.load_weights(ModelWeights(model, 0))
            finally:
                await engine.close()

        with pytest.raises(ConfigError, match=f"no server answers.*the server at {url}.*engine.python=PATH"):
            asyncio.run(start())
    assert list(tmp_path.iterdir()) == []


def test_a_closed_engine_answers_with_an_error(tmp_path: Path) -> None:
    model = load_model(ModelSettings("tiny"), 0)

    async def ask() -> None:
        (left := tmp_path / "mtgrpo-exchange" / "served").mkdir(parents=True)
        engine = Server(url=["http://127.0.0.1:1"], sync=Sync.none).start(ModelWeights(model), True, 64, tmp_path)
        assert left.parent.exists() and not left.exists()  # of a run that was killed
        await engine.close()
        async with engine.conversation(server_engine.Key(0, "t", "0", 0)) as sample:
            await sample([5], server_engine.Sampling(max_new_tokens=1))

    with pytest.raises(EngineError, match="the engine is closed"):
        asyncio.run(ask())


def test_servers_are_looked_after_where_their_machines_cannot_be_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_engine, "HEALTH_S", 0.01)
    asked: list[str] = []

    class Vague:
        def is_leaving(self) -> bool:
            raise RuntimeError("the state of the cluster is away")

    async def answer(method: str, path: str, **_: object) -> None:
        asked.append(path)
        if len(asked) == 4:
            raise LostError("gone")

    async def run() -> None:
        model = load_model(ModelSettings("tiny"), 0)
        engine = Server(url=["http://127.0.0.1:1"], sync=Sync.none).start(ModelWeights(model), True, 64, tmp_path)
        (replica,) = engine._replicas
        replica.process, replica.ask = Vague(), answer  # type: ignore[assignment]
        replica.alive, replica.lost = True, asyncio.get_running_loop().create_future()
        engine._spawn(engine._watch())
        await asyncio.wait_for(replica.lost, 20)
        assert [note for note in engine.notes if "looking after" in note] == [
            "engine: looking after the servers failed, and is tried again: RuntimeError: the state of the cluster is "
            "away"
        ]
        replica.process = None
        await engine.close()

    asyncio.run(run())
    assert asked[:4] == ["/health"] * 4


def test_a_server_that_is_lost_while_it_takes_weights_begins_anew(tmp_path: Path) -> None:
    """And only once that has ended: what it unloads to begin anew is what it is given there."""
    done: list[str] = []

    async def run() -> None:
        model = load_model(ModelSettings("tiny"), 0)
        engine = Server(url=["http://127.0.0.1:1"], sync=Sync.none).start(ModelWeights(model), True, 64, tmp_path)
        (replica,) = engine._replicas

        async def answer(method: str, path: str, *_: object, **__: object) -> dict[str, object]:
            return {"success": True}

        async def check(*_: object) -> None:
            done.append("check")

        async def label(version: int) -> None:
            done.append("label")
            if done == ["label"]:
                engine._lose(replica, LostError("connection reset"))
                await asyncio.sleep(0.1)
            done.append("labelled")

        async def likeliest(*_: object) -> list[dict[int, float]]:
            return []

        replica.ask, replica.check, replica.label, replica.likeliest = answer, check, label, likeliest  # type: ignore
        replica.alive, replica.lost = True, asyncio.get_running_loop().create_future()
        engine._proof = SimpleNamespace(version=1, tokens=[], check=lambda *_: 0.0, bound=1.0)  # type: ignore
        async with engine._syncing:
            await engine._each(engine._update)
            assert not replica.alive and done == ["label", "labelled"]
        await asyncio.wait_for(asyncio.gather(*engine._tasks), 20)
        assert replica.alive and done == ["label", "labelled", "check", "label", "labelled"]
        await engine.close()

    asyncio.run(run())


def test_a_server_that_never_proves_its_weights_is_lost(tmp_path: Path) -> None:
    async def run() -> None:
        settings = Server(url=["http://127.0.0.1:1"], sync=Sync.none, start_timeout_s=0.05)
        engine = settings.start(ModelWeights(load_model(ModelSettings("tiny"), 0)), True, 64, tmp_path)
        (replica,) = engine._replicas

        async def at_once(*_: object, **__: object) -> None:
            pass

        async def never(*_: object) -> list[dict[int, float]]:
            await asyncio.sleep(60)
            return []

        replica.reset_cache, replica.label, replica.likeliest = at_once, at_once, never  # type: ignore
        engine._proof = SimpleNamespace(version=1, tokens=[], check=None)  # type: ignore
        with pytest.raises(LostError, match="gave no proof of its weights within"):
            await engine._update(replica)
        await engine.close()

    asyncio.run(run())


def test_a_server_of_the_local_engine_that_shares_a_gpu_sleeps_and_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "MAX_ABANDONED_THREADS", 0)  # tools that hang are no concern of weights
    model = load_model(ModelSettings("tiny"), 0)

    async def run() -> None:
        engine = Server(kind="local").start(ModelWeights(model), False, 64, tmp_path)
        engine._sleeps = True  # as on a GPU
        try:
            await engine.load_weights(ModelWeights(model, 0))
            await engine.sleep()
            await engine.load_weights(ModelWeights(model, 1))
            await engine.wake()
            async with engine.conversation(server_engine.Key(0, "t", "0", 0)) as sample:
                completion = await sample([5, 6], server_engine.Sampling(max_new_tokens=3))
            assert completion.versions == [1] * len(completion.tokens) and engine.metrics["servers"] == 1
        finally:
            await engine.close()

    asyncio.run(run())


def test_adapters_of_a_run_before_are_unloaded_and_the_base_never_is() -> None:
    asked: list[str] = []

    async def models(request: web.Request) -> web.Response:
        base = {"id": "mine", "root": "nowhere", "max_model_len": 64, "parent": None}
        return web.json_response({"data": [base, {"id": "policy-0", "parent": "mine"}]})

    async def adapter(request: web.Request) -> web.Response:
        asked.append(f"{request.match_info['what']} {(await request.json())['lora_name']}")
        return web.Response()

    async def weights(request: web.Request) -> web.Response:
        return web.Response()

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_get("/weight_info", weights)
        app.router.add_post("/v1/{what}_lora_adapter", adapter)
        async with TestServer(app) as listening:
            server = VLLM("s", str(listening.make_url("")))
            await server.check({}, 64)
            for version in (0, 1):
                await server.load_adapter(f"policy-{version}", Path())
            await server.close()

    asyncio.run(run())
    assert asked == ["unload policy-0", "load policy-0", "load policy-1", "unload policy-0"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "socket"])
async def test_a_server_of_the_local_engine_does_nothing_for_the_page_of_a_site(host: str, tmp_path: Path) -> None:
    """A browser lets any page post text to this machine, and a name of the page's own may lead there."""
    place = tmp_path / "socket" if host == "socket" else None
    arguments = argparse.Namespace(uds=place, host=host, port=(port := unused_port()))
    serving = asyncio.create_task(serve(LocalServer(Local(), DType.float32, Head.fp32, 64), arguments))
    url = "http://server" if place else f"http://127.0.0.1:{port}"
    body, json_type = b'{"new_version": 7}', {"Content_Type": "application/json"}
    connector = aiohttp.UnixConnector(str(place)) if place else aiohttp.TCPConnector()
    async with HttpClient(url, socket=place) as client, aiohttp.ClientSession(connector=connector) as session:
        for _ in range(200):
            with suppress(HttpError):
                await client.request("GET", "/health")
                break
            await asyncio.sleep(0.05)
        assert await client.request("POST", "/update_weight_version", {"new_version": 7}) is None
        assert await client.request("POST", "/reset_prefix_cache") == {"success": True}

        async def status(**headers: str) -> int:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.post(f"{url}/update_weight_version", data=body, headers=given) as answer:
                return answer.status

        assert await status(**json_type) == 200
        assert await status(Content_Type="text/plain") == 415
        assert await status(Content_Type="application/x-www-form-urlencoded") == 415
        assert await status(**json_type, Origin="https://evil.example") == 403
        assert await status(**json_type, Origin="null") == 403
        other = await status(**json_type, Host=f"evil.example:{port}")
        assert other == (421 if host == "127.0.0.1" else 200)  # where it listens to all, its names are not known
        assert await status(**json_type, Host=f"LOCALHOST:{port}") == 200
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


# --- which engine ---


def test_auto_says_which_engine_and_why(tmp_path: Path) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=4).save_pretrained(tmp_path)
    large, here = ModelSettings(str(tmp_path)), tmp_path / "config.json"
    chosen, why = Auto().chosen(ModelSettings("tiny"))
    assert chosen == Local() and "local, for the model has 0.00 billion weights" in why
    chosen, why = Auto(python=str(tmp_path / "nowhere")).chosen(large)
    assert chosen == Local() and "there is no engine.python" in why
    chosen, why = Auto(python=str(here)).chosen(large)
    assert chosen == Server(python=str(here)) and "server, for the model has 1.07 billion weights" in why
    chosen, why = Auto(python=str(here)).chosen(replace(large, quantization=Quantization.nf4, lora=LoRA(8)))
    assert chosen == Local() and "local, for a server has no quantized base of adapters" in why


def test_a_server_is_refused_a_quantized_base_unless_told_how_to_quantize() -> None:
    words = ("pretrained_lora", "model.name=smollm2", "model.lora.rank=8", "model.quantization=nf4", "engine=server")
    for more in ("engine.kind=vllm", "engine.kind=local"):
        with pytest.raises(ConfigError, match=r"model\.quantization=nf4 with engine=server: .* set engine=local"):
            preset(*words, more)
    assert preset(*words, "engine.arguments=['--quantization=bitsandbytes']") and preset(
        *words, "engine.url=[http://s]"
    )


def test_the_memory_plan_counts_a_server_beside_the_trainer(tmp_path: Path) -> None:
    words = f"model.name={named(tmp_path)}", "sft.steps=0", "model.dtype=float32", "engine=server"
    found = estimate(preset("calculator_from_scratch", *words), 10**11, "cuda")
    assert row(found, "server's weights and KV cache").bytes == 5 * 10**10
    assert row(found, "server's libraries").bytes == 10**9
    assert (row(found, "weights on their way").bytes, row(found, "weights on their way").phases) == (
        2**28,
        (Phase.sampling,),
    )
    every = estimate(preset("calculator_from_scratch", *words, "engine.kind=local"), 10**11, "cuda")
    assert row(every, "server's weights and KV cache").phases == tuple(Phase), "it does not sleep"
    two = Placement(1, (0,), (1,))
    apart = estimate(preset("calculator_from_scratch", *words), 10**11, "cuda", placement=two)
    assert not any(r.name.startswith(("server", "weights on")) for r in apart.rows)
