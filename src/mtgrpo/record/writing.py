"""What a run leaves in its folder: conversations as JSON Lines or Parquet, results, what it was made with.

`trajectories/step_000010.jsonl` has the conversations of a step, one line per trajectory. Times in it are seconds from
the first thing that is told in the file.
"""

import platform
import shlex
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from mtgrpo.messages import calls_to_dicts, filled, message_to_dict, tool_to_dict
from mtgrpo.record.shapes import FINE_TUNING, TRAJECTORY, Json
from mtgrpo.runtime.files import open_pyarrow, open_table, strict_json, write_whole
from mtgrpo.types import CallRecord, Group, Message, Trajectory, Turn, WeightPush

_WAITS = ("queued_s", "sample_s", "tool_s", "condense_s")  # of a trajectory
_PACKAGES = ("mtgrpo", "torch", "transformers", "peft", "hydra-core", "safetensors", "renderers", "numpy")


def write_summary(folder: Path, values: Mapping[str, Any]) -> None:
    """Write `summary.json` in `folder`: the run's results at a glance."""
    write_whole(folder / "summary.json", strict_json(values, indent=2) + b"\n")


def write_versions(folder: Path, threads: int) -> None:
    """Write the versions of Python, the system and the packages that compute, and the threads, into a run's folder."""
    versions = {"python": platform.python_version(), "system": platform.platform(), "processor": platform.machine()}
    versions["threads"] = str(threads)
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):  # on the path, but not installed
            versions[name] = metadata.version(name)
    write_whole(folder / "versions.json", strict_json(versions, indent=2) + b"\n")


def write_trajectories(
    folder: Path,
    name: str,
    groups: Sequence[Group],
    untrained: Mapping[int, str] | None = None,
    pushes: Sequence[WeightPush] = (),
) -> Path:
    """Write the trajectories of `groups` to `name` under the run's `folder`, all or none; returns the file.

    untrained: why groups, by their number, are not trained. pushes: of weights; those since then are in the first line.
    """
    file, rows = folder / "trajectories" / f"{name}.jsonl", list[dict[str, Any]]()
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    zero_s = min((first for trajectory in everyone if (first := _first_s(trajectory))), default=None)
    for number, group in enumerate(groups):
        why = (untrained or {}).get(number)
        place = {"group": number, **({"untrained_because": why} if why else {})}
        rows += [{**trajectory_row(trajectory, zero_s), **place} for trajectory in group.trajectories]
    for above, row in reversed(list(pairwise(rows))):
        if row["group"] == above["group"]:
            del row["metadata"]
        if row["tools"] == above["tools"]:
            del row["tools"]
    if zero_s is not None and (told := [push for push in pushes if push.ended_s > zero_s]):
        rows[0]["pushes"] = [
            {"version": version, "began_s": _moment(began_s, zero_s), "ended_s": _moment(ended_s, zero_s)}
            for version, began_s, ended_s in told
        ]
    write_whole(file, b"".join(strict_json(row) + b"\n" for row in rows))
    return file


def page_of(file: Path, line: int | None = None) -> str:
    """The command that opens the page of a run at a file of its trajectories, or at the one on `line`, from 0."""
    place = file.stem if line is None else f"{file.stem}/c/{line}"
    return f"mtgrpo view {shlex.quote(str(file.parents[1]))} --at {place}"


def fine_tuning_row(trajectory: Trajectory) -> dict[str, Any]:
    """The conversation in the form that most libraries fine-tune on: `messages`, and the `tools` that were offered."""
    messages, tools = map(message_to_dict, trajectory.messages), map(tool_to_dict, trajectory.tools)
    return {"messages": list(messages), **filled(tools=list(tools))}


def trajectory_row(trajectory: Trajectory, zero_s: float | None = None) -> dict[str, Any]:
    """All of a trajectory but its tokens, for JSON.

    zero_s: from when seconds count, by `time.perf_counter`; None = without times, in which no two runs are alike.
    """
    added, sampled = _spans(trajectory)
    messages = [_message(message, added.get(-1)) for message in trajectory.opening or trajectory.task.messages]
    for number, turn in enumerate(trajectory.turns):
        messages.append(_message(turn.message, sampled[number]))
        messages += [_message(message, added.get(number)) for message in turn.observations]
    names = ("components", "turn_rewards", "outages", "output", "counts", "retried")
    return {
        "task": trajectory.task.id,
        "sample": trajectory.sample_index,
        "status": trajectory.status.value,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "answer": trajectory.task.answer,
        "metadata": dict(trajectory.task.metadata),
        "messages": messages,
        "tools": list(map(tool_to_dict, trajectory.tools)),
        "turns": [_turn(turn, zero_s) for turn in trajectory.turns],
        **filled(
            **{name: getattr(trajectory, name) for name in names},
            untrained=[_message(turn.message) for turn in trajectory.untrained],
            calls=[_call(call, zero_s) for call in trajectory.calls],
            times={} if zero_s is None else _times(trajectory, zero_s),
        ),
    }


def _spans(trajectory: Trajectory) -> tuple[dict[int, list[int]], list[list[int]]]:
    """Where messages stand among the tokens of their contexts, from the first token to that after the last.

    First, by the turn that they answer (-1: none), of all that a turn was told together, with what the template adds;
    then of each turn's own.
    """
    added: dict[int, list[int]] = {}
    sampled: list[list[int]] = []
    for turn in trajectory.turns:
        before = sampled[turn.parent][1] if turn.parent >= 0 else 0
        start = before + len(turn.new_context)
        added.setdefault(turn.parent, [before, start])
        sampled.append([start, start + len(turn.output)])
    return added, sampled


def _first_s(trajectory: Trajectory) -> float:
    """When it began to wait for its place; 0.0 = not known."""
    asked = min((turn.asked_s for turn in trajectory.turns if turn.asked_s), default=0.0)
    return trajectory.began_s - trajectory.queued_s if trajectory.began_s else asked


def _moment(at: float, zero_s: float) -> float:
    return round(at - zero_s, 4)


def _times(trajectory: Trajectory, zero_s: float) -> dict[str, float]:
    times = {name: round(took, 4) for name in _WAITS if (took := getattr(trajectory, name))}
    return {"began_s": _moment(trajectory.began_s, zero_s), **times} if trajectory.began_s else times


def _call(call: CallRecord, zero_s: float | None) -> dict[str, Any]:
    row = {"name": call.name, "outcome": call.outcome.value, **filled(retries=call.retries, why=call.why)}
    if zero_s is not None and call.began_s:
        row["began_s"], row["seconds"] = _moment(call.began_s, zero_s), round(call.seconds, 4)
    return row


def _message(message: Message, tokens: list[int] | None = None) -> dict[str, Any]:
    """A message without its empty fields; `tokens`: where it stands."""
    said = {"reasoning": message.reasoning, "tool_calls": calls_to_dicts(message), "name": message.name}
    return {"role": message.role, "content": message.content, **filled(**said, error=message.error, tokens=tokens)}


def _turn(turn: Turn, zero_s: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"new_context_tokens": len(turn.new_context), "output_tokens": len(turn.output)}
    row["finish"], row["parent"] = turn.finish.value, turn.parent
    if turn.auxiliary:
        row["auxiliary"] = True
    if turn.opens_with:
        row["opens_with"] = list(map(_message, turn.opens_with))
    row["version_min"], row["version_max"] = min(turn.versions, default=None), max(turn.versions, default=None)
    if zero_s is not None and turn.ended_s:
        row["asked_s"], row["ended_s"] = _moment(turn.asked_s, zero_s), _moment(turn.ended_s, zero_s)
    return row


@contextmanager
def open_rows(path: Path, fine_tuning: bool) -> Generator[Callable[[Sequence[Mapping[str, Any]]], None]]:
    """How rows get into `path`: those of `fine_tuning_row`, or else of `trajectory_row`.

    With the suffix .parquet it is a table with a row group for each call, which can be read once all is written. What
    has no fixed columns (arguments of calls, tools, components) is JSON in it. Raises ConfigError without pyarrow.
    """
    if path.suffix == ".parquet":
        arrow, _ = open_pyarrow(f"collect.file={path.name}")
        columns = FINE_TUNING if fine_tuning else TRAJECTORY
        schema = arrow.schema([(name, _type(arrow, shape)) for name, shape in columns.items()])
        with open_table(path, schema) as write:
            yield lambda rows: write([_cell(row, columns) for row in rows])
    else:
        with path.open("wb", buffering=0) as file:
            yield lambda rows: file.writelines(strict_json(row) + b"\n" for row in rows)


def _type(arrow: Any, shape: Any) -> Any:
    """The type of a column: of a number or text, of a list, of an object; text of what has no fixed shape."""
    if isinstance(shape, list):
        return arrow.list_(_type(arrow, shape[0]))
    if _has_columns(shape):
        return arrow.struct([(name, _type(arrow, inner)) for name, inner in shape.items()])
    if shape in (int, float, bool):
        return {int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}[shape]
    return arrow.string()


def _cell(value: Any, shape: Any) -> Any:
    """A value as its column takes it: where that is text, what is none as JSON."""
    if value is None or shape in (int, float, bool):
        return value
    if isinstance(shape, list):
        return [_cell(each, shape[0]) for each in value]
    if _has_columns(shape):
        return {name: _cell(value.get(name), inner) for name, inner in shape.items()}
    return (value.encode("utf-8", "backslashreplace") if isinstance(value, str) else strict_json(value)).decode()


def _has_columns(shape: Any) -> TypeGuard[Json]:
    return isinstance(shape, dict) and str not in shape
