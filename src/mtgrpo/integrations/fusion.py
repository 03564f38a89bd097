"""A sandbox elsewhere: a server of SandboxFusion, by its published interface (`POST /run_code`, July 2026)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from mtgrpo.runtime.http import HttpClient, HttpError
from mtgrpo.runtime.text import head_and_tail
from mtgrpo.tools.sandbox import InterpreterElsewhere, Result, arguments

REACHED_S = 30.0  # beyond the code's own time, for a request to be taken and answered
_GRACE_S = 1.0  # beyond it, for its processes to begin and end
# It holds requests, tests among them: nobody may read its file or its memory once code runs.
_PROGRAM = """import contextlib, ctypes, json, os, subprocess, sys
with contextlib.suppress(OSError):
    os.unlink(sys.argv[0])
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
pipe = subprocess.PIPE
inner = subprocess.Popen([sys.executable, *json.loads({arguments!r})], stdin=pipe, stdout=pipe)
answer = inner.stdout.readline()
for request in json.loads({requests!r}):
    inner.stdin.write(json.dumps(request).encode() + b"\\n")
    inner.stdin.flush()
    answer = inner.stdout.readline() or answer
print(answer.decode())
"""


@dataclass
class Fusion(InterpreterElsewhere):
    """An interpreter whose variables stay, though the server forgets: what was run before is run again, unseen."""

    _requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, code: str, **tests: str | bool) -> Result:
        """Run `code`, and perhaps tests on it. Raises RuntimeError where the server does not answer, or fails."""
        async with self._lock:
            requests = [*self._requests, {"code": code, **tests}]
            result = await self._answer(requests)
            self._requests = [] if result.stopped else requests
            return result

    async def aclose(self) -> None:
        """Nothing: the server keeps nothing."""
        self._requests = []

    async def _answer(self, requests: list[dict[str, Any]]) -> Result:
        limits = {
            "timeout_s": self.timeout_s,
            "memory_bytes": self.memory_mb << 20,
            "output_bytes": self.output_chars,
            "file_bytes": None,
            "processes": None,
        }
        words = json.dumps(arguments(limits))
        asked = {
            "code": _PROGRAM.format(arguments=words, requests=json.dumps(requests)),
            "language": "python",
            "run_timeout": self.timeout_s * len(requests) + _GRACE_S,
            "memory_limit_MB": self.memory_mb,
        }
        found: Any = None
        try:
            async with HttpClient(self.url) as client:
                found = await client.request("POST", "/run_code", asked, timeout_s=self.timeout_s + REACHED_S)
            if found["status"] == "SandboxError":
                raise RuntimeError(f"the sandbox at {self.url} failed: {found['message'][-500:]}")
            ran = found["run_result"]
        except HttpError as error:
            raise RuntimeError(f"the sandbox: {error}") from error
        except (KeyError, TypeError) as error:
            raise RuntimeError(f"the sandbox at {self.url} answers with something else: {found!r:.200}") from error
        if ran["status"] == "TimeLimitExceeded":
            return Result("", stopped=f"it took longer than {self.timeout_s:g} s")
        said = (ran["stdout"] or "").strip()
        if not said.startswith("{"):
            why = head_and_tail(ran["stderr"] or "", self.output_chars)
            return Result(why, stopped=f"its process ended with code {ran['return_code']}")
        return Result(**json.loads(said))
