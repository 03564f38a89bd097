"""A run's folder, read back: what `report`, `show` and `watch` show. Whatever size it has, little is held in memory.

A model or a stranger may have written it. So all of it comes in the shapes of `record/shapes.py`, without what no run
writes: texts are printable, numbers finite. Whoever writes it into a page escapes it once more.
"""

import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from shlex import quote
from typing import Any, cast

from mtgrpo.errors import ConfigError, beside
from mtgrpo.record.shapes import METRICS, RESULTS, SETTINGS, TEXTS, TRAJECTORY, WHERE_THEY_CHANGE, Json, fit
from mtgrpo.runtime.files import MAX_LINE_BYTES, Line, read_last_lines, read_lines
from mtgrpo.runtime.plain_yaml import BrokenYamlError, parse_yaml, read_bounded
from mtgrpo.runtime.text import number, printable, shorten
from mtgrpo.types import is_success

BEFORE, AFTER = "evaluation_before", "evaluation_after"  # the files of trajectories that evaluations leave
GREEDY = {BEFORE: "greedy_before", AFTER: "greedy_after"}  # and of the greedy ones beside them
LOCK = ".lock"  # in the folder of a run from its beginning
_FILES = ("metrics.jsonl", "summary.json")  # one of them is in every run's folder
_POINTS = 2000  # rows of metrics that are kept
_MARK = b'"eval/'  # in rows with a measurement on held-out tasks: there are few, and they are kept by themselves
_END = 200  # bytes: what was measured on held-out tasks stands last in its row
# The beginning of a line of conversations, as runs write it: reading that alone takes a tenth of the time.
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rb'\{"task": (%b), "sample": \d+, "status": ("\w+"), "reason": %b, "reward": (-?[\d.e+-]+|null), "answer": (%b)'
    % (_TEXT, _TEXT, _TEXT)
)
Head = tuple[str, str, float | None, str]  # of a conversation: task, status, reward, the task's answer


def of_set(file: str, name: str) -> str:
    """The file of trajectories that an evaluation leaves of a set of tasks; "": of the run's own."""
    return f"{file}_{name}" if name else file


@dataclass(frozen=True)
class Metrics:
    """The rows of `metrics.jsonl`, thinned out evenly where there are many."""

    rows: list[Json] = field(default_factory=list[Json])
    total: int = 0  # rows in the file
    unreadable: int = 0  # among those looked at: one is being written, or the disk was full

    def stage(self, name: str) -> list[Json]:
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
    overrides: Sequence[str]  # the options of the command line
    versions: Mapping[str, str]
    notes: Sequence[str]

    @property
    def success_at(self) -> float:
        """The reward from which a conversation is a success."""
        try:
            return float(self.settings.get("reward.success_at", "1"))
        except ValueError:
            return 1.0

    def succeeded(self, trajectory: Json) -> bool:
        """Whether it is a success; see `is_success`."""
        return is_success(trajectory.get("status", ""), trajectory.get("reward") or 0.0, self.success_at)

    def outcomes(self, name: str) -> dict[str, list[float]]:
        """Task, answer -> 1.0 or 0.0 for each sample, of the evaluation `name`; {} where it left no trajectories."""
        outcomes: dict[str, list[float]] = {}
        for task, status, reward, answer in heads(self._place / f"{name}.jsonl"):
            if status != "failed":
                of_task = outcomes.setdefault(f"{task} {answer}", [])  # its name alone is that of others too
                of_task.append(float(is_success(status, reward or 0.0, self.success_at)))
        return outcomes

    @property
    def newest(self) -> str:
        """The name of the newest file of conversations: of the evaluation after training, else of a step; "" = none."""
        steps = (path.stem for path in self._place.glob("step_*.jsonl"))
        return AFTER if (self._place / f"{AFTER}.jsonl").is_file() else max(steps, default="")

    def trajectories(self, name: str) -> Path:
        """The file of conversations of this name; "": the newest. Raises ConfigError where there is none."""
        if not (name := name or self.newest):
            raise ConfigError(f"{self.folder} has kept no conversations yet")
        path = self._place / f"{name}.jsonl"
        if not path.is_file():
            names = sorted(file.stem for file in self._place.glob("*.jsonl"))
            steps = [one for one in names if one.startswith("step_")] if name.startswith("step_") else []
            few = " to ".join(steps[:1] + steps[1:][-1:]) or ", ".join(names[:1] + names[1:][-1:])
            kept = f"{few}; mtgrpo show {quote(str(self.folder))} shows the newest"
            raise ConfigError(f"{self.folder} has kept no {name}; it has {kept if names else 'none'}")
        return path

    @property
    def _place(self) -> Path:
        return self.folder / "trajectories"


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The folders of runs among `places`, in place of a sweep's folder those of its runs. Raises ConfigError.

    Without `places` it is the run below the working folder that wrote last.
    """
    runs: list[Path] = []
    for place in places or [last_written(*_FILES).parent]:
        inside = sorted(filter(_is_run, place.glob("*")), key=lambda path: (count(path.name), path.name))
        found = [place] if _is_run(place) else inside
        if not found:
            if (place / LOCK).exists():
                raise ConfigError(f"the run in {place} has written nothing yet; ask again when it has loaded its model")
            deeper = sorted(path.parent for name in _FILES for path in place.glob(f"*/*/{name}"))
            newest = f"; the newest below it is {deeper[-1]}" if deeper else ""
            above = next(filter(_is_run, place.absolute().parents[:2]), None)  # as of a checkpoint
            newest = f"; its run is {above}" if above else newest
            if (place / "config.json").is_file():
                newest += "; it is a model, which eval and play take as model.name"
            raise ConfigError(
                f"{place} holds no run: no metrics.jsonl or summary.json, nor folders that do{newest or beside(place)}"
            )
        runs += found
    return list(dict.fromkeys(path.resolve() for path in runs))


def last_written(*names: str) -> Path:
    """What was written last of `names`, and is not empty, in the runs below the working folder. Raises ConfigError."""
    runs = (".", "*", "*/*", "*/*/*", "multirun/*/*/*")  # hydra.run.dir=runs/a, outputs/DATE/TIME; of a sweep
    found = [Path(path) for run in runs for name in names for path in glob(f"{run}/{name}")]
    written = {path: about.st_mtime for path in found if (about := path.stat()).st_size}
    if not written:
        raise ConfigError(f"no run below {Path.cwd()} has written {' or '.join(names)}: name the folder of one")
    return max(written, key=lambda path: written[path])


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Each by the part of its path in which it differs from the others."""
    shared = Path(os.path.commonpath(folders)) if len(folders) > 1 else folders[0].parent
    return [_read(folder, folder.relative_to(shared).as_posix()) for folder in folders]


def read_metrics(path: Path, points: int = _POINTS) -> Metrics:
    """Every row is looked at; about `points` are kept of training, as many of evaluation, and each stage's last."""
    rows, measured, last = _Thinned(points), _Thinned(points), dict[bytes, Line]()
    for line in read_lines(path):
        (measured if line.text.find(_MARK, -_END) >= 0 else rows).add(line)
        if (stage := line.text.partition(b",")[0]) in last or len(last) < 9:  # a run has fewer
            last[stage] = line
        last[b""] = line
    lines = {line.number: line.text for line in [*rows.kept, *measured.kept, *last.values()]}
    parsed = [parse_row(lines[number], METRICS) for number in sorted(lines)]
    good = [row for row in parsed if row is not None]
    return Metrics(good, last[b""].number if last else 0, len(parsed) - len(good))


def read_settings(folder: Path) -> dict[str, str]:
    """Every option of a run as text, by its full name; {} where the run kept none."""
    values = fit(_yaml(own_file(folder, ".hydra/config.yaml")), SETTINGS) or {}
    hydra = fit(_yaml(own_file(folder, ".hydra/hydra.yaml")), {"hydra": {"runtime": {"choices": SETTINGS}}}) or {}
    choices = hydra.get("hydra", {}).get("runtime", {}).get("choices", {})
    chosen = {group: as_typed(choice) for group, choice in choices.items() if group == "recipe" or group in values}
    return {**chosen, **flat(values)}


def parse_row(line: bytes, shape: Json) -> Json | None:
    """A line of JSON that holds an object, in this shape; None for any other."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fit(row, shape)


def read_object(path: Path, shape: Json) -> Json:
    """The object in a file of JSON, in this shape; {} where there is none. Raises ConfigError for one too large."""
    return (path.is_file() and parse_row(read_bounded(path, MAX_LINE_BYTES), shape)) or {}


def held_out_reward(folder: Path) -> float | None:
    """What a sweep optimises: the mean held-out reward of the run in `folder`, at its end. None where it has none."""
    values = read_object(folder / "summary.json", RESULTS)
    return values.get("eval/reward/after", values.get("eval/reward"))


def conversations(path: Path) -> Iterator[tuple[int, Json]]:
    """Those of a file of trajectories, each with its line, from 0, its tools and its task's metadata.

    Lines that cannot be read are left out, and the metadata that the next one takes from them is not known.
    """
    last: Json = dict.fromkeys(WHERE_THEY_CHANGE)  # None: of a run from before they were written
    for line in read_lines(path):
        row = parse_row(line.text, TRAJECTORY)
        last = last | {"metadata": None} if row is None else {name: row.get(name, last[name]) for name in last}
        if row is not None:
            yield line.number - 1, row | last


def heads(path: Path) -> Sequence[Head]:
    """What a file of trajectories has on each line; one that cannot be read stands there as failed."""
    return _heads(path, path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else ()


@functools.lru_cache(maxsize=2**15)  # files; of fewer than a run has, none would be found again
def _heads(path: Path, _time: int, _size: int) -> Sequence[Head]:
    found: list[Head] = []
    for line in read_lines(path):
        match = _HEAD.match(line.text)
        text = b'{"task": %b, "status": %b, "reward": %b, "answer": %b}' % match.groups() if match else line.text
        row = parse_row(text, TRAJECTORY) or {"status": "failed"}
        answer = sys.intern(str(row.get("answer")))  # that of all siblings, and may be long
        found.append((str(row.get("task")), str(row.get("status")), row.get("reward"), answer))
    return tuple(found)


def count(text: str) -> int:
    """The number that a text of at most 15 digits stands for; 0 for any other."""
    return int(text) if text.isdecimal() and len(text) <= 15 else 0


def step_of(name: str) -> int:
    """The number of the step that a file or folder is of, "step_000010"; 0 for any other."""
    return count(name[5:]) if name.startswith("step_") else 0


def calls(message: Json) -> list[str]:
    """The tool calls of a message, as `name(arguments)`."""
    return [
        shorten(f"{call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})")
        for call in message.get("tool_calls", ())
    ]


def places_of_turns(row: Json) -> list[int]:
    """Where the messages of a conversation are that are its turns: of the assistant's as many of the last as it has."""
    said = [place for place, message in enumerate(row.get("messages", ())) if message.get("role") == "assistant"]
    return said[-len(turns) :] if (turns := row.get("turns")) else []


def facts(row: Json) -> str:
    """How a conversation ended, on a line."""
    status = "truncated, which is no success" if row.get("status") == "truncated" else str(row.get("status"))
    parts = [f"reward {number(row.get('reward'))}", status, str(row.get("reason") or "")]
    parts.append(f"expected {shorten(str(row['answer']))}" if row.get("answer") else "")
    return ", ".join(filter(None, parts))


class _Thinned:
    """Keeps every line at first, then every second, fourth, ... so that there are never more than `most`."""

    def __init__(self, most: int) -> None:
        self.kept: list[Line] = []
        self._most, self._every, self._seen = most, 1, 0

    def add(self, line: Line) -> None:
        if self._seen % self._every == 0:
            self.kept.append(line)
            if len(self.kept) > self._most:
                self.kept = self.kept[::2]
                self._every *= 2
        self._seen += 1


def _read(folder: Path, name: str) -> RunRecord:
    overrides = fit(_yaml(own_file(folder, ".hydra/overrides.yaml")), [str])
    lines = read_last_lines(own_file(folder, "notes.txt"), MAX_LINE_BYTES)[-200:]
    notes = [printable(line.decode(errors="replace")) for line in lines]
    metrics, settings = read_metrics(folder / "metrics.jsonl"), read_settings(folder)
    summary, versions = read_object(folder / "summary.json", RESULTS), read_object(folder / "versions.json", TEXTS)
    return RunRecord(folder, name, metrics, summary, settings, overrides or [], versions, notes)


def own_file(folder: Path, name: str) -> Path:
    """A file of the run, which somebody else may have sent. Raises ConfigError where it is a link to one outside."""
    path, place = folder / name, Path(os.path.realpath(folder / name))  # which takes links that go round in a circle
    if not place.is_relative_to(os.path.realpath(folder)):
        raise ConfigError(f"{path} is a link to {place}, outside of the run; where that is meant: cp -rL {folder} COPY")
    return path


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _yaml(path: Path) -> Any:
    """What a file of settings holds; {} where there is none, or it is no YAML. Raises ConfigError."""
    try:
        return (path.is_file() and parse_yaml(read_bounded(path), path)) or {}
    except BrokenYamlError:
        return {}


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as `section.name`, their values as they are typed."""
    if not isinstance(value, dict) or (prefix and not value):
        return {prefix: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)}
    items = cast("dict[Any, Any]", value).items()
    parts: Iterable[dict[str, str]] = (flat(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in items)
    return {key: text for part in parts for key, text in part.items()}


def as_typed(choice: Any) -> str:
    """The choice of a group as it is typed: a name, or a list of names."""
    return f"[{','.join(map(str, cast('list[Any]', choice)))}]" if isinstance(choice, list) else str(choice)
