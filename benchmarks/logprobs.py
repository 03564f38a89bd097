"""The chunked head against whole logits: time and memory of forward and backward. `python benchmarks/logprobs.py`

    full        F.linear, log_softmax, gather, the entropy's value; plain autograd
    chunked     mtgrpo.model.logprobs.sampled_logprobs
    whole N     the same, but a tile is N rows of the whole vocabulary
    checkpoint  `full` on 512 rows at a time under torch.utils.checkpoint

logprobs.time is chunked / full, the sides alternating in one process. logprobs.memory is the peak above the inputs and
their gradients, in a process of its own, over the size of the full logits and their gradient. Linux only.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import record  # before torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mtgrpo.model import logprobs

Shape = tuple[int, int, int]  # rows, vocabulary, hidden size
Forward = Callable[[Tensor, nn.Linear, Tensor], tuple[Tensor, Tensor]]
LARGE: Shape = (2_048, 151_936, 512)
SMALL: list[Shape] = [(500, 2_048, 96), (2_000, 2_048, 192), (2_000, 8_192, 512)]
MEMORY: list[Shape] = [(8_192, 151_936, 512), (32_768, 151_936, 512)]  # the first makes logprobs.memory
QUICK: Shape = (256, 4_096, 32)
WHOLE_ROWS = (64, 128, 256, 512)
FULL_FITS = 20 * 2**30  # bytes; where it would need more, `full` is not run


def full(hidden: Tensor, head: nn.Linear, token: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, at temperature 1; one token a row."""
    logp = F.linear(hidden, head.weight).log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, token[:, None])[:, 0], entropy


def ours(hidden: Tensor, head: nn.Linear, token: Tensor) -> tuple[Tensor, Tensor]:
    """The chunked head."""
    return logprobs.sampled_logprobs(hidden, head, torch.arange(len(hidden)), token, 1.0)


def checkpointed(hidden: Tensor, head: nn.Linear, token: Tensor) -> tuple[Tensor, Tensor]:
    """The definition on blocks of rows, computed again in the backward."""
    blocks = [
        checkpoint(full, h, head, t, use_reentrant=False)
        for h, t in zip(hidden.split(512), token.split(512), strict=True)
    ]
    return torch.cat([logp for logp, _ in blocks]), torch.cat([entropy for _, entropy in blocks])


@contextmanager
def whole_rows(rows: int) -> Iterator[None]:
    """Tiles of `rows` rows of the whole vocabulary, one of them kept; 0 = the tiles as they are."""
    before = logprobs.ROWS, logprobs.TILE_BYTES, logprobs.KEPT_BYTES
    if rows:
        logprobs.ROWS, logprobs.TILE_BYTES, logprobs.KEPT_BYTES = rows, dict.fromkeys(before[1], 2**40), 0
    yield
    logprobs.ROWS, logprobs.TILE_BYTES, logprobs.KEPT_BYTES = before


# name -> forward, rows of whole_rows
SIDES: dict[str, tuple[Forward, int]] = {
    "full": (full, 0),
    "chunked": (ours, 0),
    **{f"whole {rows}": (ours, rows) for rows in WHOLE_ROWS},
    "checkpoint": (checkpointed, 0),
}


def full_bytes(shape: Shape) -> int:
    """The full fp32 logits and their gradient."""
    return 2 * shape[0] * shape[1] * 4


def inputs(shape: Shape) -> tuple[Tensor, nn.Linear, Tensor]:
    """Hidden states, a head whose distributions are neither flat nor sharp, sampled tokens. No temporary is large."""
    rows, vocabulary, size = shape
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(size, vocabulary, bias=False)
    nn.init.normal_(head.weight, std=3 / size**0.5, generator=generator)
    hidden = torch.randn(rows, size, generator=generator).requires_grad_()
    return hidden, head, torch.randint(vocabulary, (rows,), generator=generator)


def run(side: str, hidden: Tensor, head: nn.Linear, token: Tensor) -> tuple[float, float]:
    """Seconds of the forward and of all."""
    hidden.grad = head.weight.grad = None
    forward, rows = SIDES[side]
    with whole_rows(rows):
        began = time.perf_counter()
        logp, _entropy = forward(hidden, head, token)
        half = time.perf_counter()
        logp.mean().backward()
        return half - began, time.perf_counter() - began


def times(shape: Shape, sides: list[str], rounds: int) -> dict[str, Any]:
    """All sides, alternating, after one round that does not count."""
    values = inputs(shape)
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides:
            seconds = run(side, *values)
            if number:
                found[side].append(seconds)
    table: dict[str, Any] = {}
    print(f"\n{shape[0]} rows, vocabulary {shape[1]}, hidden {shape[2]}   ms: median, best, forward; ratio to full")
    for side, seconds in found.items():
        total = [t for _, t in seconds]
        ratio = statistics.median(t / f for t, (_, f) in zip(total, found["full"], strict=True))
        table[side] = {
            "median_ms": 1e3 * statistics.median(total),
            "best_ms": 1e3 * min(total),
            "forward_ms": 1e3 * statistics.median(t for t, _ in seconds),
            "ratio": ratio,
            "ratio_of_best": min(total) / min(t for _, t in found["full"]),
        }
        row = table[side]
        print(
            f"  {side:11}{row['median_ms']:10.1f}{row['best_ms']:10.1f}{row['forward_ms']:10.1f}{ratio:8.3f}",
            flush=True,
        )
    return table


def measure_peak(side: str, shape: Shape) -> int:
    """Bytes that one forward and backward take above the inputs and their gradients; for a process of its own."""
    run(side, *inputs((64, 256, shape[2])))  # libraries, threads and their buffers
    hidden, head, token = inputs(shape)
    before = record.resident("VmRSS")
    run(side, hidden, head, token)
    return record.resident("VmHWM") - before - hidden.nbytes - head.weight.nbytes


def peak(side: str, shape: Shape) -> dict[str, Any] | None:
    """`measure_peak` in a process of its own; None where it cannot fit."""
    if side == "full" and 2.5 * full_bytes(shape) > FULL_FITS:
        return None
    words = [sys.executable, __file__, "--peak", side, *map(str, shape)]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = {"bytes": int(output), "ratio": int(output) / full_bytes(shape)}
    print(f"  {shape[0]:6} rows  {side:11}{found['bytes'] / 2**20:10.1f} MiB{found['ratio']:9.4f}", flush=True)
    return found


def main() -> None:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny version; writes no file")
    parser.add_argument("--peak", nargs=4, metavar=("SIDE", "ROWS", "VOCABULARY", "HIDDEN"), help="for one process")
    given = parser.parse_args()
    if given.peak:
        rows, vocabulary, size = map(int, given.peak[1:])
        print(measure_peak(given.peak[0], (rows, vocabulary, size)))
        return
    large, small, memory = (QUICK, [QUICK], [QUICK]) if given.quick else (LARGE, SMALL, MEMORY)
    timed = {"x".join(map(str, large)): times(large, list(SIDES), given.rounds)}
    for shape in small:
        timed["x".join(map(str, shape))] = times(shape, ["full", "chunked"], 4 * given.rounds)
    print("\npeak above inputs and gradients, over full logits and their gradient")
    peaks: dict[str, Any] = {}
    for shape in dict.fromkeys((large, *memory)):
        sides = list(SIDES) if shape == memory[0] else ["full", "chunked"]
        peaks["x".join(map(str, shape))] = {side: peak(side, shape) for side in sides}
    ratios = {
        "logprobs.memory": peaks["x".join(map(str, memory[0]))]["chunked"]["ratio"],
        "logprobs.time": timed["x".join(map(str, large))]["chunked"]["ratio"],
    }
    detail = {"threads": torch.get_num_threads(), "times": timed, "peaks": peaks}
    record.finish("logprobs", ratios, detail, None if given.quick else "logprobs.json")


if __name__ == "__main__":
    main()
