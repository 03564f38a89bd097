"""Ways to compute forest attention on CPU: forward and backward of one layer. `python benchmarks/attention.py`

runs    ours: two dense flash calls for each run of nodes without a branch, merged by log-sum-exp
leaves  one causal flash call for each leaf, on its whole path; shared tokens are computed again
mask    one call with the mask [nodes, nodes] written out
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import record  # before torch
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mtgrpo.batch.forest import Forest, build_forest
from mtgrpo.model.attention import Visibility, forest_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS = {"6 x 32": (6, 32), "8 x 64": (8, 64)}


def forests() -> dict[str, Forest]:
    """Eight siblings after a short and a long prompt, three conversations of ten turns, and siblings that part late."""
    rng = random.Random(0)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(10_000) for _ in range(rng.randint(least, most))]

    short, long, middle = tokens(256, 256), tokens(1024, 1024), tokens(45, 45)
    parting: list[list[int]] = []
    for _ in range(8):
        rows = [[*middle, *tokens(1, 1)]]
        for _ in range(7):
            known = rng.choice(rows)
            rows.append(known[: rng.randint(45, len(known))] + tokens(20, 80))
        parting += rows
    rows = {
        "prompt 256, 8 x 30-250": [short + tokens(30, 250) for _ in range(8)],
        "prompt 1,024, 8 x 80-120": [long + tokens(80, 120) for _ in range(8)],
        "prompt 500, 2 x 2,325": [short + short[:244] + tokens(2325, 2325) for _ in range(2)],
        "64 siblings that part anywhere": parting,
    }
    return {name: build_forest(value)[0] for name, value in rows.items()}


def ways(forest: Forest) -> dict[str, Attend]:
    """Each maps query, key, value [1, heads, nodes, size] to the output, same shape."""
    visibility = Visibility(forest.depth, forest.subtree_end)
    nodes = torch.arange(len(forest))
    mask = (nodes <= nodes[:, None]) & (nodes[:, None] < forest.subtree_end)
    paths = list(forest.leaf_paths())

    def runs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return forest_attention(nn.Identity(), query, key, value, None, forest=visibility)[0].transpose(1, 2)

    def leaves(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.zeros_like(query)
        for path in paths:
            states = (tensor[:, :, path] for tensor in (query, key, value))
            output = output.index_copy(2, path, scaled_dot_product_attention(*states, is_causal=True))
        return output

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    return {"runs": runs, "leaves": leaves, "mask": masked}


def measure(forest: Forest, heads: int, size: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of each way, alternating; all agree."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, len(forest), heads, size, generator=generator).transpose(1, 2) for _ in range(4)]
    inputs, grad = [state.requires_grad_() for state in states[:3]], states[3]
    chosen = ways(forest)
    found: dict[str, list[float]] = {name: [] for name in chosen}
    expected: tuple[Tensor, ...] = ()
    for repeat in range(repeats + 1):
        for name, attend in chosen.items():
            began = time.perf_counter()
            gradients = torch.autograd.grad(attend(*inputs), inputs, grad)
            if repeat:
                found[name].append(1000 * (time.perf_counter() - began))
            expected = expected or gradients
            assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(gradients, expected, strict=True))
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one repeat; writes no file")
    given = parser.parse_args()
    detail: dict[str, dict[str, dict[str, float]]] = {}
    for label, forest in forests().items():
        for name, (heads, size) in HEADS.items():
            found = measure(forest, heads, size, 1 if given.quick else given.repeats)
            detail.setdefault(label, {})[name] = found
            print(f"{label:32}{len(forest):6} nodes  {name}  {found}", flush=True)
    best = {
        f"attention.{other}": min(row[other] / row["runs"] for by in detail.values() for row in by.values())
        for other in ("leaves", "mask")
    }
    record.finish("attention", dict(best), {"ms": detail}, None if given.quick else "attention.json")


if __name__ == "__main__":
    main()
