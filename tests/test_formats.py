"""Tool-call formats: what is written is read back, and mistakes become an error, never an exception."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtgrpo.chat.formats import FORMATS, Hermes, LlamaJson, Parsed, ToolFormat, XmlTags, split_thinking
from mtgrpo.types import ToolCall

BY_NAME = {form.name: form for form in FORMATS}
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
json_calls = st.lists(
    st.builds(ToolCall, names, st.dictionaries(st.text(max_size=6), json_values, max_size=3)), max_size=3
)
tag_like = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "\n",
    "  ",
    "x",
]
text_values = st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=8) | st.lists(
    st.sampled_from(tag_like), max_size=6
).map("".join).filter(lambda text: not re.search(r"</parameter>\s*<(parameter=|/function|/?tool_call)", text))
text_calls = st.lists(
    st.builds(ToolCall, names, st.dictionaries(names, text_values, max_size=3)), min_size=1, max_size=3
)


@pytest.mark.parametrize("form", [Hermes(), LlamaJson()], ids=lambda form: form.name)
@given(calls=json_calls)
def test_json_formats_read_what_they_write(form: ToolFormat, calls: list[ToolCall]) -> None:
    assert form.parse(form.write(calls), {}) == Parsed("", tuple(calls))


@given(calls=text_calls)
def test_xml_reads_what_it_writes(calls: list[ToolCall]) -> None:
    assert XmlTags().parse(XmlTags().write(calls), {}) == Parsed("", tuple(calls))


def test_xml_values_have_the_types_of_the_schema() -> None:
    types = {"n": "integer", "flag": "boolean", "list": "array", "name": "string"}
    schemas = {"f": {"properties": {key: {"type": kind} for key, kind in types.items()}}}
    call = ToolCall("f", {"n": 3, "flag": True, "list": [1, "a"], "name": "3", "unknown": "4"})
    assert XmlTags().parse(XmlTags().write([call]), schemas).calls == (call,)
    wrong = ToolCall("f", {"n": "three"})
    assert XmlTags().parse(XmlTags().write([wrong]), schemas).calls == (wrong,), "left to the tool to refuse"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),  # as the templates of Qwen 3.5 and Nemotron 3 write them
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "string"}, "True", "True"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, '"5"', '"5"'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "5", 5),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Nowhere/x"}, "1", "1"),
        ({"$ref": "#/$defs/Loop"}, "1", "1"),
        (True, "5", "5"),
        ({"type": None, "anyOf": None, "oneOf": None}, "5", "5"),  # as some clients send what they leave out
        ({}, "5", "5"),
        ({"type": "object"}, "  no JSON ", "  no JSON "),
        ({"type": "array"}, 150 * "[" + 150 * "]", 150 * "[" + 150 * "]"),  # too deep for what would render it
    ],
)
def test_an_xml_value_is_what_its_schema_allows(schema: Any, text: str, value: Any) -> None:
    parameters = {
        "properties": {"a": schema},
        "$defs": {"Point": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
    }
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = XmlTags().parse(written, {"f": parameters}).calls
    assert repr(call.arguments["a"]) == repr(value)


def test_an_xml_call_of_a_tool_whose_schema_names_no_properties() -> None:
    (call,) = XmlTags().parse(XmlTags().write([ToolCall("f", {"a": "5"})]), {"f": {"properties": None}}).calls
    assert call.arguments == {"a": "5"}


def test_tags_inside_strings_do_not_end_a_call() -> None:
    call = ToolCall("say", {"text": '</tool_call> <tool_call> "quoted" \n'})
    assert Hermes().parse("Now: " + Hermes().write([call, call]), {}) == Parsed("Now: ", (call, call))


def test_text_around_calls_is_content() -> None:
    one, two = ToolCall("f", {}), ToolCall("g", {"a": 1})
    text = f"before\n{Hermes().write([one])} between {Hermes().write([two])} after"
    assert Hermes().parse(text, {}) == Parsed("before\n between  after", (one, two))


def test_llama_json_reads_calls_after_lines_of_text() -> None:
    one, two = ToolCall("f", {"a": "x;\n{"}), ToolCall("g", {})
    for between in ("", "<|python_tag|>"):
        text = f"Now both:\n{between}{LlamaJson().write([one, two])}"
        assert LlamaJson().parse(text, {}) == Parsed("Now both:\n", (one, two))
    assert "not valid JSON" in LlamaJson().parse('Now:\n{"name": "f", "parameters": {', {}).error


def test_llama_json_reads_a_call_where_a_line_begins_with_one() -> None:
    call = ToolCall("f", {"a": 1})
    for text in ('{"name": "f", "parameters": {"a": 1}}', ' <|python_tag|>{"name": "f", "arguments": {"a": 1}} \n'):
        assert LlamaJson().parse(text, {}) == Parsed("", (call,))
    for text in (
        '{"answer": 42}',
        "The answer is {42}.",
        'I say {"name": "f", "parameters": {}}',
        "",
        'I:\n{"name": 1}',
    ):
        assert LlamaJson().parse(text, {}) == Parsed(text)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "</tool_call> is missing"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and</tool_call>', "`and` stands before </tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', "`}` stands before </tool_call>"),
        ("hermes", "text</tool_call>", "</tool_call> without <tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call></tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "must be a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "has no name"),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', "has no name"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', 'has no "arguments"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', '"arguments" must be a JSON object'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 10**5, "too deep"),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": ' + 150 * "[" + 150 * "]" + "}}</tool_call>",
            "too deep",
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>", "too long a number"),
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\ud800"}}</tool_call>', "half a character"),
        ("llama3_json", '{"name": "f", "parameters": ', "not valid JSON"),
        ("llama3_json", '{"name": "f", "parameters": {}} and more', "not valid JSON"),
        ("llama3_json", "<|python_tag|>print(1)", "not valid JSON"),
        ("llama3_json", '{"name": "f"}', 'has no "parameters"'),
        ("xml", "<tool_call>f</tool_call>", "<function=NAME>"),
        ("xml", "<tool_call><function=></function></tool_call>", "has no name"),
        ("xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "<parameter> is not closed"),
        ("xml", "<tool_call><function=f>", "</function> is missing"),
        ("xml", "<tool_call><function=f></function>", "</tool_call> is missing"),
        ("xml", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", "</function> is missing"),
        (
            "xml",
            "<tool_call><function=f><parameter=a>1</parameter> and</function></tool_call>",
            "`and` stands before </function>",
        ),
        ("xml", 2 * "<tool_call><function=f><parameter=a>1</parameter></function>", "</tool_call> is missing"),
    ],
)
def test_errors_are_said(name: str, text: str, error: str) -> None:
    said = BY_NAME[name].parse(text, {})
    assert error in said.error
    assert (said.content, said.calls) == (text, ())


tags = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>"]
pieces = [
    '{"name": "f", "arguments": {}}',
    '{"name":',
    "{",
    "}",
    '"',
    "\\ud800",
    "1",
    "\n",
    " x ",
    "<think>",
    "</think>",
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(text=st.lists(st.sampled_from(tags + pieces), max_size=8).map("".join))
def test_any_text_can_be_parsed(form: ToolFormat, text: str) -> None:
    said = form.parse(text, {})
    assert not (said.error and said.calls)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("answer", False, ("", "answer", "")),
        ("<think>\na\n\nb\n</think>\n\nanswer\n", False, ("a\n\nb", "answer\n", "")),
        ("<think></think>answer", False, ("", "answer", "")),
        ("a\n</think>\n\nanswer", True, ("a", "answer", "")),
        ("a</think>answer", False, ("a", "answer", "")),
        ("<think>a</think>answer", True, ("a", "answer", "")),
        ("a</think>answer <think>", True, ("a", "answer <think>", "")),
        ("first <think>a</think>answer", False, ("a", "first answer", "")),
        ('<tool_call>{"a": "<think>"}', False, ("", '<tool_call>{"a": "<think>"}', "")),
        ('{"name": "f", "parameters": "</think>"}', False, ("", '{"name": "f", "parameters": "</think>"}', "")),
        ("a</think><tool_call><think>", True, ("a", "<tool_call><think>", "")),
        ("<think><tool_call></think>answer", False, ("<tool_call>", "answer", "")),
        ("<think>a", False, ("a", "", "<think> is not closed")),
        ("a", True, ("a", "", "<think> is not closed")),
    ],
)
def test_thinking_is_split_from_the_rest(text: str, inside: bool, expected: tuple[Any, ...]) -> None:
    assert split_thinking(text, inside) == expected
