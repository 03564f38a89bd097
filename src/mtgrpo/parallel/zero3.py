"""Weights, gradients and moments are divided, by DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.parallel import Parallel
from mtgrpo.parts import File


@dataclass
class Zero3(Parallel):
    """Weights, gradients and moments are divided among the ranks, by DeepSpeed (ZeRO-3, arXiv:1910.02054)."""

    deepspeed_config: File = ""  # a file of DeepSpeed's own settings of stage 3; "": its defaults, or accelerate's file

    @property
    def divides(self) -> bool:
        return True
