"""Where metrics go. One file = one sink.

Names of metrics are flat, with "/" between area and quantity. What is measured of the machine begins with `perf/` or
`time/`; every other metric is a function of configuration and seed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from mtgrpo import extension
from mtgrpo.part import Part, RunContext


class Sink(Part, ABC):
    """Takes a run's metrics and notes. It is opened before everything else and closed after it."""

    @abstractmethod
    def stage(self, name: str, total: int) -> None:
        """A stage of the run begins, e.g. "warm start"; `total` is its number of steps, 0 = not known."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step; `step` counts the steps of this stage that are done, 0 = before the first."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Something to tell the person. The text is data: nothing in it is markup."""


class Sinks:
    """Hands everything to each of its sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def stage(self, name: str, total: int) -> None:
        """See `Sink.stage`."""
        for sink in self._sinks:
            sink.stage(name, total)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Sink.log`."""
        for sink in self._sinks:
            sink.log(metrics, step)

    def note(self, text: str) -> None:
        """See `Sink.note`."""
        for sink in self._sinks:
            sink.note(text)

    def tell(self, notes: list[str]) -> None:
        """Note each of `notes`, of which nothing is left."""
        while notes:
            self.note(notes.pop(0))


@asynccontextmanager
async def open_sinks(names: Sequence[str], context: RunContext) -> AsyncGenerator[Sinks]:
    """The sinks called `names` (each once), while they are open; a name may also be `path/to/file.py:Name`.

    Raises ConfigError for a name that is not a sink.
    """
    kinds = [sink_class(name) for name in dict.fromkeys(names)]
    async with AsyncExitStack() as stack:
        yield Sinks([await stack.enter_async_context(kind().open(context)) for kind in kinds])


def sink_class(name: str) -> type[Sink]:
    """The sink called `name`. Raises ConfigError for a name that is none."""
    return extension.find_class(__name__, name, Sink)
