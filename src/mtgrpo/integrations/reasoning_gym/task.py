"""Generated puzzles of the package reasoning-gym: arithmetic, logic, algorithms, games, about 100 data sets."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from typing import Annotated, Any

from mtgrpo.errors import ConfigError, refuse_without_package
from mtgrpo.parts import Reach, Text
from mtgrpo.tasks import Generated, Split, TaskStream, held_out
from mtgrpo.types import Message, Task

_EVAL_FRACTION = 0.2
_SIZE = 1000  # questions per seed of the library
_TRIES = 100  # questions that are tried to get one of the wanted split


@dataclass
class ReasoningGymTasks(Generated):
    """One data set of reasoning-gym, graded by its own rules with reward=reasoning_gym.

    Held out is a fifth of all questions, by a hash of their text: no question is both trained on and evaluated.
    Example: `task=reasoning_gym task.dataset=chain_sum task.config='{max_terms: 3}' reward=reasoning_gym`. The answer
    is expected after `####`, or in <answer></answer>, as in the library: name the form in task.system_prompt.
    """

    dataset: Text = ""  # its name in the library
    config: Annotated[Any, Reach.file] = None  # the data set's own settings: {name: value}

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        _questions(self.dataset, self._config, 0)
        return super().stream(split, seed, repeat)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """The library's answer; None for tasks with several right answers, of which it names none."""
        return (Message("assistant", f"#### {task.answer}"),) if task.answer else None

    @property
    def _config(self) -> str:
        return json.dumps(self.config or {}, sort_keys=True)

    def task(self, split: Split, seed: int, index: int) -> Task:
        """The next question that belongs to the split. Raises ConfigError where there are too few."""
        config = self._config
        for number in range(index * _TRIES, (index + 1) * _TRIES):
            entry = _entry(self.dataset, config, seed, number)
            if held_out(entry["question"], _EVAL_FRACTION) is (split is Split.eval):
                return Task(
                    id=f"reasoning_gym/{self.dataset}/{seed}/{split.value}/{index}",
                    messages=self.with_prompt((Message("user", entry["question"]),)),
                    answer=entry["answer"] or "",
                    metadata={"dataset": self.dataset, "config": json.loads(config), "entry": entry},
                )
        raise ConfigError(
            f"task.dataset={self.dataset} task.config={config}: none of {_TRIES} questions is for split {split.value}; "
            "it has too few different ones: set its config to more"
        )


def _entry(name: str, config: str, seed: int, number: int) -> dict[str, Any]:
    """Question `number` of the endless row of questions that `seed` begins."""
    part, place = divmod(number, _SIZE)
    start = random.Random(f"reasoning_gym/{seed}/{part}").randrange(2**31)
    questions = _questions(name, config, start)
    state = random.getstate()
    random.seed(start + place)  # list_functions draws from the global generator
    try:
        return questions[place]
    finally:
        random.setstate(state)


@functools.lru_cache(maxsize=4)
def _questions(name: str, config: str, seed: int) -> Any:
    """A data set of the library. Raises ConfigError when there is none of that name and those settings."""
    refuse_without_package("reasoning_gym", "task=reasoning_gym", "reasoning-gym")
    import reasoning_gym  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    if name not in DATASETS:
        raise ConfigError(
            f"task.dataset={name!r} is no data set of reasoning-gym; it has {', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **json.loads(config))
    except Exception as error:  # a data set checks its settings as it likes
        raise ConfigError(
            f"task.config={config} does not suit task.dataset={name}: {type(error).__name__}: {error}"
        ) from error
