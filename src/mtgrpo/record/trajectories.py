"""Conversations, readable: `trajectories/step_000010.jsonl` has those of a step, one line per trajectory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtgrpo.strict_json import strict_json
from mtgrpo.types import Group, Message, ToolSpec, Trajectory, Turn


def write(folder: Path, name: str, groups: Sequence[Group]) -> Path:
    """Write the trajectories of `groups` to `name` under the run's `folder`, all or none; returns the file."""
    target = folder / "trajectories"
    target.mkdir(parents=True, exist_ok=True)
    lines = [strict_json(record(trajectory)) for group in groups for trajectory in group.trajectories]
    partial, file = target / f".{name}.partial", target / f"{name}.jsonl"
    partial.write_bytes(b"".join(line + b"\n" for line in lines))
    os.replace(partial, file)
    return file


def fine_tuning(trajectory: Trajectory, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """The conversation in the form that most libraries fine-tune on: `messages`, and the `tools` that were offered."""
    row: dict[str, Any] = {"messages": [_plain(message) for message in trajectory.messages]}
    if tools:
        functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools]
        row["tools"] = [{"type": "function", "function": function} for function in functions]
    return row


def _plain(message: Message) -> dict[str, Any]:
    plain = _message(message)
    plain.pop("error", None)
    if "tool_calls" in plain:
        plain["tool_calls"] = [{"type": "function", "function": call} for call in plain["tool_calls"]]
    if "reasoning" in plain:
        plain["reasoning_content"] = plain.pop("reasoning")
    return plain


def record(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory but its tokens, for JSON."""
    messages = list(trajectory.opening or trajectory.task.messages)
    for turn in trajectory.turns:
        messages += [turn.message, *turn.observations]
    return {
        "task": trajectory.task.id,
        "sample": trajectory.sample_index,
        "status": trajectory.status.value,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "answer": trajectory.task.answer,
        "messages": [_message(message) for message in messages],
        "turns": [_turn(turn) for turn in trajectory.turns],
        **({"components": trajectory.components} if trajectory.components else {}),
        **({"turn_rewards": trajectory.turn_rewards} if trajectory.turn_rewards else {}),
        **({"outages": trajectory.outages} if trajectory.outages else {}),
        **({"output": trajectory.output} if trajectory.output else {}),
        **({"counts": trajectory.counts} if trajectory.counts else {}),
        **({"untrained": [_message(turn.message) for turn in trajectory.untrained]} if trajectory.untrained else {}),
    }


def _message(message: Message) -> dict[str, Any]:
    """A message without its empty fields."""
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        record["reasoning"] = message.reasoning
    if message.tool_calls:
        record["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    if message.name:
        record["name"] = message.name
    if message.error:
        record["error"] = message.error
    return record


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
