"""A fake engine that says what a script tells it to, for tests of everything around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from mtgrpo.engines import Key
from mtgrpo.errors import EngineError
from mtgrpo.types import Completion, Finish, Sample, Sampling

if TYPE_CHECKING:
    from mtgrpo.weights.source import WeightSource

Script = Callable[[Key, int], list[int]]  # (conversation, number of the turn) -> the output tokens, stop token included


class ScriptedEngine:
    """Answers turn by turn from `script`; every log-probability is -1. What the script raises fails the rollout."""

    shares_weights = False  # it has none

    def __init__(self, script: Script) -> None:
        self.version = 0
        self.notes = ["engine: scripted"]
        self.metrics: dict[str, float] = {}
        self.pushes: list[object] = []  # none
        self.asked: list[tuple[Key, list[int]]] = []  # every context it got, in order
        self.calls: list[str] = []  # "sleep", "load_weights 3", ...: the calls it got, in order
        self._script = script
        self._going = asyncio.Event()
        self._going.set()
        self._closed = False

    def take_seconds(self) -> tuple[float, float]:
        """None: it neither takes over weights nor waits."""
        return 0.0, 0.0

    @property
    def requests(self) -> list[str]:
        """None: it answers at once."""
        return []

    @asynccontextmanager
    async def conversation(self, key: Key) -> AsyncGenerator[Sample]:
        """Open a conversation."""
        turns = 0

        async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
            nonlocal turns
            await self._going.wait()
            if self._closed:
                raise EngineError("the engine is closed")
            self.asked.append((key, list(tokens)))
            output = self._script(key, turns)
            turns += 1
            await asyncio.sleep(0)
            cut = output[: sampling.max_new_tokens]
            finish = Finish.STOP if cut[-1] in sampling.stop_ids else Finish.LENGTH
            return Completion(cut, [-1.0] * len(cut), [self.version] * len(cut), finish)

        yield sample

    async def load_weights(self, source: WeightSource) -> None:
        """Take note of the version."""
        self.version = source.version
        self.calls.append(f"load_weights {self.version}")

    async def sleep(self) -> None:
        """Answer nothing until `wake`."""
        self.calls.append("sleep")
        self._going.clear()

    async def wake(self) -> None:
        """Answer what waits."""
        self.calls.append("wake")
        self._going.set()

    async def close(self) -> None:
        """Answer no more."""
        self.calls.append("close")
        self._closed = True
        self._going.set()
