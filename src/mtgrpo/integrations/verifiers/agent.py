"""Environments written for verifiers: their harness, tools and rewards, our tokens."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Annotated, Any, Self

from mtgrpo.agents import Address, Agent, Outcome
from mtgrpo.errors import ConfigError, refuse_without_effect
from mtgrpo.integrations.verifiers.task import DATA, LOG, LONGEST_LINE, PYTHON, open_program, refuse_if_ended
from mtgrpo.parts import Code, Program, Reach, RunContext
from mtgrpo.types import Task


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

    _socket = ""  # of the program that plays, while it is open

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With the environment loaded and its shared tools running. Raises ConfigError for what verifiers refuses."""
        with tempfile.TemporaryDirectory(prefix="mtgrpo-") as place:
            socket = f"{place}/socket"
            opening = open_program("play", self.python, self.environment, self.settings, context.folder, socket=socket)
            async with super().open(context) as running, opening as program:
                await refuse_if_ended(program, await program.stdout.readline(), self.environment, context.folder)
                running._socket = socket
                yield running

    async def run(self, task: Task, address: Address) -> Outcome:
        """One episode: a connection to the program that plays, which ends the episode when it is closed."""
        if DATA not in task.metadata:
            raise ConfigError(f"task {task.id} is none of verifiers: set recipe=verifiers, or task=verifiers")
        url = f"{address.url}/s/{address.key}/v1"  # one process for all conversations: the key is in the path
        question = {"data": task.metadata[DATA], "url": url, "model": address.model}
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket, limit=LONGEST_LINE)
            with closing(writer):
                writer.write(json.dumps(question).encode() + b"\n")
                answer = json.loads(await reader.readline())
        except (OSError, ValueError):  # there is no program, or no answer
            raise RuntimeError(f"the program of verifiers has ended; {LOG} in the run's folder says why") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return Outcome(**answer)
