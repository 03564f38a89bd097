"""What the agent meets: start(task) begins a conversation, step(message) answers the model, stop() ends it. One file =
one environment.

An environment object is settings only. It is opened once for a run (`open`); every conversation has a shallow copy of
that, so `start` may put state on `self` (replacing, never mutating, shared fields).
"""

import asyncio
import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from mtgrpo.errors import ConfigError, TaskError, require
from mtgrpo.parts import Part, Pattern
from mtgrpo.parts.extension import awaited, misgiven
from mtgrpo.runtime.isolation import run_isolated
from mtgrpo.types import CallRecord, Counts, Message, Task, ToolSpec, check_messages

STOP_S = 30.0  # seconds for the end of a conversation; what takes longer would keep the run from ending


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins: its first messages and the tools the model is told of."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()

    def __post_init__(self) -> None:
        check_messages(self.messages)


def below(task: Task, text: str, tools: tuple[ToolSpec, ...] = ()) -> Opening:
    """The task's messages with `text` below the last one: in many templates no two of the user's may follow."""
    *before, last = task.messages
    return Opening((*before, replace(last, content=f"{last.content}\n\n{text}".strip())), tools)


def seed_of(task: Task) -> int:
    """The seed of the game that `task` is. Raises TaskError where it has none."""
    seed = task.metadata.get("seed")
    if not isinstance(seed, int):
        raise TaskError(f"task {task.id} has no seed for a game, got {seed!r}: use task=game")
    return seed


def copied(task: Task) -> Task:
    """The same task with lists and dictionaries of its own in `metadata`: somebody's tool or reward may change them."""

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: own(each) for key, each in cast("dict[Any, Any]", value).items()}
        return list(map(own, cast("list[Any]", value))) if isinstance(value, list) else value

    return replace(task, metadata=own(dict(task.metadata)))


@dataclass(frozen=True, slots=True)
class Reply(Counts):
    """What the environment answers to one message of the model. `done` ends the conversation."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0  # what the environment pays for this step: part of the turn's reward, whatever `reward` is
    calls: Sequence[CallRecord] = ()  # what became of the calls that the model made in this turn

    def __post_init__(self) -> None:
        check_messages(self.messages)


@dataclass
class Environment(Part, ABC, max_turns=">= 1", max_tool_tokens=">= 1", end_at_confidence=">= 0 and < 1 (0 = off)"):
    """Base of all environments."""

    pays_turns = False  # whether its replies have rewards, which advantage=turn asks for

    max_turns: int = 8  # model turns per conversation; reaching it ends the trajectory as truncated
    max_context_length: int = 0  # tokens of context and output together; 0 = what model and batch.token_budget allow
    max_tool_tokens: int = 1024  # tokens the environment may add in one turn; more truncates the trajectory
    end_at_confidence: float = 0.0  # an answer given with this probability per token ends the conversation; 0 = off
    answer_pattern: Pattern = "####|boxed"  # regular expression; a message in which it is found gives an answer

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, max_context_length=">= 0 (0 = what model and batch.token_budget allow)")
        try:
            re.compile(self.answer_pattern)
        except re.error as error:
            what = f"environment.answer_pattern={self.answer_pattern}"
            raise ConfigError(f"{what} is not a regular expression: {error}") from error

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The tools that every conversation has, as far as they are known before one begins."""
        return ()

    def without_tools(self) -> Self | None:
        """The same with no tools to call; None where there are none that could be left out."""
        return None

    @property
    def replayable(self) -> bool:
        """Whether a conversation that a crash has cut off may go on: a new `start`, and `step` with the same messages.

        It is compared: where the answers differ, the conversation goes on from there. False: it starts again.
        """
        return True

    def settled(self, message: Message, logprobs: Sequence[float]) -> bool:
        """Whether an answer is given with enough confidence to end the conversation, whatever else it calls for.

        The confidence is the geometric mean of the probabilities of the tokens that say `message`.
        """
        if not self.end_at_confidence or not re.search(self.answer_pattern, message.content):
            return False
        return math.fsum(logprobs) / len(logprobs) >= math.log(self.end_at_confidence)

    @asynccontextmanager
    async def conversation(self, task: Task) -> AsyncGenerator[tuple[Self, Opening]]:
        """A copy that has started `task`, and what it opens with; it is stopped in the end, whatever happens."""
        own = copy.copy(self)
        cancelled: asyncio.CancelledError | None = None
        try:
            opening: Any = await awaited(own.start, copied(task))
            if not isinstance(opening, Opening):
                raise misgiven(own.start, opening, "give an Opening")
            yield own, opening
        except asyncio.CancelledError as error:
            cancelled = error
            raise
        finally:
            await _to_its_end(awaited(own.stop), cancelled)

    @abstractmethod
    async def start(self, task: Task) -> Opening:
        """Begin `task`, of which it may change the metadata. Called once, on the copy made for this rollout."""

    async def stop(self) -> None:
        """End the conversation and give back what it used, such as processes.

        Called once for every `start`, also for one that did not come to its end; a cancellation waits for it. After 30
        seconds it is cancelled, which counts as a TimeoutError.
        """

    @abstractmethod
    async def step(self, message: Message) -> Reply:
        """Answer the model's message. The model's mistakes are observations; raise only when the world fails.

        A conversation for which this raises is run again, so those that are trained did less of what fails: where
        failures are frequent, answer with an observation instead.
        """


async def _to_its_end(work: Coroutine[Any, Any, None], cancelled: asyncio.CancelledError | None) -> None:
    """Await `work`. Whoever cancels meanwhile has to wait: it would leave things open.

    A cancellation, that one or the one that `work` follows, prevails over an error of `work`, which is noted on it.
    """
    late = TimeoutError(f"stop() took longer than {STOP_S:g} s")
    task = asyncio.ensure_future(run_isolated(lambda: work, STOP_S, late))
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (error := task.exception()):
        cancelled.add_note(f"meanwhile stop() raised {type(error).__name__}: {error}")
    raise cancelled
