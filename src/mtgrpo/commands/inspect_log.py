"""Conversations of a step as a log of inspect_ai (inspect.aisi.org.uk), for its viewer and what else reads such logs.

A task is a sample there, a sibling an epoch of it; the reward and what it is made of are scores.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from mtgrpo import __version__
from mtgrpo.record.reading import RunRecord
from mtgrpo.record.shapes import Json
from mtgrpo.runtime.text import is_number

VERSION = 2  # of the format


def inspect_log(run: RunRecord, path: Path, rows: Sequence[Json]) -> Json:
    """The log of the conversations `rows`, those of the file `path`."""
    created = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
    model = f"mtgrpo/{run.settings.get('model.name', 'unknown')}"
    groups: dict[str, Any] = {}  # the first of each task: a task may come twice in a step
    samples = [_sample(row, model, groups) for row in rows]
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, score in sample["scores"].items():
            values.setdefault(name, []).append(score["value"])
    scores = [
        {"name": name, "scorer": name, "metrics": {"mean": {"name": "mean", "value": mean(known)}}}
        for name, known in values.items()
    ]
    ids = list(dict.fromkeys(sample["id"] for sample in samples))
    return {
        **{"version": VERSION, "status": "success"},
        "eval": {
            **{"eval_id": f"{run.name}-{path.stem}", "run_id": run.name, "created": created, "task": path.stem},
            **{"task_id": path.stem, "model": model, "packages": {"mtgrpo": __version__}},
            "dataset": {"name": run.settings.get("task", ""), "samples": len(ids), "sample_ids": ids},
            "config": {"epochs": max((sample["epoch"] for sample in samples), default=1)},
        },
        "results": {"total_samples": len(rows), "completed_samples": len(rows), "scores": scores},
        "stats": {"started_at": created, "completed_at": created},
        "samples": samples,
    }


def _sample(row: Json, model: str, groups: dict[str, Any]) -> Json:
    task, group = str(row.get("task")), row.get("group")
    name = task if groups.setdefault(task, group) == group else f"{task} (group {group})"
    messages = _messages(row.get("messages", []))
    asked = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    said = next((message for message in reversed(messages[asked:]) if message["role"] == "assistant"), None)
    scored = {"reward": row.get("reward"), **row.get("components", {})}
    failed = {"message": row.get("reason") or "failed", "traceback": "", "traceback_ansi": ""}
    return {
        **{"id": name, "epoch": (row.get("sample") or 0) + 1, "target": str(row.get("answer") or "")},
        **{"input": messages[:asked] or task, "messages": messages},
        "output": {"model": model, "choices": [{"message": said, "stop_reason": "stop"}] if said else []},
        "scores": {name: {"value": value} for name, value in scored.items() if is_number(value)},
        "metadata": {
            key: row[key] for key in ("status", "reason", "turn_rewards", "untrained_because") if row.get(key)
        },
        **({"error": failed} if row.get("status") == "failed" else {}),
    }


def _messages(messages: Sequence[Json]) -> list[Json]:
    """As inspect has them: each answer of a tool names its call, in the order of the calls."""
    found: list[Json] = []
    unanswered = iter(list[Json]())
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content", "")
        one: Json = {"id": str(number), "role": role if role in ("system", "assistant", "tool") else "user"}
        one["content"] = content
        if one["role"] == "assistant":
            calls = one["tool_calls"] = [
                {"id": f"call_{number}_{place}", "type": "function", "function": str(call.get("name"))}
                | {"arguments": arguments if isinstance(arguments := call.get("arguments"), dict) else {}}
                for place, call in enumerate(message.get("tool_calls", []))
            ]
            unanswered = iter(calls)
            if message.get("reasoning"):
                thought = {"type": "reasoning", "reasoning": message["reasoning"]}
                one["content"] = [thought, {"type": "text", "text": content}]
        elif one["role"] == "tool" and (call := next(unanswered, None)):
            one |= {"tool_call_id": call["id"], "function": call["function"]}
        found.append(one)
    return found
