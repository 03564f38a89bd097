"""Tasks of environments written for verifiers, read in an interpreter that has it."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from mtgrpo.errors import ConfigError, refuse_without_effect
from mtgrpo.part import RunContext
from mtgrpo.tasks import Split, TaskSource, TaskStream
from mtgrpo.tasks.jsonl import Jsonl

PYTHON = ".venv-verifiers/bin/python"  # where make verifiers-env puts it
LOG = "verifiers.log"  # in the run's folder: what the program and the environment write
DATA = "verifiers"  # in a task's metadata: its data, as verifiers has it
ENDS_S = 10.0  # for the program to close what it has opened
LONGEST_LINE = 2**28  # bytes


@asynccontextmanager
async def open_program(
    what: str, python: str, environment: str, settings: Any, folder: Path, select: Any = None
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """`verifiers_program.py` in the interpreter `python`; it ends when its input does, or is killed.

    folder: of the run, where its log lies. Raises ConfigError for an interpreter that is not there.
    """
    if not environment:
        raise ConfigError("agent.environment is not set: give the name of a taskset, as in `vf-eval NAME`")
    program = Path(python).expanduser().absolute()  # not resolved: it may be a link out of its environment
    if not os.access(program, os.X_OK):
        raise ConfigError(
            f"agent.python={python}: there is no such interpreter; give that of an environment that has verifiers "
            ">=0.4,<0.5 and uv (`make verifiers-env` makes .venv-verifiers)"
        )
    given = {"environment": environment, "settings": settings or {}, "select": select or {}}
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # a module beside the run is an environment too, also for the processes of its tools
    variables |= {"PYTHONPATH": str(Path.cwd()), "PATH": f"{program.parent}{os.pathsep}{variables.get('PATH', '')}"}
    arguments = [str(program), "-P", str(Path(__file__).with_name("verifiers_program.py")), what, json.dumps(given)]
    pipe = asyncio.subprocess.PIPE
    with (folder / LOG).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=pipe, stdout=pipe, stderr=log, env=variables, limit=LONGEST_LINE, start_new_session=True
        )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_S if what == "play" else 0):
                await process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def refuse_if_ended(process: asyncio.subprocess.Process, line: bytes, environment: str, folder: Path) -> None:
    """Raise ConfigError with what the program said last, where it ended by a mistake before it gave a `line`."""
    if not line and await process.wait():
        said = (folder / LOG).read_text(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"agent.environment={environment}: {said} ({folder / LOG})")


@dataclass
class Verifiers(TaskSource):
    """The tasks of an environment written for verifiers (>=0.4,<0.5), for agent=verifiers.

    recipe=verifiers takes `environment`, `python` and `settings` from the agent.
    """

    environment: str = ""  # the name of its taskset, as in `vf-eval NAME`
    python: str = PYTHON  # of the environment that has verifiers
    settings: Any = None  # fields of its EnvConfig, such as {taskset: {split: train}}
    select: Any = None  # which of its tasks: fields of their SelectConfig, such as {limit: 1000}
    eval_fraction: float = 0.1  # the share of tasks, by a hash of the id, that is never trained on

    _rows = cast("Jsonl | None", None)  # while it is open

    def __post_init__(self) -> None:
        said = ("system_prompt", "prompt_template", "examples")
        refuse_without_effect(self, said, "the harness of the environment writes the prompt")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With the tasks in a file, which is gone afterwards. Raises ConfigError for what verifiers refuses."""
        program = open_program("list", self.python, self.environment, self.settings, context.folder, self.select)
        with tempfile.TemporaryDirectory(prefix="mtgrpo-") as place:
            file = Path(place) / f"{self.environment.rpartition('/')[2] or 'tasks'}.jsonl"
            async with program as process:
                assert process.stdout is not None
                with file.open("wb") as rows:
                    async for line in process.stdout:
                        rows.write(line)
                await refuse_if_ended(process, b"", self.environment, context.folder)
            running = copy.copy(self)
            running._rows = Jsonl(path=str(file), eval_fraction=self.eval_fraction)
            yield running

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`."""
        if self._rows is None:
            raise RuntimeError("the tasks of verifiers are not open: use `async with source.open(context)`")
        return self._rows.stream(split, seed, repeat)
