"""Which devices train and which sample."""

from dataclasses import dataclass, field

from mtgrpo.errors import ConfigError, require


@dataclass
class Role:
    """The devices that do one thing: how many, or which."""

    num: int | None = None  # how many; null: one trains, or all where parallel= is chosen, and the same do the rest
    ids: list[int] | None = None  # as nvidia-smi counts them, or below CUDA_VISIBLE_DEVICES what that names, from 0

    def __post_init__(self) -> None:
        require(self, num=">= 0")
        if self.ids is None:
            return
        if min(self.ids, default=0) < 0 or len(set(self.ids)) < len(self.ids):
            raise ConfigError(f"`ids={self.ids}` must name each device once, by its number from 0")
        if self.num not in (None, len(self.ids)):
            raise ConfigError(f"`num={self.num}` and `ids={self.ids}` differ: leave one of them out")

    @property
    def count(self) -> int | None:
        """How many are asked for; None: nothing is."""
        return self.num if self.ids is None else len(self.ids)

    @property
    def numbers(self) -> list[int]:
        """Of the devices; where there are no names, from 0."""
        return [*range(self.num or 0)] if self.ids is None else self.ids


@dataclass
class Devices:
    """How many GPUs do what, or which; on a CPU how many processes. What is not set shares the GPUs that train."""

    train: Role = field(default_factory=Role)
    reference: Role = field(default_factory=Role)
    rollout: Role = field(default_factory=Role)

    def __post_init__(self) -> None:
        if self.train.count == 0:
            raise ConfigError("`train`: no device trains; name one, or leave it out")
