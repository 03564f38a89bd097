"""The network and its tokenizer: the forward is transformers' own, in the precision that was asked for."""

from __future__ import annotations

import copy
import hashlib
import json
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mtgrpo.errors import ConfigError
from mtgrpo.model import tiny
from mtgrpo.model.load import DType, ModelSettings, device_of_process, load_model
from mtgrpo.model.logprobs import sampled_logprobs
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.model.value import values
from saving import save_model

PROJECT = Path(__file__).resolve().parent.parent
IDS = torch.randint(20, 1000, (3, 11), generator=torch.Generator().manual_seed(0))
ROW = torch.tensor([0, 0, 1, 2, 2])
PARENT = torch.tensor([0, 9, 4, 3, 9])
TOKEN = IDS[ROW, PARENT + 1]
TOKENIZER = load_tokenizer("tiny")


def make_model(dtype: DType = DType.float32, seed: int = 0) -> PreTrainedModel:
    model = load_model(ModelSettings("tiny", dtype), seed)
    with torch.no_grad():  # a fresh model is nearly uniform
        model.get_input_embeddings().weight.mul_(6)
    return model


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


def score(model: PreTrainedModel, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of TOKEN."""
    hidden = model.base_model(input_ids=IDS.to(model.device), use_cache=False).last_hidden_state[ROW, PARENT]
    return sampled_logprobs(hidden, model.get_output_embeddings(), torch.arange(len(TOKEN)), TOKEN, temperature)


# --- log-probabilities ---


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.float32, 1e-5), (DType.float64, 1e-12)])
def test_logprobs_are_those_of_a_plain_forward(temperature: float, dtype: DType, tolerance: float) -> None:
    model = make_model(dtype)
    logp, entropy = score(model, temperature)
    with torch.no_grad():
        plain = (model(input_ids=IDS.to(model.device)).logits / temperature).log_softmax(-1).cpu()
    for i in range(len(TOKEN)):
        distribution = plain[ROW[i], PARENT[i]]
        assert logp[i].item() == pytest.approx(distribution[TOKEN[i]].item(), abs=tolerance)
        expected = -sum(p * lp for p, lp in zip(distribution.exp().tolist(), distribution.tolist(), strict=True))
        assert entropy[i].item() == pytest.approx(expected, abs=10 * tolerance)
    assert logp.requires_grad


# --- precision ---


def seen_by(model: PreTrainedModel, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Input and output of `module` during one forward."""
    seen: list[Tensor] = []
    hook = module.register_forward_hook(lambda _module, inputs, output: seen.extend((inputs[0], output)))
    score(model)
    hook.remove()
    return seen[0], seen[1]


def test_bfloat16_computes_the_layers_in_bfloat16_and_the_head_in_float32() -> None:
    model = make_model(DType.bfloat16)
    assert seen_by(model, model.model.layers[1].mlp.up_proj)[1].dtype is torch.bfloat16
    logp, entropy = score(model)
    assert (logp.dtype, entropy.dtype) == (torch.float32, torch.float32)
    logp.sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype is torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
    exact, _ = score(make_model(DType.float64))
    error = (logp - exact).abs().max().item()
    assert 1e-5 < error < 0.1


def test_a_copy_of_a_bfloat16_model_runs_its_own_weights() -> None:
    model = make_model(DType.bfloat16)
    duplicate = copy.deepcopy(model)
    before, _ = score(model)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.mul_(1.5)
    assert torch.equal(score(model)[0], before)
    assert not torch.equal(score(duplicate)[0], before)
    assert seen_by(duplicate, duplicate.model.layers[1].mlp.up_proj)[1].dtype is torch.bfloat16


def test_float64_differs_from_float32_by_rounding_alone() -> None:
    single, _ = score(make_model())
    exact, entropy = score(make_model(DType.float64))
    assert exact.dtype is entropy.dtype is torch.float64
    assert 1e-9 < (single - exact).abs().max().item() < 1e-4


def test_float64_norms_compute_in_double() -> None:
    model = make_model(DType.float64)
    given, found = seen_by(model, model.model.layers[0].input_layernorm)
    weight = model.model.layers[0].input_layernorm.weight
    expected = given * (given.square().mean(-1, keepdim=True) + 1e-6) ** -0.5 * weight
    assert found.dtype is torch.float64
    assert (found - expected).abs().max().item() < 1e-14


def test_float64_resolves_differences_far_below_single_precision() -> None:
    """The central difference at steps of 1e-6 is the derivative, which rounding in fp32 anywhere would drown."""
    model = make_model(DType.float64)
    parameter = model.model.layers[0].mlp.up_proj.weight

    def total() -> Tensor:
        return score(model)[0].sum()

    (gradient,) = torch.autograd.grad(total(), parameter)
    with torch.no_grad():
        parameter[5, 7] += 1e-6
        above = total()
        parameter[5, 7] -= 2e-6
        below = total()
    assert abs(gradient[5, 7].item()) > 1e-3
    assert (above - below).item() / 2e-6 == pytest.approx(gradient[5, 7].item(), abs=1e-7)


# --- models ---


def test_a_model_is_a_function_of_its_seed() -> None:
    rng = torch.get_rng_state()
    first = weights(tiny.build_model(tiny.SHAPES["tiny"], 3))
    assert torch.equal(torch.get_rng_state(), rng)
    torch.rand(5)
    again, other = (weights(tiny.build_model(tiny.SHAPES["tiny"], seed)) for seed in (3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].dim() == 2)


@pytest.mark.parametrize("dtype", DType)
def test_a_saved_model_is_loaded_again(dtype: DType, tmp_path: Path) -> None:
    model = make_model(dtype)
    save_model(model, TOKENIZER, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".safetensors", ".json", ".jinja"}
    loaded = load_model(ModelSettings(str(tmp_path), dtype), seed=99)
    expected, _ = score(model)
    found, _ = score(loaded)
    assert torch.equal(found, expected)
    assert weights(loaded).keys() == weights(model).keys()
    assert not loaded.training
    text = "<|im_start|>user\nWhat is 12 * 3?<|im_end|>"
    assert load_tokenizer(str(tmp_path)).encode(text) == TOKENIZER.encode(text)


def test_an_unknown_model_is_named_with_what_could_be_meant(tmp_path: Path) -> None:
    for load in (lambda name: load_model(ModelSettings(name), 0), load_tokenizer):
        with pytest.raises(ConfigError, match=r"nothing-here.*tiny"):
            load(str(tmp_path / "nothing-here"))


@pytest.mark.parametrize("value_head", [False, True])
def test_which_file_holds_the_weights_is_written_down(value_head: bool, tmp_path: Path) -> None:
    """vLLM reads every .safetensors file of a folder whose index does not say otherwise."""
    model = load_model(ModelSettings("tiny", value_head=value_head), 0)
    save_model(model, TOKENIZER, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 + value_head
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {"model.safetensors"}
    assert index.keys() == load_file(tmp_path / "model.safetensors").keys()


# --- the value head ---


@pytest.mark.parametrize("dtype", DType)
def test_a_new_value_head_is_zero_and_changes_nothing_else(dtype: DType) -> None:
    rng = torch.get_rng_state()
    plain, model = (load_model(ModelSettings("tiny", dtype, value_head=on), 0) for on in (False, True))
    assert torch.equal(torch.get_rng_state(), rng)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert parameter.dtype is (torch.float64 if dtype is DType.float64 else torch.float32)
        assert torch.equal(parameter, expected[name] if name in expected else torch.zeros_like(parameter))
    assert [name for name, _ in model.named_parameters() if name not in expected] == [
        "value_head.weight",
        "value_head.bias",
    ]


@pytest.mark.parametrize("dtype", DType)
def test_values_are_linear_in_the_hidden_states(dtype: DType) -> None:
    model = with_value_head(dtype)
    hidden = model.base_model(input_ids=IDS.to(model.device), use_cache=False).last_hidden_state[0]
    found = values(model, hidden)
    head = model.get_submodule("value_head")
    assert found.shape == (len(hidden),)
    assert found.dtype is (torch.float64 if dtype is DType.float64 else torch.float32)
    expected = hidden.double() @ head.weight[0].double() + head.bias.double()
    assert (found.double() - expected).abs().max().item() < (1e-13 if dtype is DType.float64 else 1e-5)
    assert values(model, hidden.bfloat16()).dtype is found.dtype


def with_value_head(dtype: DType = DType.float32) -> PreTrainedModel:
    model = load_model(ModelSettings("tiny", dtype, value_head=True), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.get_submodule("value_head").parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("dtype", DType)
def test_a_saved_value_head_is_loaded_again(dtype: DType, tmp_path: Path) -> None:
    model = with_value_head(dtype)
    save_model(model, TOKENIZER, tmp_path)
    expected = weights(model)
    loaded = weights(load_model(ModelSettings(str(tmp_path), dtype, value_head=True), 1))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    without = weights(load_model(ModelSettings(str(tmp_path), dtype), 1))
    assert without.keys() == {name for name in expected if not name.startswith("value_head.")}


def test_without_a_saved_one_the_value_head_starts_at_zero(tmp_path: Path) -> None:
    save_model(make_model(), TOKENIZER, tmp_path)
    head = load_model(ModelSettings(str(tmp_path), value_head=True), 0).get_submodule("value_head")
    assert all(not parameter.any() for parameter in head.parameters())


def test_other_libraries_see_an_ordinary_model_folder(tmp_path: Path) -> None:
    model = with_value_head()
    save_model(make_model(), TOKENIZER, tmp_path / "plain")
    save_model(model, TOKENIZER, tmp_path / "with")
    plain, found = ({path.name for path in (tmp_path / name).iterdir()} for name in ("plain", "with"))
    assert found - plain == {"value_head.safetensors"}
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "with", output_loading_info=True)
    assert not any(report.values())
    logits = model(input_ids=IDS.to(model.device)).logits.cpu()
    assert torch.equal(loaded(input_ids=IDS).logits, logits)


# --- the tiny tokenizer ---


def test_every_digit_is_one_token() -> None:
    for text in ("1234567890", "2024-11-21", "x=17*23.5", " 42 42"):
        pieces = [TOKENIZER.decode([token]) for token in TOKENIZER.encode(text)]
        assert "".join(pieces) == text
        for piece in pieces:
            assert len(piece) == 1 or not any(character.isdigit() for character in piece)


@given(st.text() | st.text(alphabet=" 0123456789.?!<>|_/aeTtoolcimdr\n"))
def test_any_text_comes_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode(tokens) == text
    assert all(token < tiny.VOCABULARY for token in tokens)


def test_tags_are_one_token_each() -> None:
    for tag in (*tiny.SPECIAL, *tiny.TAGS):
        assert len(TOKENIZER.encode(tag)) == 1
        assert len(TOKENIZER.encode(f"a{tag}b")) == len(TOKENIZER.encode("a")) + 1 + len(TOKENIZER.encode("b"))
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_vocabulary_fits_every_shape() -> None:
    assert all(len(TOKENIZER) <= shape.vocabulary for shape in tiny.SHAPES.values())


def test_the_shipped_tokenizer_is_rebuilt_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["build_tiny_tokenizer.py", str(tmp_path)])
    runpy.run_path(str(PROJECT / "scripts" / "build_tiny_tokenizer.py"), run_name="__main__")
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_bytes() for path in tiny.TOKENIZER.iterdir()}


def test_the_shipped_weights_are_those_whose_digest_is_written_down() -> None:
    origin = json.loads((tiny.WEIGHTS / "origin.json").read_text())
    file = tiny.WEIGHTS / "model.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == origin["sha256"]
    assert origin["command"].endswith("mtgrpo sft recipe=calculator_from_scratch seed=1")
    shipped = load_model(ModelSettings("tiny-calculator"), 0)
    fresh = weights(make_model())
    assert {name: (value.shape, value.dtype) for name, value in weights(shipped).items()} == {
        name: (value.shape, value.dtype) for name, value in fresh.items()
    }
    for name, value in load_file(file).items():
        assert value.dtype is torch.float16 and torch.equal(weights(shipped)[name], value.float())
    assert load_tokenizer("tiny-calculator").get_vocab() == TOKENIZER.get_vocab()


def test_the_package_contains_the_shipped_weights() -> None:
    data = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mtgrpo"]
    package = PROJECT / "src" / "mtgrpo"
    packed = {file for pattern in data for file in package.glob(pattern)}
    assert {file.suffix for file in tiny.WEIGHTS.iterdir()} == {".json", ".safetensors"}
    assert packed >= set(tiny.WEIGHTS.iterdir())


@pytest.mark.parametrize(("local_rank", "expected"), [(None, 0), ("", 0), ("1", 1)])
def test_every_process_takes_the_gpu_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, expected: int
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert device_of_process() == torch.device("cuda", expected)
    assert chosen == [torch.device("cuda", expected)]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="LOCAL_RANK=2: this machine has 2 GPUs"):
        device_of_process()
