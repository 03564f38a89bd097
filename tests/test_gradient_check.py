"""The check of the gradient: no alarm for a model that is right, and none but alarms for one that is a tenth off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtgrpo.errors import RunError
from mtgrpo.model import prefix, tiny
from mtgrpo.model.load import DType, ModelSettings, load_model
from mtgrpo.model.lora import LoRA
from mtgrpo.model.scorer import Scorer
from mtgrpo.model.settings import AttentionKind, Quantization
from mtgrpo.policy.gradient_check import check_derivative, check_walk
from saving import save_model
from test_attention import FAMILIES, make_model

CONTEXT = torch.randint(3, 24, (50,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_model(load_model(ModelSettings("tiny"), 0), tiny.load_tokenizer(), folder)
    return folder


def steeper(monkeypatch: pytest.MonkeyPatch, by: float, forests_alone: bool = False) -> None:
    """Every gradient is `by` times as large."""
    read = Scorer._hidden  # what all its methods call

    def hidden(scorer: Scorer, micro: Any, *rest: Any) -> Tensor:
        found = read(scorer, micro, *rest)
        if found.requires_grad and not (forests_alone and micro.forest is None):
            found.register_hook(lambda gradient: gradient * by)
        return found

    monkeypatch.setattr(Scorer, "_hidden", hidden)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_gradient_raises_no_alarm(family: str, dtype: DType) -> None:
    model = make_model(family, dtype)
    check_derivative(model, CONTEXT)
    assert check_walk(model, CONTEXT) == ""


@pytest.mark.parametrize("by", [0.9, 1.1])
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("settings", [{}, {"lora": LoRA(8), "quantization": Quantization.nf4}])
def test_a_gradient_that_is_a_tenth_off_is_found(
    base: Path, settings: dict[str, Any], dtype: DType, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through 4-bit layers in bfloat16 what a new adapter adds is rounded away, so that only larger faults show."""
    if settings and dtype is DType.float64:
        return
    model = load_model(ModelSettings(str(base) if settings else "tiny", dtype, **settings), 0)
    check_derivative(model, CONTEXT)
    assert check_walk(model, CONTEXT) == ""
    steeper(monkeypatch, by)
    with pytest.raises(RunError, match="is not that of its log-probabilities"):
        check_derivative(model, CONTEXT)


@pytest.mark.parametrize("dtype", DType)
def test_a_gradient_of_forests_that_is_a_tenth_off_is_found(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3", dtype)
    steeper(monkeypatch, 1.1, forests_alone=True)
    assert "differs from that of plain rows" in check_walk(model, CONTEXT)


def test_what_a_chain_does_not_gather_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_leaf", lambda keys: keys.detach())
    assert "differs from that of plain rows" in check_walk(make_model("llama", DType.float32), CONTEXT)


def test_contexts_of_one_token_and_padded_rows_are_checked_too() -> None:
    model = make_model("qwen2", DType.float32)
    check_derivative(model, CONTEXT[:1])
    assert check_walk(model, CONTEXT[:1]) == ""
    model.set_attn_implementation(AttentionKind.sdpa.value)
    check_derivative(model, CONTEXT)
    assert check_walk(model, CONTEXT) == ""


def test_nothing_is_left_of_the_check(base: Path) -> None:
    for model in (load_model(ModelSettings("tiny"), 0), load_model(ModelSettings(str(base), lora=LoRA(4)), 0)):
        before = {name: (weight, weight._version, weight.detach().clone()) for name, weight in model.named_parameters()}
        numbers = torch.get_rng_state()
        check_derivative(model, CONTEXT)
        check_walk(model, CONTEXT)
        assert torch.equal(torch.get_rng_state(), numbers)
        for name, weight in model.named_parameters():
            own, version, values = before[name]
            assert weight is own and weight._version == version and torch.equal(weight, values) and weight.grad is None
