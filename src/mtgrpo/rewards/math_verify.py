"""Is the mathematical expression right, however it is written?"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

from mtgrpo.errors import ConfigError, require
from mtgrpo.rewards import Reward
from mtgrpo.types import Trajectory

_MOST_MEMORY = 4 * 2**30  # bytes, for a number with too many digits
_DEATHS = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV)  # of the limit, and of what a message had it compute
_RIGHT, _WRONG, _UNREADABLE = "right", "wrong", "unreadable"


@dataclass
class MathVerify(Reward):
    """1 when the final message's answer equals the task's answer as mathematics, else 0: math-verify compares them.

    It is looked for after the last `####`, else in the whole message: what the last \\boxed{} holds, else a formula
    between dollars, else the last number. Equal are 1/2, \\frac{1}{2} and 0.5, or x = 5 and 5; numbers with decimals
    are compared to six digits. It may take long to simplify an expression, so that is done in a process of its own,
    which is stopped at the limit.
    """

    cpu_heavy = True

    timeout_s: float = 5.0  # processor time for one message; one that takes longer is worth 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, timeout_s="> 0")
        if find_spec("math_verify") is None:
            raise ConfigError(
                "reward=math_verify needs the package math-verify; install it with: pip install 'mtgrpo[math]'"
            )

    def reward(self, trajectory: Trajectory) -> float:
        """1.0 or 0.0. Waits at most `timeout_s`. Raises ConfigError when the task's answer is no mathematics."""
        task = trajectory.task
        found = _comparer.compare(task.answer, trajectory.final.rpartition("####")[2], self.timeout_s)
        if found == _UNREADABLE:
            raise ConfigError(
                f"task {task.id}: the answer {task.answer[:80]!r} is neither a number nor a formula; choose another "
                "column with task.columns.answer=NAME, or compare text with reward=em"
            )
        return float(found == _RIGHT)


class _Comparer:
    """The process that compares; it starts when it is first asked, and again after it was stopped."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def compare(self, answer: str, text: str, limit_s: float) -> str:
        """What the process says; _WRONG where it died of the message. Raises RuntimeError where it ended otherwise."""
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it ended before
                process.stdin.write(json.dumps([answer, text, limit_s]) + "\n")
                process.stdin.flush()
            if found := process.stdout.readline().strip():
                return found
            self._process = None
            code = _end(process)
        if -code in _DEATHS:
            return _WRONG
        raise RuntimeError(f"the process that compares expressions ended with code {code}")

    def stop(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            _end(process)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-W", "ignore", "-c", f"from {__name__} import serve; serve()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", env=environment)


def _end(process: subprocess.Popen[str]) -> int:
    """The exit code of a process that ends; closes its pipes."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what was written last
            if pipe is not None:
                pipe.close()
    return process.wait()


_comparer = _Comparer()
atexit.register(_comparer.stop)


def serve() -> None:
    """What the process does: a line [answer, text, limit in s] in, a verdict out; SIGPROF ends it at the limit.

    The kernel counts the time and sends the signal, so that nothing in the process can keep it alive.
    """
    logging.disable()
    verdicts = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    with contextlib.suppress(ValueError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    _verdict("1", "1")  # what is imported does not count
    for line in sys.stdin:
        answer, text, limit_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        verdict = _verdict(answer, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(verdict, file=verdicts, flush=True)


def _verdict(answer: str, text: str) -> str:
    import math_verify  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    parse, verify = cast(Any, math_verify.parse), cast(Any, math_verify.verify)
    try:
        # Where a time limit is given, math-verify would use a signal that cannot stop work inside one operation.
        gold = parse(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=None)
        if not gold:
            return _UNREADABLE
        return _RIGHT if verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None) else _WRONG
    except Exception:  # sympy raises whatever it likes at expressions that make no sense, or are too large
        return _WRONG
