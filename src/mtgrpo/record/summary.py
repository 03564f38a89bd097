"""A run at a glance: its results in `summary.json`, what it was made with in `versions.json`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mtgrpo.strict_json import strict_json

PACKAGES = ("mtgrpo", "torch", "transformers", "peft", "hydra-core", "safetensors", "renderers", "numpy")


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


def write_versions(folder: Path) -> None:
    """Write the versions of Python, the system and the packages that compute, into a run's folder."""
    found = {"python": platform.python_version(), "system": platform.platform(), "processor": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # on the path, but not installed
            continue
    (folder / "versions.json").write_bytes(strict_json(found, indent=2) + b"\n")
