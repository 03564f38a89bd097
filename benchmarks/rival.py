"""Starts a side that is not ours: torch comes first, with its own threads, and `record` finds nothing left to choose.

python benchmarks/rival.py benchmarks/rollout.py --serve rivals 2m
"""

from __future__ import annotations

import runpy
import sys

import torch  # noqa: F401

sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
