"""Runs a command and ends it with all that it has started. Stands alone: the standard library is all it needs.

    python -I reaper.py '{"command": [WORD, ...], "parent": PID, "grace_s": SECONDS, "folder": FOLDER}'

Three processes: the first, which waits, forwards SIGTERM and SIGINT, and may be killed; the reaper, in a session of its
own, whom orphans fall to; and the command, in another. When the command, the first or process `parent` ends, by kill -9
too, the reaper ends every process below it, also those that have left their session: by SIGTERM to the command's group,
and `grace_s` seconds later by SIGKILL to all. FOLDER is removed where `parent` has ended. Only a process that may
signal the reaper, and kills it, is not found.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILLED_S = 5.0  # for processes to end that were killed; those of another user do not
WAITED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGALRM}


def main(command: list[str], parent: int, grace_s: float, folder: str) -> NoReturn:
    """Run `command` and end as it does; where it had to be killed, by the signal that was the reason."""
    first = os.getpid()
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    reaper = os.fork()
    if reaper == 0:
        _end_as(_reap(command, first, grace_s, usual))
    code, reason = _wait(reaper, parent, lambda: os.kill(reaper, signal.SIGTERM))
    if folder and os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    _end_as(-reason if reason and code < 0 else code)


def _reap(command: list[str], first: int, grace_s: float, usual: Iterable[int]) -> int:
    """Start the command and wait for its end, or for a reason to end it; then end all. Gives its exit code."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = os.fork()
    if pid == 0:
        _become(command, usual, signal.SIGTERM if grace_s else signal.SIGKILL)

    def end() -> None:
        number = signal.SIGTERM if grace_s else signal.SIGKILL
        with contextlib.suppress(OSError):
            os.killpg(pid, number) if os.getpgid(pid) == pid else os.kill(pid, number)  # which has only just begun
        signal.setitimer(signal.ITIMER_REAL, grace_s or KILLED_S)

    code, _ = _wait(pid, first, end)
    _kill_descendants(pid)
    return code


def _wait(child: int, parent: int, end: Callable[[], object]) -> tuple[int, int]:
    """The exit code of a child, that of SIGKILL where a timer runs out; and the signal for which `end` was called.

    It is called once, for SIGTERM and SIGINT, and where process `parent` is not the parent any more.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # standard input and output are the command's
    os.dup2(nothing, 1)
    reason = 0
    while True:
        with contextlib.suppress(ChildProcessError):
            while (exited := os.waitpid(-1, os.WNOHANG))[0]:  # orphans too
                if exited[0] == child:
                    return os.waitstatus_to_exitcode(exited[1]), reason
        number = signal.SIGTERM if os.getppid() != parent and not reason else signal.sigwait(WAITED)
        if number == signal.SIGALRM:
            return -signal.SIGKILL, reason
        if number != signal.SIGCHLD and not reason:
            reason = number
            end()


def _become(command: list[str], usual: Iterable[int], without_reaper: int) -> NoReturn:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, without_reaper)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _kill_descendants(command: int) -> None:
    """Kill the command's group, and children until there are none; theirs have then become children too."""
    with contextlib.suppress(OSError):
        os.killpg(command, signal.SIGKILL)
    deadline = time.monotonic() + KILLED_S
    while time.monotonic() < deadline:
        for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _end_as(code: int) -> NoReturn:
    """End with this exit code, or by the signal -`code`."""
    if code < 0:
        with contextlib.suppress(OSError):  # of SIGKILL, which has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
