"""What reasoning-gym's own grading says."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.rewards import Reward
from mtgrpo.rewards.em import stated_answer
from mtgrpo.types import Trajectory

_MARKER = "####"
_TAKES_ANY_TEXT = {"game_of_life_halting"}  # the library (0.1.25) calls every text right: answers are compared instead


@dataclass
class ReasoningGym(Reward):
    """The score, from 0 to 1, that the data set of task=reasoning_gym gives the answer; some give parts of 1.

    The answer is what stands after the last `####` of the final message, else in its last <answer></answer>. What the
    data set's grading cannot read is worth 0.
    """

    require_marker: bool = True  # false: where there is neither, the whole message is the answer

    def reward(self, trajectory: Trajectory) -> float:
        """The score. Raises ConfigError for tasks of another source."""
        task = trajectory.task
        if "entry" not in task.metadata:
            raise ConfigError(
                f"task {task.id} is none of reasoning-gym: reward=reasoning_gym is for task=reasoning_gym"
            )
        answer = _stated(trajectory.final, self.require_marker)
        if not answer:
            return 0.0
        if task.metadata["dataset"] in _TAKES_ANY_TEXT:
            return float(answer.lower() == task.answer.lower())
        grade = _grader(task.metadata["dataset"], json.dumps(task.metadata["config"]))
        try:
            return min(1.0, max(0.0, float(grade(answer, task.metadata["entry"]))))
        except Exception:  # the library's parsers raise whatever they like at text that is no answer
            return 0.0


def _stated(text: str, require_marker: bool) -> str:
    """The answer that `text` gives; "" for none."""
    if _MARKER in text:
        return text.rpartition(_MARKER)[2].strip()
    return stated_answer(text, "answer") or ("" if require_marker else text.strip())


@functools.cache
def _grader(dataset: str, config: str) -> Any:
    import reasoning_gym  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    return reasoning_gym.create_dataset(dataset, seed=0, size=1, **json.loads(config)).score_answer
