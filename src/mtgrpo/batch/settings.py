"""How much is computed at once."""

from dataclasses import dataclass

from mtgrpo.errors import Bounded

DEFAULT_BUDGET = 16_384


@dataclass
class BatchSettings(Bounded, token_budget=">= 1"):
    """How much is computed at once."""

    token_budget: int | None = None  # tokens computed at once; null: what a GPU's memory holds, 16,384 on a CPU

    @property
    def tokens(self) -> int:
        """The budget; what null amounts to on a GPU is planned before a run begins."""
        return self.token_budget or DEFAULT_BUDGET

    @property
    def context(self) -> int:
        """Tokens of the longest context where no other length is asked for: not more where memory holds more."""
        return self.tokens


class PlannedBatch(BatchSettings):
    """With the budget that memory has room for, which has no say in how long contexts grow."""

    @property
    def context(self) -> int:
        """As without a plan."""
        return DEFAULT_BUDGET
