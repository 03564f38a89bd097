"""OpenAI's Responses, without a memory: every request holds the whole conversation."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

from mtgrpo.endpoint import RefusedError, TurnReply
from mtgrpo.endpoint.dialect import Body, Dialect, MessageReader, event, list_of, split_by_type, text_of
from mtgrpo.runtime.files import strict_json


class Responses(Dialect):
    """POST /v1/responses."""

    prefixes = "resp_", "call_"
    limits = ("max_output_tokens",)
    fields = frozenset(("input", "instructions", "include", "store", "user", "metadata", "prompt_cache_key"))

    def read_messages(self, body: Body, reader: MessageReader) -> None:
        if body.get("previous_response_id") or body.get("conversation"):
            raise RefusedError("invalid", "nothing is stored: leave previous_response_id out, send the whole input")
        if instructions := text_of(body.get("instructions"), "instructions"):
            reader.add("system", instructions)
        sent = body.get("input")
        items = [{"role": "user", "content": sent}] if isinstance(sent, str) else list_of(sent, "input")
        for of_model, run in itertools.groupby(items, _of_model):  # several items are one message of the model
            if of_model:
                calls, thoughts, texts = split_by_type(list(run), "function_call", "reasoning")
                reasoning = [text_of(item.get("summary"), "reasoning") for item in thoughts]
                content = [text_of(item.get("content"), "input") for item in texts]
                reader.assistant("\n".join(content), "\n".join(reasoning), calls)
                continue
            for item in run:
                kind = item.get("type") or "message"
                if kind == "function_call_output":
                    reader.answer(item.get("call_id"), text_of(item.get("output"), "function_call_output"))
                elif kind == "message":
                    reader.add(item.get("role"), text_of(item.get("content"), "input"))
                else:
                    raise RefusedError("invalid", f"input of type {kind!r} is not supported")

    def write(self, reply: TurnReply, body: Body) -> dict[str, Any]:
        message, done, cut = reply.message, {"status": "completed"}, reply.finish == "length"
        items: list[dict[str, Any]] = []
        if message.reasoning:
            summary = [{"type": "summary_text", "text": message.reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": summary, **done})
        if message.content or not reply.ids:
            content = [{"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}]
            items.append({"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "content": content, **done})
        for call_id, call in reply.calls:
            fields = {"call_id": call_id, "name": call.name, "arguments": strict_json(call.arguments).decode()}
            items.append({"type": "function_call", "id": f"fc_{call_id}", **fields, **done})
        return {
            **{"id": reply.id, "object": "response", "created_at": int(time.time()), "error": None},
            **{"model": body.get("model") or "policy", "instructions": body.get("instructions")},
            **{"metadata": body.get("metadata") or {}, "tools": body.get("tools") or [], "tool_choice": "auto"},
            **{"parallel_tool_calls": True, "temperature": None, "top_p": None},
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
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

        def tell(kind: str, **data: Any) -> bytes:
            kind = f"response.{kind}"
            return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        whole = self.write(reply, body)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield tell("created", response=begun)
        yield tell("in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            at = {"item_id": item["id"], "output_index": index}
            empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"summary": []}}
            started = {**item, "status": "in_progress", **empty[item["type"]]}
            yield tell("output_item.added", output_index=index, item=started)
            if item["type"] == "message":
                (part,) = item["content"]
                at["content_index"] = 0
                yield tell("content_part.added", **at, part={**part, "text": ""})
                yield tell("output_text.delta", **at, delta=part["text"], logprobs=[])
                yield tell("output_text.done", **at, text=part["text"], logprobs=[])
                yield tell("content_part.done", **at, part=part)
            elif item["type"] == "function_call":
                named = {"name": item["name"], "arguments": item["arguments"]}
                yield tell("function_call_arguments.delta", **at, delta=item["arguments"])
                yield tell("function_call_arguments.done", **at, **named)
            yield tell("output_item.done", output_index=index, item=item)
        yield tell(whole["status"], response=whole)


def _of_model(item: Body) -> bool:
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call")
