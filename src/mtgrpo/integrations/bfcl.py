"""Function calling: requests, and the calls that they ask for."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.messages import message_from
from mtgrpo.parts import Folder, Prompt, Text
from mtgrpo.tasks import Split, held_out
from mtgrpo.tasks.published import Published
from mtgrpo.tasks.rows import JsonlRows, Row, Rows
from mtgrpo.types import Message, Task, ToolCall

_CATEGORIES = ("simple_python", "multiple", "parallel")
_EVAL_FRACTION = 0.25
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}  # the others are JSON's own


@dataclass
class BFCL(Published):
    """800 requests of the Berkeley Function Calling Leaderboard, v4 (Patil et al. 2025): one turn, calls not run.

    Read from `path`, else from the folder bfcl in $MTGRPO_DATA: BFCL_v4_NAME.json, and the accepted calls in
    possible_answer. For environment=function_calls and reward=function_calls. The leaderboard is one for evaluation
    alone; here a quarter is held out, by a hash of the id. Conversations of several turns need the functions
    themselves, which are code of the package bfcl-eval, and are refused.
    """

    system_prompt: Prompt = "Call the functions that the request needs, all in one message."
    path: Folder = ""  # the folder
    # one function; one of several; several calls
    categories: list[Text] = field(default_factory=lambda: [*_CATEGORIES])

    place = "bfcl"
    layout = "BFCL rows have id, function and a question of one turn"

    def rows(self, split: Split) -> Rows:
        for name in (name for name in self.categories if name not in _CATEGORIES):
            why = "needs the functions of the package bfcl-eval, which are not here" if "multi" in name else "is none"
            raise ConfigError(f"task.categories: {name} {why}; choose from {', '.join(_CATEGORIES)}")
        return JsonlRows({self._file(name): name for name in self.categories})

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        wanted = split is Split.eval
        return [n for n in range(len(rows)) if held_out(f"bfcl/{rows[n].get('id')}", _EVAL_FRACTION) is wanted]

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        [turn] = row["question"]
        messages = tuple(message_from(message, rows.where(index)) for message in turn)
        tools = [{**tool, "parameters": _json_schema(tool["parameters"])} for tool in row["function"]]
        return Task(f"bfcl/{row['id']}", messages, "", {"tools": tools, "calls": self._accepted[row["id"]]})

    def demonstration(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The accepted calls, each argument as it is accepted first."""
        calls = (ToolCall(name, _first(accepted)) for call in task.metadata["calls"] for name, accepted in call.items())
        return (Message("assistant", tool_calls=tuple(calls)),)

    @functools.cached_property
    def _accepted(self) -> dict[str, Any]:
        files = {self._file(f"possible_answer/{name}"): name for name in self.categories}
        rows = (read() for read in JsonlRows(files).readings())
        return {str(row.get("id")): row.get("ground_truth") for row in rows}

    def _file(self, name: str) -> Path:
        file = (self.copy or Path(self.place)) / Path(name).parent / f"BFCL_v4_{Path(name).name}.json"
        if not file.is_file():
            raise ConfigError(f"there is no file {file}; set task.path to a folder with the files of BFCL v4")
        return file


def _json_schema(schema: Any) -> Any:
    """A schema in BFCL's words as JSON schema; a parameter may be named type."""
    if not isinstance(schema, Mapping):
        return schema
    translated = dict(cast("Mapping[str, Any]", schema))
    if translated.get("type") == "any":
        del translated["type"]
    elif "type" in translated:
        translated["type"] = _JSON_TYPES.get(translated["type"], translated["type"])
    if "properties" in translated:
        translated["properties"] = {name: _json_schema(inner) for name, inner in translated["properties"].items()}
    if "items" in translated:
        translated["items"] = _json_schema(translated["items"])
    return translated


def _first(accepted: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Of the accepted values of each argument the first; "" stands for leaving it out."""
    firsts = ((name, next((value for value in values if value != ""), "")) for name, values in accepted.items())
    return {name: _plain(value) for name, value in firsts if value != ""}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _first(cast("Mapping[str, Any]", value))
    return [_plain(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value
