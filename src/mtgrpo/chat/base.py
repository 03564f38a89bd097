"""What a chat is: messages in, tokens out, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mtgrpo.types import Message, ToolSpec


class Thinking(Enum):
    """What becomes of the reasoning of earlier turns."""

    keep = "keep"  # it stays in the context: every turn extends the one before, token for token
    strip = "strip"  # where the template drops it, the context is written anew and a new segment begins


class Tools(Enum):
    """How the model is told of tools, and calls and replies are written."""

    auto = "auto"  # as the template has it; in the prompt where it knows no tools
    template = "template"  # as the template has it
    prompt = "prompt"  # in the system prompt and in contents, as Hermes does; the template sees no tools


@dataclass
class ChatSettings:
    """How messages become tokens."""

    template: str = "auto"  # auto = the tokenizer's own; "chatml", for base models too; or the path of a .jinja file
    tools: Tools = Tools.auto  # as the template has it, or in the prompt; auto = there where it knows no tools
    thinking: Thinking = Thinking.keep  # keep: the policy sees its earlier thoughts; strip: as the template has it


class Chat(ABC):
    """Turns messages into tokens and back, for one model."""

    stop_ids: tuple[int, ...]  # the tokens that end a turn
    notes: list[str]  # what is in force, to be printed at start
    template: str | None = None  # the jinja source in force; None = the tokenizer's own

    @abstractmethod
    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The tokens of a whole conversation so far, ready for the model's next turn.

        Raises ConfigError when the template refuses the conversation, or has no place for tools.
        """

    @abstractmethod
    def extend(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], ended: int | None = None
    ) -> list[int] | None:
        """The tokens between a sampled output and the model's next turn.

        `history` ends with the sampled message, `new` is what the environment answered. `ended` is the token that
        ended the output, None for the template's own end of turn, which follows if it is none of `stop_ids`. None when
        the next context cannot be proven to begin with the present one: then `open` writes it anew.
        """

    @abstractmethod
    def parse(self, output: Sequence[int]) -> Message:
        """The message that sampled tokens say, with or without their stop token. Never raises on what they say."""

    @abstractmethod
    def encode(self, message: Message) -> list[int]:
        """The output tokens, stop token included, with which the model would have said `message`."""
