"""What a run was made with: `versions.json`."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from mtgrpo.strict_json import strict_json

PACKAGES = ("mtgrpo", "torch", "transformers", "peft", "hydra-core", "safetensors", "renderers", "numpy")


def write_versions(folder: Path) -> None:
    """Write the versions of Python, the system and the packages that compute, into a run's folder."""
    found = {"python": platform.python_version(), "system": platform.platform(), "processor": platform.machine()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # on the path, but not installed
            continue
    (folder / "versions.json").write_bytes(strict_json(found, indent=2) + b"\n")
