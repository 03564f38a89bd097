"""A run's folder, read back: what `report` and `watch` show. Whatever size it has, little of it is held in memory.

Everything here is data that a model may have written: who shows it, escapes it.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from mtgrpo.errors import ConfigError
from mtgrpo.text import number, shorten
from mtgrpo.types import LEARNING

BEFORE, AFTER = "evaluation_before", "evaluation_after"  # the files of trajectories that evaluations leave
_POINTS = 2000  # rows of metrics that are kept
_MARK = b'"eval/'  # in rows with a measurement on held-out tasks: there are few, and they are kept by themselves
_END = 200  # bytes: what was measured on held-out tasks stands last in its row

Row = dict[str, Any]


def of_set(file: str, name: str) -> str:
    """The file of trajectories that an evaluation leaves of a set of tasks; "": of the run's own."""
    return f"{file}_{name}" if name else file


@dataclass(frozen=True)
class Metrics:
    """The rows of `metrics.jsonl`, thinned out evenly where there are many."""

    rows: list[Row] = field(default_factory=list[Row])
    total: int = 0  # rows in the file
    unreadable: int = 0  # among those looked at: one is being written, or the disk was full

    def stage(self, name: str) -> list[Row]:
        """The rows of one stage."""
        return [row for row in self.rows if row.get("stage") == name]


@dataclass(frozen=True)
class RunRecord:
    """What one run left."""

    folder: Path
    name: str  # by which it is told from the others
    metrics: Metrics
    summary: Mapping[str, Any]  # {} while it runs, and of one that ended early
    settings: Mapping[str, str]  # every option and its value, as text
    given: Sequence[str]  # the options of the command line
    versions: Mapping[str, str]
    notes: Sequence[str]

    @property
    def success_at(self) -> float:
        """The reward from which a conversation is a success."""
        try:
            return float(self.settings.get("reward.success_at", "1"))
        except ValueError:
            return 1.0

    def succeeded(self, trajectory: Row) -> bool:
        """Whether it ended by itself with enough reward."""
        reward = trajectory.get("reward")
        return trajectory.get("status") == "completed" and (reward or 0.0) >= self.success_at

    def outcomes(self, name: str) -> dict[str, list[float]] | None:
        """Task -> 1.0 or 0.0 for each of its samples, of the evaluation `name`; None where it left no trajectories."""
        path = self.folder / "trajectories" / f"{name}.jsonl"
        if not path.is_file():
            return None
        found: dict[str, list[float]] = defaultdict(list)
        for trajectory in json_lines(path):
            if trajectory.get("status") != "failed":
                found[str(trajectory.get("task"))].append(float(self.succeeded(trajectory)))
        return dict(found) or None

    def last_trajectories(self) -> tuple[str, Iterator[Row]]:
        """The newest conversations, and the name of their file: of the evaluation after training, else of a step."""
        place = self.folder / "trajectories"
        learning = self.metrics.stage(LEARNING)
        step = f"step_{learning[-1].get('step', 0):06d}" if learning else ""
        names = [AFTER, step, _last_step(place)]
        name = next((name for name in names if name and (place / f"{name}.jsonl").is_file()), "")
        return name, json_lines(place / f"{name}.jsonl") if name else iter(())


_FILES = ("metrics.jsonl", "summary.json")  # one of them is in every run's folder


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The folders of runs among `places`, in place of a sweep's folder those of its runs. Raises ConfigError."""
    found: list[Path] = []
    for place in places:
        inside = sorted((path for path in place.glob("*") if _is_run(path)), key=_in_order) if place.is_dir() else []
        if not (_is_run(place) or inside):
            deeper = sorted(path.parent for name in _FILES for path in place.glob(f"*/*/{name}"))
            newest = f"; the newest below it is {deeper[-1]}" if deeper else ""
            raise ConfigError(
                f"{place} holds no run: neither metrics.jsonl nor summary.json, nor folders that do{newest}"
            )
        found += [place] if _is_run(place) else inside
    return list(dict.fromkeys(path.resolve() for path in found))


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Each by the part of its path in which it differs from the others."""
    shared = Path(os.path.commonpath(folders)) if len(folders) > 1 else folders[0].parent
    return [_read(folder, folder.relative_to(shared).as_posix()) for folder in folders]


def read_metrics(path: Path, points: int = _POINTS) -> Metrics:
    """Every row is looked at; about `points` are kept of training, as many of evaluation, and always the last."""
    rows, measured, number, line = _Thinned(points), _Thinned(points), -1, b""
    try:
        with path.open("rb", buffering=1 << 20) as file:
            for number, line in enumerate(file):
                (measured if line.find(_MARK, -_END) >= 0 else rows).add(number, line)
    except FileNotFoundError:
        return Metrics()
    lines = dict(rows.kept + measured.kept + [(number, line)] * (number >= 0))
    parsed = [parse_row(lines[number]) for number in sorted(lines)]
    good = [row for row in parsed if row is not None]
    return Metrics(good, number + 1, len(parsed) - len(good))


def read_settings(folder: Path) -> dict[str, str]:
    """Every option of a run as text, by its full name; {} where the run kept none."""
    values = _yaml(folder / ".hydra" / "config.yaml")
    choices = _inner(_yaml(folder / ".hydra" / "hydra.yaml"), "hydra", "runtime", "choices")
    chosen = {group: _option(choice) for group, choice in choices.items() if group == "recipe" or group in values}
    return {**chosen, **flat(values)}


def parse_row(line: bytes) -> Row | None:
    """A line of JSON that holds an object; None for any other."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("Row", row) if isinstance(row, dict) else None


def read_end(path: Path, size: int) -> list[bytes]:
    """The whole lines among the last `size` bytes of a file; [] where there is none."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - size)
            file.seek(start)
            lines = file.read(size).split(b"\n")
    except FileNotFoundError:
        return []
    return lines[1 if start else 0 : -1]  # the first may be cut, the last is being written


def objects(value: object) -> list[Row]:
    """The JSON objects of a list; [] for what is no list."""
    return (
        [cast("Row", part) for part in cast("list[Any]", value) if isinstance(part, dict)]
        if isinstance(value, list)
        else []
    )


def calls(message: Row) -> list[str]:
    """The tool calls of a message, as `name(arguments)`."""
    found = objects(message.get("tool_calls"))
    return [shorten(f"{call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})") for call in found]


def facts(row: Row) -> str:
    """How a conversation ended, on a line."""
    said = [f"reward {number(row.get('reward'))}", str(row.get("status")), str(row.get("reason") or "")]
    said.append(f"expected {shorten(str(row['answer']))}" if row.get("answer") else "")
    return ", ".join(filter(None, said))


class _Thinned:
    """Keeps every line at first, then every second, fourth, ... so that there are never more than `most`."""

    def __init__(self, most: int) -> None:
        self.kept: list[tuple[int, bytes]] = []
        self._most, self._every, self._seen = most, 1, 0

    def add(self, number: int, line: bytes) -> None:
        if self._seen % self._every == 0:
            self.kept.append((number, line))
            if len(self.kept) > self._most:
                self.kept = self.kept[::2]
                self._every *= 2
        self._seen += 1


def _read(folder: Path, name: str) -> RunRecord:
    overrides = _yaml(folder / ".hydra" / "overrides.yaml")
    settings = read_settings(folder)
    summary, versions = _json_file(folder / "summary.json"), _json_file(folder / "versions.json")
    notes = folder / "notes.txt"
    return RunRecord(
        folder=folder,
        name=name,
        metrics=read_metrics(folder / "metrics.jsonl"),
        summary=summary,
        settings=settings,
        given=[str(line) for line in cast("list[Any]", overrides)] if isinstance(overrides, list) else [],
        versions={key: str(value) for key, value in versions.items()},
        notes=notes.read_text(errors="replace").splitlines()[-200:] if notes.is_file() else [],
    )


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _in_order(path: Path) -> tuple[int, str]:
    """Runs of a sweep are numbered."""
    return (int(path.name) if path.name.isdigit() else 0, path.name)


def _last_step(place: Path) -> str:
    try:
        with os.scandir(place) as entries:
            return max((e.name for e in entries if e.name.startswith("step_")), default="").removesuffix(".jsonl")
    except OSError:
        return ""


def json_lines(path: Path) -> Iterator[Row]:
    """The objects of a file of JSON Lines; other lines are left out."""
    with path.open("rb") as file:
        yield from (row for line in file if (row := parse_row(line)) is not None)


def _json_file(path: Path) -> Row:
    return (parse_row(path.read_bytes()) or {}) if path.is_file() else {}


def _yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
    except (OSError, yaml.YAMLError):
        return {}


def _inner(value: Any, *names: str) -> dict[str, Any]:
    for name in names:
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as `section.name`, their values as they are typed."""
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)}
    items = cast("dict[Any, Any]", value).items()
    parts: Iterable[dict[str, str]] = (flat(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in items)
    return {key: text for part in parts for key, text in part.items()}


def _option(choice: Any) -> str:
    """The choice of a group as it is typed: a name, or a list of names."""
    return f"[{','.join(map(str, cast('list[Any]', choice)))}]" if isinstance(choice, list) else str(choice)
