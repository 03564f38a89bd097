"""A program, the tests it fails, and another try."""

from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.runtime.text import head_and_tail, printable
from mtgrpo.tools.sandbox import Sandboxed
from mtgrpo.tools.unit_tests import last_code_block, run_tests, tests_of
from mtgrpo.types import Message, Task


@dataclass
class CodeRepair(Environment, Sandboxed):
    """The task's tests run on the last fenced code block of each message, in a sandbox; the model sees what failed.

    A program that passes ends the conversation and pays 1: reward=environment. `max_turns` is how many programs the
    model may try. For task=mbpp, and files of your own with code in a column `tests`. The prompts of task=humaneval
    show no tests; what fails here does.
    """

    pays_turns = True

    max_turns: int = 3
    shown_chars: int = 600  # of what a failure prints: beginning and end

    @property
    def opens(self) -> bool:
        return False  # to start takes no sandbox

    async def start(self, task: Task) -> Opening:
        tests_of(task)
        self._task = task
        return Opening(task.messages)

    async def step(self, message: Message) -> Reply:
        code = last_code_block(message.content)
        if code is None:
            return Reply((Message("user", "error: put the whole program in one fenced code block"),))
        result = await run_tests(self.sandbox, self._task, code)
        if result.passed:
            return Reply(done=True, reward=1.0)
        output = head_and_tail(printable(result.output).strip(), self.shown_chars)
        why = result.stopped or result.error
        return Reply((Message("user", f"The tests fail ({why}):\n{output}\nWrite the whole program again."),))
