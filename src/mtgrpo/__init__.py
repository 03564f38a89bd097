"""mtgrpo: GRPO training of language-model agents over multi-turn conversations that use tools.

    task -> rollout (turns, tools) -> reward -> advantage -> batch -> loss -> optimiser -> weights -> engine

ARCHITECTURE.md of the project is the map of its parts.

Importing this package imports nothing heavy; what it offers to Python is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtgrpo.config.compose import preset as preset
    from mtgrpo.stages.api import rollout_with_advantages as rollout_with_advantages

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "preset":
        from mtgrpo.config.compose import preset  # noqa: PLC0415

        return preset
    if name == "rollout_with_advantages":
        from mtgrpo.stages.api import rollout_with_advantages  # noqa: PLC0415

        return rollout_with_advantages
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
