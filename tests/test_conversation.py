"""Conversations: the turn loop, groups of siblings, and demonstrations laid out as the policy would have said them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtgrpo.chat import Chat, ChatSettings, open_chat
from mtgrpo.condensers import Conversation, When
from mtgrpo.condensers.none import Whole
from mtgrpo.engines import Key, RunningEngine
from mtgrpo.engines.local import Local
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.errors import ConfigError, PolicyError, TaskError
from mtgrpo.model import tiny
from mtgrpo.model.load import ModelSettings, load_model
from mtgrpo.rewards import Reward
from mtgrpo.rollout.conversation import run_rollout
from mtgrpo.rollout.demonstrations import demonstrate
from mtgrpo.rollout.group import RolloutRunner
from mtgrpo.rollout.settings import RolloutSettings
from mtgrpo.rollout.stream import Stream
from mtgrpo.stages import sft
from mtgrpo.stages.sft import demonstrations
from mtgrpo.tasks import IndexedStream, Split, TaskStream
from mtgrpo.tasks.calculator import Calculator
from mtgrpo.types import Finish, Group, Limits, Message, Sample, Sampling, Status, Task, ToolCall, Trajectory
from mtgrpo.weights.source import ModelWeights
from scripted import ScriptedEngine

TASK = Task("task/1", (Message("user", "What is 17 * 23?"),), answer="391")
WIDE = Limits(context_tokens=4096, sampled_tokens=4096, tool_tokens=4096)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17 * 23"}}\n</tool_call>'
ANSWER = "#### 391"


@lru_cache
def tokenizer() -> Any:
    return tiny.load_tokenizer()


@lru_cache
def chat() -> Chat:
    return open_chat(tokenizer(), ChatSettings())


class Forgetful(Chat):
    """The real chat, which cannot prove that a context begins with the one before."""

    def __init__(self) -> None:
        self.stop_ids, self.notes = chat().stop_ids, []
        self.open, self.parse, self.encode = chat().open, chat().parse, chat().encode
        self.decode = chat().decode

    def decode(self, tokens: Any) -> str: ...
    def open(self, messages: Any, tools: Any) -> list[int]: ...
    def parse(self, output: Any, tools: Any = ()) -> Message: ...
    def encode(self, message: Any) -> list[int]: ...
    def extend(self, history: Any, new: Any, tools: Any, ended: Any = None) -> None:
        return None


def said(text: str) -> list[int]:
    """The tokens of `text` and the end of the turn."""
    return [*tokenizer().encode(text, add_special_tokens=False), chat().stop_ids[0]]


@dataclass
class Talk(Environment):
    """Repeats what the model says, as the user, until the model has spoken `length` times."""

    length: int = 3

    async def start(self, task: Task) -> Opening:
        self.spoken = 0
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        self.spoken += 1
        return Reply((Message("user", message.content),), done=self.spoken == self.length)


def calculator(**settings: Any) -> ToolUse:
    return ToolUse(tools=["calculator"], **settings)


def played(
    outputs: Sequence[list[int]],
    environment: Environment,
    max_new_tokens: int = 200,
    limits: Limits = WIDE,
    with_chat: Chat | None = None,
    stop_ids: Sequence[int] = (),
) -> tuple[Trajectory, list[list[int]]]:
    """One conversation in which the model says `outputs`; also every context that the engine was given."""
    engine = ScriptedEngine(lambda _, turn: outputs[turn])

    async def run() -> Trajectory:
        async with engine.conversation(Key(0, "train/1", TASK.id, 0)) as sample:
            sampling = Sampling(max_new_tokens=max_new_tokens, stop_ids=list(stop_ids))
            return await run_rollout(TASK, environment, with_chat or chat(), sample, sampling, limits)

    trajectory = asyncio.run(run())
    return trajectory, [context for _, context in engine.asked]


# --- the turn loop


any_token = st.integers(0, len(tiny.load_tokenizer()) - 1).filter(lambda token: token not in (0, 1, 2))
outputs_of_tokens = st.lists(st.lists(any_token, max_size=12), min_size=1, max_size=5)


def test_what_a_reward_does_to_the_metadata_is_the_trajectorys_own() -> None:
    trajectory, _ = played([[5]], Talk(length=1))
    assert trajectory.task == TASK and trajectory.task.metadata is not TASK.metadata


@given(outputs_of_tokens, st.booleans())
@settings(max_examples=60)
def test_every_turn_is_what_was_asked_and_what_was_sampled(spoken: list[list[int]], forgetful: bool) -> None:
    """Also for tokens that no tokenizer would write like this, and for texts that say special tokens."""
    outputs = [[*tokens, 2] for tokens in spoken]
    trajectory, asked = played(
        outputs, Talk(length=len(outputs)), with_chat=Forgetful() if forgetful else None, limits=WIDE
    )
    assert (trajectory.status, trajectory.reason) == (Status.COMPLETED, "")
    assert [turn.output for turn in trajectory.turns] == outputs
    assert [trajectory.context(index) for index in range(len(outputs))] == asked
    assert [turn.parent for turn in trajectory.turns] == [
        -1,
        *(-1 if forgetful else n for n in range(len(outputs) - 1)),
    ]
    assert trajectory.segments == (len(outputs) if forgetful else 1)
    assert trajectory.sampled_tokens == sum(map(len, outputs))
    for before, (context, turn) in enumerate(zip(asked[1:], trajectory.turns[1:], strict=True)):
        if turn.parent >= 0:
            assert context == asked[before] + outputs[before] + turn.new_context
    for turn in trajectory.turns:
        assert turn.finish is Finish.STOP
        assert turn.message == chat().parse(turn.output)
        assert len(turn.logprobs) == len(turn.versions) == len(turn.output)


def test_a_turn_that_another_stop_token_ends_is_closed_in_the_next_context() -> None:
    closing = tokenizer().convert_tokens_to_ids("</tool_call>")
    trajectory, asked = played([said(CALL)[:-1], said(ANSWER)], calculator(), stop_ids=[closing])
    assert trajectory.status is Status.COMPLETED
    first, second = trajectory.turns
    assert first.output[-1] == closing
    assert second.parent == 0
    assert second.new_context[0] == chat().stop_ids[0], "part of the context, not of what was sampled"
    assert asked == [trajectory.context(0), trajectory.context(1)]
    messages = [*TASK.messages, first.message, *first.observations]
    assert asked[1] == chat().open(messages, calculator().tool_specs), "as the template writes it"


def test_tools_are_called_and_told() -> None:
    both = CALL + CALL.replace("17 * 23", "391 / 0")
    trajectory, asked = played([said(CALL), said(both), said(ANSWER)], calculator())
    assert (trajectory.status, trajectory.tool_calls, trajectory.tool_errors) == (Status.COMPLETED, 3, 1)
    assert [turn.observations for turn in trajectory.turns] == [
        (Message("tool", "391", name="calculator"),),
        (Message("tool", "391", name="calculator"), Message("tool", "error: division by zero", name="calculator")),
        (),
    ]
    text = tokenizer().decode(asked[-1])
    responses = [f"<tool_response>\n{reply}\n</tool_response>" for reply in ("391", "391", "error: division by zero")]
    positions = [text.find(responses[0]), text.rfind(responses[1]), text.find(responses[2])]
    assert -1 < positions[0] < positions[1] < positions[2]
    assert trajectory.segments == 1
    assert trajectory.final == ANSWER


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('<tool_call>\n{"name": "calculator", "arg', "error: "),
        (CALL.replace("calculator", "abacus"), "error: there is no tool 'abacus'"),
        (CALL.replace("expression", "sum"), "error: calculator has no argument 'sum'"),
        (CALL.replace('"17 * 23"', "391"), "error: argument 'expression' must be of type string"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_and_the_conversation_goes_on(text: str, told: str) -> None:
    trajectory, asked = played([said(text), said(CALL), said(ANSWER)], calculator())
    assert (trajectory.status, trajectory.tool_calls, trajectory.tool_errors) == (Status.COMPLETED, 2, 1)
    assert trajectory.turns[0].observations[0].content.startswith(told)
    assert trajectory.turns[1].observations == (Message("tool", "391", name="calculator"),)
    assert [trajectory.context(index) for index in range(3)] == asked
    assert trajectory.turns[0].output == said(text)


OPENED = len(chat().open(TASK.messages, asyncio.run(calculator().start(TASK)).tools))
REPLY = len(
    chat().extend(
        [*TASK.messages, chat().parse(said(CALL))],
        [Message("tool", "391", name="calculator")],
        asyncio.run(calculator().start(TASK)).tools,
    )
    or ()
)
SPOKEN = len(said(CALL))


@pytest.mark.parametrize(
    ("reason", "environment", "max_new_tokens", "limits", "turns", "sampled"),
    [
        ("max_turns", {"max_turns": 2}, 200, WIDE, 2, 2 * SPOKEN),
        ("max_new_tokens", {}, 5, WIDE, 1, 5),
        ("max_context_length", {}, 200, Limits(OPENED + 5, 4096, 4096), 1, 5),
        ("max_context_length", {}, 200, Limits(OPENED, 4096, 4096), 0, 0),
        ("max_context_length", {}, 200, Limits(OPENED + SPOKEN + REPLY, 4096, 4096), 1, SPOKEN),
        ("max_context_length", {}, 200, Limits(OPENED + SPOKEN + REPLY + 1, 4096, 4096), 2, SPOKEN + 1),
        ("max_trajectory_tokens", {}, 200, Limits(4096, 5, 4096), 1, 5),
        ("max_trajectory_tokens", {}, 200, Limits(4096, SPOKEN, 4096), 1, SPOKEN),
        ("max_trajectory_tokens", {}, 200, Limits(4096, SPOKEN + 1, 4096), 2, SPOKEN + 1),
        ("max_tool_tokens", {"max_tool_tokens": REPLY - 1}, 200, WIDE, 1, SPOKEN),
        ("max_trajectory_tool_tokens", {}, 200, Limits(4096, 4096, REPLY - 1), 1, SPOKEN),
        ("max_trajectory_tool_tokens", {}, 200, Limits(4096, 4096, 2 * REPLY - 1), 2, 2 * SPOKEN),
        ("", {"max_turns": 3, "max_tool_tokens": REPLY}, SPOKEN, Limits(4096, 3 * SPOKEN, 2 * REPLY), 3, None),
    ],
)
def test_a_limit_truncates_and_is_named(
    reason: str, environment: dict[str, int], max_new_tokens: int, limits: Limits, turns: int, sampled: int | None
) -> None:
    outputs = [said(CALL), said(CALL), said(CALL if reason else ANSWER)]
    trajectory, asked = played(outputs, calculator(**environment), max_new_tokens, limits)
    assert (trajectory.reason, len(trajectory.turns)) == (reason, turns)
    assert trajectory.status is (Status.TRUNCATED if reason else Status.COMPLETED)
    assert sampled in (None, trajectory.sampled_tokens)
    for index, turn in enumerate(trajectory.turns):
        assert turn.output == outputs[index][: len(turn.output)]
        assert len(asked[index]) + len(turn.output) <= limits.context_tokens
    assert [trajectory.context(index) for index in range(turns)] == asked


@pytest.mark.parametrize(
    ("reason", "environment", "tool_tokens"),
    [("max_tool_tokens", {"max_tool_tokens": 3}, 4096), ("max_trajectory_tool_tokens", {}, 3)],
)
def test_tool_tokens_count_also_where_a_new_segment_begins(
    reason: str, environment: dict[str, int], tool_tokens: int
) -> None:
    limits = Limits(4096, 4096, tool_tokens)
    trajectory, _ = played([said(CALL)], calculator(**environment), limits=limits, with_chat=Forgetful())
    assert (trajectory.status, trajectory.reason) == (Status.TRUNCATED, reason)  # "391" and the end of the turn: 4


def test_an_environment_is_never_played_on_itself() -> None:
    environment = Talk(length=2)
    before = dict(vars(environment))
    played([said("a"), said("b")], environment)
    assert vars(environment) == before


# --- groups


@dataclass
class Graded(Reward):
    """The number of turns; remembers what it was asked about."""

    def __post_init__(self) -> None:
        self.asked: list[Trajectory] = []

    def reward(self, trajectory: Trajectory) -> float:
        self.asked.append(trajectory)
        return float(len(trajectory.turns))


async def play_batch(runner: RolloutRunner, tasks: TaskStream, rollout: RolloutSettings) -> list[Group]:
    return (await Stream(runner, tasks, rollout).batch(0)).groups


def make_runner(
    engine: RunningEngine,
    environment: Environment,
    retries: int = 1,
    max_concurrent: int = 100,
    wrap: Callable[[AbstractAsyncContextManager[Sample]], AbstractAsyncContextManager[Sample]] = lambda opened: opened,
    max_new_tokens: int = 200,
) -> RolloutRunner:
    return RolloutRunner(
        environment=environment,
        chat=chat(),
        reward=Graded(),
        sampling=Sampling(max_new_tokens=max_new_tokens),
        limits=WIDE,
        condenser=Whole(),
        retries=retries,
        timeout_s=0.0,
        open_conversation=lambda scope, task, sample_index: wrap(
            engine.conversation(Key(5, scope, task, sample_index))
        ),
        attend=None,
        slots=asyncio.Semaphore(max_concurrent),
        scope="train/1",
    )


@dataclass
class Unsteady(Talk):
    """The world of the first `failures` conversations that are started breaks at the second turn."""

    failures: int = 0

    def __post_init__(self) -> None:
        self.count = itertools.count()

    async def start(self, task: Task) -> Opening:
        self.number = next(self.count)
        assert "spoken" not in vars(self), "the environment is not a fresh one"
        return await super().start(task)

    async def step(self, message: Message) -> Reply:
        reply = await super().step(message)
        if self.number < self.failures and self.spoken == 2:
            raise OSError("the shop is closed")
        return reply


def chatter(key: Key, turn: int) -> list[int]:
    return said(f"{key.sample_index} {turn}")


def alike(trajectory: Trajectory) -> tuple[Any, ...]:
    return trajectory.turns, trajectory.status, trajectory.reward, trajectory.sample_index


@pytest.mark.parametrize(
    ("failures", "retries", "attempts", "failed"),
    [(0, 1, 1, False), (1, 1, 2, False), (2, 3, 3, False), (9, 2, 3, True)],
)
def test_a_failure_of_the_world_is_retried_then_recorded(
    failures: int, retries: int, attempts: int, failed: bool
) -> None:
    engine = ScriptedEngine(chatter)
    runner = make_runner(engine, Unsteady(failures=failures), retries)
    (trajectory,) = asyncio.run(runner.run_group(TASK, 1)).trajectories
    graded = runner.reward
    assert isinstance(graded, Graded)
    assert trajectory.attempts == attempts
    if failed:
        assert (trajectory.status, trajectory.reason) == (Status.FAILED, "OSError: the shop is closed")
        assert (trajectory.turns, trajectory.reward, graded.asked) == ([], 0.0, [])
    else:
        assert (trajectory.status, trajectory.reason, trajectory.reward) == (Status.COMPLETED, "", 3.0)
        assert graded.asked == [replace(trajectory, reward=0.0)]  # a copy, before it was scored
    keys = list(dict.fromkeys(key for key, _ in engine.asked))
    assert len(keys) == attempts  # every attempt draws random numbers of its own
    assert {(key.task, key.sample_index) for key in keys} == {(TASK.id, 0)}


@pytest.mark.parametrize("culprit", ["tool", "engine", "start"])
def test_a_failing_sibling_does_not_disturb_the_others(culprit: str, tmp_path: Path) -> None:
    tmp_path.joinpath("tools.py").write_text(
        'def ask(who: str) -> str:\n    """Ask."""\n'
        '    if who == "2":\n        raise OSError("no answer")\n    return who\n'
    )

    @dataclass
    class Guarded(ToolUse):
        count = itertools.count()

        async def start(self, task: Task) -> Opening:
            if culprit == "start" and next(self.count) % 4 == 2:
                raise OSError("no answer")
            return await super().start(task)

    def script(key: Key, turn: int) -> list[int]:
        if culprit == "engine" and key.sample_index == 2:
            raise OSError("no answer")
        who = key.sample_index if culprit == "tool" else 0
        call = f'<tool_call>\n{{"name": "ask", "arguments": {{"who": "{who}"}}}}\n</tool_call>'
        return said(f"#### {key.sample_index}") if turn else said(call)

    environment = Guarded(tools=[f"{tmp_path}/tools.py:ask"], call_retries=0)
    runner = make_runner(ScriptedEngine(script), environment, retries=0)
    group = asyncio.run(runner.run_group(TASK, 4))
    assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1, 2, 3]
    failed = group.trajectories.pop(2)
    assert failed.status is Status.FAILED
    assert "OSError: no answer" in failed.reason
    assert [t.final for t in group.trajectories] == ["#### 0", "#### 1", "#### 3"]
    assert {(t.status, t.reward, t.attempts) for t in group.trajectories} == {(Status.COMPLETED, 2.0, 1)}


@dataclass
class Unreadable(Talk):
    async def step(self, message: Message) -> Reply:
        raise PolicyError("no move")


def test_what_an_environment_cannot_read_is_no_failure() -> None:
    (trajectory,) = asyncio.run(make_runner(ScriptedEngine(chatter), Unreadable()).run_group(TASK, 1)).trajectories
    assert (trajectory.status, trajectory.reason, trajectory.attempts) == (Status.TRUNCATED, "policy_error", 1)
    assert (len(trajectory.turns), trajectory.reward) == (1, 1.0)


class Strict(Forgetful):
    """Refuses two users in a row, answers of tools without a call, and two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.open = self.strictly

    def strictly(self, messages: Sequence[Message], tools: Any) -> list[int]:
        pairs = [(before, after) for before, after in itertools.pairwise(messages) if before.role != "tool"]
        if any(before.role == after.role == "user" for before, after in pairs):
            raise ConfigError("roles must alternate")
        if any(after.role == "tool" and len(before.tool_calls) != 1 for before, after in pairs):
            raise ConfigError("one call")
        return chat().open(messages, tools)


@dataclass
class Twice(Talk):
    """Says two things as the user."""

    async def step(self, message: Message) -> Reply:
        return Reply((Message("user", "noted"), Message("user", "and now?")))


@pytest.mark.parametrize("text", ["<tool_call>\n{\n</tool_call>", CALL + CALL])
def test_a_template_that_refuses_what_the_policy_said_ends_its_conversation_alone(text: str) -> None:
    trajectory, _ = played([said(text)], calculator(), with_chat=Strict())
    assert (trajectory.status, trajectory.reason, len(trajectory.turns)) == (Status.TRUNCATED, "chat_template", 1)


def test_a_template_that_refuses_whatever_the_policy_says_ends_the_run_and_leaves_out_a_demonstration() -> None:
    with pytest.raises(ConfigError, match="roles must alternate"):
        played([said("a")], Twice(), with_chat=Strict())
    shown = [Message("assistant", "a"), Message("user", "b"), Message("user", "c"), Message("assistant", "d")]
    with pytest.raises(TaskError, match="roles must alternate"):
        asyncio.run(demonstrate(TASK, Opening(TASK.messages), shown, Strict()))


def test_a_demonstration_that_a_template_or_a_condenser_refuses_is_not_cut() -> None:
    class Unable(Whole):
        active = True

        async def condense(self, conversation: Conversation) -> list[Message]:
            raise PolicyError("no summary")

    call, answer = ToolCall("calculator", {"expression": "1"}), Message("tool", "1", name="calculator")
    twice = [Message("assistant", tool_calls=(call, call)), answer, answer, Message("assistant", "1")]
    with pytest.raises(TaskError, match="the chat template refuses"):
        asyncio.run(demonstrate(TASK, Opening(TASK.messages), twice, Strict()))
    shown = [Message("assistant", "a"), Message("user", "b"), Message("assistant", "c")]
    unable = Unable(When.every_turn)
    with pytest.raises(TaskError, match="the condenser cannot read the conversation about task"):
        asyncio.run(demonstrate(TASK, Opening(TASK.messages), shown, chat(), unable, 1000))


def test_a_wrong_configuration_is_not_a_failure() -> None:
    def script(key: Key, turn: int) -> list[int]:
        raise ConfigError("no such thing")

    runner = make_runner(ScriptedEngine(script), Talk())
    with pytest.raises(ConfigError, match="no such thing"):
        asyncio.run(runner.run_group(TASK, 2))


def test_no_more_conversations_are_open_than_allowed() -> None:
    now, most = 0, 0

    @asynccontextmanager
    async def counted(opened: AbstractAsyncContextManager[Sample]) -> AsyncGenerator[Sample]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            async with opened as sample:
                yield sample
        finally:
            now -= 1

    tasks = IndexedStream(None, lambda index: Task(str(index), TASK.messages), seed=0)
    runner = make_runner(ScriptedEngine(chatter), Unsteady(failures=3), max_concurrent=3, wrap=counted)
    groups = asyncio.run(play_batch(runner, tasks, RolloutSettings(group_size=4, prompts_per_step=3)))
    assert (now, most) == (0, 3)
    assert [[t.status for t in group.trajectories] for group in groups] == [[Status.COMPLETED] * 4] * 3


def test_a_task_that_a_batch_holds_twice_is_played_with_other_random_numbers() -> None:
    engine = ScriptedEngine(chatter)
    tasks = IndexedStream(2, lambda index: Task(str(index), TASK.messages), seed=0)
    groups = asyncio.run(
        play_batch(make_runner(engine, Talk()), tasks, RolloutSettings(group_size=2, prompts_per_step=5))
    )
    assert len(groups) == 5
    assert len({key for key, _ in engine.asked}) == 10


# --- with the local engine


@lru_cache
def model() -> Any:
    return load_model(ModelSettings("tiny"), seed=0)


@dataclass
class Waits(Talk):
    """A world that is never done with the second turn."""

    def __post_init__(self) -> None:
        self.waiting: list[str] = []  # shared by the copies

    async def step(self, message: Message) -> Reply:
        reply = await super().step(message)
        if self.spoken == 2:
            self.waiting.append("for ever")
            await asyncio.Event().wait()
        return reply


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_cancelled_group_leaves_nothing_open(deterministic: bool) -> None:
    engine = Local().start(ModelWeights(model()), deterministic, 1024)

    async def run() -> tuple[list[str], Trajectory]:
        world = Waits(length=3)
        waiting = make_runner(engine, world, max_concurrent=3, max_new_tokens=3)
        waiting.sampling.stop_ids = list(range(2048))  # any token ends the turn
        group = asyncio.create_task(waiting.run_group(TASK, 5))
        while len(world.waiting) < 3:
            await asyncio.sleep(0.001)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        after = make_runner(engine, Talk(length=1), max_new_tokens=3)
        trajectory = await asyncio.wait_for(after.run_one(TASK, 0), timeout=20)
        assert not waiting.slots.locked()
        return [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()], trajectory

    left, trajectory = asyncio.run(run())
    assert trajectory.status in (Status.COMPLETED, Status.TRUNCATED)
    assert len(left) <= 1  # the engine's own, which ends by itself


def test_few_places_and_slow_unsteady_tools_change_no_digit() -> None:
    """Which conversations decode together must not depend on who happened to end, or fail, first."""

    @dataclass
    class Slow(Talk):
        async def start(self, task: Task) -> Opening:
            self.length = 1 + int(task.id) % 4
            return await super().start(task)

        async def step(self, message: Message) -> Reply:
            for _ in range(delays.randrange(6)):  # turns of the event loop: every order comes up, on any machine
                await asyncio.sleep(0)
            if len(message.content) % 5 == 1:
                raise OSError("closed")
            reply = await super().step(message)
            return Reply((Message("user", "Go on, please."),), reply.done)

    def digits() -> list[Any]:
        tasks = IndexedStream(None, lambda index: Task(str(index), TASK.messages), seed=0)
        runner = make_runner(
            Local().start(ModelWeights(model()), True, 1024), Slow(), retries=2, max_concurrent=3, max_new_tokens=6
        )
        runner.sampling.stop_ids = list(range(1024))  # half of all tokens end the turn
        groups = asyncio.run(play_batch(runner, tasks, RolloutSettings(group_size=3, prompts_per_step=4)))
        return [(alike(t), t.attempts) for group in groups for t in group.trajectories]

    delays = random.Random(0)
    first = digits()
    assert len({attempts for _, attempts in first}) > 1, "nothing failed: the test is too easy"
    for seed in range(1, 9):
        delays = random.Random(seed)
        assert digits() == first


# --- demonstrations


@pytest.mark.parametrize("forgetful", [False, True])
@pytest.mark.parametrize("system_prompt", ["", "Be exact."])
def test_a_demonstration_is_laid_out_as_the_policy_would_have_played_it(system_prompt: str, forgetful: bool) -> None:
    source = Calculator(min_steps=2, max_steps=4, system_prompt=system_prompt)
    environment = calculator(max_turns=9)
    with_chat = Forgetful() if forgetful else chat()
    lengths: set[int] = set()
    for task in itertools.islice(source.stream(Split.train, 1), 40):
        messages = source.demonstration(task, 7)
        engine = ScriptedEngine(
            lambda _, turn, spoken=[m for m in messages if m.role == "assistant"]: chat().encode(spoken[turn])
        )

        async def both(
            task: Task = task, messages: tuple[Message, ...] = messages, engine: ScriptedEngine = engine
        ) -> tuple[Trajectory, Trajectory]:
            opening = await environment.start(task)
            async with engine.conversation(Key(0, "train/1", task.id, 0)) as sample:
                policy = await run_rollout(task, environment, with_chat, sample, Sampling(max_new_tokens=200), WIDE)
            return await demonstrate(task, opening, messages, with_chat), policy

        shown, policy = asyncio.run(both())
        assert (policy.status, shown.status) == (Status.COMPLETED, Status.COMPLETED)
        assert [turn.logprobs for turn in shown.turns] == [[0.0] * len(turn.output) for turn in shown.turns]
        for turn in (*shown.turns, *policy.turns):
            turn.logprobs = []
        assert shown.turns == policy.turns
        assert [shown.context(index) for index in range(len(shown.turns))] == [context for _, context in engine.asked]
        lengths.add(len(shown.turns))
    assert lengths >= {1, 3, 4, 5}


def test_demonstrations_that_cannot_be_laid_out_are_left_out_and_a_stream_must_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sft, "MOST_FAILED", 2)  # in a row, as these are not
    tasks = IndexedStream(9, lambda index: Task(str(index), TASK.messages), seed=0, repeat=False)
    spoken, more = Message("assistant", "a"), Message("user", "more")
    tries, notes, found = Counter[str](), list[str](), list[Trajectory]()

    class Shown(Calculator):
        def demonstration(self, task: Task, seed: int) -> tuple[Message, ...]:
            return (spoken, spoken, more, spoken) if task.id == "3" else (spoken, more, spoken)

    class Flaky(Talk):
        async def start(self, task: Task) -> Opening:
            tries[task.id] += 1
            if task.id == "7" or (task.id == "5" and tries[task.id] == 1):
                raise OSError("the shop is closed")
            return await super().start(task)

    async def take() -> None:
        runner = make_runner(ScriptedEngine(chatter), Flaky(), retries=1)
        async for example in demonstrations(Shown(), tasks, runner, 0, notes.append):
            found.append(example)

    with pytest.raises(ConfigError, match="the stream of training tasks has ended"):
        asyncio.run(take())
    assert sorted(example.task.id for example in found) == list("0124568")
    assert {len(example.turns) for example in found} == {2} and [tries[name] for name in "3756"] == [1, 2, 2, 1]
    (note,) = notes
    assert note.startswith("demonstrations that cannot be laid out are left out; that of task ")


@pytest.mark.parametrize(
    ("threshold", "said_first", "turns"), [(0.0, True, 2), (0.36, True, 1), (0.37, True, 2), (0.36, False, 2)]
)
def test_a_confident_answer_ends_the_conversation(threshold: float, said_first: bool, turns: int) -> None:
    """Every token of the fake engine has log-probability -1: a probability of 0.3679."""
    first = f"{ANSWER} {CALL}" if said_first else CALL
    script = {0: said(first), 1: said(ANSWER)}
    environment = ToolUse(tools=["calculator"], end_at_confidence=threshold)
    runner = make_runner(ScriptedEngine(lambda key, turn: script[turn]), environment)
    group = asyncio.run(runner.run_group(TASK, 1))
    assert len(group.trajectories[0].turns) == turns
    assert group.trajectories[0].status is Status.COMPLETED


@pytest.mark.parametrize(
    ("name", "value"), [("end_at_confidence", 1.0), ("end_at_confidence", -0.1), ("answer_pattern", "(")]
)
def test_an_impossible_confidence_or_pattern_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        ToolUse(**{name: value})
