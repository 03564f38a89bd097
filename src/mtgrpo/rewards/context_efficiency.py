"""Is the answer right, and how short was the longest context that it took?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar

from mtgrpo.parts import Parts
from mtgrpo.rewards import Given, OfRewards, Score
from mtgrpo.types import Trajectory


class Form(Enum):
    """What a right answer is worth; a wrong one is worth 0."""

    bounded = "bounded"  # 1 - bonus, and the share of the bonus that it and its siblings deserve
    plain = "plain"  # 1 / tokens


@dataclass
class ContextEfficiency(OfRewards, bonus="> 0 and < 0.5"):
    """A right answer is worth more the shorter its longest context was; a wrong answer is worth 0.

    L_i is the number of tokens in the longest context of trajectory i, with the output of that turn
    (`Trajectory.longest_context_tokens`); the turns that a condenser requests count too. A right answer is worth

    form=bounded   R_i = 1 - bonus + bonus * pass_rate * shortest / L_i
    form=plain     R_i = 1 / L_i

    pass_rate is the share of right answers among the siblings that did not fail, and shortest is the smallest L among
    the right answers. A truncated trajectory is graded by its final message and counts in both.

    An answer is right where each reward in `of` reaches its success_at: 'reward.of=[numeric]',
    'reward.of={code: {}, format: {min_chars: 9}}'. docs/tasks_and_rewards.md says why a wrong answer never pays,
    however short it is, with algorithm.divide_by_std=false.
    """

    default: ClassVar[Mapping[str, Any]] = {"em": {"convention": "unicode"}}  # punctuation of any script

    success_at: float = 1e-9  # below what any right answer is worth, in either form
    of: Annotated[Any, Parts("reward")] = None  # the rewards that say whether an answer is right; null: em of unicode
    form: Form = Form.bounded  # what a right answer is worth
    bonus: float = 0.2  # form=bounded: the share of a right answer's reward that depends on length, in (0, 0.5)

    async def rewards(self, siblings: Sequence[Trajectory]) -> list[Given]:
        """One for each. Raises ConfigError as the rewards in `of` do."""
        graded = await self.part_scores(siblings)
        lengths = [
            sibling.longest_context_tokens * self._is_right(s) for sibling, s in zip(siblings, graded, strict=True)
        ]
        right = [length for length in lengths if length]
        count = sum(not isinstance(scores, Exception) for scores in graded)
        deserved = self.bonus * len(right) / count if right else 0.0

        def worth(length: int) -> float:
            if not length:
                return 0.0
            return 1 / length if self.form is Form.plain else 1 - self.bonus + deserved * min(right) / length

        return [s if isinstance(s, Exception) else worth(length) for s, length in zip(graded, lengths, strict=True)]

    def _is_right(self, scores: Mapping[str, Score] | Exception) -> bool:
        if isinstance(scores, Exception):
            return False
        return all(scores[name].total >= part.success_at for name, part in self._parts.items())

    def note(self, divide_by_std: bool) -> str:
        warning = ""
        if divide_by_std:
            warning = (
                "reward=context_efficiency with algorithm.divide_by_std=true: where all siblings are right, tiny "
                "differences of length are stretched to unit variance and weigh as much as right against wrong; "
                "set algorithm.divide_by_std=false"
            )
        elif self.form is Form.plain:
            warning = (
                "reward.form=plain with algorithm.divide_by_std=false: right and wrong differ by about 5e-4, which "
                "kl.coef, algorithm.entropy_coef and rewards of turns drown, and optimizer.max_grad_norm no longer "
                "binds; set reward.form=bounded"
            )
        return "; ".join(filter(None, (warning, super().note(divide_by_std))))
