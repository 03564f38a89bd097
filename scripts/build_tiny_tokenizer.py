"""Build the tokenizer that ships in mtgrpo/model/tiny_tokenizer: `python scripts/build_tiny_tokenizer.py [FOLDER]`.

It learns from what the embedded default reads and writes (calculator conversations in the shipped chat template) and
from a list of common English words, so that any other text costs a reasonable number of tokens as well.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.model import tiny
from mtgrpo.tasks import Split
from mtgrpo.tasks.calculator import Calculator
from mtgrpo.types import Message

CONVERSATIONS = 2_000
WORD_WEIGHT = 3  # how often each word is seen, against CONVERSATIONS
REPLY = "<|im_start|>assistant\n"
TEMPLATE = Path(tiny.__file__).parents[1] / "chat" / "chatml.jinja"
# How transformers' `parse_response` reads an answer of the shipped chat template; other libraries rely on it.
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def conversations() -> Iterator[str]:
    """Rendered demonstrations of a task seed that nothing else uses, cut where a reply begins."""
    source = Calculator(seed=1_000_000, max_steps=5)
    render = jinja2.Environment(autoescape=False, trim_blocks=True, lstrip_blocks=True)
    render.policies["json.dumps_kwargs"] = {"sort_keys": False, "ensure_ascii": False}
    render.filters["tojson"] = _to_json
    template = render.from_string(TEMPLATE.read_text())
    opening = asyncio.run(ToolUse(tools=["calculator"]).start(next(source.stream(Split.train, 0))))
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in opening.tools
    ]
    for task, _ in zip(source.stream(Split.train, 0), range(CONVERSATIONS), strict=False):
        messages = (*task.messages, *source.demonstration(task, 0))
        yield from template.render(messages=[_as_dict(m) for m in messages], tools=tools).split(REPLY)


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_dict(message: Message) -> dict[str, object]:
    calls = [{"function": {"name": call.name, "arguments": dict(call.arguments)}} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "tool_calls": calls}


def words() -> Iterator[str]:
    """Each common word after a space, as it stands within a sentence; the commonest also where one begins."""
    for rank, word in enumerate((Path(__file__).parent / "english_words.txt").read_text().split()):
        yield from [f" {word}"] * WORD_WEIGHT
        if rank < 150:
            yield from [f" {word.capitalize()}"] * WORD_WEIGHT
    yield from ["assistant\n"] * CONVERSATIONS


def build_tokenizer(texts: Iterable[str], chat_template: str) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `texts`, each cut at the tags, which are never part of a merge; deterministic."""
    tags = re.compile("|".join(map(re.escape, (*tiny.SPECIAL, *tiny.TAGS))))
    pieces = [piece for text in texts for piece in tags.split(text) if piece]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.Split(Regex(r"[.?!]"), "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tiny.VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in tiny.SPECIAL]
        + [AddedToken(token, special=False, normalized=False) for token in tiny.TAGS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        response_template=RESPONSE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else tiny.TOKENIZER
    tokenizer = build_tokenizer([*conversations(), *words()], TEMPLATE.read_text())
    tokenizer.save_pretrained(folder)
    print(f"{len(tokenizer)} tokens -> {folder}")
