"""Imports a peer's module although most of what the peer needs at import time is not installed.

Only the modules that hold the formulas matter. Everything else that they import (schedulers, engines, kernels) is
replaced by empty modules whose names can be imported, subclassed, used as decorators and called, and do nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers  # noqa: F401 (before the stand-ins: it asks which optional packages are there)

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # read when a compiled function is first called


class _Nothing(type):
    """A class that can stand for any class, function, decorator or constant."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})

    def __call__(cls, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else _Nothing(cls.__name__, (), {})

    def __bool__(cls) -> bool:
        return False

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__
    __getitem__ = __or__


class _NothingModule(ModuleType):
    __version__ = "999.0"
    __path__: list[str] = []  # noqa: RUF012 (this is what makes it a package)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _NothingModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def prepare(source: Path | None, empty: Sequence[str] = ()) -> None:
    """Makes the peer under the folder `source` importable; the modules named in `empty` become stand-ins."""
    torch.set_num_threads(1)
    if source is not None:
        sys.path.insert(0, str(source))
    sys.meta_path.insert(0, _StandIns(empty))


def load(name: str) -> Any:
    return importlib.import_module(name)
