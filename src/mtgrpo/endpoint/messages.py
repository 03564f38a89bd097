"""Anthropic's messages."""

from collections.abc import Iterator
from typing import Any

from mtgrpo.endpoint import Refusal, TurnReply
from mtgrpo.endpoint.dialect import ERRORS, Body, Dialect, MessageReader, event, list_of, split_by_type, text_of
from mtgrpo.runtime.files import strict_json


class Messages(Dialect):
    """POST /v1/messages, and what it takes of that for /v1/messages/count_tokens."""

    prefixes = "msg_", "toolu_"
    limits, stop = ("max_tokens",), "stop_sequences"
    fields = frozenset(("messages", "system", "metadata", "cache_control"))
    tool_types = "custom", None

    def read_messages(self, body: Body, reader: MessageReader) -> None:
        if system := text_of(body.get("system"), "system"):
            reader.add("system", system)
        for entry in list_of(body.get("messages"), "messages"):
            content = entry.get("content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content, "content")
            if entry.get("role") == "assistant":
                calls, thoughts, _, texts = split_by_type(parts, "tool_use", "thinking", "redacted_thinking")
                reasoning = "".join(str(part.get("thinking") or "") for part in thoughts)
                reader.assistant(text_of(texts, "messages"), reasoning, calls)
                continue
            results, rest = split_by_type(parts, "tool_result")
            for result in results:
                reader.answer(result.get("tool_use_id"), text_of(result.get("content"), "tool_result"))
            if rest or not parts:
                reader.add(entry.get("role"), text_of(rest, "messages"))

    def write(self, reply: TurnReply, body: Body) -> dict[str, Any]:
        message = reply.message
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content or not reply.ids:
            blocks.append({"type": "text", "text": message.content})
        for call_id, call in reply.calls:
            blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": dict(call.arguments)})
        end = "tool_use" if reply.ids else "end_turn"
        return {
            "id": reply.id,
            "type": "message",
            "role": "assistant",
            "model": body.get("model") or "policy",
            "content": blocks,
            "stop_reason": {"length": "max_tokens", "stop_string": "stop_sequence", "stop": end}[reply.finish],
            "stop_sequence": reply.stop or None,
            "usage": {"input_tokens": reply.context_tokens, "output_tokens": reply.output_tokens},
        }

    def events(self, reply: TurnReply, body: Body) -> Iterator[bytes]:
        def tell(kind: str, **data: Any) -> bytes:
            return event({"type": kind, **data}, kind)

        whole = self.write(reply, body)
        ending = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        usage = {"input_tokens": reply.context_tokens, "output_tokens": 0}
        yield tell("message_start", message={**whole, "content": [], **dict.fromkeys(ending), "usage": usage})
        for index, block in enumerate(whole["content"]):
            if block["type"] == "tool_use":
                start = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": strict_json(block["input"]).decode()}
            else:
                kind = block["type"]  # its text stands in the field of this name
                start, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
            yield tell("content_block_start", index=index, content_block=start)
            yield tell("content_block_delta", index=index, delta=delta)
            yield tell("content_block_stop", index=index)
        yield tell("message_delta", delta=ending, usage=whole["usage"])
        yield tell("message_stop")

    def error(self, kind: Refusal, text: str) -> dict[str, Any]:
        text = f"prompt is too long: {text}" if kind == "overflow" else text  # by which agents know it
        return {"type": "error", "error": {"type": ERRORS[kind][2], "message": text}}
