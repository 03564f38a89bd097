"""Messages <-> tokens: the only code that knows chat templates and tool-call formats.

What the policy sampled is never decoded and encoded again: `extend` returns only the new tokens, which follow the
context and the sampled output. Text that the policy did not sample cannot become a special token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from mtgrpo.chat.formats import ToolFormat
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Reach, Where
from mtgrpo.types import Message, ToolSpec


class Thinking(Enum):
    """Whether the reasoning of earlier turns stays in the context."""

    keep = "keep"  # it stays in the context: every turn extends the one before, token for token
    strip = "strip"  # where the template drops it, the context is rendered again and a new segment begins


class Tools(Enum):
    """How tools are described to the model, and how calls and replies are written."""

    auto = "auto"  # by the template; in the prompt where the template has no place for them
    template = "template"  # by the template
    prompt = "prompt"  # in the system prompt and in contents, as Hermes does; the template gets no tools


@dataclass
class ChatSettings:
    """How messages become tokens."""

    # auto = the tokenizer's own; "chatml", for base models too; or the path of a .jinja file
    template: Annotated[str, Where(Reach.file, r"(?!(auto|chatml)\Z)")] = "auto"
    tools: Tools = Tools.auto  # by the template, or in the prompt; auto = the prompt where the template has no place
    thinking: Thinking = Thinking.keep  # keep: the policy sees its earlier reasoning; strip: as the template has it

    def check_machine(self) -> None:
        """Raise ConfigError where there is no such template."""
        if self.template not in ("auto", "chatml") and not Path(self.template).expanduser().is_file():
            raise ConfigError(f"chat.template={self.template!r} is neither auto nor chatml nor an existing .jinja file")


class Chat(ABC):
    """Turns messages into tokens and back, for one model."""

    stop_ids: tuple[int, ...]  # the tokens that end a turn
    notes: list[str]  # the settings in force, for the start of a run; `open` may add one
    template: str | None = None  # the jinja source in use; None = the tokenizer's own
    format: ToolFormat | None = None  # how tool calls are written; None where a library reads them

    @abstractmethod
    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The tokens of a whole conversation so far, with the generation prompt of the model's next turn.

        Raises ConfigError when the template refuses the conversation, or has no place for tools.
        """

    def shared(self, messages: Sequence[Message], counts: Sequence[int], tools: Sequence[ToolSpec]) -> list[int]:
        """For each of `counts`: how many tokens `open` begins alike with, given all of `messages` and so many."""
        from mtgrpo.chat.safe_tokenizer import shared_length  # noqa: PLC0415  settings alone import no library

        tokens = self.open(messages, tools)
        return [shared_length(tokens, self.open(messages[:count], tools)) for count in counts]

    @abstractmethod
    def extend(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], ended: int | None = None
    ) -> list[int] | None:
        """The tokens between a sampled output and the model's next turn.

        `history` ends with the sampled message, `new` is the environment's answer. `ended` is the token that ended the
        output, None for the template's own end of turn; if it is none of `stop_ids`, the template's end of turn
        follows. Returns None when the next context cannot be proven to begin with the present one: then call `open`.
        """

    @abstractmethod
    def parse(self, output: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        """The message in sampled tokens, its arguments of the types of `tools`. Mistakes in it are `Message.error`."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of sampled tokens, special ones included."""

    @abstractmethod
    def encode(self, message: Message) -> list[int]:
        """The output tokens, stop token included, with which the model would have generated `message`."""


def open_chat(tokenizer: Any, settings: ChatSettings) -> Chat:
    """The chat of `tokenizer` (a transformers fast tokenizer).

    A model is read the same whatever it is named: the library `renderers`, which knows some by their names on the hub,
    serves with `chat.template=auto` those alone whose template is missing or writes tool calls in a format that is not
    in `formats.py`. Raises ConfigError when there is no usable template.
    """
    from mtgrpo.chat.template import TemplateChat  # noqa: PLC0415  settings alone import no library
    from mtgrpo.model.tokenizer import end_tokens  # noqa: PLC0415

    name = str(tokenizer.name_or_path)
    added = set(tokenizer.get_added_vocab().values())
    ends = [token for token in end_tokens(name) if token in added] if name else []
    on_hub = "/" in name and not Path(name).exists()
    by_name = on_hub and settings.template == "auto" and settings.tools is not Tools.prompt
    chat = TemplateChat(tokenizer, settings, ends) if tokenizer.chat_template or not by_name else None
    if by_name and not (chat and chat.knows_tools):
        from mtgrpo.chat.renderer import RendererChat, find_config  # noqa: PLC0415

        config = find_config(name)
        if config is not None and (named := RendererChat(tokenizer, config, settings.thinking, ends)).knows_tools:
            return named
    return chat or TemplateChat(tokenizer, settings, ends)
