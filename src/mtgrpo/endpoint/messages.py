"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtgrpo.endpoint import Entry, Refusal, RefusedError, TurnReply
from mtgrpo.endpoint.dialect import Body, Dialect, MessageReader, call_of, event, list_of, text_of, tool_of
from mtgrpo.runtime.files import strict_json
from mtgrpo.types import ToolCall, ToolSpec

TYPES: dict[Refusal, str] = {
    "key": "authentication_error",
    "missing": "not_found_error",
    "large": "request_too_large",
    "broken": "api_error",
}


class Messages(Dialect):
    """POST /v1/messages, and what it takes of that for /v1/messages/count_tokens."""

    reply_prefix, call_prefix = "msg_", "toolu_"
    limits, stop = ("max_tokens",), "stop_sequences"
    fields = frozenset(("messages", "system", "metadata", "cache_control"))

    def messages(self, body: Body) -> list[Entry]:
        read = MessageReader()
        if system := text_of(body.get("system"), "system"):
            read.add("system", system)
        for entry in list_of(body.get("messages"), "messages"):
            content = entry.get("content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, "content")
            if entry.get("role") == "assistant":
                _read_assistant(read, parts)
            else:
                for part in parts:
                    if part.get("type") == "tool_result":
                        read.answer(part.get("tool_use_id"), text_of(part.get("content"), "tool_result"))
                rest = [part for part in parts if part.get("type") != "tool_result"]
                if rest or not parts:
                    read.add(entry.get("role"), text_of(rest, "messages"))
        return read.messages

    def tools(self, body: Body) -> list[ToolSpec]:
        tools = list_of(body.get("tools") or [], "tools")
        for tool in tools:
            if tool.get("type") not in (None, "custom"):
                raise RefusedError("invalid", f"tools of type {tool['type']!r} run at Anthropic; give one of your own")
        return [tool_of(tool, "input_schema") for tool in tools]

    def write(self, reply: TurnReply, body: Body) -> dict[str, Any]:
        return {
            "id": reply.id,
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or "policy",
            "content": _blocks(reply),
            **_ending(reply),
            "usage": {"input_tokens": reply.context_tokens, "output_tokens": reply.output_tokens},
        }

    def events(self, reply: TurnReply, body: Body) -> Iterator[bytes]:
        whole = self.write(reply, body)
        usage = {"input_tokens": reply.context_tokens, "output_tokens": 0}
        begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            start, deltas = _pieces(block)
            yield _event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_ending(reply), usage=whole["usage"])
        yield _event("message_stop")

    def error(self, kind: Refusal, text: str) -> dict[str, Any]:
        text = f"prompt is too long: {text}" if kind == "overflow" else text  # by which agents know it
        return {"type": "error", "error": {"type": TYPES.get(kind, "invalid_request_error"), "message": text}}


def _read_assistant(read: MessageReader, parts: list[Any]) -> None:
    calls: list[tuple[Any, ToolCall]] = []
    texts: list[Any] = []
    reasoning = ""
    for part in parts:
        if part.get("type") == "tool_use":
            calls.append((part.get("id"), call_of(part.get("name"), part.get("input"))))
        elif part.get("type") == "thinking":
            reasoning += str(part.get("thinking") or "")
        elif part.get("type") != "redacted_thinking":
            texts.append(part)
    read.assistant(text_of(texts, "messages"), reasoning, calls)


def _blocks(reply: TurnReply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not reply.calls:
        blocks.append({"type": "text", "text": message.content})
    calls = [{"type": "tool_use", "id": i, "name": name, "input": dict(given)} for i, name, given in reply.calls]
    return blocks + calls


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How a block begins, and what is added to it."""
    if block["type"] == "tool_use":
        arguments = strict_json(block["input"]).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]


def _ending(reply: TurnReply) -> dict[str, Any]:
    reasons = {
        "length": "max_tokens",
        "stop_string": "stop_sequence",
        "stop": "tool_use" if reply.calls else "end_turn",
    }
    return {"stop_reason": reasons[reply.finish], "stop_sequence": reply.stop or None}


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)
