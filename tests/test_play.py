"""`mtgrpo play`: a person and a policy, with its tools, in the terminal."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import Run
from mtgrpo import preset
from mtgrpo.commands.play import _Person, run_serving
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.types import Message, Task, ToolCall

ENDING = str(list(range(2048))).replace(" ", "")  # every token ends a turn
TASK = Task("play/0", (Message("user", "What is 2 + 3?"),))


async def test_tools_answer_the_model_and_the_person_goes_on_where_it_would_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("And 4 more?\n\n"))
    async with _Person(world=ToolUse(tools=["calculator"])).conversation(TASK) as (person, opening):
        assert opening.messages == TASK.messages and [tool.name for tool in opening.tools] == ["calculator"]
        called = await person.step(Message("assistant", tool_calls=(ToolCall("calculator", {"expression": "2+3"}),)))
        assert [message.content for message in called.messages] == ["5"] and not called.done
        asked = await person.step(Message("assistant", "It is 5."))
        assert [(message.role, message.content) for message in asked.messages] == [("user", "And 4 more?")]
        assert not asked.done
        assert (await person.step(Message("assistant", "9\x1b[2J"))).done  # an empty line
    shown = capsys.readouterr().out
    assert 'model: -> calculator({"expression": "2+3"})\ncalculator: 5\n' in shown
    assert "model: It is 5." in shown and "\x1b" not in shown


async def test_where_an_agent_answered_the_person_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("row 5\n"))
    called = Message("assistant", tool_calls=(ToolCall("calculator", {"expression": "2+3"}),))
    async with _Person(world=ToolUse(tools=["calculator"]), answers=True).conversation(TASK) as (person, _):
        told = await person.step(called)
        assert told.messages == (Message("tool", "row 5", name="calculator"),) and not told.done
        assert (await person.step(called)).done  # the end of the input


TILL = """
from dataclasses import dataclass
from mtgrpo.tools import Tool

@dataclass
class Till(Tool):
    'Buys a thing.'

    async def start(self, task):
        print("opened for", task.messages[-1].content, task.metadata["prices"])

    def __call__(self, thing: str) -> str:
        return thing
"""


async def test_the_key_of_a_served_policy_is_shown_and_kept_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = asyncio.create_task(run_serving(preset("calculator", "log=[console,jsonl]"), tmp_path))
    shown = ""
    while "API_KEY=" not in shown and not serving.done():
        await asyncio.sleep(0.02)
        shown += capsys.readouterr().out
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    keys = set(re.findall(r"^export \w+_API_KEY=(\S+)$", shown + capsys.readouterr().out, re.MULTILINE))
    kept = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert keys and not [key for key in keys if key in kept] and "export" not in kept


@pytest.mark.real
def test_words_of_ones_own_come_with_the_row_that_tools_read(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("till.py").write_text(TILL)
    rows = [{"id": name, "prompt": f"Buy {name}.", "answer": "1", "prices": {name: 1}} for name in ("tea", "rice")]
    for file in ("train.jsonl", "held_out.jsonl"):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n\n\n\n\n\nAgain.\n\n"))
    words = [
        "task=jsonl",
        "task.path=train.jsonl",
        "task.val_files=[held_out.jsonl]",
        "model.name=tiny-calculator",
        "sft.steps=0",
    ]
    words += ["environment.tools=[till.py:Till]", "sampling.max_new_tokens=2", f"sampling.stop_ids={ENDING}"]
    code, out, err = run("play", *words, "log=[console]", "hydra.run.dir=run")
    assert code == 0, err
    assert "tools see the row of the last example with your words, at first of tea" in " ".join(out.split())
    opened = re.findall(r"opened for (.*?) (\{.*?\})", out)[-4:]
    tea, rice = "{'tea': 1}", "{'rice': 1}"
    assert opened == [("Hello.", tea), ("Buy tea.", tea), ("Buy rice.", rice), ("Again.", rice)]
    assert "failed" not in out


@pytest.mark.real
def test_a_checkpoint_is_talked_to(run: Run, place: object, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sft.steps=1", "trainer.steps=1", "rollout.prompts_per_step=1", "eval.tasks=1", "eval.samples=1"]
    code, _, err = run("train", *words, "rollout.group_size=2", "sampling.max_new_tokens=8", "hydra.run.dir=run")
    assert code == 0, err
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 + 3?\n\n\n"))
    code, out, err = run("play", "checkpoint=run/checkpoints/step_000001", "log=[console]")
    assert code == 0, err
    assert out.count("model: ") >= 2 and "example: " in out  # an empty line took one of the held-out tasks
