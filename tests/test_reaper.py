"""A program that ends with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtgrpo.runtime.processes import bounded_log, supervise

LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(600)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(.01)
print(sys.stdin.readline(), end="", flush=True)
sys.stdin.readline()
sys.exit(3)
"""


@pytest.mark.real
@pytest.mark.parametrize("number", [0, signal.SIGTERM, signal.SIGKILL])
def test_nothing_that_a_command_has_started_is_left(number: int, tmp_path: Path) -> None:
    place = tmp_path / "pid"
    command = supervise([sys.executable, "-c", LEAVES, str(place)], os.environ)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        print("said", file=process.stdin, flush=True)
        assert process.stdout.readline() == "said\n"
        pid = int(place.read_text())
        if number:
            process.send_signal(number)
        else:
            process.stdin.close()
        assert process.wait(timeout=100) == (-number if number else 3)
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_program_that_is_absent_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="there is no program 'no-such-program'"):
        supervise(["no-such-program"], os.environ)


def test_a_program_may_say_what_it_likes_where_the_disk_is_full() -> None:
    with bounded_log(Path("/dev/full")) as stream:
        for _ in range(10):
            stream.write("x" * 2**17)  # more than a pipe holds
            stream.flush()
