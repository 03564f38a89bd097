"""A run at a glance: its results in `summary.json`, what it was made with in `versions.json`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from mtgrpo.record.reading import read_object
from mtgrpo.record.shapes import RESULTS
from mtgrpo.runtime.files import strict_json, write_whole

PACKAGES = ("mtgrpo", "torch", "transformers", "peft", "hydra-core", "safetensors", "renderers", "numpy")


def write_summary(folder: Path, values: Mapping[str, Any]) -> None:
    """Write `summary.json` in `folder`: the run's results at a glance."""
    write_whole(folder / "summary.json", strict_json(values, indent=2) + b"\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """The values in the `summary.json` of `folder`; {} where there is none."""
    return read_object(folder / "summary.json", RESULTS)


def held_out_reward(folder: Path) -> float | None:
    """What a sweep optimises: the mean held-out reward of the run in `folder`, at its end. None where it has none."""
    values = read_summary(folder)
    return values.get("eval/reward/after", values.get("eval/reward"))


def write_versions(folder: Path, threads: int) -> None:
    """Write the versions of Python, the system and the packages that compute, and the threads, into a run's folder."""
    versions = {"python": platform.python_version(), "system": platform.platform(), "processor": platform.machine()}
    versions["threads"] = str(threads)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # on the path, but not installed
            versions[name] = metadata.version(name)
    write_whole(folder / "versions.json", strict_json(versions, indent=2) + b"\n")
