"""Where a run goes on: its checkpoint, and the record up to there."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtgrpo.config.experiment import LATEST
from mtgrpo.parts import extension
from mtgrpo.record.reading import BEFORE, GREEDY, read_settings, read_summary
from mtgrpo.weights.saved import Checkpoint, find_newest, read_checkpoint

_MEASURES = re.compile(
    r"(task|environment|reward|agent|condenser|chat|eval\.tasks)\b|sampling\.(?!temperature)|[^=]+\.py="
)
_NEW, _SUCCESS = "not set", "eval/success/before"
OF_RESUMING = ("resume", "resume_mode", "trust_code")  # options that may differ without a word


def take_up(resume: str, folder: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint from which the run in `folder` goes on; None = it begins at its start.

    What the folder has of later steps is cut back. Raises ConfigError where no checkpoint is whole.
    """
    if not resume:
        return None
    found = find_newest(folder, note) if resume == LATEST else read_checkpoint(Path(resume))
    if resume == LATEST:
        _cut_back(folder, found)
    note(f"goes on from {found.path}" if found else f"there is no checkpoint in {folder} yet: begins at the start")
    if found and (other := differences(found.state.get("settings", {}), settings_of(folder))):
        note(f"with other settings than before: {'; '.join(other)}")
        measured = ", ".join(line.partition("=")[0] for line in other if _MEASURES.match(line) and _NEW not in line)
        if measured and _SUCCESS in found.state.get("summary", {}):
            note(f"success before training was measured with the old, and is no measure of the new: {measured}")
    return found


def settings_of(folder: Path) -> dict[str, str]:
    """Every option of the run in `folder` as text, and of each file of somebody's own that they name its digest."""
    settings = read_settings(folder)
    said, files = " ".join(settings.values()), extension.digests.items()
    return settings | {os.path.relpath(file): digest for file, digest in files if f"{Path(file).name}:" in said}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The settings in which a run differs from what it was, for people."""
    names = (name for name in {**before, **now} if name not in OF_RESUMING)
    both = ((name, before.get(name, _NEW), now.get(name, _NEW)) for name in names if before and now)
    return [f"{name}={new} (was {old})" for name, old, new in both if old != new]


def final_results(folder: Path, step: int) -> Mapping[str, Any]:
    """What the evaluation after `step` found, if it was the run's last step and the summary holds it; else {}."""
    summary = read_summary(folder)
    ended = summary.get("train/steps") == step and "eval/success/after" in summary
    return {name: value for name, value in summary.items() if name.endswith("/after")} if ended else {}


def _cut_back(folder: Path, found: Checkpoint | None) -> None:
    """Leave of metrics, conversations and tokens what was there when the checkpoint was made."""
    step = found.step if found else 0
    state: dict[str, Any] = found.state if found else {"metrics_bytes": 0, "summary": {}}
    if found and final_results(folder, step):
        return
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        os.truncate(metrics, min(metrics.stat().st_size, state["metrics_bytes"]))
    kept = {f"step_{number:06d}" for number in range(1, step + 1)}
    measured = _SUCCESS in state["summary"]
    for path in (*(folder / "trajectories").glob("*.jsonl"), *(folder / "tokens").glob("*.npz")):
        if path.stem not in kept and not (measured and path.stem.startswith((BEFORE, GREEDY[BEFORE]))):
            path.unlink()
    (folder / "summary.json").unlink(missing_ok=True)
