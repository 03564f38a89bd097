"""Runs one program and ends it, with all that it started, as soon as the process that asked for it has ended.

    python guard.py PARENT FOLDER PROGRAM ARGUMENT ...

PARENT is the process id of who asks; kill -9 of it counts too. FOLDER goes with it: it is removed where PARENT has not
removed it. SIGTERM ends the program as well. Stands alone: Python and its standard library are all it needs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import types
from contextlib import suppress

GRACE_S = 20  # for the program to end by itself
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent of this process ends; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(parent: int, folder: str, command: list[str]) -> int:
    """Run `command` until it or process `parent` ends; returns its exit code."""
    end_with_parent()
    program = subprocess.Popen(  # its children are in its process group, and so are found whatever becomes of it
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_parent
    )

    def end(_number: int, _frame: types.FrameType | None) -> None:
        _signal_group(program.pid, signal.SIGTERM)
        signal.alarm(GRACE_S)

    def kill(_number: int, _frame: types.FrameType | None) -> None:
        _signal_group(program.pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if os.getppid() != parent:  # it ended before the kernel was asked
        end(signal.SIGTERM, None)
    code = program.wait()
    signal.alarm(0)
    _signal_group(program.pid, signal.SIGKILL)
    if folder and os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
