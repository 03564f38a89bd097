"""What to do when the memory of a GPU is not enough."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from mtgrpo.errors import ConfigError

HELPS = {  # of each phase of a run, the cheapest first
    "sampling": "engine.memory_fraction lower (the KV cache), or rollout.max_concurrent lower",
    "loading": "model.dtype=bfloat16 with model.lora.rank=16, or choose a smaller model",
    "training": "model.checkpointing=true, batch.token_budget or engine.memory_fraction lower, or model.lora.rank=16",
    "update": "optimizer.offload=true (of a warm start sft.optimizer.offload=true), or model.lora.rank=16",
}


@contextmanager
def explained(phase: str) -> Generator[None]:
    """Within, running out of memory raises ConfigError: in which phase, how much was asked for, and what would help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = str(error).partition(" If reserved")[0]
        raise ConfigError(
            f"the memory of the GPU is not enough ({phase}): {asked} Unless it is set, set {HELPS[phase]}"
        ) from error
