"""Programs that run beside this process: started in sessions of their own, watched, and ended with their children."""

import asyncio
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from mtgrpo.runtime import reaper

LOG_BYTES = 2**20  # of a bounded log, that are kept; at most twice as many are
DRAINED_S = 10.0  # for the last of what a program says to be read
_PR_SET_PDEATHSIG = 1
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)  # of Linux; found now, for a fork may not look for it


class ProcessTree:
    """A program that runs. All that it has started ends when it does, when it is ended, and when this process dies."""

    def __init__(self, process: Process, grace_s: float, supervised: bool) -> None:
        self._process, self._grace_s, self._supervised = process, grace_s, supervised
        self.pid = process.pid  # of the program, or of the process that waits for its reaper
        self.stdin = cast(asyncio.StreamWriter, process.stdin)  # these three where it was started with pipes
        self.stdout = cast(asyncio.StreamReader, process.stdout)
        self.stderr = cast(asyncio.StreamReader, process.stderr)

    @property
    def returncode(self) -> int | None:
        """Its exit code, below 0 the signal that ended it; None while it runs."""
        return self._process.returncode

    async def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code, once it has ended and its pipes are read. Raises TimeoutError after `timeout_s` seconds."""
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def end(self) -> None:
        """End it, and return when all of it is gone: by SIGTERM, and where that takes too long by SIGKILL."""
        if self._supervised:
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace_s + 2 * reaper.KILLED_S):
                    await self._process.communicate()
        self._signal(signal.SIGKILL)
        await self._process.communicate()

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


async def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | str | None = None,
    *,
    grace_s: float = 0.0,
    remove: Path | None = None,
    supervised: bool = True,
    **options: Any,
) -> ProcessTree:
    """Start `command` with these variables alone, in `folder`, in a session of its own.

    grace_s: for it to end by itself after SIGTERM. remove: a folder that goes where this process is killed.
    supervised: by the reaper; False for a program that ends what it has started by itself. options: of
    `asyncio.create_subprocess_exec`; streams that are not among them are /dev/null. Must be called in a thread that
    lasts as long as the program. Raises OSError where there is no such program.
    """
    if supervised:
        command = supervise(command, environment, folder or ".", grace_s=grace_s, remove=remove)
    options = dict.fromkeys(("stdin", "stdout", "stderr"), DEVNULL) | options
    options |= {"start_new_session": True}  # Ctrl-C reaches us alone
    process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=folder, **options)
    return ProcessTree(process, grace_s, supervised)


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | str = ".",
    *,
    parent: int | None = None,
    grace_s: float = 0.0,
    remove: Path | None = None,
) -> list[str]:
    """`command` under a reaper, which ends it with all that it has started, at the latest with process `parent`.

    parent: by default this process. Raises FileNotFoundError where there is no such program.
    """
    program = command[0]
    if shutil.which(Path(folder, program) if os.sep in program else program, path=environment.get("PATH")) is None:
        raise FileNotFoundError(f"there is no program {program!r}")
    settings: dict[str, Any] = {"command": list(command), "parent": parent or os.getpid(), "grace_s": grace_s}
    return [sys.executable, "-I", reaper.__file__, json.dumps({**settings, "folder": str(remove or "")})]


def start_logged(
    command: Sequence[str], environment: Mapping[str, str], log: Path, passed: Sequence[int], grace_s: float
) -> subprocess.Popen[bytes]:
    """Start `command` under a reaper; it inherits the files `passed`, and what it prints is appended to `log`."""
    words = supervise(command, environment, grace_s=grace_s)
    with log.open("ab") as output:
        return subprocess.Popen(
            words, env=environment, pass_fds=passed, start_new_session=True, stdin=DEVNULL, stdout=output, stderr=output
        )


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends; on Linux alone."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def read_end(file: Path, characters: int) -> str:
    """The last `characters` of a text file."""
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 4 * characters))  # a character has 4 bytes at most
        return lines.read().decode(errors="replace")[-characters:] if characters else ""


@contextmanager
def bounded_log(path: Path) -> Generator[TextIO]:
    """A stream for what programs say. A thread reads it all, and keeps the last MiB or two of it in `path`."""
    read, write = os.pipe()
    thread = threading.Thread(target=_drain, args=(read, path), name=path.stem, daemon=True)
    thread.start()
    try:
        with os.fdopen(write, "w") as stream:
            yield stream
    finally:
        thread.join(DRAINED_S)  # a process that outlives its program still has the other end


def _drain(read: int, path: Path) -> None:
    with os.fdopen(read, "rb", buffering=0) as stream, path.open("a+b", buffering=0) as log:
        while piece := stream.read(2**16):
            with suppress(OSError):  # the disk may be full, which is no reason for the program to end
                log.write(piece)
                if log.tell() > 2 * LOG_BYTES:
                    log.seek(-LOG_BYTES, os.SEEK_END)
                    end = log.read()
                    log.truncate(0)
                    log.write(end)
