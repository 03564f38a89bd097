"""A Python function that runs an agent."""

import asyncio
import dataclasses
import inspect
import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self

from mtgrpo.agents import Address, Agent, Outcome, outcome_of, run_process
from mtgrpo.errors import ConfigError, harmless
from mtgrpo.messages import message_from_fields
from mtgrpo.parts import Code, Program, RunContext, extension
from mtgrpo.runtime.files import strict_json
from mtgrpo.runtime.isolation import run_in_thread
from mtgrpo.runtime.workers import LoopThread
from mtgrpo.types import Task

BLOCKED_S = 30.0  # an event loop that does not answer for so long begins no more conversations; imports take a while


class Isolation(Enum):
    """Where the function runs."""

    thread = "thread"  # a thread of this process: quick to start; cannot be stopped where it hangs
    process = "process"  # a process of its own, killed with the conversation, with the address in its variables


@dataclass
class Python(Agent):
    """`function(task, address)`, sync or async. All that are async share one event loop, as they do in an application.

    It returns None, a reward, the text of its answer, {reply id: reward}, or an Outcome.
    """

    function: Code = ""  # my_agent.py:solve
    isolation: Isolation = Isolation.thread  # a thread, or a process that can be killed
    # variables of the process, beside the address
    environment: dict[str, Program] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self._loops: list[LoopThread] = []  # while it is open; HTTP clients that libraries keep belong to one loop
        super().__post_init__()
        if ".py:" not in self.function:
            raise ConfigError(f"`function={self.function}` names no function: give agent.function=path/to/file.py:name")
        if self.environment and self.isolation is Isolation.thread:
            raise ConfigError("`environment` has no effect in a thread: set agent.isolation=process, or leave it out")
        function = extension.find("mtgrpo.agents", self.function, Agent)
        try:
            inspect.signature(function, follow_wrapped=False).bind(Task, Address)
        except TypeError as error:
            raise ConfigError(f"`function={self.function}` is no function of (task, address): {error}") from error
        except ValueError:
            pass  # what is compiled says nothing

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With its endpoint running, and an event loop for functions that are async."""
        async with super().open(context) as running:
            running._loops = [LoopThread("agents")]
            try:
                yield running
            finally:
                for loop in running._loops:
                    await loop.close(BLOCKED_S)

    async def run(self, task: Task, address: Address) -> Outcome:
        if self.isolation is Isolation.process:
            return await self._in_process(task, address)
        function = extension.find("mtgrpo.agents", self.function, Agent)
        value = await run_in_thread(lambda: function(task, address))
        return outcome_of(await self._await(value) if inspect.iscoroutine(value) else value, function)

    async def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine gives in the event loop of all, or in a new one where something blocks that."""

        async def guarded() -> Any:
            try:
                return await work
            except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop
                raise harmless(error) from None

        loop = self._loops[-1]
        while not await loop.answers(BLOCKED_S):
            if loop is self._loops[-1]:
                self._loops.append(LoopThread("agents"))
            loop = self._loops[-1]
        return await loop.submit(guarded())

    async def _in_process(self, task: Task, address: Address) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="mtgrpo-", ignore_cleanup_errors=True) as place:
            folder = Path(place)
            name = str(Path(self.function).expanduser().resolve())
            (folder / ".asked").write_bytes(strict_json((name, dataclasses.asdict(task), dataclasses.asdict(address))))
            code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
            argv = [sys.executable, "-P", "-c", code]
            await run_process(argv, folder, address, self.environment, keep=500)
            return Outcome(**json.loads((folder / "outcome.json").read_text()))


def main() -> None:
    """In the process: the function that is asked for leaves outcome.json."""
    name, task, address = json.loads(Path(".asked").read_text())
    Path(".asked").unlink()  # it holds the key of rewards
    task["messages"] = tuple(map(message_from_fields, task["messages"]))
    function = extension.find("mtgrpo.agents", name, Agent)
    given = function(Task(**task), Address(**address))
    outcome = outcome_of(asyncio.run(given) if inspect.iscoroutine(given) else given, function)
    Path("outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
