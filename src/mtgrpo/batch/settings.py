"""How much is computed at once."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.errors import ConfigError


@dataclass
class BatchSettings:
    """How much is computed at once."""

    token_budget: int = 16_384  # computed tokens per micro-batch; no context may be longer

    def __post_init__(self) -> None:
        if self.token_budget < 1:
            raise ConfigError(f"`token_budget` must be >= 1, got {self.token_budget}")
