"""What an exported model was trained to see: its tools, how conversations begin, one of them, a program to lead one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.exceptions import TemplateError

from mtgrpo.chat import ChatSettings, open_chat
from mtgrpo.config.recipe import absolute
from mtgrpo.errors import ConfigError
from mtgrpo.messages import message_to_dict, messages_from
from mtgrpo.parts import named
from mtgrpo.parts.extension import find_class
from mtgrpo.runtime.files import read_lines
from mtgrpo.tasks import TaskSource
from mtgrpo.tools import load
from mtgrpo.types import Sampling, is_success

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PARSERS = {"hermes": "hermes", "xml": "qwen3_coder", "llama3_json": "llama3_json"}  # what vLLM calls our formats
_USE = """
## Use

It was trained and measured with what is in `tools.json` ({tools}) and `opening.json` (system prompt and worked
examples, if any): without them it does something else. `example.txt` is a whole conversation as the model sees it. It
samples as in its training (`generation_config.json`). {task}

    python chat.py QUESTION        # with plain transformers{with_tools_here}
    python -m vllm.entrypoints.openai.api_server --model .{with_tools}

A program of your own keeps special tokens when it decodes (`skip_special_tokens=False`): a call may begin with one.
vLLM on a CPU also wants `--dtype float32 --gpu-memory-utilization 0.2`. It is trained further by
`mtgrpo train model.name=FOLDER recipe={recipe}`, and measured by `mtgrpo eval` with the same words.
"""


@dataclass(frozen=True)
class Prompted:
    """What the conversations of a run were like."""

    tools: list[Any]  # of the example, as the chat template gets them
    opening: list[dict[str, Any]]  # the messages that all begin with: the system prompt, worked examples
    example: str  # one of them, rendered


def find_prompted(run: Path, tokenizer: PreTrainedTokenizerFast, settings: Mapping[str, str]) -> Prompted | None:
    """From the conversations in the folder of a run; None where there are none that the chat template takes."""
    best, tools, example = -1, list[Any](), ""
    opening: list[dict[str, Any]] | None = None
    for worth, begun, messages, offered in _conversations(run, float(settings.get("reward.success_at") or 1)):
        pairs = zip(begun, begun if opening is None else opening, strict=False)
        opening = [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if worth > best and (text := _rendered(tokenizer, messages, offered)):
            best, tools, example = worth, offered, text
    return Prompted(tools, opening or [], example) if example else None


def _conversations(run: Path, success_at: float) -> Iterator[tuple[int, list[Any], list[Any], list[Any]]]:
    """Those of the evaluation after training, or of a step.

    Of each, what it is worth as an example, the messages before the question, all of them, and the tools.
    """
    file, tools = min((run / "trajectories").glob("*.jsonl"), default=run), list[Any]()
    for line in read_lines(file):
        try:
            row = json.loads(line.text)
            tools = row.get("tools", tools)
            messages = [message_to_dict(one) for one in messages_from(row["messages"], f"{file}:{line.number}")]
            spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            before = spoken[-len(row["turns"])] - 1 if row["turns"] else len(messages)
            called = any("tool_calls" in message for message in messages)
            if all(tool["function"]["name"] for tool in tools):
                yield called + is_success(row["status"], row["reward"], success_at), messages[:before], messages, tools
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # cut, or of another version
            continue


def _rendered(tokenizer: PreTrainedTokenizerFast, messages: Sequence[dict[str, Any]], tools: list[Any]) -> str:
    """A conversation as text; "" where the template refuses it, as it may the question of a condenser."""
    try:
        return cast(str, tokenizer.apply_chat_template(list(messages), tools or None, tokenize=False))
    except TemplateError:
        return ""


def write_prompted(
    folder: Path, found: Prompted, tokenizer: PreTrainedTokenizerFast, settings: Mapping[str, str]
) -> str:
    """Write all of it into the folder of a model; returns what its card says of it."""
    chat, names = open_chat(tokenizer, ChatSettings()), [tool["function"]["name"] for tool in found.tools]
    usual = {name: getattr(Sampling(), name) for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")}
    sampling = {name: type(value)(settings.get(f"sampling.{name}") or value) for name, value in usual.items()}
    sampling = {"do_sample": sampling["temperature"] > 0, **sampling}
    parser = _PARSERS[chat.format.name] if chat.format else ""
    environment = Environment(
        loader=PackageLoader("mtgrpo.commands", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    template, stop = settings.get("task.prompt_template", ""), list(chat.stop_ids)
    facts = {
        "asked": f"{template!r}.replace('{{prompt}}', question)" if "{prompt}" in template else "question",
        "options": _callable_alone(settings.get("environment.tools", ""), names),
        "reader": type(chat.format).__name__ if chat.format else "",
        "max_turns": int(settings.get("environment.max_turns") or 8),
        "tools": names,
    }
    programs = ("chat.py", "tools.py") if names else ("chat.py",)
    texts = {name: environment.get_template(f"{name}.jinja").render(facts) for name in programs}
    texts["example.txt"] = found.example
    generation = folder / "generation_config.json"  # what generate() and vLLM sample by, if nobody says more
    usual = json.loads(generation.read_bytes()) if generation.is_file() else {}
    usual = {"pad_token_id": stop[0]} | {name: value for name, value in usual.items() if value is not None}
    sampled = usual | sampling | {"eos_token_id": stop}
    contents: dict[str, Any] = {"tools.json": found.tools, "opening.json": found.opening, generation.name: sampled}
    texts |= {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in contents.items()}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    system = "".join(f"\n    {line}" for one in found.opening[:1] for line in one["content"].splitlines())
    with_tools = f" --enable-auto-tool-choice --tool-call-parser {parser}" if names and parser else ""
    use = _USE.format(
        tools=", ".join(names) or "no tools",
        with_tools=with_tools,
        with_tools_here="; tools.py answers its calls, by the tools of mtgrpo where it names them" if names else "",
        task=_of_task(settings.get("task", "")),
        recipe=settings.get("recipe", "NAME"),
    )
    return use + (system and f"\nConversations begin with\n{system}\n")


def _of_task(name: str) -> str:
    """What its training tasks were, in the words of the option's help."""
    try:
        task = find_class("mtgrpo.tasks", name, TaskSource)
    except ConfigError:  # a file of somebody's own, which may be elsewhere now
        return f"Its tasks were task={name}."
    about = " ".join((task.__doc__ or "").partition("\n\n")[0].split())
    return f"Its tasks were task={name}: {about} Of other questions it has seen none."


def _callable_alone(text: str, names: Sequence[str]) -> list[str]:
    """The options of the tools where these are functions, or parts without resources; else []."""
    try:
        options = [absolute(option) for option in named(json.loads(text or "[]"), "environment.tools", "")]
        needs = any(tool.opens for tool in load([option for option in options if ":" not in option]).values())
    except (ValueError, TypeError):
        return []
    known = {option.rpartition(":")[2] for option in options}
    return options if names and known.issuperset(names) and not needs else []
