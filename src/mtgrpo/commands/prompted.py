"""What an exported model was trained to see: its tools, how conversations begin, one of them, a program to lead one."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.exceptions import TemplateError

from mtgrpo.chat import ChatSettings, open_chat
from mtgrpo.condensers import Condenser
from mtgrpo.config.compose import parse
from mtgrpo.config.experiment import groups
from mtgrpo.config.recipe import absolute, base, read_recipe, recipes
from mtgrpo.config.run_record import LEFT_OUT, is_own
from mtgrpo.config.trust import refused
from mtgrpo.errors import ConfigError
from mtgrpo.messages import message_to_dict, messages_from
from mtgrpo.parts import named
from mtgrpo.parts.extension import options
from mtgrpo.record.reading import BEFORE, read_runs
from mtgrpo.record.shapes import Json
from mtgrpo.runtime.files import read_lines
from mtgrpo.runtime.plain_yaml import parse_yaml
from mtgrpo.tasks import TaskSource
from mtgrpo.tools import load
from mtgrpo.types import Sampling, is_success

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PARSERS = {"hermes": "hermes", "xml": "qwen3_coder", "llama3_json": "llama3_json"}  # what vLLM calls our formats
_ELSEWHERE = {*LEFT_OUT, "model", "sft", "checkpoint", "record"}  # what a run was told that is not of its task
_OF_AN_AGENT = ", as your agent does, which has the tools"
_NOT_FOUND = (
    ". Tools of your own come along where you made the run on this machine and their files are below the working "
    "folder, by the names in the run: export from the folder in which it was started"
)
_SEVERAL = ". A Tool that offers several by `specs` is not copied"
_SETTING = re.compile(r"environment\.tools\.(.+?\.py:\w+|\w+)(?:\.(\w+))?")


@dataclass(frozen=True)
class Prompted:
    """What the conversations of a run were like."""

    tools: list[Any]  # of the example, as the chat template gets them
    opening: list[dict[str, Any]]  # the messages that all begin with: the system prompt, worked examples
    example: str  # one of them, rendered
    row: dict[str, Any]  # of its task
    words: list[str]  # with which the run was started, as far as they say what is done
    withheld: bool  # whether others are left out, for the run was somebody else's and these reach something
    own: Mapping[str, str]  # the settings of a run that this user made, whose files may be taken; {} of another


def find_prompted(run: Path, tokenizer: PreTrainedTokenizerFast, settings: Mapping[str, str]) -> Prompted | None:
    """From the conversations in the folder of a run; None where there are none that the chat template takes.

    Raises ConfigError for a template that is refused.
    """
    best, tools, example, asked = -1, list[Any](), "", dict[str, Any]()
    opening: list[dict[str, Any]] | None = None
    (record,) = read_runs([run])
    file = run / "trajectories" / f"{record.newest or BEFORE}.jsonl"
    if file.is_file():
        open_chat(tokenizer, ChatSettings())  # tries the template within limits, which there are not below
    for worth, begun, messages, offered, row in _conversations(file, float(settings.get("reward.success_at") or 1)):
        pairs = zip(begun, begun if opening is None else opening, strict=False)
        opening = [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if worth > best and (text := _rendered(tokenizer, messages, offered)):
            best, tools, example, asked = worth, offered, text, row
    words = [word for word in record.overrides if re.split("[.=]", word.lstrip("+~"))[0] not in _ELSEWHERE]
    words = [word for word in words if not word.startswith("optimizer.lr=")]  # which the card says anew
    if "recipe" in settings and not any(word.startswith("recipe=") for word in words):
        words = [f"recipe={settings['recipe']}", *words]  # with a model's name it would be another one
    mine = is_own(run)
    if withheld := not mine and not reach_nothing(words):
        words = [word for word in words if word.startswith("recipe=") and reach_nothing([word])][-1:]
    own = record.settings if mine else {}
    return Prompted(tools, opening or [], example, asked, words or ["recipe=NAME"], withheld, own) if example else None


def reach_nothing(words: Sequence[str]) -> bool:
    """Whether words that somebody else chose may be shown as a command: a record could set the same without trust."""
    try:
        overrides = parse(words)
        given = {word.key_or_group: word.value() for word in overrides}
        single = len(given) == len(words) and "".join(words).isprintable()
        asked = given.pop("recipe", [])
        names: list[Any] = asked if isinstance(asked, list) else [asked]
        if not single or not {*names} <= {*recipes()}:
            return False
        layers = [base(), *(layer for name in names for layer in read_recipe(name))]
        chosen = {key: given.pop(key) for key in groups() if key in given}
        ours = {key: option for layer in layers for key, option in layer.choices.items() if key in groups()}
        return not refused(ours | chosen, given, {key: ours[key] for key in ours.keys() - chosen})
    except (ConfigError, TypeError, RecursionError):  # it is no option, or chooses a part by something else than a name
        return False


def _conversations(file: Path, success_at: float) -> Iterator[tuple[int, list[Any], list[Any], list[Any], Json]]:
    """Those in a file.

    Of each, what it is worth as an example, the messages before the question, all of them, the tools, the task's row.
    """
    tools, known = list[Any](), dict[str, Any]()
    for line in read_lines(file):
        try:
            row = json.loads(line.text)
            tools, known = row.get("tools", tools), row.get("metadata", known)
            messages = [message_to_dict(one) for one in messages_from(row["messages"], f"{file}:{line.number}")]
            spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
            before = spoken[-len(row["turns"])] - 1 if row["turns"] else len(messages)
            called = any("tool_calls" in message for message in messages)
            if all(tool["function"]["name"] for tool in tools):
                worth = called + is_success(row["status"], row["reward"], success_at)
                question = "".join(message["content"] for message in messages[before : before + 1])
                asked = {"question": question, "answer": row.get("answer", ""), "metadata": known}
                yield worth, messages[:before], messages, tools, asked
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
) -> tuple[str, str]:
    """Write all of it into the folder of a model; returns what its card says of it, and what is left to the user."""
    chat, names = open_chat(tokenizer, ChatSettings()), [tool["function"]["name"] for tool in found.tools]
    usual = {name: getattr(Sampling(), name) for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")}
    sampling = {name: type(value)(settings.get(f"sampling.{name}") or value) for name, value in usual.items()}
    sampling = {"do_sample": sampling["temperature"] > 0, **sampling}
    kept: Any = {"trim_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=PackageLoader("mtgrpo.commands", "."), undefined=StrictUndefined, **kept)
    agent = settings.get("agent", "none") != "none"  # which answered the calls itself
    used, files = _callable_alone(found.own, settings, names) if chat.format and not agent else ("", {})
    template, stop = settings.get("task.prompt_template", ""), list(chat.stop_ids)
    known, chosen = options("mtgrpo.condensers", Condenser), settings.get("condenser", "none")
    condenser = "" if chosen == "none" else chosen if chosen in known else "another"
    facts = {
        "asked": f"{template!r}.replace('{{prompt}}', question)" if "{prompt}" in template else "question",
        "options": used,
        "reader": type(chat.format).__name__ if chat.format else "",
        "max_turns": int(settings.get("environment.max_turns") or 8),
        "tools": [in_a_line(name) for name in names],
        "agent": agent,
        "parser": _PARSERS[chat.format.name] if chat.format else "",
        "task": _of_task(settings.get("task", "")),
        "words": shlex.join(found.words),
        "withheld": found.withheld,
        "condenser": condenser,
        "rate": f"{float(settings.get('optimizer.lr') or 1e-5) / 10:g}",
        "opening": found.opening,
    }
    programs = ("use.md", "chat.py", "tools.py") if names else ("use.md", "chat.py")
    texts = {name: environment.get_template(f"{name}.jinja").render(facts) for name in programs}
    texts["example.txt"] = found.example
    generation = folder / "generation_config.json"  # what generate() and vLLM sample by, if nobody says more
    usual = json.loads(generation.read_bytes()) if generation.is_file() else {}
    usual = {"pad_token_id": stop[0]} | {name: value for name, value in usual.items() if value is not None}
    sampled = usual | sampling | {"eos_token_id": stop}
    contents = {"tools.json": found.tools, "opening.json": found.opening, "example.json": found.row}
    contents[generation.name] = sampled
    texts |= {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in contents.items()}
    use = texts.pop("use.md")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for path, name in files.items():
        shutil.copyfile(path, folder / name)
    told = [f"{key}={value}" for key, value in settings.items() if key.startswith("environment.tools")]
    own = any(".py:" in one for one in told)
    several = own and not any(f".py:{name}" in one for one in told for name in names)
    left = _OF_AN_AGENT if agent else _SEVERAL if several else _NOT_FOUND * own
    notes = [
        f"chat.py and servers do without its condenser, {condenser}: long conversations end worse" if condenser else "",
        f"its tools.py answers no call yet: write what `use` gives{left}" if names and not used else "",
    ]
    return use, "\n".join(filter(None, notes))


def _of_task(name: str) -> str:
    """What its training tasks were, in the words of the option's help; no file that a record names is run."""
    if name not in (known := options("mtgrpo.tasks", TaskSource)):
        return f"Its tasks were task={in_a_line(Path(name).name)}."
    about = " ".join((known[name].__doc__ or "").partition("\n\n")[0].split())
    return f"Its tasks were task={name}: {about} Of other questions it has seen none."


def in_a_line(value: str) -> str:
    """A value that somebody else may have chosen, without the signs by which it could be more than a word of a page."""
    return " ".join(re.sub(r"[^\w.,:;=/@+~'{}\[\] -]+", " ", value).split())


def _callable_alone(
    own: Mapping[str, str], settings: Mapping[str, str], names: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """The tools with their settings, as Python writes them, where these are functions or parts without resources.

    And, by their paths, what the user's own files that they are in are called beside tools.py; `own` as in Prompted.
    """
    written, files = dict[str, str](), dict[str, str]()
    try:
        for option, given in _tools(own or settings).items():
            path, _, name = option.rpartition(":")
            if path:  # the record of somebody else may name any file of this machine
                below = Path(path).is_file() and Path(path).resolve().is_relative_to(Path.cwd())
                usable = own and below and "site-packages" not in path
            else:
                usable = not load([option])[option].opens
            if not usable:
                return "", {}
            taken = Path(path).name in {*files.values(), "chat.py", "tools.py"}
            files |= {path: files.get(path, f"own{len(files)}.py" if taken else Path(path).name)} if path else {}
            written[name] = f"str(HERE / {f'{files[path]}:{name}'!r}): {given!r}" if path else f"{option!r}: {given!r}"
    except (ValueError, TypeError):
        return "", {}
    return (f"{{{', '.join(written.values())}}}", files) if names and {*names} <= {*written} else ("", {})


def _tools(settings: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found = named(json.loads(settings.get("environment.tools") or "[]"), "environment.tools", "")
    for key, value in settings.items():
        if match := _SETTING.fullmatch(key):
            found.setdefault(match[1], {}).update({match[2]: parse_yaml(value.encode(), Path(key))} if match[2] else {})
    return {absolute(option): given for option, given in found.items()}
