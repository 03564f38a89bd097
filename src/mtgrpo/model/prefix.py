"""Keys and values of a path that several micro-batches continue: computed once, with their gradients gathered.

A tree beyond the token budget is walked depth first (`batch/packing.py`). Attention below a chain sees the chain's
keys and values as leaves of its own graph, so each backward pass below adds to the gradients of these leaves. The
chain's own backward pass comes last and starts from its loss and from what was gathered: the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtgrpo.batch.packing import MicroBatch, empty_like, visits
from mtgrpo.batch.word import Pass, common_word, fillers


class Prefix:
    """What a pass over `micro` sees of the chains `above` it, and keeps of its own nodes if it opens a chain.

    Layers are told apart by their numbers, so that one that is computed again in the backward pass sees the same.
    """

    def __init__(self, micro: MicroBatch, above: Prefix | None) -> None:
        self.above = above
        self.loss: Tensor | None = None  # of the micro-batch, until its gradient is taken
        self._count = micro.computed if micro.opens else 0
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # [1, heads, nodes, size] with history, where one is wanted
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # the same without; what is below adds to their gradients

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, heads, nodes, size] of a pass, after those of the path above it."""
        if self._count and layer not in self._own:
            keys, values = key[:, :, : self._count], value[:, :, : self._count]
            self._own[layer] = keys, values
            self._leaves.setdefault(layer, (_leaf(keys), _leaf(values)))
        path, chain = [(key, value)], self.above
        while chain is not None:
            path.insert(0, chain._leaves[layer])
            chain = chain.above
        if len(path) == 1:
            return key, value
        keys, values = zip(*path, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def forget(self) -> None:
        """The nodes will be computed again; what is below goes on with what it saw."""
        self._own.clear()

    def backward(self) -> None:
        """The gradient of the loss, and of what those below have gathered; then nothing is left of the pass."""
        torch.autograd.backward(*self.take_roots())

    def take_roots(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """What the backward pass starts from, the loss first, and the gradients there, None for 1; once."""
        assert self.loss is not None, "the micro-batch has been scored"
        roots: list[Tensor] = [self.loss]
        gathered: list[Tensor | None] = [None]
        for layer, leaves in self._leaves.items():
            for own, leaf in zip(self._own[layer], leaves, strict=True):
                if leaf.grad is not None and own.requires_grad:
                    roots.append(own)
                    gathered.append(leaf.grad)
        self.loss, self._count = None, 0  # a layer that is computed again keeps nothing
        self._own.clear()
        self._leaves.clear()
        return roots, gathered


def passes(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Prefix, Pass]]:
    """All that the gradient of a batch takes, in order; after `Pass.keys` the prefix forgets, after `loss` it has one.

    Whoever computes a pass sets `Prefix.loss`.
    """
    above: Prefix | None = None
    for micro, entered in visits(micro_batches):
        prefix = Prefix(micro, above) if entered else above
        assert prefix is not None, "what is left was entered"
        above = prefix if entered and micro.opens else prefix.above
        if entered and not micro.held:
            yield micro, prefix, Pass.keys
            prefix.forget()
        elif entered or not micro.held:
            yield micro, prefix, Pass.loss
        if not (entered and micro.opens):
            yield micro, prefix, Pass.backward


def word_of(micro_batches: Sequence[MicroBatch]) -> str:
    """The letters of their `passes`: F for keys and loss, B for backward. Empty micro-batches are best left out."""
    return "".join("B" if step is Pass.backward else "F" for *_, step in passes(micro_batches))


def aligned_passes(by_rank: Sequence[Sequence[MicroBatch]], rank: int) -> Iterator[tuple[MicroBatch, Prefix, Pass]]:
    """As `passes` of the micro-batches of `rank`, between them passes of an empty one: all ranks have one order."""
    computed = [[micro for micro in micro_batches if micro.computed] for micro_batches in by_rank]
    words = [word_of(micro_batches) for micro_batches in computed]
    own, graphs = passes(computed[rank]), list[Prefix]()
    for filler in fillers(common_word(words), words[rank]):
        if filler is None:
            yield next(own)
            continue
        nothing = empty_like(by_rank[rank][0])
        prefix = graphs.pop() if filler is Pass.backward else Prefix(nothing, None)
        if filler is Pass.loss:
            graphs.append(prefix)
        yield nothing, prefix, filler


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()
