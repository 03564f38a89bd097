"""Models that the library `renderers` knows by name: their templates as code instead of jinja."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import renderers  # pyright: ignore[reportMissingTypeStubs]
import renderers.base  # pyright: ignore[reportMissingTypeStubs]

from mtgrpo.chat import Chat, Thinking
from mtgrpo.chat.formats import Malformed, split_thinking
from mtgrpo.chat.jinja_template import PROBE_TOOL, USER, call_message
from mtgrpo.chat.safe_tokenizer import SafeTokenizer, shared_length
from mtgrpo.errors import ConfigError
from mtgrpo.messages import message_to_dict
from mtgrpo.runtime.files import is_deeper
from mtgrpo.types import Message, ToolCall, ToolSpec


def find_config(model: str) -> renderers.BaseRendererConfig | None:
    """The library's settings for the model of this name on the hub, None when it does not know the name."""
    renderer = renderers.base.MODEL_RENDERER_MAP.get(model)
    return None if renderer is None else renderers.config_from_name(renderer)


class RendererChat(Chat):
    """A chat whose template is a renderer of the library.

    The renderer gets escaped contents and tokenises through `SafeTokenizer`: its own encoding would make special
    tokens of what a tool replies.
    """

    def __init__(
        self, tokenizer: Any, config: renderers.BaseRendererConfig, thinking: Thinking, ends: Sequence[int] = ()
    ) -> None:
        self._safe = SafeTokenizer(tokenizer)
        safe = _RendererTokenizer(tokenizer, self._safe)
        library: Any = renderers  # partly untyped
        # Its "all" lets turns extend one another whatever the template would strip.
        self._renderer: Any = library.create_renderer(safe, config.model_copy(update={"thinking_retention": "all"}))
        self._stripping: Any = library.create_renderer(safe, config) if thinking is Thinking.strip else None
        self._tools: Sequence[ToolSpec] = ()
        self._specs: list[dict[str, Any]] | None = None  # which are these
        own_ends = list(self._renderer.get_stop_token_ids())
        self._other_ends = set(ends) - set(own_ends)
        self.stop_ids = tuple(dict.fromkeys([*own_ends, *ends]))
        self._prompt = self._render([USER])
        self.knows_tools = self._render([USER], [PROBE_TOOL]) != self._prompt
        self._endings = {calls: self.encode(call_message(calls, "ok")) for calls in (False, True)}
        self.notes = [f"chat: renderer {self._renderer.config.name}, thinking {thinking.value}"]

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        try:
            return self._render(messages, tools)
        except ValueError as problem:
            raise ConfigError(f"the model's chat template refuses the conversation: {problem}") from problem

    def extend(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], ended: int | None = None
    ) -> list[int] | None:
        # The text after a turn depends on how the turn ended alone: a short conversation stands for the whole.
        before, output = self._prompt, self._endings[bool(history[-1].tool_calls)]
        if ended in self.stop_ids and ended != output[-1]:
            return None  # the template writes its own end of turn in its place
        if ended is not None and ended != output[-1]:
            output = output[:-1]  # the library closes the turn
        added = self._messages(new)
        specs = [self._safe.escape_tool(tool) for tool in tools] or None
        renderer = self._renderer
        if self._stripping is not None and any(message.reasoning for message in history):
            renderer = self._stripping
        bridged = renderer.bridge_to_next_turn(before, output, added, tools=specs)
        present = [*before, *output]
        if bridged is None or bridged.token_ids[: len(present)] != present:
            return None
        return bridged.token_ids[len(present) :]

    def parse(self, output: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Message:
        if output and output[-1] in self._other_ends:
            output = output[:-1]
        try:
            if tools is not self._tools:  # those of most conversations
                self._tools, self._specs = tools, [self._safe.escape_tool(tool) for tool in tools] or None
            parsed = self._renderer.parse_response(list(output), tools=self._specs, prompt_ids=self._prompt)
            reasoning = parsed.reasoning_content or ""
            if parsed.reasoning_complete is False:
                return Message("assistant", parsed.content, reasoning, error="the reasoning is not closed")
            calls = tuple(_read_call(call) for call in parsed.tool_calls)
            return Message("assistant", parsed.content, reasoning, calls)
        except Malformed as problem:
            error = str(problem)
        except Exception:  # the library's parsers raise on some output, such as deep nesting: the model's mistake
            error = "the tool call cannot be read"
        end = len(output) - 1 if output and output[-1] in self.stop_ids else len(output)
        reasoning, rest, _ = split_thinking(self._safe.decode(output[:end]), inside=False)
        return Message("assistant", rest, reasoning, error=error)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._safe.decode(tokens)

    def encode(self, message: Message) -> list[int]:
        rendered = self._renderer.render(self._messages([USER, message]))
        output = self._after_prompt(rendered)
        ends = [index for index, token in enumerate(output) if token in self.stop_ids]
        if ends:
            return output[: ends[-1] + 1]
        # In some formats a turn ends with the token that opens the next one: render it with an answer.
        answer = Message("tool", "ok", name=message.tool_calls[0].name) if message.tool_calls else USER
        answered = _sampled(self._renderer.render(self._messages([USER, message, answer])))
        closing = [token for token in answered if token in self.stop_ids]
        return [*output, closing[-1] if closing else self.stop_ids[0]]

    def _after_prompt(self, rendered: Any) -> list[int]:
        """The tokens after the generation prompt, where one may run across its end."""
        tokens: list[int] = rendered.token_ids
        shared = shared_length(self._prompt, tokens)
        rest = self._safe.decode(self._prompt[shared:])
        for end in range(shared, len(tokens) + 1):
            text = self._safe.decode(tokens[shared:end])
            if text.startswith(rest):
                return self._safe.encode_after("", text[len(rest) :]) + tokens[end:]
        return _sampled(rendered) if rest.strip() else tokens[shared:]  # where it does not continue its own prompt

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        specs = [self._safe.escape_tool(tool) for tool in tools] or None
        return self._renderer.render_ids(self._messages(messages), tools=specs, add_generation_prompt=True)

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        replies = 0  # since the last assistant's turn: Kimi's format names a call by its number
        for message in messages:
            entry = message_to_dict(self._safe.escape_message(message))
            if message.role == "tool":
                entry["tool_call_id"] = f"functions.{entry.get('name', '')}:{replies}"
            for number, call in enumerate(entry.get("tool_calls", ())):
                call["id"] = f"functions.{call['function']['name']}:{number}"
            replies = replies + 1 if message.role == "tool" else 0
            entries.append(entry)
        return entries


class _RendererTokenizer:
    """The part of a tokenizer that the library uses, for escaped text."""

    def __init__(self, tokenizer: Any, safe: SafeTokenizer) -> None:
        self._safe = safe
        self.name_or_path: str = tokenizer.name_or_path
        self.chat_template: Any = tokenizer.chat_template
        self.unk_token_id: int | None = tokenizer.unk_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.convert_tokens_to_ids: Any = tokenizer.convert_tokens_to_ids

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        tokens, spans = self._safe.encode_with_spans(text)
        return {"input_ids": tokens, "offset_mapping": spans}

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._safe.encode(text)

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._safe.decode([token_ids] if isinstance(token_ids, int) else token_ids)


def _sampled(rendered: Any) -> list[int]:
    """The tokens of message 1 that a model would have sampled."""
    rows = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
    return [token for token, index, sampled in rows if index == 1 and sampled]


def _read_call(call: renderers.ParsedToolCall) -> ToolCall:
    """The call that the library parsed. Raises Malformed, saying what is wrong with it."""
    if call.status is not renderers.ToolCallParseStatus.OK or not call.name:
        unnamed = call.status is renderers.ToolCallParseStatus.OK
        why = (renderers.ToolCallParseStatus.MISSING_NAME if unnamed else call.status).value
        raise Malformed(f"the tool call cannot be read: {why.replace('_', ' ')}")
    arguments: Any = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping) or is_deeper(arguments):
        raise Malformed('"arguments" must be a JSON object')
    return ToolCall(call.name, cast(Mapping[str, Any], arguments))
