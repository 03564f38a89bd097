"""What a forward pass does between its matrix products, by kernels compiled for this CPU; float32 alone.

`decode_kernels.cpp` is compiled at first use, in two seconds, and kept in ~/.cache/mtgrpo/kernels under the hash of all
that the result depends on. It takes the place of `paged_attention.py`, of norms, rotations and activations; without a
compiler these stay as they are.
"""

import hashlib
import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from ctypes import CDLL, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtgrpo.engines.local.kv_cache import BlockTable, KVCache, SharedPrefix
from mtgrpo.engines.local.paged_attention import FlatRows, KernelPlan, Row, follow_on
from mtgrpo.model.cpu_kernels import CPU_INFO
from mtgrpo.runtime.files import put_whole

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=gnu++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared")
CACHE = "~/.cache/mtgrpo/kernels"
LIMIT_S = 120.0  # for the compiler
LANES = 8  # sizes of heads are multiples of it
BUNDLE = 32  # tokens of one prefix that one thread computes together
FIRST, END, POOL, BLOCKS, LENGTH, PREFIX_BLOCKS, PREFIX_LENGTH = range(7)  # as in `Row` of the source


class NoKernelsError(Exception):
    """Why there are none."""


@cache
def load_kernels(head_size: int, processor: str = "native") -> CDLL:
    """The library for heads of this size, for `processor` as GCC names it; raises NoKernelsError without one."""
    if head_size % LANES:
        raise NoKernelsError(f"heads of {head_size} numbers are no multiple of {LANES}")
    command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS, f"-march={processor}", f"-DHEAD_SIZE={head_size}"]
    command += [str(SOURCE), "-Wl,--as-needed", *_openmp()]
    try:
        version = subprocess.run([command[0], "--version"], capture_output=True, check=True, timeout=LIMIT_S).stdout
        facts = CPU_INFO.read_text().split("\n\n")[0].splitlines() if CPU_INFO.exists() else []
        features = "".join(fact for fact in facts if fact.startswith(("flags", "Features", "model name")))
        key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), *map(str.encode, (*command, features)), version]))
        library = Path(CACHE).expanduser() / f"{key.hexdigest()[:32]}.so"
        if not library.exists():
            with put_whole(library, durable=False) as partial:
                subprocess.run([*command, "-o", str(partial)], capture_output=True, check=True, timeout=LIMIT_S)
        return _declare(CDLL(str(library)))
    except FileNotFoundError as error:
        raise NoKernelsError(f"no C++ compiler {command[0]!r}") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise NoKernelsError(f"{command[0]} failed: {said[0]}") from error
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # the second without a home folder
        raise NoKernelsError(f"they could not be made: {error}") from error


def _openmp() -> list[str]:
    """The OpenMP library that torch has loaded: another would bring threads of its own."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line} if maps.exists() else set[str]()
    return [path for path in sorted(paths) if Path(path).name.startswith(("libgomp", "libiomp"))][:1]


def _declare(library: CDLL) -> CDLL:
    pointer, whole, real = c_void_p, c_int64, c_float
    caches = [pointer, pointer, whole] * 2
    types = {
        "attend": [pointer] * 3 + [whole] * 3 + [pointer] * 3 + [real] * 2 + caches + [whole] * 3 + [pointer] * 4
        + [whole, pointer],
        "add_norm": [pointer] * 3 + [real, pointer, whole, whole],
        "silu_multiply": [pointer, pointer, whole, whole],
        "sample": [pointer, whole, whole] + [pointer] * 4,
    }  # fmt: skip
    for name, arguments in types.items():
        function = getattr(library, f"mtgrpo_{name}")
        function.argtypes, function.restype = arguments, None
    return library


def sample_whole(
    library: CDLL, logits: Tensor, temperatures: Sequence[float], uniform: NDArray[np.float64]
) -> tuple[list[int], list[float]]:
    """`sample` without cuts: tokens and log-probabilities; logits [rows, vocabulary] are overwritten."""
    logits, (rows, vocabulary) = logits.contiguous(), logits.shape
    heat, tokens, logprobs = np.array(temperatures, np.float32), np.empty(rows, np.int64), np.empty(rows, np.float32)
    pointers = [array.ctypes.data for array in (heat, uniform, tokens, logprobs)]
    library.mtgrpo_sample(logits.data_ptr(), rows, vocabulary, *pointers)
    return tokens.tolist(), logprobs.tolist()


@dataclass(frozen=True)
class CompiledPlan(KernelPlan):
    """One forward pass; see `BatchPlan`."""

    library: CDLL
    kv_cache: KVCache
    ids: Tensor
    positions: Tensor
    last: Tensor
    real: int
    rows: NDArray[np.int32]  # [rows, 7]: see `Row` in the source
    row_of: NDArray[np.int32]  # [real]
    blocks: NDArray[np.int32]
    bundles: NDArray[np.int32]
    block_tables: list[BlockTable]  # of all rows, if each has one token: then the plan can be advanced
    lengths: list[int]  # of their tokens

    def attend(
        self, layer: int, parts: Sequence[Tensor], scale: float, rotation: Sequence[Tensor] = (),
        norm: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """See `KernelPlan.attend`."""
        own, prefixes, heads = self.kv_cache.own, self.kv_cache.prefixes, parts[0].shape[1]
        norm = None if norm is None else norm.float()
        output = parts[0].new_zeros(len(self.ids), heads, own.size)
        buffers = [buffer for pool in (own, prefixes) for buffer in (pool.keys[layer], pool.values[layer])]
        own_keys, own_values, prefix_keys, prefix_values = (buffer.data_ptr() for buffer in buffers)
        cosine, sine = (table.data_ptr() for table in rotation) if rotation else (None, None)
        self.library.mtgrpo_attend(
            *(part.data_ptr() for part in parts), *(part.stride(0) for part in parts),
            cosine, sine, None if norm is None else norm.data_ptr(), eps, scale,
            own_keys, own_values, own.length, prefix_keys, prefix_values, prefixes.length,
            heads, own.heads, self.real, self.rows.ctypes.data, self.row_of.ctypes.data, self.blocks.ctypes.data,
            self.bundles.ctypes.data, len(self.bundles) - 1, output.data_ptr(),
        )  # fmt: skip
        return output

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """See `KernelPlan.add_norm`; in float32 alone."""
        output, weight = torch.empty_like(x), weight.float()
        added = None if more is None else more.data_ptr()
        self.library.mtgrpo_add_norm(x.data_ptr(), added, weight.data_ptr(), eps, output.data_ptr(), *x.shape)
        return output

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """See `KernelPlan.silu_multiply`."""
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(tokens, width)
        self.library.mtgrpo_silu_multiply(gate_up.data_ptr(), output.data_ptr(), tokens, width)
        return output


class CompiledPlanner:
    """Makes plans; where only one more token follows in every row, from the last one."""

    def __init__(self, library: CDLL, kv_cache: KVCache) -> None:
        self.library, self._kv_cache = library, kv_cache
        self._last: CompiledPlan | None = None

    def plan(self, rows: Sequence[Row]) -> CompiledPlan:
        """Lay out one forward pass; from here on the new tokens count as cached."""
        last = self._last
        if last and follow_on(rows, last.block_tables, last.lengths):
            for row in rows:
                row.block_table.tokens.extend(row.tokens)
            last.ids[last.last] = torch.tensor([row.tokens[0] for row in rows])
            last.positions[: last.real] += 1
            last.rows[:, LENGTH] += 1
            last.lengths[:] = [length + 1 for length in last.lengths]
            return last
        groups: dict[tuple[SharedPrefix | None, BlockTable | None], list[Row]] = {}
        for row in rows:
            prefix = row.block_table.prefix
            groups.setdefault((prefix, None if prefix else row.block_table), []).append(row)
        flat = FlatRows(list(chain.from_iterable(groups.values())))
        table, blocks = np.zeros((len(rows), 7), np.int32), flat.blocks.tolist()
        table[:, FIRST], table[:, END] = flat.ends + 1 - flat.counts, flat.ends + 1
        table[:, POOL] = [isinstance(row.block_table, SharedPrefix) for row in flat.rows]
        table[:, BLOCKS], table[:, LENGTH] = flat.block_starts, flat.lengths
        place = 0
        for (prefix, _), users in groups.items():
            if prefix:
                table[place : place + len(users), PREFIX_BLOCKS:] = len(blocks), len(prefix.tokens)
                blocks += prefix.blocks
            place += len(users)
        pad, advances = (0, flat.padding), len(rows) == flat.real and not table[:, POOL].any()
        self._last = CompiledPlan(
            self.library,
            self._kv_cache,
            ids=torch.from_numpy(np.pad(flat.ids, pad)),
            positions=torch.from_numpy(np.pad(flat.positions, pad)),
            last=torch.from_numpy(flat.last_of(rows)),
            real=flat.real,
            rows=table,
            row_of=flat.row.astype(np.int32),
            blocks=np.array(blocks, np.int32),
            bundles=np.array(_bundle(groups.values()), np.int32),
            block_tables=[row.block_table for row in rows] if advances else [],
            lengths=[len(row.block_table.tokens) for row in rows] if advances else [],
        )
        return self._last


def _bundle(groups: Iterable[Sequence[Row]]) -> list[int]:
    """Where bundles begin, and where the last ends, in the flat order of `groups` of rows with one prefix each."""
    bounds, end = [0], 0
    for row, is_last in ((row, row is group[-1]) for group in groups for row in group):
        if end - bounds[-1] + len(row.tokens) > BUNDLE and end > bounds[-1]:
            bounds.append(end)
        end += len(row.tokens)
        bounds += range(bounds[-1] + BUNDLE, end, BUNDLE)
        if is_last:
            bounds.append(end)
    return bounds
