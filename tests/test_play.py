"""`mtgrpo play`: a person and a policy, with its tools, in the terminal."""

from __future__ import annotations

import io
import sys

import pytest

from conftest import Run
from mtgrpo.commands.play import _Person
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.types import Message, Task, ToolCall

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


@pytest.mark.real
def test_a_checkpoint_is_talked_to(run: Run, place: object, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["sft.steps=1", "trainer.steps=1", "rollout.prompts_per_step=1", "eval.tasks=1", "eval.samples=1"]
    code, _, err = run("train", *words, "rollout.group_size=2", "sampling.max_new_tokens=8", "hydra.run.dir=run")
    assert code == 0, err
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 + 3?\n\n\n"))
    code, out, err = run("play", "checkpoint=run/checkpoints/step_000001", "log=[console]")
    assert code == 0, err
    assert out.count("model: ") >= 2 and "example: " in out  # an empty line took one of the held-out tasks
