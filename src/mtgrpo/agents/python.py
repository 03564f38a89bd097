"""A Python function that runs an agent."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self

from mtgrpo import extension
from mtgrpo.agents import Address, Agent, Outcome, outcome_of, run_process
from mtgrpo.errors import ConfigError, harmless
from mtgrpo.part import RunContext
from mtgrpo.tools import in_thread
from mtgrpo.types import Message, Task, ToolCall

BLOCKED_S = 5.0  # an event loop that does not answer for so long begins no more conversations


class AgentLoop:
    """An event loop in a thread of its own, for all conversations: HTTP clients that libraries keep belong to one."""

    def __init__(self) -> None:
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._ended.wait())

    async def answers(self) -> bool:
        """Whether it does anything within `BLOCKED_S`."""
        sign = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(sign), BLOCKED_S)
        return sign.done() and not sign.cancelled()

    async def submit(self, given: Coroutine[Any, Any, Any]) -> Any:
        """What `given` returns or raises; it is cancelled with this."""

        async def guarded() -> Any:
            try:
                return await given
            except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop
                raise harmless(error) from None

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(guarded(), self._loop))

    def close(self) -> None:
        """Cancel what runs in it, and end its thread unless something blocks it."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(BLOCKED_S)


class Isolation(Enum):
    """Where the function runs."""

    thread = "thread"  # a thread of this process: quick to start; cannot be stopped where it hangs
    process = "process"  # a process of its own, killed with the conversation, with the address in its variables


@dataclass
class Python(Agent):
    """`function(task, address)`, sync or async. All that are async share one event loop, as they do in an application.

    It returns None, a reward, the text of its answer, {reply id: reward}, or an Outcome.
    """

    function: str = ""  # my_agent.py:solve
    isolation: Isolation = Isolation.thread  # a thread, or a process that can be killed
    environment: dict[str, str] = field(default_factory=dict[str, str])  # variables of the process, beside the address

    def __post_init__(self) -> None:
        self._loops: list[AgentLoop] = []  # while it is open
        super().__post_init__()
        if ".py:" not in self.function:
            raise ConfigError(f"`function={self.function}` names no function: give agent.function=path/to/file.py:name")
        if self.environment and self.isolation is Isolation.thread:
            raise ConfigError("`environment` has no effect in a thread: set agent.isolation=process, or leave it out")
        if not callable(extension.find("mtgrpo.agents", self.function, Agent)):
            raise ConfigError(f"`function={self.function}` is no function")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With its endpoint running, and an event loop for functions that are async."""
        async with super().open(context) as running:
            running._loops = [AgentLoop()]
            try:
                yield running
            finally:
                for loop in running._loops:
                    await asyncio.to_thread(loop.close)

    async def run(self, task: Task, address: Address) -> Outcome:
        if self.isolation is Isolation.process:
            return await self._in_process(task, address)
        function = extension.find("mtgrpo.agents", self.function, Agent)
        given = await in_thread(lambda: function(task, address))
        if inspect.iscoroutine(given):
            given = await self._awaited(given)
        return outcome_of(given)

    async def _awaited(self, given: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine gives in the event loop of all, or in a new one where something blocks that."""
        loop = self._loops[-1]
        while not await loop.answers():
            if loop is self._loops[-1]:
                self._loops.append(AgentLoop())
            loop = self._loops[-1]
        return await loop.submit(given)

    async def _in_process(self, task: Task, address: Address) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="mtgrpo-", ignore_cleanup_errors=True) as place:
            folder = Path(place)
            asked = (
                str(Path(self.function).expanduser().resolve()),
                dataclasses.asdict(task),
                dataclasses.asdict(address),
            )
            (folder / ".asked").write_text(json.dumps(asked))
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
            argv = [sys.executable, "-P", "-c", code]
            await run_process(argv, folder, address, self.environment, keep=500)
            return Outcome(**json.loads((folder / "outcome.json").read_text()))


def main() -> None:
    """In the process: the function that is asked for leaves outcome.json."""
    name, task, address = json.loads(Path(".asked").read_text())
    task["messages"] = tuple(
        Message(**message | {"tool_calls": tuple(ToolCall(**call) for call in message["tool_calls"])})
        for message in task["messages"]
    )
    function = extension.find("mtgrpo.agents", name, Agent)
    given = function(Task(**task), Address(**address))
    outcome = outcome_of(asyncio.run(given) if inspect.iscoroutine(given) else given)
    Path("outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
