"""Sources of tasks. One file = one data set: a dataclass whose `stream` gives a stream of tasks.

A stream never loads all of its data, and resumes exactly from its `state_dict`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.messages import messages_from, shown
from mtgrpo.parts import Data, Part, Prompt, Text
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


@dataclass
class Columns:
    """Which column of a row holds what. A dot reaches into a nested column: `reward_model.ground_truth`."""

    prompt: Text = "prompt"  # a string, or a list of messages
    messages: Text = "messages"  # a list of {role, content}; used where a row has no prompt
    answer: Text = "answer"  # a string, a number or a list of accepted ones; where absent, that of verl or SkyRL
    id: Text = "id"  # a string or a number; may be absent: the row's number is taken


_PROMPTS = ("question", "problem", "instruction", "query", "input", "text")  # what data sets call it
# Of verl, the first one of its search tasks, and of SkyRL.
_GROUND_TRUTHS = ("reward_model.ground_truth.target", "reward_model.ground_truth", "reward_spec.ground_truth")


class Rows(ABC):
    """Rows of a data set that can be reached by number without being loaded together."""

    blocks: Sequence[int]  # the sizes of runs of rows that are stored, and best read, together

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @abstractmethod
    def where(self, index: int) -> str:
        """The row's file and number, for error messages."""

    @abstractmethod
    def default_id(self, index: int) -> str:
        """The id of a row that has none."""

    @abstractmethod
    def readings(self, column: str = "") -> Iterator[Callable[[], Mapping[str, Any]]]:
        """Every row in order, each as a function that gives it, or that column of it, or raises ConfigError."""

    def notes(self) -> list[str]:
        """What is to be said of the rows that were read so far, or of the first ones."""
        return []

    def ids(self, column: str) -> Iterator[str]:
        """The id of every row, in order: the value of `column`; its default where that cannot be used."""
        for index, read in enumerate(self.readings(column)):
            try:
                yield _scalar(read(), "id", column, self.where(index)) or self.default_id(index)
            except ConfigError:  # whoever uses the row finds out
                yield self.default_id(index)

    def divided(self, split: Split, id_column: str, eval_fraction: float) -> Sequence[int]:
        """The rows of `split`, ascending, where rows are held out by their ids alone."""
        ids = enumerate(self.ids(id_column))
        return array("q", (row for row, name in ids if held_out(name, eval_fraction) is (split is Split.eval)))


def task_from_row(row: Mapping[str, Any], columns: Columns, where: str, default_id: str) -> Task:
    """The task in a row of a table; columns that are not in `columns` become the task's metadata.

    Where the user names no column of answers and the row has none, verl's reward_model.ground_truth (or its `target`)
    or SkyRL's reward_spec.ground_truth is taken. Of several accepted answers the first is the task's, and
    metadata["answers"] holds all.

    Raises ConfigError, beginning with `where`, naming the column that is missing or of a wrong type.
    """
    used = columns.messages if cell(row, columns.prompt) is None else columns.prompt
    prompt = cell(row, used)
    if prompt is None:
        likely = next((name for name in _PROMPTS if isinstance(row.get(name), str)), "NAME")
        raise ConfigError(
            f"{where}: no column {columns.prompt!r} and no column {columns.messages!r}; {_seen(row)}; say which "
            f"holds the prompt with task.columns.prompt={likely} (a string) or task.columns.messages=NAME (a list of "
            "messages)"
        )
    messages = _messages(prompt, f"{where}: column {used!r}")
    answers = _answers(row, columns.answer, where)
    task_id = _scalar(row, "id", columns.id, where) or default_id
    rest = {name: value for name, value in row.items() if name not in (used, columns.answer, columns.id)}
    return Task(task_id, messages, answers[0], rest | ({"answers": answers} if len(answers) > 1 else {}))


def cell(row: Mapping[str, Any], column: str) -> Any:
    """The value of `column`, which may be a dotted path into nested columns; None when absent."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping):
            return None
        value = cast("Mapping[str, Any]", value).get(part)
    return value


def _answers(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    """The accepted answers as text; [""] where absent, unless the user named the column."""
    if column == Columns.answer and cell(row, column) is None:
        column = next((name for name in _GROUND_TRUTHS if all(map(_is_scalar, _listed(cell(row, name))))), column)
    values = cell(row, column)
    if isinstance(values, list) and values:
        return [_text(value, row, "answer", column, where) for value in _listed(values)]
    return [_scalar(row, "answer", column, where)]


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) and value else [value]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _scalar(row: Mapping[str, Any], option: str, column: str, where: str) -> str:
    """A string or a number as text; "" where absent, unless the user named the column."""
    value = cell(row, column)
    if value is None:
        if column == getattr(Columns, option):
            return ""
        raise ConfigError(f"{where}: no column {column!r}; {_seen(row)}; correct task.columns.{option}={column}")
    return _text(value, row, option, column, where)


def _text(value: Any, row: Mapping[str, Any], option: str, column: str, where: str) -> str:
    if not _is_scalar(value):
        raise ConfigError(
            f"{where}: column {column!r} must be a string or a number, got {shown(value)}; {_seen(row)}; "
            f"choose another with task.columns.{option}=NAME"
        )
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _messages(prompt: Any, where: str) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    messages = messages_from(cast("list[Any]", prompt), where) if isinstance(prompt, list) else ()
    if not messages:
        raise ConfigError(
            f"{where} must be a string or a list of messages, got {shown(prompt)}; choose another with "
            "task.columns.prompt=NAME or task.columns.messages=NAME"
        )
    if messages[-1].role == "assistant":
        raise ConfigError(
            f"{where} ends with an assistant message, so there is nothing left to answer; remove that message, or "
            "choose another column with task.columns.prompt=NAME or task.columns.messages=NAME"
        )
    return messages


def _seen(row: Mapping[str, Any]) -> str:
    """The columns of a row, nested ones by their dotted path."""
    nested = ((name, cast("Any", value) if isinstance(value, Mapping) else {}) for name, value in row.items())
    names = [f"{name}.{part}" if part else name for name, parts in nested for part in parts or [""]]
    return f"the columns are {', '.join(names) or 'none'}"
