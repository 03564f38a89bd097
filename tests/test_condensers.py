"""What the model still sees, and that what it said is trained as it said it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mtgrpo.advantages.rewards import AUXILIARY, rewards_of
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.batch.forest import build_batch
from mtgrpo.condensers import Condenser, Conversation, When, messages_of
from mtgrpo.condensers.attention import Attention
from mtgrpo.condensers.drop_oldest import DropOldest
from mtgrpo.condensers.keep_last import KeepLast
from mtgrpo.condensers.none import Whole
from mtgrpo.condensers.recall import Recall, bm25
from mtgrpo.condensers.summarize import Summarize
from mtgrpo.condensers.truncate_tools import TruncateTools
from mtgrpo.engines import Key
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError
from mtgrpo.rollout.conversation import CONDENSE, run_rollout
from mtgrpo.rollout.demonstrations import demonstrate
from mtgrpo.types import (
    CallRecord,
    Completion,
    Finish,
    Group,
    Limits,
    Message,
    Sampling,
    Status,
    Task,
    ToolSpec,
    Trajectory,
)
from scripted import ScriptedEngine
from test_conversation import TASK, WIDE, chat, said, tokenizer

SPEC = ToolSpec("next", "The next page.", {"type": "object", "properties": {}})
CALL = '<tool_call>\n{"name": "next", "arguments": {}}\n</tool_call>'


@dataclass
class Pages(Environment):
    """Answers every call with the next page."""

    pages: Sequence[str] = field(default_factory=list)

    async def start(self, task: Task) -> Opening:
        self.at = 0
        return Opening(task.messages, (SPEC,))

    async def step(self, message: Message) -> Reply:
        self.at += 1
        if self.at > len(self.pages):
            return Reply(done=True)
        return Reply((Message("tool", self.pages[self.at - 1], name="next"),), calls=(CallRecord("next"),))


def played(
    outputs: Sequence[str | list[int]],
    pages: Sequence[str],
    condenser: Condenser,
    limits: Limits = WIDE,
    max_new_tokens: int = 60,
    **environment: Any,
) -> tuple[Trajectory, list[list[int]]]:
    """One conversation, and every context that the engine was given."""
    tokens = [said(output) if isinstance(output, str) else output for output in outputs]
    engine = ScriptedEngine(lambda _, turn: tokens[turn])

    async def run() -> Trajectory:
        async with engine.conversation(Key(0, "train/1", TASK.id, 0)) as sample:
            sampling = Sampling(max_new_tokens=max_new_tokens)
            pages_of = Pages(pages=pages, **environment)
            return await run_rollout(TASK, pages_of, chat(), sample, sampling, limits, condenser)

    trajectory = asyncio.run(run())
    return trajectory, [context for _, context in engine.asked]


def opened(*messages: Message, tools: Sequence[ToolSpec] = (SPEC,)) -> list[int]:
    return chat().open([*TASK.messages, *messages], tools)


def step(text: str, answer: str) -> tuple[Message, ...]:
    return (Message("assistant", text), Message("tool", answer, name="next"))


def condensed(
    condenser: Condenser, steps: Sequence[tuple[Message, ...]], budget: int = 10**6, shares: Sequence[float] = ()
) -> list[str]:
    """The contents after the opening; a message costs as many tokens as it has characters."""

    async def ask(question: Message) -> Message:
        return Message("assistant", f"asked: {question.content}")

    async def attention(asked: Sequence[tuple[Message, ...]]) -> list[float]:
        assert list(asked) == list(steps)
        return list(shares)

    conversation = Conversation(
        opening=TASK.messages,
        steps=tuple(steps),
        budget=budget,
        count=lambda messages: sum(len(message.content) for message in messages[len(TASK.messages) :]),
        ask=ask,
        attention=attention,
    )
    found = asyncio.run(condenser.condense(conversation))
    assert tuple(found[: len(TASK.messages)]) == TASK.messages
    return [message.content for message in found[len(TASK.messages) :]]


STEPS = [step("first", "aaaa"), step("second", "bbbb"), step("third", "cccc")]


# --- one by one


def test_none_leaves_everything() -> None:
    assert condensed(Whole(), STEPS) == ["first", "aaaa", "second", "bbbb", "third", "cccc"]


@pytest.mark.parametrize(
    ("count", "budget", "expected"),
    [
        (2, 99, ["second", "bbbb", "third", "cccc"]),
        (1, 99, ["third", "cccc"]),
        (2, 9, ["third", "cccc"]),
        (2, 8, []),
        (0, 99, []),
    ],
)
def test_keep_last(count: int, budget: int, expected: list[str]) -> None:
    assert condensed(KeepLast(keep_last_n_steps=count), STEPS, budget) == expected


@pytest.mark.parametrize(("budget", "steps"), [(28, 3), (27, 2), (19, 2), (18, 1), (9, 1), (8, 0)])
def test_drop_oldest(budget: int, steps: int) -> None:
    expected = [message.content for message in messages_of([], STEPS[3 - steps :])]
    assert condensed(DropOldest(fill=1), STEPS, budget) == expected


def test_drop_oldest_leaves_room_to_grow_into() -> None:
    long = [step("a" * 5, "b" * 5) for _ in range(20)]
    assert len(condensed(DropOldest(fill=0.5), long, 100)) == 2 * 5


def test_the_newest_step_stays_though_it_is_longer_than_the_share() -> None:
    assert condensed(DropOldest(fill=0.5), STEPS, 9) == ["third", "cccc"]
    assert condensed(DropOldest(fill=0.5), STEPS, 8) == []


def test_truncate_tools_cuts_old_replies_and_nothing_else() -> None:
    long = [step("a" * 50, "b" * 50), step("c", "d" * 7), step("e", "f" * 50)]
    found = condensed(TruncateTools(max_reply_chars=5, keep_last_n_steps=1), long)
    assert found == ["a" * 50, "bbbbb [...]", "c", "d" * 7, "e", "f" * 50]
    assert condensed(TruncateTools(max_reply_chars=5), long, 60) == ["c", "d" * 7, "e", "f" * 50]


def test_recall_brings_back_what_has_to_do_with_the_last_step() -> None:
    steps = [
        step("look", "the red house"),
        step("look", "a blue car"),
        step("look", "nothing"),
        step("go", "the blue one"),
    ]
    found = condensed(Recall(keep_last_n_steps=1, recalled_steps=1), steps)
    assert found == ["look", "a blue car", "go", "the blue one"]
    assert condensed(Recall(keep_last_n_steps=1, recalled_steps=1), steps, 20) == ["go", "the blue one"]


def test_bm25_prefers_rare_words_and_short_texts() -> None:
    documents = [["the", "cat"], ["the", "dog"], ["the", "dog", *["the"] * 20], ["a"]]
    assert bm25(documents, ["dog"])[:2] == [1, 2]
    assert bm25(documents, ["the", "cat"])[0] == 0
    assert bm25([], ["dog"]) == []


def test_summarize_asks_and_goes_on() -> None:
    found = condensed(Summarize(instruction="Sum up.", keep_last_n_steps=1), STEPS)
    assert found == ["asked: Sum up.", "Go on.", "third", "cccc"]


# --- in the loop


def test_keep_last_in_a_conversation() -> None:
    trajectory, asked = played([CALL, CALL, CALL, "done"], ["one", "two", "three"], KeepLast(keep_last_n_steps=1))
    assert trajectory.status is Status.COMPLETED
    call = chat().parse(said(CALL))
    pages = [Message("tool", text, name="next") for text in ("one", "two", "three")]
    # After the first step nothing is left out yet: the second turn extends the first.
    assert asked[1] == asked[0] + trajectory.turns[0].output + trajectory.turns[1].new_context
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, -1, -1]
    assert asked[2] == opened(call, pages[1])
    assert asked[3] == opened(call, pages[2])
    assert [trajectory.context(i) for i in range(4)] == asked
    assert trajectory.segments == 3


def test_a_message_that_was_answered_by_nothing_stays_too() -> None:
    @dataclass
    class Listens(Pages):
        async def step(self, message: Message) -> Reply:
            return Reply() if message.content == "well" else await super().step(message)

    engine = ScriptedEngine(lambda _, turn: said(["well", CALL, "done"][turn]))

    async def run() -> None:
        async with engine.conversation(Key(0, "train/1", TASK.id, 0)) as sample:
            environment, condenser = Listens(pages=["one"]), KeepLast(keep_last_n_steps=5)
            await run_rollout(TASK, environment, chat(), sample, Sampling(max_new_tokens=60), WIDE, condenser)

    asyncio.run(run())
    page = Message("tool", "one", name="next")
    assert engine.asked[2][1] == opened(chat().parse(said("well")), chat().parse(said(CALL)), page)


def test_a_summary_is_a_turn_that_is_trained() -> None:
    outputs = [CALL, "so far: one", CALL, "so far: two", "done"]
    trajectory, asked = played(outputs, ["one", "two"], Summarize(when=When.every_turn, instruction="Sum up."))
    assert [turn.auxiliary for turn in trajectory.turns] == [False, True, False, True, False]
    assert [turn.output for turn in trajectory.turns] == [said(text) for text in outputs]
    assert [trajectory.context(i) for i in range(5)] == asked
    # The question extends the context, so that what is summarised is computed once.
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, -1, 2, -1]
    assert asked[2] == opened(Message("assistant", "so far: one"), Message("user", "Go on."))
    batch = build_batch([trajectory])
    assert len(batch) == sum(len(said(text)) for text in outputs)
    assert (trajectory.tool_calls, trajectory.final) == (2, "done")


def test_summaries_are_not_turns_of_the_environment() -> None:
    outputs = [CALL, "summary", CALL, "summary", "done"]
    trajectory, _ = played(outputs, ["one", "two"], Summarize(when=When.every_turn), max_turns=3)
    assert trajectory.status is Status.COMPLETED


def test_a_summary_that_is_cut_is_used_as_it_is() -> None:
    cut = said("word " * 70)[:60]
    trajectory, asked = played([CALL, cut, "done"], ["one"], Summarize(when=When.every_turn))
    assert trajectory.status is Status.COMPLETED
    assert trajectory.turns[1].output == cut
    assert asked[2] == opened(Message("assistant", chat().parse(cut).content), Message("user", "Go on."))


def test_the_model_may_ask_for_it() -> None:
    request = '<tool_call>\n{"name": "condense", "arguments": {}}\n</tool_call>'
    trajectory, asked = played([CALL, request, "done"], ["one"], KeepLast(when=When.on_request, keep_last_n_steps=1))
    assert trajectory.status is Status.COMPLETED
    assert "condense" in chat()._safe.decode(asked[0])  # type: ignore[attr-defined]
    assert len(asked[2]) < len(asked[1]) + len(said(request))
    # What is kept is the last page, not the request.
    call = chat().parse(said(CALL))
    told = ToolSpec("condense", CONDENSE.description, CONDENSE.parameters)
    assert asked[2] == opened(call, Message("tool", "one", name="next"), tools=(SPEC, told))
    without, _ = played([CALL, request, "done"], ["one", "two"], KeepLast())
    assert without.tool_calls == 2  # then it is a call of the environment's


def test_a_request_beside_another_call_is_heard_too() -> None:
    request = '<tool_call>\n{"name": "condense", "arguments": {}}\n</tool_call>'
    condenser = KeepLast(when=When.on_request, keep_last_n_steps=1)
    trajectory, asked = played([CALL, f"{CALL}\n{request}", "done"], ["one", "two"], condenser)
    assert (trajectory.tool_calls, trajectory.tool_errors) == (2, 0)
    assert len(asked[2]) < len(asked[1]) + len(trajectory.turns[1].output)


def test_a_summary_takes_half_of_the_room_at_most() -> None:
    """However long the policy would go on: its summary is cut, the conversation is not."""
    long = said("word " * 300)
    outputs = [said(CALL), long, said("done")]
    condenser = Summarize(when=When.every_turn, max_condensed_tokens=300)
    engine = ScriptedEngine(lambda _, turn: outputs[turn])

    async def run() -> Trajectory:
        async with engine.conversation(Key(0, "train/1", TASK.id, 0)) as sample:

            async def limited(tokens: Sequence[int], sampling: Sampling) -> Completion:
                found = await sample(tokens, replace(sampling, max_new_tokens=10_000))
                few = sampling.max_new_tokens
                if len(found.tokens) <= few:
                    return found
                return Completion(found.tokens[:few], found.logprobs[:few], found.versions[:few], Finish.LENGTH)

            limits = Limits(4096, 100_000, 4096)
            return await run_rollout(
                TASK, Pages(pages=["one"]), chat(), limited, Sampling(max_new_tokens=999), limits, condenser
            )

    trajectory = asyncio.run(run())
    assert (trajectory.status, trajectory.reason) == (Status.COMPLETED, "")
    assert trajectory.turns[1].finish is Finish.LENGTH
    assert len(trajectory.turns[1].output) <= 150
    assert len(trajectory.context(2)) <= 300


def test_recall_finds_what_was_dropped_long_ago() -> None:
    pages = ["the secret word is zanzibar", *["task of note, what is it"] * 6, "what was the secret word"]
    condenser = Recall(when=When.every_turn, keep_last_n_steps=1, recalled_steps=1)
    _, asked = played([*[CALL] * 8, "zanzibar"], pages, condenser, max_turns=20)
    texts = [chat()._safe.decode(context) for context in asked]  # type: ignore[attr-defined]
    assert "zanzibar" not in texts[7]
    assert "zanzibar" in texts[8]


def test_the_answer_is_never_taken_from_a_summary() -> None:
    summary = "#### 391"
    trajectory, _ = played([CALL, summary, CALL], ["one", "two"], Summarize(when=When.every_turn), max_turns=2)
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.final != summary


def test_turns_after_a_summary_answer_what_was_seen_before_it() -> None:
    outputs = [CALL, "so far", CALL, "so far", "done"]
    trajectory, _ = played(outputs, ["one", "two"], Summarize(when=When.every_turn))
    batch = build_batch([trajectory])
    rewards = rewards_of([Group(TASK, [trajectory])], GRPO(), batch.trajectory, batch.turn)
    anchors = rewards.anchor.tolist()
    assert len(set(anchors)) == 5  # the task, page one, page one and page two, each also in an auxiliary turn
    assert rewards.position.tolist() == [0, AUXILIARY, 1, AUXILIARY + 1, 2]


@pytest.mark.parametrize(
    "condenser",
    [
        KeepLast(max_condensed_tokens=150, keep_last_n_steps=3),
        DropOldest(max_condensed_tokens=150),
        TruncateTools(max_condensed_tokens=150, max_reply_chars=20),
        Recall(max_condensed_tokens=150, keep_last_n_steps=1),
        Summarize(max_condensed_tokens=150),
        Summarize(max_condensed_tokens=150, when=When.every_turn, keep_last_n_steps=1),
    ],
    ids=lambda condenser: type(condenser).__name__,
)
def test_contexts_never_exceed_the_budget_and_outputs_are_what_was_sampled(condenser: Condenser) -> None:
    """Many random conversations. A question to the policy about a context may lie beyond the budget, a turn may not."""
    for seed in range(300):
        rng = random.Random(seed)
        pages = [
            " ".join(rng.choice(["red", "blue", "12", "cat"]) for _ in range(rng.randrange(1, 60))) for _ in range(6)
        ]
        outputs = [[*(rng.randrange(3, 400) for _ in range(rng.randrange(0, 30))), 2] for _ in range(20)]
        trajectory, asked = played(outputs, pages, condenser, Limits(400, 4000, 4000), max_new_tokens=40)
        assert [turn.output for turn in trajectory.turns] == outputs[: len(trajectory.turns)]
        assert [trajectory.context(i) for i in range(len(trajectory.turns))] == asked
        for turn, context in zip(trajectory.turns, asked, strict=True):
            assert len(context) <= (150 if not turn.auxiliary else 400)
        build_batch([trajectory])


# --- demonstrations


@pytest.mark.parametrize("condenser", [KeepLast(keep_last_n_steps=1), Summarize(when=When.every_turn)])
def test_a_demonstration_is_condensed_as_play_would(condenser: Condenser) -> None:
    call = chat().parse(said(CALL))
    messages = [
        call, Message("tool", "one", name="next"), Message("assistant", "seen: one", name="summary"),
        call, Message("tool", "two", name="next"), Message("assistant", "seen: two", name="summary"),
        Message("assistant", "done"),
    ]  # fmt: skip
    opening = Opening(TASK.messages, (SPEC,))
    shown = asyncio.run(demonstrate(TASK, opening, messages, chat(), condenser, 4096, 60))
    asks = isinstance(condenser, Summarize)
    outputs = [CALL, "seen: one", CALL, "seen: two", "done"] if asks else [CALL, CALL, "done"]
    trajectory, asked = played(outputs, ["one", "two"], condenser)
    assert [turn.output for turn in shown.turns] == [turn.output for turn in trajectory.turns]
    assert [shown.context(i) for i in range(len(shown.turns))] == asked
    assert shown.status is Status.COMPLETED


def test_a_demonstration_without_summaries_cannot_teach_them() -> None:
    messages = [chat().parse(said(CALL)), Message("tool", "one", name="next"), Message("assistant", "done")]
    with pytest.raises(ConfigError, match="Summarize asks for a summary"):
        opening = Opening(TASK.messages, (SPEC,))
        asyncio.run(demonstrate(TASK, opening, messages, chat(), Summarize(when=When.every_turn), 4096, 60))


# --- what is refused


@dataclass
class Silent(Condenser):
    async def condense(self, conversation: Conversation) -> list[Message]:
        return []


@dataclass
class Forgetful(Condenser):
    async def condense(self, conversation: Conversation) -> list[Message]:
        return [Message("user", "something else")]


@dataclass
class Curious(Condenser):
    async def condense(self, conversation: Conversation) -> list[Message]:
        await conversation.ask(Message("user", "what?"))
        await conversation.ask(Message("user", "and?"))
        return list(conversation.opening)


@dataclass
class Talkative(Condenser):
    async def condense(self, conversation: Conversation) -> list[Message]:
        return [*messages_of(conversation.opening, conversation.steps), Message("user", "more " * 300)]


@pytest.mark.parametrize(
    ("condenser", "match"),
    [
        (Silent(when=When.every_turn), "condenser Silent gave no messages"),
        (Forgetful(when=When.every_turn), "condenser Forgetful changed system prompt or task"),
        (Curious(when=When.every_turn), "condenser Curious asked the policy twice"),
        (Talkative(when=When.every_turn, max_condensed_tokens=150), "condenser Talkative made a context of"),
        (
            KeepLast(max_condensed_tokens=5),
            "condenser KeepLast: system prompt and task .* have .* tokens, its budget is 5",
        ),
    ],
)
def test_what_a_condenser_may_not_do_is_told(condenser: Condenser, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        played([CALL, "done"], ["one"], condenser)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: KeepLast(keep_last_n_steps=-1), "`keep_last_n_steps` must be >= 0, got -1"),
        (lambda: DropOldest(max_condensed_tokens=-1), "`max_condensed_tokens` must be >= 0, got -1"),
        (lambda: Summarize(instruction=""), "instruction is empty"),
        (lambda: Recall(recalled_steps=-2), "`recalled_steps` must be >= 0, got -2"),
        (lambda: TruncateTools(max_reply_chars=-1), "max_reply_chars"),
    ],
)
def test_impossible_settings_are_refused(build: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build()


# --- attention


@pytest.mark.parametrize(
    ("shares", "settings", "budget", "expected"),
    [
        ([0.3, 0.1, 0.2], {"attended_steps": 1}, 99, ["first", "aaaa", "third", "cccc"]),
        ([0.1, 0.3, 0.0], {"attended_steps": 1}, 99, ["second", "bbbb", "third", "cccc"]),
        ([0.2, 0.2, 0.0], {"attended_steps": 1}, 99, ["second", "bbbb", "third", "cccc"]),  # of equals the later
        ([0.3, 0.1, 0.2], {"attended_steps": 2}, 99, ["first", "aaaa", "second", "bbbb", "third", "cccc"]),
        ([0.3, 0.1, 0.2], {"attended_steps": 2}, 18, ["first", "aaaa", "third", "cccc"]),  # the least is dropped first
        ([0.3, 0.1, 0.2], {"attended_steps": 2}, 9, ["third", "cccc"]),
        ([0.1, 0.3, 0.9], {"attended_steps": 1, "keep_last_n_steps": 0}, 99, ["third", "cccc"]),
        ([0.3, 0.1, 0.2], {"attended_steps": 0}, 99, ["third", "cccc"]),
    ],
)
def test_what_is_attended_to_stays(
    shares: list[float], settings: dict[str, Any], budget: int, expected: list[str]
) -> None:
    assert condensed(Attention(**settings), STEPS, budget, shares) == expected


def test_attention_is_measured_in_the_model_and_its_window() -> None:
    """What is handed to the model are the newest steps that its window holds; the spans are these steps."""
    asked: list[tuple[list[int], list[tuple[int, int]]]] = []

    async def attend(tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[float]:
        asked.append((list(tokens), list(spans)))
        return [float(start) for start, _ in spans]

    pages = [f"{name} " * 20 for name in ("one", "two", "three", "four", "five", "six")]
    limits = replace(WIDE, context_tokens=330)
    outputs = iter([said(CALL)] * 7)

    async def sample(tokens: Sequence[int], sampling: Sampling) -> Completion:
        output = next(outputs)
        return Completion(output, [-1.0] * len(output), [0] * len(output), Finish.STOP)

    condenser = Attention(keep_last_n_steps=1, attended_steps=1, when=When.every_turn)
    trajectory = asyncio.run(
        run_rollout(TASK, Pages(pages=pages), chat(), sample, Sampling(max_new_tokens=60), limits, condenser, attend)
    )
    assert trajectory.status is Status.COMPLETED
    names = [page.split()[0] for page in pages]
    held = [len(spans) for _, spans in asked]
    assert held[:3] == [1, 2, 3]
    assert held[-1] < 6  # the window is full
    for number, (tokens, spans) in enumerate(asked, 1):
        assert len(tokens) <= limits.context_tokens
        assert spans[-1][1] == len(tokens)
        for name, (start, end) in zip(names[number - len(spans) : number], spans, strict=True):
            assert f"{name} {name}" in tokenizer().decode(tokens[start:end])
    seen = tokenizer().decode(trajectory.context(6))  # the last step, and of the others that with the greatest share
    assert [name for name in names if f"{name} {name}" in seen] == names[-2:]


def test_attention_takes_an_engine_that_measures_it() -> None:
    with pytest.raises(ConfigError, match="condenser Attention needs attention"):
        played([CALL] * 3, ["a", "b"], Attention(when=When.every_turn))


@pytest.mark.parametrize("name", ["keep_last_n_steps", "attended_steps"])
def test_attention_refuses_negative_numbers(name: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` must be >= 0, got -1"):
        Attention(**{name: -1})
