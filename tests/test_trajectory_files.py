"""`mtgrpo export RUN --to atif`: the rules of the format, and the tokens that were sampled."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import PROJECT
from mtgrpo.commands.export import main
from mtgrpo.errors import ConfigError
from recorded import ANSWERS, TOKENIZER, make_recorded

PYTHON = PROJECT / ".venv-agents" / "bin" / "python"
READY = PYTHON.exists()
# The fields that the format has, of each kind of object; it allows no others.
STEP = {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "metrics", "extra"}
STEP |= {"timestamp", "model_name", "reasoning_effort", "is_copied_context", "llm_call_count"}
METRICS = {"prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "prompt_token_ids", "logprobs", "extra"}
METRICS |= {"completion_token_ids"}
OF_AGENTS = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}


def check(found: dict[str, Any]) -> None:
    """The rules by which Harbor's reader refuses a file."""
    assert found["schema_version"] == "ATIF-v1.7" and found["steps"]
    assert found.keys() <= {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"}
    assert found["agent"].keys() <= {"name", "version", "model_name", "tool_definitions"}
    assert [step["step_id"] for step in found["steps"]] == list(range(1, len(found["steps"]) + 1))
    for step in found["steps"]:
        assert step.keys() <= STEP and isinstance(step["message"], str)
        assert step["source"] == "agent" or (step["source"] in ("system", "user") and not step.keys() & OF_AGENTS)
        assert step.get("metrics", {}).keys() <= METRICS
        called = {call["tool_call_id"] for call in step.get("tool_calls", [])}
        results = step.get("observation", {}).get("results", [])
        assert {result["source_call_id"] for result in results if "source_call_id" in result} <= called
        for call in step.get("tool_calls", []):
            assert call.keys() == {"tool_call_id", "function_name", "arguments"}
            assert isinstance(call["arguments"], dict)


def exported(run: Path, *words: str) -> list[dict[str, Any]]:
    out = run.parent / "out"
    assert main([str(run), "--to", "atif", "--out", str(out), *words]) == 0
    found = [json.loads(path.read_text()) for path in sorted(out.iterdir())]
    for one in found:
        check(one)
    return found


def test_each_conversation_has_its_tokens(tmp_path: Path) -> None:
    found = exported(make_recorded(tmp_path / "run"), "--step", "1")
    assert len(found) == 2 * len(ANSWERS)
    (asked, *said) = found[0]["steps"]
    assert (asked["source"], asked["message"]) == ("user", "17 * 20?")
    assert [step["source"] for step in said] == ["agent", "user", "agent"]
    metrics = [step["metrics"] for step in said if step["source"] == "agent"]
    texts = [TOKENIZER.decode(one["prompt_token_ids"] + one["completion_token_ids"]) for one in metrics]
    assert texts[1].startswith(texts[0]) and texts[1].endswith("assistant\n#### 391<|im_end|>")
    assert metrics[0]["logprobs"] == [-0.5] * 5 and metrics[0]["extra"]["advantage"] == [0.75] * 5
    assert metrics[0]["completion_tokens"] == 5 == len(metrics[0]["completion_token_ids"])
    assert found[0]["extra"] | {"task": "sums/0", "reward": 1.0, "file": "step_000001", "group": 0} == found[0]["extra"]


def test_calls_of_tools_have_their_answers(tmp_path: Path) -> None:
    run = make_recorded(tmp_path / "run", steps=1)
    path = run / "trajectories" / "step_000001.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    calls = [{"name": "calculator", "arguments": {"expression": "1"}}, {"name": "clock", "arguments": "now"}]
    row["messages"] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning": "hm"},
        *({"role": "tool", "content": answer} for answer in ("1", "noon", "more")),
        {"role": "assistant", "content": "<tool_call>", "error": "not JSON"},
        {"role": "tool", "content": "error: not JSON"},
    ]
    failed = {**row, "messages": [], "turns": [], "status": "failed"}
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, failed)))
    (found,) = exported(run)
    called, unreadable = (step for step in found["steps"] if step["source"] == "agent")
    assert called["reasoning_content"] == "hm" and called["tool_calls"][1]["arguments"] == {"arguments": "now"}
    results = called["observation"]["results"]
    assert [result["content"] for result in results] == ["1", "noon", "more"]
    assert [result.get("source_call_id") for result in results] == ["call_3_0", "call_3_1", None]
    assert unreadable["extra"] == {"unreadable": "not JSON"}
    assert unreadable["observation"] == {"results": [{"content": "error: not JSON"}]}


def test_a_log_of_inspect_has_siblings_as_epochs_and_rewards_as_scores(tmp_path: Path) -> None:
    run = make_recorded(tmp_path / "run", steps=1)
    path = run / "trajectories" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["components"] = {"format": 0.5}
    rows[0]["messages"][1] |= {"tool_calls": [{"name": "clock", "arguments": {}}], "reasoning": "hm"}
    rows[0]["messages"][2] = {"role": "tool", "content": "noon"}
    rows[7] |= {"task": "sums/0", "status": "failed", "reward": None, "reason": "down"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(run), "--to", "inspect", "--out", str(tmp_path / "logs")]) == 0
    (file,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\+00-00_step-000001_log\.json", file.name)
    log = json.loads(file.read_text())
    names = [(sample["id"], sample["epoch"]) for sample in log["samples"]]
    assert names[:5] == [*(("sums/0", epoch) for epoch in range(1, 5)), ("sums/1", 1)]
    assert names[7] == ("sums/0 (group 1)", 4) and log["samples"][7]["error"]["message"] == "down"
    first = log["samples"][0]
    assert first["scores"] == {"reward": {"value": 1.0}, "format": {"value": 0.5}} and first["target"] == "391"
    called, answer = first["messages"][1:3]
    assert called["tool_calls"][0] | {"id": answer["tool_call_id"], "function": "clock"} == called["tool_calls"][0]
    assert called["content"][0] == {"type": "reasoning", "reasoning": "hm"} and first["input"] == first["messages"][:1]
    assert log["results"]["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(4 / 7)


@pytest.mark.real
@pytest.mark.skipif(not READY, reason="there is no .venv-agents: make agents-env makes it")
def test_inspect_reads_the_log(tmp_path: Path) -> None:
    run = make_recorded(tmp_path / "run")
    assert main([str(run), "--to", "inspect", "--out", str(tmp_path / "logs")]) == 0
    code = (
        "import sys\nfrom inspect_ai.log import list_eval_logs, read_eval_log\n(one,) = list_eval_logs(sys.argv[1])\n"
        "log = read_eval_log(one)\nprint(log.status, len(log.samples), log.samples[0].scores['reward'].value)"
    )
    done = subprocess.run([PYTHON, "-c", code, str(tmp_path / "logs")], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["success", "8", "1.0"], done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "atif", "--step", "9"], "has kept no step_000009"),
        (["--step", "1"], "--step 1 chooses conversations: with --to hf name the checkpoint itself"),
    ],
)
def test_what_is_not_there_is_said(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        main([str(make_recorded(tmp_path / "run")), "--out", str(tmp_path / "out"), *words])


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([str(make_recorded(tmp_path / "run")), "--to", "atif", "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    )
    assert capsys.readouterr().out == "8 conversations would be written\n" and not (tmp_path / "out").exists()
