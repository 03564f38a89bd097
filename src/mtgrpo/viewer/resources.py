"""What the page shows of runs, as JSON by name. It reads folders and keeps no state but a cache of what it has read.

names, runs                   the runs, and what a list tells of each
0/metrics                     the curves of run 0, its notes and settings
0/index                       which conversations there are: tasks and rewards, file by file
0/step_000010/list            those of a file, a line of facts each
0/step_000010/7               the conversation on line 7, from 0, with its tokens where they are kept
0/step_000010/forest          the runs of tokens of its prefix trees
0/step_000010/timeline        when its conversations waited, asked the policy and called tools, and weights were pushed
"""

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtgrpo.config.helptext import summary
from mtgrpo.config.options import options
from mtgrpo.errors import ConfigError
from mtgrpo.evaluation.statistics import mean_over_tasks
from mtgrpo.record import reading
from mtgrpo.record.shapes import TRAJECTORY, WHERE_THEY_CHANGE, Json
from mtgrpo.record.tokens import recorded_steps
from mtgrpo.runtime.files import read_line, read_lines
from mtgrpo.runtime.text import is_number, printable
from mtgrpo.types import EVALUATION, LEARNING
from mtgrpo.viewer.tokens import forest, of_conversation, of_lines

_FILE = re.compile(r"[\w-]{1,80}")
_SHORT = 160  # characters of a message in a list
_POINTS = 60  # of a curve in the list of runs
_LANES = 256  # of a timeline
Stamp = tuple[tuple[int, int], ...]  # sizes and times of files


class Runs:
    """The folders of runs, by number."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = list(folders)
        shared = Path(os.path.commonpath(folders)) if len(folders) > 1 else folders[0].parent
        self._names = [folder.relative_to(shared).as_posix() for folder in folders]

    def read(self, name: str) -> Any:
        """The resource of this name; None where there is none. Raises ConfigError for what no run has written."""
        match name.split("/"):
            case ["names"]:
                return self._names
            case ["runs"]:
                return [self._summary(number) for number in range(len(self._folders))]
            case [number, "metrics"] if folder := self._folder(number):
                return self._metrics(folder)
            case [number, "index"] if folder := self._folder(number):
                return _index(folder)
            case [number, file, what] if (folder := self._folder(number)) and _FILE.fullmatch(file):
                path = folder / "trajectories" / f"{file}.jsonl"
                return self._of_file(folder, path, what) if path.is_file() else None
            case _:
                return None

    def names(self) -> Iterator[str]:
        """All resources that there are."""
        yield from ("names", "runs")
        for number, folder in enumerate(self._folders):
            yield from (f"{number}/metrics", f"{number}/index")
            steps = set(recorded_steps(folder))
            for path in _files(folder):
                place = f"{number}/{path.stem}"
                yield f"{place}/list"
                yield from (f"{place}/{line}" for line in range(len(listed(path)[0])))
                yield f"{place}/timeline"
                if reading.step_of(path.stem) in steps:
                    yield f"{place}/forest"

    def _folder(self, number: str) -> Path | None:
        known = re.fullmatch("[0-9]{1,5}", number) and int(number) < len(self._folders)
        return self._folders[int(number)] if known else None

    def _of_file(self, folder: Path, path: Path, what: str) -> Any:
        rows, offsets = listed(path)
        step = reading.step_of(path.stem)
        if what == "list":
            seen = of_lines(folder, step) if step else {}
            return {"file": path.stem, "rows": [row | seen.get(row["line"], {}) for row in rows]}
        if what in ("forest", "timeline"):
            return _timeline(path) if what == "timeline" else forest(folder, step) if step else None
        if not (re.fullmatch("[0-9]{1,7}", what) and int(what) < len(rows)):
            return None
        line, facts = int(what), rows[int(what)]
        row = reading.parse_row(read_line(path, offsets[line][0]), TRAJECTORY) or {}
        for name, told in offsets[line][1].items():
            row[name] = (reading.parse_row(read_line(path, told), TRAJECTORY) or {}).get(name)
        siblings = [other["line"] for other in rows if other["group"] == facts["group"]]
        tokens = of_conversation(folder, step, line) if step else None
        return {"row": row, "facts": facts, "siblings": siblings, "tokens": tokens}

    def _summary(self, number: int) -> Json:
        run = _run(self._folders[number], _stamp(self._folders[number]))
        learning, settings = run.metrics.stage(LEARNING), run.settings
        rewards = [row["reward/mean"] for row in learning if is_number(row.get("reward/mean"))]
        thin = max(1, -(-len(rewards) // _POINTS))
        warnings = [note for note in run.notes if note.startswith("step ")]
        return {
            **{"name": self._names[number], "recipe": settings.get("recipe", ""), "task": settings.get("task", "")},
            **{"algorithm": settings.get("algorithm", ""), "model": settings.get("model.name", "")},
            **{"step": learning[-1].get("step", 0) if learning else 0, "ended": bool(run.summary)},
            **{"steps": reading.count(settings.get("trainer.steps", "")), "rewards": rewards[::thin]},
            **{"before": _success(run, reading.BEFORE), "after": _success(run, reading.AFTER)},
            "success": _meaning(run),
            **{"notes": len(run.notes), "warnings": len(warnings), "newest": [*run.notes, *warnings][-1:]},
            "written": max((time for time, _ in _stamp(run.folder)), default=0) / 1e9,
        }

    def _metrics(self, folder: Path) -> Json:
        run = _run(folder, _stamp(folder))
        steps, step = defaultdict[int, Json](dict), 0
        for row in run.metrics.rows:  # an evaluation, before training or after it, is of the step that has just ended
            step = row.get("step", 0) if row.get("stage") == LEARNING else step
            steps[step] |= row if row.get("stage") in (LEARNING, EVALUATION) else {}
        names = sorted({name for row in steps.values() for name in row} - {"stage", "step"})
        columns = {name: [row.get(name) for row in steps.values()] for name in names}
        return {
            **{"name": self._names[self._folders.index(folder)], "steps": list(steps)},
            **{"columns": columns, "notes": run.notes, "overrides": run.overrides, "versions": run.versions},
            **{"settings": run.settings, "ended": bool(run.summary), "success": _meaning(run)},
        }


def _files(folder: Path) -> list[Path]:
    """Those of conversations in the order of training: what was evaluated before it, its steps, what was after it."""
    last = reading.AFTER, reading.GREEDY[reading.AFTER]
    found = sorted((folder / "trajectories").glob("*.jsonl"), key=lambda path: (path.stem.startswith(last), path))
    return [path for path in found if _FILE.fullmatch(path.stem) and path.is_file()]


def _stamp(folder: Path) -> Stamp:
    paths = (folder / name for name in ("metrics.jsonl", "summary.json", "notes.txt", ".hydra/config.yaml"))
    return tuple((stat.st_mtime_ns, stat.st_size) for path in paths if path.is_file() and (stat := path.stat()))


@functools.lru_cache(maxsize=32)
def _run(folder: Path, _stamp: Stamp) -> reading.RunRecord:
    """What it left; where that is refused, a note of why."""
    try:
        return reading.read_runs([folder])[0]
    except (ConfigError, OSError) as error:
        return reading.RunRecord(folder, folder.name, reading.Metrics(), {}, {}, [], {}, [printable(str(error))])


def _success(run: reading.RunRecord, name: str) -> list[float] | None:
    """Held-out success with its interval, as a report has them."""
    if not (outcomes := run.outcomes(name)):
        return None
    found = mean_over_tasks(list(outcomes.values()))
    return [found.mean, found.low, found.high]


def _meaning(run: reading.RunRecord) -> str:
    """What a success is in this run, and what the rewards that come with the package say of themselves."""
    chosen = [("reward", name) for name in run.settings.get("reward", "").strip("[]").split(",")]
    if ("reward", "environment") in chosen:
        chosen.append(("environment", run.settings.get("environment", "")))
    said = [f"{group} {name}: {summary(options(group)[name])}" for group, name in chosen if name in options(group)]
    rule = f"Success: the conversation ended by itself, within all limits, with a reward of {run.success_at:g} or more."
    return " ".join([rule, *said])


def _index(folder: Path) -> Json:
    """Tasks and rewards of every conversation: each file has the numbers of its tasks among `tasks`."""
    tasks: dict[str, int] = {}
    files: list[Json] = []
    for path in _files(folder):
        found = reading.heads(path)
        numbers = [tasks.setdefault(task, len(tasks)) for task, *_ in found]
        rewards = [None if reward is None else round(reward, 6) for _, _, reward, _ in found]
        failed = [line for line, (_, status, *_) in enumerate(found) if status == "failed"]
        files.append({"name": path.stem, "tasks": numbers, "rewards": rewards, "failed": failed})
    return {"tasks": list(tasks), "files": files, "recorded": recorded_steps(folder)}


def listed(path: Path) -> tuple[list[Json], list[tuple[int, dict[str, int]]]]:
    """Facts of each conversation of a file; where its line begins, and those of what is written where it changes."""
    return _listed(path, path.stat().st_mtime_ns, path.stat().st_size)


@functools.lru_cache(maxsize=8)
def _listed(path: Path, _time: int, _size: int) -> tuple[list[Json], list[tuple[int, dict[str, int]]]]:
    rows, offsets, told = list[Json](), list[tuple[int, dict[str, int]]](), dict[str, int]()
    for line in read_lines(path):
        row = reading.parse_row(line.text, TRAJECTORY) or {}
        told = told | {name: line.offset for name in WHERE_THEY_CHANGE if name in row}
        rows.append(_facts(row, line.number - 1))
        offsets.append((line.offset, told))
    return rows, offsets


def _timeline(path: Path) -> Json:
    """When the conversations of a file waited, began, asked the policy and called tools, and when weights were pushed.

    Of the slowest ones where there are many.
    """
    lanes, pushes = list[Json](), list[Json]()
    for line in read_lines(path):
        row = reading.parse_row(line.text, TRAJECTORY) or {}
        pushes += row.get("pushes", [])
        turns = [turn for turn in row.get("turns", []) if "ended_s" in turn]
        ended_s = max((turn["ended_s"] or 0 for turn in turns), default=0)
        told = {"calls": row.get("calls", []), "times": row.get("times", {}), "ended_s": ended_s}
        lanes.append({"line": line.number - 1, "turns": turns, **told})
    lanes.sort(key=lambda lane: -lane["ended_s"])
    return {"lanes": [lane for lane in lanes[:_LANES] if lane["ended_s"]], "pushes": pushes, "count": len(lanes)}


def _facts(row: Json, line: int) -> Json:
    messages, turns = row.get("messages", []), row.get("turns", [])
    answers = [str(message.get("content", "")) for message in messages if message.get("role") == "tool"]
    by_policy = reading.places_of_turns(row)
    opening = messages[: by_policy[0]] if by_policy else messages  # examples are in it too, before the question
    asked = next((message for message in reversed(opening) if message.get("role") == "user"), {})
    said = messages[by_policy[-1]] if by_policy else {}
    return {
        **{name: row.get(name) for name in ("task", "sample", "status", "reason", "reward", "answer", "components")},
        **{"line": line, "group": row.get("group", -1), "turns": len(turns), "retried": len(row.get("retried", []))},
        "tokens": sum(turn.get("output_tokens") or 0 for turn in turns),
        "contexts": sum(turn.get("parent") == -1 and not turn.get("auxiliary") for turn in turns),
        "unreadable": sum(bool(message.get("error")) for message in messages),
        "outages": len(row.get("outages", [])),
        "errors": sum(answer.startswith("error:") for answer in answers),  # as tools answer mistakes
        "untrained_because": row.get("untrained_because", ""),
        "asked": str(asked.get("content", ""))[:_SHORT],
        "said": str(row.get("output") or said.get("content", ""))[:_SHORT],
    }
