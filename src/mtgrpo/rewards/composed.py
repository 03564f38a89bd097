"""Several rewards at once, with weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Parts
from mtgrpo.rewards import Given, OfRewards, Score
from mtgrpo.rewards.length import Length
from mtgrpo.types import Trajectory


@dataclass
class Composed(OfRewards):
    """The sum of the rewards `of`, each times its weight, which is 1 where none is given; so for those of turns.

    As options: 'reward=[numeric,format]' reward.numeric.weight=1 reward.format.weight=0.2. Each is logged by itself, as
    reward/numeric/mean, before it is weighed; so is what it is itself made of, as reward/numeric/NAME/mean.
    """

    # [numeric, format], or with weights and settings {numeric: {}, format: {weight: 0.2, min_chars: 9}}
    of: Annotated[Any, Parts("reward")] = None

    def __post_init__(self) -> None:
        self._weights: list[float] = []
        super().__post_init__()
        self.judges_turns = any(part.judges_turns for part in self._parts.values())

    def note(self, divide_by_std: bool) -> str:
        told = [super().note(divide_by_std)]
        if self.success_at >= 1 and (costs := [name for name, part in self._parts.items() if isinstance(part, Length)]):
            told.append(
                f"a right answer that reward {costs[0]} takes something from may be no success, which takes "
                f"reward.success_at={self.success_at:g}: set it lower, such as 0.5"
            )
        return "; ".join(filter(None, told))

    async def rewards(self, siblings: Sequence[Trajectory]) -> list[Given]:
        return [s if isinstance(s, Exception) else self._sum(s) for s in await self.part_scores(siblings)]

    def _settings(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        weight = settings.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"reward {name}: weight must be a number, got {weight!r}")
        if name == "environment" and weight != 1:
            raise ConfigError(
                f"reward environment: weight={weight}: what the environment pays counts as it is; weigh it with "
                "advantage.turn_weight, or the other rewards"
            )
        if "success_at" in settings:
            raise ConfigError(
                f"reward {name}: success_at={settings['success_at']} has no effect beside other rewards, "
                "where their sum decides; leave it out"
            )
        self._weights.append(float(weight))
        return {key: value for key, value in settings.items() if key != "weight"}

    def _sum(self, scores: dict[str, Score]) -> Score:
        weighed = list(zip(scores.values(), self._weights, strict=True))
        judged = [[weight * amount for amount in score.turns] for score, weight in weighed if score.turns]
        return Score(
            total=sum(weight * score.total for score, weight in weighed),
            components={name: score.total for name, score in scores.items()}
            | {f"{name}/{part}": amount for name, score in scores.items() for part, amount in score.components.items()},
            turns=tuple(map(sum, zip(*judged, strict=True))),
            paid=sum(score.paid for score in scores.values()),
        )
