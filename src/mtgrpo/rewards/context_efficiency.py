"""Is the answer right, and how short was the longest context that it took?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from mtgrpo.errors import require
from mtgrpo.rewards import Given, OfRewards
from mtgrpo.types import Trajectory


class Form(Enum):
    """What a right answer is worth; a wrong one is worth 0."""

    bounded = "bounded"  # 1 - bonus, and the share of the bonus that it and its siblings deserve
    plain = "plain"  # 1 / tokens


@dataclass
class ContextEfficiency(OfRewards):
    """1 for a right answer, less up to `bonus` where right siblings had shorter contexts or others are wrong; else 0.

    Of trajectory i, L_i is `Trajectory.longest_context_tokens`: the most tokens of one turn's context and output,
    turns said to a condenser included. R_i = 0 for a wrong answer, else

    form=bounded   R_i = 1 - bonus + bonus * pass_rate * shortest / L_i
    form=plain     R_i = 1 / L_i

    pass_rate is the share of the siblings that are right (of those that did not fail), shortest the least L of these;
    one that was truncated and right counts in both, whatever algorithm.truncated makes of it.

    A wrong answer never pays, however short, where algorithm.divide_by_std=false: docs/tasks_and_rewards.md says why.

    An answer is right that all rewards in `of` count as a success: of=[numeric], of={code: {}, format: {min_chars: 9}}.
    A truncated trajectory is graded by its final message, as other rewards do.
    """

    default: ClassVar[Mapping[str, Any]] = {"em": {"convention": "unicode"}}  # punctuation of any script

    success_at: float = 1e-9  # below what any right answer is worth, in either form
    of: Any = None  # the rewards that say whether an answer is right; null: em of unicode
    form: Form = Form.bounded  # what a right answer is worth
    bonus: float = 0.2  # form=bounded: the share of a right answer's reward that depends on length, in (0, 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, bonus="> 0 and < 0.5")

    async def rewards(self, siblings: Sequence[Trajectory]) -> list[Given]:
        """One for each. Raises ConfigError as the rewards in `of` do."""
        least = {name: part.success_at for name, part in self._parts.items()}
        found = await self.part_scores(siblings)
        lengths = {
            number: trajectory.longest_context_tokens
            for number, (trajectory, graded) in enumerate(zip(siblings, found, strict=True))
            if not isinstance(graded, Exception) and all(graded[name].total >= least[name] for name in least)
        }
        known = sum(not isinstance(graded, Exception) for graded in found)
        worth = self._worth(lengths, known)
        return [
            graded if isinstance(graded, Exception) else worth.get(number, 0.0) for number, graded in enumerate(found)
        ]

    def _worth(self, lengths: dict[int, int], siblings: int) -> dict[int, float]:
        """Of the right answers, by the lengths of their contexts; there are so many siblings in all."""
        if self.form is Form.plain:
            return {number: 1 / length for number, length in lengths.items()}
        shortest = min(lengths.values(), default=0)
        deserved = self.bonus * len(lengths) / siblings if lengths else 0.0
        return {number: 1 - self.bonus + deserved * shortest / length for number, length in lengths.items()}

    def note(self, divide_by_std: bool) -> str:
        """What makes lengths weigh too much or nothing at all, and what the others have to say."""
        found: list[str] = []
        if divide_by_std:
            found.append(
                "reward=context_efficiency with algorithm.divide_by_std=true: where all siblings are right, tiny "
                "differences of length are stretched to unit variance and weigh as much as right against wrong; "
                "set algorithm.divide_by_std=false"
            )
        elif self.form is Form.plain:
            found.append(
                "reward.form=plain with algorithm.divide_by_std=false: right and wrong differ by about 5e-4, which "
                "kl.coef, algorithm.entropy_coef and rewards of turns drown, and optimizer.max_grad_norm no longer "
                "binds; set reward.form=bounded"
            )
        return "; ".join(filter(None, (*found, super().note(divide_by_std))))
