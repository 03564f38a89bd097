"""What the launcher says; else what memory has room for."""

from dataclasses import dataclass

from mtgrpo.parallel import Parallel


@dataclass
class AutoParallel(Parallel):
    """As accelerate launch says; else ddp where each device holds the whole model, and fsdp2 where not."""
