"""OpenAI's chat completions, which most agents speak."""

import time
from collections.abc import Iterator
from typing import Any

from mtgrpo.endpoint import TurnReply
from mtgrpo.endpoint.dialect import Body, Dialect, MessageReader, event, list_of, text_of
from mtgrpo.messages import message_to_dict
from mtgrpo.runtime.files import strict_json


class ChatCompletions(Dialect):
    """POST /v1/chat/completions."""

    prefixes = "chatcmpl-", "call_"
    limits, stop = ("max_completion_tokens", "max_tokens"), "stop"
    fields = frozenset(("messages", "n", "stream_options", "user", "metadata", "store", "prompt_cache_key"))

    def read_messages(self, body: Body, reader: MessageReader) -> None:
        for number, entry in enumerate(list_of(body.get("messages"), "messages")):
            content = text_of(entry.get("content"), f"messages[{number}]")
            if entry.get("role") == "tool":
                reader.answer(entry.get("tool_call_id"), content, entry.get("name"))
            elif entry.get("role") == "assistant":
                reasoning = text_of(entry.get("reasoning_content") or entry.get("reasoning"), "reasoning_content")
                reader.assistant(content, reasoning, list_of(entry.get("tool_calls") or [], "tool_calls"))
            else:
                reader.add(entry.get("role"), content)

    def write(self, reply: TurnReply, body: Body) -> dict[str, Any]:
        message = message_to_dict(reply.message)
        message["content"] = message["content"] or (None if reply.ids else "")
        if reply.message.error:  # no field of OpenAI's: their clients hand it on, and an agent may answer it
            message["tool_call_error"] = reply.message.error
        for call_id, call in zip(reply.ids, message.get("tool_calls", ()), strict=True):
            call["id"] = call_id
            call["function"]["arguments"] = strict_json(call["function"]["arguments"]).decode()
        finish = "length" if reply.finish == "length" else "tool_calls" if reply.ids else "stop"
        return {
            "id": reply.id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or "policy",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
            "usage": {
                "prompt_tokens": reply.context_tokens,
                "completion_tokens": reply.output_tokens,
                "total_tokens": reply.context_tokens + reply.output_tokens,
            },
        }

    def events(self, reply: TurnReply, body: Body) -> Iterator[bytes]:
        head: dict[str, Any] = {**self.write(reply, body), "object": "chat.completion.chunk"}
        usage, (choice,) = head.pop("usage"), head.pop("choices")

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        message = choice["message"]
        calls = message.pop("tool_calls", [])
        yield chunk({"role": message.pop("role"), "content": ""})
        for name, value in message.items():
            if value:
                yield chunk({name: value})
        for index, call in enumerate(calls):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, choice["finish_reason"])
        if isinstance(options := body.get("stream_options"), dict) and options.get("include_usage"):
            yield event({**head, "choices": [], "usage": usage})
        yield event("[DONE]")
