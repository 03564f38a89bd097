"""The layout that settings name."""

from mtgrpo.parallel import Parallel
from mtgrpo.parallel.ddp import DDP
from mtgrpo.parallel.fsdp2 import FSDP2
from mtgrpo.parallel.zero3 import Zero3
from mtgrpo.policy.layouts import ParallelLayout
from mtgrpo.policy.layouts.ddp import DataParallel
from mtgrpo.policy.layouts.fsdp2 import FullySharded
from mtgrpo.policy.layouts.zero3 import DeepSpeedSharded


def make_layout(parallel: Parallel, rank: int, ranks: int) -> ParallelLayout:
    """That of one of `ranks`, whose process group there is. parallel: settled, so not `auto`."""
    if isinstance(parallel, FSDP2):
        return FullySharded(rank, ranks, bool(parallel.reshard))
    if isinstance(parallel, Zero3):
        return DeepSpeedSharded(rank, ranks, parallel.settings())
    if isinstance(parallel, DDP) or ranks > 1:
        return DataParallel(rank, ranks)
    return ParallelLayout()
