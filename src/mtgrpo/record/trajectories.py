"""Conversations, readable: `trajectories/step_000010.jsonl` has those of a step, one line per trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtgrpo.messages import message_to_dict, tool_to_dict
from mtgrpo.runtime.files import strict_json, write_whole
from mtgrpo.types import Group, Message, ToolSpec, Trajectory, Turn


def write(folder: Path, name: str, groups: Sequence[Group]) -> Path:
    """Write the trajectories of `groups` to `name` under the run's `folder`, all or none; returns the file."""
    file = folder / "trajectories" / f"{name}.jsonl"
    lines = [strict_json(record(trajectory)) for group in groups for trajectory in group.trajectories]
    write_whole(file, b"".join(line + b"\n" for line in lines))
    return file


def fine_tuning(trajectory: Trajectory, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """The conversation in the form that most libraries fine-tune on: `messages`, and the `tools` that were offered."""
    row: dict[str, Any] = {"messages": [message_to_dict(message) for message in trajectory.messages]}
    return {**row, "tools": list(map(tool_to_dict, tools))} if tools else row


def record(trajectory: Trajectory) -> dict[str, Any]:
    """All of a trajectory but its tokens, for JSON."""
    messages = list(trajectory.opening or trajectory.task.messages)
    for turn in trajectory.turns:
        messages += [turn.message, *turn.observations]
    optional = {
        "components": trajectory.components,
        "turn_rewards": trajectory.turn_rewards,
        "outages": trajectory.outages,
        "output": trajectory.output,
        "counts": trajectory.counts,
        "untrained": [_message(turn.message) for turn in trajectory.untrained],
    }
    return {
        "task": trajectory.task.id,
        "sample": trajectory.sample_index,
        "status": trajectory.status.value,
        "reason": trajectory.reason,
        "reward": trajectory.reward,
        "answer": trajectory.task.answer,
        "messages": [_message(message) for message in messages],
        "turns": [_turn(turn) for turn in trajectory.turns],
        **{name: value for name, value in optional.items() if value},
    }


def _message(message: Message) -> dict[str, Any]:
    """A message without its empty fields."""
    optional = {
        "reasoning": message.reasoning,
        "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        "name": message.name,
        "error": message.error,
    }
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
