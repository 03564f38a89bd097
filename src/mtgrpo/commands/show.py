"""`mtgrpo show RUN`: conversations of a run in the terminal, as they went: tools, calls, replies, rewards."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from mtgrpo.commands.shown_tokens import ShownTokens
from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.record import reading
from mtgrpo.record.reading import AFTER, BEFORE, GREEDY, facts, of_set
from mtgrpo.record.shapes import Json
from mtgrpo.record.writing import page_of
from mtgrpo.runtime.text import number, printable, shorten

_COLORS = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def main(arguments: Sequence[str]) -> int:
    """Print what was asked for. Raises ConfigError where there is none."""
    parser = Arguments("mtgrpo show", description=__doc__)
    parser.add_argument("run", type=Path, nargs="*", metavar="RUN", help="a run's folder; by default the newest here")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--step", type=int, metavar="N", help="of training; default: the newest that there are")
    place.add_argument("--before", action="store_true", help="the evaluation before training")
    place.add_argument("--after", action="store_true", help="the evaluation after it")
    parser.add_argument("--greedy", action="store_true", help="the greedy conversations of that evaluation")
    parser.add_argument("--set", default="", metavar="NAME", help="of that evaluation, one of eval.sets, or no_tools")
    parser.add_argument("--task", default="", metavar="ID", help="only of tasks whose id ends so")
    parser.add_argument("--sample", type=int, metavar="N", help="only the sample of this number")
    parser.add_argument("--failures", action="store_true", help="only those that are no success")
    parser.add_argument("--tokens", action="store_true", help="each token as the policy saw and was paid for it")
    parser.add_argument("--count", type=int, default=2, metavar="N", help="how many at most, default 2")
    args = parser.parse_args(arguments)
    if args.count < 1:
        raise ConfigError(f"--count {args.count}: nothing would be shown; give 1 or more")
    if args.step is not None and (args.set or args.greedy):
        raise ConfigError("--set and --greedy are of an evaluation: give --before or --after in place of --step")
    (run, *_) = reading.read_runs(reading.find_runs(args.run))
    name = "" if args.step is None else f"step_{args.step:06d}"
    if args.before or args.after or args.set or args.greedy:
        file = BEFORE if args.before else AFTER
        name = of_set(GREEDY[file] if args.greedy else file, args.set)
    shown_tokens = ShownTokens(run.folder, name) if args.tokens else None
    path = run.trajectories(shown_tokens.name if shown_tokens else name)
    out = Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    out.print(Text(printable(f"{run.folder}, {path.stem}"), "bold"))
    tools: Any = None  # None: not recorded
    numbered = reading.conversations(path)
    if shown_tokens:  # those that were paid for anything first
        out.print(shown_tokens.legend(out))
        kept = [(line, row) for line, row in numbered if line in shown_tokens]
        numbered = iter(sorted(kept, key=lambda one: not shown_tokens.paid(one[0])))
    wanted = (
        (line, row)
        for line, row in numbered
        if str(row.get("task")).endswith(args.task)
        and args.sample in (None, row.get("sample"))
        and not (args.failures and run.succeeded(row))
    )
    chosen = _of_tasks(wanted, args.count) if args.failures else list(islice(wanted, args.count))
    for line, row in chosen:
        out.print()
        if row["tools"] != tools:
            tools = row["tools"]
            out.print(_offered(tools))
        out.print(Text(f"{row.get('task')}, sample {row.get('sample')}: {facts(row)}", "bold"))
        for text in shown_tokens.lines(line, row, out) if shown_tokens else _lines(row):
            out.print(text)
        out.print(Text(page_of(path, line), "dim"))
    if not chosen:
        cure = "leave --task, --sample or --failures out"
        raise ConfigError(f"{path.stem} of {run.folder} has no such conversation; {cure}")
    return 0


def _of_tasks(rows: Iterator[tuple[int, Json]], count: int) -> list[tuple[int, Json]]:
    """The first `count`, one of each task before a second one of any."""
    first, others = dict[str, tuple[int, Json]](), list[tuple[int, Json]]()
    for line, row in rows:
        if first.setdefault(str(row.get("task")), (line, row))[0] != line and len(others) < count:
            others.append((line, row))
        if len(first) == count:
            break
    return [*first.values(), *others][:count]


def _offered(tools: Any) -> Text:
    """The tools that the model was told of, as the chat template gets them."""
    listed = cast("list[Any]", tools) if isinstance(tools, list) else []
    lines = [json.dumps(tool, ensure_ascii=False) for tool in listed] or ["none"]
    return Text(shorten("\n".join(["tools of what follows:", *lines])), "dim")


def _lines(row: Json) -> Iterator[Text]:
    """A conversation; each turn of the policy with its tokens and, where there is one, its reward."""
    if parts := row.get("components"):
        yield Text("  " + ", ".join(f"{name} {number(value)}" for name, value in parts.items()), "dim")
    messages, turns = row.get("messages", []), row.get("turns", [])
    numbers = {place: turn for turn, place in enumerate(reading.places_of_turns(row))}
    paid = row.get("turn_rewards", [])
    for place, message in enumerate(messages):
        text, turn = _said(message), numbers.get(place)
        if turn is not None:
            if opening := turns[turn].get("opens_with", []):
                yield Text("[a new context]", "bold")
                yield from map(_said, opening)
            about = f"  turn {turn + 1}: {turns[turn].get('output_tokens')} tokens"
            about += f", reward {number(paid[turn])}" if turn < len(paid) else ""
            anew = turn and turns[turn].get("parent", -1) == -1 and not opening
            about += ", a new context (its text: --tokens)" if anew else ""
            text.append(about, "dim")
        yield text


def _said(message: Json) -> Text:
    """A message after its role: reasoning, text, calls and what could not be read."""
    role = str(message.get("role"))
    name = f" {message['name']}" if message.get("name") else ""
    said = [message.get("reasoning"), message.get("content"), *(f"-> {call}" for call in reading.calls(message))]
    said.append(f"unreadable: {message['error']}" if message.get("error") else "")
    text = Text(f"[{role}{name}] ", _COLORS.get(role, ""))
    return text.append(shorten("\n".join(part for part in said if part)), "default")
