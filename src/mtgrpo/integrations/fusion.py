"""A sandbox elsewhere: a server of SandboxFusion, by its published interface (`POST /run_code`, July 2026)."""

import asyncio
import json
from typing import Any

from mtgrpo.runtime.http import HttpClient, HttpError
from mtgrpo.runtime.text import head_and_tail
from mtgrpo.tools.sandbox import InterpreterElsewhere, Result, Sandbox

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


class Fusion(InterpreterElsewhere):
    """An interpreter whose variables stay, though the server forgets: what was run before is run again, unseen."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._requests: list[dict[str, Any]] = []
        self._lock = asyncio.Lock()

    async def run(self, code: str, **tests: str | bool) -> Result:
        async with self._lock:
            requests = [*self._requests, {"code": code, **tests}]
            result = await self._answer(requests)
            self._requests = [] if result.stopped else requests
            return result

    async def aclose(self) -> None:
        self._requests = []  # the server keeps nothing

    async def _answer(self, requests: list[dict[str, Any]]) -> Result:
        url, limit_s = self.sandbox.url, self.sandbox.timeout_s
        words, lines = json.dumps(self.sandbox.arguments()), json.dumps(requests)
        run_timeout_s = limit_s * len(requests) + _GRACE_S
        body = {
            "code": _PROGRAM.format(arguments=words, requests=lines),
            "language": "python",
            "run_timeout": run_timeout_s,
            "memory_limit_MB": self.sandbox.memory_mb,
        }
        answer: Any = None
        try:
            async with HttpClient(url) as client:
                answer = await client.request("POST", "/run_code", body, timeout_s=run_timeout_s + REACHED_S)
            if answer["status"] == "SandboxError":
                raise RuntimeError(f"the sandbox at {url} failed: {answer['message'][-500:]}")
            ended = answer["run_result"]
        except HttpError as error:
            raise RuntimeError(f"the sandbox: {error}") from error
        except (KeyError, TypeError) as error:
            raise RuntimeError(f"the sandbox at {url} answers with something else: {answer!r:.200}") from error
        if ended["status"] == "TimeLimitExceeded":
            return Result("", stopped=f"it took longer than {limit_s:g} s")
        output = (ended["stdout"] or "").strip()
        if not output.startswith("{"):
            errors = head_and_tail(ended["stderr"] or "", self.sandbox.output_chars)
            return Result(errors, stopped=f"its process ended with code {ended['return_code']}")
        return Result(**json.loads(output))
