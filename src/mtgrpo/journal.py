"""What the rollouts of a run come to, on disk as soon as it is known: `journal/step_000017.jsonl.gz`, one file a step.

A file holds what happened from one rollout batch to the next. Each event is a line of JSON. What comes within a tenth
of a second is compressed and written together, with a checksum: `zcat` and `read` show it, and a process that is killed
loses no more.

    {"admitted": 40, "version": 17, "scope": "train/18", "task": "gsm8k/train/7"}            a group begins
    {"skipped": 41}                                                      the curriculum passes a task over
    {"turn": 0, "scope": "train/18/attempt0", "task": "gsm8k/train/7", "sample": 3,          a turn was sampled
     "extends": true, "context": [what is new in it], "completion": {"tokens": [...], ...}}
    {"finished": 40, "group": {"trajectories": [...]}}            a group was scored: all but the tokens of its turns
                                                                  (where `resume_mode` is continue)
    {"batch": 17, "groups": [36, 38, 39, 40]}                                                groups go into training

A run goes on from a checkpoint and the events since: batches that were trained are trained again as they were, which
gives the same weights, groups that had finished are taken back, conversations go on at their last turn. Nothing here
is ever unpickled.
"""

import asyncio
import dataclasses
import functools
import json
import os
import zlib
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any

from mtgrpo.errors import ConfigError
from mtgrpo.messages import message_from_fields
from mtgrpo.types import (
    CallOutcome,
    CallRecord,
    Completion,
    Finish,
    Group,
    OpenConversation,
    Sample,
    Sampling,
    Status,
    Task,
    ToolSpec,
    Trajectory,
    Turn,
)

Event = dict[str, Any]
TOGETHER_S = 0.1  # in which events are gathered: to write them one by one takes longer, and more of the disk
_GZIP = 31  # what zlib calls its format with a header and a checksum
_SMALL = (28, 5)  # the same with a window of 4 KiB: for a few events the usual one takes longer to make than to use
_CHUNK = 1 << 16  # bytes that are looked at together for the end of what was written together
_MOST = 1 << 25  # characters that are written together: seven times a turn of 131,072 tokens. None are read beyond it
_EVENTS: dict[str, dict[str, type]] = {  # by the name that tells what has happened: what a run goes on by
    "admitted": {"admitted": int, "version": int, "scope": str, "task": str},
    "skipped": {"skipped": int},
    "group": {"finished": int, "group": dict},
    "batch": {"batch": int, "groups": list},
    "turn": {"turn": int, "scope": str, "task": str, "sample": int, "extends": bool, "completion": dict},
}


def read(path: Path) -> Iterator[Event]:
    """The events of a part, in their order; those from the first on that is cut or damaged are left out.

    Raises ConfigError where what was written together unpacks to more than a run writes.
    """
    return (event for _, events in _written_together(path) for event in events)


class Journal:
    """That of one run. Without a folder nothing is written; one process writes at a time."""

    def __init__(self, folder: Path | None = None, groups: bool = True) -> None:
        """groups: whether scored groups are written too, which `resume_mode=continue` alone reads."""
        self.notes: list[str] = []  # for the user, not shown yet
        self.groups = groups
        self._folder = folder
        self._file: FileIO | None = None
        self._waiting: list[str] = []  # lines to be written
        self._size = 0  # characters of them
        self._forget()

    def _forget(self) -> None:
        self._admitted: dict[int, Event] = {}
        self._skipped: set[int] = set()
        self._finished: dict[int, bytes] = {}  # compressed events
        self._batches: dict[int, list[list[int]]] = {}
        self._turns: dict[tuple[str, str, int], list[bytes]] = {}  # of conversations, by scope, task and sample

    def begin(self, version: int) -> None:
        """What comes from here on belongs to the part of this version of the policy."""
        self.close()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"step_{version:06d}.jsonl.gz").open("ab", buffering=0)

    def close(self) -> None:
        """Write what waits, and no more."""
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, **event: Any) -> None:
        """Append an event; the operating system has it within `TOGETHER_S`."""
        if self._file is None:
            return
        try:
            line = f"{_encode(event)}\n"
            if len(line) > _MOST:
                raise ValueError(f"an event has {len(line):,} characters, at most {_MOST:,} are written")
        except (RecursionError, TypeError, ValueError) as error:
            self._give_up(error)
            return
        if self._size + len(line) > _MOST:
            self._write()
        if not self._waiting:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._write)
        self._waiting.append(line)
        self._size += len(line)

    def _write(self) -> None:
        """Write what waits, together."""
        lines, self._waiting, self._size = self._waiting, [], 0
        if self._file is None or not lines:
            return
        packer = zlib.compressobj(1, zlib.DEFLATED, *_SMALL)
        data = packer.compress("".join(lines).encode()) + packer.flush()
        try:
            if self._file.write(data) != len(data):
                raise OSError("the disk is full")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Write what waits and no more, and say why."""
        if self._folder is None:  # it was said
            return
        folder, self._folder = self._folder, None
        self.notes.append(
            f"nothing more is written into {folder}: {type(error).__name__}: {error}; a run that is killed now goes on "
            "with all conversations from their start"
        )
        self.close()

    def prune(self, version: int) -> None:
        """Remove what no run needs that goes on with groups admitted at `version` or later."""
        for number, path in self._parts().items():
            if number < version:
                path.unlink()

    def clear(self) -> None:
        """Remove everything: what comes begins anew."""
        self._forget()
        for path in self._parts().values():
            path.unlink()

    def go_on(self, version: int, first: int, passed: set[int]) -> None:
        """Take up what a process left, for a run that goes on at `version` with group number `first`.

        passed: numbers after `first` that were trained before, to which those skipped since are added. What is cut or
        damaged is cut off. Where what is left does not lead on from `version`, it is removed, and all groups start
        again.
        """
        self._read_back(version)
        wanted = {number for number in self._admitted if number >= first} - passed
        self._admitted = {number: self._admitted[number] for number in wanted}
        self._finished = {number: packed for number, packed in self._finished.items() if number in wanted}
        self._batches = {number: picked for number, picked in self._batches.items() if number >= version}
        trained = {number for picked in self._batches.values() for numbers in picked for number in numbers}
        last = max(wanted, default=first)
        drawn = sum(first <= number < last for number in passed | wanted | self._skipped)
        missing = len(trained - self._finished.keys())
        if missing or drawn < last - first:
            why = f": {missing} groups that were trained are not in it; resume_mode=exact keeps none" if missing else ""
            self.notes.append(f"{self._folder} does not lead on from step {version}{why}. Conversations start again")
            self.clear()
        passed |= self._skipped
        groups = {(event["scope"], event["task"]): number for number, event in self._admitted.items()}
        numbers = {key: groups.get((key[0].rpartition("/")[0], key[1])) for key in self._turns}
        self._turns = {key: turns for key, turns in self._turns.items() if numbers[key] is not None}
        if self._turns:
            begun = sum(numbers[key] not in self._finished for key in self._turns)
            again = f"{len(self._batches)} steps are trained again with the groups they had; " if self._batches else ""
            self.notes.append(f"{again}{len(self._finished)} groups are taken back, {begun} conversations had begun")

    def _read_back(self, version: int) -> None:
        """Take up the parts that lead on from `version`, and remove the others."""
        parts = self._parts()
        leads = bool(parts) and min(parts) <= version
        for number, path in sorted(parts.items()):
            if leads:
                leads = self._take(path) and number + 1 in parts
            else:
                path.unlink()

    def admitted(self, number: int) -> Event | None:
        """The version, scope and task with which a group was admitted before; None for a new one."""
        return self._admitted.get(number)

    def batch(self, version: int) -> list[int] | None:
        """The numbers of the groups that were picked next at this version before; None where there are no more."""
        picked = self._batches.get(version)
        return picked.pop(0) if picked else None

    def group(self, number: int, task: Task) -> Group | None:
        """A group that had finished; None for one that had not. Raises ConfigError where it is none."""
        packed = self._finished.pop(number, None)
        if packed is None:
            return None
        try:
            group, scope = _unpacked(packed)["group"], self._admitted[number]["scope"]
            return Group(task, [self._trajectory(scope, task, one) for one in group["trajectories"]], group["score_s"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self._folder} has no group {number} as runs write it; use resume_mode=exact"
            ) from error

    def recording(self, open_conversation: OpenConversation, replayable: bool) -> OpenConversation:
        """The same conversations, whose turns are written down; those that had begun are given their turns again.

        That holds as long as a turn's context is the same, token for token: where an environment answers otherwise
        than before, the rest is sampled anew. With `replayable` False all of it is.
        """

        @asynccontextmanager
        async def opened(scope: str, task: str, sample_index: int) -> AsyncGenerator[Sample]:
            events = list(map(_unpacked, self._turns.pop((scope, task, sample_index), [])))
            if events and not replayable:
                self.notes.append(f"{task}, sample {sample_index}: its environment cannot be replayed: it starts again")
                events = []
            context = array("i")
            turn = 0
            # What is sampled from here on has other random numbers.
            sampling_scope = f"{scope}/turn{len(events)}" if events else scope
            async with open_conversation(sampling_scope, task, sample_index) as sample:

                async def sample_turn(tokens: Sequence[int], sampling: Sampling) -> Completion:
                    nonlocal context, turn, events
                    whole = array("i", tokens)
                    extends = whole[: len(context)] == context
                    new = whole[len(context) if extends else 0 :].tolist()
                    event = events[turn] if turn < len(events) else None
                    if event is not None and (event["extends"], event["context"]) == (extends, new):
                        completion = _completion(event["completion"])
                    else:
                        if event is not None:
                            self.notes.append(
                                f"{task}, sample {sample_index}: its environment answers otherwise than before: "
                                f"{len(events) - turn} of {len(events)} turns are sampled anew"
                            )
                            events = []
                        completion = await sample(tokens, sampling)
                        key = {"turn": turn, "scope": scope, "task": task, "sample": sample_index}
                        self.add(**key, extends=extends, context=new, completion=_sampled(completion))
                    context, turn = whole + array("i", completion.tokens), turn + 1
                    return completion

                yield sample_turn

        return opened

    def _parts(self) -> dict[int, Path]:
        paths = self._folder.glob("step_*.jsonl.gz") if self._folder is not None else ()
        return {int(number): path for path in paths if (number := path.name[5:-9]).isdecimal()}

    def _take(self, path: Path) -> bool:
        """Take up the events of a part, and cut off what is not whole; whether all of it was."""
        size, end = path.stat().st_size, 0
        for after, events in _written_together(path):
            try:
                for event in events:
                    self._note(event)
            except (KeyError, TypeError):  # whole, but nothing that was written here
                break
            end = after
        if end < size:
            self.notes.append(f"{path}: {size - end} of {size} bytes are cut or damaged, and left out")
            os.truncate(path, end)
        return end == size

    def _note(self, event: Event) -> None:
        kind = next((name for name in _EVENTS if name in event), "turn")
        for name, types in _EVENTS[kind].items():
            if not isinstance(event[name], types):
                raise TypeError(f"{name} of an event is {event[name]!r:.100}")
        match kind:
            case "admitted":
                self._admitted[event["admitted"]] = {name: event[name] for name in ("version", "scope", "task")}
            case "skipped":
                self._skipped.add(event["skipped"])
            case "group":
                self._finished[event["finished"]] = _packed(event)
            case "batch":
                self._batches.setdefault(event["batch"], []).append([int(number) for number in event["groups"]])
            case _:
                key = (event["scope"], event["task"], event["sample"])
                self._turns[key] = [*self._turns.get(key, [])[: event["turn"]], _packed(event)]

    def _trajectory(self, scope: str, task: Task, record: Event) -> Trajectory:
        """A trajectory with the tokens that its turns had; those of a failed one are gone."""
        key = (f"{scope}/attempt{record['attempts'] - 1}", task.id, record["sample_index"])
        context: list[int] = []
        turns: list[Turn] = []
        events = map(_unpacked, self._turns.pop(key, [])[: len(record["turns"])])  # it may end earlier again
        for fields, event in zip(record["turns"], events, strict=True):
            whole = (context if event["extends"] else []) + event["context"]
            sampled, message = _completion(event["completion"]), message_from_fields(fields["message"])
            context, new = whole + sampled.tokens, event["context"] if fields["parent"] >= 0 else whole
            turns.append(Turn.of(sampled, message, new, fields["parent"], fields["auxiliary"]))
            turns[-1].observations = tuple(map(message_from_fields, fields["observations"]))
            turns[-1].paid = fields["paid"]
        for call in record["calls"]:
            call["outcome"] = CallOutcome(call["outcome"])
        calls = tuple(CallRecord(**call) for call in record["calls"])
        record |= {"turns": turns, "calls": calls, "status": Status(record["status"])}
        record["opening"] = tuple(map(message_from_fields, record["opening"]))
        record["tools"] = tuple(ToolSpec(**tool) for tool in record["tools"])
        return Trajectory(task, **record)


def _written_together(path: Path) -> Iterator[tuple[int, list[Event]]]:
    """Where each whole piece of a part ends, and its events, up to the first that is cut or damaged. See `read`."""
    start = 0
    with path.open("rb") as file:
        while True:
            file.seek(start)
            piece, text = zlib.decompressobj(_GZIP), bytearray()
            try:
                while not piece.eof and (chunk := file.read(_CHUNK)):
                    text += piece.decompress(chunk, _MOST + 1 - len(text))
                    if len(text) > _MOST:
                        raise ConfigError(f"{path} unpacks to more than a run writes; remove it to go on without it")
                events: list[Event] = [json.loads(line) for line in text.splitlines()]
            except ConfigError:
                raise
            except (zlib.error, ValueError, RecursionError):
                return
            if not (piece.eof and all(isinstance(event, dict) for event in events)):  # pyright: ignore[reportUnnecessaryIsInstance]
                return
            start = file.tell() - len(piece.unused_data)
            yield start, events


def _packed(event: Event) -> bytes:
    return zlib.compress(json.dumps(event).encode(), 1)


def _unpacked(packed: bytes) -> Event:
    return json.loads(zlib.decompress(packed))


def _plain(value: Any) -> Any:
    """What JSON has no type for."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in _written(type(value))}
    if isinstance(value, array):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


@functools.cache
def _written(kind: type) -> tuple[str, ...]:
    """The fields that are: a task comes from the data again, a turn's event has its tokens, times are of a process."""
    tokens = {"new_context", "output", "logprobs", "versions", "finish", "kept", "opens_with"}
    left_out = {"asked_s", "ended_s", "began_s", *(tokens if kind is Turn else {"task"})}
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in left_out)


_encode = json.JSONEncoder(default=_plain).encode


def _sampled(completion: Completion) -> Event:
    """For JSON, without detours: most of what is written are turns."""
    names = ("tokens", "logprobs", "versions", "kept") if completion.kept else ("tokens", "logprobs", "versions")
    return {"finish": completion.finish.value, **{name: getattr(completion, name) for name in names}}


def _completion(record: Event) -> Completion:
    record |= {"finish": Finish(record["finish"]), "kept": [array("i", tokens) for tokens in record.get("kept", ())]}
    return Completion(**record)
