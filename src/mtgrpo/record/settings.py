"""What a run keeps beside its metrics and conversations."""

from dataclasses import dataclass, field

from mtgrpo.errors import refuse_without_effect, require


@dataclass
class TokenSettings:
    """The record of single tokens, `tokens/step_000010.npz`: what each was paid, and how likely it was to whom."""

    last: int = 20  # the newest steps that are kept; 0 = only those of `every`
    every: int = 10  # each step whose number it divides stays; 0 = none
    groups: int = 8  # of a step, at most: those whose rewards differ most; 0 = all
    after: bool = False  # also how likely each token is after the update, which takes another forward pass

    def __post_init__(self) -> None:
        require(self, last=">= 0", every=">= 0", groups=">= 0 (0 = all)")
        if not self.active:
            refuse_without_effect(self, ("groups", "after"), "set `last` or `every` above 0")

    @property
    def active(self) -> bool:
        """Whether any step is recorded."""
        return bool(self.last or self.every)

    def keeps(self, step: int, newest: int) -> bool:
        """Whether the record of `step` stays when `newest` has been trained."""
        return step > newest - self.last or bool(self.every and step % self.every == 0)


@dataclass
class RecordSettings:
    """What is kept."""

    tokens: TokenSettings = field(default_factory=TokenSettings)
