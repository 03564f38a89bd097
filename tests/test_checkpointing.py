"""Activation checkpointing: layers are computed twice, gradients stay, less is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)

from mtgrpo.batch.packing import Layout, MicroBatch
from mtgrpo.errors import ConfigError
from mtgrpo.model.attention import choose_attention
from mtgrpo.model.checkpointing import checkpoint_layers, decoder_layers
from mtgrpo.model.load import load_model
from mtgrpo.model.scorer import Scorer, Scores
from mtgrpo.model.settings import AttentionKind, DType, LoRA, ModelSettings
from test_policy import PLAYED, TEMPERATURE, largest_difference, make_model
from test_scorer import gradient, micro_batch, rows_of

LAYOUTS = pytest.mark.parametrize("layout", Layout)
SIZE = {"vocab_size": 2048, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def prepared(model: PreTrainedModel, layout: Layout = Layout.forest) -> PreTrainedModel:
    choose_attention(model, AttentionKind.forest if layout is Layout.forest else AttentionKind.sdpa)
    return model


@LAYOUTS
@pytest.mark.parametrize(
    ("dtype", "most"),
    [(DType.float64, 1e-8), (DType.float32, 1e-6), (DType.bfloat16, 1e-6), (DType.float16, 1e-6)],
)
def test_gradients_are_those_of_plain_layers(dtype: DType, most: float, layout: Layout) -> None:
    model, micro = prepared(make_model(dtype), layout), micro_batch(layout)
    expected = gradient(model, Scorer(model), micro)
    checkpoint_layers(model)
    assert largest_difference(gradient(model, Scorer(model), micro), expected) <= most


def test_every_layer_is_computed_twice_and_only_where_a_gradient_is_wanted() -> None:
    model, micro = make_model(), micro_batch()
    checkpoint_layers(model)
    checkpoint_layers(model)  # a second time changes nothing
    calls = [rows_of(layer.mlp.up_proj) for layer in model.model.layers]
    scorer = Scorer(model)
    gradient(model, scorer, micro)
    read = len(micro.parent.unique())
    assert calls == [[len(micro.ids[0])] * 2] * 2 + [[read] * 2]
    with torch.no_grad():
        scorer(micro, TEMPERATURE)
    assert [len(rows) for rows in calls] == [3, 3, 3]


def test_micro_batches_may_be_computed_before_the_backward_pass_of_others() -> None:
    model = make_model()
    scorer, first, second = Scorer(model), micro_batch(), micro_batch(played=PLAYED[1:3])
    expected = gradient(model, scorer, first)
    checkpoint_layers(model)

    def with_another_between(micro: MicroBatch, temperature: float) -> Scores:
        scores = scorer(micro, temperature)
        scorer(second, temperature)  # which reads other nodes
        return scores

    assert largest_difference(gradient(model, with_another_between, first), expected) <= 1e-8


def kept_bytes(run: Callable[[], object], model: nn.Module) -> int:
    """What autograd keeps for the backward pass, weights not counted."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            kept[storage] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = run()
    assert found is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@LAYOUTS
def test_less_is_kept(layout: Layout) -> None:
    model, micro = prepared(make_model(), layout), micro_batch(layout)

    def body() -> Tensor:
        return Scorer(model).hidden(micro, micro.parent.unique())

    plain = kept_bytes(body, model)
    checkpoint_layers(model)
    found = kept_bytes(body, model)
    inputs = micro.ids.numel() * 96 * 8 * len(decoder_layers(model))
    assert inputs < found < plain / 5


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=2048, n_embd=32, n_layer=2, n_head=4, n_positions=128))


@pytest.mark.parametrize(
    "build",
    [
        gpt2,
        lambda: LlamaForCausalLM(LlamaConfig(**SIZE, num_key_value_heads=2, intermediate_size=48)),
    ],
)
def test_other_families(build: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model, micro = prepared(build().double().eval(), Layout.padded), micro_batch(Layout.padded)
    expected = gradient(model, Scorer(model), micro)
    checkpoint_layers(model)
    assert len(decoder_layers(model)) == 2
    assert largest_difference(gradient(model, Scorer(model), micro), expected) <= 1e-8


def test_the_setting() -> None:
    plain, model = (load_model(ModelSettings("tiny", checkpointing=on), 0) for on in (None, True))
    micro = micro_batch()
    calls = rows_of(model.model.layers[0].mlp.up_proj)
    expected, found = (gradient(m, Scorer(m), micro) for m in (plain, model))
    assert len(calls) == 2 and largest_difference(found, expected) <= 1e-6
    assert [*model.state_dict()] == [*plain.state_dict()]
    twin = copy.deepcopy(model)
    twin.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert largest_difference(gradient(model, Scorer(model), micro), expected) <= 1e-6


def test_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZE, num_key_value_heads=2, intermediate_size=48, head_dim=8)).save_pretrained(
        tmp_path
    )
    found: list[dict[str, Tensor]] = []
    for on in (False, True):
        model = load_model(ModelSettings(str(tmp_path), DType.float64, lora=LoRA(4), checkpointing=on), 0)
        scores = Scorer(model)(micro_batch(), TEMPERATURE)
        scores.logp.sum().backward()
        found.append({name: w.grad for name, w in model.named_parameters() if w.grad is not None})
    assert found[0] and largest_difference(found[1], found[0]) <= 1e-8


def test_a_model_without_layers_is_refused() -> None:
    model = XLMWithLMHeadModel(XLMConfig(vocab_size=64, emb_dim=16, n_layers=1, n_heads=2))
    with pytest.raises(ConfigError, match=r"model\.checkpointing=true: XLMWithLMHeadModel has no layers"):
        checkpoint_layers(model)
