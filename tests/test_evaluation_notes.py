"""What an evaluation tells a person beside its numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mtgrpo.config.compose import compose, parse
from mtgrpo.evaluation.findings import NO_TOOLS
from mtgrpo.rewards import Reward
from mtgrpo.rewards.em import EM
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.stages.demonstrated import sent_otherwise
from mtgrpo.stages.evaluate import _notes
from mtgrpo.types import Finish, Group, Message, Status, Task, ToolSpec, Trajectory, Turn

AGENTS = Path(__file__).with_name("calculating_agents.py")
TASK = Task("sum/0", (Message("user", "?"),), "61")


def said(text: str) -> Trajectory:
    turn = Turn([1], [2], [-0.1], [0], Finish.STOP, Message("assistant", text))
    return Trajectory(TASK, turns=[turn])


def notes(reward: Reward, *trajectories: Trajectory, name: str = "") -> list[str]:
    return _notes(name, [Group(TASK, [trajectory]) for trajectory in trajectories], reward)


FIND = ToolSpec("find_row", "The row.", {"type": "object", "properties": {"guest": {"type": "string"}}})


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ([FIND], ""),
        ([dataclasses.replace(FIND, parameters={**FIND.parameters, "additionalProperties": False})], ""),
        ([], "none, and environment.tools are find_row"),
        ([dataclasses.replace(FIND, parameters={"properties": {"guest": True}})], 'find_row("guest": true) '),
        ([dataclasses.replace(FIND, parameters={"properties": ["guest"]})], 'find_row("guest") '),
        ([dataclasses.replace(FIND, name="find")], "find, and environment.tools are find_row"),
        (
            [dataclasses.replace(FIND, description="Where?")],
            """find_row("guest": {"type": "string"}) 'Where?', and environment.tools has find_row(""",
        ),
        (
            [dataclasses.replace(FIND, parameters={"properties": {"name": {"type": "string"}}})],
            """find_row("name": {"type": "string"}) 'The row.', and environment.tools has find_row("guest":""",
        ),
    ],
)
def test_tools_that_an_agent_sends_are_those_of_its_warm_start(sent: list[ToolSpec], told: str, tmp_path: Path) -> None:
    tools = tmp_path / "shown.py"
    tools.write_text('def find_row(guest: str) -> str:\n    """The row."""\n')
    words = ["agent=python", f"agent.function={AGENTS}:echo", f"environment.tools=[{tools}:find_row]"]
    played = said("61")
    played.tools = sent
    for steps in (50, 0):
        notes = sent_otherwise(compose(parse([*words, f"sft.steps={steps}"])).experiment, [played])
        assert len(notes) == bool(told and steps) and all(told in note for note in notes)


def test_answers_without_the_marker_are_noticed_where_none_has_it() -> None:
    assert notes(Numeric(), said("61"), said("#### 61")) == []
    (note,) = notes(Numeric(), said("61"), said("62"), name="hard")
    assert note.startswith("evaluation of hard: none of 2 conversations has an answer") and "reward=em" in note
    assert notes(Numeric(require_marker=False), said("61")) == []
    paid = said("61")
    paid.given = 1.0  # by an agent, which may mark its answers otherwise
    assert notes(Numeric(), paid) == [] and "none of 1 conversations" in notes(Numeric(), paid, said("62"))[0]


def test_failures_and_the_tasks_that_are_left_are_counted() -> None:
    broken = Trajectory(TASK, status=Status.FAILED, reason="OSError: no line")
    assert notes(EM(), said("61"), broken) == [
        "evaluation: 1 of 2 conversations failed, the first because of OSError: no line",
        "evaluation: of 2 tasks 1 could be measured: its numbers are of those",
    ]


def test_rewards_that_never_are_a_success_are_noticed() -> None:
    paid = said("61")
    paid.reward = 0.95
    (note,) = notes(EM(), paid, said("62"))
    assert note == "evaluation: no success: the best reward is 0.95, and reward.success_at, what success takes, is 1"
    assert notes(EM(success_at=0.5), paid) == [] and notes(EM(), said("62")) == []
    paid.reward = -0.02  # each conversation pays for its calls
    assert "no success: the best reward is -0.02, and" in notes(EM(), paid)[0]
    assert "no success: the best reward is 0, and" in notes(EM(), paid, said("62"))[0]


def test_what_is_cut_is_told_where_nothing_succeeds() -> None:
    cut = said("6")
    cut.status, cut.reason = Status.TRUNCATED, "max_new_tokens"
    (note,) = notes(EM(), cut, said("62"))
    assert note == (
        "evaluation: no success: 1 of 2 conversations are cut: set sampling.max_new_tokens higher, or where more room "
        "would not help (look at some with `mtgrpo show`), choose another start (sft.steps, model.name)"
    )
    assert notes(EM(), cut, said("62"), name=NO_TOOLS) == []  # of which no success is expected
    unread = said("6")
    unread.status, unread.reason = Status.TRUNCATED, "policy_error"
    assert notes(EM(), unread) == [] and notes(EM(), cut, unread) == [note]
    right = said("61")
    right.reward = 1.0
    assert notes(EM(), cut, right) == [] and notes(EM(), cut, *[said("62")] * 9) == []
    cut.reason = "max_turns"
    assert "1 of 1 conversations are cut: set environment.max_turns higher, or" in notes(EM(), cut)[0]


def test_contexts_that_hold_no_step_are_told_in_the_place_of_limits() -> None:
    cut = said("6")
    cut.status, cut.reason, cut.condensed, cut.tokens_before = Status.TRUNCATED, "max_turns", 2, 250
    cut.turns += [dataclasses.replace(cut.turns[0], new_context=[1, 5]), dataclasses.replace(cut.turns[0])]
    (note,) = notes(EM(), cut)
    assert note == (
        "evaluation: in 1 of 1 conversations the condenser left nothing but system prompt and task, of contexts of 125 "
        "tokens: set environment.max_context_length, condenser.max_condensed_tokens or condenser.keep_last_n_steps "
        "higher"
    )
    cut.turns[-1].new_context = [1, 6]
    assert "conversations are cut" in notes(EM(), cut)[0]
