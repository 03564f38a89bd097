"""The errors that end a run, or are told the user before one."""

from __future__ import annotations


class ConfigError(ValueError):
    """The user's configuration or input is wrong; the message says what, the value seen and how to fix it."""


class EngineError(RuntimeError):
    """The engine itself is broken (its cause says how): ends the run, unlike a tool that fails."""
