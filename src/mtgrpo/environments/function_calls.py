"""Functions of the task's own that are called and never run."""

from dataclasses import dataclass
from typing import Any

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import TaskError
from mtgrpo.types import Message, Task, ToolSpec


@dataclass
class FunctionCalls(Environment):
    """The model is told of the `tools` in the task's metadata; what it calls is graded by reward=function_calls.

    `tools` is a list of {name, description, parameters}, parameters being a JSON schema, as task=bfcl has it. No
    function is run: the conversation ends with the model's first message.
    """

    max_turns: int = 1

    async def start(self, task: Task) -> Opening:
        tools: Any = task.metadata.get("tools")
        try:
            specs = tuple(ToolSpec(one["name"], one["description"], one["parameters"]) for one in tools)
        except (TypeError, KeyError) as error:
            raise TaskError(
                f"task {task.id}: environment=function_calls needs `tools` in its metadata, a list of objects with "
                f"name, description and parameters, got {tools!r:.200}"
            ) from error
        return Opening(task.messages, specs)

    async def step(self, message: Message) -> Reply:
        return Reply(done=True)
