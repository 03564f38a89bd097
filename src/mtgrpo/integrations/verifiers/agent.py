"""Environments written for verifiers: their harness, tools and rewards, our tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Self, cast

from mtgrpo.agents import Address, Agent, Outcome
from mtgrpo.errors import ConfigError, refuse_without_effect
from mtgrpo.integrations.verifiers.task import DATA, LOG, PYTHON, open_program, refuse_if_ended
from mtgrpo.parts import Code, Program, Reach, RunContext
from mtgrpo.runtime import processes
from mtgrpo.types import Task

ENDED = f"the program of verifiers has ended; {LOG} in the run's folder says why"


class _Program:
    """The program of verifiers: several conversations at once, each a question and an answer."""

    def __init__(self, program: processes.ProcessTree) -> None:
        self._program = program
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ended = False

    async def listen(self) -> None:
        """Hand out the answers until the program ends, which fails those that wait."""
        async for line in self._program.stdout:
            found = json.loads(line)
            self._answer(found.pop("number"), found)
        self._ended = True
        for number in self._waiting:
            self._answer(number, {"error": ENDED})

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Where this is cancelled, so is what it does."""
        if self._ended:
            return {"error": ENDED}
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._say({"number": number, **question})
        try:
            return await answer
        finally:
            del self._waiting[number]
            if answer.cancelled():
                self._say({"number": number})

    def _answer(self, number: int, found: dict[str, Any]) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result(found)

    def _say(self, line: dict[str, Any]) -> None:
        self._program.stdin.write(json.dumps(line).encode() + b"\n")


@dataclass
class Verifiers(Agent):
    """An environment written for verifiers (>=0.4,<0.5), as it is, in an interpreter of its own.

    Its harness leads the conversation, its tools answer, its rewards score it. recipe=verifiers brings its tasks too.
    Where neither it nor `settings` names a harness and a runtime, a chat loop on this machine plays it; a harness that
    runs code of the model belongs into a container: `settings={agent: {harness: {id: bash}, runtime: {type: docker}}}`.
    """

    environment: Code = ""  # the name of its taskset, as in `vf-eval NAME`: a package, or a module in this folder
    python: Program = PYTHON  # of the environment that has verifiers; make verifiers-env makes this one
    # fields of its EnvConfig, such as {taskset: {split: train}, agent: {max_turns: 8}}
    settings: Annotated[Any, Reach.code] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_effect(self, ("posts_rewards",), "rewards are those of the environment")

    _program = cast("_Program | None", None)  # while it is open

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With the environment loaded and its shared tools running. Raises ConfigError for what verifiers refuses."""
        opening = open_program("play", self.python, self.environment, self.settings, context.folder)
        async with super().open(context) as running, opening as program:
            await refuse_if_ended(program, await program.stdout.readline(), self.environment, context.folder)
            running._program = _Program(program)
            listening = asyncio.create_task(running._program.listen())
            try:
                yield running
            finally:
                listening.cancel()
                await asyncio.wait({listening})

    async def run(self, task: Task, address: Address) -> Outcome:
        if DATA not in task.metadata:
            raise ConfigError(f"task {task.id} is none of verifiers: set recipe=verifiers, or task=verifiers")
        assert self._program is not None  # or the endpoint of `address` would not be open
        url = f"{address.url}/s/{address.key}/v1"  # one process for all conversations: the key is in the path
        found = await self._program.ask({"data": task.metadata[DATA], "url": url, "model": address.model})
        if "error" in found:
            raise RuntimeError(found["error"])
        return Outcome(**found)
