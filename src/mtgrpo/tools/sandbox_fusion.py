"""A sandbox elsewhere: a server of SandboxFusion, by its published interface (`POST /run_code`, July 2026)."""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from dataclasses import dataclass, field

import httpx

from mtgrpo.text import head_and_tail
from mtgrpo.tools import sandbox_init

REACHED_S = 30.0  # beyond the code's own time, for a request to be taken and answered
_PROGRAM = """import ast, contextlib, io, json, os, sys, traceback
from typing import Any
NAME = {name!r}
{execute}
sys.stderr = sys.stdout
with contextlib.suppress(OSError):
    os.unlink(sys.argv[0])  # it holds the password
names = {{"__name__": "__main__"}}
*before, code = json.loads({pieces!r})
with open(os.devnull, "w") as nowhere:
    for piece in before:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            execute(piece, names)
error = execute(code, names)
print("\\n{password}" + error, file=sys.__stdout__, flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Result:
    """What a piece of code led to."""

    output: str  # what it printed, tracebacks included; the middle is left out where it is long
    error: str = ""  # the name of the exception that ended it
    stopped: str = ""  # why it was stopped, or its process died; its variables are then lost

    @property
    def passed(self) -> bool:
        """Whether it came to its end."""
        return not self.error and not self.stopped


@dataclass
class FusionSession:
    """An interpreter whose variables stay, though the server forgets: what was run before is run again, unseen."""

    url: str
    timeout_s: float
    memory_mb: int
    output_chars: int
    _pieces: list[str] = field(default_factory=list[str])
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, code: str) -> Result:
        """Run `code`. Raises RuntimeError where the server does not answer, or fails itself."""
        async with self._lock:
            result = await self._answer([*self._pieces, code])
            self._pieces = [] if result.stopped else [*self._pieces, code]
            return result

    async def close(self) -> None:
        """Nothing: the server keeps nothing."""
        self._pieces = []

    async def _answer(self, pieces: list[str]) -> Result:
        password = secrets.token_hex(8)  # so that what code prints is no verdict
        execute = inspect.getsource(sandbox_init.execute)
        program = _PROGRAM.format(name=sandbox_init.NAME, execute=execute, pieces=json.dumps(pieces), password=password)
        asked = {
            "code": program,
            "language": "python",
            "run_timeout": self.timeout_s * len(pieces),
            "memory_limit_MB": self.memory_mb,
        }
        try:
            async with httpx.AsyncClient(base_url=self.url, timeout=self.timeout_s + REACHED_S) as client:
                answer = await client.post("/run_code", json=asked)
            answer.raise_for_status()
            found = answer.json()
            if found["status"] == "SandboxError":
                raise RuntimeError(f"the sandbox at {self.url} failed: {found['message'][-500:]}")
            ran = found["run_result"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"the sandbox at {self.url} does not answer: {type(error).__name__} {error}") from error
        printed, told, error = (ran["stdout"] or "").rpartition(f"\n{password}")
        output = head_and_tail((printed if told else ran["stdout"] or "") + (ran["stderr"] or ""), self.output_chars)
        if ran["status"] == "TimeLimitExceeded":
            return Result(output, stopped=f"it took longer than {self.timeout_s:g} s")
        if not told:
            return Result(output, stopped=f"its process ended with code {ran['return_code']}")
        return Result(output, error=error.strip())
