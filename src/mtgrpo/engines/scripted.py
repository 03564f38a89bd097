"""A fake engine that says what a script tells it to, for tests of everything around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

from mtgrpo.engines import Key
from mtgrpo.types import Attend, Completion, Finish, Sample, Sampling

Script = Callable[[Key, int], list[int]]  # (conversation, number of the turn) -> the output tokens, stop token included


class ScriptedEngine:
    """Answers turn by turn from `script`; every log-probability is -1. What the script raises fails the rollout."""

    def __init__(self, script: Script) -> None:
        self.version = 0
        self.notes = ["engine: scripted"]
        self.sync_s = 0.0
        self.attend: Attend | None = None
        self.asked: list[tuple[Key, list[int]]] = []  # every context it was given, in order
        self._script = script

    @asynccontextmanager
    async def conversation(self, key: Key) -> AsyncGenerator[Sample]:
        """Open a conversation."""
        turns = 0

        async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
            nonlocal turns
            self.asked.append((key, list(tokens)))
            output = self._script(key, turns)
            turns += 1
            await asyncio.sleep(0)
            cut = output[: sampling.max_new_tokens]
            finish = Finish.STOP if cut[-1] in sampling.stop_ids else Finish.LENGTH
            return Completion(cut, [-1.0] * len(cut), [self.version] * len(cut), finish)

        yield sample
