"""A micro-batch through the model: scores of its sampled tokens, from the hidden states at their parents alone."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtgrpo.batch.packing import Cost, Layout, MicroBatch
from mtgrpo.model.attention import Visibility, uses_forest
from mtgrpo.model.load import computes_in
from mtgrpo.model.logprobs import Kept, sampled_logprobs
from mtgrpo.model.onednn_linear import GRID, onednn
from mtgrpo.model.value import has_value_head, values


@dataclass(frozen=True)
class Scores:
    """What the policy says of the targets of a micro-batch; tensors [targets], fp32 (fp64 for fp64 models)."""

    logp: Tensor  # of the sampled token, at the sampling temperature; carries gradient
    entropy: Tensor  # of the distribution it was drawn from; carries gradient
    value: Tensor | None = None  # what the value head expects before it; carries gradient; None without such a head

    def at(self, target: Tensor) -> Scores:
        """Those of the targets with numbers `target` [n]."""
        target = target.to(self.logp.device)
        return Scores(self.logp[target], self.entropy[target], None if self.value is None else self.value[target])


def layout_of(model: PreTrainedModel) -> Layout:
    """How batches for `model` are laid out."""
    return Layout.forest if uses_forest(model) else Layout.padded


def flops_of(model: PreTrainedModel) -> Cost:
    """Floating-point operations of the forward pass; the backward pass takes about twice as many."""
    body = model.base_model
    matrices = sum(p.numel() for p in body.parameters() if p.dim() == 2)
    embeddings = sum(m.weight.numel() for m in body.modules() if isinstance(m, nn.Embedding))
    config = model.config
    heads = getattr(config, "num_attention_heads", 0)  # a model may have none
    size = config.to_dict().get("head_dim") or (config.hidden_size // heads if heads else 0)
    return Cost(
        token=2 * (matrices - embeddings),
        pair=4 * config.num_hidden_layers * heads * size,
        read=2 * _head(model).weight.numel(),
    )


def _head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "the head of a causal language model is a matrix"
    return head


def read_hidden(model: PreTrainedModel, micro: MicroBatch, positions: Tensor) -> Tensor:
    """Final hidden states [n, hidden] at flat `positions` [n] of the micro-batch, each given once."""
    device = model.device
    positions = positions.to(device)
    if micro.forest is None:
        output = model.base_model(input_ids=micro.ids.to(device), use_cache=False)
        return output.last_hidden_state.flatten(0, 1)[positions]
    # Rounded up to the grid by a chain of nodes that nobody reads, after all others and apart from them.
    count, grid = len(micro.forest), GRID if onednn(device, computes_in(model)) else 1
    extra = torch.arange(-count % grid)
    end = micro.forest.subtree_end
    ids = torch.cat([micro.ids[0], torch.zeros_like(extra)]).to(device)
    depth = torch.cat([micro.position[0], extra]).to(device)
    ends = torch.cat([end, torch.full_like(extra, count + len(extra))]).to(device)
    visibility = Visibility(depth, ends, positions)
    unused = torch.zeros(1, 1, 1, 1, device=device)  # of four dimensions: transformers then builds no mask itself
    with last_layer_at(model, _rounded_up(positions, len(ids), grid)):
        output = model.base_model(
            input_ids=ids[None], position_ids=depth[None], attention_mask=unused, use_cache=False, forest=visibility
        )
    return output.last_hidden_state[0, positions]


def _rounded_up(rows: Tensor, count: int, grid: int) -> Tensor:
    """`rows` [n] and others of the `count` that there are: a multiple of `grid` if it can be."""
    others = torch.ones(count, dtype=torch.bool, device=rows.device)
    others[rows] = False
    return torch.cat([rows, others.nonzero()[: -len(rows) % grid, 0]])


@contextmanager
def last_layer_at(model: PreTrainedModel, rows: Tensor) -> Generator[None]:
    """Within, the last layer's MLP runs at nodes `rows` [n] alone: nobody reads the final states of the others.

    Models whose last layer has no `mlp` that maps one tensor to one tensor compute everything.
    """
    layers = getattr(model.base_model, "layers", None)
    mlp = getattr(layers[-1], "mlp", None) if isinstance(layers, nn.ModuleList) else None
    if not isinstance(mlp, nn.Module):
        yield
        return
    whole = mlp.forward

    def at_rows(hidden: Tensor, *rest: Any, **named: Any) -> Any:
        if rest or named:
            return whole(hidden, *rest, **named)
        found = whole(hidden[:, rows])
        return found.new_zeros(hidden.shape).index_copy(1, rows, found) if isinstance(found, Tensor) else whole(hidden)

    mlp.forward = at_rows
    try:
        yield
    finally:
        del mlp.forward


def score(model: PreTrainedModel, micro: MicroBatch, temperature: float) -> Scores:
    """Log-probability and entropy of every target; the head runs once at each distinct parent."""
    parents, row = torch.unique(micro.parent, return_inverse=True)
    hidden = read_hidden(model, micro, parents)
    drawn, kept = row, None  # the distribution that each target was drawn from
    if micro.kept is not None:  # several may follow one parent
        sets = micro.kept.sets
        pairs, drawn = torch.unique(row * sets + micro.kept.number, return_inverse=True)
        kept = Kept(*micro.kept.listed(pairs % sets), row=pairs // sets)
    drawn, token = drawn.to(hidden.device), micro.token.to(hidden.device)
    logp, entropy = sampled_logprobs(hidden, _head(model), drawn, token, temperature, kept)
    expected = values(model, hidden)[row.to(hidden.device)] if has_value_head(model) else None
    return Scores(logp, entropy[drawn], expected)
