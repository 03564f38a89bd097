"""mtgrpo: GRPO training of language-model agents over multi-turn conversations that use tools.

    task -> rollout (turns, tools) -> reward -> advantage -> batch -> loss -> optimiser -> weights -> engine

ARCHITECTURE.md of the project is the map of its parts.

Importing this package imports nothing heavy; what it offers to Python is imported when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtgrpo.config.compose import preset as preset
    from mtgrpo.stages.api import rollout_with_advantages as rollout_with_advantages
    from mtgrpo.stages.api import train as train

__version__ = "0.1.0"
_OFFERED = {"preset": "config.compose", "rollout_with_advantages": "stages.api", "train": "stages.api"}


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_OFFERED[name]}"), name)
