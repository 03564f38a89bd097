"""What a run leaves in its folder: conversations as JSON Lines or Parquet, results, what it was made with.

`trajectories/step_000010.jsonl` has the conversations of a step, one line per trajectory.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from mtgrpo.messages import message_to_dict, tool_to_dict
from mtgrpo.record.shapes import FINE_TUNING, TRAJECTORY, Json
from mtgrpo.runtime.files import open_pyarrow, open_table, strict_json, write_whole
from mtgrpo.types import Group, Message, Trajectory, Turn

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
    folder: Path, name: str, groups: Sequence[Group], untrained: Mapping[int, str] | None = None
) -> Path:
    """Write the trajectories of `groups` to `name` under the run's `folder`, all or none; returns the file.

    untrained: why groups, by their number, are not trained.
    """
    file, rows = folder / "trajectories" / f"{name}.jsonl", list[dict[str, Any]]()
    for number, group in enumerate(groups):
        why = (untrained or {}).get(number)
        place = {"group": number, **({"untrained_because": why} if why else {})}
        rows += [{**trajectory_row(trajectory), **place} for trajectory in group.trajectories]
    for above, row in reversed(list(pairwise(rows))):  # tools are written where they change
        if row["tools"] == above["tools"]:
            del row["tools"]
    write_whole(file, b"".join(strict_json(row) + b"\n" for row in rows))
    return file


def fine_tuning_row(trajectory: Trajectory) -> dict[str, Any]:
    """The conversation in the form that most libraries fine-tune on: `messages`, and the `tools` that were offered."""
    row: dict[str, Any] = {"messages": [message_to_dict(message) for message in trajectory.messages]}
    return {**row, "tools": list(map(tool_to_dict, trajectory.tools))} if trajectory.tools else row


def trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory but its tokens, for JSON."""
    messages = list(trajectory.opening or trajectory.task.messages)
    for turn in trajectory.turns:
        messages += [turn.message, *turn.observations]
    names = ("components", "turn_rewards", "outages", "output", "counts", "retried")
    optional: dict[str, Any] = {name: getattr(trajectory, name) for name in names}
    optional["untrained"] = [_message(turn.message) for turn in trajectory.untrained]
    return {
        "task": trajectory.task.id,
        "sample": trajectory.sample_index,
        "status": trajectory.status.value,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "answer": trajectory.task.answer,
        "messages": [_message(message) for message in messages],
        "tools": list(map(tool_to_dict, trajectory.tools)),
        "turns": [_turn(turn) for turn in trajectory.turns],
        **{name: value for name, value in optional.items() if value},
    }


def _message(message: Message) -> dict[str, Any]:
    """A message without its empty fields."""
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    optional = {"reasoning": message.reasoning, "tool_calls": calls, "name": message.name, "error": message.error}
    return {"role": message.role, "content": message.content, **{name: part for name, part in optional.items() if part}}


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "new_context_tokens": len(turn.new_context),
        "output_tokens": len(turn.output),
        "finish": turn.finish.value,
        "parent": turn.parent,
        **({"auxiliary": True} if turn.auxiliary else {}),
        "version_min": min(turn.versions, default=None),
        "version_max": max(turn.versions, default=None),
    }


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
