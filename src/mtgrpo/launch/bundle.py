"""What a run needs on a machine that has nothing of ours: this package, the versions beside it, the user's files."""

import base64
import dataclasses
import hashlib
import io
import os
import re
import time
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any, get_type_hints

import mtgrpo
from mtgrpo.config.compose import Configured
from mtgrpo.config.recipe import read_mapping
from mtgrpo.config.trust import declared, scalars
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Parts, Reach, Where
from mtgrpo.runtime.plain_yaml import read_bounded

THERE = "/opt/ml/"  # where a container of SageMaker has what was uploaded otherwise
WHEEL = f"mtgrpo-{mtgrpo.__version__}-py3-none-any.whl"
# The machine has its own build of torch, and what comes with it; the rest has the versions that are here.
_OF_TORCH = re.compile(r"(torch|triton|pytorch-triton|nvidia-.*|cuda-.*|mtgrpo|pip|setuptools|wheel)", re.IGNORECASE)


def job_name(composed: Configured) -> str:
    """That a job has by itself: of its recipe, and of now."""
    first = next(scalars(composed.choices["recipe"]), "run")
    stem = re.sub("[^a-zA-Z0-9]+", "-", Path(str(first)).stem)[:30]
    return f"mtgrpo-{stem}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def build_wheel() -> bytes:
    """This package as pip installs it, from wherever it was imported: a source tree, or what pip has installed."""
    root, info = Path(mtgrpo.__file__).parents[1], f"mtgrpo-{mtgrpo.__version__}.dist-info"
    files = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for pattern in ("mtgrpo/**/*", "hydra_plugins/mtgrpo_*.py")  # where pip has put it there may be others' plugins
        for path in sorted(root.glob(pattern))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in ("METADATA", "entry_points.txt"):
        files[f"{info}/{name}"] = (distribution("mtgrpo").read_text(name) or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: mtgrpo\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},{len(content)}"
        for name, content in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def versions() -> str:
    """Constraints of pip: the versions of what is installed here, but for torch."""
    found = {dist.name: dist.version.partition("+")[0] for dist in distributions() if dist.name}
    return "".join(f"{name}=={found[name]}\n" for name in sorted(found) if not _OF_TORCH.fullmatch(name))


def user_files(composed: Configured, words: Sequence[str], more: Sequence[str]) -> dict[str, Path]:
    """The user's files that a run reads, by their names below the working folder: recipes, code, tasks, prompts.

    words: of the command line, which may name recipes. more: files and folders that nothing else names.
    Raises ConfigError where one is not there, or lies outside of the working folder.
    """
    files: dict[str, Path] = {}
    for setting, name in _paths(composed, words, more):
        if name.startswith(THERE):
            continue
        path = Path(name).expanduser()
        if not path.exists():
            raise ConfigError(f"{setting}: there is no file {name}; nothing was uploaded")
        _below(path, setting)  # before its folder is looked through
        for found in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if found.is_file() and "__pycache__" not in found.parts:
                files[_below(found, setting)] = found
    return files


def _below(path: Path, setting: str) -> str:
    """The name of a file or folder below the working folder. Raises ConfigError where it, or what it links, is not."""
    here, real = Path.cwd(), path.resolve()
    if not real.is_relative_to(here):
        raise ConfigError(
            f"{setting}: {path} lies outside of the folder in which you type, and what is in that folder is "
            f"uploaded alone: move it there, or upload it and name it as {THERE}input/data/NAME (input.NAME=s3://...)"
        )
    named = Path(os.path.abspath(path))
    return (named if named.is_relative_to(here) else real).relative_to(here).as_posix()


def _paths(composed: Configured, words: Sequence[str], more: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Settings with the paths that they name; those of `more` and of recipes first."""
    yield from (("files", name) for name in more)
    for word in words:
        if word.startswith("recipe="):
            for name in re.findall(r"[^\[\],=\s\"']+\.yaml", word.removeprefix("recipe=")):
                yield from _recipes(Path(name))
    for group, choice in composed.choices.items():
        for name in map(str, scalars(choice)):
            if ".py:" in name:
                yield group, f"{name.partition('.py:')[0]}.py"
    yield from _named(composed.experiment, "")


def _recipes(path: Path) -> Iterator[tuple[str, str]]:
    """A recipe that is a file, and those that it inherits, which lie beside it."""
    yield "recipe", str(path)
    inherited = read_mapping(read_bounded(path), path).get("defaults", []) if path.is_file() else []
    for name in map(str, inherited):
        if name.endswith(".yaml"):
            yield from _recipes(path.parent / name)


def _named(settings: Any, place: str) -> Iterator[tuple[str, str]]:
    """Of settings and those within them: which name a file, a folder or code of the user's own, as they declare."""
    hints = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{place}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _named(value, f"{name}.")
            continue
        marks = declared(hints[field.name])
        plain = Reach.file in marks or Reach.folder in marks
        given = marks and value != field.default and name not in ("resume", "log")
        for text in (each for each in scalars(value if given else []) if isinstance(each, str)):
            path, is_code, _ = text.removeprefix("file:").partition(".py:")
            told = is_code or text.startswith("file:") or (plain and Path(path).suffix and not Path(path).is_dir())
            near = plain or any(isinstance(mark, Where | Parts) or mark is Reach.code for mark in marks)
            if told or (near and text and "\n" not in text and len(text) < 256 and Path(path).exists()):
                yield name, f"{path}.py" if is_code else path
