"""What the policy says of the sampled tokens of a micro-batch: body, head and value head as one module.

The hidden states are read at the parents of sampled tokens alone, and what nobody reads is not computed where that is
possible: the last layer's MLP and, on a CPU, its attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from mtgrpo.batch.forest import Forest
from mtgrpo.batch.packing import Cost, Layout, MicroBatch
from mtgrpo.model.attention import Visibility, eagerly, uses_forest
from mtgrpo.model.checkpointing import subclass
from mtgrpo.model.cpu_kernels import GRID, multiplies_bf16, onednn
from mtgrpo.model.load import computes_in
from mtgrpo.model.logprobs import head_logits, head_of, sampled_logprobs
from mtgrpo.model.prefix import Prefix
from mtgrpo.model.rounding import Reference, reference
from mtgrpo.model.sharding import elements, shape_of
from mtgrpo.model.traits import flat_states
from mtgrpo.model.value import has_value_head, values


class Scores(NamedTuple):
    """What the policy says of the targets of a micro-batch; tensors [targets], fp32 (fp64 for fp64 models)."""

    logp: Tensor  # of the sampled token, at the sampling temperature; carries gradient
    entropy: Tensor  # of the distribution it was drawn from; carries gradient
    value: Tensor | None = None  # what the value head expects before it; carries gradient; None without such a head

    def at(self, target: Tensor) -> Scores:
        """Those of the targets with numbers `target` [n]."""
        target = target.to(self.logp.device)
        return Scores(self.logp[target], self.entropy[target], None if self.value is None else self.value[target])


class Scorer(nn.Module):
    """A model as it is trained. FSDP2, ZeRO-3, activation checkpointing and torch.compile can wrap it.

    Whoever wraps it does something before and after each of its public methods, which call none of one another.
    The first one of a model wraps the last layer's MLP, which changes the passes of scorers alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        _compute_where_read(model)

    def forward(self, micro: MicroBatch, temperature: float, prefix: Prefix | None = None) -> Scores:
        """Log-probability, entropy and value of every target; the head runs once at each distinct parent.

        `prefix` has what `micro` is given and keeps what it opens; without it everything is computed here.
        A micro-batch without targets gives empty scores, whose gradient is 0 for every weight: a rank that has nothing
        to compute takes part in what all ranks do together.
        """
        if not len(micro.parent) and not micro.opens:
            return self._scores(one_token(micro), temperature, None).at(torch.arange(0))
        return self._scores(micro, temperature, prefix)

    def _scores(self, micro: MicroBatch, temperature: float, prefix: Prefix | None) -> Scores:
        parents, row = torch.unique(micro.parent, return_inverse=True)
        if not len(parents):  # but others continue it; reads one state, for some layers take no empty input
            nothing = self._hidden(micro, torch.tensor([micro.given]), prefix).sum(-1)[:0].clone()  # no view
            return Scores(nothing, nothing, nothing if has_value_head(self.model) else None)
        hidden = self._hidden(micro, parents, prefix)
        head = head_of(self.model)
        narrow = computes_in(self.model) is torch.bfloat16 and multiplies_bf16(hidden.device)
        logp, entropy = eagerly(sampled_logprobs, hidden, head, row, micro.token, temperature, micro.kept, narrow)
        expected = values(self.model, hidden)[row.to(hidden.device)] if has_value_head(self.model) else None
        return Scores(logp, entropy, expected)

    def next_logprobs(self, micro: MicroBatch, positions: Tensor, prefix: Prefix | None = None) -> Tensor:
        """Log-probabilities of the next token at flat `positions` [n], each given once: [n, vocabulary]."""
        return head_logits(self.model, self._hidden(micro, positions, prefix)).log_softmax(-1)

    def reference(self, context: Sequence[int] | Tensor, first: int = 0) -> Reference:
        """What the model's own forward pass says of `context`; see `model.rounding.reference`."""
        return reference(self.model, context, first)

    def hidden(self, micro: MicroBatch, positions: Tensor, prefix: Prefix | None = None) -> Tensor:
        """Final hidden states [n, hidden] at flat `positions` [n] of the micro-batch, each given once."""
        return self._hidden(micro, positions, prefix)

    def _hidden(self, micro: MicroBatch, positions: Tensor, prefix: Prefix | None) -> Tensor:
        device = self.model.device
        positions = positions.to(device)
        if micro.forest is None:
            output = self.model.base_model(input_ids=micro.ids.to(device), use_cache=False)
            return output.last_hidden_state.flatten(0, 1)[positions]
        # Rounded up to the grid by a chain of nodes that nobody reads, after all others and apart from them.
        count, given = len(micro.forest), micro.given if prefix is not None else 0
        extra = torch.arange((given - count) % (GRID if onednn(device, computes_in(self.model)) else 1))
        ids = torch.cat([micro.ids[0, given:], torch.zeros_like(extra)]).to(device)
        rows = positions - given
        depth = torch.cat([micro.position[0], extra]).to(device)
        ends = torch.cat([micro.forest.subtree_end, torch.full_like(extra, count + len(extra))]).to(device)
        forest = Visibility(depth, ends, rows, given, prefix)
        return flat_states(self.model, ids, depth[given:], forest=forest)[rows]

    def with_weights(
        self, weights: dict[str, Tensor], micro: MicroBatch, temperature: float, prefix: Prefix | None = None
    ) -> Scores:
        """The scores if some of the model's weights were these, by name; all others are its own. No gradient."""
        named = {f"model.{name}": weight for name, weight in weights.items()}
        with torch.no_grad():
            return functional_call(self, named, (micro, temperature, prefix))


class AllWeightsScorer(Scorer):
    """Reads every weight in each pass, the heads also where no token is scored: ranks that gather them do so alike."""

    def _scores(self, micro: MicroBatch, temperature: float, prefix: Prefix | None) -> Scores:
        if len(micro.parent):
            return super()._scores(micro, temperature, prefix)
        zero = torch.zeros(1, dtype=torch.long)
        reads = replace(micro, parent=zero + micro.given, token=zero, kept=None)
        return super()._scores(reads, temperature, prefix).at(zero[:0])


class _WhereRead(nn.Module):
    """Stands before the class of the last layer's MLP, which then runs at the nodes that are read alone.

    Which these are comes with the keyword arguments of the layer, also when activation checkpointing runs it again.
    Where the MLP gives more than one tensor, it computes everything.
    """

    read: Tensor | None = None  # [n] nodes, of the pass that the layer has begun; None = all

    def forward(self, hidden: Tensor, *rest: Any, **named: Any) -> Any:
        """hidden [1, nodes, size] -> alike, 0 at the nodes that are not computed."""
        if self.read is None or rest or named:
            return super().forward(hidden, *rest, **named)
        rows = _on_grid(self.read, hidden)
        output = super().forward(hidden[:, rows])
        if not isinstance(output, Tensor):
            return super().forward(hidden)
        return output.new_zeros(hidden.shape).index_copy(1, rows, output)


def _compute_where_read(model: PreTrainedModel) -> None:
    """Wrap the `mlp` of the last layer, if it has one; once, however many scorers a model has."""
    layers = getattr(model.base_model, "layers", None)
    layer = layers[-1] if isinstance(layers, nn.ModuleList) and len(layers) else None
    mlp = getattr(layer, "mlp", None)
    if layer is not None and isinstance(mlp, nn.Module) and not isinstance(mlp, _WhereRead):
        mlp.__class__ = subclass("WhereRead", _WhereRead, type(mlp))
        layer.register_forward_pre_hook(_hand_on_read, with_kwargs=True)


def _hand_on_read(layer: Any, _inputs: Any, named: dict[str, Any]) -> None:
    """A hook before the last layer: tells its MLP which nodes are read."""
    forest = named.get("forest")
    layer.mlp.read = forest.read if isinstance(forest, Visibility) else None


def _on_grid(rows: Tensor, hidden: Tensor) -> Tensor:
    """`rows` [n] and others of `hidden` [1, nodes, size]: a multiple of the grid if there are enough."""
    exact = onednn(hidden.device, hidden.dtype) and not torch.is_autocast_enabled("cpu")
    others = torch.ones(hidden.shape[1], dtype=torch.bool, device=hidden.device)
    others[rows] = False
    return torch.cat([rows, others.nonzero()[: -len(rows) % (GRID if exact else 1), 0]])


def one_token(micro: MicroBatch) -> MicroBatch:
    """A micro-batch that computes one token and reads it, laid out as `micro` is."""
    zero = torch.zeros(1, dtype=torch.long)
    forest = None if micro.forest is None else Forest(token=zero, parent=zero - 1, depth=zero, subtree_end=zero + 1)
    return replace(
        micro, ids=zero[None], position=zero[None], forest=forest, parent=zero, token=zero, kept=None, given=0
    )


def layout_of(model: PreTrainedModel) -> Layout:
    """How batches for `model` are laid out."""
    return Layout.forest if uses_forest(model) else Layout.padded


def flops_of(model: PreTrainedModel) -> Cost:
    """Floating-point operations of the forward pass; the backward pass takes about twice as many."""
    body = model.base_model
    matrices = sum(elements(p) for p in body.parameters() if len(shape_of(p)) == 2)
    embeddings = sum(elements(m.weight) for m in body.modules() if isinstance(m, nn.Embedding))
    config = model.config
    heads = getattr(config, "num_attention_heads", 0)  # a model may have none
    size = config.to_dict().get("head_dim") or (config.hidden_size // heads if heads else 0)
    return Cost(
        token=2 * (matrices - embeddings),
        pair=4 * config.num_hidden_layers * heads * size,
        read=2 * elements(head_of(model).weight),
    )
