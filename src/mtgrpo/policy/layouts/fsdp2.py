"""Every rank has a part of each weight, of its gradient and of its moments: torch's FSDP2, layer by layer.

`reshard`: a layer's weights are gathered for each pass and given back after it, and its gradient is summed after each
backward pass: the least memory. Passes are collectives then, so ranks make them in one order (`batch/word.py`). Else
whole weights and gradients stay from the first pass of an update to the last, and one more pass sums the gradients.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from mtgrpo.batch.packing import MicroBatch, Packing
from mtgrpo.batch.word import Pass
from mtgrpo.model.checkpointing import decoder_layers
from mtgrpo.model.prefix import Prefix, aligned_passes, passes
from mtgrpo.model.scorer import AllWeightsScorer, Scorer, one_token
from mtgrpo.model.sharding import exchange
from mtgrpo.policy.layouts import Score, SeveralRanks
from mtgrpo.policy.optimizer import Optimizer


class FullySharded(SeveralRanks):
    """See above."""

    aligned = True

    def __init__(self, rank: int, ranks: int, reshard: bool) -> None:
        super().__init__(rank, ranks)
        self._reshard = reshard
        self._scorer: Scorer | None = None
        self._sharded: list[FSDPModule] = []
        self._one: MicroBatch | None = None  # a token, laid out as the micro-batches of the last update are

    def wrap(self, model: PreTrainedModel) -> Scorer:
        if self._scorer is not None:
            return self._scorer
        self._scorer = scorer = AllWeightsScorer(model)
        mesh = init_device_mesh(model.device.type, (self.ranks,))
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=self._reshard)
        fully_shard(scorer, mesh=mesh, reshard_after_forward=False)
        self._sharded = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        for name in ("hidden", "next_logprobs", "reference"):
            register_fsdp_forward_method(scorer, name)
        self._sum_in_backward(self._reshard)
        return scorer

    def passes(self, packings: Sequence[Packing]) -> Iterator[tuple[MicroBatch, Prefix, Pass]]:
        own = packings[self.rank].micro_batches
        self._one = one_token(own[0]) if own else None
        return (
            aligned_passes([packing.micro_batches for packing in packings], self.rank) if self._reshard else passes(own)
        )

    def finish(self, optimizer: Optimizer) -> None:
        if not self._reshard and self._one is not None:
            assert self._scorer is not None, "the model is wrapped"
            self._sum_in_backward(True)
            (self._scorer(self._one, 1.0).logp.sum() * 0.0).backward()
            self._sum_in_backward(False)
        self.reshard()

    @contextmanager
    def scoring_by(self, scorer: Scorer, weights: dict[str, Tensor]) -> Generator[Score]:
        self.reshard()  # what is gathered is of the model's own
        named = dict(scorer.model.named_parameters())
        for name, weight in weights.items():
            exchange(named[name], weight)
        try:
            yield scorer
        finally:
            self.reshard()
            for name, weight in weights.items():
                exchange(named[name], weight)

    def reshard(self) -> None:
        for module in self._sharded:
            module.reshard()

    def _sum_in_backward(self, does: bool) -> None:
        for module in self._sharded:
            module.set_requires_gradient_sync(does, recurse=False)
            module.set_reshard_after_backward(does, recurse=False)
