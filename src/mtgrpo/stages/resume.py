"""Where a run goes on: its checkpoint, and the record up to there."""

import os
import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from mtgrpo.config.experiment import LATEST
from mtgrpo.parts import extension
from mtgrpo.record.reading import AFTER, BEFORE, GREEDY, read_object, read_settings
from mtgrpo.record.shapes import RESULTS
from mtgrpo.weights.saved import Checkpoint, find_newest, read_checkpoint

_MEASURES = re.compile(r"(task|environment|reward|agent|condenser|chat|eval\.tasks)\b|sampling\.(?!temperature)")
NO_MEASURE = "success before training was measured with the old, and is no measure of the new"
_TRAINED = ("task.path", "task.train_files")
_NEW, _SUCCESS = "not set", "eval/success/before"
OF_RESUMING = ("resume", "resume_mode", "trust_code")  # options that may differ without a word


def take_up(resume: str, folder: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint from which the run in `folder` goes on; None = it begins at its start.

    What the folder has of later steps is cut back. Raises ConfigError where no checkpoint is whole.
    """
    if not resume:
        return None
    found = find_newest(folder, note) if resume == LATEST else read_checkpoint(Path(resume))
    _cut_back(folder, found if resume == LATEST else None)
    note(f"goes on from {found.path}" if found else f"there is no checkpoint in {folder} yet: begins at the start")
    for line in told_of(found, settings_of(folder)) if found else ():
        note(line)
    return found


def told_of(found: Checkpoint, now: Mapping[str, str]) -> list[str]:
    """What to say where a run goes on from `found` with the settings that it has `now`."""
    other = differences(found.state.get("settings", {}), now)
    told = [f"with other settings than before: {'; '.join(other)}"] if other else []
    if any(line.startswith("model.name=") and _NEW not in line for line in other):
        told.append("model.name has no effect where a run goes on: its weights are the checkpoint's")
    if (measured := other_measures(found, now)) and _SUCCESS in found.state.get("summary", {}):
        told.append(f"{NO_MEASURE}: {', '.join(measured)}")
    return told


def other_measures(found: Checkpoint, now: Mapping[str, str]) -> list[str]:
    """The names of the settings and files by which success is measured otherwise `now` than when `found` was saved."""
    apart = _TRAINED if now.get("task.val_files", "[]") != "[]" else ()  # held-out tasks have files of their own
    measures = {name: value for name, value in now.items() if _MEASURES.match(name) and name not in apart}
    files = re.split(r"[^\w.-]", " ".join(measures.values()))
    other = (line for line in differences(found.state.get("settings", {}), now) if _NEW not in line)
    names = (line.partition("=")[0] for line in other)
    return [name for name in names if name in measures or (Path(name).is_absolute() and Path(name).name in files)]


def changed_files(before: Mapping[str, str]) -> list[str]:
    """What to say of files of somebody's own that are not as in `before`, the settings of a run that is measured."""
    files = {name: value for name, value in before.items() if value.startswith(extension.DIGEST)}
    told = "; ".join(differences(files, extension.digests))
    return [f"other files than the checkpoint was trained with: {told}"] if told else []


def settings_of(folder: Path) -> dict[str, str]:
    """Every option of the run in `folder` as text, and a digest of each file of somebody's own that it may use."""
    return read_settings(folder) | extension.digests


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The settings in which a run differs from what it was, for people; of a file, where both have used it."""
    told: list[str] = []
    before = {**before, **_moved(before, now)}
    for name in {**before, **now} if before and now else ():
        old, new = before.get(name, _NEW), now.get(name, _NEW)
        of_one = _NEW in (old, new) and extension.DIGEST in old + new
        if old != new and name not in OF_RESUMING and not of_one:
            told.append(f"{name}={new} (was {old})")
    return told


def _moved(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """The digests `before` of files that lie elsewhere `now`, by their new paths, which end as the old ones."""
    gone = {name: digest for name, digest in before.items() if digest.startswith(extension.DIGEST) and name not in now}
    found: dict[str, str] = {}
    for name, digest in now.items():
        if digest.startswith(extension.DIGEST) and name not in before and gone:
            length, _, old = max((_alike(name, one), gone[one] == digest, one) for one in gone)
            found |= {name: gone[old]} if length else {}
    return found


def _alike(one: str, other: str) -> int:
    """How many of the last parts of two paths are the same."""
    pairs = zip(Path(one).parts[::-1], Path(other).parts[::-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def final_results(folder: Path, step: int) -> Mapping[str, Any]:
    """What the evaluation after `step` found, if it was the run's last step and the summary holds it; else {}."""
    summary = read_object(folder / "summary.json", RESULTS)
    ended = summary.get("train/steps") == step and "eval/success/after" in summary
    return {name: value for name, value in summary.items() if name.endswith("/after")} if ended else {}


def forget_end(folder: Path) -> None:
    """Remove what a run left as it ended, where it has ended and takes another step."""
    if (summary := folder / "summary.json").is_file():
        for path in (folder / "trajectories").glob("*.jsonl"):
            if path.stem.startswith((AFTER, GREEDY[AFTER])):
                path.unlink()
        summary.unlink()


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
