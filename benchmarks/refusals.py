"""What the command costs where it trains nothing, in seconds of processor time: help, refusals, a dry run.

    cli.help_s            `mtgrpo --help`
    cli.wrong_option_s    an option that does not exist
    cli.refusal_s         the worst of the wrong inputs of tests/wrong_inputs.py that need no model
    cli.dry_run_s         `mtgrpo train --dry-run`

Each is a process of its own. The first three numbers of a machine that others use may be a third higher.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from record import finish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from wrong_inputs import NEED_A_MODEL, WRONG, furnish

REPEATS = 5
LIMIT_S = 1.5  # of a refusal


def seconds(words: str, folder: Path) -> float:
    """Processor time of a command that is typed in `folder`."""
    command = [sys.executable, "-m", "mtgrpo", *shlex.split(words)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="of the wrong inputs, each of so many")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp())
    try:
        furnish(place)
        asked = {"help_s": "--help", "wrong_option_s": "train seeed=1", "dry_run_s": "train --dry-run"}
        ratios = {
            f"cli.{name}": statistics.median(seconds(words, place) for _ in range(REPEATS))
            for name, words in asked.items()
        }
        refused = [words for words, _ in WRONG if words not in NEED_A_MODEL][:: args.every]
        taken = {words: seconds(words, place) for words in refused}
    finally:
        shutil.rmtree(place)
    ratios["cli.refusal_s"] = max(taken.values())
    slowest = sorted(taken, key=lambda words: -taken[words])[:10]
    detail = {
        "inputs": len(taken),
        "median_s": statistics.median(taken.values()),
        "slower_than_limit": sum(value > LIMIT_S for value in taken.values()),
        "slowest": {words: taken[words] for words in slowest},
    }
    finish("refusals", ratios, detail, "refusals.json" if args.every == 1 else None)


if __name__ == "__main__":
    main()
