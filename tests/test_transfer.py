"""Weights from memory to memory: which way is chosen, buckets, what vLLM is told; on a GPU that it arrives."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from mtgrpo.config.helptext import help_text
from mtgrpo.engines.auto import Auto
from mtgrpo.engines.local.engine import LocalEngine
from mtgrpo.engines.server import Server, Sync
from mtgrpo.engines.server import push as module
from mtgrpo.engines.server.engine import PUSHES, ServerEngine
from mtgrpo.engines.server.push import IPC, NCCL, Files, Transfer, buckets
from mtgrpo.engines.server.replica import HEALTH, LostError
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.model.load import ModelSettings, load_model
from mtgrpo.model.settings import DType, LoRA
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.types import Sampling
from mtgrpo.weights.source import ModelWeights
from saving import save_model
from test_engine import make_model
from test_vllm import CLOSE, LONGEST, SMALL, apart, nudge, python, turn, until

__all__ = ["python"]  # a fixture

SMALL_BUCKET = 2**19


class Recorder:
    """In the place of a server: takes everything, and keeps what it was sent."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def ask(self, method: str, path: str, body: Any = None, *_: Any, **params: Any) -> Any:
        self.asked.append((path, body))
        return {"world_size": 2}


class Mapped(IPC):
    """Through a file that both sides map, where there is no GPU; the other side is `vllm_mapped.py`."""

    backend = "mapped"

    async def load(self, server: Any) -> None:
        await Transfer.load(self, server)

    async def _send(self, server: Any, info: dict[str, Any], filled: torch.Tensor) -> None:
        path, sizes = self._folder.with_name("bucket"), [self._sizes[name] for name in info["names"]]
        filled.numpy().tofile(path)
        info |= {"tensor_sizes": sizes, "ipc_handles": {"cpu": [str(path), len(filled)]}}
        await server.ask("POST", "/update_weights", {"update_info": info})


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", SMALL_BUCKET)


# --- which way ---


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("settings", [Server(), Server().placed((1,), False), Server(url=["http://s"])])
def test_a_way_that_was_run_is_chosen_also_where_there_is_a_gpu(
    gpu: bool, settings: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert settings.way(adapted=False) == (Sync.files, "engine.sync=auto: files, for all weights are trained")
    assert settings.way(adapted=True) == (Sync.adapter, "engine.sync=auto: adapter, for an adapter is trained")


@pytest.mark.parametrize(
    ("option", "named", "words"),
    [
        ("engine=server", "engine.sync", "ipc and nccl are experimental"),
        ("engine=server", "engine.kind", "sglang is experimental"),
        ("reward=unit_tests", "reward.sandbox.kind", "SandboxFusion at `url`, is experimental"),
    ],
)
def test_help_names_what_was_never_run(option: str, named: str, words: str) -> None:
    entries = re.split(r"\n {2}(?=\S)", help_text([option]))
    (entry,) = (entry for entry in entries if entry.startswith(f"{named} "))
    assert words in " ".join(entry.split())


def test_the_way_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    save_model(make_model(), load_tokenizer("tiny"), tmp_path)
    for settings, way in ((ModelSettings("tiny"), "files"), (ModelSettings(str(tmp_path), lora=LoRA(4)), "adapter")):
        assert Server().chosen(settings)[1].startswith(f"engine.sync=auto: {way}, for ")
    assert Server(sync=Sync.none).chosen(ModelSettings("tiny"))[1] == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync": Sync.ipc, "url": ["http://s"]}, "`sync=ipc` needs servers that are started on the trainer's GPU"),
        ({"sync": Sync.ipc, "tensor_parallel": 2}, "`sync=ipc` needs servers .* leave .* `tensor_parallel` out"),
        ({"sync": Sync.nccl, "kind": "sglang", "url": ["http://s"]}, "`sync=nccl` is vLLM's: set `sync=files`"),
    ],
)
def test_a_way_that_cannot_lead_there_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Server(**settings)


def test_a_way_that_this_machine_or_model_has_not_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(make_model(), load_tokenizer("tiny"), tmp_path)
    adapted = ModelSettings(str(tmp_path), lora=LoRA(4))
    with pytest.raises(ConfigError, match=r"engine\.sync=files pushes all weights.*set engine.sync=adapter"):
        Server(sync=Sync.files).chosen(adapted)
    ways = (Server(sync=Sync.ipc), Server(sync=Sync.nccl), Server(sync=Sync.nccl, url=["http://s"]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for settings in ways:
        with pytest.raises(ConfigError, match=r"engine\.sync=(ipc|nccl) needs an NVIDIA GPU, and torch finds none"):
            settings.chosen(ModelSettings("tiny"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for settings in ways:
        with pytest.raises(ConfigError, match=r"pushes all weights, and adapters are trained: set engine.sync=adapter"):
            settings.chosen(adapted)


def test_auto_can_be_started_without_having_chosen() -> None:
    model = load_model(ModelSettings("tiny"), 0)
    assert isinstance(Auto().start(ModelWeights(model), True, 64), LocalEngine)


# --- buckets ---


@pytest.mark.parametrize("kind", [DType.float32, DType.bfloat16])
def test_buckets_hold_every_weight_of_the_files_once_and_byte_for_byte(
    kind: DType, tmp_path: Path, small_buckets: None
) -> None:
    model, dtype = load_model(ModelSettings("tiny", kind, value_head=True), 0), getattr(torch, kind.value)
    push, files = Mapped(tmp_path / "a", ModelWeights(model)), Files(tmp_path / "b", ModelWeights(model))
    pushed = push.write(ModelWeights(model, 1))
    files.write(ModelWeights(model, 1))
    expected = load_file(tmp_path / "b/served/model.safetensors")
    assert pushed == sum(weight.nbytes for weight in expected.values()), "the tied head is one of its own, both ways"
    server, largest = Recorder(), max(weight.nbytes for weight in expected.values())
    read = dict[str, torch.Tensor]()

    async def ask(method: str, path: str, body: Any = None) -> None:
        """Reads a bucket while it is there, as a server does."""
        if path == "/update_weights":
            info = body["update_info"]
            server.asked.append((path, info))
            space = torch.from_numpy(numpy.fromfile(info["ipc_handles"]["cpu"][0], dtype=numpy.uint8))
            assert space.nbytes == sum(info["tensor_sizes"]) <= max(SMALL_BUCKET, largest)
            parts = zip(info["names"], info["shapes"], space.split(info["tensor_sizes"]), strict=True)
            read.update({name: part.clone().view(dtype).view(shape) for name, shape, part in parts})

    server.ask = ask  # type: ignore[method-assign]
    asyncio.run(push.load(server))
    sent = [info for _, info in server.asked]
    names = [name for info in sent for name in info["names"]]
    assert len(sent) > 2 and len(names) == len(set(names)) and set(names) == set(expected)
    for one, other in itertools.pairwise(sent):
        assert sum(one["tensor_sizes"]) + other["tensor_sizes"][0] > push._capacity, "full, but for what comes next"
    assert all(torch.equal(read[name], weight) for name, weight in expected.items())
    config, theirs = (json.loads((tmp_path / place / "served/config.json").read_text()) for place in "ab")
    assert config["tie_word_embeddings"] is False and config["architectures"] == theirs["architectures"]
    assert [path.name for path in (tmp_path / "a/served").iterdir()] == ["config.json"]


def test_a_weight_larger_than_a_bucket_has_one_of_its_own() -> None:
    found = list(buckets({"a": 2, "b": 10, "c": 3, "d": 7, "e": 1}, 10))
    assert found == [["a"], ["b"], ["c", "d"], ["e"]]


def test_what_was_trained_since_is_not_current(tmp_path: Path) -> None:
    model, changes = load_model(ModelSettings("tiny"), 0), [0]
    push = Mapped(tmp_path, ModelWeights(model))
    push.write(ModelWeights(model, 1, lambda: changes[0]))
    assert push.current
    changes[0] += 1
    assert not push.current
    push.write(ModelWeights(model, 2, lambda: changes[0]))
    assert push.current


def test_a_push_is_one_update_from_start_to_finish(tmp_path: Path, small_buckets: None) -> None:
    server, source = Recorder(), ModelWeights(load_model(ModelSettings("tiny"), 0), 1)
    push = Mapped(tmp_path, source)
    push.write(source)
    asyncio.run(meet_and_load(push, server))
    first, start, *sent, finish = [path for path, _ in server.asked]
    assert first == "/init_weight_transfer_engine" and server.asked[0][1] == {"init_info": {"packed": True}}
    assert (start, finish) == ("/start_weight_update", "/finish_weight_update")
    assert set(sent) == {"/update_weights"} and len(sent) > 1


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU and NCCL would say."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(module, "reduce_tensor", lambda filled: (None, (1, b"handle")))
    said = {"unique_id": lambda: bytes(range(128)), "broadcast": lambda *filled, **more: None}
    monkeypatch.setattr(module, "nccl", SimpleNamespace(**said))
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(NCCL, "_join", lambda push, name, ranks: None)


def test_a_server_and_the_trainer_do_their_parts_of_nccl_at_once(
    tmp_path: Path, small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    source = ModelWeights(load_model(ModelSettings("tiny"), 0), 1)
    joined, push = threading.Event(), NCCL(tmp_path, source)
    push.write(source)

    class Refusing(Recorder):
        refused = ""

        async def ask(self, method: str, path: str, body: Any = None, *_: Any, **params: Any) -> Any:
            if path == self.refused:
                raise LostError(f"no {path}")
            return await super().ask(method, path, body)

    server = Refusing()
    monkeypatch.setattr(module.nccl, "broadcast", lambda *filled, **more: joined.wait(60))
    with pytest.raises(EngineError, match="lost while weights were sent by NCCL: resume the run; no /update_weights"):
        server.refused = "/update_weights"
        asyncio.run(meet_and_load(push, server))
    monkeypatch.setattr(NCCL, "_join", lambda push, name, ranks: joined.wait(60))
    with pytest.raises(LostError, match="no /init_weight_transfer_engine"):
        server.refused = "/init_weight_transfer_engine"
        asyncio.run(push.meet(server))
    joined.set()
    server.refused = ""
    server.asked.clear()
    asyncio.run(meet_and_load(push, server))
    world, init, start, *sent, finish = [path for path, _ in server.asked]
    assert (world, init) == ("/get_world_size", "/init_weight_transfer_engine")
    assert (start, finish) == ("/start_weight_update", "/finish_weight_update")
    assert set(sent) == {"/update_weights"} and len(sent) > 1


async def meet_and_load(push: Transfer, server: Any) -> None:
    await push.meet(server)
    await push.load(server)


# --- what vLLM makes of it ---

CHECK = """
import json, sys
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
told = json.load(open(sys.argv[1]))
ipc = ipc_engine.IPCWeightTransferUpdateInfo(**told["ipc"])
assert ipc.ipc_handles == {"GPU-1": (1, b"handle")} and sum(ipc.tensor_sizes) > 0
assert ipc_engine.IPCWeightTransferInitInfo(**told["met"]).packed
nccl_engine.NCCLWeightTransferUpdateInfo(**told["nccl"])
group = nccl_engine.NCCLWeightTransferInitInfo(**told["group"])
assert group.nccl_unique_id_bytes == bytes(range(128)) and (group.rank_offset, group.world_size) == (1, 3)
assert group.packed and group.packed_buffer_size_bytes > sum(ipc.tensor_sizes)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in told["words"]:
    found = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    print(found.load_format, EngineArgs.from_cli_args(found).weight_transfer_config.backend)
"""


@pytest.mark.real
@pytest.mark.timeout(600)
def test_vllm_accepts_what_it_is_told(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ModelWeights(load_model(ModelSettings("tiny", DType.bfloat16), 0), 1)
    server, ways = Recorder(), (IPC(tmp_path, source), NCCL(tmp_path, source))
    without_gpu(monkeypatch)

    async def tell() -> None:
        for push in ways:
            push.write(source)
            await meet_and_load(push, server)

    asyncio.run(tell())
    bodies = [next(iter(body.values())) for _, body in server.asked if body]
    (met, group), (ipc, broadcast) = ([b for b in bodies if ("names" in b) is named] for named in (False, True))
    told = {"ipc": ipc, "met": met, "nccl": broadcast, "group": group}
    told["words"] = [["--model", push.served, *push.words] for push in ways]
    (tmp_path / "told.json").write_text(json.dumps(told))
    allowed = {**os.environ, **IPC.variables, "PYTHONPATH": ""}
    command = [python, "-c", CHECK, str(tmp_path / "told.json")]
    done = subprocess.run(command, env=allowed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["dummy ipc", "dummy nccl"]


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_a_server_that_begins_without_weights_takes_them_in_buckets_and_proves_it(
    python: str, tmp_path: Path, small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real vLLM, but for the memory that both sides map: a file here, which on a GPU is the GPU's own."""
    monkeypatch.setitem(PUSHES, Sync.files, Mapped)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={Path(__file__).parent} exec {python} "$@"\n')
    wrapper.chmod(0o755)
    arguments = [*SMALL, "--worker-extension-cls", "vllm_mapped.Extension"]
    asyncio.run(pushed(Server(python=str(wrapper), arguments=arguments), tmp_path))


async def pushed(settings: Server, folder: Path) -> None:
    model = make_model()
    engine = settings.start(ModelWeights(model), True, LONGEST, folder)
    try:
        await samples_after_each_push(engine, model)
        (replica,) = engine._replicas
        assert replica.process
        await replica.process.stop()
        await engine._each(lambda lost: lost.ask("GET", HEALTH))
        await until(lambda: not replica.lost.done())
        assert not replica.alive, "it is back, without weights"
        assert not engine._push.current, "those of the push are trained on"
        await engine.load_weights(ModelWeights(model, 3))
        assert apart(model, [20, 30], await turn(engine, "b", [20, 30], Sampling()), Sampling()) < CLOSE
        assert engine.notes[-1] == "engine: server 0 is back"
    finally:
        await engine.close()


async def samples_after_each_push(engine: ServerEngine, model: PreTrainedModel, exact: bool = True) -> None:
    sampling, context, changes = Sampling(max_new_tokens=24), [20, 30, 40], [0]
    for version in range(3):
        await engine.sleep()
        await engine.load_weights(ModelWeights(model, version, lambda: changes[0]))
        await engine.wake()
        found = await turn(engine, "a", context, sampling)
        assert found.versions == [version] * 24
        assert engine.metrics["proof_nats"] < engine.metrics["proof_bound_nats"]
        assert apart(model, context, found, sampling) < (CLOSE if exact else 0.1)
        nudge(model, 1e-2)
        changes[0] += 1


# --- on a GPU ---

IMPORTS = """
import base64, pickle, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
(gpu, handle), = pickle.loads(base64.b64decode(sys.stdin.read())).items()
assert gpu == str(torch.cuda.get_device_properties(0).uuid)
found = rebuild_cuda_tensor(*handle[:6], 0, *handle[7:])
print(found.long().sum().item(), len(found))
"""


@pytest.mark.gpu
def test_another_process_reads_what_a_handle_names() -> None:
    space = torch.arange(2**22, device="cuda").to(torch.uint8)
    filled = space[: 2**21 + 7]
    server, push = Recorder(), IPC(Path(), ModelWeights(load_model(ModelSettings("tiny"), 0)))
    push._sizes = {"a": len(filled)}
    asyncio.run(push._send(server, {"names": ["a"]}, filled))
    ((_, body),) = server.asked
    pickled = body["update_info"]["ipc_handles_pickled"]
    assert len(pickle.loads(base64.b64decode(pickled))) == 1
    done = subprocess.run([sys.executable, "-c", IMPORTS], input=pickled, capture_output=True, text=True)
    assert done.stdout.split() == [str(filled.long().sum().item()), str(len(filled))], done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("way", [Sync.ipc, Sync.nccl])
def test_weights_reach_a_server_from_gpu_memory(
    way: Sync, kind: DType, python: str, tmp_path: Path, small_buckets: None
) -> None:
    if way is Sync.nccl and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    model = load_model(ModelSettings("tiny", kind), 0)
    apart = way is Sync.nccl
    settings = Server(python=python, arguments=SMALL).placed((1,) if apart else (0,), not apart)
    assert settings.way(False)[0] is way
    engine = settings.start(ModelWeights(model), True, LONGEST, tmp_path)

    async def run() -> None:
        try:
            await samples_after_each_push(engine, model, kind is DType.float32)
        finally:
            await engine.close()

    asyncio.run(run())
