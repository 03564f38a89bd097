"""A model's own forward pass as the reference, and how far rounding alone may move its log-probabilities.

Two exact ways of computing the same model differ by rounding. By how much depends on its dtype, its size and its
weights: 1e-6 nats for a small model in fp32, .02 for one of a hundred million parameters in bfloat16, and far more
after tokens on which a model was never trained. So no constant tells rounding from a fault. What does is the model
itself: its forward pass is repeated with the last bits of its inputs changed. The fused and the plain path were half to
twice as far apart as that (fp64, fp32 and bfloat16; a tiny model and SmolLM2-135M).
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtgrpo.model.load import computes_in
from mtgrpo.model.logprobs import head_logits

MEASURED = 32  # positions of a context at whose end rounding is measured, for that of a single one says little
MARGIN = 6.0  # how many times what the last bits do is still rounding
HARMLESS = 0.01  # nats; a smaller difference is noted, but is no reason to end a run


class Reference(NamedTuple):
    """What a model says of one context, computed by its own forward pass over that context alone."""

    logprobs: Tensor  # [positions, vocabulary], of the next token
    bound: float  # nats, the largest distance from `logprobs` that rounding explains


def ends_the_run(apart: float, bound: float) -> bool:
    """Whether a difference of `apart` nats, where rounding explains `bound`, is a fault that no training survives."""
    return not apart <= max(HARMLESS, bound)


@torch.no_grad()
def reference(model: PreTrainedModel, context: Sequence[int] | Tensor, first: int = 0) -> Reference:
    """`context` [n] token ids; of its positions from `first` on (negative: that many at the end)."""
    ids = torch.as_tensor(context, device=model.device)
    with last_bits_changed(model, (0.0, 1.0, -1.0)):
        hidden = model.base_model(input_ids=ids.expand(3, -1), use_cache=False).last_hidden_state
    measured = head_logits(model, hidden[:, -MEASURED:]).log_softmax(-1)
    moved = max(distance(measured[0], changed) for changed in measured[1:])
    rounding = max(moved, _unit(computes_in(model)))
    return Reference(head_logits(model, hidden[0, first:]).log_softmax(-1), MARGIN * rounding)


@contextmanager
def last_bits_changed(model: PreTrainedModel, by: Sequence[float]) -> Generator[None]:
    """Within, the embeddings of each row are others in their last bits, so many times; one number is for all rows."""
    unit = _unit(computes_in(model))

    def change(_module: Any, _inputs: Any, embedded: Tensor) -> Tensor:
        token, part = (torch.arange(size, device=embedded.device) for size in embedded.shape[1:])
        signs = torch.where((token % 2 == 0)[:, None] == (part % 3 == 0), unit, -unit).to(embedded)
        return embedded * (1 + signs * torch.tensor(by).to(embedded)[:, None, None])

    handle = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, context: Tensor) -> Tensor:
    """Log-probabilities of the next token at every position of `context` [n]: [n, vocabulary]."""
    hidden = model.base_model(input_ids=context[None], use_cache=False).last_hidden_state[0]
    return head_logits(model, hidden).log_softmax(-1)


def distance(expected: Tensor, actual: Tensor) -> float:
    """Root mean square of the difference in nats, each token of the vocabulary weighted by its probability.

    Both [positions, vocabulary] log-probabilities; NaN where one of them is not finite.
    """
    squares = (expected.exp() * (actual - expected).square()).nansum(-1)  # 0 * inf where nothing is expected is 0
    return squares.mean().sqrt().item() if actual.isfinite().any() and not actual.isnan().any() else torch.nan


def _unit(dtype: torch.dtype) -> float:
    """The last bit; less under autocast, where products alone are rounded, not sums, norms and the residual stream."""
    return torch.finfo(dtype).eps / (4 if dtype.itemsize == 2 else 1)
