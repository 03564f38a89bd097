"""Does the final message look as it should?"""

import re
from dataclasses import dataclass, field

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Pattern
from mtgrpo.rewards import Reward
from mtgrpo.tools.unit_tests import last_code_block
from mtgrpo.types import Trajectory


@dataclass
class Format(Reward, min_chars=">= 0"):
    """1 when the final message, or each, keeps all the rules that are set, else 0."""

    min_chars: int = 0
    required_patterns: list[Pattern] = field(default_factory=list[str])  # regular expressions, each found somewhere
    forbidden_patterns: list[Pattern] = field(default_factory=list[str])  # regular expressions, none found anywhere
    code_block: bool = False  # it must hold a fenced code block
    every_turn: bool = False  # all messages of the model must keep the rules, not the final one alone

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("required_patterns", "forbidden_patterns"):
            for pattern in getattr(self, name):
                try:
                    re.compile(pattern)
                except (re.error, RecursionError, OverflowError) as error:
                    raise ConfigError(
                        f"reward format: {name}: {pattern!r} is not a regular expression ({error}); "
                        "put a backslash before each character that is meant literally"
                    ) from error

    def reward(self, trajectory: Trajectory) -> float:
        said = [turn.message.content for turn in trajectory.turns if not turn.auxiliary] if self.every_turn else []
        return float(all(map(self._kept, said or [trajectory.final])))

    def _kept(self, text: str) -> bool:
        return (
            len(text) >= self.min_chars
            and all(re.search(pattern, text) for pattern in self.required_patterns)
            and not any(re.search(pattern, text) for pattern in self.forbidden_patterns)
            and not (self.code_block and last_code_block(text) is None)
        )
