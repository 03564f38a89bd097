"""Whatever a policy writes, no reward and no tool makes a failed trajectory of it: it is worth 0 or is told so.

Rewards and tools are those that the folders offer, so that a new one is fed too.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.environments.tool_use import OnOutage, ToolUse
from mtgrpo.errors import PolicyError
from mtgrpo.parts import RunContext, extension
from mtgrpo.rewards import Reward, Score, opened, scores
from mtgrpo.tools import Tool
from mtgrpo.types import CallOutcome, Finish, Message, Status, Task, ToolCall, ToolSpec, Trajectory, Turn
from scripted import ScriptedEngine
from test_conversation import make_runner
from test_conversation import said as says
from test_judge import Server
from test_sequence_classifier import saved

MEGABYTE = 2**20
NEWCOMER = Path(__file__).parents[1] / "newcomer"

UNITS = [  # which a regular expression, a parser or a recursion in some grader could choke on
    "9", "1,", ",111", "1.", "9/", "- ", "$", "\\boxed{", "\\frac{", "\\frac1", "{", "}", "\\text{", "####", "= ", "x=",
    "*", "* ", "*\n", "\n", "\n ", " ", "-\n", "***", "[", "[[\n", "]", "<<", ">>", '"', "'", "`", "```\n", "\\", "A",
    "a ", "A.", "p.", "P.S", "...", "!? ", "<think>", "<answer>", "</answer>", "the ", "\u0300", "\u200b", "(", "U.S. ",
    "can't ", "SECTION 1 ", "Score: 9", "[id] ", "\u09e6", "\u4e07", "\u2044", "\x00", "\ud800", "\x1b[31m",
]  # fmt: skip
HUGE = [unit * MEGABYTE for unit in ("9", "a", " ", "\n", "{", "\ud800", "\x00")]
TEXTS = [
    *(begin + unit * 5_000 + end for unit in UNITS for begin, end in (("", ""), ("#### ", "x"), ("\\boxed{", "}"))),
    *HUGE,
    *(f"#### {number}" for number in (10**400, -(10**400), "nan", "inf", "-inf", "1e999", "1/0", "0/0", "9" * 4301)),
    "#### 1/" + "9" * 4301,
    "\\boxed{" + "\\frac{1}{" * 500 + "1" + "}" * 501,
    "```json\n" + "[" * 100_000,
    "```json\n" + "9" * 5000,
    "<answer>" + "\ud800\x00" + "</answer>",
    "".join(map(chr, range(1, 3000))),
]


def deep(levels: int) -> Any:
    inner: Any = 1
    for _ in range(levels):
        inner = [inner]
    return inner


VALUES: list[Any] = [
    10**400, -(10**400), 2**63, 1e308, math.nan, math.inf, -math.inf, True, None, "", "\ud800", "\x00", "9" * 5000, 0,
    -1, 1.5, [], {}, {"a": {"a": 1}}, deep(400), deep(100_000), "x" * MEGABYTE, ["x"] * 10_000, {"\ud800": 1},
]  # fmt: skip
BROKEN: list[Any] = [None, [], [1], "x", 7]  # in the place of arguments

KINDS = [
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}),
    ("change_case:capital_word_frequency", {"capital_frequency": 3, "capital_relation": "less than"}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 3}),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}),
    ("detectable_content:number_placeholders", {"num_placeholders": 3}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 3}),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "a"}),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 3, "let_relation": "at least"}),
    ("combination:two_responses", {}),
    ("startend:quotation", {}),
    ("language:response_language", {"language": "en"}),
]
PROPERTIES = {name: {"type": name} for name in ("string", "integer", "number", "boolean", "object")} | {
    "array": {"type": "array", "items": {"type": "integer"}}
}
METADATA = {
    "values": [1, 2],
    "gold": ["p1"],
    "tools": [{"name": "f", "description": "d", "parameters": {"type": "object", "properties": PROPERTIES}}],
    "calls": [{"f": {"string": ["a", ""], "integer": [1, ""], "number": [1.5, ""], "boolean": [True, ""],
                     "object": [{"a": [1, ""]}, ""], "array": [[1, 2], ""]}}],
    "instruction_id_list": [kind for kind, _ in KINDS],
    "kwargs": [kwargs for _, kwargs in KINDS],
    "pages": ["one", "two"],
}  # fmt: skip
TASK = Task("task/1", (Message("user", "?"),), "9", METADATA)

# What an option needs beside its defaults; one of which nothing stands here is made without settings.
OF_REWARDS: dict[str, dict[str, Any]] = {
    "composed": {"of": ["numeric", "em"]},
    "numeric": {"require_marker": False},
    "math_verify": {"timeout_s": 0.1},
}
IN_A_SANDBOX = {"reasoning_gym", "unit_tests", "python"}  # which their own tests attack
REWARDS = sorted(set(extension.options("mtgrpo.rewards", Reward)) - IN_A_SANDBOX)
TOOLS = sorted(set(extension.options("mtgrpo.tools", Tool)) - IN_A_SANDBOX)
LONGEST = {"context_efficiency": 2_000, "ifeval": 1_000, "reward_model": 2_000, "judge": 2_000, "math_verify": 900}
FEW = {"math_verify": 40, "reward_model": 60}  # texts; each takes a process, or a model
CALLS_PER_CHARACTER = 100


def said(text: str, *calls: ToolCall) -> Trajectory:
    shown = (Message("tool", text, name="search"),)
    turns = [Turn([], [7], [0.0], [0], Finish.STOP, Message("assistant", text, tool_calls=calls), observations=shown)]
    return Trajectory(TASK, turns=turns)


def calls() -> list[tuple[ToolCall, ...]]:
    """Messages with calls of the function that the task offers, and of others."""
    names = [*PROPERTIES, "unknown", ""]
    made = [(ToolCall("f", {name: value}),) for name in names for value in VALUES]
    made += [(ToolCall(name, {}),) for name in ("f", "g", "", "\ud800", "x" * MEGABYTE)]
    return [*made, (ToolCall("f", {name: 1 for name in map(str, range(10_000))}),), (ToolCall("f", {}),) * 1000]


@contextmanager
def bounded(length: int) -> Iterator[None]:
    """Asserts that so many functions at most are called, which is the same on every machine."""
    count, most = 0, 1_000_000 + CALLS_PER_CHARACTER * length

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert count <= most, f"{count:,} calls for {length:,} characters"


@pytest.fixture
def reward(name: str, tmp_path: Path) -> Iterator[Reward]:
    """The option of that name; beside a judge there is a server, and a reward model has a small model."""
    kind: Any = extension.options("mtgrpo.rewards", Reward)[name]
    if name == "judge":
        with Server("I will not say.", "Score: 3", 400) as server:
            yield kind(url=server.url, model="wise", cache=str(tmp_path), backoff_s=0, retries=0)
    elif name == "reward_model":
        yield kind(model_name=str(saved(tmp_path / "model")), device="cpu")
    else:
        yield kind(**OF_REWARDS.get(name, {}))


async def graded(reward: Reward, trajectories: list[Trajectory], folder: Path) -> None:
    """Asserts that each is scored, within the bound."""
    async with opened(reward, RunContext(folder, print, {})) as running:
        for one in trajectories:
            with bounded(len(one.final)):
                [found] = await scores(running, [one])
            assert isinstance(found, Score), (one.final[:50], one.turns[0].message.tool_calls[:1], found)
            assert math.isfinite(found.total)


@pytest.mark.parametrize("name", REWARDS)
async def test_no_text_makes_a_reward_fail(name: str, reward: Reward, tmp_path: Path) -> None:
    texts = [text[: LONGEST.get(name)] for text in TEXTS]
    await graded(reward, [said(text) for text in texts[:: len(texts) // FEW.get(name, len(texts))]], tmp_path)


@pytest.mark.parametrize("name", REWARDS)
async def test_no_call_makes_a_reward_fail(name: str, reward: Reward, tmp_path: Path) -> None:
    trajectories = [said("#### 9", *some) for some in calls()]
    await graded(reward, trajectories[:: len(trajectories) // FEW.get(name, len(trajectories))], tmp_path)


@pytest.mark.parametrize("name", ["reward.py:Short", "rewards.py:Tidy", "rewards.py:Judge"])
async def test_nothing_makes_a_reward_of_ones_own_fail(name: str, tmp_path: Path) -> None:
    kind = extension.find_class("mtgrpo.rewards", f"{NEWCOMER}/{name}", Reward)
    made: Any = kind(wait_s=0) if "Judge" in name else kind()
    trajectories = [said(text) for text in TEXTS] + [said("", *some) for some in calls()]
    await graded(made, trajectories, tmp_path)


@dataclass
class Refuses(Reward):
    """Cannot grade some texts."""

    def reward(self, trajectory: Trajectory) -> float:
        if trajectory.final != "good":
            raise PolicyError("nothing to grade")
        return 1.0


async def test_what_a_reward_cannot_grade_is_worth_nothing_at_once() -> None:
    found = await scores(Refuses(), [said("good"), said("bad")])
    assert found == [Score(1.0), Score(0.0)]
    runner = replace(make_runner(ScriptedEngine(lambda key, turn: says("bad")), SingleTurn()), reward=Refuses())
    group = await runner.run_group(TASK, 2)
    assert [(one.status, one.reward) for one in group.trajectories] == [(Status.COMPLETED, 0.0)] * 2


# --- tools ---


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """What an option of a tool needs beside its defaults."""
    if name == "search":
        (folder / "corpus.jsonl").write_text(json.dumps({"id": "p1", "title": "Rome", "text": "It is old."}))
        return {"corpus": str(folder / "corpus.jsonl"), "index": str(folder / "index")}
    return {"servers": {"m": {"command": ["python", "-m", "mtgrpo.tools.market"]}}} if name == "mcp" else {}


def hostile_calls(spec: ToolSpec) -> list[ToolCall]:
    """Every value for every argument, the others as the schema wants them, and what is no arguments at all."""
    properties: dict[str, Any] = spec.parameters.get("properties", {})
    fitting: dict[str, Any] = {"string": "Gold", "integer": 12, "number": 1.5, "boolean": True}
    usual = {name: fitting.get(schema.get("type"), "Gold") for name, schema in properties.items()}
    made = [ToolCall(spec.name, {**usual, name: value}) for name in [*usual, "unknown", "\ud800"] for value in VALUES]
    made += [ToolCall(spec.name, {**usual, name: text}) for name in usual for text in TEXTS if len(text) < 300_000]
    return [*made, *(ToolCall(spec.name, broken) for broken in BROKEN), ToolCall(spec.name, {})]


async def outcomes(environment: ToolUse, messages: list[Message], folder: Path) -> Counter[CallOutcome]:
    """What all calls of the messages lead to, in one conversation. Asserts that none fails and all are answered."""
    found: Counter[CallOutcome] = Counter()
    async with environment.open(RunContext(folder, print, {})) as run, run.conversation(TASK) as (talk, opening):
        offered = [call for spec in opening.tools for call in hostile_calls(spec)]
        for message in [*(Message("assistant", tool_calls=(call,)) for call in offered), *messages]:
            reply = await talk.step(message)
            assert reply.outages == [], (str(message.tool_calls)[:200], reply.calls[0].why)
            found.update(call.outcome for call in reply.calls)
    return found


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.real) if one == "mcp" else one for one in TOOLS])
async def test_no_call_makes_a_tool_fail(name: str, tmp_path: Path) -> None:
    tools = {name: settings_of(name, tmp_path)}
    environment = ToolUse(tools=tools, call_retries=0, on_outage=OnOutage.observe, call_timeout_s=20)
    many = Message("assistant", tool_calls=(ToolCall("unknown", {}),) * 1000)
    found = await outcomes(environment, [many, Message("assistant", error="\ud800")], tmp_path)
    assert found[CallOutcome.unknown] == 1000 and found[CallOutcome.refused] > len(VALUES)
    assert CallOutcome.outage not in found and CallOutcome.timed_out not in found


async def test_no_call_makes_a_tool_of_ones_own_fail(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Gold\n")
    # At once for every number: one that computes for ever would do so in its thread, beside all the tests that follow.
    (tmp_path / "tool.py").write_text("def double(number: int) -> int:\n    'Twice a number.'\n    return 2 * number\n")
    tools = {
        f"{tmp_path}/tool.py:double": None,
        f"{NEWCOMER}/tool_with_settings.py:search": {"book": str(tmp_path / "book.txt")},
    }
    environment = ToolUse(tools=tools, call_retries=0, on_outage=OnOutage.observe)
    found = await outcomes(environment, [], tmp_path)
    assert found[CallOutcome.refused] > len(VALUES) and CallOutcome.outage not in found
