"""Wrong inputs are refused in one line, at once: before torch is there, and with nothing left in the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from wrong_inputs import NEED_A_MODEL, WRONG

pytestmark = pytest.mark.real  # for their length

PARTS = 4  # of the table: each is typed by a process of its own


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_typed_wrongly_is_refused_in_a_line(part: int, tmp_path: Path) -> None:
    rows = WRONG[part::PARTS]
    command = [sys.executable, str(Path(__file__).with_name("refusing.py")), str(tmp_path)]
    typed = json.dumps([words for words, _ in rows])
    done = subprocess.run(command, input=typed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    faults: list[str] = []
    for (words, said), came in zip(rows, json.loads(done.stdout), strict=True):
        expected = {"code": 2, "out": "", "left": [], "torch": came["torch"] and words in NEED_A_MODEL}
        faults += [f"{words}: {name} is {came[name]!r}" for name, value in expected.items() if came[name] != value]
        if said not in came["err"] or len(came["err"].splitlines()) != 1 or not came["err"].startswith("mtgrpo: "):
            faults.append(f"{words}: {said!r} is not said in a line, but {came['err']!r}")
    assert faults == []
