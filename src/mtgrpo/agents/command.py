"""Any program: a coding agent's command line, a script in any language."""

import asyncio
import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from mtgrpo.agents import Address, Agent, Outcome, outcome_of, run_process
from mtgrpo.errors import ConfigError
from mtgrpo.parts import File, Folder, Program, RunContext
from mtgrpo.types import Task


@dataclass
class Command(Agent, keep_output=">= 0"):
    """A command, started anew for each conversation in a folder of its own.

    It finds the policy by the variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. In
    `argv`, `files` and `environment`, {prompt} stands for the task's messages of the user, and so do {task}, {url},
    {openai_url}, {key}, {model} and {rewards_key} for its id and the parts of the address.
    """

    argv: list[Program] = field(default_factory=list[str])  # [mini,-t,"{prompt}"]
    directory: Folder = ""  # its content is copied into the folder of each conversation
    files: dict[str, File] = field(default_factory=dict[str, str])  # written there: path -> text
    # variables; of ours only PATH and the locale
    environment: dict[str, Program] = field(default_factory=dict[str, str])
    reward_file: File = ""  # that it leaves there: a number, a JSON text, or {reply id: reward}
    keep_output: int = 2000  # the last characters of what it prints are kept as `output`; 0 = none

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.argv:
            raise ConfigError(
                "`argv` is empty: give the command and its arguments, such as 'agent.argv=[mini,-t,\"{prompt}\"]'"
            )
        if self.directory and not Path(self.directory).expanduser().is_dir():
            raise ConfigError(f"`directory={self.directory}`: there is no such folder")

    def check_machine(self) -> None:
        program, path = Path(self.argv[0]), self.environment.get("PATH", os.environ.get("PATH"))
        relative = "/" in self.argv[0] and not program.is_absolute()  # it is in the folder of each conversation
        there = self.directory or self.files if relative else shutil.which(program, path=path)
        if "{" not in self.argv[0] and not there:
            raise ConfigError(f"agent.argv: there is no program {self.argv[0]}; install it, or give its whole path")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With its endpoint running. Raises ConfigError where the program is not there."""
        self.check_machine()
        async with super().open(context) as running:
            yield running

    async def run(self, task: Task, address: Address) -> Outcome:
        prompt = "\n\n".join(message.content for message in task.messages if message.role == "user")
        values = {"prompt": prompt, "task": task.id, "openai_url": address.openai_url, **dataclasses.asdict(address)}

        def fill(text: str) -> str:  # what stands for itself may hold braces too
            return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)

        with tempfile.TemporaryDirectory(prefix="mtgrpo-", ignore_cleanup_errors=True) as place:
            folder = Path(place)
            if self.directory:
                source = Path(self.directory).expanduser()
                await asyncio.to_thread(shutil.copytree, source, folder, dirs_exist_ok=True)
            for name, text in self.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(fill(text))
            argv = [fill(word) for word in self.argv]
            if any(len(word.encode(errors="replace")) >= 2**17 for word in argv):
                raise ValueError("a word of agent.argv has 131072 bytes or more: give {prompt} in agent.files")
            environment = {name: fill(value) for name, value in self.environment.items()}
            output = await run_process(argv, folder, address, environment, self.keep_output)
            outcome = outcome_of(json.loads((folder / self.reward_file).read_text()) if self.reward_file else None)
            outcome.data = {"output": output}
            return outcome
