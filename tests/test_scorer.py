"""The scorer as a module: what it computes and what not, nothing at all, and what may be wrapped around it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mtgrpo.algorithms import PerToken
from mtgrpo.batch.forest import Batch, build_batch
from mtgrpo.batch.packing import Cost, Layout, MicroBatch, pack
from mtgrpo.model.attention import AttentionKind, choose_attention
from mtgrpo.model.load import DType
from mtgrpo.model.scorer import Scorer, Scores
from mtgrpo.model.value import add_value_head
from mtgrpo.policy.layouts import ParallelLayout
from mtgrpo.policy.step import Policy, at_once
from mtgrpo.types import Trajectory
from test_policy import PLAYED, TEMPERATURE, Descent, largest_difference, make_model

COST = Cost(token=10, pair=1, read=40)
LAYOUTS = pytest.mark.parametrize("layout", Layout)


def micro_batch(layout: Layout = Layout.forest, played: Sequence[Trajectory] = PLAYED) -> MicroBatch:
    batch = build_batch(played)
    (micro,) = pack(batch, torch.arange(len(batch)), 10**6, COST, layout)[0].micro_batches
    return micro


def empty(layout: Layout) -> MicroBatch:
    """What the last of many ranks gets."""
    batch = build_batch(PLAYED[:1])
    found = pack(batch, torch.arange(len(batch)), 10**6, COST, layout, ranks=3)
    return next(rank.micro_batches[0] for rank in found if not len(rank.micro_batches[0].entries))


def with_values() -> PreTrainedModel:
    model = make_model()
    add_value_head(model, torch.float64, Path("nowhere"))
    with torch.no_grad():
        for weight in model.get_submodule("value_head").parameters():
            weight += 0.1
    return model


def gradient(model: nn.Module, score: Callable[[MicroBatch, float], Scores], micro: MicroBatch) -> dict[str, Tensor]:
    """Of all that is scored."""
    scores = score(micro, TEMPERATURE)
    weights = torch.linspace(-1, 1, len(scores.logp), dtype=torch.float64)
    total = (scores.logp * weights + scores.entropy).sum()
    if scores.value is not None:
        total = total + (scores.value * weights).sum()
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(total, list(named.values())), strict=True))


def rows_of(module: nn.Module) -> list[int]:
    """How many rows a linear layer is given, call by call."""
    rows: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].numel() // inputs[0].shape[-1]))
    return rows


def test_the_last_mlp_runs_where_states_are_read_alone() -> None:
    model, micro = make_model(), micro_batch()
    scorer = Scorer(Scorer(model).model)  # a second one changes nothing
    first, last = (rows_of(model.model.layers[i].mlp.up_proj) for i in (0, -1))
    scorer(micro, TEMPERATURE)
    model(input_ids=torch.tensor([[5, 6, 7]]))  # whatever is no scorer's computes everything
    copy.deepcopy(model)(input_ids=torch.tensor([[5, 6, 7]]))
    assert first == [len(micro.ids[0]), 3, 3]
    assert last == [len(micro.parent.unique()), 3, 3]
    assert last[0] < first[0]


@LAYOUTS
def test_a_micro_batch_without_targets_has_a_gradient_of_zero_for_every_weight(layout: Layout) -> None:
    model = with_values()
    choose_attention(model, AttentionKind.forest if layout is Layout.forest else AttentionKind.sdpa)
    micro = empty(layout)
    scores = Scorer(model)(micro, TEMPERATURE)
    assert [len(part) for part in scores if part is not None] == [0, 0, 0]
    assert all((part == 0).all() for part in gradient(model, Scorer(model), micro).values())


def test_an_update_of_nothing_but_empty_micro_batches_changes_nothing() -> None:
    model = make_model()
    policy = Policy(model, Descent(model, 1.0), 10**6, TEMPERATURE, parallel=ParallelLayout(2, 3))  # type: ignore[arg-type]
    before = copy.deepcopy(model.state_dict())
    batch = build_batch(PLAYED[:1])
    assert at_once(policy.updating(batch, torch.arange(len(batch)), weights(batch), loss))["loss"] == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def weights(batch: Batch) -> Tensor:
    return torch.linspace(0.5, 1.5, len(batch), dtype=torch.float64) / len(batch)


def loss(entries: Tensor, scores: Scores) -> PerToken:
    return PerToken(-scores.logp, torch.zeros_like(scores.logp, dtype=torch.bool))


def test_the_gradient_in_bfloat16_is_near_the_one_in_fp32() -> None:
    model, narrow, micro = make_model(DType.float32), make_model(DType.bfloat16), micro_batch()
    expected, found = (gradient(one, Scorer(one), micro) for one in (model, narrow))
    apart, size = (torch.cat([part.flatten() for part in parts]).norm() for parts in (
        [found[name] - expected[name] for name in expected], expected.values(),
    ))  # fmt: skip
    assert 1e-4 * size < apart < 2e-2 * size


# --- what may be wrapped around it ---


@LAYOUTS
def test_activation_checkpointing_of_the_whole(layout: Layout) -> None:
    model, micro = with_values(), micro_batch(layout)
    choose_attention(model, AttentionKind.forest if layout is Layout.forest else AttentionKind.sdpa)
    scorer = Scorer(model)
    expected = gradient(model, scorer, micro)
    found = gradient(model, partial(checkpoint, scorer, use_reentrant=False), micro)
    assert largest_difference(found, expected) == 0


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_activation_checkpointing_layer_by_layer(dtype: DType) -> None:
    """The backward pass runs each layer again, long after the scorer has returned."""
    model, micro = make_model(dtype), micro_batch()
    expected = gradient(model, Scorer(model), micro)
    other = make_model(dtype)
    scorer = Scorer(other)
    for number, layer in enumerate(other.model.layers):
        other.model.layers[number] = checkpoint_wrapper(layer)
    rows = rows_of(other.model.layers[-1].mlp.up_proj)
    found = gradient(other, scorer, micro)
    assert len(rows) == 2 and rows[0] == rows[1] < micro.ids.numel()
    assert largest_difference(dict(zip(expected, found.values(), strict=True)), expected) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch says of its own compiler
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    model, micro = make_model(DType.float32), micro_batch()
    expected = gradient(model, Scorer(model), micro)
    compiled = torch.compile(Scorer(model), backend=backend)
    found = gradient(model, compiled, micro)
    largest = max(part.abs().max().item() for part in expected.values())
    assert largest_difference(found, expected) < 1e-4 * largest
    assert len(compiled(empty(Layout.forest), TEMPERATURE).logp) == 0


def test_other_weights_by_name_leave_the_model_as_it_is() -> None:
    model, micro = make_model(), micro_batch()
    other = make_model(seed=1)
    before = copy.deepcopy(model.state_dict())
    scorer = Scorer(model)
    found = scorer.with_weights(dict(other.named_parameters()), micro, TEMPERATURE)
    assert torch.equal(found.logp, Scorer(other)(micro, TEMPERATURE).logp)
    assert not found.logp.requires_grad
    assert not torch.equal(found.logp, scorer(micro, TEMPERATURE).logp)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
