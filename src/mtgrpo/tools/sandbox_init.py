"""The first process inside a sandbox. It needs the standard library alone.

It says that it is ready. Then a line of JSON in is a piece of code, perhaps with tests; a line out says what it printed
and what became of it. The code runs in a second process, the worker, which keeps its variables; tests run in a third,
the judge, which the worker cannot read. This one watches time, memory and output where neither can reach it; as process
1 of a sandbox it cannot be killed from within, and all others end with it.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import ctypes
import fcntl
import functools
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any, cast

from mtgrpo.tools.sandbox_calls import NAME, OPERATIONS, Peer, show
from mtgrpo.tools.sandbox_judge import judge

LOOK_S = 0.02  # between two looks at time and memory
OPEN_FILES = 64
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
READY = "ready"
SOCKET_BYTES = 2**18  # what others may have sent to a socket, by net.core.wmem_default
NODE_BYTES = 2**10  # of a file, empty or not


def main(limits: dict[str, Any]) -> None:
    """Answer lines until there are no more, tests have run, or something had to be stopped."""
    _prctl(PR_SET_DUMPABLE, 0)  # or code of the same user could read and change this process
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets no signal from within that it has no handler for
    os.nice(10)
    worker = Worker(limits)
    print(READY, flush=True)
    for line in sys.stdin.buffer:
        _signal_others(signal.SIGCONT)
        reply = worker.run(**json.loads(line))
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
        self._output = _file()
        requests, self._requests = os.pipe()
        self._status, status = os.pipe()
        self._calls, calls = (end.detach() for end in socket.socketpair())
        self._pid = _fork(limits, self._output, (requests, status, calls), _serve)
        self._judge = 0  # its process

    def run(self, code: str, setup: str = "", tests: str | None = None, objects: bool = False) -> dict[str, Any]:
        """Run `code`, then `tests`: what was printed, the exception that ended it, or what had it stopped.

        objects: whether the tests make objects of the program's classes.
        """
        end = time.monotonic() + self._limits["timeout_s"]
        password = os.urandom(8).hex()  # so that code cannot write its own end beforehand
        os.ftruncate(self._output, 0)
        # Begun before the code, which might leave no place for it.
        judging = None if tests is None else self._begin_judge(setup, tests, objects)
        name = "__main__" if tests is None else "solution"  # as it is imported: its main part does not run
        with contextlib.suppress(BrokenPipeError):  # the worker has ended since
            os.write(self._requests, json.dumps([password, setup, code, name]).encode() + b"\n")
        error, stopped = self._wait_for_end(self._status, password, end)
        files = [self._output]
        if judging:
            printed, go, verdict = judging
            files.append(printed)
            if not error and not stopped:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._requests, json.dumps([password, "", None, name]).encode() + b"\n")
                os.write(go, b"\n")
                error, stopped = self._wait_for_end(verdict, "judged", end)
        return {"output": "".join(map(self._read, files)), "error": error, "stopped": stopped}

    def _begin_judge(self, setup: str, tests: str, objects: bool) -> tuple[int, int, int]:
        """Start the judge, which waits. Gives descriptors: of what it prints, to let it begin, of what it says."""
        output = _file()
        told, go = os.pipe()
        verdict, found = os.pipe()

        def work(_: dict[str, Any], told: int, found: int, calls: int) -> None:
            os.read(told, 1)
            error = judge(setup, tests, objects, calls, execute)
            os.write(found, f"judged {error}\n".encode())
            signal.pause()

        self._judge = _fork(self._limits, output, (told, found, self._calls), work)
        return output, go, verdict

    def _wait_for_end(self, status: int, password: str, end: float) -> tuple[str, str]:
        """The name of the exception that a process says it has ended with, or why it had to be stopped."""
        while not (stopped := self._stopped(end)):
            if select.select([status], [], [], LOOK_S)[0]:
                words = os.read(status, 4096).decode(errors="backslashreplace").split()
                if words[:1] == [password]:
                    return " ".join(words[1:]), ""
        return "", stopped

    def _read(self, file: int) -> str:
        """What was printed into `file`; both ends of it where it is long."""
        half = self._limits["output_bytes"] // 2
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
        watched = {self._pid: "its process", self._judge: "the process of its tests"}
        with contextlib.suppress(ChildProcessError):
            while (exited := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(exited[1])
                if who := watched.get(exited[0]):
                    return late if code == -signal.SIGXCPU else f"{who} ended with code {code}"
        if time.monotonic() > end:
            return late
        if os.getpid() == 1 and _memory() > self._limits["memory_bytes"]:
            return f"it needed more memory than {self._limits['memory_bytes'] >> 20} MB"
        return ""


def _file() -> int:
    """A file without a name, for what is printed: a pipe would have to be emptied all the time."""
    descriptor, name = tempfile.mkstemp()
    os.unlink(name)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def _memory() -> int:
    """Bytes that all processes but the first hold, with sockets at their most and the nodes of files in the kernel."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/statm") as file:  # it may have ended
                pages += int(file.read().split()[1])
    with open("/proc/net/unix") as file:
        sockets = sum(1 for _ in file) - 1
    nodes = sum(found.f_files - found.f_ffree for found in map(os.statvfs, ("/tmp", "/dev/shm")))
    return pages * resource.getpagesize() + sockets * SOCKET_BYTES + nodes * NODE_BYTES


def _fork(limits: dict[str, Any], output: int, passed: tuple[int, ...], work: Callable[..., None]) -> int:
    """Do `work` in a new process, with limits and the descriptors `passed` alone, which it takes over; gives its id."""
    if pid := os.fork():
        for descriptor in passed:
            os.close(descriptor)
        return pid
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for first, last in zip((2, *sorted(passed)), (*sorted(passed), 2**16), strict=True):
            os.closerange(first + 1, last)
        processes = limits.get("processes")
        cast(Any, sys.stdout).reconfigure(line_buffering=True, errors="backslashreplace")  # nothing is lost by a stop
        for kind, most in (
            (resource.RLIMIT_AS, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits.get("file_bytes")),
            (resource.RLIMIT_NPROC, processes and processes + 2),  # the first and the judge count
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            if most is not None:
                resource.setrlimit(kind, (most, most))
        work(limits, *passed)
    except BaseException as error:
        show(error)
    finally:
        os._exit(1)


def _serve(limits: dict[str, Any], requests: int, status: int, calls: int) -> None:
    _prctl(PR_SET_DUMPABLE, 1)
    with open("/proc/self/oom_score_adj", "w") as file:  # what the kernel ends first where memory is short
        file.write("1000")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    own = os.getpid()
    with os.fdopen(requests) as lines:
        for line in lines:
            password, setup, code, name = cast("tuple[str, str, Any, str]", json.loads(line))
            if code is None:
                named = functools.partial(_named, main_module)
                with contextlib.suppress(EOFError, OSError):  # the judge has ended
                    Peer(calls, {**OPERATIONS, "name": named}, judges=False).serve()
                while True:
                    signal.pause()
            used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used_s + limits["timeout_s"]), resource.RLIM_INFINITY))
            main_module.__name__, sys.modules[name] = name, main_module
            error = execute(setup, vars(main_module)) or execute(code, vars(main_module))
            if os.getpid() != own:  # a child that the code has made
                os._exit(0)
            os.write(status, f"{password} {error}\n".encode())


def _named(module: types.ModuleType, name: str) -> Any:
    if name not in vars(module):
        raise NameError(f"name {name!r} is not defined")
    return vars(module)[name]


def execute(code: str | ast.Module, names: dict[str, Any]) -> str:
    """Run `code`, show the value of its last line and what it raises. Gives the name of the exception, "" = none."""
    error = ""
    try:
        tree = ast.parse(code, NAME) if isinstance(code, str) else code
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), names)
        if last is not None:
            exec(compile(ast.Interactive([last]), NAME, "single"), names)
    except BaseException as raised:
        error = type(raised).__name__ or "an exception without a name"
        if not isinstance(raised, SystemExit):
            show(raised)
    with contextlib.suppress(Exception):  # the code may have put something of its own there, or closed it
        sys.stdout.flush()
        sys.stderr.flush()
    return error


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
