"""Records that set every setting of every part to what it could reach, read by a process that is watched.

As a program: reads the run in a folder (argument 1), changed in each of these ways, and prints as JSON what it reached.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import io
import json
import os
import shutil
import site
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

import mtgrpo
from mtgrpo import cli
from mtgrpo.config.experiment import Experiment, groups
from mtgrpo.config.options import options
from mtgrpo.config.trust import declared
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Parts, Reach, Where, extension
from mtgrpo.tools import Tool

SECRET = "swordfish"
PORT = 9  # of this machine, where nobody listens
IMPORTED = "importable"  # a folder of baits, which stands in sys.path
COMMANDS = ("eval", "collect", "play", "serve")
SPAWNS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "pty.spawn",
)  # a fork of this process is watched too
TOUCHES = (
    "open",
    "os.mkdir",
    "os.listdir",
    "os.scandir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.link",
    "os.symlink",
)


@dataclass(frozen=True)
class Attack:
    """What a record has in place of what it had."""

    kind: str
    values: dict[str, Any]
    choices: dict[str, Any]
    deep: bool = False  # tried by every command, not by `eval --dry-run` alone


# --- what is tried


def baits(place: Path) -> dict[Reach, list[str]]:
    """For each kind of reach what a setting may be given, after the files that it names are made in `place`."""
    (place / IMPORTED).mkdir(parents=True, exist_ok=True)
    for path in (place / "evil.py", place / IMPORTED / "evil.py"):
        path.write_text(f"from pathlib import Path\nPath('{place}/ran').touch()\nclass Evil: ...\n")
    (place / "evil.sh").write_text(f"#!/bin/sh\ntouch {place}/ran\n")
    (place / "evil.sh").chmod(0o755)
    (place / "secret.jsonl").write_text(SECRET)
    return {
        Reach.code: [f"{place}/evil.py:Evil", "evil:Evil", "evil"],
        Reach.program: [f"{place}/evil.sh"],
        Reach.file: [f"{place}/secret.jsonl", f"file:{place}/secret.jsonl"],
        Reach.folder: [str(place)],
        Reach.network: [f"http://127.0.0.1:{PORT}/v1", "evil/evil"],
        Reach.secret: ["EVIL_SECRET", "${oc.env:EVIL_SECRET}", r"\${oc.env:EVIL_SECRET}"],
    }


def settings_of(cls: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Every setting below a dataclass that is no group: its path, its type and its default."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if cls is Experiment and field.name in groups():
            continue
        if dataclasses.is_dataclass(hint):
            yield from settings_of(typing.cast(type, hint), (*path, field.name))
        else:
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            yield (*path, field.name), hint, made


def of_options(group: str) -> Iterator[tuple[str, tuple[str, ...], Any, Any]]:
    """Every setting of a group's options once: with the first option that has it by inheritance, or its own default."""
    seen: set[str] = set()
    for name, cls in options(group).items():
        for path, hint, default in settings_of(cls):
            if (what := f"{path} {hint} {default}") not in seen:
                seen.add(what)
                yield name, path, hint, default


def reaching(hint: Any, default: Any, bait: dict[Reach, list[str]]) -> list[Any]:
    """Values that would reach something if a setting of this type did not keep them from it."""
    marks = [mark for mark in declared(hint) if not isinstance(mark, Parts)]
    kinds = [mark.reach if isinstance(mark, Where) else mark for mark in marks]
    if any(kind in bait for kind in kinds):
        texts = [text for kind in kinds for text in bait.get(kind, [])]
    elif Reach.nothing in kinds:  # whatever it is given
        texts = [bait[Reach.code][0], bait[Reach.file][1], bait[Reach.network][0]]
    else:  # a number, a flag or an enum
        texts = bait[Reach.secret][1:2]
    texts += bait[Reach.secret][1:2]
    if isinstance(default, Enum):
        return [*texts, *(member.name for member in type(default))]
    inner = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    if typing.get_origin(inner) is list:
        return [[text] for text in texts]
    if typing.get_origin(inner) is dict or inner is Any:
        return [{"a": text} for text in texts] + ([[text] for text in texts] if inner is Any else [])
    return texts


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: nested(path[1:], value) if path[1:] else value}


def seen(place: Path) -> list[Attack]:
    """What did reach something once, or would."""
    url, script = f"http://127.0.0.1:{PORT}/v1", f"{place}/evil.sh"
    judge = {"url": url, "model": "a", "key": "EVIL_SECRET", "cache": str(place)}
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"reward": judge}, {"reward": "judge"}),
        ({"reward": {"url": url, "model": "a", "cache": f"{place}/made"}}, {"reward": "judge"}),
        ({"task": {"system_prompt": f"file:{place}/secret.jsonl"}}, {}),
        ({"engine.python": script}, {"engine": "server"}),
        ({"engine.url": [url]}, {"engine": "server"}),
        ({"model": {"name": "${oc.env:EVIL_SECRET}"}}, {}),  # a checkpoint takes its place, and yet it is shown
        ({"engine": {"arguments": ["--load-plugins", script]}}, {"engine": "server"}),
        ({"reward.sandbox.kind": "rlimits"}, {"reward": "unit_tests"}),
        (
            {"environment": {"game": "evil:Env", "actions": ["a"]}, "task": {}},
            {"environment": "gymnasium", "task": "game"},
        ),
        ({"environment": {"game": "evil:Env"}, "task": {}}, {"environment": "skyrl_gym", "task": "game"}),
    ]
    return [Attack("seen", values, choices, deep=True) for values, choices in changed]


def attacks(place: Path, bait: dict[Reach, list[str]]) -> Iterator[Attack]:
    """Every setting of every part, spelled in every way; and every choice."""
    for path, hint, default in settings_of(Experiment):
        for value in reaching(hint, default, bait):
            yield Attack("nested", nested(path, value), {}, deep=True)
            yield Attack("dotted", {".".join(path): value}, {})
    for group in groups():
        for name, path, hint, default in of_options(group):
            for number, value in enumerate(reaching(hint, default, bait)):
                yield from _of_option(group, name, path, value, deep=not number)
        for text in (*bait[Reach.code], *bait[Reach.file], "../evil", "${oc.env:EVIL_SECRET}"):
            yield Attack("chosen", {}, {group: text}, deep=True)
            yield Attack("chosen in a list", {}, {group: [text]})
        for shape in ([{"a": 1}], {"a": [1]}, [], "a", 7, None, True):
            yield Attack("of another shape", {group: shape}, {}, deep=True)
            yield Attack("of another shape", {}, {group: shape})
            yield Attack("of another shape", {"environment": {"tools": shape}, "eval": {"sets": shape}}, {})
            yield Attack(
                "of another shape", {group: {"of": shape}}, {group: "mixed" if group == "task" else "composed"}
            )
    yield Attack("chosen", {}, {"engine": "server"}, deep=True)
    yield Attack("chosen", {}, {"engine": "auto"}, deep=True)
    for name, cls in extension.options("mtgrpo.tools", Tool).items():
        for path, hint, default in settings_of(cls):
            for value in reaching(hint, default, bait):
                own = {name: nested(path, value)}
                yield Attack("in environment.tools", {"environment": {"tools": own}}, {}, deep=True)
                yield Attack("in environment.tools, dotted", {"environment.tools": own}, {})
    for text in bait[Reach.code]:
        for values in ({"environment": {"tools": [text]}}, {"environment": {"tools": {text: {}}}}):
            yield Attack("in environment.tools", values, {}, deep=True)
        yield Attack("in eval.sets", {"eval": {"sets": [text]}}, {}, deep=True)
        yield Attack("in eval.sets", {"eval": {"sets": {"a": {"task": text}}}}, {}, deep=True)
        yield Attack("in task.of", {"task": {"of": [{"task": text}]}}, {"task": "mixed"}, deep=True)
        yield Attack("in reward.of", {"reward": {"of": [text]}}, {"reward": "composed"}, deep=True)
        yield Attack("by reference", {"seed": text, "environment": {"tools": ["${seed}"]}}, {}, deep=True)
    evil = {"_target_": "mtgrpo.parts.extension.load_file", "path": f"{place}/evil.py"}
    yield Attack("for Hydra", {"hydra": {"callbacks": {"a": evil}}, "hydra.job.env_set": {"A": "b"}}, {}, deep=True)
    yield Attack("sinks", {"log": {"mlflow": {"tracking_uri": bait[Reach.network][0]}}}, {}, deep=True)


def _of_option(group: str, name: str, path: tuple[str, ...], value: Any, deep: bool) -> Iterator[Attack]:
    own = nested(path, value)
    yield Attack("nested", {group: own}, {group: name}, deep)
    yield Attack("dotted", {".".join((group, *path)): value}, {group: name})
    if len(path) > 1:
        yield Attack("dotted within", {group: {".".join(path): value}}, {group: name})
    if group == "task":
        yield Attack("in eval.sets", {"eval": {"sets": {"a": {"task": name, **own}}}}, {})
        yield Attack("in eval.sets, by name", {"eval": {"sets": {name: own}}}, {})
        yield Attack("in task.of", {"task": {"of": [{"task": name, **own}]}}, {group: "mixed"})
    if group == "reward":
        yield Attack("in a list", {group: {"of": {name: own}}}, {group: [name]})
        yield Attack("in a list, beside `of`", {group: {name: own}}, {group: [name]})
        for holder in ("composed", "context_efficiency", "ground_truth"):
            yield Attack("in reward.of", {group: {"of": {name: own}}}, {group: holder})


# --- how it is watched


class Watch:
    """Python's audit hook: notes whatever leaves the run's folder, the interpreter's files and the packages."""

    def __init__(self, run: Path, place: Path) -> None:
        known = [sys.prefix, sys.base_prefix, *site.getsitepackages(), Path(mtgrpo.__file__).parent]
        known += [run, "/proc", "/sys", "/dev", os.environ["XDG_CONFIG_HOME"]]  # the last holds the reader's own key
        self._allowed = tuple(f"{Path(folder).resolve()}" for folder in known)
        self._bait = str(place)
        self._notes, self.watches = os.memfd_create("notes"), False  # forks of this process have it too
        sys.addaudithook(self._noted)

    @contextlib.contextmanager
    def watching(self, reached: list[str]) -> Iterator[None]:
        """Put what is reached meanwhile into the list."""
        os.ftruncate(self._notes, 0)
        os.lseek(self._notes, 0, os.SEEK_SET)
        self.watches = True
        try:
            yield
        finally:
            self.watches = False
            os.lseek(self._notes, 0, os.SEEK_SET)
            reached += os.read(self._notes, 2**20).decode().splitlines()

    def _note(self, text: str) -> None:
        os.write(self._notes, f"{text!r}\n".encode())

    def _noted(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watches:
            return
        if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", *SPAWNS):
            self._note(f"{event} {arguments!r:.300}")
        elif event in TOUCHES and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            looks_for_modules = event == "os.listdir" and path.endswith(IMPORTED)
            if not looks_for_modules and (not path.startswith(self._allowed) or path.startswith(self._bait)):
                self._note(f"{event} {path}")


class Reader:
    """Reads a run's record, with what an attack puts into it, by the commands that read records."""

    def __init__(self, run: Path, place: Path) -> None:
        self._run, self._place = run, place
        self._files = {name: (run / ".hydra" / name).read_text() for name in ("config.yaml", "hydra.yaml")}
        self._usual = {name: yaml.safe_load(text) for name, text in self._files.items()}
        self._checkpoint = max((run / "checkpoints").glob("step_*"))
        self._watch = Watch(run, place)
        self.refused = 0

    def read(self, attack: Attack, *trust: str) -> list[str]:
        """What the record reaches."""
        config, hydra = (copy.deepcopy(self._usual[name]) for name in ("config.yaml", "hydra.yaml"))
        for group in attack.choices:
            config.pop(group, None)
        for key, value in attack.values.items():
            known = config.get(key)
            config[key] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
        hydra["hydra"]["runtime"]["choices"] |= attack.choices
        (self._run / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
        (self._run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(hydra))
        reached: list[str] = []
        for command in COMMANDS if attack.deep else COMMANDS[:1]:
            words = [command, f"checkpoint={self._checkpoint}", "eval.tasks=1", *trust]
            reached += self._typed([*words, "--dry-run"])
            self.refused += self._was_refused
            if self._was_refused and attack.deep and command == "eval":  # it would begin otherwise
                reached += self._typed([*words, f"hydra.run.dir={self._run}/read"])
        return reached

    def _typed(self, words: list[str]) -> list[str]:
        said = io.StringIO()
        reached: list[str] = []
        self._was_refused = False
        try:
            with (
                contextlib.redirect_stdout(said),
                contextlib.redirect_stderr(said),
                self._watch.watching(reached),
            ):
                cli.run_command(words)
        except ConfigError as error:
            said.write(str(error))
            self._was_refused = "add trust_code=true" in str(error)
        shutil.rmtree(self._run / "read", ignore_errors=True)
        if SECRET in said.getvalue() or (self._place / "ran").exists():
            reached.append("the secret was said" if SECRET in said.getvalue() else "its code ran")
        (self._place / "ran").unlink(missing_ok=True)
        return reached


def main(run: Path, every: int, trust: list[str]) -> None:
    """Try one of `every` attacks of a kind, and print what became of them by their kinds."""
    run = run.resolve()
    place = run.with_name("bait")
    os.environ |= {"EVIL_SECRET": SECRET, "MTGRPO_DATA": str(run / "no data"), "HF_HUB_OFFLINE": "0"}
    os.environ["MPLCONFIGDIR"] = os.environ["XDG_CONFIG_HOME"]  # matplotlib keeps a list of fonts there
    os.chdir(run)
    bait = baits(place)
    sys.path.append(str(place / IMPORTED))
    importlib.import_module("reasoning_gym")  # its matplotlib starts a program that lists fonts, whatever a record says
    reader = Reader(run, place)
    (run / ".hydra" / "signature").unlink(missing_ok=True)  # somebody sent it
    found: dict[str, dict[str, Any]] = {}
    reader.read(Attack("the record as it is", {}, {}))  # imports what is used
    met: Counter[str] = Counter()
    for attack in [Attack("the record as it is", {}, {}), *seen(place), *attacks(place, bait)]:
        met[attack.kind] += 1
        if attack.kind != "seen" and met[attack.kind] % every != 1 % every:
            continue
        entry = found.setdefault(attack.kind, {"tries": 0, "reached": []})
        entry["tries"] += 1
        if reached := reader.read(attack, *trust):
            entry["reached"].append([repr(attack), *reached])
    print(json.dumps({"refused": reader.refused, "attacks": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
