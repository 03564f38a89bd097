"""Several sources of tasks at once."""

import copy
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, Self, cast

from mtgrpo.errors import ConfigError, refuse_without_effect
from mtgrpo.parts import Parts, RunContext, built, extension
from mtgrpo.tasks import Split, TaskSource, TaskStream, hashed
from mtgrpo.tasks.jsonl import FileSource
from mtgrpo.types import Message, Task

_SOURCE = "mixed"  # in a task's metadata, the number of its source


@dataclass
class Mixed(TaskSource):
    """Tasks of several sources, drawn by weight.

    Each entry of `of` names a source and perhaps a weight, 1 where there is none, and has its settings. One reward
    grades them all. Example: `task=mixed task.of='[{task: gsm8k, weight: 2}, {task: word_problems}]'`.
    """

    # [{task: gsm8k, weight: 2}, {task: word_problems}]
    of: Annotated[list[Any], Parts("task")] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self._weights: list[float] = []
        self._sources: list[TaskSource] = []
        prompts = ("system_prompt", "prompt_template", "examples")
        refuse_without_effect(self, prompts, "set it in the entries of task.of")
        if not self.of:
            raise ConfigError("task.of is empty: name the sources, as task.of='[{task: gsm8k}, {task: word_problems}]'")
        for entry in self.of:
            settings: dict[str, Any] = dict(cast("Mapping[str, Any]", entry)) if isinstance(entry, Mapping) else {}
            name, weight = settings.pop("task", None), settings.pop("weight", 1)
            if not isinstance(name, str) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ConfigError(f"task.of: an entry is {{task: NAME, weight: NUMBER above 0, ...}}, got {entry!r}")
            self._weights.append(weight)
            kind = extension.find_class("mtgrpo.tasks", name, TaskSource)
            if issubclass(kind, Mixed):
                raise ConfigError("task.of: a mix in a mix; put its entries into the outer one, weights multiplied")
            self._sources.append(built(f"task {name}", kind, settings))
        files = [source for source in self._sources if isinstance(source, FileSource)]
        for source in files:
            source.mixed = files

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        async with AsyncExitStack() as stack:
            running = copy.copy(self)
            running._sources = [await stack.enter_async_context(source.open(context)) for source in self._sources]
            yield running

    @property
    def opens(self) -> bool:
        return any(source.opens for source in self._sources)

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """The sources' own streams, mixed; one that ends is left out. Raises ConfigError as they do."""
        return MixedStream([source.stream(split, seed, repeat) for source in self._sources], self._weights, seed)

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        return self._sources[task.metadata[_SOURCE]].demonstration(task, seed)

    @property
    def demonstrates(self) -> bool:
        return any(source.demonstrates for source in self._sources)


class MixedStream:
    """Draws from `streams` by weight; the draw depends on `seed` and the number of the task alone."""

    def __init__(self, streams: Sequence[TaskStream], weights: Sequence[float], seed: int) -> None:
        self._streams, self._weights, self._seed = streams, list(weights), seed
        self._drawn = 0
        self.notes = [note for stream in streams for note in stream.notes]
        for stream in streams:
            stream.notes = self.notes  # where later ones go
        self.epoch = 0  # passes over the source that has had the fewest
        self.endless = all(stream.endless for stream in streams)

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        while any(self._weights):
            left = hashed(f"{self._seed}/mixed/{self._drawn}") / 2**64 * sum(self._weights)
            self._drawn += 1
            number = next(n for n, total in enumerate(accumulate(self._weights)) if left < total)
            if (task := next(self._streams[number], None)) is not None:
                self._count_epochs()
                return replace(task, metadata={**task.metadata, _SOURCE: number})
            self._weights[number] = 0.0
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """The position of every stream; JSON-serialisable."""
        ended = [not weight for weight in self._weights]
        return {"drawn": self._drawn, "ended": ended, "of": [stream.state_dict() for stream in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError where the sources are others."""
        if (saved := len(state.get("of", ()))) != len(self._streams):
            raise ConfigError(f"task.of had {saved} entries when the state was saved, not {len(self._streams)}")
        self._drawn = state["drawn"]
        self._weights = [0.0 if ended else weight for weight, ended in zip(self._weights, state["ended"], strict=True)]
        for stream, position in zip(self._streams, state["of"], strict=True):
            stream.load_state_dict(position)
        self._count_epochs()

    def _count_epochs(self) -> None:
        self.epoch = min((stream.epoch for stream in self._streams if not stream.endless), default=0)
