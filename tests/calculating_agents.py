"""Agents that know nothing of training: the calculator loop in the words of each SDK, and one that repeats all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

from mtgrpo.agents import Address
from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.types import Message, Task, ToolCall

ENVIRONMENT = ToolUse(tools=["calculator"])
ECHOES = 3


def answers(calls: list[tuple[str, dict[str, Any]]], error: str = "") -> list[str]:
    """What the tools say, as the environment would."""

    async def step() -> list[str]:
        async with ENVIRONMENT.conversation(Task("", ())) as (running, _):
            made = tuple(ToolCall(name, arguments) for name, arguments in calls)
            reply = await running.step(Message("assistant", tool_calls=made, error=error))
            return [message.content for message in reply.messages]

    return asyncio.run(step())


def opening(task: Task) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content} for message in task.messages]


def openai_tools() -> list[Any]:
    specs = [
        {"name": one.name, "description": one.description, "parameters": one.parameters}
        for one in ENVIRONMENT.tool_specs
    ]
    return [{"type": "function", "function": spec} for spec in specs]


def with_openai(task: Task, address: Address, stream: bool = False) -> None:
    messages = opening(task)
    with OpenAI(base_url=address.openai_url, api_key=address.key, max_retries=0) as client:
        while True:
            asked = {"model": address.model, "messages": messages, "tools": openai_tools()}
            if stream:
                message = joined(client.chat.completions.create(**asked, stream=True))
            else:
                message = client.chat.completions.create(**asked).choices[0].message.model_dump(exclude_none=True)
            calls, error = message.get("tool_calls") or [], message.pop("tool_call_error", "")
            if not calls and not error:
                return
            messages.append(message)
            made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
            ids = [call["id"] for call in calls] or [""]
            said = zip(ids, answers(made, error), strict=True)
            messages += [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in said]


def joined(chunks: Any) -> dict[str, Any]:
    """The message of a stream."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        delta = chunk.choices[0].delta.model_dump(exclude_none=True) if chunk.choices else {}
        message["tool_calls"] = message.get("tool_calls", []) + delta.pop("tool_calls", [])
        for name, text in delta.items():
            message[name] = message.get(name, "") + text
    for call in message["tool_calls"]:
        del call["index"]
    if not message["tool_calls"]:
        del message["tool_calls"]
    return message


def with_openai_stream(task: Task, address: Address) -> None:
    with_openai(task, address, stream=True)


def with_responses(task: Task, address: Address, stream: bool = False) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in openai_tools()]
    items: list[Any] = opening(task)
    with OpenAI(base_url=address.openai_url, api_key=address.key, max_retries=0) as client:
        while True:
            if stream:
                with client.responses.stream(model=address.model, input=items, tools=tools) as events:
                    response = events.get_final_response()
            else:
                response = client.responses.create(model=address.model, input=items, tools=tools)
            said = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            calls = [item for item in said if item["type"] == "function_call"]
            if not calls:
                return
            texts = answers([(call["name"], json.loads(call["arguments"])) for call in calls])
            items += said
            items += [
                {"type": "function_call_output", "call_id": call["call_id"], "output": text}
                for call, text in zip(calls, texts, strict=True)
            ]


def with_responses_stream(task: Task, address: Address) -> None:
    with_responses(task, address, stream=True)


def with_anthropic(task: Task, address: Address, stream: bool = False) -> None:
    tools: list[Any] = [
        {"name": one.name, "description": one.description, "input_schema": one.parameters}
        for one in ENVIRONMENT.tool_specs
    ]
    messages: list[Any] = [message for message in opening(task) if message["role"] != "system"]
    system = "".join(message.content for message in task.messages if message.role == "system")
    with Anthropic(base_url=address.url, api_key=address.key, max_retries=0) as client:
        while True:
            asked: dict[str, Any] = {"model": address.model, "messages": messages, "tools": tools, "max_tokens": 9999}
            asked |= {"system": system} if system else {}
            if stream:
                with client.messages.stream(**asked) as events:
                    reply = events.get_final_message()
            else:
                reply = client.messages.create(**asked)
            blocks = [block.model_dump(exclude_none=True) for block in reply.content]
            calls = [block for block in blocks if block["type"] == "tool_use"]
            if not calls:
                return
            texts = answers([(call["name"], call["input"]) for call in calls])
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": text}
                for call, text in zip(calls, texts, strict=True)
            ]
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


def with_anthropic_stream(task: Task, address: Address) -> None:
    with_anthropic(task, address, stream=True)


async def echo(task: Task, address: Address) -> str:
    """Says what it hears, and gives the last of it as its answer."""
    messages = opening(task)
    async with AsyncOpenAI(base_url=address.openai_url, api_key=address.key, max_retries=0) as client:
        for _ in range(ECHOES):
            reply = await client.chat.completions.create(model="any", messages=messages)
            text = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": text}]
    return text


def silent(task: Task, address: Address) -> float:
    return 1.0


def raises(task: Task, address: Address) -> None:
    raise KeyError("no such page")
