"""Where metrics go. One file = one sink.

Names of metrics are flat, with "/" between area and quantity. What is measured of the machine begins with `perf/` or
`time/`; every other metric is a function of configuration and seed.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Part, RunContext, Text, built, extension, named
from mtgrpo.runtime.files import write_whole
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.runtime.text import complain
from mtgrpo.types import EVALUATION, LEARNING


@dataclass
class Sink(Part, ABC):
    """Takes a run's metrics and notes. It is opened before everything else and closed after it."""

    required: ClassVar[bool] = False  # its errors end the run; another is left out after its first, which is noted

    @abstractmethod
    def stage(self, name: str, total: int) -> None:
        """A stage of the run begins, e.g. "warm start"; `total` is its number of steps, 0 = not known."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step; `step` counts the steps of this stage that are done, 0 = before the first."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Something to tell the person. The text is data: nothing in it is markup."""

    def progress(self, done: int) -> None:
        """So many steps of the stage are done; there are no metrics of them yet."""

    def played(self) -> None:
        """A conversation of the step that is under way has ended."""


@dataclass
class Tracker(Sink, ABC):
    """Base of sinks for experiment trackers, where a run is a set of curves over the steps of training.

    Evaluations stand at the last step before them. Notes stay with the other sinks.
    """

    project: Text = "mtgrpo"
    name: Text = ""  # of the run; by default the last two parts of its folder

    def __post_init__(self) -> None:
        if type(self).__module__.startswith("mtgrpo.integrations."):  # of ours; the package has the option's name
            option = type(self).__module__.rpartition(".")[2]
            refuse_without_package(option, f"log={option}")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With the tracker's run begun, or taken up where this run is resumed. ConfigError where that fails."""
        running = copy.copy(self)
        running.name = self.name or "/".join(context.folder.resolve().parts[-2:])
        running._stage, running._trained = "", context.step
        try:
            running.begin(context)
        except Exception as error:
            option = type(self).__module__.rpartition(".")[2]
            why = " ".join(str(error).split())
            raise ConfigError(f"log={option} cannot begin: {type(error).__name__}: {why}; or leave it out") from error
        try:
            yield running
        finally:
            running.end()

    def stage(self, name: str, total: int) -> None:
        """The stage that what follows belongs to."""
        self._stage = name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write what is finite."""
        if self._stage == LEARNING:
            self._trained = step
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.write(finite, self._trained if self._stage == EVALUATION else step)

    def note(self, text: str) -> None:
        """Not written."""

    @abstractmethod
    def begin(self, context: RunContext) -> None:
        """Begin the tracker's run and hand it `context.settings`, the configuration."""

    @abstractmethod
    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of a step of training or, where their names begin with `sft/`, of the warm start."""

    @abstractmethod
    def end(self) -> None:
        """All is written; end the tracker's run."""

    @staticmethod
    def kept_id(path: Path, new: Callable[[], str]) -> str:
        """The id in the file `path`, so that a run which is resumed stays one run of the tracker; else a new one."""
        if not path.exists():
            write_whole(path, new().encode())
        return path.read_text()


class Sinks:
    """Hands everything to each of its sinks, see `Sink`; one that fails and is not required is noted and left out."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    async def open(self, sink: Sink, context: RunContext, stack: AsyncExitStack) -> None:
        """Open a sink; `stack` closes it."""
        opening = AsyncExitStack()
        running = await opening.enter_async_context(sink.open(context))
        self._sinks.append(running)
        stack.push_async_callback(self._close, running, opening)

    async def _close(self, sink: Sink, opening: AsyncExitStack) -> None:
        used = sink in self._sinks
        self._sinks = [one for one in self._sinks if one is not sink]  # notes go to those that are still open
        try:
            await opening.aclose()
        except Exception as error:
            if sink.required:
                raise
            if used:
                (self.note if self._sinks else complain)(self._lost(sink, error))

    def stage(self, name: str, total: int) -> None:
        self._each(lambda sink: sink.stage(name, total))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._each(lambda sink: sink.log(metrics, step))

    def note(self, text: str) -> None:
        self._each(lambda sink: sink.note(text))

    def progress(self, done: int) -> None:
        self._each(lambda sink: sink.progress(done))

    def played(self) -> None:
        self._each(lambda sink: sink.played())

    def tell(self, notes: list[str]) -> None:
        """Note each of `notes`, of which nothing is left."""
        while notes:
            self.note(notes.pop(0))

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:
                if sink.required:
                    raise
                if sink in self._sinks:
                    self._sinks.remove(sink)
                    if not self._sinks:  # nobody is left who could be told
                        raise
                    self.note(self._lost(sink, error))

    @staticmethod
    def _lost(sink: Sink, error: Exception) -> str:
        return f"the sink {type(sink).__name__} failed and gets nothing more: {extension.explained(error)}"


@asynccontextmanager
async def open_sinks(options: Any, context: RunContext) -> AsyncGenerator[Sinks]:
    """The sinks that `options` names, see `chosen`, while they are open. Raises ConfigError."""
    sinks = Sinks()
    async with AsyncExitStack() as stack:
        for sink in chosen(options):
            await sinks.open(sink, context, stack)
        yield sinks


def chosen(options: Any) -> list[Sink]:
    """The sinks of a list of names, or of a mapping from names to settings; a name may be `path/to/file.py:Name`.

    Raises ConfigError for what is no sink, or no setting of one.
    """
    wanted = named(options or [], "log", "wandb: {project: mine}")
    classes = {name: extension.find_class(__name__, name, Sink) for name in wanted}
    return [built(f"sink {name}", classes[name], settings) for name, settings in wanted.items()]
