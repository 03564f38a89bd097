"""200,000 texts that no model should write: the readers of tool calls and the calculator raise nothing but their own
error, and take little of the processor.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mtgrpo.chat.formats import FORMATS, ToolFormat, split_thinking
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import ToolCall

LIMIT_S = 0.05  # of processor time, for one text
SCHEMAS = {"f": {"properties": {"x": {"type": "number"}, "y": {"type": "object"}}}}
CALLS = (
    ToolCall("f", {"x": 1.5, "y": {"a": [1, None, "b"]}}),
    ToolCall("calculator", {"expression": "17 * 23"}),
    ToolCall("g", {}),
)
MARKUP = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<|python_tag|>",
        "<function=f>",
        "</function>",
        "<function=",
    ),
    *("<parameter=x>", "</parameter>", "<parameter=", '{"name"', '"arguments": ', '"parameters": ', "{", "}", "[", "]"),
    *('"', "\\", "\\ud800", "\\u0000", ":", ",", ";", "\n", " ", "\0", "é", "😀", "NaN", "-Infinity", "1e999", "null"),
)
SUMS = (
    "0",
    "1",
    "9",
    "37",
    ".",
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "(",
    ")",
    " ",
    "e",
    "_",
    "\n",
    "0x",
    "9" * 30,
    "٣",
)


def mangled(rng: random.Random, text: str, pieces: tuple[str, ...]) -> str:
    """`text` after a few accidents: pieces put in, left out, repeated, many times over."""
    for _ in range(rng.randrange(6)):
        begin, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        times = rng.choice((0, 1, 2, 2, 30, 1000)) if end - begin < 20 else rng.choice((0, 2))
        piece = rng.choice(pieces) if rng.random() < 0.6 else text[begin:end]
        text = (text[:begin] + piece * times + text[end if rng.random() < 0.3 else begin :])[:20_000]
    return text


@contextmanager
def bounded(text: str) -> Iterator[None]:
    """What happens here takes less processor time than the limit."""
    began = time.process_time()
    yield
    took = time.process_time() - began
    assert took < LIMIT_S, f"{took:.3f} s for {text[:200]!r}, of {len(text)} characters"


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def read(form: ToolFormat) -> Callable[[str], None]:
    def parse(text: str) -> None:
        found = form.parse(text, SCHEMAS)
        assert not (found.error and found.calls)
        assert all(isinstance(call.name, str) and isinstance(call.arguments, dict) for call in found.calls)

    return parse


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_tool_calls(form: ToolFormat) -> None:
    rng, parse = random.Random(form.name), read(form)
    for _ in range(45_000):
        text = mangled(rng, form.write(rng.choices(CALLS, k=rng.randrange(1, 4))), MARKUP)
        with bounded(text):
            parse(text)


@pytest.mark.slow
def test_thoughts() -> None:
    rng = random.Random(1)
    for _ in range(5_000):
        text = mangled(rng, "<think>\nso\n</think>\n\n#### 4", MARKUP)
        with bounded(text):
            split_thinking(text, rng.random() < 0.5)


@pytest.mark.slow
def test_the_calculator() -> None:
    rng = random.Random(2)
    tools = (Calculator(), Calculator(max_length=4000, max_digits=1000))
    answered = 0
    for _ in range(60_000):
        seed = "".join(rng.choices(SUMS, k=rng.randrange(1, 12))) if rng.random() < 0.5 else "(17 + 4.5) * 23 ** 2 // 7"
        text, tool = mangled(rng, seed, SUMS), rng.choice(tools)
        with bounded(text):
            try:
                answered += bool(tool(text))
            except ToolError:
                continue
    assert answered > 3_000  # not all of it is nonsense
