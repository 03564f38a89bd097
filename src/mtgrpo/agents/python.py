"""A Python function that runs an agent."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

from mtgrpo import extension
from mtgrpo.agents import Address, Agent, Outcome, outcome_of, run_process
from mtgrpo.errors import ConfigError
from mtgrpo.tools import in_thread
from mtgrpo.types import Message, Task, ToolCall


class Isolation(Enum):
    """Where the function runs."""

    thread = "thread"  # a thread of this process: quick to start; cannot be stopped where it hangs
    process = "process"  # a process of its own, killed with the conversation, with the address in its variables


@dataclass
class Python(Agent):
    """`function(task, address)`, sync or async.

    It returns None, a reward, the text of its answer, {reply id: reward}, or an Outcome.
    """

    function: str = ""  # my_agent.py:solve
    isolation: Isolation = Isolation.thread  # a thread, or a process that can be killed
    environment: dict[str, str] = field(default_factory=dict[str, str])  # variables of the process, beside the address

    def __post_init__(self) -> None:
        super().__post_init__()
        if ".py:" not in self.function:
            raise ConfigError(f"`function={self.function}` names no function: give agent.function=path/to/file.py:name")
        if self.environment and self.isolation is Isolation.thread:
            raise ConfigError("`environment` has no effect in a thread: set agent.isolation=process, or leave it out")
        if not callable(extension.find("mtgrpo.agents", self.function, Agent)):
            raise ConfigError(f"`function={self.function}` is no function")

    async def run(self, task: Task, address: Address) -> Outcome:
        if self.isolation is Isolation.process:
            return await self._in_process(task, address)
        function = extension.find("mtgrpo.agents", self.function, Agent)
        started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
        awaited = in_thread(lambda: outcome_of(_called(function, task, address, started)))
        try:
            return await awaited
        finally:
            for loop, work in started if not awaited.done() or awaited.cancelled() else ():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(work.cancel)

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
    outcome = outcome_of(_called(function, Task(**task), Address(**address), []))
    Path("outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))


def _called(
    function: Callable[[Task, Address], Any],
    task: Task,
    address: Address,
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]],
) -> Any:
    """What the function gives; one that is async gets an event loop, and stands in `started` to be cancelled."""
    given = function(task, address)
    if not inspect.iscoroutine(given):
        return given

    async def awaited() -> Any:
        work = asyncio.current_task()
        assert work is not None
        started.append((asyncio.get_running_loop(), work))
        return await cast("Coroutine[Any, Any, Any]", given)

    return asyncio.run(awaited())
