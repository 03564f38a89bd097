"""The results of a run at a glance: `summary.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtgrpo.strict_json import strict_json


def write_summary(folder: Path, values: Mapping[str, Any]) -> None:
    """Write `summary.json` in `folder`: the run's results at a glance. The file is replaced as a whole."""
    partial = folder / ".summary.json.partial"
    partial.write_bytes(strict_json(values, indent=2) + b"\n")
    os.replace(partial, folder / "summary.json")


def read_summary(folder: Path) -> dict[str, Any]:
    """The values in the `summary.json` of `folder`; {} where there is none."""
    path = folder / "summary.json"
    return json.loads(path.read_bytes()) if path.is_file() else {}


def held_out_reward(folder: Path) -> float | None:
    """What a sweep optimises: the mean held-out reward of the run in `folder`, at its end. None where it has none."""
    values = read_summary(folder)
    return values.get("eval/reward/after", values.get("eval/reward"))
