"""The first process inside a sandbox: `python -I -c SOURCE LIMITS`. It needs the standard library alone.

A line of JSON in is a piece of code; a line out says what it printed and what became of it. The code runs in a second
process, the worker, which keeps its variables. This one watches time, memory and output where the worker cannot reach
it; as process 1 of a sandbox it cannot be killed from within, and all others end with it.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import ctypes
import fcntl
import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import types
from typing import Any, cast

LOOK_S = 0.02  # between two looks at time and memory
OPEN_FILES = 64
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
NAME = "<code>"  # of the code, in tracebacks


def main() -> None:
    """Answer lines until there are no more, or until something had to be stopped."""
    limits: dict[str, Any] = json.loads(sys.argv[1])
    _prctl(PR_SET_DUMPABLE, 0)  # or code of the same user could change this process
    os.nice(10)
    worker = Worker(limits)
    for line in sys.stdin.buffer:
        _signal_others(signal.SIGCONT)
        reply = worker.run(json.loads(line))
        _signal_others(signal.SIGSTOP)  # nothing goes on between two pieces of code
        print(json.dumps(reply), flush=True)
        if reply["stopped"]:
            os._exit(0)


def _signal_others(number: int) -> None:
    """Signal all other processes of the sandbox. Outside of one -1 would mean everything that the user runs."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)


class Worker:
    """The process that runs code. `limits` are those of `Sandbox`."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._limits = limits
        self._output, name = tempfile.mkstemp()  # a pipe would have to be emptied all the time
        os.unlink(name)
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
        requests, self._requests = os.pipe()
        self._status, status = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _serve(limits, requests, status, self._output)
            finally:
                os._exit(1)
        os.close(requests)
        os.close(status)

    def run(self, code: str) -> dict[str, Any]:
        """Run `code`: its output, the exception that ended it, or what had it stopped."""
        end = time.monotonic() + self._limits["timeout_s"]
        password = os.urandom(8).hex()  # so that code cannot write its own verdict beforehand
        os.ftruncate(self._output, 0)
        with contextlib.suppress(BrokenPipeError):  # the worker has ended since
            os.write(self._requests, json.dumps([password, code]).encode() + b"\n")
        error = stopped = ""
        while not (stopped := self._stopped(end)):
            if select.select([self._status], [], [], LOOK_S)[0]:
                said = os.read(self._status, 4096).decode(errors="backslashreplace").split()
                if said[:1] == [password]:
                    error = " ".join(said[1:])
                    break
        return {"output": self._shown(), "error": error, "stopped": stopped}

    def _shown(self) -> str:
        """What the code has printed; both ends of it where it is long."""
        file, half = self._output, self._limits["output_bytes"] // 2
        size = os.fstat(file).st_size
        head, tail = os.pread(file, half, 0), os.pread(file, half, max(half, size - half))
        if size <= 2 * half:
            return (head + tail).decode(errors="replace")
        begin = codecs.getincrementaldecoder("utf-8")("replace").decode(head)  # without a character that was cut
        end = tail.lstrip(bytes(range(0x80, 0xC0))).decode(errors="replace")
        return f"{begin}\n[{size - 2 * half} bytes left out]\n{end}"

    def _stopped(self, end: float) -> str:
        """Why the code cannot go on; "" = it can."""
        late = f"it took longer than {self._limits['timeout_s']:g} s"
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._pid:
                    code = os.waitstatus_to_exitcode(found[1])
                    return late if code == -signal.SIGXCPU else f"its process ended with code {code}"
        except ChildProcessError:
            pass
        if time.monotonic() > end:
            return late
        if os.getpid() == 1 and _memory() > self._limits["memory_bytes"]:
            return f"it needed more memory than {self._limits['memory_bytes'] >> 20} MB"
        return ""


def _memory() -> int:
    """Bytes that all processes but the first hold."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with (
                contextlib.suppress(OSError, IndexError),
                open(f"/proc/{name}/statm") as file,
            ):  # it may just have ended
                pages += int(file.read().split()[1])
    return pages * resource.getpagesize()


def _serve(limits: dict[str, Any], requests: int, status: int, output: int) -> None:
    """What the worker does."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_DUMPABLE, 1)
    with open("/proc/self/oom_score_adj", "w") as file:  # what the kernel ends first where memory is short
        file.write("1000")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    cast(Any, sys.stdout).reconfigure(line_buffering=True, errors="backslashreplace")  # nothing is lost by a stop
    for kind, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # the first process counts
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    own = os.getpid()
    with os.fdopen(requests) as lines:
        for line in lines:
            password, code = json.loads(line)
            used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used_s + limits["timeout_s"]), resource.RLIM_INFINITY))
            error = execute(code, vars(main_module))
            if os.getpid() != own:  # a child that the code has made
                os._exit(0)
            os.write(status, f"{password} {error}\n".encode())


def execute(code: str, names: dict[str, Any]) -> str:
    """Run `code`, show the value of its last line and what it raises. Gives the name of the exception, "" = none."""
    error = ""
    try:
        tree = ast.parse(code, NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), names)
        if last is not None:
            exec(compile(ast.Interactive([last]), NAME, "single"), names)
    except BaseException as raised:
        error, where = type(raised).__name__, raised.__traceback__
        while where is not None and where.tb_frame.f_code.co_filename != NAME:
            where = where.tb_next
        if not isinstance(raised, SystemExit):
            traceback.print_exception(type(raised), raised, where)
    with contextlib.suppress(Exception):  # the code may have put something of its own there, or closed it
        sys.stdout.flush()
        sys.stderr.flush()
    return error


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
