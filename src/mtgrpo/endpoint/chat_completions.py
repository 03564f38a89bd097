"""OpenAI's chat completions, which most agents speak."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from mtgrpo.endpoint import Entry, Refusal, TurnReply
from mtgrpo.endpoint.dialect import Body, Dialect, MessageReader, call_of, event, list_of, mapping, text_of, tool_of
from mtgrpo.messages import message_to_dict
from mtgrpo.runtime.files import strict_json
from mtgrpo.types import ToolSpec

CODES: dict[Refusal, str] = {
    "overflow": "context_length_exceeded",
    "key": "invalid_api_key",
    "closed": "conversation_closed",
    "large": "request_too_large",
}


def openai_error(kind: Refusal, text: str) -> dict[str, Any]:
    """An error as both of OpenAI's interfaces write it."""
    of_server = kind == "broken"
    name = "server_error" if of_server else "invalid_request_error"
    return {"error": {"message": text, "type": name, "param": None, "code": CODES.get(kind)}}


class ChatCompletions(Dialect):
    """POST /v1/chat/completions."""

    reply_prefix, call_prefix = "chatcmpl-", "call_"
    limits, stop = ("max_completion_tokens", "max_tokens"), "stop"
    fields = frozenset(("messages", "n", "stream_options", "user", "metadata", "store", "prompt_cache_key"))

    def messages(self, body: Body) -> list[Entry]:
        read = MessageReader()
        for entry in list_of(body.get("messages"), "messages"):
            content = text_of(entry.get("content"), "messages")
            if entry.get("role") == "tool":
                read.answer(entry.get("tool_call_id"), content, entry.get("name"))
            elif entry.get("role") == "assistant":
                made = list_of(entry.get("tool_calls") or [], "tool_calls")
                functions = [mapping(call.get("function"), "the function of a tool call") for call in made]
                calls = [call_of(function.get("name"), function.get("arguments")) for function in functions]
                reasoning = text_of(entry.get("reasoning_content") or entry.get("reasoning"), "reasoning_content")
                ids = [call.get("id") for call in made]
                read.assistant(content, reasoning, list(zip(ids, calls, strict=True)))
            else:
                read.add(entry.get("role"), content)
        return read.messages

    def tools(self, body: Body) -> list[ToolSpec]:
        tools = list_of(body.get("tools") or [], "tools")
        return [tool_of(mapping(tool.get("function"), "the function of a tool"), "parameters") for tool in tools]

    def write(self, reply: TurnReply, body: Body) -> dict[str, Any]:
        choice = {"index": 0, "message": self._message(reply), "logprobs": None, "finish_reason": _finish(reply)}
        return {**_head(reply, body, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: TurnReply, body: Body) -> Iterator[bytes]:
        head = _head(reply, body, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        message = self._message(reply)
        calls = message.pop("tool_calls", [])
        yield chunk({"role": message.pop("role"), "content": ""})
        for name, value in message.items():
            if value:
                yield chunk({name: value})
        for index, call in enumerate(calls):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, _finish(reply))
        if isinstance(options := body.get("stream_options"), dict) and options.get("include_usage"):
            yield event({**head, "choices": [], "usage": _usage(reply)})
        yield event("[DONE]")

    def error(self, kind: Refusal, text: str) -> dict[str, Any]:
        return openai_error(kind, text)

    def _message(self, reply: TurnReply) -> dict[str, Any]:
        message = message_to_dict(reply.message)
        message["content"] = message["content"] or (None if reply.calls else "")
        if reply.message.error:  # no field of OpenAI's: their clients hand it on, and an agent may answer it
            message["tool_call_error"] = reply.message.error
        for call_id, call in zip(reply.call_ids, message.get("tool_calls", ()), strict=True):
            call["id"] = call_id
            call["function"]["arguments"] = strict_json(call["function"]["arguments"]).decode()
        return message


def _head(reply: TurnReply, body: Body, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": int(time.time()), "model": body.get("model") or "policy"}


def _finish(reply: TurnReply) -> str:
    if reply.finish == "length":
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _usage(reply: TurnReply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.context_tokens,
        "completion_tokens": reply.output_tokens,
        "total_tokens": reply.context_tokens + reply.output_tokens,
    }
