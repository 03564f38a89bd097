"""A program that fails is shown its tests' failure and may be written again: in real sandboxes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtgrpo.environments.code_repair import CodeRepair
from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext
from mtgrpo.tools.sandbox import Sandbox
from mtgrpo.types import Message, Task
from test_sandbox import kind, nothing_left

pytestmark = pytest.mark.real
__all__ = ["kind", "nothing_left"]  # fixtures

ADD = Task("add/1", (Message("user", "Write add."),), metadata={"setup": "one = 1", "tests": "assert add(one, 2) == 3"})


def written(code: str) -> Message:
    return Message("assistant", f"Here:\n```python\n{code}\n```")


@pytest.mark.usefixtures("nothing_left")
async def test_programs_are_tried_until_one_passes(kind: str, tmp_path: Path) -> None:
    environment = CodeRepair(sandbox=Sandbox(kind=kind, timeout_s=3), shown_chars=200)
    async with (
        environment.open(RunContext(tmp_path, print, {})) as running,
        running.conversation(ADD) as (own, opening),
    ):
        assert opening.messages == ADD.messages
        loud = "print('x' * 9999)\nraise SystemExit"
        tries = ["def add(a, b):\n    return a - b", "def add(a, b:", "while True: pass", loud]
        said = [await own.step(Message("assistant", "def add(a, b): return a + b"))]
        said += [await own.step(written(code)) for code in tries]
        assert not any(reply.done or reply.reward for reply in said)
        texts = [message.content for reply in said for message in reply.messages]
        assert "put the whole program in one fenced code block" in texts[0]
        for text, part in zip(texts[1:], ("AssertionError", "SyntaxError", "3 s", "SystemExit"), strict=True):
            assert text.startswith("The tests fail (") and part in text and len(text) < 400, text
        passed = await own.step(written("def add(a, b):\n    return a + b"))
        assert passed.done and passed.reward == 1 and not passed.messages


async def test_tasks_without_tests_are_refused() -> None:
    with pytest.raises(ConfigError, match="task other has no `tests` in its metadata"):
        async with CodeRepair().conversation(Task("other", ())):
            pass
