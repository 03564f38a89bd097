"""Messages <-> tokens: every turn extends the one before, and text that was not sampled stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mtgrpo.chat import Chat, ChatSettings, Thinking, Tools, open_chat
from mtgrpo.chat.renderer import RendererChat, find_config
from mtgrpo.chat.safe_tokenizer import SafeTokenizer
from mtgrpo.chat.template import TemplateChat, chatml
from mtgrpo.errors import ConfigError
from mtgrpo.types import Message, ToolCall, ToolSpec

MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
LLAMA = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
GEMMA = ["<start_of_turn>", "<end_of_turn>"]
OTHER = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|end|>"]
GLM = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "[gMASK]", "<sop>"]

CALCULATOR = ToolSpec(
    "calculator",
    "Evaluates an expression.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
ADD = ToolCall("calculator", {"expression": "1 + 2"})
USER, CALL, REPLY = (
    Message("user", "What?"),
    Message("assistant", "", "", (ADD,)),
    Message("tool", "3", name="calculator"),
)
ANSWER = Message("assistant", "It is 3.")

# Templates by what they can do. "exact": a conversation is written the same way whatever follows.
EXACT = ["chatml", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "qwen3_training", "qwen3_8_training", "llama3_1"]
STRIPPING = ["qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "nemotron_3_nano", "nemotron_3_super"]
TOOLLESS = ["gemma3", "phi3_5", "llama3", "qwen2_5_vl"]
IN_PROMPT = ["smollm2", "gemma", *TOOLLESS]  # auto describes tools in the prompt; gemma refuses system messages
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONE_CALL = ["llama3_1"]  # and no text beside it
REASONING = ["chatml", "qwen3_training", "qwen3_8_training", *STRIPPING]


@lru_cache
def tokenizer(normalizer: bool = False, text: str = "the answer of the calculator is user assistant expression") -> Any:
    """A byte-level tokenizer, trained on `text`, with the special tokens of every template in this file."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if normalizer:
        bpe.normalizer = normalizers.NFKC()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([text] * 4, trainer)
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL + LLAMA + GEMMA + GLM + OTHER])
    bpe.add_tokens([AddedToken(token, normalized=normalizer) for token in MARKUP])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


@lru_cache
def base_tokenizer() -> Any:
    """A base model's: its only special token is the end of a text."""
    bpe = Tokenizer(
        models.BPE({c: n for n, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"])}, [])
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")


def templates_of_others() -> list[Path]:
    spec = find_spec("trl")
    return (
        [] if spec is None or spec.origin is None else [*(Path(spec.origin).parent / "chat_templates").glob("*.jinja")]
    )


@lru_cache
def source(name: str) -> str:
    if name in ("chatml", "smollm2"):
        return chatml() if name == "chatml" else SMOLLM2
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the chat templates of trl are not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")


HIDING = ["idefics3", "llava_next", "smolvlm"]  # models that see: contents are parts, and no text is shown


@pytest.mark.parametrize("path", sorted(templates_of_others()), ids=lambda path: path.stem)
def test_every_template_of_others_shows_what_is_said_or_is_refused(path: Path) -> None:
    if path.stem.removesuffix("_training") in HIDING:
        with pytest.raises(ConfigError, match=r"it hides or changes message 1 \(user\)"):
            with_template(path.read_text("utf-8"))
    else:
        assert with_template(path.read_text("utf-8")).open([USER, ANSWER, USER], [])


def with_template(text: str | None, **settings: Any) -> Chat:
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    copy.chat_template = text
    return open_chat(copy, ChatSettings(**settings))


@lru_cache
def chat_of(name: str, thinking: Thinking = Thinking.keep, tools: Tools = Tools.auto) -> Chat:
    return with_template(source(name), thinking=thinking, tools=tools)


def as_dict(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        entry["name"] = message.name
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        entry["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return entry


def rendered(name: str, messages: Sequence[Message], tools: Sequence[ToolSpec], prompt: bool = True) -> str:
    """The template's own rendering, without any of the code under test."""
    return applied(source(name), messages, tools, prompt)


def applied(template: str | None, messages: Sequence[Message], tools: Sequence[ToolSpec], prompt: bool = True) -> str:
    functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools]
    return tokenizer().apply_chat_template(
        [as_dict(message) for message in messages],
        tools=[{"type": "function", "function": function} for function in functions] or None,
        chat_template=template,
        add_generation_prompt=prompt,
        tokenize=False,
    )


def decode(tokens: Sequence[int]) -> str:
    return tokenizer().decode(tokens, skip_special_tokens=False)


def added(tokens: Sequence[int]) -> list[int]:
    special = set(tokenizer().get_added_vocab().values())
    return [token for token in tokens if token in special]


def without_thoughts(text: str) -> str:
    return re.sub(r"<think>.*?</think>\s*", "", text, flags=re.DOTALL)


def without_empty_thoughts(text: str) -> str:
    return re.sub(r"<think>\s*</think>\s*", "", text)


def turn_by_turn(chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
    """The context after all `messages`, when the policy says the assistant's messages itself."""
    first = next(index for index, message in enumerate(messages) if message.role == "assistant")
    tokens = chat.open(messages[:first], tools)
    while first < len(messages):
        tokens += chat.encode(messages[first])
        turns = (index for index, message in enumerate(messages) if index > first and message.role == "assistant")
        following = next(turns, len(messages))
        extension = chat.extend(messages[: first + 1], messages[first + 1 : following], tools)
        assert extension is not None
        tokens += extension
        first = following
    return tokens


odd = st.text(st.sampled_from(list(" \n\tax1{}\"'\\<>|é中😀\u200d&/")), max_size=10)
nasty = st.lists(
    odd | st.sampled_from(SPECIAL + MARKUP + LLAMA + ["\ufdd0", "\ufdd1", "\ufdd03\ufdd1"]), max_size=4
).map("".join)
word = st.text(st.sampled_from(list("abcé中😀 ")), min_size=1, max_size=8).map(lambda text: f"w{text}w")
json_text = st.text(st.sampled_from(list("ab \n\t\"'\\{}é中")), max_size=8)
calls = st.builds(lambda key, value: ToolCall("calculator", {key: value}), st.sampled_from(["a", "b"]), json_text)


@st.composite
def conversations(
    draw: st.DrawFn, name: str, text: st.SearchStrategy[str] = odd, thoughts: bool = True, in_prompt: bool = False
) -> list[Message]:
    """A conversation that ends with the environment's words; the assistant's own text is plain."""
    system = name not in TOOLLESS and name != "gemma"
    one_call, toolless = (not in_prompt and name in names for names in (ONE_CALL, TOOLLESS))
    messages = [Message("system", draw(text))] if draw(st.booleans()) and system else []
    messages.append(Message("user", draw(text)))
    for _ in range(draw(st.integers(1, 3))):
        made = draw(st.lists(calls, max_size=1 if one_call else 2)) if not toolless else []
        content = "" if made and one_call else draw(word)
        reasoning = draw(word | st.just("")) if thoughts and name in REASONING else ""
        messages.append(Message("assistant", content, reasoning, tuple(made)))
        messages += [Message("tool", draw(text), name="calculator") for _ in made] or [Message("user", draw(text))]
    return messages


@pytest.mark.parametrize("name", EXACT + STRIPPING + TOOLLESS)
@settings(max_examples=5)
@given(data=st.data())
def test_contexts_part_where_reading_both_says_so(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name, nasty))
    tools = [CALCULATOR] if name not in TOOLLESS else []
    counts = [count for count, message in enumerate(messages, 1) if message.role == "user"]
    assert chat_of(name).shared(messages, counts, tools) == Chat.shared(chat_of(name), messages, counts, tools)


def test_where_contexts_part_is_found_without_reading_each(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, read, encode = [USER, ANSWER] * 50, 0, SafeTokenizer.encode_with_spans

    def counted(self: SafeTokenizer, text: str, continues: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        nonlocal read
        read += len(text)
        return encode(self, text, continues)

    monkeypatch.setattr(SafeTokenizer, "encode_with_spans", counted)
    monkeypatch.setattr(SafeTokenizer, "encode", lambda self, text: self.encode_with_spans(text)[0])
    chat_of("chatml").shared(messages, range(1, 100, 2), [])
    assert read < 3 * len(decode(chat_of("chatml").open(messages, [])))


@pytest.mark.parametrize("name", EXACT + STRIPPING + TOOLLESS)
@settings(max_examples=12)
@given(data=st.data())
def test_turns_extend_one_another_as_the_template_writes_them(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name))
    tools = [CALCULATOR] if name not in TOOLLESS and data.draw(st.booleans()) else []
    tokens = turn_by_turn(chat_of(name), messages, tools)
    whole = rendered(name, messages, tools)
    if name in STRIPPING:  # the thoughts of earlier turns stay in the context although the template strips them
        assert without_thoughts(decode(tokens)) == without_thoughts(whole)
        assert all(message.reasoning in decode(tokens) for message in messages)
    else:
        assert decode(tokens) == whole
        assert tokens == tokenizer().encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("name", [*IN_PROMPT, "qwen2_5", "llama3_1"])
@settings(max_examples=25)
@given(data=st.data())
def test_tools_in_the_prompt_are_what_the_template_in_force_writes(name: str, data: st.DataObject) -> None:
    messages = data.draw(conversations(name, in_prompt=True))
    tools = [CALCULATOR] if data.draw(st.booleans()) else []
    chat = chat_of(name, tools=Tools.auto if name in IN_PROMPT else Tools.prompt)
    whole = applied(chat.template, messages, tools)
    assert turn_by_turn(chat, messages, tools) == chat.open(messages, tools)
    assert chat.open(messages, tools) == tokenizer().encode(whole, add_special_tokens=False)
    assert whole.count("Evaluates an expression.") == len(tools)
    for message in messages:
        if message.role == "assistant":
            assert chat.parse(chat.encode(message)) == message


def test_tools_in_the_system_prompt_word_for_word() -> None:
    chat = chat_of("smollm2")
    called = Message("assistant", "I add.", "", (ADD, ToolCall("calculator", {"expression": "é"})))
    replies = [REPLY, Message("tool", "4", name="calculator")]
    expected = """<|im_start|>system
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "calculator", "description": "Evaluates an expression.", "parameters": \
{"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
What?<|im_end|>
<|im_start|>assistant
I add.
<tool_call>
{"name": "calculator", "arguments": {"expression": "1 + 2"}}
</tool_call>
<tool_call>
{"name": "calculator", "arguments": {"expression": "é"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
3
</tool_response>
<tool_response>
4
</tool_response><|im_end|>
<|im_start|>assistant
"""
    assert decode(chat.open([Message("system", "Be brief."), USER, called, *replies], [CALCULATOR])) == expected
    unled = decode(chat.open([USER, called, *replies], [CALCULATOR]))
    assert unled == expected.replace("Be brief.\n\n", ""), "a system message is made where there is none"
    plain = decode(chat.open([USER], []))
    assert plain == rendered("smollm2", [USER], []), "without tools the template is left as it is"


def test_tools_are_described_to_the_user_where_the_template_refuses_a_system_message() -> None:
    chat = chat_of("gemma")
    text = decode(chat.open([USER, CALL, REPLY, Message("user", "And?")], [CALCULATOR]))
    assert text.startswith("<|endoftext|><start_of_turn>user\n# Tools\n")
    assert text.count("# Tools") == 1
    assert "</tool_call>\n\nWhat?<end_of_turn>" in text
    replied = "<start_of_turn>user\n<tool_response>\n3\n</tool_response>\nAnd?<end_of_turn>\n<start_of_turn>model\n"
    assert text.endswith(replied), "roles must alternate: one message"
    with pytest.raises(ConfigError, match="roles system, user: System role not supported"):
        chat.open([Message("system", "Be brief."), USER], [CALCULATOR])


@settings(max_examples=25)
@given(data=st.data())
def test_reasoning_beside_tools_in_the_prompt(data: st.DataObject) -> None:
    messages = data.draw(conversations("qwen3", in_prompt=True))
    chat = chat_of("qwen3", tools=Tools.prompt)
    tokens = turn_by_turn(chat, messages, [CALCULATOR])
    assert without_thoughts(decode(tokens)) == without_thoughts(applied(chat.template, messages, [CALCULATOR]))
    assert all(message.reasoning in decode(tokens) for message in messages)
    for message in messages:
        if message.role == "assistant":
            assert chat.parse(chat.encode(message)) == message


def test_reasoning_is_stripped_where_the_template_strips_it_from_tools_in_the_prompt() -> None:
    chat = chat_of("qwen3", Thinking.strip, Tools.prompt)
    call, answer = Message("assistant", "", "hm", (ADD,)), Message("assistant", "3", "so")
    assert chat.extend([USER, call], [REPLY], [CALCULATOR]) is not None, "kept within a chain of tool calls"
    assert chat.extend([USER, call, REPLY, answer], [USER], [CALCULATOR]) is None
    dropping = chat_of("deepseek_r1_distill", Thinking.strip)  # drops what stands before </think>
    assert "hm" not in decode(dropping.open([USER, call, REPLY], [CALCULATOR]))
    assert dropping.extend([USER, call], [REPLY], [CALCULATOR]) is None
    assert dropping.parse(dropping.encode(call)) == call


def test_messages_as_clients_of_a_server_write_them() -> None:
    parts: list[dict[str, Any]] = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "calculator", "arguments": "{}"}}]},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "1"},
    ]
    text = tokenizer().apply_chat_template(
        parts, chat_template=chat_of("smollm2").template, tokenize=False, add_generation_prompt=True
    )
    called = Message("assistant", "", "", (ToolCall("calculator", {}),))
    assert text == decode(chat_of("smollm2").open([USER, called, REPLY], []))


@pytest.mark.parametrize("name", ["chatml", "llama3_1", "qwen3", "qwen3_5_think", "smollm2", "renderer"])
@settings(max_examples=25)
@given(data=st.data())
def test_text_that_was_not_sampled_stays_text(name: str, data: st.DataObject) -> None:
    chat = renderer_chat() if name == "renderer" else chat_of(name)
    name = "qwen3" if name == "renderer" else name
    messages = data.draw(conversations(name, nasty, thoughts=False))
    spec = ToolSpec("calculator", data.draw(nasty), {"type": "object", "properties": {}, "note": data.draw(nasty)})
    tokens = turn_by_turn(chat, messages, [spec])
    whole = applied(chat.template or source(name), messages, [spec])
    assert without_empty_thoughts(decode(tokens)) == without_empty_thoughts(whole)
    harmless = [
        m if m.role == "assistant" else Message(m.role, "x" if m.content else "", name=m.name) for m in messages
    ]
    assert added(tokens) == added(turn_by_turn(chat, harmless, [CALCULATOR])), "only the template may hold added tokens"


@pytest.mark.parametrize("name", [*EXACT, *STRIPPING])
@settings(max_examples=20)
@given(data=st.data())
def test_a_message_survives_encode_and_parse(name: str, data: st.DataObject) -> None:
    made = tuple(data.draw(st.lists(calls, max_size=3)))
    content = data.draw(word | st.just(""))
    reasoning = data.draw(word | st.just(""))
    message = Message("assistant", content, reasoning, made)
    chat = chat_of(name)
    output = chat.encode(message)
    assert chat.parse(output) == message
    assert chat.parse(output[:-1]) == message, "the stop token may be missing"
    assert output[-1] == chat.stop_ids[0]
    assert not set(output[:-1]) & set(chat.stop_ids)


@settings(max_examples=50)
@given(content=nasty.filter(lambda text: not any(mark in text for mark in ("think>", "tool_call>", "python_tag"))))
def test_control_tokens_in_an_assistants_text_stay_text(content: str) -> None:
    chat = chat_of("chatml")
    output = chat.encode(Message("assistant", content))
    assert added(output) == [chat.stop_ids[0]]
    assert chat.parse(output) == Message("assistant", content)
    assert decode(chat.open([USER, Message("assistant", content), USER], [])).count(content) >= 1


@pytest.mark.parametrize("name", ["chatml", "qwen3", "qwen3_5_think", "llama3_1", "renderer"])
@settings(max_examples=60)
@given(tokens=st.lists(st.integers(0, 360), max_size=12))
def test_any_tokens_can_be_parsed(name: str, tokens: list[int]) -> None:
    message = (renderer_chat() if name == "renderer" else chat_of(name)).parse(tokens)
    assert message.role == "assistant"
    assert not (message.error and message.tool_calls)


def test_a_mistake_becomes_an_error_and_keeps_the_text() -> None:
    chat = chat_of("chatml")
    text = '<think>\nhm\n</think>\n\nNow\n<tool_call>\n{"name": "calculator", "arguments": }\n</tool_call>'
    message = chat.parse([*tokenizer().encode(text), chat.stop_ids[0]])
    assert message.error == "the tool call is not valid JSON: Expecting value"
    assert (message.reasoning, message.tool_calls) == ("hm", ())
    context = chat.open([USER, message, USER], [])
    assert decode(context).count(text) == 1, "the model sees its own output"
    assert tokenizer().convert_tokens_to_ids("</tool_call>") in context, "in the tokens that it sampled"
    assert chat.parse(tokenizer().encode("<think>\nhm")).error == "<think> is not closed"


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_calls_that_a_template_refuses_are_written_as_text(name: str) -> None:
    chat = chat_of(name)
    both = Message("assistant", "I add twice.", "", (ADD, ToolCall("calculator", {"expression": "3<|eot_id|>"})))
    text = 'I add twice.\n{"name": "calculator", "parameters": {"expression": "1 + 2"}}; '
    assert decode(chat.encode(both)).startswith(text)
    assert chat.parse(chat.encode(both)) == both
    history = [USER, both, REPLY, Message("tool", "4", name="calculator")]
    assert turn_by_turn(chat, history, [CALCULATOR]) == chat.open(history, [CALCULATOR])
    assert text in decode(chat.open(history, [CALCULATOR]))


SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": st.lists(
        st.sampled_from(
            [*MARKUP, *SPECIAL, *LLAMA, "\n", "  ", "\t", "\\", '"', "'", "é😀", "null", "True", "5", "&lt;"]
        )
        | st.sampled_from(
            ["<function=f>", "</function>", "<parameter=a>", "</parameter>", '{"name": "f", "parameters": {']
        ),
        max_size=5,
    ).map("".join),
    "integer": st.integers(-(2**60), 2**60),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
}
ANY_JSON = st.recursive(
    st.one_of(*SCALARS.values()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SCALARS["string"], inner, max_size=2),
    max_leaves=4,
)
TYPED = SCALARS | {"array": st.lists(ANY_JSON, max_size=2), "object": st.dictionaries(SCALARS["string"], ANY_JSON)}
TOOL_NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,9}", fullmatch=True)
ENDS_A_VALUE = re.compile(
    r"</parameter>\s*(<parameter=|(</function>\s*)?</?tool_call>)"
)  # in text that nothing escapes


@st.composite
def called_tools(draw: st.DrawFn) -> tuple[list[ToolSpec], Message]:
    """Tools, and a message that calls them with arguments of the types they declare."""
    specs: list[ToolSpec] = []
    made: list[ToolCall] = []
    keys = st.text(st.sampled_from(list('ab é_."')), min_size=1, max_size=4)
    for number in range(draw(st.integers(1, 2))):
        kinds = draw(st.dictionaries(keys, st.sampled_from(list(TYPED)), max_size=2))
        properties = {key: {"type": kind} for key, kind in kinds.items()}
        name = f"{draw(TOOL_NAMES)}{number}"
        specs.append(ToolSpec(name, "Does it.", {"type": "object", "properties": properties}))
        made.append(ToolCall(name, {key: draw(TYPED[kind]) for key, kind in kinds.items()}))
    assume(not any(ENDS_A_VALUE.search(str(value)) for call in made for value in call.arguments.values()))
    content = draw(st.sampled_from(["", "I add.", "Two\n lines."]))
    return specs, Message("assistant", content, "", tuple(made))


BY_NAME = {  # on the hub
    "qwen3": "Qwen/Qwen3-0.6B",
    "qwen3_vl": "Qwen/Qwen3-VL-4B-Instruct",
    "qwen3_5_think": "Qwen/Qwen3.5-4B",
    "qwen3_6": "Qwen/Qwen3.6-35B-A3B",
    "qwen3_8": "Qwen/Qwen3.8-27B",
    "nemotron_3_nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron_3_super": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "nemotron_3_ultra": "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nemotron_3_5_lightning": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
    "llama3_2": "meta-llama/Llama-3.2-1B-Instruct",
}


@pytest.mark.parametrize("name", [*BY_NAME, "chatml", "qwen2_5", "qwen3_instruct_2507", "llama3_1", "smollm2"])
@settings(max_examples=30)
@given(said=called_tools())
def test_a_call_is_read_exactly_as_its_template_writes_it(name: str, said: tuple[list[ToolSpec], Message]) -> None:
    specs, message = said
    chat = chat_on_the_hub(name) if name in BY_NAME else chat_of(name)
    assert chat.parse(chat.encode(message), specs) == message


@lru_cache
def chat_on_the_hub(name: str) -> Chat:
    assert find_config(BY_NAME[name]) is not None, "the library would serve it"
    copy = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    copy.name_or_path, copy.chat_template = BY_NAME[name], source(name)
    return open_chat(copy, ChatSettings())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_model_is_served_alike_however_it_is_named(name: str) -> None:
    chat, own = chat_on_the_hub(name), chat_of(name)
    assert chat.notes[0] == own.notes[0]
    text = "def f():\n    return 1\n"
    run = ToolSpec("run", "Runs it.", {"type": "object", "properties": {"code": {"type": "string"}}})
    message = Message("assistant", "", "", (ToolCall("run", {"code": text}),))
    assert chat.open([USER], [run]) == own.open([USER], [run])
    assert chat.parse(own.encode(message), [run]).tool_calls[0].arguments["code"] == text


def test_values_are_typed_by_the_tools_of_the_conversation() -> None:
    chat = with_template(source("qwen3_5_nothink"))
    message = Message("assistant", "", "", (ToolCall("add", {"a": 1, "b": "2"}),))
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    assert chat.parse(chat.encode(message)).tool_calls[0].arguments == {"a": "1", "b": "2"}
    adds = ToolSpec("add", "Adds.", parameters)
    chat.open([USER], [replace(adds, parameters={})])  # another conversation, whose tool has the same name
    assert chat.parse(chat.encode(message), [adds]) == message


@pytest.mark.parametrize(
    ("name", "ends"), [("chatml", "<|im_end|>"), ("llama3_1", "<|eot_id|>"), ("gemma3", "<end_of_turn>")]
)
def test_a_turn_ends_with_the_templates_token_or_eos(name: str, ends: str) -> None:
    assert [decode([token]) for token in chat_of(name).stop_ids] == [ends, "<|endoftext|>"]


@pytest.mark.parametrize("name", ["chatml", "qwen3_training", "llama3_1", "gemma3", "smollm2", "renderer"])
@pytest.mark.parametrize("message", [ANSWER, CALL], ids=["answer", "call"])
def test_an_output_that_ends_otherwise_is_given_the_end_of_its_turn(name: str, message: Message) -> None:
    chat = renderer_chat() if name == "renderer" else chat_of(name)
    output = chat.encode(message)[:-1]  # as sampling.stop_ids cut it
    assert chat.parse(output) == message
    answers = [REPLY] if message is CALL else [USER]
    extension = chat.extend([USER, message], answers, [CALCULATOR], output[-1])
    assert extension is not None
    assert extension[0] == chat.stop_ids[0], "not sampled, and so not trained"
    assert extension[1:] == chat.extend([USER, message], answers, [CALCULATOR])
    context = chat.open([USER], [CALCULATOR]) + output + extension
    whole = decode(chat.open([USER, message, *answers], [CALCULATOR]))
    assert without_empty_thoughts(decode(context)) == without_empty_thoughts(whole)


@pytest.mark.parametrize("name", ["chatml", "qwen3_training", "llama3_1", "gemma3", "smollm2", "renderer"])
def test_after_another_end_than_the_templates_the_context_is_written_anew(name: str) -> None:
    chat = renderer_chat() if name == "renderer" else chat_of(name)
    end, other = chat.stop_ids[:2]
    assert chat.parse([*chat.encode(ANSWER)[:-1], other]) == ANSWER
    assert chat.extend([USER, ANSWER], [USER], [], other) is None
    assert chat.extend([USER, ANSWER], [USER], [], end) == chat.extend([USER, ANSWER], [USER], []) is not None


def test_white_space_before_the_end_of_a_turn_cannot_be_known() -> None:
    spaced = chatml().replace("{{- content }}", "{{- content + '\\n' }}")
    chat = with_template(spaced)
    assert chat.extend([USER, ANSWER], [USER], []) is not None
    assert chat.extend([USER, ANSWER], [USER], [], chat.encode(ANSWER)[-3]) is None


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_ends_of_the_generation_config_end_a_turn(tmp_path: Path, adapter: bool) -> None:
    ids = [tokenizer().convert_tokens_to_ids(token) for token in ("<|eot_id|>", "<|end|>", "a")]
    folder = tmp_path / "adapter" if adapter else tmp_path
    tokenizer().save_pretrained(folder)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    if adapter:
        config = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    loaded.chat_template = source("llama3_1")
    chat = open_chat(loaded, ChatSettings())
    assert [decode([token]) for token in chat.stop_ids] == ["<|eot_id|>", "<|endoftext|>", "<|end|>"]
    assert chat.parse([*chat.encode(ANSWER)[:-1], ids[1]]) == ANSWER
    assert chat.extend([USER, ANSWER], [USER], [], ids[1]) is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[1]}))
    assert open_chat(loaded, ChatSettings()).stop_ids == chat.stop_ids
    (tmp_path / "generation_config.json").unlink()
    assert open_chat(loaded, ChatSettings()).stop_ids == chat.stop_ids[:2]


def test_the_ends_of_the_generation_config_with_a_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    other = tokenizer().convert_tokens_to_ids("<|end|>")
    monkeypatch.setattr("mtgrpo.model.tokenizer.end_tokens", lambda name: [other] if name == "Qwen/Qwen3-0.6B" else [])
    copy = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|endoftext|>")
    copy.name_or_path = "Qwen/Qwen3-0.6B"
    chat = open_chat(copy, ChatSettings())
    assert chat.stop_ids == (*renderer_chat().stop_ids, other)
    assert chat.parse([*chat.encode(ANSWER)[:-1], other]) == ANSWER
    assert chat.extend([USER, ANSWER], [USER], [], other) is None


def test_no_template_runs_in_the_turn_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = with_template(source("qwen3"))
    message = Message("assistant", "I add.", "hm", (ADD,))
    sampled = chat.encode(message)

    def turn() -> tuple[list[int] | None, Message]:
        return chat.extend([USER, message], [REPLY], [CALCULATOR]), chat.parse(sampled)

    first = turn()

    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("the template was rendered")

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", refuse)
    assert turn() == first


def test_strip_begins_anew_where_the_template_drops_reasoning() -> None:
    chat = chat_of("qwen3", Thinking.strip)
    call, answer = Message("assistant", "", "hm", (ADD,)), Message("assistant", "3", "so")
    assert chat.extend([USER, call], [REPLY], [CALCULATOR]) is not None, "kept within a chain of tool calls"
    assert chat.extend([USER, call, REPLY, answer], [USER], [CALCULATOR]) is None
    assert chat.extend([USER, call, REPLY, ANSWER], [USER], [CALCULATOR]) is None, "reasoning before the last message"
    assert chat.extend([USER, ANSWER], [USER], [CALCULATOR]) is not None, "there is nothing to drop"
    history = [USER, call, REPLY, answer, USER]
    assert "hm" not in decode(chat.open(history, [CALCULATOR]))
    assert chat.extend([*history, call], [REPLY], [CALCULATOR]) is not None, "what is gone cannot be dropped again"
    assert chat_of("chatml", Thinking.strip).extend([USER, answer], [USER], []) is not None, "chatml drops nothing"


def test_keep_extends_even_where_the_template_drops_reasoning() -> None:
    chat = chat_of("qwen3")
    answer = Message("assistant", "3", "so")
    tokens = chat.open([USER], []) + chat.encode(answer)
    extension = chat.extend([USER, answer], [Message("user", "And?")], [])
    assert extension is not None
    assert decode(tokens + extension).count("so\n</think>") == 1
    assert decode(extension) == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


def test_reasoning_that_the_template_has_no_field_for_is_kept_in_the_text() -> None:
    reasoned = Message("assistant", "3", "so")
    assert "<think>\nso\n</think>\n\n3<|im_end|>" in decode(chat_of("qwen2_5").open([USER, reasoned, USER], []))
    dropped = source("qwen2_5").replace("message.content", "message.content.split('</think>')[-1]")
    chat = with_template(dropped)
    assert "so" not in decode(chat.open([USER, reasoned, USER], []))
    assert decode(chat.encode(reasoned)) == "<think>\nso\n</think>\n\n3<|im_end|>", "as it was sampled"


@pytest.mark.parametrize("name", ["qwen3_5_think", "nemotron_3_nano", "nemotron_3_ultra"])
def test_an_answer_closes_the_thinking_that_its_prompt_opened(name: str) -> None:
    text = decode(chat_of(name).open([USER], []) + chat_of(name).encode(ANSWER))
    assert text.count("<think>") == text.count("</think>") == 1


def test_fixed_text_that_depends_on_contents_is_rendered() -> None:
    content = "{{ m.content ~ ' (short)' if m.role == 'user' and m.content | length < 20 else m.content }}"
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + content + "<|im_end|>\n{% endfor %}"
    chat = with_template(text + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    extension = chat.extend([USER, ANSWER], [Message("user", "odd <|im_end|>")], [])
    assert extension is not None
    assert decode(extension) == "\n<|im_start|>user\nodd <|im_end|> (short)<|im_end|>\n<|im_start|>assistant\n"
    assert len(added(extension)) == 3


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages|length }}{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}",
        "{% for m in messages %}{{ loop.revindex }}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ],
    ids=["counts messages", "numbers from the end", "no end of turn"],
)
def test_what_cannot_be_proven_an_extension_is_none(text: str) -> None:
    chat = with_template(text + "{% if add_generation_prompt %}assistant: {% endif %}")
    assert chat.extend([USER, ANSWER], [USER], []) is None
    assert decode(chat.open([USER, ANSWER, USER], [])).endswith("assistant: ")
    assert decode([chat.encode(ANSWER)[-1]]) in ("<|im_end|>", "<|endoftext|>")


def test_a_turn_that_ends_with_the_next_role_is_not_extended() -> None:
    chat = chat_of("glm4moe_training")  # ends a call with <|observation|> and an answer with <|user|>
    assert chat.extend([USER, CALL], [REPLY, USER], [CALCULATOR]) is None
    assert chat.extend([USER, ANSWER], [USER], [CALCULATOR]) is not None


def test_many_replies_are_rendered_instead_of_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, rendered = with_template(source("qwen2_5")), 0
    render = PreTrainedTokenizerFast.apply_chat_template

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal rendered
        rendered += 1
        return render(*given, **named)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", counted)
    for count in (1, 4, 5, 64):
        call = Message("assistant", "", "", (ADD,) * count)
        replies = [Message("tool", "3" * (number % 2), name="calculator") for number in range(count)]
        opened, rendered = chat.open([USER], [CALCULATOR]) + chat.encode(call), 0
        extension = chat.extend([USER, call], replies, [CALCULATOR])
        assert extension is not None and rendered < 100
        assert decode(opened + extension) == decode(chat.open([USER, call, *replies], [CALCULATOR]))


def test_what_is_kept_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [USER, Message("assistant", "", "hm", (ADD,))]
    replies = (REPLY, replace(REPLY, content=""), replace(REPLY, name=""), USER)

    def extended(chat: Chat) -> list[list[int] | None]:
        contexts = [[*history, *[REPLY, *history[1:]] * count] for count in range(4)]
        return [chat.extend(context, [said], [CALCULATOR]) for context in contexts for said in replies]

    chat, expected = with_template(source("qwen3"), thinking=Thinking.strip), extended(chat_of("qwen3", Thinking.strip))
    monkeypatch.setattr("mtgrpo.chat.template._MOST_SHAPES", 3)
    assert extended(chat) == expected
    assert len(vars(chat)["_extensions"]) <= 3 and len(vars(chat)["_visible"]) <= 3


@settings(max_examples=25)
@given(data=st.data())
def test_a_base_model_speaks_chatml_in_ordinary_text(data: st.DataObject) -> None:
    base = base_tokenizer()
    chat = open_chat(base, ChatSettings(template="chatml"))
    assert chat.notes == ["chat: template chatml, tool calls hermes, thinking keep, end of turn </s>"]
    assert chat.stop_ids == (base.eos_token_id,)
    messages = data.draw(conversations("chatml", nasty.map(lambda text: text.replace("<|im_end|>", "</s>"))))
    tokens = turn_by_turn(chat, messages, [CALCULATOR])
    whole = applied(chat.template, messages, [CALCULATOR])
    assert base.decode(tokens) == whole
    harmless = [m if m.role == "assistant" else Message(m.role, "x", name=m.name) for m in messages]
    ends = applied(chat.template, harmless, [CALCULATOR]).count("</s>")
    assert tokens.count(base.eos_token_id) == ends, "only ends of turns are special"
    for message in messages:
        if message.role == "assistant":
            assert chat.encode(message)[-1] == base.eos_token_id
            assert chat.parse(chat.encode(message)) == message
    base.chat_template = chat.template
    assert open_chat(base, ChatSettings()).open(messages, [CALCULATOR]) == chat.open(messages, [CALCULATOR])
    base.chat_template = None


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*chat\.template=chatml.*chat\.template=PATH"):
        with_template(None)
    with pytest.raises(ConfigError, match=r"'qwen' is neither auto nor chatml nor an existing \.jinja file"):
        with_template(None, template="qwen")
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ConfigError, match=r"neither <\|im_end\|> nor an eos token.*write one as eos_token"):
        open_chat(bare, ChatSettings(template="chatml"))
    path = tmp_path / "own.jinja"
    path.write_text(source("chatml"), "utf-8")
    assert with_template(None, template=str(path)).open([USER], []) == with_template(None, template="chatml").open(
        [USER], []
    )


@pytest.mark.parametrize(
    ("name", "tools", "problem"),
    [
        ("gemma3", Tools.template, "no place for tools"),
        ("gemma4", Tools.template, "an unknown format"),
        ("gemma4", Tools.auto, "an unknown format"),
    ],
)
def test_a_template_that_cannot_use_tools_says_so(name: str, tools: Tools, problem: str) -> None:
    chat = chat_of(name, tools=tools)
    assert problem in chat.notes[0]
    assert chat.open([USER], [])
    with pytest.raises(ConfigError, match=rf"{problem}.*chat\.tools=prompt"):
        chat.open([USER], [CALCULATOR])
    assert chat_of(name, tools=Tools.prompt).open([USER], [CALCULATOR])


@pytest.mark.parametrize("shown", ["m.role != 'tool'", "true"], ids=["no replies", "no calls"])
def test_a_template_that_places_tools_but_not_all_that_is_said_with_them(shown: str) -> None:
    turns = "{% for m in messages if SHOWN %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    chat = with_template("{{ tools }}" + turns.replace("SHOWN", shown) + prompt)
    assert "tool calls hermes in the prompt" in chat.notes[0]
    context = decode(chat.open([USER, CALL, REPLY], [CALCULATOR]))
    assert context.endswith("user: <tool_response>\n3\n</tool_response><|im_end|>\nassistant: ")


def test_a_refused_conversation_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"refuses a conversation of the roles user, user.*chat\.template=chatml"):
        chat_of("gemma3").open([USER, USER], [])


def test_a_normaliser_cannot_make_special_tokens() -> None:
    chat = open_chat(tokenizer(normalizer=True), ChatSettings(template="chatml"))
    wide = "＜tool_call＞"  # noqa: RUF001  full-width signs, which NFKC makes ASCII
    plain = chat.extend([USER, ANSWER], [Message("user", "x")], [])
    tokens = chat.extend([USER, ANSWER], [Message("user", wide)], [])
    assert plain is not None and tokens is not None
    assert added(tokens) == added(plain)


def test_a_vocabulary_that_holds_special_strings_whole_spells_them_out() -> None:
    vocabulary = {character: number for number, character in enumerate("<>/_abcdefghijklmnopqrstuvwxyz|\n")}
    vocabulary |= {"<tool_call>": 100, "<|im_start|>": 101, "<|im_end|>": 102}
    bpe = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    bpe.decoder = decoders.Fuse()
    bpe.add_special_tokens(["<tool_call>", "<|im_start|>", "<|im_end|>"])
    safe = SafeTokenizer(PreTrainedTokenizerFast(tokenizer_object=bpe))
    assert safe.encode("<tool_call>") == [100]
    assert safe.decode(safe.encode(safe.escape("a<tool_call>"))) == "a<tool_call>"
    assert max(safe.encode(safe.escape("<tool_call><|im_end|>"))) < 100


def test_half_characters_in_a_reply_are_replaced() -> None:
    extension = chat_of("chatml").extend([USER, CALL], [Message("tool", "a\ud800b", name="calculator")], [])
    assert extension is not None
    assert "a?b" in decode(extension)


def test_notes_say_what_is_in_force() -> None:
    chatml_note = "chat: template auto, tool calls hermes, thinking keep, end of turn <|im_end|>"
    assert chat_of("chatml").notes == [chatml_note]
    assert renderer_chat(Thinking.strip).notes == ["chat: renderer qwen3, thinking strip"]


def test_tools_in_the_prompt_are_noted_once_where_there_are_tools() -> None:
    chat = with_template(source("gemma3"))
    in_force = "chat: template auto, tool calls hermes in the prompt, thinking keep, end of turn <end_of_turn>"
    chat.open([USER], [])
    assert chat.notes == [in_force]
    for _ in range(2):
        chat.open([USER], [CALCULATOR])
    described = "chat: the template has no place for tools: they are described in the prompt (chat.tools=prompt)"
    assert chat.notes == [in_force, described]


@lru_cache
def renderer_chat(thinking: Thinking = Thinking.keep) -> Chat:
    return RendererChat(tokenizer(), find_config("Qwen/Qwen3-0.6B"), thinking)


def test_the_renderers_serve_known_models_whose_template_is_missing_or_not_read() -> None:
    copy = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|endoftext|>")
    copy.name_or_path = "Qwen/Qwen3-0.6B"
    assert isinstance(known := open_chat(copy, ChatSettings()), RendererChat)
    assert known.template is None, "a checkpoint keeps the tokenizer's own"
    assert isinstance(open_chat(copy, ChatSettings(template="chatml")), TemplateChat), "an explicit template wins"
    copy.chat_template = source("gemma4")
    assert isinstance(open_chat(copy, ChatSettings()), RendererChat), "a format of calls that is not read"
    assert isinstance(open_chat(copy, ChatSettings(tools=Tools.prompt)), TemplateChat), (
        "tools in the prompt are jinja's"
    )
    copy.name_or_path = "somebody/Qwen3-0.6B"
    assert isinstance(open_chat(copy, ChatSettings()), TemplateChat)
    copy.name_or_path, copy.chat_template = "somebody/Qwen3-0.6B", None
    with pytest.raises(ConfigError, match="no chat template"):
        open_chat(copy, ChatSettings())


def test_a_renderer_that_leaves_tools_out_is_not_used() -> None:
    bpe = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    kinds = ["calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"]
    outputs = ["outputs▁begin", "outputs▁end", "output▁begin", "output▁end"]
    names = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", *(f"tool▁{kind}" for kind in kinds + outputs)]
    bpe.add_special_tokens([f"<｜{name}｜>" for name in names])  # noqa: RUF001
    deepseek = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<｜end▁of▁sentence｜>")  # noqa: RUF001
    deepseek.name_or_path = "deepseek-ai/DeepSeek-V3"
    deepseek.chat_template = source("deepseek_r1_distill")
    chat = open_chat(deepseek, ChatSettings())
    assert "Evaluates an expression." in deepseek.decode(chat.open([USER], [CALCULATOR]))
    with pytest.raises(ConfigError, match="no place for tools"):
        open_chat(deepseek, ChatSettings(tools=Tools.template)).open([USER], [CALCULATOR])


@settings(max_examples=20)
@given(data=st.data())
def test_the_renderer_and_the_template_agree(data: st.DataObject) -> None:
    messages = data.draw(conversations("qwen3"))
    library, own = renderer_chat(), chat_of("qwen3")
    assert library.stop_ids == own.stop_ids
    assert turn_by_turn(library, messages, [CALCULATOR]) == turn_by_turn(own, messages, [CALCULATOR])
    for message in messages:
        if message.role == "assistant":
            assert library.parse(own.encode(message)) == own.parse(library.encode(message)) == message


@pytest.mark.parametrize(
    "text",
    [
        *("{", '{"arguments": {}}', '{"name": "f", "arguments": 1}', '{"name": "f", "arguments": ' + "[" * 9999),
        '{"name": "f", "arguments": {"a": ' + 150 * "[" + 150 * "]" + "}}",
    ],
)
def test_mistakes_are_errors_with_a_renderer_too(text: str) -> None:
    message = renderer_chat().parse(tokenizer().encode(f"<tool_call>\n{text}\n</tool_call><|im_end|>"))
    assert message.error
    assert message.content == f"<tool_call>\n{text}\n</tool_call>"


def test_a_renderer_strips_where_its_template_does() -> None:
    chat, keeping = renderer_chat(Thinking.strip), renderer_chat()
    thought = Message("assistant", "3", "so")
    assert chat.extend([USER, thought], [USER], []) is None
    assert keeping.extend([USER, thought], [USER], []) is not None
    assert chat.extend([USER, ANSWER], [USER], []) is not None
    assert chat.extend([USER, Message("assistant", "", "hm", (ADD,))], [REPLY], [CALCULATOR]) is not None


def test_a_renderer_may_not_change_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = RendererChat(tokenizer(), find_config("Qwen/Qwen3-0.6B"), Thinking.keep)
    assert chat.extend([USER, ANSWER], [USER], []) is not None
    other = SimpleNamespace(token_ids=list(range(100)))
    monkeypatch.setattr(chat, "_renderer", SimpleNamespace(bridge_to_next_turn=lambda *_, **__: other))
    assert chat.extend([USER, ANSWER], [USER], []) is None


def test_a_token_may_run_across_the_end_of_the_prompt() -> None:
    merging = tokenizer(text="\n\n")
    chat = RendererChat(merging, find_config("Qwen/Qwen3.5-4B"), Thinking.keep)
    prompt, output = chat.open([USER], []), chat.encode(ANSWER)
    text = merging.decode(prompt + output)
    assert text.endswith("<think>\n\n</think>\n\nIt is 3.<|im_end|>")
    assert merging.encode(text, add_special_tokens=False)[: len(prompt)] != prompt, "one token would cross the end"
    assert chat.parse(output) == ANSWER
