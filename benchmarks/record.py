"""What every benchmark ends with: one JSON line, also written to benchmarks/results.

One that measures our code in its own process imports this before torch, which then computes with the threads and the
waiting that the command `mtgrpo` chooses, and takes its models from `load`. Sides of others begin with rival.py.
"""

from __future__ import annotations

import gc
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import age

import mtgrpo
from mtgrpo.runtime.resources import THREADS_SET, WAITING_SET, fit_openmp, keep_freed_memory, read_cpu_times

with fit_openmp(read_cpu_times()):
    OPENMP = {name: os.environ[name] for name in sorted(os.environ.keys() & (THREADS_SET | WAITING_SET))}
    import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RESULTS = Path(__file__).parent / "results"
CPUINFO = Path("/proc/cpuinfo")  # Linux only
STATUS = Path("/proc/self/status")


def load(name: str) -> PreTrainedModel:
    """A model as `mtgrpo train` has it, in a process that keeps memory and looks for garbage as that does."""
    from mtgrpo.model.load import ModelSettings, load_model  # noqa: PLC0415  (seconds, and not for sides of others)

    if not torch.cuda.is_available():
        keep_freed_memory()
    model = load_model(ModelSettings(name), 0)
    gc.collect()
    gc.freeze()
    return model


def machine() -> str:
    """Processor, cores and GPU in one line."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores{gpu}"


def resident(field: str) -> int:
    """Bytes of this process: VmRSS (now) or VmHWM (the most so far). getrusage's peak may be the parent process's."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def versions() -> dict[str, str]:
    """What was measured with."""
    own = {
        "python": platform.python_version(),
        "mtgrpo": mtgrpo.__version__,
    }  # which may be used without an installation
    return own | {name: version(name) for name in ("torch", "transformers")}


def absent(benchmark: str, ratios: list[str]) -> None:
    """What a benchmark of a GPU writes where there is none: null, unless one has been measured before."""
    file = f"{benchmark}.json"
    known = (RESULTS / file).exists()
    finish(benchmark, dict.fromkeys(ratios), {"reason": "no GPU was to be had"}, None if known else file)


def finish(
    benchmark: str, ratios: dict[str, float | None], detail: dict[str, Any], file: str | None, threads: int = 0
) -> None:
    """Print the JSON line; write it to benchmarks/results/`file` unless that is None.

    threads: of our side, where that is another process; 0 = those of this one.
    """
    line = {
        "benchmark": benchmark,
        "ratios": ratios,
        "detail": detail,
        "machine": machine(),
        "threads": threads or torch.get_num_threads(),
        "openmp": OPENMP,
        "versions": versions(),
        "commit": age.head(),
    }
    text = json.dumps(line)
    if file is not None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / file).write_text(text + "\n")
    print(text)
