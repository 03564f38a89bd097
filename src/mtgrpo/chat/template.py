"""The chat of any tokenizer with a jinja chat template."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mtgrpo.chat import Chat, ChatSettings, Thinking, Tools
from mtgrpo.chat.formats import FORMATS, Hermes, ToolFormat, split_thinking
from mtgrpo.chat.jinja_template import (
    ANCHOR,
    OTHERS,
    PROBE_CALL,
    PROBE_TOOL,
    USER,
    Template,
    call_message,
    find_fault,
    missing_for_tools,
    put_tools_in_prompt,
    read_packaged,
)
from mtgrpo.chat.safe_tokenizer import SafeTokenizer, shared_length
from mtgrpo.errors import ConfigError
from mtgrpo.runtime.isolation import try_within_limits
from mtgrpo.types import Message, ToolSpec

_STUBS = ((USER,), (USER, Message("assistant", "well"), Message("user", "and then")))
_OPEN_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
_EMPTY_THINKING = re.compile(r"^(<think>)?\s*</think>\s*")
_LEARNED_MESSAGES = 4  # at once; more come in too many shapes, and to learn one would hold up all conversations
_MOST_SHAPES = 1024  # that are kept


def chatml() -> str:
    """The source of the project's own chat template: ChatML with Hermes tool calls."""
    return read_packaged("chatml.jinja")


def _source(tokenizer: Any, settings: ChatSettings) -> str:
    """The jinja source that `chat.template` names. Raises ConfigError where there is none."""
    template = settings.template
    if template == "chatml":  # a base model may spell <|im_start|> as text; the end of a turn must be a token
        end = "<|im_end|>" if "<|im_end|>" in tokenizer.get_added_vocab() else tokenizer.eos_token
        if not end:
            raise ConfigError(
                f"chat.template=chatml: the tokenizer {tokenizer.name_or_path!r} has neither <|im_end|> nor an eos "
                "token to end a turn with; write one as eos_token into its tokenizer_config.json"
            )
        return chatml().replace("<|im_end|>", end)
    if template != "auto":
        settings.check_machine()
        return Path(template).expanduser().read_text("utf-8")
    own: Any = tokenizer.chat_template
    if isinstance(own, dict):  # several templates by name
        named = cast(dict[str, str], own)
        own = named.get("tool_use") or named.get("default")
    if not own:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "give one with chat.template=chatml or chat.template=PATH of a .jinja file"
        )
    return own


class TemplateChat(Chat):
    """Any tokenizer with a jinja chat template.

    The template is rendered for whole conversations only. For single turns its pieces are learned once per shape
    (roles, and which fields are empty) and joined; of many, or where it depends on contents, the text is rendered.
    """

    def __init__(self, tokenizer: Any, settings: ChatSettings, ends: Sequence[int] = ()) -> None:
        """Raises ConfigError where there is no template, or it cannot be used. ends: further tokens that end a turn."""
        source, self._safe = _source(tokenizer, settings), SafeTokenizer(tokenizer)
        if why := try_within_limits(lambda: find_fault(Template(tokenizer, source, self._safe), tools=True)):
            raise _unusable(f"to render it {why}")
        self._template = Template(tokenizer, source, self._safe)
        lacking = missing_for_tools(self._template)
        in_prompt = bool(lacking) if settings.tools is Tools.auto else settings.tools is Tools.prompt
        self._lacking = lacking if in_prompt else ""
        if in_prompt:
            self._template = Template(tokenizer, put_tools_in_prompt(self._template), self._safe)
        self.template = self._template.source
        self._thinking = settings.thinking
        self._extensions: dict[tuple[Any, ...], TemplatePieces | None] = {}
        self._visible: dict[tuple[Any, ...], frozenset[int]] = {}

        self._prompt = self._template.render([USER], prompt=True)
        self._opener = self._safe.last_added(self._safe.encode(self._prompt))
        spaced = self._safe.encode_after(self._opener, "x") != self._safe.encode_after("", "x")
        self._space = " " if spaced else ""  # which the tokenizer puts before an output
        self._inside_thinking = bool(re.search(r"<think>\s*$", self._prompt))
        self._turn_end, self._ends_at_once = self._find_turn_end()
        self._end = self._turn_end or tokenizer.eos_token
        if not self._end:
            raise ConfigError("the chat template ends a turn with no special token and the tokenizer has no eos token")
        stops: list[int | None] = [self._safe.added.get(self._end), tokenizer.eos_token_id, *ends]
        self.stop_ids = tuple(dict.fromkeys(token for token in stops if token is not None))
        self._format, self._no_tools = self._find_format()
        self.format = self._format
        self.knows_tools = not (self._lacking or self._no_tools)  # its own, and its calls are read
        if "contentx7q" not in (self._template.try_render([USER, call_message(2, "contentx7q")]) or ""):
            self._template.calls_in_content = self._format
        if why := find_fault(self._template, tools=not self._no_tools):
            raise _unusable(why)
        self._separator = self._find_separator()
        form = self._no_tools or f"tool calls {self._format.name}{' in the prompt' if in_prompt else ''}"
        turns = "" if self._turn_end else "; the template has none, so every turn starts a new segment"
        thinking = f"thinking {settings.thinking.value}"
        self.notes = [f"chat: template {settings.template}, {form}, {thinking}, end of turn {self._end}{turns}"]

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        if tools and self._no_tools:
            raise ConfigError(f"the chat template has {self._no_tools}; use chat.tools=prompt, or {OTHERS}")
        if tools and self._lacking:
            self.notes.append(
                f"chat: the template has no {self._lacking}: they are described in the prompt (chat.tools=prompt)"
            )
            self._lacking = ""  # said once
        return self._safe.encode(self._template.render(messages, tools, prompt=True))

    def shared(self, messages: Sequence[Message], counts: Sequence[int], tools: Sequence[ToolSpec]) -> list[int]:
        text = self._template.render(messages, tools, prompt=True)
        tokens, spans = self._safe.encode_with_spans(text)
        fences = [0, *(index for index, token in enumerate(tokens) if token in self._safe.fences)]
        ends, found = [0, *(spans[index][1] for index in fences[1:])], list[int]()
        for part in self._template.render_begun(messages, counts, tools):
            start = fences[bisect_right(ends, shared_length(text, part)) - 1]
            begun = self._safe.encode(part[spans[start][0] :] if start else part)
            found.append(start + shared_length(tokens[start:], begun))
        return found

    def extend(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], ended: int | None = None
    ) -> list[int] | None:
        open_turn = ended is not None and ended not in self.stop_ids  # sampling.stop_ids ended it
        if ended not in (None, self.stop_ids[0]) and not (open_turn and self._ends_at_once):
            return None  # the template writes its own end of turn in place of another one
        if self._thinking is Thinking.strip and self._strips(history, new):
            return None
        calls = bool(history[-1].tool_calls)
        shape = (calls, bool(tools), *((message.role, bool(message.content), bool(message.name)) for message in new))
        known = self._extensions
        if shape not in known and len(new) <= _LEARNED_MESSAGES and len(known) < _MOST_SHAPES:
            known[shape] = self._learn_extension(calls, bool(tools), new)
        pieces = known.get(shape)
        texts = [self._safe.escape(text) for message in new for text in (message.content, message.name)]
        text = self._extension(calls, bool(tools), new) if pieces is None else pieces.fill(texts)
        if text is None:
            return None
        return self._safe.encode_after("" if open_turn else self._turn_end, self._turn_end * open_turn + text)

    def parse(self, output: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        end = len(output) - 1 if output and output[-1] in self.stop_ids else len(output)
        text = self._safe.decode(output[:end]).removeprefix(self._space)
        reasoning, rest, error = split_thinking(text, self._inside_thinking)
        if error:
            return Message("assistant", rest, reasoning, error=error)
        parsed = self._format.parse(rest, {tool.name: tool.parameters for tool in tools})
        content = parsed.content.removesuffix(self._separator) if parsed.calls else parsed.content
        return Message("assistant", content, reasoning, parsed.calls, error=parsed.error)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._safe.decode(tokens)

    def encode(self, message: Message) -> list[int]:
        return self._safe.encode_after(self._opener, self._output(message))

    def _find_turn_end(self) -> tuple[str, bool]:
        """(the added token with which an assistant's turn ends whatever follows, "" = none; whether at once)."""
        tokens = "|".join(re.escape(token) for token in sorted(self._safe.added, key=len, reverse=True))
        talk = [USER, Message("assistant", ANCHOR)]
        texts = self._template.try_render(talk), self._template.try_render([*talk, USER], prompt=True)
        rests = [(text or "").partition(ANCHOR)[2] for text in texts]
        ends = [match.group(1) if (match := re.match(rf"\s*({tokens})", rest)) else "" for rest in rests]
        end = ends[0] if ends[0] == ends[1] else ""
        return end, rests[0].startswith(end)

    def _find_format(self) -> tuple[ToolFormat, str]:
        """(the format in which the template writes tool calls, why tools cannot be used with it or "")."""
        lacking = missing_for_tools(self._template)
        if lacking:
            return Hermes(), f"no {lacking}"
        prompt = self._template.try_render([USER], [PROBE_TOOL], prompt=True) or ""
        output = self._template.try_render([USER, call_message(1)], [PROBE_TOOL]) or ""
        output = output[shared_length(output, _OPEN_THINKING.sub("", prompt)) :]
        output = output[: output.rfind(self._turn_end)] if self._turn_end else output
        for form in FORMATS:
            if form.parse(split_thinking(output, inside=False)[1], {}).calls == (PROBE_CALL,):
                return form, ""
        return Hermes(), f"an unknown format of tool calls ({output.strip()[:60]!r})"

    def _find_separator(self) -> str:
        """The text that the template writes between content and tool calls."""
        text = self._output(call_message(1, "contentx7q"))
        between, written, _ = text.partition("contentx7q")[2].partition(self._format.write((PROBE_CALL,)))
        return between if written else "\n"

    def _learn_extension(self, calls: bool, tools: bool, new: Sequence[Message]) -> TemplatePieces | None:
        def write(texts: Sequence[str]) -> str | None:
            rows = zip(new, texts[::2], texts[1::2], strict=True)
            filled = [Message(m.role, text if m.content else "", name=name if m.name else "") for m, text, name in rows]
            return self._extension(calls, tools, filled)

        return learn(write, 2 * len(new))  # content and name of each

    def _extension(self, calls: bool, tools: bool, new: Sequence[Message]) -> str | None:
        """The text that the template writes between an assistant's end of turn and the next turn.

        None unless it writes the rest of the conversation as before, in a short and in a longer conversation.
        """
        specs = [PROBE_TOOL] if tools else []
        answer = call_message(1) if calls else Message("assistant", ANCHOR)
        extensions: set[str] = set()
        for stub in _STUBS if self._turn_end else ():
            before = self._template.try_render(stub, specs, prompt=True)
            alone = self._template.try_render([*stub, answer], specs)
            after = self._template.try_render([*stub, answer, *new], specs, prompt=True)
            if before is None or alone is None or after is None:
                return None
            rest = after.partition(ANCHOR)[2]
            closing, end, extension = rest.partition(self._turn_end)
            if not alone.partition(ANCHOR)[2].startswith(closing + end):
                return None
            if not end or not after.startswith(_OPEN_THINKING.sub("", before)):
                return None
            extensions.add(extension)
        return extensions.pop() if len(extensions) == 1 else None

    def _output(self, message: Message) -> str:
        """The text of the model's output, by rendering the template; in the format alone where that does not work."""
        if message.reasoning and not self._template.shows_reasoning:
            answer = self._output(replace(message, reasoning=""))
            return self._thoughts(self._safe.escape(message.reasoning, sampled=True)) + _EMPTY_THINKING.sub("", answer)
        full = self._template.try_render([USER, message]) or ""
        prompt = _OPEN_THINKING.sub("", self._prompt)
        if not full.startswith(prompt):
            return self._plain_output(message)
        output = full.removeprefix(self._prompt).removeprefix(prompt)
        if self._inside_thinking and not full.startswith(self._prompt):  # the template writes no or other thoughts
            output = output.removeprefix("<think>") if output.startswith("<think>") else "\n</think>\n\n" + output
        output, end, _ = output.rpartition(self._end)
        return output + end if end else self._plain_output(message)

    def _plain_output(self, message: Message) -> str:
        message = self._safe.escape_message(message)
        output = message.content
        if message.reasoning or self._inside_thinking:
            output = self._thoughts(message.reasoning) + output
        if message.tool_calls:
            output += ("\n" if message.content else "") + self._format.write(message.tool_calls)
        return output + self._end

    def _thoughts(self, text: str) -> str:
        """The escaped reasoning as the model writes it."""
        opening = "" if self._inside_thinking else "<think>\n"
        return f"{opening}{text}\n</think>\n\n"

    def _strips(self, history: Sequence[Message], new: Sequence[Message]) -> bool:
        """Whether the template shows less of the model's reasoning after `new` than the present context does."""
        reasoned = {index for index, message in enumerate(history) if message.reasoning}
        if not reasoned:
            return False
        present = (self._shown(history[:-1]) | {len(history) - 1}) & reasoned
        return not present <= self._shown([*history, *new])

    def _shown(self, messages: Sequence[Message]) -> frozenset[int]:
        """The indices of the messages whose reasoning the template shows in the prompt of the next turn."""
        shape = tuple((m.role, bool(m.content), bool(m.reasoning), bool(m.tool_calls)) for m in messages)
        if shape not in self._visible:
            probes = [
                replace(
                    message,
                    content="text" if message.content else "",
                    reasoning=f"thought{index}q7x" if message.reasoning else "",
                    tool_calls=(PROBE_CALL,) if message.tool_calls else (),
                )
                for index, message in enumerate(messages)
            ]
            text = self._template.try_render(probes, prompt=True) or ""
            if len(self._visible) >= _MOST_SHAPES:
                self._visible.clear()
            self._visible[shape] = frozenset(int(number) for number in re.findall(r"thought(\d+)q7x", text))
        return self._visible[shape]


def _unusable(why: str) -> ConfigError:
    return ConfigError(f"the chat template cannot be used: {why}; {OTHERS}")


@dataclass(frozen=True, slots=True)
class TemplatePieces:
    """What a template writes for one shape of messages, as fixed text around slots, so that a turn joins strings.

    `literals[0] slots[0] literals[1] slots[1] ... literals[-1]`
    """

    literals: tuple[str, ...]
    slots: tuple[int, ...]  # the index of the value at each place
    trims: tuple[Callable[[str], str], ...]  # what the template does to each value

    def fill(self, values: Sequence[str]) -> str:
        """The text with `values` in the slots."""
        parts = [self.literals[0]]
        for slot, literal in zip(self.slots, self.literals[1:], strict=True):
            parts += [self.trims[slot](values[slot]), literal]
        return "".join(parts)


_TRIMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    str.lstrip,
    str.rstrip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
_PROBES = ("\n \n odd \n \n", " \t\"'{}\\ 1 < 2 &amp; \u00e9\u4e2d\U0001f600 {{ x }} ", '{"a": [1]}', "x")


def learn(write: Callable[[Sequence[str]], str | None], count: int) -> TemplatePieces | None:
    """The pieces that `write` joins with `count` values; None when its text depends on the values in another way."""
    names = [f"slot{index}q7x" for index in range(count)]
    text = write(names)
    if text is None:
        return None
    parts = re.split(r"slot(\d+)q7x", text)
    literals, slots = tuple(parts[::2]), tuple(int(part) for part in parts[1::2])
    trims: list[Callable[[str], str]] = []
    for index in range(count):
        values = [*names[:index], _PROBES[0], *names[index + 1 :]]
        written = write(values)
        tried = (TemplatePieces(literals, slots, (*trims, trim, *[str] * (count - index - 1))) for trim in _TRIMS)
        trims.append(next((pieces.trims[index] for pieces in tried if pieces.fill(values) == written), str))
    pieces = TemplatePieces(literals, slots, tuple(trims))
    for shift in range(len(_PROBES)):
        values = [_PROBES[(index + shift) % len(_PROBES)] for index in range(count)]
        if pieces.fill(values) != write(values):
            return None
    return pieces
