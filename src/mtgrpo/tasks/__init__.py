"""Sources of tasks. One file = one data set: a dataclass whose `stream` gives a stream of tasks.

A stream never loads all of its data, and resumes exactly from its `state_dict`. Its order is computed, not stored.
"""

import functools
import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from mtgrpo.errors import ConfigError
from mtgrpo.messages import messages_from
from mtgrpo.parts import Data, Part, Prompt
from mtgrpo.parts.extension import digest, misgiven
from mtgrpo.types import SUMMARY, Message, Task, ToolCall

MATHS_SYSTEM_PROMPT = "Solve the problem. End with #### and the answer as a plain number."

EXAMPLES_SEED = 2_000_000  # few-shot examples are other generated tasks than the rollouts and the warm start


class Split(Enum):
    """Which part of a data set: `train` is what the policy learns from, `eval` is held out."""

    train = "train"
    eval = "eval"


ENDED = "the stream of training tasks has ended: with repeat=True, as training asks for it, it must begin anew"


@runtime_checkable
class TaskStream(Protocol):
    """Iterates over tasks. `epoch` counts completed passes over the data (0 during the first, always if `endless`)."""

    notes: list[str]  # for the user, not shown yet
    epoch: int
    endless: bool  # a generated source: it never repeats

    def __iter__(self) -> Iterator[Task]: ...
    def __next__(self) -> Task: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class IndexedStream:
    """A stream over tasks that can be reached by number, in a new order every epoch.

    `task_at(index)` makes task `index` of `length`. `length` None is an endless generated source: the order is
    0, 1, 2, ... and `epoch` stays 0. `blocks` are the sizes of runs of rows that are stored together (their sum is
    `length`): the shuffle then orders the runs and the rows inside each, so that every run is read once per epoch.
    The order is computed, not stored: memory and the cost of resuming do not grow with the data. With `skips` a task
    that `task_at` refuses with ConfigError is passed over, which the first time is noted in `notes`.
    """

    def __init__(
        self,
        length: int | None,
        task_at: Callable[[int], Task],
        seed: int,
        repeat: bool = True,
        blocks: Sequence[int] = (),
        skips: bool = False,
    ) -> None:
        self.notes: list[str] = []  # for the user, not shown yet
        self.skipped = 0  # tasks passed over so far
        self._skips = skips
        self.epoch = 0
        self.endless = length is None
        self._position = 0  # rows delivered in this epoch
        self._length = length
        self._task_at = task_at
        self._seed = seed
        self._repeat = repeat
        self._blocks = blocks or (() if length is None else (length,))
        self._starts = [0, *accumulate(self._blocks)]
        self._plan: tuple[int, list[int], list[int]] = (-1, [], [])  # epoch, its order of blocks, where each ends

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        in_a_row = 0
        while self._length != 0 and (self._repeat or not self.epoch):
            task: Any = None
            try:
                task = self._task_at(self._index())
                if not isinstance(task, Task):
                    raise misgiven(self._task_at, task, "give a Task")
            except ConfigError as error:
                in_a_row += 1
                if not self._skips or in_a_row == self._length:
                    raise
                if not self.skipped:
                    self.notes.append(f"what cannot be used is skipped, the first time here: {error}")
                self.skipped += 1
            self._position += 1
            if self._position == self._length:
                self.epoch += 1
                self._position = 0
            if task is not None:
                return task
        raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream; JSON-serialisable."""
        return {"epoch": self.epoch, "position": self._position, "rows": self._length, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which a stream opened with the same arguments gave.

        Raises ConfigError when the number of rows is not what it was: the order would be another one.
        """
        saved = state.get("rows", "other")  # a mixture has none
        if saved != self._length:
            before, now = (f"{rows} rows" if rows else "endless problems" for rows in (saved, self._length))
            raise ConfigError(
                f"the data had {before} when the state was saved and has {now} now; go on with the data of that run, "
                "or start a new run"
            )
        self.epoch, self._position, self.skipped = state["epoch"], state["position"], state["skipped"]

    def _index(self) -> int:
        if self._length is None or not self._repeat:
            return self._position
        if self._plan[0] != self.epoch:
            count = len(self._blocks)
            order = [permuted(number, count, self._key("blocks")) for number in range(count)]
            self._plan = (self.epoch, order, list(accumulate(self._blocks[block] for block in order)))
        _, order, ends = self._plan
        nth = bisect_right(ends, self._position)
        block = order[nth]
        size = self._blocks[block]
        return self._starts[block] + permuted(self._position - (ends[nth] - size), size, self._key(block))

    def _key(self, part: int | str) -> int:
        return hashed(f"{self._seed}/{self.epoch}/{part}")


def demonstration(source: "TaskSource", task: Task, seed: int) -> Sequence[Message] | None:
    """That of `source`, which may be somebody's own. Raises MisgivenError where it is none."""
    said: Any = source.demonstration(task, seed)
    if said and not (isinstance(said, tuple | list) and all(isinstance(one, Message) for one in cast("Any", said))):
        raise misgiven(source.demonstration, said, "give messages, such as (Message('assistant', 'text'),), or None")
    if said and said[0].role != "assistant":
        how = "give what follows the task's own messages, which begins with the assistant's"
        raise misgiven(source.demonstration, said, how)
    return said


def permuted(index: int, length: int, key: int) -> int:
    """The image of `index` under the permutation of range(length) that `key` draws, in constant time and memory.

    A Feistel network over the next power of four, walked until it lands inside the range (Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002). Good for shuffling, not for secrecy.
    """
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(12):
            left, right = right, left ^ (_mix(right + key + (round_number << 32)) & mask)
        index = left << half_bits | right
        if index < length:
            return index


def _mix(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014): 64 well-mixed bits."""
    value = (value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def hashed(text: str) -> int:
    """64 bits that depend on `text` alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass
class TaskSource(Part, ABC):
    """Base of all task sources."""

    # put before every task's messages unless they begin with a system message: a text, or file:PATH of one
    system_prompt: Prompt = ""
    # what the last message says, {prompt} standing for what the task has there; or file:PATH
    prompt_template: Prompt = ""
    examples: Data = 0  # few-shot, after it: a number of demonstrations of training tasks, or messages of your own

    @abstractmethod
    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """A stream over `split`, shuffled by `seed`; endless when `repeat`, else one pass in the file's order."""

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...] | None:
        """A demonstration of `task`: assistant messages and the tools' replies, for the warm start.

        A pure function of (task, seed). None when this source has no demonstration for the task.
        """
        return None

    @property
    def demonstrates(self) -> bool:
        """Whether it has demonstrations at all."""
        return type(self).demonstration is not TaskSource.demonstration

    def with_prompt(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """`messages` after the system prompt, unless they bring one, and the few-shot examples. Raises ConfigError."""
        own_system, template = self._prompts
        first = 1 if messages[0].role == "system" else 0
        system = messages[:first] or ((Message("system", own_system),) if own_system else ())
        *before, last = messages[first:]
        return (*system, *self.worked, *before, replace(last, content=template.replace("{prompt}", last.content)))

    @functools.cached_property
    def _prompts(self) -> tuple[str, str]:
        """The system prompt and the template."""
        system = _text_of(self.system_prompt, "task.system_prompt")
        template = _text_of(self.prompt_template, "task.prompt_template") or "{prompt}"
        if "{prompt}" not in template:
            raise ConfigError(
                f"task.prompt_template={template[:200]!r} must have {{prompt}} where the task's own prompt goes"
            )
        return system, template

    @functools.cached_property
    def worked(self) -> tuple[Message, ...]:
        """The few-shot examples before every task. Raises ConfigError."""
        if not isinstance(self.examples, int):
            values = cast("list[Any]", self.examples if isinstance(self.examples, list) else [self.examples])
            messages = messages_from(values, "task.examples")
            if messages and (messages[0].role, messages[-1].role) != ("user", "assistant"):
                raise ConfigError(
                    "task.examples must be messages that begin with a user's and end with an assistant's, "
                    f"got the roles {', '.join(message.role for message in messages)}"
                )
            return messages
        bare = replace(self, system_prompt="", examples=0)
        tasks = islice(bare.stream(Split.train, EXAMPLES_SEED), 1000) if self.examples and self.demonstrates else ()
        pairs = ((task, self.demonstration(task, EXAMPLES_SEED)) for task in tasks)
        shown = list(islice(((*task.messages, *replies) for task, replies in pairs if replies), self.examples))
        if len(shown) < self.examples:
            raise ConfigError(
                f"task.examples={self.examples}: task {type(self).__name__} has no demonstrations to show; give "
                "messages of your own: 'task.examples=[{role: user, content: ...}, {role: assistant, content: ...}]'"
            )
        return tuple(message for example in shown for message in example if message.name != SUMMARY)


@dataclass
class Generated(TaskSource, ABC):
    """Base of sources that make their tasks up: endless, and task number i is the same in every run with one `seed`."""

    @abstractmethod
    def task(self, split: Split, seed: int, index: int) -> Task:
        """Task number `index` of a split."""

    def stream(self, split: Split, seed: int, repeat: bool = True) -> TaskStream:
        """An endless stream, whatever `repeat` says."""
        return IndexedStream(None, lambda index: self.task(split, seed, index), seed, repeat)


def user(prompt: str) -> tuple[Message, ...]:
    """The user's message `prompt`."""
    return (Message("user", prompt),)


def called(tool: str, arguments: Mapping[str, Any], answer: str) -> tuple[Message, Message]:
    """A call and what the tool answers, for demonstrations."""
    return Message("assistant", tool_calls=(ToolCall(tool, arguments),)), Message("tool", answer, name=tool)


def _text_of(value: str, option: str) -> str:
    """What a file holds, where it is named as file:PATH, else the text itself. Raises ConfigError."""
    if not value.startswith("file:"):
        return value
    try:
        path = Path(value.removeprefix("file:")).expanduser().absolute()
        digest(path)
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}={value}: it cannot be read: {error}") from error


def held_out(task_id: str, fraction: float) -> bool:
    """Whether the task of this id belongs to the held-out `fraction`; depends on nothing else, so it never changes."""
    return hashed(task_id) < fraction * 2**64
