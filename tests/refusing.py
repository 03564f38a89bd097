"""Types commands from standard input, a JSON list, each in a fork of this process, which has not imported torch.

Prints a JSON list: of each its exit code, what it printed, what it left in the folder, whether it imported torch, and
its processor time in seconds. The folder is the first argument, the working folder of all of them.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from mtgrpo import cli
from mtgrpo.runtime import files
from wrong_inputs import furnish


def typed(words: str) -> dict[str, Any]:
    """What came of a command."""
    before = set(Path().rglob("*"))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = os.fork()
        if not process:
            for number, file in ((0, open(os.devnull)), (1, out), (2, err)):  # noqa: SIM115
                os.dup2(file.fileno(), number)
            run(shlex.split(words))
        _, status, used = os.wait4(process, 0)
        code = os.waitstatus_to_exitcode(status)
        printed = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    left = sorted(set(Path().rglob("*")) - before)
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    torch = code >= TORCH or code < 0
    return {
        **{"code": code % TORCH, "out": printed[0], "err": printed[1], "torch": torch},
        **{"left": [str(path) for path in left], "seconds": used.ru_utime + used.ru_stime},
    }


LONGEST_S = 20  # of processor time: what was not refused would go on
TORCH = 100  # is added to the exit code where torch was imported


def run(arguments: list[str]) -> None:
    """Type a command in this process, and end it."""
    resource.setrlimit(resource.RLIMIT_CPU, (LONGEST_S, LONGEST_S))
    code = 1
    try:
        cli.main(arguments)
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code + TORCH * ("torch" in sys.modules))


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    files.PROJECT = Path()  # what lies beside the project, as data and vLLM may, is not found
    os.environ.pop("MTGRPO_DATA", None)
    furnish(Path())
    print(json.dumps([typed(words) for words in json.load(sys.stdin)]))
