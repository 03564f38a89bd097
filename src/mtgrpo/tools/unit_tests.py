"""The tests that a program must pass, run in the sandbox; and where the program stands in a message."""

import re
import textwrap
from contextlib import aclosing, nullcontext

from mtgrpo.errors import TaskError
from mtgrpo.tools.sandbox import Result, Sandbox
from mtgrpo.tools.sandbox_judge import uses_objects
from mtgrpo.types import Task

_FENCE = re.compile(r"[ \t]*(?P<fence>`{3,}(?=[^`]*$)|~{3,})(?P<info>.*)")


def last_code_block(text: str) -> str | None:
    """The last block between two code fences (``` or ~~~), without common indentation; None where there is none."""
    block, lines, opening = None, list[str](), ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if not opening:
            opening, lines = mark["fence"] if mark else "", []
        elif mark and mark["fence"].startswith(opening) and not mark["info"].strip():
            block, opening = textwrap.dedent("\n".join(lines)), ""
        else:
            lines.append(line)
    return block


def tests_of(task: Task) -> str:
    """The tests in the task's metadata. Raises TaskError where it has none."""
    tests = task.metadata.get("tests")
    if not isinstance(tests, str) or not tests.strip():
        raise TaskError(
            f"task {task.id} has no `tests` in its metadata, code that raises where a program is wrong; task=mbpp and "
            "task=humaneval have them"
        )
    return tests


def objects_in(task: Task) -> bool:
    """Whether the task's tests make objects of the program's classes: see `uses_objects`. Raises TaskError."""
    try:
        return uses_objects(task.metadata.get("setup", ""), tests_of(task))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"the `tests` of task {task.id}, or its `setup`, are no Python: {error}") from error


async def run_tests(sandbox: Sandbox, task: Task, code: str) -> Result:
    """What the task's tests say of `code`: a fresh interpreter runs the task's `setup` and the code.

    The tests run in another process, which calls the code's functions and gets plain data. In a sandbox that was opened
    as many programs run at once as there are processors. Raises TaskError where the task has no tests, OSError or
    RuntimeError where the sandbox does not start.
    """
    tests, objects = tests_of(task), objects_in(task)
    async with sandbox.slots or nullcontext(), aclosing(sandbox.session()) as session:
        return await session.run(code, setup=task.metadata.get("setup", ""), tests=tests, objects=objects)
