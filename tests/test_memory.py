"""The memory plan: what is counted is what is held, and what does not fit is refused with what would help."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from mtgrpo.config.compose import preset
from mtgrpo.config.experiment import Experiment
from mtgrpo.engines import Item, Phase
from mtgrpo.engines.local import Local
from mtgrpo.errors import ConfigError
from mtgrpo.memory import Plan, estimate, plan
from mtgrpo.model.load import load_model
from mtgrpo.model.lora import add_adapter, save_adapter
from mtgrpo.model.settings import DType, LoRA, ModelSettings
from mtgrpo.model.skeleton import Skeleton
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.policy.settings import Kind, OptimizerSettings
from mtgrpo.stages.evaluate import run_evaluation
from mtgrpo.stages.trainer import run_training

GB = 10**9
SIZES = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=512, architectures=["LlamaForCausalLM"])


def named(folder: Path, config: PreTrainedConfig = LLAMA) -> str:
    """A model of which there is only the configuration."""
    config.save_pretrained(folder)
    return str(folder)


def experiment(folder: Path, *words: str) -> Experiment:
    fixed = ("sft.steps=0", "batch.token_budget=4096", "engine.memory_fraction=0.3", "model.dtype=float32")
    return preset("calculator_from_scratch", f"model.name={named(folder)}", *fixed, *words)


def row(found: Plan, name: str) -> Item:
    (only,) = [row for row in found.rows if row.name.startswith(name)]
    return only


# --- the skeleton ---


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("value_head", [False, True])
def test_a_skeleton_has_the_weights_of_the_model(tmp_path: Path, lora: int, value_head: bool) -> None:
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    settings = ModelSettings(str(tmp_path), lora=LoRA(lora), value_head=value_head)
    skeleton, model = Skeleton(settings, "cpu"), load_model(settings, 0)
    expected = {name: (w.shape, w.dtype, w.requires_grad) for name, w in model.named_parameters()}
    assert {name: (w.shape, w.dtype, w.requires_grad) for name, w in skeleton.model.named_parameters()} == expected


@pytest.mark.parametrize("name", ["tiny", "tiny-2m"])
@pytest.mark.parametrize("dtype", DType)
def test_models_from_scratch_share_embedding_and_head(name: str, dtype: DType) -> None:
    skeleton, model = Skeleton(ModelSettings(name, dtype), "cpu"), load_model(ModelSettings(name, dtype), 0)
    assert sum(w.nbytes for w in skeleton.trained) == sum(w.nbytes for w in model.parameters())
    assert skeleton.training_bytes(256) > 0


def test_a_saved_adapter_and_its_base(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LLAMA)
    model.save_pretrained(tmp_path / "base")
    add_adapter(model, LoRA(8), 0)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter")
    skeleton = Skeleton(ModelSettings(str(tmp_path / "adapter")), "cpu")
    assert sum(w.numel() for w in skeleton.trained) == sum(w.numel() for w in model.parameters() if w.requires_grad)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.name=.*nothing cannot be loaded: there is no such folder"):
        Skeleton(ModelSettings(str(tmp_path / "nothing")), "cpu")


def test_the_cache_of_a_token(tmp_path: Path) -> None:
    for dtype, size in ((DType.float32, 4), (DType.bfloat16, 2), (DType.float16, 2), (DType.float64, 8)):
        assert Skeleton(ModelSettings(named(tmp_path), dtype), "cuda").kv_cache_bytes == 2 * 4 * 2 * 64 * size


def kept_bytes(model: torch.nn.Module, run: Callable[[], Tensor]) -> int:
    """What autograd keeps of a real forward pass, weights not counted."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = run()
    del found
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_what_is_kept_is_counted(dtype: DType, checkpointing: bool) -> None:
    """Per token: the peak is what the real forward pass keeps, and what one layer and the head make on their way."""
    settings = ModelSettings("tiny-2m", dtype, checkpointing=checkpointing)
    model, skeleton = load_model(settings, 0), Skeleton(settings, "cpu")
    ids = torch.zeros(1, 1024, dtype=torch.long)
    kept = kept_bytes(model, lambda: model.base_model(input_ids=ids, use_cache=False).last_hidden_state) / 1024
    counted = (skeleton.training_bytes(8192) - skeleton.training_bytes(4096)) / 4096
    layer = 40 * 192 * 4  # of checkpointed layers one is whole
    assert kept <= counted <= 1.1 * kept + layer


def test_checkpointing_needs_less(tmp_path: Path) -> None:
    plain, twice = (
        Skeleton(ModelSettings(named(tmp_path), checkpointing=on), "cuda").training_bytes(8192) for on in (False, True)
    )
    assert twice < plain / 2


def test_other_families(tmp_path: Path) -> None:
    gpt2 = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, architectures=["GPT2LMHeadModel"])
    assert Skeleton(ModelSettings(named(tmp_path, gpt2)), "cuda").training_bytes(512) > 0
    windowed = Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=64, intermediate_size=512, use_sliding_window=True, sliding_window=64,
        max_window_layers=2, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    assert Skeleton(ModelSettings(named(tmp_path, windowed)), "cuda").training_bytes(512) > 0


def test_a_model_without_such_attention_is_refused(tmp_path: Path) -> None:
    mamba = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, architectures=["MambaForCausalLM"])
    with pytest.raises(ConfigError, match="MambaForCausalLM has no scaled dot-product attention; such models are not"):
        Skeleton(ModelSettings(named(tmp_path, mamba)), "cpu")


@pytest.mark.parametrize("dtype", DType)
def test_of_layers_that_look_at_contents_nothing_is_known(dtype: DType, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    config = Qwen3MoeConfig(**SIZES, **sizes, num_key_value_heads=2, architectures=["Qwen3MoeForCausalLM"])
    words = (f"model.name={named(tmp_path, config)}", f"model.dtype={dtype.value}", "engine.memory_fraction=0.3")
    found = estimate(preset("calculator_from_scratch", *words), 80 * GB, "cuda")
    assert row(found, "activations are not known").bytes == 0
    size = {DType.float32: 4, DType.float64: 8}.get(dtype, 2)
    assert row(found, "KV cache").name == f"KV cache, {24 * GB // (2 * 4 * 2 * 64 * size):,} tokens"


# --- the plan ---


def test_rows_of_a_plan(tmp_path: Path) -> None:
    full, kl = experiment(tmp_path), experiment(tmp_path, "kl.coef=0.1")
    found = estimate(full, 80 * GB, "cuda")
    weights = row(found, "weights").bytes
    assert weights == 4 * (2 * 4096 * 256 + 4 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 512 + 2 * 256) + 256)
    assert row(found, "gradients").bytes == weights and row(found, "optimiser state").bytes == 2 * weights
    assert row(found, "KV cache") == Item(f"KV cache, {24 * GB // 4096:,} tokens", 24 * GB, (Phase.sampling,))
    assert row(found, "engine's copy").bytes == weights - 2 * 4 * 4096 * 256 - 4 * 256 * 9
    assert row(estimate(kl, 80 * GB, "cuda"), "reference").bytes == weights
    assert found.peak == found.needed(found.peak_phase) == max(found.needed(phase) for phase in Phase)


def test_adapters_train_little(tmp_path: Path) -> None:
    full = estimate(experiment(tmp_path), 80 * GB, "cuda")
    found = estimate(experiment(tmp_path, "model.lora.rank=4"), 80 * GB, "cuda")
    assert row(found, "gradients").bytes < row(full, "gradients").bytes / 20
    assert row(found, "engine's copy").bytes == row(full, "engine's copy").bytes


def test_the_cache_stays_where_rollouts_run_ahead(tmp_path: Path) -> None:
    words = ("rollout.max_staleness=1", "trainer.deterministic=false")
    found = estimate(experiment(tmp_path, *words), 80 * GB, "cuda")
    assert row(found, "KV cache").phases == tuple(Phase)


def test_muon_keeps_one_moment(tmp_path: Path) -> None:
    adamw, muon = (
        row(estimate(experiment(tmp_path, f"optimizer.kind={kind}"), 80 * GB, "cuda"), "optimiser state").bytes
        for kind in ("adamw", "muon")
    )
    matrices = 4 * 4 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 512)
    assert adamw - muon == matrices


def test_a_description_is_aligned(tmp_path: Path) -> None:
    lines = estimate(experiment(tmp_path), 80 * GB, "cuda").describe().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["GB", "sampling", "training", "update"]
    assert lines[-1].split() == ["usable", "73.6", "73.6", "73.6"]


def test_layers_are_computed_twice_where_memory_asks_for_it(tmp_path: Path) -> None:
    words = ("engine.memory_fraction=0.1",)
    plain = plan(experiment(tmp_path, *words), 80 * GB, "cuda")
    assert not plain.experiment.model.checkpointing
    tight = int(0.9 * plain.needed(Phase.training))
    found = plan(experiment(tmp_path, *words), tight, "cuda")
    assert found.experiment.model.checkpointing and found.peak < plain.peak
    with pytest.raises(ConfigError, match=r"\(training\).*: set model\.checkpointing=true \(\d\.\d\d GB\)$"):
        plan(experiment(tmp_path, *words, "model.checkpointing=false"), tight, "cuda")


def test_what_does_not_fit_is_refused_with_what_would_help(tmp_path: Path) -> None:
    asked = experiment(tmp_path, "batch.token_budget=16384", "engine.memory_fraction=0.05")
    with pytest.raises(ConfigError, match=r"twice needs .*training.*: set batch\.token_budget=4096 \(1\.\d+ GB\)$"):
        plan(asked, int(1.45 * GB), "cuda")
    asked = experiment(
        tmp_path, "batch.token_budget=1024", "environment.max_context_length=32768", "engine.memory_fraction=0.135"
    )
    cure = r"set optimizer\.offload=true \(1\.\d+ GB\), then environment\.max_context_length=16384 \("
    with pytest.raises(ConfigError, match=cure):
        plan(asked, int(1.45 * GB), "cuda")
    with pytest.raises(
        ConfigError, match=r"choose a smaller model; .* even with optimizer\.offload=true .*max_context_length=8192"
    ):
        plan(asked, int(1.1 * GB), "cuda")


def test_what_is_proposed_is_enough(tmp_path: Path) -> None:
    """Settings that are proposed, and nothing else, make room."""
    words = ("batch.token_budget=4096", "model.checkpointing=true")
    least = plan(experiment(tmp_path, *words, "model.lora.rank=16"), 80 * GB, "cuda")
    weights = row(estimate(experiment(tmp_path, *words), 80 * GB, "cuda"), "weights").bytes
    device = int((least.peak - row(least, "KV cache").bytes + weights) / (0.92 - 0.3))
    with pytest.raises(ConfigError, match=r": set (.*)$") as refused:
        plan(experiment(tmp_path, *words), device, "cuda")
    proposed = re.findall(r"([\w.]+=\S+) \(", str(refused.value).partition(": set ")[2])
    assert proposed and plan(experiment(tmp_path, *words, *proposed), device, "cuda").fits


def test_a_cpu_takes_memory_for_a_cache_when_it_is_used(tmp_path: Path) -> None:
    few = experiment(tmp_path, "rollout.max_concurrent=2", "environment.max_context_length=100")
    assert row(estimate(few, 80 * GB, "cpu"), "KV cache").bytes == 2 * 128 * 4096  # whole blocks


def test_a_gpu_settles_what_is_left_open(tmp_path: Path) -> None:
    """The largest budget that fits; layers are computed twice rather than a small one; the cache gets the rest."""
    words = ("batch.token_budget=null", "engine.memory_fraction=null", "model.checkpointing=null")
    open_ = experiment(tmp_path, *words, "environment.max_context_length=4096", "rollout.max_concurrent=500")
    settled: dict[float, tuple[bool | None, int]] = {}
    for size in (80, 6, 1.6):
        found = plan(open_, int(size * GB), "cuda")
        settled[size] = (found.experiment.model.checkpointing, found.experiment.batch.tokens)
        engine = found.experiment.engine
        assert isinstance(engine, Local) and found.fits
        cache = row(found, "KV cache").bytes
        assert cache == pytest.approx(engine.cache_share * size * GB, rel=1e-6)
        left = 0.92 * size * GB - found.needed(Phase.sampling) + cache
        assert cache == pytest.approx(min(500 * 4096 * 4096, left), rel=1e-6)
    assert settled[80] == (False, 65_536)
    assert settled[6][0] is False and 16_384 <= settled[6][1] < 65_536
    assert settled[1.6] == (True, 8192)
    assert plan(open_, 80 * GB, "cpu").experiment.batch.tokens == 16_384


def test_how_long_contexts_grow_does_not_depend_on_the_room_for_them(tmp_path: Path) -> None:
    made = experiment(tmp_path, "model.checkpointing=true", "batch.token_budget=null")
    small, large = (plan(made, room, "cuda").experiment for room in (2 * GB, 80 * GB))
    assert small.batch.tokens < large.batch.tokens
    assert small.batch.context == large.batch.context == made.batch.context == 16_384
    assert experiment(tmp_path, "batch.token_budget=512").batch.context == 512


def test_a_frozen_base_is_held_and_shared_in_bfloat16(tmp_path: Path) -> None:
    words = ("model.dtype=auto", "model.lora.rank=4")
    full, found = (estimate(experiment(tmp_path, *words[:count]), 80 * GB, "cuda") for count in (1, 2))
    products = 4 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 512)
    adapters = row(found, "gradients").bytes
    assert row(found, "weights").bytes == row(full, "weights").bytes - 2 * products + adapters
    assert row(found, "engine's copy").bytes == row(full, "engine's copy").bytes == 2 * products


def test_four_bits_a_weight(tmp_path: Path) -> None:
    words = ("model.dtype=auto", "model.lora.rank=4", "model.quantization=nf4")
    half, quarter = (estimate(experiment(tmp_path, *words[:count]), 80 * GB, "cuda") for count in (2, 3))
    products = 4 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 256 * 512)
    saved = row(half, "weights").bytes - row(quarter, "weights").bytes
    assert saved == 2 * products - products * 33 // 64
    assert not [r for r in quarter.rows if r.name.startswith("engine's copy")]


def test_offloading_leaves_the_weights_on_the_device(tmp_path: Path) -> None:
    full, found = (
        estimate(experiment(tmp_path, f"optimizer.offload={on}"), 80 * GB, "cuda") for on in ("false", "true")
    )
    assert row(found, "weights") == row(full, "weights")
    assert row(found, "gradients").bytes == 4 * 4096 * 256  # the largest
    assert not [r for r in found.rows if r.name.startswith("optimiser")]
    on_cpu = [
        estimate(experiment(tmp_path, f"optimizer.offload={on}"), 80 * GB, "cpu").rows for on in ("false", "true")
    ]
    assert on_cpu[0] == on_cpu[1]


@pytest.mark.real
def test_the_optimiser_of_each_stage_that_runs_must_have_room(tmp_path: Path) -> None:
    """A warm start steps its own, in `mtgrpo sft` nothing else does; what is proposed is of the stage it helps."""
    words = ("engine.memory_fraction=0.05", "batch.token_budget=1024", "environment.max_context_length=1024")
    made = experiment(tmp_path, *words, "model.checkpointing=true", "sft.steps=1", "sft.optimizer.kind=adamw")
    away, muon = OptimizerSettings(offload=True), OptimizerSettings(Kind.muon)
    warm = replace(made, sft=replace(made.sft, optimizer=away))  # offloads there alone

    def held(made: Experiment) -> tuple[int, int]:
        rows = {row.name: row.bytes for row in estimate(made, 80 * GB, "cuda").rows}
        return rows.get("optimiser state", 0), rows["gradients"]

    whole, little = held(made), (0, 4 * 4096 * 256)
    assert held(replace(made, optimizer=muon)) == held(replace(made, optimizer=away)) == held(warm) == whole
    assert held(replace(warm, optimizer=away)) == held(warm.imitating()) == little

    def cure(made: Experiment) -> str:
        tight = estimate(made, 80 * GB, "cuda").peak - 4 * GB - whole[0] / 2
        with pytest.raises(ConfigError, match=r": set .*optimizer\.offload=true \(") as refused:
            plan(made, int(tight / (0.92 - 0.05)), "cuda")
        return str(refused.value).partition(": set ")[2].partition(" (")[0]

    assert cure(made) == "optimizer.offload=true and sft.optimizer.offload=true"
    assert cure(replace(made, optimizer=away)) == cure(made.imitating()) == "sft.optimizer.offload=true"


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    """As far as a run asks before it loads a model; no GPU is needed to see that it is refused first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda _: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    room = {torch.device("cuda", 1): (free, total)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", room.__getitem__)
    monkeypatch.setattr("mtgrpo.policy.trainer.load_model", lambda *_: pytest.fail("loaded before it was planned"))


@pytest.mark.parametrize(
    ("free", "total", "words", "said"),
    [
        (2**27, 2**27, (), r"even with layers computed twice needs .* GB at its peak .*: choose a smaller model"),
        (GB, 80 * GB, (), r"of 80\.0 GB 73\.6 can be used, 79\.0 of them by others: "),
        (
            80 * GB,
            80 * GB,
            ("environment.max_context_length=500", "engine.memory_fraction=0.000005"),
            r"engine\.memory_fraction=5e-06 of 74\.5 GiB holds the KV cache of a conversation of \d+ tokens, but one "
            r"may grow to 500; set engine\.memory_fraction to at least 0\.0001, or .*max_context_length to at most",
        ),
    ],
)
def test_what_a_gpu_has_no_room_for_is_refused_before_the_model_is_loaded(
    free: int, total: int, words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch, free, total)
    with pytest.raises(ConfigError, match=said) as refused:
        asyncio.run(run_training(preset("calculator_from_scratch", *words), tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("run", [run_training, run_evaluation])
def test_a_cache_that_holds_no_conversation_is_refused_before_the_model_is_loaded_on_a_cpu_too(
    run: Callable[[Experiment, Path], Coroutine[None, None, None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtgrpo.policy.trainer.load_model", lambda *_: pytest.fail("loaded before it was refused"))
    words = ("environment.max_context_length=500", "engine.memory_fraction=0.0000001")
    with pytest.raises(ConfigError, match=r"^engine\.memory_fraction=1e-07 of .* one may grow to 500; set") as refused:
        asyncio.run(run(preset("calculator_from_scratch", *words), tmp_path))
    assert "\n" not in str(refused.value)


def test_four_bits_without_their_package_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    named(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    monkeypatch.setattr("mtgrpo.model.load.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("read"))
    words = (f"model.name={folder}", "model.lora.rank=4", "model.quantization=nf4")
    with pytest.raises(ConfigError, match=r"^model\.quantization=nf4 needs the package bitsandbytes: pip install"):
        asyncio.run(run_training(preset("calculator_from_scratch", *words), tmp_path / "run"))


def test_no_memory_for_the_model_says_what_would_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved ...")

    monkeypatch.setattr("mtgrpo.policy.trainer.load_model", full)
    with pytest.raises(ConfigError, match=r"not enough \(loading\).* Unless it is set, set .*model\.lora\.rank=16"):
        asyncio.run(run_training(preset("calculator_from_scratch"), tmp_path))
