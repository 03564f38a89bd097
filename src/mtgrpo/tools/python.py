"""A Python interpreter in a sandbox."""

import os
from contextlib import aclosing, nullcontext
from dataclasses import dataclass

from mtgrpo.runtime.text import printable
from mtgrpo.tools import Tool
from mtgrpo.tools.sandbox import Sandboxed
from mtgrpo.types import Task


@dataclass
class PythonTool(Tool, Sandboxed):
    """Runs Python code in a sandbox, without network and files; a run is refused where the sandbox does not work.

    Example: `environment.tools={python: {stateful: true, sandbox: {timeout_s: 5}}}`.
    """

    stateful: bool = False  # variables last as long as the conversation; false: every call begins afresh

    def __post_init__(self) -> None:
        self.idempotent = not self.stateful
        self.max_at_once = os.cpu_count() or 1  # the time a call waits for its turn is not the code's

    @property
    def replayable(self) -> bool:
        """With variables too: a new interpreter, given the same code, has them again."""
        return True

    async def start(self, task: Task) -> None:
        self._session = self.sandbox.session()

    async def stop(self) -> None:
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
