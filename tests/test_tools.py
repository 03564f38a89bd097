"""Tools: what the model is told of them, how they are named and called, and the calculator."""

from __future__ import annotations

import asyncio
import operator
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo import tools
from mtgrpo.errors import ConfigError
from mtgrpo.tools import CallTimeoutError, Tool, ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.tools.calls import call_tool
from mtgrpo.tools.schema import ArgumentCheck, signature_spec
from mtgrpo.types import ToolSpec


class Order(Enum):
    RISING = "rising"
    FALLING = "falling"


def search(
    query: str,
    limit: int = 3,
    order: Order = Order.RISING,
    kind: Literal["page", "image"] = "page",
    since: float | None = None,
    tags: Optional[list[str]] = None,  # noqa: UP045 - both spellings of "or None" are read
    weights: dict[str, float] | None = None,
    exact: bool = False,
    extra: Any = None,
) -> str:
    """Search the
    library.

    More that the model is not told.

    Args:
        query: what to look for
        limit (int): how many hits,
            at most
        since: the first year: 0 = all

    Returns:
        order: not an argument's description
    """
    return f"{query} {limit} {order} {kind} {since} {tags} {weights} {exact} {extra}"


def order_names(orders: list[Order], by_name: dict[str, Order]) -> str:
    """Name the orders."""
    return " ".join(order.name for order in [*orders, *by_name.values()])


@dataclass
class Lookup(Tool):
    """Looks things up."""

    table: str = "main"
    rows: int = 5

    def __call__(self, key: str) -> int:
        return len(key) + self.rows


# ---- what the model is told ----


def test_schema_of_the_calculator_is_short() -> None:
    spec = signature_spec("calculator", Calculator())
    assert (spec.name, spec.description) == ("calculator", "Evaluate an arithmetic expression.")
    assert spec.parameters == {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }


def test_schema_of_every_kind_of_parameter() -> None:
    spec = signature_spec("search", search)
    assert spec.description == "Search the library."
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "limit": {"type": "integer", "description": "how many hits, at most"},
            "order": {"type": "string", "enum": ["rising", "falling"]},
            "kind": {"type": "string", "enum": ["page", "image"]},
            "since": {"type": ["number", "null"], "description": "the first year: 0 = all"},
            "tags": {"type": ["array", "null"], "items": {"type": "string"}},
            "weights": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
            "exact": {"type": "boolean"},
            "extra": {},
        },
        "required": ["query"],
    }
    assert list(spec.parameters["properties"]) == list(search.__annotations__)[:-1], "in the order of the signature"


def test_a_tool_without_a_call_docstring_is_described_by_its_class() -> None:
    assert signature_spec("lookup", Lookup()).description == "Looks things up."


def test_a_tool_nobody_described_is_refused() -> None:
    @dataclass
    class Silent(Tool):
        size: int = 1

        def __call__(self) -> str:
            return ""

    with pytest.raises(ConfigError, match=r"the tool silent \(.*\) needs a docstring"):
        signature_spec("silent", Silent())


def _unannotated(query) -> str:
    """Search."""
    return query


def _variadic(*queries: str) -> str:
    """Search."""
    return " ".join(queries)


def _positional(query: str, /) -> str:
    """Search."""
    return query


def _bytes(data: bytes) -> str:
    """Read."""
    return str(data)


def _union(value: int | str) -> str:
    """Read."""
    return str(value)


def _unresolvable(value: Nowhere) -> str:  # type: ignore  # noqa: F821
    """Read."""
    return str(value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_unannotated, "parameter 'query' has no annotation"),
        (_variadic, "parameter 'queries' cannot be given by name"),
        (_positional, "parameter 'query' cannot be given by name"),
        (_bytes, "parameter 'data' has the type <class 'bytes'>"),
        (_union, "parameter 'value' has the type int | str"),
        (_unresolvable, "'Nowhere' is not defined"),
    ],
)
def test_a_signature_that_no_schema_can_describe_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        signature_spec("tool", function)


# ---- what the model may say ----

CHECK = ArgumentCheck(signature_spec("search", search), closed=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": "a"},
        {"query": "a", "limit": 1, "order": "falling", "kind": "image", "since": 3, "exact": True, "extra": object()},
        {"query": "a", "since": None, "tags": None, "weights": None},
        {"query": "a", "since": 1.5, "tags": ["b", "c"], "weights": {"b": 1, "c": 0.5}},
    ],
)
def test_good_arguments_are_accepted(arguments: dict[str, Any]) -> None:
    CHECK(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "missing argument 'query'"),
        ({"quary": "a"}, "search has no argument 'quary'; its arguments: query, limit, order"),
        ({"query": 3}, "argument 'query' must be of type string, got 3"),
        ({"query": None}, "argument 'query' must be of type string, got None"),
        ({"query": "a", "limit": "3"}, "argument 'limit' must be of type integer, got '3'"),
        ({"query": "a", "limit": True}, "argument 'limit' must be of type integer, got True"),
        ({"query": "a", "limit": 1.5}, "argument 'limit' must be of type integer, got 1.5"),
        ({"query": "a", "exact": 1}, "argument 'exact' must be of type boolean, got 1"),
        ({"query": "a", "since": "now"}, "argument 'since' must be of type number or null, got 'now'"),
        ({"query": "a", "order": "up"}, "argument 'order' must be one of 'rising', 'falling'"),
        ({"query": "a", "kind": "video"}, "argument 'kind' must be one of 'page', 'image'"),
        ({"query": "a", "tags": "b"}, "argument 'tags' must be of type array or null, got 'b'"),
        ({"query": "a", "tags": ["b", 2]}, "argument 'tags'[1] must be of type string, got 2"),
        ({"query": "a", "weights": {"b": "c"}}, "argument 'weights'['b'] must be of type number, got 'c'"),
    ],
)
def test_bad_arguments_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError, match=re.escape(message)):
        CHECK(arguments)


def test_an_explanation_is_short_however_long_the_argument() -> None:
    with pytest.raises(ToolError) as refused:
        CHECK({"query": "a", "limit": "9" * 10_000})
    assert len(str(refused.value)) < 120


# ---- names ----


@pytest.fixture
def own_file(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(
        '''
from dataclasses import dataclass
from mtgrpo.tools import Tool

@dataclass
class Lookup(Tool):
    """Looks things up."""
    rows: int = 5
    def __call__(self, key: str) -> int:
        return len(key) + self.rows

def search(query: str) -> str:
    """Search."""
    return query

def calculator(expression: str) -> str:
    """Search."""
    return expression

class Mute(Tool): ...
class Plain(Tool):
    keys: int = 4

    def __call__(self, cage: int) -> str:
        """Opens a cage."""
        return str(cage)
class Unrelated: ...
number = 3
'''
    )
    return str(path)


CALLS: dict[str, dict[str, Any]] = {"search": {"query": "a"}, "Lookup": {"key": "a"}}


async def test_tools_are_loaded_by_name_and_by_path(own_file: str) -> None:
    loaded = tools.load(["calculator", f"{own_file}:search", f"{own_file}:Lookup"])
    assert list(loaded) == ["calculator", "search", "Lookup"]
    assert loaded["calculator"] == Calculator()
    assert [await call_tool(loaded[name], name, arguments, 5) for name, arguments in CALLS.items()] == ["a", "6"]


async def test_tools_are_loaded_with_settings(own_file: str) -> None:
    loaded = tools.load(
        {"calculator": {"max_digits": 20}, f"{own_file}:Lookup": {"rows": "7"}, f"{own_file}:search": None}
    )
    assert loaded["calculator"] == Calculator(max_digits=20)
    assert await call_tool(loaded["Lookup"], "Lookup", {"key": "a"}, 5) == "8", (
        "settings are converted to the types of the fields"
    )


def test_no_tools_is_no_error() -> None:
    assert tools.load([]) == tools.load({}) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("calculator", "tools must be a list of names: 'environment.tools=[calculator]'"),
        ("{w.py:weigh: {unit: g}}", "tools must be a list of names, or a mapping such as {calculator: "),
        ([{"calculator": {}}], "tools: {'calculator': {}} is no name"),
        (["abacus"], "there is no tool named 'abacus'; known: calculator"),
        (["calculator", "calculator"], "two are named 'calculator'"),
        (["calculator", "OWN:calculator"], "two tools are named 'calculator'"),
        (["OWN:Unrelated"], "must be a function or a subclass of Tool"),
        (["OWN:number"], "must be a function or a subclass of Tool"),
        (["OWN:missing"], "has no 'missing'"),
        (
            {"calculator": {"digits": 3}},
            "the tool calculator has no setting 'digits'; its settings: max_length, max_digits",
        ),
        ({"OWN:Plain": {"keys": 3}}, "has no setting 'keys'; its settings: none, and Plain lacks @dataclass"),
        ({"calculator": {"max_digits": "many"}}, "Value 'many' of type 'str' could not be converted to Integer"),
        ({"calculator": {"max_digits": 0}}, "the tool calculator: `max_digits` must be >= 1 and <= 1000, got 0"),
        ({"calculator": {"max_length": 0}}, "the tool calculator: `max_length` must be >= 1, got 0"),
        ({"calculator": 20}, "settings of calculator must be a mapping"),
        (
            {"OWN:search": {"rows": 3}},
            "the tool search with settings {'rows': 3}: search has no argument 'rows'; its arguments: query",
        ),
        ({"OWN:search": {"query": 3}}, "argument 'query' must be of type string, got 3"),
        (["OWN:Mute"], "the tool Mute has no __call__"),
    ],
)
def test_wrong_configuration_is_explained(given: Any, message: str, own_file: str) -> None:
    if isinstance(given, list):
        given = [name.replace("OWN", own_file) if isinstance(name, str) else name for name in given]
    elif isinstance(given, dict):
        given = {name.replace("OWN", own_file): settings for name, settings in given.items()}
    with pytest.raises(ConfigError, match=re.escape(message)):
        tools.load(given)


# ---- calls ----


async def answer(tool: Callable[..., Any], arguments: dict[str, Any], timeout_s: float) -> str:
    """What a tool, or a function as one, answers."""
    made = tool if isinstance(tool, Tool) else tools._FunctionTool(tool, {})
    return await call_tool(made, "tool", arguments, timeout_s)


async def test_every_kind_of_tool_answers_with_a_string() -> None:
    async def coroutine(value: int) -> int:
        return value + 1

    def hidden_coroutine(value: int) -> Any:
        return coroutine(value)

    assert await answer(coroutine, {"value": 1}, 5) == "2"
    assert await answer(hidden_coroutine, {"value": 1}, 5) == "2"
    assert await answer(Lookup(), {"key": "abc"}, 5) == "8"
    assert await answer(Calculator(), {"expression": "1 + 1"}, 5) == "2"


async def test_the_values_of_an_enum_reach_the_tool_as_members() -> None:
    assert "Order.FALLING" in await answer(search, {"query": "a", "order": "falling"}, 5)
    nested = {"orders": ["rising", "falling"], "by_name": {"x": "rising"}}
    assert await answer(order_names, nested, 5) == "RISING FALLING RISING"
    assert "None ['b'] {'c': 1}" in await answer(search, {"query": "a", "tags": ["b"], "weights": {"c": 1}}, 5)


async def test_a_blocking_tool_runs_beside_the_event_loop_and_others_on_it() -> None:
    def thread() -> int:
        return threading.get_ident()

    @dataclass
    class Inline(Tool):
        blocking = False

        def __call__(self) -> int:
            return threading.get_ident()

    here = str(threading.get_ident())
    assert await answer(thread, {}, 5) != here
    assert await answer(Inline(), {}, 5) == here


async def test_errors_of_the_tool_come_through() -> None:
    def refuses() -> None:
        raise ToolError("no")

    async def breaks() -> None:
        raise OSError("disk")

    with pytest.raises(ToolError, match=r"^no$"):
        await answer(refuses, {}, 5)
    with pytest.raises(OSError, match=r"^disk$"):
        await answer(breaks, {}, 5)


class Stop(BaseException):
    """What no one catches by accident."""


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("end"), Stop("now")])
async def test_no_tool_can_end_the_program(error: BaseException, blocking: bool) -> None:
    def raises() -> None:
        raise error

    async def raises_later() -> None:
        await asyncio.sleep(0)
        raise error

    raises.blocking = blocking  # type: ignore[attr-defined]
    for tool in (raises, raises_later):
        with pytest.raises(RuntimeError, match=type(error).__name__) as failure:
            await answer(tool, {}, 60)
        assert failure.value.__cause__ is error


async def test_a_tool_in_a_thread_cannot_interrupt_or_cancel() -> None:
    for error in (KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()):

        def raises(error: BaseException = error) -> None:
            raise error

        with pytest.raises(RuntimeError, match=type(error).__name__):
            await answer(raises, {}, 60)


async def test_a_call_can_be_given_up() -> None:
    async def hangs() -> None:
        await asyncio.Event().wait()

    calling = asyncio.ensure_future(answer(hangs, {}, 60))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_a_tool_that_takes_too_long_is_a_timeout() -> None:
    release = threading.Event()

    def blocking() -> None:
        release.wait(60)

    async def coroutine() -> None:
        await asyncio.Event().wait()

    async def times_out_itself() -> None:
        raise TimeoutError("the server")

    try:
        for tool in (blocking, coroutine):
            with pytest.raises(CallTimeoutError, match=r"^no answer within 0\.01 s$"):
                await answer(tool, {}, 0.01)
    finally:
        release.set()
    with pytest.raises(TimeoutError, match=r"^the server$"):
        await answer(times_out_itself, {}, 60)


async def test_a_hanging_blocking_tool_delays_no_other_and_does_not_keep_the_program_alive() -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []

    def hangs() -> None:
        threads.append(threading.current_thread())
        release.wait(60)

    hanging = [asyncio.ensure_future(answer(hangs, {}, 60)) for _ in range(100)]
    try:
        assert await answer(Lookup(), {"key": "a"}, 60) == "6"
        assert threads and all(thread.daemon for thread in threads)
    finally:
        release.set()
        await asyncio.gather(*hanging)


# ---- the calculator ----


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("797 + 707", "1504"),
        ("136 * 188", "25568"),
        ("4 - 7", "-3"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("10 / 5", "2"),
        ("1 / 3", "0.333333333333"),
        ("-2 / 3", "-0.666666666667"),
        ("1 / 30000", "0.0000333333333333"),
        ("10 ** 20 / 3", "33333333333333333333"),
        ("1 / 1024", "0.0009765625"),
        ("5.00 * 200", "1000"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2.5 % 1", "0.5"),
        ("-2 ** 2", "-4"),
        ("2 ** 3 ** 2", "512"),
        ("2 ** -3", "0.125"),
        ("0.5 ** 2", "0.25"),
        ("(-1) ** 10 ** 30", "1"),
        ("0 ** 0", "1"),
        ("  +.5 - -5. ", "5.5"),
        ("123456789012345678901234567890.123456789", "123456789012345678901234567890.123456789"),
        ("9" * 40, "9" * 40),
    ],
)
def test_arithmetic(expression: str, result: str) -> None:
    assert Calculator()(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("12 +", "cannot read '12 +'"),
        ("", "cannot read ''"),
        ("(1", "cannot read '(1'"),
        ("1 2", "cannot read '1 2'"),
        ("2(3)", "cannot read '2(3)'"),
        ("()", "cannot read '()'"),
        ("...", "cannot read '...'"),
        ("*1", "cannot read '*1'"),
        ("1e3", "cannot read 'e': use numbers, + - * / // % ** and parentheses"),
        ("1,000 + 5", "cannot read ',': use numbers, + - * / // % ** and parentheses"),
        ("3 + 4 =", "cannot read '=': use numbers, + - * / // % ** and parentheses"),
        ("1\n2", "cannot read '\\n': use numbers, + - * / // % ** and parentheses"),
        ("__import__('os')", "cannot read '_': use numbers, + - * / // % ** and parentheses"),
        ("1 / 0", "division by zero"),
        ("1 // (2 - 2)", "division by zero"),
        ("1 % 0.0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ** 0.5", "an exponent must be a whole number"),
        ("9**9**9", "a number has more than 40 digits"),
        ("9**9**9**9**9", "a number has more than 40 digits"),
        ("((((9**9)**9)**9)**9)", "a number has more than 40 digits"),
        ("2**-(10**39)", "a number has more than 40 digits"),
        ("0.9**(10**39)", "a number has more than 40 digits"),
        ("*".join(["99999"] * 33), "a number has more than 40 digits"),
        ("/".join(["1"] + ["99999"] * 32), "a number has more than 40 digits"),
        ("+".join(f"1/{n}" for n in range(901, 933)), "a number has more than 40 digits"),
        ("9" * 41, "a number has more than 40 digits"),
        ("0." + "1" * 41, "a number has more than 40 digits"),
        ("1" * 201, "the expression is longer than 200 characters"),
    ],
)
def test_what_the_calculator_refuses(expression: str, message: str) -> None:
    with pytest.raises(ToolError) as refused:
        Calculator()(expression)
    assert str(refused.value) == message


@pytest.mark.parametrize("expression", ["-" * 199 + "1", "(" * 99 + "1" + ")" * 99, "1" + "*1" * 99, "1" + "**1" * 66])
def test_deep_expressions_within_the_length_are_evaluated(expression: str) -> None:
    assert Calculator()(expression) == "-1" if expression.startswith("-") else "1"


@pytest.mark.parametrize("expression", ["-" * 99_999 + "1", "(" * 49_999 + "1" + ")" * 49_999, "1" + "*1" * 49_999])
def test_absurd_nesting_is_refused(expression: str) -> None:
    with pytest.raises(ToolError):
        Calculator(max_length=1_000_000)(expression)


def test_limits_can_be_changed() -> None:
    assert Calculator(max_digits=50)("9" * 41) == "9" * 41
    assert Calculator(max_length=201)("1" + "*1" * 100) == "1"
    with pytest.raises(ToolError, match="more than 3 digits"):
        Calculator(max_digits=3)("999 + 1")
    with pytest.raises(ToolError, match="longer than 3 characters"):
        Calculator(max_length=3)("1 +1")


OPERATIONS: dict[str, Callable[[Fraction, Fraction], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}


@st.composite
def calculations(draw: st.DrawFn, depth: int = 3) -> tuple[str, Fraction | None]:
    """An expression and its exact value; None where it divides by zero."""
    if depth == 0 or draw(st.booleans()):
        text = draw(st.integers(0, 999).map(str) | st.decimals(0, 99, places=2).map(str))
        return text, Fraction(text)
    if draw(st.integers(0, 4)) == 0:
        text, value = draw(calculations(depth=depth - 1))
        return f"-({text})", None if value is None else -value
    (left, a), (right, b) = draw(calculations(depth=depth - 1)), draw(calculations(depth=depth - 1))
    symbol = draw(st.sampled_from(sorted(OPERATIONS)))
    text = f"({left}) {symbol} ({right})"
    if a is None or b is None or (b == 0 and symbol in ("/", "//", "%")):
        return text, None
    return text, Fraction(OPERATIONS[symbol](a, b))


@given(calculations())
def test_calculator_agrees_with_exact_fractions(calculation: tuple[str, Fraction | None]) -> None:
    expression, value = calculation
    calculator = Calculator(max_digits=1000)  # eight numbers of five digits stay far below
    if value is None:
        with pytest.raises(ToolError, match=r"^division by zero$"):
            calculator(expression)
        return
    result = calculator(expression)
    assert re.fullmatch(r"-?\d+(\.\d*[1-9])?", result), "plain digits, without needless zeros"
    reduced = value.denominator
    for prime in (2, 5):
        while reduced % prime == 0:
            reduced //= prime
    if reduced == 1:
        assert Fraction(result) == value
    else:
        assert abs(Fraction(result) - value) <= abs(value) * Fraction(1, 10**11)


@given(st.integers(-99, 99), st.integers(0, 20))
def test_integer_powers_agree_with_python(base: int, exponent: int) -> None:
    assert Calculator()(f"({base}) ** {exponent}") == str(base**exponent)


@given(st.text(alphabet="0123456789.+-*/%() ", max_size=200) | st.text(max_size=200))
def test_any_text_gives_digits_or_a_refusal(text: str) -> None:
    try:
        result = Calculator()(text)
    except ToolError as refusal:
        assert str(refusal)
    else:
        assert re.fullmatch(r"-?\d+(\.\d+)?", result)


async def test_an_answer_that_came_in_time_counts_though_nobody_could_listen() -> None:
    """The event loop was busy with something else until after the deadline."""

    async def quick() -> str:
        await asyncio.sleep(0.02)
        return "here"

    asyncio.get_running_loop().call_later(0.01, time.sleep, 0.3)
    assert await answer(quick, {}, 0.1) == "here"


async def test_a_tool_that_is_cancelled_from_within_fails_like_others() -> None:
    async def gives_up() -> str:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="CancelledError"):
        await answer(gives_up, {}, 1)


# ---- any JSON schema ----

LEGAL: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"type": "object"}, {"a": 1}, ""),
    ({"type": "object", "properties": {"a": {"type": ["string", "null"]}}}, {"a": None}, ""),
    ({"type": "object", "properties": {"a": {"type": ["string", "null"]}}}, {"a": 1}, "type string or null, got 1"),
    ({"type": "object", "properties": {}, "additionalProperties": False}, {"a": 1}, "no argument 'a'; its arguments"),
    ({"properties": {"a": {"type": "integer", "maximum": 3}}}, {"a": 4}, "argument 'a' does not fit maximum 3, got 4"),
    ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"b": 4}, "missing argument 'a'"),
    (
        {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
        {"a": "x"},
        "argument 'a' does not fit anyOf",
    ),
    (
        {"properties": {"a": {"type": "object", "properties": {"b": {}}, "required": ["b"]}}},
        {"a": {}},
        "missing argument 'b' in argument 'a'",
    ),
    (
        {"properties": {"a": {"$ref": "#/$defs/small"}}, "$defs": {"small": {"enum": ["x", "y"]}}},
        {"a": "z"},
        "argument 'a' must be one of 'x', 'y'",
    ),
]


@pytest.mark.parametrize(("parameters", "arguments", "message"), LEGAL)
def test_a_tool_may_have_any_schema(parameters: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    check = ArgumentCheck(ToolSpec("any", "Any.", parameters), closed=False)
    if not message:
        check(arguments)
        return
    with pytest.raises(ToolError, match=re.escape(message)):
        check(arguments)


def test_what_is_no_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match="the tool odd has no valid JSON schema: 'text' is not valid"):
        ArgumentCheck(ToolSpec("odd", "Odd.", {"type": "text"}), closed=False)


async def test_settings_of_a_function_are_no_longer_the_models(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from enum import Enum\n"
        'class Order(Enum):\n    UP = "up"\n    DOWN = "down"\n'
        "def search(query: str, order: Order = Order.UP, limit: int = 3) -> str:\n"
        '    """Search."""\n    return f"{query} {order.name} {limit}"\n'
    )
    (tool,) = tools.load({f"{path}:search": {"order": "down"}}).values()
    (spec,) = tool.specs()
    assert list(spec.parameters["properties"]) == ["query", "limit"]
    assert await call_tool(tool, "search", {"query": "a", "limit": 5.0}, 5) == "a DOWN 5"
    with pytest.raises(ToolError, match="search has no argument 'order'"):
        ArgumentCheck(spec, closed=True)({"query": "a", "order": "up"})
