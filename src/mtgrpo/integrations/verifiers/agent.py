"""Environments written for verifiers, in an interpreter that has it: their tasks, harness and rewards, our tokens."""

import asyncio
import copy
import json
import os
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, cast

from mtgrpo.agents import Address, Agent, Outcome
from mtgrpo.errors import ConfigError, refuse_without_effect
from mtgrpo.parts import Code, Program, Reach, RunContext
from mtgrpo.runtime import processes
from mtgrpo.runtime.files import find_near
from mtgrpo.tasks import Split, TaskSource, TaskStream
from mtgrpo.tasks.jsonl import Jsonl
from mtgrpo.types import Task

PYTHON = ".venv-verifiers/bin/python"  # where make verifiers-env puts it
LOG = "verifiers.log"  # in the run's folder: what the program and the environment write
DATA = "verifiers"  # in a task's metadata: its data, as verifiers has it
ENDS_S = 10.0  # for the program to close what it has opened
LONGEST_LINE = 2**28  # bytes


@dataclass
class _Program:
    """`program.py` in an interpreter that has verifiers, with the settings of whoever starts it."""

    environment: Code = ""  # the name of its taskset, as in `vf-eval NAME`: a package, or a module in this folder
    python: Program = PYTHON  # of the environment that has verifiers; make verifiers-env makes this one
    # fields of its EnvConfig, such as {taskset: {split: train}, agent: {max_turns: 8}}
    settings: Annotated[Any, Reach.code] = None

    def check_machine(self) -> None:
        if not self.environment:
            raise ConfigError("agent.environment is not set: give the name of a taskset, as in `vf-eval NAME`")
        if not os.access(self._interpreter, os.X_OK):
            raise ConfigError(
                f"agent.python={self.python}: there is no such interpreter; give that of an environment that has "
                "verifiers >=0.4,<0.5 and uv (`make verifiers-env` makes .venv-verifiers)"
            )

    @property
    def _interpreter(self) -> Path:
        return find_near(self.python).absolute()  # not resolved: it may be a link out of its environment

    @asynccontextmanager
    async def running(self, folder: Path, **more: Any) -> AsyncGenerator[None]:
        """While it is ready; it ends when its input does, or is killed.

        folder: of the run, where its log lies. more: of the program's settings. Raises ConfigError for an interpreter
        that is not there, and with the program's last words where it ends by a mistake.
        """
        self.check_machine()
        python = self._interpreter
        settings = {"environment": self.environment, "settings": self.settings or {}, **more}
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        # a module beside the run is an environment too, also for the processes of its tools
        variables |= {"PYTHONPATH": str(Path.cwd()), "PATH": f"{python.parent}{os.pathsep}{variables.get('PATH', '')}"}
        words = [str(python), "-P", str(Path(__file__).with_name("program.py")), json.dumps(settings)]
        with (folder / LOG).open("ab") as log:
            program = await processes.start(words, variables, stdin=PIPE, stdout=PIPE, stderr=log)
        try:
            if not await program.stdout.readline():
                last_words = (folder / LOG).read_text(errors="replace").strip().rpartition("\n")[2]
                raise ConfigError(f"agent.environment={self.environment}: {last_words} ({folder / LOG})")
            yield
        finally:
            program.stdin.close()
            with suppress(TimeoutError):
                await program.wait(ENDS_S)
            await program.end()


@dataclass
class VerifiersTasks(_Program, TaskSource):
    """The tasks of an environment written for verifiers (>=0.4,<0.5), for agent=verifiers.

    recipe=verifiers takes `environment`, `python` and `settings` from the agent.
    """

    select: Annotated[Any, Reach.code] = None  # which of its tasks: fields of their SelectConfig, such as {limit: 1000}
    eval_fraction: float = 0.1  # the share of tasks, by a hash of the id, that is never trained on

    _rows = cast("Jsonl | None", None)  # while it is open

    def __post_init__(self) -> None:
        names = ("system_prompt", "prompt_template", "examples")
        refuse_without_effect(self, names, "the harness of the environment writes the prompt")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With the tasks in a file, which is gone afterwards. Raises ConfigError for what verifiers refuses."""
        with tempfile.TemporaryDirectory(prefix="mtgrpo-") as place:
            file = f"{place}/{self.environment.rpartition('/')[2] or 'tasks'}.jsonl"
            async with self.running(context.folder, file=file, select=self.select or {}):
                running = copy.copy(self)
                running._rows = Jsonl(path=file, eval_fraction=self.eval_fraction)
            yield running

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        if self._rows is None:
            raise RuntimeError("the tasks of verifiers are not open: use `async with source.open(context)`")
        return self._rows.stream(split, seed, repeat)


@dataclass
class Verifiers(_Program, Agent):
    """An environment written for verifiers (>=0.4,<0.5), as it is, in an interpreter of its own.

    Its harness leads the conversation, its tools answer, its rewards score it. recipe=verifiers brings its tasks too.
    Where neither it nor `settings` names a harness and a runtime, a chat loop on this machine plays it; a harness that
    runs code of the model belongs into a container: `settings={agent: {harness: {id: bash}, runtime: {type: docker}}}`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_effect(self, ("posts_rewards",), "rewards are those of the environment")

    _socket = ""  # of the program that plays, while it is open

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With the environment loaded and its shared tools running. Raises ConfigError for what verifiers refuses."""
        with tempfile.TemporaryDirectory(prefix="mtgrpo-") as place:
            socket = f"{place}/socket"
            async with super().open(context) as running, self.running(context.folder, socket=socket):
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
