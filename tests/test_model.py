"""The network and its tokenizer: the forward is transformers' own, in the precision that was asked for."""

from __future__ import annotations

import copy
import runpy
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtgrpo.extension import ConfigError
from mtgrpo.model import tiny
from mtgrpo.model.load import DType, ModelSettings, load_model, load_tokenizer, save_model
from mtgrpo.model.logprobs import sampled_logprobs

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


# --- log-probabilities ---


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.float32, 1e-5), (DType.float64, 1e-12)])
def test_logprobs_are_those_of_a_plain_forward(temperature: float, dtype: DType, tolerance: float) -> None:
    model = make_model(dtype)
    logp, entropy = sampled_logprobs(model, IDS, ROW, PARENT, TOKEN, temperature)
    with torch.no_grad():
        plain = (model(input_ids=IDS.to(model.device)).logits / temperature).log_softmax(-1).cpu()
    for i in range(len(TOKEN)):
        distribution = plain[ROW[i], PARENT[i]]
        assert logp[i].item() == pytest.approx(distribution[TOKEN[i]].item(), abs=tolerance)
        expected = -sum(p * lp for p, lp in zip(distribution.exp().tolist(), distribution.tolist(), strict=True))
        assert entropy[i].item() == pytest.approx(expected, abs=10 * tolerance)
    assert logp.requires_grad
    assert not entropy.requires_grad


def test_padding_to_the_right_changes_nothing() -> None:
    model = make_model(DType.float64)
    short, _ = sampled_logprobs(model, IDS[:1, :6], ROW[:1], PARENT[:1], TOKEN[:1], 1.0)
    padded = torch.cat([IDS[:1, :6], torch.zeros(1, 20, dtype=torch.long)], dim=1)
    long, _ = sampled_logprobs(model, padded, ROW[:1], PARENT[:1], TOKEN[:1], 1.0)
    assert short.item() == pytest.approx(long.item(), abs=1e-12)


# --- precision ---


def seen_by(model: PreTrainedModel, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Input and output of `module` during one forward."""
    seen: list[Tensor] = []
    hook = module.register_forward_hook(lambda _module, inputs, output: seen.extend((inputs[0], output)))
    sampled_logprobs(model, IDS, ROW, PARENT, TOKEN, 1.0)
    hook.remove()
    return seen[0], seen[1]


def test_bfloat16_computes_the_layers_in_bfloat16_and_the_head_in_float32() -> None:
    model = make_model(DType.bfloat16)
    assert seen_by(model, model.model.layers[1].mlp.up_proj)[1].dtype is torch.bfloat16
    assert [tensor.dtype for tensor in seen_by(model, model.get_output_embeddings())] == [torch.float32] * 2
    logp, entropy = sampled_logprobs(model, IDS, ROW, PARENT, TOKEN, 1.0)
    assert (logp.dtype, entropy.dtype) == (torch.float32, torch.float32)
    logp.sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype is torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype is torch.float32
    exact, _ = sampled_logprobs(make_model(DType.float64), IDS, ROW, PARENT, TOKEN, 1.0)
    error = (logp - exact).abs().max().item()
    assert 1e-5 < error < 0.1


def test_a_copy_of_a_bfloat16_model_runs_its_own_weights() -> None:
    model = make_model(DType.bfloat16)
    duplicate = copy.deepcopy(model)
    before, _ = sampled_logprobs(model, IDS, ROW, PARENT, TOKEN, 1.0)
    with torch.no_grad():
        for parameter in duplicate.parameters():
            parameter.mul_(1.5)
    assert torch.equal(sampled_logprobs(model, IDS, ROW, PARENT, TOKEN, 1.0)[0], before)
    assert not torch.equal(sampled_logprobs(duplicate, IDS, ROW, PARENT, TOKEN, 1.0)[0], before)
    assert seen_by(duplicate, duplicate.model.layers[1].mlp.up_proj)[1].dtype is torch.bfloat16


def test_float64_differs_from_float32_by_rounding_alone() -> None:
    single, _ = sampled_logprobs(make_model(), IDS, ROW, PARENT, TOKEN, 1.0)
    exact, entropy = sampled_logprobs(make_model(DType.float64), IDS, ROW, PARENT, TOKEN, 1.0)
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
        return sampled_logprobs(model, IDS, ROW, PARENT, TOKEN, 1.0)[0].sum()

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
    expected, _ = sampled_logprobs(model, IDS, ROW, PARENT, TOKEN, 1.0)
    found, _ = sampled_logprobs(loaded, IDS, ROW, PARENT, TOKEN, 1.0)
    assert torch.equal(found, expected)
    assert weights(loaded).keys() == weights(model).keys()
    assert not loaded.training
    text = "<|im_start|>user\nWhat is 12 * 3?<|im_end|>"
    assert load_tokenizer(str(tmp_path)).encode(text) == TOKENIZER.encode(text)


def test_an_unknown_model_is_named_with_what_could_be_meant(tmp_path: Path) -> None:
    for load in (lambda name: load_model(ModelSettings(name), 0), load_tokenizer):
        with pytest.raises(ConfigError, match=r"nothing-here.*tiny"):
            load(str(tmp_path / "nothing-here"))


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
