"""Faults planted into runs of the tiny model, one at a time: which of them a run finds, and with what words.

The faults are those of tests/plants.py and tests/learning_plants.py; each is tried with several seeds, in as many
steps as the test has. A fault is found when the run says what docs/self_checks.md says of it; what a reward does to its
trajectory is found when the losses are those of a run in which it does nothing. `false_alarms` counts sound runs, of
several algorithms, advantages and optimisers, that one of the checks ends or warns of.

    integrity.found_share   of all tries
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from record import finish

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import learning_plants as plants
from learning_plants import CHANGES, CONTROLS, FAULTS, SAID, USUAL


def alone(work: Callable[[Path, pytest.MonkeyPatch], Any]) -> Any:
    """The result of `work` in a folder of its own, after which nothing of its patches is left."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        return work(Path(folder), patch)


def main() -> None:
    """Try everything and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="tries of each fault")
    parser.add_argument("--only", default="", help="faults whose name has this in it; nothing is then written down")
    given = parser.parse_args()
    detail: dict[str, Any] = {}
    for name in FAULTS:
        if given.only in name:
            tries = [alone(lambda *where, n=name, s=seed: plants.told_of(n, *where, s)) for seed in range(given.seeds)]
            found = sum(plants.is_found(name, told) for told in tries)
            detail[name] = {"tries": given.seeds, "found": found, "by": SAID.get(name, USUAL)}
    for name, change in CHANGES.items():
        if given.only in name:
            pairs = [
                [alone(lambda *where, c=one, s=seed: plants.losses(*where, c, s)) for one in ("pass", change)]
                for seed in range(given.seeds)
            ]
            held = sum(one == other for one, other in pairs)
            detail[name] = {"tries": given.seeds, "found": held, "by": "the reward has a copy"}
    alarms = [words for words in CONTROLS if not given.only and alone(lambda *where, w=words: plants.alarm(*where, w))]
    share = sum(one["found"] for one in detail.values()) / max(1, sum(one["tries"] for one in detail.values()))
    detail["false_alarms"] = {"runs": len(CONTROLS), "alarms": alarms}
    finish("integrity", {"integrity.found_share": share}, detail, None if given.only else "integrity.json")


if __name__ == "__main__":
    main()
