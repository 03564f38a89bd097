"""A conversation with tools: it goes on as long as the model calls them."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

from mtgrpo import tools
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.extension import ConfigError
from mtgrpo.tools import Tool, ToolError
from mtgrpo.types import Message, Task, ToolCall, ToolSpec


@dataclass
class ToolUse(Environment):
    """The model may call `tools`, several at once; a message without a call ends the conversation.

    A call that cannot be made (unreadable, unknown tool, wrong arguments, refused by the tool) is answered with
    "error: <why>". A tool that breaks or takes longer than `timeout_s` fails the rollout. Without tools there are no
    calls to count, and the answer to what looks like one comes from the user.
    """

    tools: Any = None  # [calculator, path/to/file.py:search], or with settings {calculator: {max_digits: 20}}
    timeout_s: float = 30.0  # per call

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout_s <= 0:
            raise ConfigError(f"environment.timeout_s must be above 0 seconds, got {self.timeout_s}")
        self._loaded = tools.load(self.tools or [])
        self._specs = {name: tools.spec(name, tool) for name, tool in self._loaded.items()}
        self._tools = self._loaded

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return tuple(self._specs.values())

    async def start(self, task: Task) -> Opening:
        # A conversation has tools of its own, so that one with state shares none of it with another conversation.
        self._tools = {name: copy.copy(tool) for name, tool in self._loaded.items()}
        for tool in self._tools.values():
            if isinstance(tool, Tool):
                tool.begin(task)
        return Opening(task.messages, self.tool_specs)

    async def step(self, message: Message) -> Reply:
        if not message.error and not message.tool_calls:
            return Reply(done=True)
        if not self._tools:  # then a chat template may have no role "tool"
            return Reply((Message("user", f"error: {message.error or 'there are no tools'}"),))
        if message.error:
            return Reply((Message("tool", f"error: {message.error}"),), tool_calls=1, tool_errors=1)
        # Every call is waited for, also after one has failed: nothing of this conversation runs on behind its back.
        answers = await asyncio.gather(*map(self._answer, message.tool_calls), return_exceptions=True)
        observations: list[Message] = []
        errors = 0
        for call, answer in zip(message.tool_calls, answers, strict=True):
            if isinstance(answer, ToolError):
                errors += 1
                observations.append(Message("tool", f"error: {answer}", name=call.name))
            elif isinstance(answer, BaseException):
                raise RuntimeError(f"the tool {call.name} failed: {type(answer).__name__}: {answer}") from answer
            else:
                observations.append(Message("tool", answer, name=call.name))
        return Reply(tuple(observations), tool_calls=len(answers), tool_errors=errors)

    async def _answer(self, call: ToolCall) -> str:
        if call.name not in self._tools:
            raise ToolError(f"there is no tool {call.name!r}; the tools are: {', '.join(self._tools)}")
        tools.check_arguments(self._specs[call.name], call.arguments)
        return await tools.call(self._tools[call.name], call.arguments, self.timeout_s)
