"""Low-rank adapters: only they are trained, saved and copied; what they compute, every other library computes."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from hydra.types import RunMode
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mtgrpo.config.compose import ExperimentLoader
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.engines.local.decoder import Forward, causal_attention
from mtgrpo.errors import ConfigError
from mtgrpo.model import tiny
from mtgrpo.model.attention import uses_forest
from mtgrpo.model.load import AUTOCAST, DType, ModelSettings, load_model
from mtgrpo.model.lora import LoRA, save_adapter
from mtgrpo.model.settings import Quantization
from mtgrpo.model.skeleton import Skeleton
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.model.value import values
from mtgrpo.policy.optimizer import Kind, Optimizer, OptimizerSettings
from mtgrpo.policy.updater import ReferencePolicy
from mtgrpo.types import Completion, Sampling
from mtgrpo.weights import checkpoint
from mtgrpo.weights.saved import read_checkpoint
from mtgrpo.weights.source import ModelWeights
from saving import save_model

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
}
LAYERS = 2
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
IDS = torch.randint(20, 1000, (3, 11), generator=torch.Generator().manual_seed(0))
TOKENIZER = load_tokenizer("tiny")


def save_base(family: str, folder: Path, hidden: int = 64, layers: int = LAYERS, **more: Any) -> Path:
    config, architecture = FAMILIES[family]
    torch.manual_seed(0)
    model = architecture(
        config(
            vocab_size=tiny.VOCABULARY,
            hidden_size=hidden,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
            **more,
        )
    )
    with torch.no_grad():  # a fresh model is nearly uniform, and its norms do nothing
        for name, weight in model.named_parameters():
            weight += 0.1 * torch.randn_like(weight) if "norm" in name else 0.05 * torch.randn_like(weight)
    save_model(model, TOKENIZER, folder)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {family: save_base(family, folder / family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[str]]:
    """What transformers warns of, through its logger rather than through `warnings`: nothing, as a rule."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "peft")]
    for logger in loggers:
        logger.addHandler(handler)
    yield said
    for logger in loggers:
        logger.removeHandler(handler)
    assert said == []


def load(folder: Path, dtype: DType = DType.float32, seed: int = 0, value_head: bool = False, **lora: Any) -> Any:
    return load_model(ModelSettings(str(folder), dtype, lora=LoRA(**lora), value_head=value_head), seed).cpu()


def adapt(base: Path, dtype: DType = DType.float32, **lora: Any) -> PreTrainedModel:
    """A model whose adapters do something, as after training."""
    model = load(base, dtype, **{"rank": 4, **lora})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def update(model: PreTrainedModel, kind: Kind = Kind.adamw) -> None:
    """One optimiser step on some loss."""
    optimizer = Optimizer(model, OptimizerSettings(kind=kind, lr=0.01), total_steps=1)
    norm = math.inf
    while not math.isfinite(norm):  # in float16 the first scales may be too large
        optimizer.scaled(model(input_ids=IDS).logits.float().log_softmax(-1)[..., 7].sum()).backward()
        norm = optimizer.step()


@pytest.mark.parametrize("kind", Quantization)
def test_a_frozen_base_goes_to_its_device_in_16_bits(
    kind: Quantization, bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How the model attends is found there, and in fp32 all the same."""
    moved: list[int] = []
    move = PreTrainedModel.to

    def to(model: PreTrainedModel, *args: Any, **named: Any) -> Any:
        moved.append(sum(weight.nbytes for weight in model.parameters()))
        return move(model, *args, **named)

    monkeypatch.setattr(PreTrainedModel, "to", to)
    monkeypatch.setattr("mtgrpo.model.traits.APART", 1e-5)
    model = load_model(ModelSettings(str(bases["qwen3"]), DType.bfloat16, lora=LoRA(4), quantization=kind), 0)
    assert moved == [sum(weight.nbytes for weight in model.parameters())]
    assert uses_forest(model)
    assert all(getattr(part, "compute_dtype", torch.bfloat16) is torch.bfloat16 for part in model.modules())


def test_quantization_needs_a_package_and_adapters(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    four_bits = ModelSettings(str(bases["llama"]), quantization=Quantization.nf4)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"model\.quantization=nf4 needs the package bitsandbytes: pip"):
        load_model(four_bits, 0)
    monkeypatch.setattr("mtgrpo.model.load._quantized", lambda _: {})
    monkeypatch.setattr("mtgrpo.model.load.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ConfigError, match=r"model\.quantization=nf4: such layers are not trained; set"):
        load_model(four_bits, 0)


def test_the_gradient_through_four_bit_layers_is_that_of_the_weights_they_stand_for(tmp_path: Path) -> None:
    """Also after passes without gradient, in which bitsandbytes would lay the weights out anew."""
    save_model(load_model(ModelSettings("tiny"), 0), TOKENIZER, tmp_path)
    four_bits = load_model(ModelSettings(str(tmp_path), lora=LoRA(4), quantization=Quantization.nf4), 0)
    plain = load(tmp_path, rank=4)
    with torch.no_grad():
        for name, layer in four_bits.named_modules():
            if state := getattr(getattr(layer, "weight", None), "quant_state", None):
                plain.get_submodule(name).weight.copy_(dequantize_4bit(layer.weight.data, state))
        four_bits(input_ids=IDS)
        generator = torch.Generator().manual_seed(1)
        for own, other in zip(trained(four_bits).values(), trained(plain).values(), strict=True):
            own.copy_(0.1 * torch.randn(own.shape, generator=generator))
            other.copy_(own)
    for model in (four_bits, plain):
        model(input_ids=IDS).logits.log_softmax(-1)[..., 7].sum().backward()
    for name, weight in trained(plain).items():
        found = trained(four_bits)[name].grad
        assert found is not None and (found - weight.grad).norm() <= 1e-4 * weight.grad.norm(), name


def test_weights_that_are_saved_in_four_bits_are_trained_by_adapters_alone(tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    save_model(load_model(ModelSettings("tiny"), 0), TOKENIZER, base)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    whole = AutoModelForCausalLM.from_pretrained(base, quantization_config=how, device_map={"": "cpu"})
    save_model(whole, TOKENIZER, saved)
    told = r"its weights are quantised \(bitsandbytes\); give it in 16 bits, or train adapters .*rank=16"
    for refuses in (load, lambda folder: Skeleton(ModelSettings(str(folder)), "cpu")):
        with pytest.raises(ConfigError, match=told):
            refuses(saved)
    assert all("lora_" in name for name in trained(load(saved, rank=4)))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"its weights are quantised \(fp8\); give it in 16 bits$"):
        Skeleton(ModelSettings(str(base), lora=LoRA(4)), "cpu")


# --- new adapters ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DType)
def test_new_adapters_change_nothing_and_are_all_that_is_trained(
    bases: dict[str, Path], family: str, dtype: DType
) -> None:
    plain, model = load(bases[family], dtype), load(bases[family], dtype, rank=4)
    assert type(model) is FAMILIES[family][1]
    assert torch.equal(logits(model), logits(plain))
    assert not model.training
    precision = torch.float64 if dtype is DType.float64 else torch.float32
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {precision}
    frozen = [
        part for part in model.base_model.modules() if isinstance(part, nn.Linear) and not part.weight.requires_grad
    ]
    assert {part.weight.dtype for part in frozen} == {AUTOCAST.get(dtype, precision)}
    names = [name.split(".") for name in trained(model)]
    assert {name[-4] for name in names} == LINEAR
    assert len(names) == 2 * len(LINEAR) * LAYERS
    assert {name[-3] for name in names} == {"lora_A", "lora_B"}
    assert all(weight.shape[0 if "lora_A" in name else 1] == 4 for name, weight in trained(model).items())


def test_new_adapters_are_a_function_of_the_seed(bases: dict[str, Path]) -> None:
    rng = torch.get_rng_state()
    first = state(load(bases["qwen3"], rank=4, seed=3))
    assert torch.equal(torch.get_rng_state(), rng)
    torch.rand(5)
    again, other = (state(load(bases["qwen3"], rank=4, seed=seed)) for seed in (3, 4))
    assert same(first, again)
    assert all(torch.equal(first[name], other[name]) != ("lora_A" in name) for name in first)


def test_targets_are_endings_of_names(bases: dict[str, Path]) -> None:
    model = load(bases["qwen3"], rank=4, targets=["q_proj", "1.mlp.up_proj"])
    assert {name.rpartition(".lora")[0] for name in trained(model)} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize("target", ["proj", "embed_tokens", "lm_head", "mlp"])
def test_targets_that_match_no_linear_layer_are_refused(bases: dict[str, Path], target: str) -> None:
    known = ", ".join(sorted(LINEAR))
    with pytest.raises(ConfigError, match=rf"model\.lora\.targets.*{target} matches no.*there are {known}$"):
        load(bases["qwen3"], rank=4, targets=["q_proj", target])


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    save_model(GPT2LMHeadModel(config), TOKENIZER, tmp_path)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel; there are none"):
        load(tmp_path, rank=4)


def test_a_rank_above_every_matrix_is_refused(bases: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.lora\.rank=100000 is above \d+, the longest side of a matrix; try 16"
    ):
        load(bases["qwen3"], rank=100_000)


@pytest.mark.parametrize(("wrong", "seen"), [({"rank": -1}, "-1 and 32"), ({"rank": 2, "alpha": 0}, "2 and 0")])
def test_impossible_settings_are_refused(wrong: dict[str, int], seen: str) -> None:
    with pytest.raises(ConfigError, match=f"got {seen}"):
        LoRA(**wrong)


def test_a_model_from_scratch_has_nothing_to_adapt() -> None:
    with pytest.raises(ConfigError, match=r"rank=8`: `name=tiny` is a model from scratch.*`name=FOLDER`"):
        ModelSettings("tiny", lora=LoRA(rank=8))


# --- what they compute ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.float32, 1e-5), (DType.float64, 1e-13)])
def test_merged_equals_unmerged(bases: dict[str, Path], family: str, dtype: DType, tolerance: float) -> None:
    model = adapt(bases[family], dtype)
    merged = copy.deepcopy(model)
    for module in merged.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    assert difference(logits(merged), logits(model)) < tolerance
    assert difference(logits(load(bases[family], dtype)), logits(model)) > 0.05


def test_the_adapters_are_scaled_by_alpha_over_rank(bases: dict[str, Path]) -> None:
    model = adapt(bases["llama"], DType.float64, alpha=10, targets=["0.mlp.up_proj"])
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    given = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, b = (weight.detach() for weight in trained(model).values())
    base = load(bases["llama"], DType.float64).get_submodule("model.layers.0.mlp.up_proj")
    assert difference(layer(given), base(given) + 10 / 4 * given @ a.T @ b.T) < 1e-14


def test_bfloat16_computes_the_adapters_in_bfloat16_and_keeps_them_in_float32(bases: dict[str, Path]) -> None:
    model = adapt(bases["qwen3"], DType.bfloat16)
    seen: list[torch.dtype] = []
    part = model.get_submodule("model.layers.1.mlp.up_proj.lora_A.default")
    hook = part.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    model(input_ids=IDS).logits.sum().backward()
    hook.remove()
    assert seen == [torch.bfloat16]
    for weight in trained(model).values():
        assert weight.grad is not None
        assert (weight.dtype, weight.grad.dtype) == (torch.float32, torch.float32)
    exact = logits(adapt(bases["qwen3"], DType.float64))
    assert 1e-4 < difference(logits(model), exact) < 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_differs_from_float32_by_rounding_alone(bases: dict[str, Path], family: str) -> None:
    assert 1e-9 < difference(logits(adapt(bases[family])), logits(adapt(bases[family], DType.float64))) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.float64, 1e-9), (DType.float32, 1e-4)])
@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_the_engine_samples_from_the_adapted_model(
    bases: dict[str, Path], family: str, dtype: DType, tolerance: float
) -> None:
    model = adapt(bases[family], dtype)

    async def converse(sample_index: int) -> list[tuple[list[int], Completion]]:
        context = IDS[sample_index].tolist()
        played: list[tuple[list[int], Completion]] = []
        async with engine.conversation(Key(0, "train/1", "t", sample_index)) as sample:
            for _ in range(3):
                completion = await sample(context, Sampling(max_new_tokens=8))
                played.append((context, completion))
                context = [*context, *completion.tokens, 33, 34]
        return played

    async def run() -> list[list[tuple[list[int], Completion]]]:
        return await asyncio.gather(*(converse(sample_index) for sample_index in range(3)))

    engine = Local().start(ModelWeights(model), True, 512)
    for context, completion in itertools.chain(*asyncio.run(run())):
        tokens = torch.tensor(completion.tokens)
        with torch.no_grad():
            full = model(torch.tensor([context + completion.tokens])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        expected = full.gather(-1, tokens[:, None])[:, 0].double()
        assert difference(torch.tensor(completion.logprobs, dtype=torch.float64), expected) < tolerance


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(DType.float64, 1e-12), (DType.float32, 2e-5), (DType.bfloat16, 0.2), (DType.float16, 0.03)],
)
@pytest.mark.parametrize(
    ("family", "targets", "more"),
    [
        ("qwen2", [], {"tie_word_embeddings": False}),  # q, k and v have biases
        ("qwen3", ["0.self_attn.k_proj", "up_proj"], {"tie_word_embeddings": True}),
        ("llama", [], {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", ["1.mlp.down_proj"], {"tie_word_embeddings": False}),
    ],
)
def test_decoding_runs_no_adapter_and_gives_what_they_give_after_every_update(
    tmp_path: Path, family: str, targets: list[str], more: dict[str, Any], dtype: DType, tolerance: float
) -> None:
    model = adapt(save_base(family, tmp_path, **more), dtype, targets=targets)
    forward = Forward(model)
    assert forward.fused
    ran: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.register_forward_hook(lambda module, _inputs, _output: ran.append(module))
    before = None
    for _ in range(3):
        expected = logits(model)[0].log_softmax(-1)
        ran.clear()
        with torch.no_grad():
            hidden = forward(IDS[0], torch.arange(IDS.shape[1]), causal_attention)
            found = forward.logits(hidden).log_softmax(-1)
        assert ran == []
        assert difference(found, expected) < tolerance
        assert before is None or difference(expected, before) > tolerance / 2
        before = expected
        update(model)
        forward.fused.copy_weights()


@pytest.mark.parametrize("more", [{"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_are_more_than_a_product_decode_as_they_are(
    bases: dict[str, Path], tmp_path: Path, more: dict[str, bool]
) -> None:
    model = load(bases["qwen2"])
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], **more), "default")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    forward = Forward(model)
    assert forward.fused
    with torch.no_grad():
        hidden = forward(IDS[0], torch.arange(IDS.shape[1]), causal_attention)
        assert difference(forward.logits(hidden), logits(model)[0]) < 2e-5


# --- training ---


@pytest.mark.parametrize("kind", [Kind.adamw, Kind.muon])
def test_an_update_moves_the_adapters_alone(bases: dict[str, Path], kind: Kind) -> None:
    model = adapt(bases["qwen3"])
    before, names = state(model), trained(model).keys()
    update(model, kind)
    after = state(model)
    assert all(torch.equal(before[name], after[name]) != (name in names) for name in before)


def test_the_optimizer_holds_what_is_trained_alone(bases: dict[str, Path]) -> None:
    model = load(bases["qwen3"], rank=4, value_head=True)
    optimizer = Optimizer(model, OptimizerSettings(), total_steps=1)
    update(model)
    groups = [group for part in optimizer._optimizers for group in part.param_groups]
    held = [weight for group in groups for weight in group["params"]]
    assert len(held) == len(trained(model)) == 2 * len(LINEAR) * LAYERS + 2


@pytest.mark.parametrize("dtype", DType)
def test_the_value_head_is_trained_beside_the_adapters(bases: dict[str, Path], dtype: DType) -> None:
    model = load(bases["qwen3"], dtype, rank=4, value_head=True)
    optimizer = Optimizer(model, OptimizerSettings(lr=0.01), total_steps=0)

    def loss() -> Tensor:
        hidden = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
        return (values(model, hidden[:, -1]) - 1).square().mean()

    before = state(model)
    found: list[float] = []
    for _ in range(8):
        value = loss()
        found.append(value.item())
        optimizer.scaled(value).backward()
        optimizer.step()
    assert found[0] == 1.0
    assert found[-1] < found[0] / 2
    after = state(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == trained(model).keys()


# --- the reference ---


@pytest.mark.parametrize("dtype", DType)
def test_the_reference_shares_the_base_and_does_not_follow_the_adapters(bases: dict[str, Path], dtype: DType) -> None:
    model = adapt(bases["qwen3"], dtype)
    reference = ReferencePolicy(model)
    assert reference.weights.keys() == trained(model).keys()
    before = logits(model)
    update(model)
    assert torch.equal(functional_call(model, reference.weights, (), {"input_ids": IDS}).logits, before)
    assert not torch.equal(logits(model), before)


# --- saving ---


def test_a_saved_adapter_is_small_whole_and_without_pickle(bases: dict[str, Path], tmp_path: Path) -> None:
    model = adapt(bases["qwen3"])
    save_model(model, TOKENIZER, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    saved = load_file(tmp_path / "adapter_model.safetensors")
    expected = {f"base_model.model.{name.replace('.default', '')}": weight for name, weight in trained(model).items()}
    assert same(saved, expected)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(bases["qwen3"])
    assert config["target_modules"] == sorted(LINEAR)  # in order: the same bytes in every process
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 32, "CAUSAL_LM")


# peft's own model class, which this package does not use, asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_other_libraries_read_a_saved_adapter(bases: dict[str, Path], family: str, tmp_path: Path) -> None:
    model = adapt(bases[family])
    save_model(model, TOKENIZER, tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)), logits(model))
    base = AutoModelForCausalLM.from_pretrained(bases[family], dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    assert difference(logits(merged), logits(model)) < 1e-5


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("lora", [{}, {"rank": 4, "targets": ["v_proj", "q_proj"]}], ids=["as saved", "asked for"])
def test_a_saved_adapter_is_loaded_again_and_trained_on(
    bases: dict[str, Path], dtype: DType, lora: dict[str, Any], tmp_path: Path
) -> None:
    model = adapt(bases["qwen3"], dtype, targets=["q_proj", "v_proj"])
    save_model(model, TOKENIZER, tmp_path / "first")
    rng = torch.get_rng_state()
    loaded = load(tmp_path / "first", dtype, seed=99, **lora)
    assert torch.equal(torch.get_rng_state(), rng)
    assert same(state(loaded), state(model))
    assert list(trained(loaded)) == list(trained(model))  # in the same order, on which the optimiser's state depends
    assert torch.equal(logits(loaded), logits(model))
    assert not loaded.training
    save_model(loaded, TOKENIZER, tmp_path / "second")
    for path in (tmp_path / "first").iterdir():
        if path.name != "adapter_config.json":
            assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()
    before = state(loaded)
    for one in (model, loaded):
        update(one)
    assert same(state(loaded), state(model))
    assert not same(state(loaded), before)


def test_a_checkpoint_of_adapters_is_a_model_folder(bases: dict[str, Path], tmp_path: Path) -> None:
    model = adapt(bases["qwen3"])
    path = checkpoint.write(tmp_path, 1, checkpoint.ModelSnapshot(model, {}), {}, {})
    assert "adapter_model.safetensors" in read_checkpoint(path).files
    assert torch.equal(logits(load(path)), logits(model))
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors: it is missing"):
        read_checkpoint(path)


@pytest.mark.parametrize("lora", [{"rank": 8}, {"rank": 4, "alpha": 16}, {"rank": 4, "targets": ["q_proj"]}])
def test_another_adapter_than_the_saved_one_is_refused(
    bases: dict[str, Path], lora: dict[str, Any], tmp_path: Path
) -> None:
    save_model(adapt(bases["qwen3"]), TOKENIZER, tmp_path)
    with pytest.raises(ConfigError, match=r"holds an adapter .*\(4, 32, .*leave model\.lora\.rank at 0"):
        load(tmp_path, **lora)


def test_a_base_given_by_a_relative_path_is_found_from_anywhere(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bases["qwen3"].parent)
    model = adapt(Path("qwen3"))
    save_model(model, TOKENIZER, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_base_that_is_gone_is_named_and_the_tokenizer_does_not_need_it(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases["qwen3"], base)
    save_model(adapt(base), TOKENIZER, tmp_path / "adapter")
    shutil.rmtree(base)
    assert load_tokenizer(str(tmp_path / "adapter")).get_vocab() == TOKENIZER.get_vocab()
    with pytest.raises(ConfigError, match=rf"adapter is an adapter of {base}, which cannot be loaded.*put that model"):
        load(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=rf"adapter is an adapter of {base}, which cannot be loaded.*put that model"):
        Skeleton(ModelSettings(str(tmp_path / "adapter")), "cpu")


@pytest.mark.parametrize(
    ("shape", "part"),
    [({"hidden": 32}, "layers.0.mlp.down_proj.lora_B"), ({"layers": 1}, "layers.1"), ({"layers": 3}, "layers.2")],
)
def test_another_base_than_the_adapted_one_is_refused(
    logged: list[str], tmp_path: Path, shape: dict[str, int], part: str
) -> None:
    save_model(adapt(save_base("qwen3", tmp_path / "base")), TOKENIZER, tmp_path / "adapter")
    shutil.rmtree(tmp_path / "base")
    save_base("qwen3", tmp_path / "base", **shape)
    with pytest.raises(ConfigError, match=rf"does not fit its base {tmp_path / 'base'}, which lacks model\.{part}"):
        load(tmp_path / "adapter")
    assert "LOAD REPORT" in logged.pop()  # transformers' own


@pytest.mark.parametrize("content", [None, b"", b"damaged"])
def test_a_damaged_adapter_is_refused(bases: dict[str, Path], tmp_path: Path, content: bytes | None) -> None:
    save_model(adapt(bases["qwen3"]), TOKENIZER, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"model\.name={tmp_path}: the adapter cannot be read"):
        load(tmp_path)


def test_an_adapter_of_other_layers_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    save_model(adapt(bases["qwen3"]), TOKENIZER, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**written, "target_modules": ["c_attn"]}))
    with pytest.raises(ConfigError, match=rf"model\.name={tmp_path}: the adapter cannot be read"):
        load(tmp_path)


def test_adapters_of_another_kind_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    IA3Config(base_model_name_or_path=str(bases["qwen3"])).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=r"adapter of type .*IA3; only LoRA"):
        load(tmp_path)
    LoraConfig(use_dora=True, base_model_name_or_path=str(bases["qwen3"])).save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=r"adapter of type DORA; only LoRA"):
        load(tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_an_adapter_with_whole_weights_is_refused_if_a_checkpoint_would_lack_them(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """As peft saves the embeddings where their adapters were trained; what is in `modules_to_save` is kept."""
    for targets, also in ((["q_proj", "embed_tokens"], None), (["q_proj"], ["norm"])):
        folder = tmp_path / targets[-1]
        config = LoraConfig(r=2, target_modules=targets, modules_to_save=also, task_type="CAUSAL_LM")
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(bases["llama"]), config)
        adapted.save_pretrained(str(folder))
        if also:
            assert any("norm" in name for name in trained(load(folder)))
            continue
        with pytest.raises(ConfigError, match=r"holds whole weights, model\.embed_tokens.*embedding_layers=False"):
            load(folder)


def test_an_adapter_without_a_base_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    save_model(adapt(bases["qwen3"]), TOKENIZER, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match="no base_model_name_or_path"):
        load(tmp_path)


def test_an_adapter_of_the_head_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(ModelSettings(str(bases["qwen3"])), 0)
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    config.base_model_name_or_path = str(bases["qwen3"])
    model.add_adapter(config, "default")
    save_adapter(model, tmp_path)
    with pytest.raises(ConfigError, match=r"its head is not a matrix \(an adapter may not touch the head\)"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["model.lora.alpha=16"], True),
        (["model.lora.targets=[q_proj]"], True),
        (["model.lora.rank=4", "model.lora.targets=[q_proj]"], False),
        (["recipe=[calculator,lora]", "model.lora.rank=0"], False),  # the recipe's alpha
    ],
)
def test_settings_of_adapters_without_a_rank_are_noted(words: list[str], noted: bool) -> None:
    loader = ExperimentLoader()
    loader.load_configuration("base", words, RunMode.RUN)
    assert any("model.lora.rank is 0: all weights are trained" in note for note in loader.notes) is noted
