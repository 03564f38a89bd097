"""The nouns: what flows from a task to a trained token. Plain data; no torch.

    Task -> Trajectory = [Turn, Turn, ...] -> Group = the trajectories of one task

A `Turn` is a pair (context tokens, output tokens) with the log-probabilities the sampling policy gave to the output.
Nothing else is ever trained on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

from mtgrpo.errors import require

SUMMARY = "summary"  # in a demonstration, the name of an assistant's message that answers a condenser
UNLIMITED = 2**40  # tokens or requests, where nothing limits them
LEARNING, EVALUATION, COLLECTING = "reinforcement learning", "evaluation", "collecting"  # stages, as records name them

Role = Literal["system", "user", "assistant", "tool"]


class Finish(Enum):
    """Why a completion ended."""

    STOP = "stop"  # the policy sampled a stop token (which is part of the output and is trained)
    LENGTH = "length"  # a token limit cut it


class Status(Enum):
    """How a trajectory ended. With a mistake of the model it is COMPLETED, with a low reward, never FAILED."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # a limit on turns or tokens was reached, or what the policy wrote is of no use
    FAILED = "failed"  # by the world, never by what the policy writes (PolicyError): not trained, in no baseline


def is_success(status: str, reward: float, success_at: float) -> bool:
    """Whether a conversation ended by itself, within all limits, with a reward of at least `success_at`."""
    return status == Status.COMPLETED.value and reward >= success_at


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of the model. Example: `ToolCall("calculator", {"expression": "17 * 23"})`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model sees it: name, description and the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. Example: `Message("user", "What is 17 * 23?")`."""

    role: Role
    content: str = ""
    reasoning: str = ""  # the text of an assistant between <think> and </think>
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""  # role tool: the tool that answers
    error: str = ""  # role assistant: why its tool calls could not be read; "" = they could

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the content of a message must be a text, got {self.content!r:.200}")
        calls: Any = self.tool_calls
        if calls and not (isinstance(calls, tuple | list) and all(isinstance(call, ToolCall) for call in calls)):
            raise TypeError(f"tool_calls must be a tuple such as (ToolCall('name', {{}}),), got {calls!r:.200}")


def check_messages(messages: Any) -> None:
    """Raise TypeError, in the line of whoever gives them, for what is no sequence of messages."""
    if not isinstance(messages, tuple | list) or not all(isinstance(one, Message) for one in cast("Any", messages)):
        raise TypeError(f"messages must be a tuple such as (Message('user', 'text'),), got {messages!r:.200}")
    if strange := [one.role for one in messages if one.role not in get_args(Role)]:
        raise TypeError(f"the role of a message must be one of {', '.join(get_args(Role))}, got {strange[0]!r}")


class CallOutcome(Enum):
    """What one tool call of the model led to."""

    answered = "answered"
    refused = "refused"  # the model's mistake: unreadable, wrong arguments, or what the tool does not do
    unknown = "unknown"  # the model's mistake: there is no such tool
    timed_out = "timed_out"  # taken for the model's mistake: no answer within the limit, and in the end not again
    outage = "outage"  # the tool failed
    unseen = "unseen"  # an agent made it: what came of it is not known here


MISTAKES = (CallOutcome.refused, CallOutcome.unknown, CallOutcome.timed_out)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What became of one tool call."""

    name: str  # of the tool, as the model wrote it; "" where it cannot be read
    outcome: CallOutcome = CallOutcome.answered
    retries: int = 0  # how often it was made again
    seconds: float = 0.0  # until its answer, further attempts included
    why: str = ""  # of an outage
    began_s: float = field(default=0.0, compare=False)  # by `time.perf_counter`; 0.0 = not known


class Counts:
    """Sums over the tool calls of whatever has `calls`."""

    __slots__ = ()
    calls: Sequence[CallRecord]

    @property
    def tool_calls(self) -> int:
        """How many the model made."""
        return len(self.calls)

    @property
    def tool_errors(self) -> int:
        """How many of them were the model's mistakes."""
        return sum(call.outcome in MISTAKES for call in self.calls)

    @property
    def tool_timeouts(self) -> int:
        """How many of these mistakes were calls that took too long."""
        return sum(call.outcome is CallOutcome.timed_out for call in self.calls)

    @property
    def tool_retries(self) -> int:
        """How often calls were made again."""
        return sum(call.retries for call in self.calls)

    @property
    def outages(self) -> list[str]:
        """Why calls were answered with the news that their tool is out of order."""
        return [call.why for call in self.calls if call.outcome is CallOutcome.outage]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to solve. Example: `Task("gsm8k/train/7", (Message("user", "..."),), answer="42")`."""

    id: str
    messages: tuple[Message, ...]
    answer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_messages(self.messages)
        if not isinstance(self.answer, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the answer of task {self.id} must be a text, got {self.answer!r:.200}")


@dataclass
class Sampling:
    """How one turn is sampled. The log-probabilities are those of the distribution these settings define."""

    temperature: float = 1.0  # 0 = greedy (log-probabilities are then those of temperature 1)
    top_p: float = 1.0  # keep the most likely tokens that hold this share of the probability
    top_k: int = 0  # keep that many; 0 = off
    min_p: float = 0.0  # keep tokens of at least this share of the most likely token's probability
    max_new_tokens: int = 512  # per turn
    # end a turn too; the template's own end then follows, untrained
    stop_ids: list[int] = field(default_factory=list[int])
    timeout_s: float = 0.0  # of one turn, training in between counted; a conversation that exceeds it fails; 0 = none

    def __post_init__(self) -> None:
        require(self, temperature=">= 0 and <= 100 (0 = greedy)", top_p="> 0 and <= 1", top_k=">= 0 (0 = off)")
        require(self, min_p=">= 0 and < 1", max_new_tokens=">= 1", timeout_s=">= 0 (0 = none)")

    @property
    def cuts(self) -> bool:
        """Whether tokens are cut off before one is sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class Limits:
    """What one conversation may use, beside `environment.max_turns`."""

    context_tokens: int  # context and output of one turn together
    sampled_tokens: int = UNLIMITED  # the policy's, over the whole trajectory
    tool_tokens: int = UNLIMITED  # the environment's, over the whole trajectory
    requests: int = UNLIMITED  # that an agent may make

    def of_turn(self, sampling: Sampling, context: int, sampled: int, **others: int) -> tuple[str, int]:
        """The limit that is nearest to the next turn, and how many tokens it leaves; below 1 there is no turn.

        context: the tokens of its context. sampled: those that the trajectory has used. others: limits by name.
        """
        rooms = {
            "max_new_tokens": sampling.max_new_tokens,
            "max_context_length": self.context_tokens - context,
            "max_trajectory_tokens": self.sampled_tokens - sampled,
            **others,
        }
        limit = "max_context_length" if rooms["max_context_length"] < 1 else min(rooms, key=lambda name: rooms[name])
        return limit, rooms[limit]


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one turn: parallel lists, one entry per sampled token."""

    tokens: list[int]
    logprobs: list[float]  # nats, under the distribution sampled from
    versions: list[int]  # the policy version (number of weight updates) that sampled each token
    finish: Finish
    kept: list[array[int]] = field(default_factory=list["array[int]"])  # by top-k, top-p, min-p; [] = everything


class Sample(Protocol):
    """Continues one conversation: an engine hands one of these to each conversation it opens."""

    async def __call__(self, tokens: Sequence[int], sampling: Sampling) -> Completion: ...


OpenConversation = Callable[[str, str, int], AbstractAsyncContextManager[Sample]]  # (scope, task id, sample)


class Attend(Protocol):
    """The share of attention that spans [start, end) of a context get from its end; of engines that run the model."""

    async def __call__(self, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[float]: ...


@dataclass(slots=True)
class Turn:
    """One pair (context, output).

    `parent` is the turn of the trajectory, an earlier one, that this one continues: `new_context` is what its context
    has beyond the parent's context and output. -1: it continues none, and `new_context` is the whole context. A run of
    turns that continue one another is a segment; what turns share is computed once in training.
    """

    new_context: list[int]
    output: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish
    message: Message
    parent: int = -1
    observations: tuple[Message, ...] = ()  # the environment's answer
    opens_with: Sequence[Message] = ()  # of an agent that began a context anew, not the trajectory's opening
    kept: list[array[int]] = field(default_factory=list["array[int]"])  # as in the completion
    auxiliary: bool = False  # beside the conversation: it answers a condenser, or an agent's helper
    paid: float = 0.0  # the reward that the environment gave for it
    asked_s: float = field(default=0.0, compare=False)  # when it was asked for, and
    ended_s: float = field(default=0.0, compare=False)  # when it was there, by `time.perf_counter`; 0.0 = not known

    @staticmethod
    def of(sampled: Completion, message: Message, new_context: list[int], parent: int, auxiliary: bool = False) -> Turn:
        """The turn that an engine has sampled, and that says `message`."""
        tokens = sampled.tokens, sampled.logprobs, sampled.versions, sampled.finish
        return Turn(new_context, *tokens, message, parent, kept=sampled.kept, auxiliary=auxiliary)


_OF_TOKENS = ("new_context", "output", "logprobs", "versions")  # of a turn, lists


@dataclass(slots=True)
class Trajectory(Counts):
    """One conversation about one task, from its first turn to its end."""

    task: Task
    sample_index: int = 0  # its index in the group
    turns: list[Turn] = field(default_factory=list[Turn])
    status: Status = Status.COMPLETED
    reason: str = ""  # why it was truncated or failed
    reward: float = 0.0  # of the whole trajectory
    components: dict[str, float] = field(default_factory=dict[str, float])  # what the reward is made of, by name
    turn_rewards: list[float] = field(default_factory=list[float])  # of each turn; [] = no turn has one
    paid: float = 0.0  # this part of `reward` is in `turn_rewards` too, and training counts it there alone
    attempts: int = 1  # how often it was run: above 1 after failures
    retried: list[str] = field(default_factory=list[str])  # why the attempts before the last failed
    calls: Sequence[CallRecord] = ()  # of tools
    queued_s: float = 0.0  # waiting for one of the `rollout.max_concurrent` slots, until
    began_s: float = field(default=0.0, compare=False)  # it began, by `time.perf_counter`; 0.0 = not known
    sample_s: float = 0.0  # waiting for the engine
    tool_s: float = 0.0  # waiting for the environment
    condense_s: float = 0.0  # condensing, sampling for it not counted
    condensed: int = 0  # how often its context was condensed
    tokens_before: int = 0  # of all contexts before they were condensed
    tokens_after: int = 0  # of the same contexts after
    given: float | None = None  # the reward by its agent; None = the configured reward scores it
    output: str = ""  # what its agent gave as its answer; "" = the last message is that
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what else its agent gave
    counts: dict[str, float] = field(default_factory=dict[str, float])  # of its agent's requests, by name
    opening: Sequence[Message] = ()  # what it began with, where that is not the task's messages alone
    tools: Sequence[ToolSpec] = ()  # that the model was told of
    # turns whose answer nobody received, or that an agent leaves out
    untrained: list[Turn] = field(default_factory=list[Turn])

    def copy(self) -> Trajectory:
        """One that can be changed without this one: for code of others. What task and agent's data hold is shared."""
        turns = [replace(turn, **{name: getattr(turn, name)[:] for name in _OF_TOKENS}) for turn in self.turns]
        for turn in turns:
            turn.kept = [tokens[:] for tokens in turn.kept]
        tables = {name: dict(getattr(self, name)) for name in ("components", "data", "counts")}
        lists = {name: getattr(self, name)[:] for name in ("turn_rewards", "untrained", "retried")}
        return replace(self, turns=turns, **lists, **tables)

    @property
    def failed(self) -> bool:
        """Whether the world failed it."""
        return self.status is Status.FAILED

    def succeeded(self, success_at: float) -> bool:
        """Whether it is a success; see `is_success`."""
        return is_success(self.status.value, self.reward, success_at)

    @property
    def final(self) -> str:
        """The answer of its agent, or the text of the last message to the environment, without reasoning; "" = none."""
        return self.output or next((turn.message.content for turn in reversed(self.turns) if not turn.auxiliary), "")

    @property
    def messages(self) -> list[Message]:
        """What was said between policy and environment; a condenser's questions were not."""
        spoken = [turn for turn in self.turns if not turn.auxiliary]
        opening = self.opening or self.task.messages
        return [*opening, *(message for turn in spoken for message in (turn.message, *turn.observations))]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens the policy sampled."""
        return sum(len(turn.output) for turn in self.turns)

    @property
    def led_by_agent(self) -> bool:
        """Whether a foreign agent led it, in the place of the environment."""
        return bool(self.counts)

    @property
    def segments(self) -> int:
        """Number of runs of turns that continue one another."""
        return len(self.turns) - len({turn.parent for turn in self.turns} - {-1})

    @property
    def longest_context_tokens(self) -> int:
        """The most tokens that a turn's context and output have together; 0 without turns."""
        lengths: list[int] = []
        for turn in self.turns:
            before = lengths[turn.parent] if turn.parent >= 0 else 0
            lengths.append(before + len(turn.new_context) + len(turn.output))
        return max(lengths, default=0)

    def context(self, index: int) -> list[int]:
        """The full context tokens of turn `index`."""
        pieces = [self.turns[index].new_context]
        while (index := self.turns[index].parent) >= 0:
            pieces += [self.turns[index].output, self.turns[index].new_context]
        return [token for piece in reversed(pieces) for token in piece]


class WeightPush(NamedTuple):
    """How an engine took over new weights, in seconds by `time.perf_counter`."""

    version: int  # the number of updates that they have had
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Group:
    """The trajectories of one task (siblings), scored together. Statistics are over trajectories, never segments."""

    task: Task
    trajectories: list[Trajectory]
    score_s: float = 0.0  # that rewards took, the event loop around them left out

    @property
    def valid(self) -> list[Trajectory]:
        """Those that did not fail."""
        return [trajectory for trajectory in self.trajectories if not trajectory.failed]

    def success_rate(self, success_at: float) -> float | None:
        """The share of successes among those that did not fail; None where all failed."""
        outcomes = [trajectory.succeeded(success_at) for trajectory in self.valid]
        return sum(outcomes) / len(outcomes) if outcomes else None
