"""Sources of tasks. One file = one data set: a dataclass whose `stream` gives a stream of tasks.

A stream never loads all of its data, and resumes exactly from its `state_dict`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.messages import messages_from
from mtgrpo.parts import Data, Part, Prompt
from mtgrpo.tasks.stream import IndexedStream as IndexedStream
from mtgrpo.tasks.stream import TaskStream, hashed
from mtgrpo.tasks.stream import permuted as permuted
from mtgrpo.types import SUMMARY, Message, Task, ToolCall

MATHS_SYSTEM_PROMPT = "Solve the problem. End with #### and the answer as a plain number."

EXAMPLES_SEED = 2_000_000  # few-shot examples are other generated tasks than the rollouts and the warm start


class Split(Enum):
    """Which part of a data set: `train` is what the policy learns from, `eval` is held out."""

    train = "train"
    eval = "eval"


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

    def with_prompt(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """`messages` after the system prompt, unless they bring one, and the few-shot examples. Raises ConfigError."""
        first = 1 if messages[0].role == "system" else 0
        system = messages[:first] or ((Message("system", self._system),) if self._system else ())
        *before, last = messages[first:]
        prompt = self._template.replace("{prompt}", last.content) if self._template else last.content
        return (*system, *self.worked, *before, replace(last, content=prompt))

    @functools.cached_property
    def _system(self) -> str:
        return _text_of(self.system_prompt, "task.system_prompt")

    @functools.cached_property
    def _template(self) -> str:
        template = _text_of(self.prompt_template, "task.prompt_template")
        if template and "{prompt}" not in template:
            raise ConfigError(
                f"task.prompt_template={template[:200]!r} must have {{prompt}} in it, where the task's stands"
            )
        return template

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
        tasks = islice(bare.stream(Split.train, EXAMPLES_SEED), 1000) if self.examples else ()
        pairs = ((task, self.demonstration(task, EXAMPLES_SEED)) for task in tasks)
        shown = list(islice(((*task.messages, *replies) for task, replies in pairs if replies), self.examples))
        if len(shown) < self.examples:
            raise ConfigError(
                f"task.examples={self.examples}: task {type(self).__name__} has no demonstrations to show; give "
                "messages of your own: task.examples=[{role: user, content: ...}, {role: assistant, content: ...}]"
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
        return Path(value.removeprefix("file:")).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}={value}: it cannot be read: {error}") from error


def held_out(task_id: str, fraction: float) -> bool:
    """Whether the task of this id belongs to the held-out `fraction`; depends on nothing else, so it never changes."""
    return hashed(task_id) < fraction * 2**64
