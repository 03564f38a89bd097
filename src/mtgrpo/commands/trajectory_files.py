"""Conversations of a run for the viewers of others; here in the Agent Trajectory Interchange Format, ATIF-v1.7.

It is described at harborframework.com/docs; a conversation is a file. Where the tokens of a step are kept, a turn has
those that the policy was sent and that it sampled, their log-probabilities, and in `extra` what they were paid.
"""

from collections.abc import Sequence
from pathlib import Path

from mtgrpo import __version__
from mtgrpo.commands.inspect_log import inspect_log
from mtgrpo.messages import filled
from mtgrpo.record.reading import RunRecord, conversations, find_runs, places_of_turns, read_runs, step_of
from mtgrpo.record.shapes import Json
from mtgrpo.record.tokens import TokenRecord, read_tokens
from mtgrpo.runtime.files import put_whole, strict_json

VERSION = "ATIF-v1.7"


def write_conversations(place: Path, step: int | None, form: str, out: Path, dry_run: bool) -> int:
    """Write the conversations of a step of the run in `place`, by default the newest; their number. ConfigError.

    form: "atif", a file each; "inspect", a log of inspect_ai.
    """
    (run, *_) = read_runs(find_runs([place]))
    path = run.trajectories("" if step is None else f"step_{step:06d}")
    name, rows = path.stem, list(conversations(path))
    if form == "inspect":
        log = inspect_log(run, path, [row for _, row in rows])
        written = log["eval"]["created"][:19].replace(":", "-")  # names of logs begin so
        made = {f"{written}+00-00_{name.replace('_', '-')}_log": log}
    else:
        record = read_tokens(run.folder, step_of(name))
        files = ((line, trajectory(run, name, line, row, record)) for line, row in rows)
        made = {f"{name}_{line:06d}": found for line, found in files if found["steps"]}  # some fail before they begin
    if not dry_run:
        with put_whole(out) as partial:
            partial.mkdir()
            for file, content in made.items():
                (partial / f"{file}.json").write_bytes(strict_json(content, indent=1))
    return len(rows) if form == "inspect" else len(made)


def trajectory(run: RunRecord, name: str, line: int, row: Json, record: TokenRecord | None) -> Json:
    """A conversation, the one on `line` of the file `name`, as the format has it."""
    messages, turns = row.get("messages", []), row.get("turns", [])
    number = {place: turn for turn, place in enumerate(places_of_turns(row))}
    recorded = (record.turns(line) if record is not None else None) or range(0)
    steps: list[Json] = []
    for place, message in enumerate(messages):
        role = message.get("role")
        if role == "tool" and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], message)
            continue
        source = {"assistant": "agent", "system": "system"}.get(str(role), "user")
        step: Json = {"step_id": len(steps) + 1, "source": source, "message": message.get("content", "")}
        if source == "agent":
            step |= _said(message, len(steps) + 1)
            if (turn := number.get(place)) is not None:
                step["llm_call_count"] = 1
                step["metrics"] = _metrics(record, recorded, turn) if record and turn < len(recorded) else {}
                step["metrics"]["completion_tokens"] = turns[turn].get("output_tokens") or 0
        steps.append(step)
    names = ("task", "sample", "status", "reason", "reward", "components", "turn_rewards", "answer", "group")
    tools = row.get("tools")
    agent: Json = {"name": "mtgrpo", "version": __version__, "model_name": run.settings.get("model.name", "unknown")}
    return {
        **{"schema_version": VERSION, "session_id": run.name, "trajectory_id": f"{run.name}/{name}/{line}"},
        "agent": agent | ({"tool_definitions": tools} if isinstance(tools, list) and tools else {}),
        "steps": steps,
        "final_metrics": {
            "total_completion_tokens": sum(turn.get("output_tokens") or 0 for turn in turns),
            "total_steps": len(steps),
        },
        "extra": {"file": name, **{key: row[key] for key in names if key in row}},
    }


def _said(message: Json, step: int) -> Json:
    """What an agent's message has beside its text."""
    calls = [
        {"tool_call_id": f"call_{step}_{place}", "function_name": str(call.get("name"))}
        | {"arguments": given if isinstance(given := call.get("arguments"), dict) else {"arguments": given}}
        for place, call in enumerate(message.get("tool_calls", []))
    ]
    extra = filled(unreadable=message.get("error"))
    return filled(reasoning_content=message.get("reasoning"), tool_calls=calls, extra=extra)


def _observe(step: Json, message: Json) -> None:
    """Add the answer of a tool to the step that called it: the calls are answered in their order."""
    results: list[Json] = step.setdefault("observation", {"results": []})["results"]
    calls: Sequence[Json] = step.get("tool_calls", [])
    called = {"source_call_id": calls[len(results)]["tool_call_id"]} if len(results) < len(calls) else {}
    results.append({**called, "content": message.get("content", "")})


def _metrics(record: TokenRecord, turns: range, place: int) -> Json:
    (tokens, _, entries), arrays = record.tokens(turns, place), record.arrays
    sampled = entries.stop - entries.start
    return {
        **{"prompt_tokens": len(tokens) - sampled, "prompt_token_ids": tokens[: len(tokens) - sampled]},
        **{"completion_token_ids": tokens[len(tokens) - sampled :], "logprobs": arrays["behaviour"][entries].tolist()},
        "extra": {name: arrays[name][entries].tolist() for name in ("advantage", "version") if name in arrays},
    }
