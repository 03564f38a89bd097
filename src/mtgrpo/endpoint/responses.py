"""OpenAI's Responses, without a memory: every request holds the whole conversation."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from mtgrpo.endpoint import Entry, Refusal, RefusedError, TurnReply
from mtgrpo.endpoint.chat_completions import openai_error
from mtgrpo.endpoint.dialect import Body, Dialect, MessageReader, call_of, event, list_of, text_of, tool_of
from mtgrpo.runtime.files import strict_json
from mtgrpo.types import ToolCall, ToolSpec


class Responses(Dialect):
    """POST /v1/responses."""

    reply_prefix, call_prefix = "resp_", "call_"
    limits = ("max_output_tokens",)
    fields = frozenset(("input", "instructions", "include", "store", "user", "metadata", "prompt_cache_key"))

    def messages(self, body: Body) -> list[Entry]:
        if body.get("previous_response_id") or body.get("conversation"):
            raise RefusedError(
                "invalid", "nothing is stored here: leave previous_response_id out, send the whole input"
            )
        read = MessageReader()
        if instructions := text_of(body.get("instructions"), "instructions"):
            read.add("system", instructions)
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(given, "input")
        for of_model, run in itertools.groupby(items, _of_model):  # several items are one message of the model
            if of_model:
                _read_assistant(read, list(run))
                continue
            for item in run:
                kind = item.get("type") or "message"
                if kind == "function_call_output":
                    read.answer(item.get("call_id"), text_of(item.get("output"), "function_call_output"))
                elif kind == "message":
                    read.add(item.get("role"), text_of(item.get("content"), "input"))
                else:
                    raise RefusedError("invalid", f"input of type {kind!r} is not supported")
        return read.messages

    def tools(self, body: Body) -> list[ToolSpec]:
        tools = list_of(body.get("tools") or [], "tools")
        for tool in tools:
            if tool.get("type") != "function":
                raise RefusedError("invalid", f"tools of type {tool.get('type')!r} run at OpenAI; give a function")
        return [tool_of(tool, "parameters") for tool in tools]

    def write(self, reply: TurnReply, body: Body) -> dict[str, Any]:
        cut = reply.finish == "length"
        return {
            **_head(reply, body),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(reply),
            "usage": {
                "input_tokens": reply.context_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": reply.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.context_tokens + reply.output_tokens,
            },
        }

    def events(self, reply: TurnReply, body: Body) -> Iterator[bytes]:
        numbers = itertools.count()

        def say(kind: str, **data: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        whole = self.write(reply, body)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield say("response.created", response=begun)
        yield say("response.in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            at = {"item_id": item["id"], "output_index": index}
            empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"summary": []}}
            started = {**item, "status": "in_progress", **empty[item["type"]]}
            yield say("response.output_item.added", output_index=index, item=started)
            if item["type"] == "message":
                (part,) = item["content"]
                yield say("response.content_part.added", **at, content_index=0, part={**part, "text": ""})
                yield say("response.output_text.delta", **at, content_index=0, delta=part["text"], logprobs=[])
                yield say("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
                yield say("response.content_part.done", **at, content_index=0, part=part)
            elif item["type"] == "function_call":
                named = {"name": item["name"], "arguments": item["arguments"]}
                yield say("response.function_call_arguments.delta", **at, delta=item["arguments"])
                yield say("response.function_call_arguments.done", **at, **named)
            yield say("response.output_item.done", output_index=index, item=item)
        yield say(f"response.{whole['status']}", response=whole)

    def error(self, kind: Refusal, text: str) -> dict[str, Any]:
        return openai_error(kind, text)


def _of_model(item: Body) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call")


def _read_assistant(read: MessageReader, items: list[Any]) -> None:
    calls: list[tuple[Any, ToolCall]] = []
    texts: list[str] = []
    reasoning: list[str] = []
    for item in items:
        if item.get("type") == "function_call":
            calls.append((item.get("call_id"), call_of(item.get("name"), item.get("arguments"))))
        elif item.get("type") == "reasoning":
            reasoning.append(text_of(item.get("summary") or [], "reasoning", kinds=("summary_text",)))
        else:
            texts.append(text_of(item.get("content"), "input"))
    read.assistant("\n".join(texts), "\n".join(reasoning), calls)


def _items(reply: TurnReply) -> list[dict[str, Any]]:
    message, done = reply.message, {"status": "completed"}
    items: list[dict[str, Any]] = []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": summary, **done})
    if message.content or not reply.calls:
        content = [{"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}]
        items.append({"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "content": content, **done})
    for call_id, name, given in reply.calls:
        call = {"call_id": call_id, "name": name, "arguments": strict_json(given).decode()}
        items.append({"type": "function_call", "id": f"fc_{call_id}", **call, **done})
    return items


def _head(reply: TurnReply, body: Body) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or "policy",
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
    }
