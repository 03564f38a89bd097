"""A Python interpreter in a sandbox."""

from __future__ import annotations

import copy
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Self

from mtgrpo.parts import RunContext
from mtgrpo.runtime.text import printable
from mtgrpo.tools import Tool
from mtgrpo.tools.sandbox import Sandbox
from mtgrpo.types import Task


@dataclass
class PythonTool(Tool):
    """Runs Python code in a sandbox, without network and files; a run is refused where the sandbox does not work.

    Example: `environment.tools={python: {stateful: true, sandbox: {timeout_s: 5}}}`.
    """

    sandbox: Sandbox = field(default_factory=Sandbox)
    stateful: bool = False  # variables last as long as the conversation; false: every call begins afresh

    def __post_init__(self) -> None:
        self.idempotent = not self.stateful
        self.max_at_once = os.cpu_count() or 1  # the time a call waits for its turn is not the code's

    @property
    def replayable(self) -> bool:
        """With variables too: a new interpreter, given the same code, has them again."""
        return True

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With a sandbox that was tried. Raises ConfigError where it does not work."""
        running = copy.copy(self)
        running.sandbox = await self.sandbox.opened()
        yield running

    async def start(self, task: Task) -> None:
        """A conversation has an interpreter of its own."""
        self._session = self.sandbox.session()

    async def stop(self) -> None:
        """End it."""
        await self._session.aclose()

    async def __call__(self, code: str) -> str:
        """Run Python code. Shows what it prints, and the value of its last line.

        Args:
            code: the code
        """
        async with nullcontext(self._session) if self.stateful else aclosing(self.sandbox.session()) as session:
            result = await session.run(code)
        # Whatever the code prints is an answer: what is no text would be asked for again.
        output = printable(result.output).replace("\ufffd", "?")
        if not result.stopped:
            return output
        lost = "; all variables are lost" if self.stateful else ""
        return f"{output}\nerror: the code was stopped: {result.stopped}{lost}".lstrip("\n")
