"""Pages of amounts: the task, its tool, its demonstrations, and what condensing makes of them."""

from __future__ import annotations

import asyncio
import copy
import itertools

import pytest

from mtgrpo.condensers import When
from mtgrpo.condensers.keep_last import KeepLast
from mtgrpo.condensers.summarize import Summarize
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.rollout.demonstrations import demonstrate
from mtgrpo.tasks import Split
from mtgrpo.tasks.ledger import Ledger
from mtgrpo.types import SUMMARY, Message, Task, ToolCall, Trajectory
from test_conversation import chat


def tasks(split: Split = Split.train, count: int = 30, **settings: float) -> list[Task]:
    return list(itertools.islice(Ledger(**settings).stream(split, 0), count))


def environment() -> ToolUse:
    return ToolUse(tools=["calculator", "next_page"], max_turns=40)


def test_amounts_of_the_two_splits_have_nothing_in_common() -> None:
    seen = [{amount for task in tasks(split, 200) for amount in task.metadata["pages"]} for split in Split]
    assert seen[0].isdisjoint(seen[1])
    assert all(8 <= len(task.metadata["pages"]) <= 12 for task in tasks())
    assert all(int(task.answer) == sum(task.metadata["pages"]) for task in tasks())


def test_pages_come_one_by_one_to_each_conversation_by_itself() -> None:
    shared = environment()

    async def read(task: Task, count: int) -> list[str]:
        playing = copy.copy(shared)
        await playing.start(task)
        call = Message("assistant", tool_calls=(ToolCall("next_page", {}),))
        return [(await playing.step(call)).messages[0].content for _ in range(count)]

    first, second = tasks(count=2)
    assert asyncio.run(read(first, 3)) == [str(amount) for amount in first.metadata["pages"][:3]]
    pages = second.metadata["pages"]
    assert asyncio.run(read(second, len(pages) + 2)) == [*map(str, pages), "no more pages", "no more pages"]


def test_a_task_without_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="task=ledger"):
        asyncio.run(copy.copy(environment()).start(Task("other/1", (Message("user", "?"),))))


@pytest.mark.parametrize("right", [1.0, 0.0])
def test_demonstrations_follow_the_environment(right: float) -> None:
    """Every call is answered as the tools would, and the answers are right exactly where they should be."""

    async def follow(task: Task, messages: tuple[Message, ...]) -> None:
        playing = copy.copy(environment())
        await playing.start(task)
        said = [message for message in messages if message.name != SUMMARY]
        for message, following in itertools.pairwise(said):
            if message.role == "assistant":
                assert (await playing.step(message)).messages == (following,)

    source, grades = Ledger(right=right), []
    for task in tasks():
        messages = source.demonstration(task, 3)
        asyncio.run(follow(task, messages))
        opening = asyncio.run(copy.copy(environment()).start(task))
        shown = asyncio.run(demonstrate(task, opening, messages, chat()))
        assert not any(turn.auxiliary for turn in shown.turns)
        grades.append(Numeric().reward(shown))
    assert set(grades) == {right}


def shown(condenser: KeepLast | Summarize, task: Task) -> Trajectory:
    opening = asyncio.run(copy.copy(environment()).start(task))
    messages = Ledger().demonstration(task, 3)
    return asyncio.run(demonstrate(task, opening, messages, chat(), condenser, 600, 60))


def test_condensed_conversations_fit_where_the_whole_does_not() -> None:
    for task in tasks(count=5):
        opening = asyncio.run(copy.copy(environment()).start(task))
        whole = asyncio.run(demonstrate(task, opening, Ledger().demonstration(task, 3), chat()))
        longest = max(len(whole.context(i)) for i in range(len(whole.turns)))
        for condenser in (KeepLast(keep_last_n_steps=2), Summarize(when=When.every_turn)):
            short = shown(condenser, task)
            contexts = [len(short.context(i)) for i in range(len(short.turns))]
            assert max(contexts) < longest / 2
            assert Numeric().reward(short) == 1


def test_what_is_needed_is_in_every_context() -> None:
    """With the last two steps, or with the summary, the total so far and the last page are visible at every sum."""
    (task,) = tasks(count=1)
    for condenser in (KeepLast(keep_last_n_steps=2), Summarize(when=When.every_turn)):
        for number, turn in enumerate(trajectory := shown(condenser, task).turns):
            for call in turn.message.tool_calls:
                if call.name == "calculator":
                    text = chat()._safe.decode(shown(condenser, task).context(number))  # type: ignore[attr-defined]
                    assert all(part in text for part in str(call.arguments["expression"]).split(" + "))
        assert len(trajectory) > 16
