"""Agents of others from PyPI play and learn, as they are; `make agents-env` installs them into .venv-agents."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from test_conversation import ANSWER, CALL

PROJECT = Path(__file__).resolve().parent.parent
PYTHON = PROJECT / ".venv-agents" / "bin" / "python"
AGENTS = PROJECT / "tests" / "foreign_agents.py"
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "#### 391"}}\n</tool_call>'
ECHO = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((17 * 23)) > n; cat n"}}\n</tool_call>'
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '#### 391'"
SUBMIT = f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': DONE}})}\n</tool_call>"

READY = list(PYTHON.parents[1].glob(".ready-*"))
pytestmark = pytest.mark.skipif(not READY, reason="there is no .venv-agents: make agents-env makes it")


def run(*words: str, timeout_s: float) -> str:
    path = os.pathsep.join([str(PROJECT / "src"), str(PROJECT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [str(PYTHON), *words], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def played(name: str, *outputs: str) -> dict[str, Any]:
    found = json.loads(run(str(AGENTS), name, json.dumps(outputs), timeout_s=300).splitlines()[-1])
    assert (found["status"], found["reason"], found["reward"]) == ("completed", "", 1.0)
    assert found["counts"]["requests"] == len(outputs)
    return found


@pytest.mark.real
@pytest.mark.parametrize("name", ["openai_agents", "langgraph"])
def test_an_agent_that_keeps_its_history_is_exact(name: str) -> None:
    found = played(name, CALL, f"So be it.\n{CALL}", ANSWER)
    assert [parent for parent, _, _ in found["turns"]] == [-1, 0, 1]
    assert (found["counts"]["exact"], found["output"]) == (2, ANSWER)


@pytest.mark.real
def test_smolagents_which_rewrites_each_call_drifts_and_is_recorded() -> None:
    found = played("smolagents", CALL, FINAL)
    assert [parent for parent, _, _ in found["turns"]] == [-1, -1]
    assert (found["counts"]["drifted"], found["output"]) == (1, "#### 391")
    assert found["counts"]["ignored/tool_choice"] == 2


@pytest.mark.real
def test_mini_swe_agent_runs_its_commands() -> None:
    found = played("mini_swe_agent", ECHO, SUBMIT)
    assert [parent for parent, _, _ in found["turns"]] == [-1, 0]
    assert "#### 391" in found["output"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openai_agents", "langgraph"])
def test_an_agent_of_others_learns_the_calculator(name: str, tmp_path: Path) -> None:
    """The recipe calculator, with its warm start, where the agent calls the tool."""
    words = ["agent=python", f"agent.function={AGENTS}:{name}", "agent.max_requests=6", "log=[jsonl]"]
    run("-m", "mtgrpo", "train", *words, f"hydra.run.dir={tmp_path}", timeout_s=7000)
    assert json.loads((tmp_path / "summary.json").read_text())["eval/success/after"] >= 0.85
