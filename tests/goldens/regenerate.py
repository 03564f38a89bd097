"""Writes <peer>.json: numbers computed by executing another trainer's own functions on random inputs.

    python tests/goldens/regenerate.py --peer NAME [--source FOLDER] [--check]

Only inputs and outputs are stored. None of the peers' code is needed to run the tests that read these files. To make
a peer importable, without its dependencies and next to an installed torch, transformers, omegaconf and trl:

    trl                         pip install trl==1.16.0
    verl, openrlhf, skyrl       pip install --no-deps --target FOLDER NAME==VERSION
    prime_rl, areal, slime,     git clone, git checkout COMMIT (each from_<peer>.py names its own)
    verl_agent

and pass that FOLDER as --source. With --check the numbers are computed again and compared with the stored ones.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import importing

FOLDER = Path(__file__).parent
PEERS = sorted(path.stem.removeprefix("from_") for path in FOLDER.glob("from_*.py"))


def build(name: str, source: Path | None) -> dict[str, Any]:
    peer = importlib.import_module(f"from_{name}")
    importing.prepare(source, peer.STAND_INS)
    if "." in peer.VERSION and (found := version(name)) != peer.VERSION:
        raise SystemExit(f"{name} {found} is installed, the numbers are of {peer.VERSION}")
    return {"peer": peer.PEER, "version": peer.VERSION, "cases": peer.build_groups()}


def differences(stored: Any, computed: Any, path: str = "") -> list[str]:
    """Where two JSON values differ by more than the rounding of the last stored digits."""
    if isinstance(stored, float) and isinstance(computed, float):
        close = abs(stored - computed) <= 1e-11 + 1e-10 * abs(stored)
        return [] if close else [f"{path}: stored {stored}, computed {computed}"]
    if isinstance(stored, dict) and isinstance(computed, dict) and stored.keys() == computed.keys():
        return [line for key in stored for line in differences(stored[key], computed[key], f"{path}/{key}")]
    if isinstance(stored, list) and isinstance(computed, list) and len(stored) == len(computed):
        pairs = enumerate(zip(stored, computed, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{path}/{index}")]
    return [] if stored == computed else [f"{path}: stored {stored!r}, computed {computed!r}"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write or check the golden numbers of one peer.")
    parser.add_argument("--peer", required=True, choices=PEERS)
    parser.add_argument("--source", type=Path, help="folder from which the peer can be imported")
    parser.add_argument("--check", action="store_true", help="compare with the stored numbers, write nothing")
    arguments = parser.parse_args()
    computed = build(arguments.peer, arguments.source)
    groups = computed["cases"]
    path = FOLDER / f"{arguments.peer}.json"
    if not arguments.check:
        path.write_text(json.dumps(computed, separators=(",", ":")) + "\n")
        sizes = [f"{len(group['cases'])} x {group['kind']}/{group['what']} {group['settings']}" for group in groups]
        print("\n".join([*sizes, f"{path}: {path.stat().st_size / 1e3:.0f} kB"]))
        return 0
    lines = differences(json.loads(path.read_text()), json.loads(json.dumps(computed)))
    print("\n".join(lines[:20]) or f"{path.name}: {len(groups)} groups, all as stored")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
