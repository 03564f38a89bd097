"""What a machine has left of memory, of disk and of its cores."""

import ctypes
import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtgrpo.errors import RunError

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_PROC = Path("/proc")
_SAMPLE_S = 0.3  # the least for which the use of the cores is looked at: 30 of the kernel's ticks
_LONGEST_S = 2.0  # where others use them: what ends soon, as a compiler does, costs no thread for a whole run
_SPARED = 0.25  # of a core that others may use before a thread is given up for them
THREADS_SET = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}  # a user who sets one of them chooses the number of threads
WAITING_SET = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}  # how they wait
# Threads wait for one another at every product of matrices. Where cores are free they spin meanwhile, for up to half a
# millisecond: asleep they made a step 1.6 times as long. Beside other processes spinning made it 3 times as long.
_SPIN = {"GOMP_SPINCOUNT": "10000"}
SLEEP = {"OMP_WAIT_POLICY": "passive"}
# What glibc is told of freed memory, by the names that a user sets; to set one alone stops it from adapting the other.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30)}


@dataclass(frozen=True)
class CpuTimes:
    """How long the cores have worked since the machine was started, in ticks of the kernel's clock."""

    at_s: float
    cores: Mapping[int, tuple[int, int]]  # idle and all ticks of those that this process may use; {}: not known
    own: int  # ticks in which this process worked, and those that it started


def memory_left() -> tuple[int, int]:
    """Bytes that processes may still take, and may have in all: of the machine, or of a container with less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if not (meminfo := Path("/proc/meminfo")).exists():  # a system that is not Linux does not say what is left
        return total, total
    lines = (line.split() for line in meminfo.read_text().splitlines())
    left = next(int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:")
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return left, total
    free = limit - used + int(stat["inactive_file"])  # the kernel gives up cached files first
    return min(free, left), min(limit, total)


def keep_freed_memory() -> None:
    """Have glibc keep up to a GiB of what this process frees, in blocks below 32 MiB, unless the user has set that.

    A training pass takes the same blocks again and again, which the system would have to clear each time.
    """
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries have none
    if mallopt is not None and not os.environ.keys() & _MALLOC.keys():
        for option in _MALLOC.values():
            mallopt(*option)


def resident_bytes() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def check_disk(folder: Path, needed: int, what: str = "a checkpoint") -> None:
    """Raise RunError where the disk of `folder` has not `needed` bytes left for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        sizes = f"{needed / 2**30:.2f} GiB for {what} and its disk has {free / 2**30:.2f} left"
        raise RunError(f"{folder} needs {sizes}; make room; nothing was written")


def cores() -> int:
    """Those that this process may use; two hardware threads of a core count as one."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = [_CPUS / f"cpu{number}" / "topology" / "thread_siblings_list" for number in usable]
    return len({path.read_text() if path.exists() else str(path) for path in files})


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use, as the driver counts them; without torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.nvmlInit_v2() == 0:
        driver.nvmlDeviceGetCount_v2(ctypes.byref(count))
        driver.nvmlShutdown()
    if named is None:
        return count.value
    known = itertools.takewhile(lambda name: name not in ("", "-1"), map(str.strip, named.split(",")))
    return min(count.value, len(list(known)))


def read_cpu_times() -> CpuTimes:
    """How long the cores have worked until now."""
    spent: dict[int, tuple[int, int]] = {}
    if (stat := _PROC / "stat").exists():  # Linux
        usable = os.sched_getaffinity(0)
        for line in stat.read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in usable:
                counts = list(map(int, ticks[:8]))  # what follows is contained in these
                spent[int(name[3:])] = counts[3] + counts[4], sum(counts)  # idle, and waiting for a disk
    return CpuTimes(time.monotonic(), spent, _ticks_of(_PROC / str(os.getpid())))


def _ticks_of(process: Path) -> int:
    """Ticks in which a process has worked, those that it started included."""
    with suppress(OSError):  # it has ended, or this is not Linux
        ticks = sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
        lists = [(thread / "children").read_text().split() for thread in (process / "task").iterdir()]
        return ticks + sum(_ticks_of(process.parent / child) for children in lists for child in children)
    return 0


def free_cores(since: CpuTimes, longest_s: float = _LONGEST_S) -> float:
    """Cores that no other process has used since then, of those that this one may use.

    .3 s are looked at, and where that is not all of them up to `longest_s`.
    """
    time.sleep(max(0.0, since.at_s + _SAMPLE_S - time.monotonic()))
    while True:
        now = read_cpu_times()
        free = free_between(since, now)
        if threads_for(free) == threads_for(_cpu_quota()) or now.at_s - since.at_s >= longest_s:
            return free
        time.sleep(0.1)


def free_between(before: CpuTimes, after: CpuTimes) -> float:
    """Cores that no other process used between two readings, of those that this one may use."""
    spent = [(i - before.cores[n][0], a - before.cores[n][1]) for n, (i, a) in after.cores.items() if n in before.cores]
    longest = max((ticks for _, ticks in spent), default=0)
    if longest <= 0:  # the system does not say
        return min(float(cores()), _cpu_quota())
    idle = sum(min(1.0, max(0.0, idle / ticks)) if ticks > 0 else 1.0 for idle, ticks in spent)
    own = max(0, after.own - before.own)  # what a process did whose parent has gone is lost
    return min(idle + own / longest, float(len(spent)), _cpu_quota())


def _cpu_quota() -> float:
    """Cores' worth of time that a container is given (cgroup v2, v1)."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # "max": without a limit
            quota, period = map(int, " ".join((_CGROUP / name).read_text() for name in names).split())
            if quota > 0:
                return quota / period
    return math.inf


def threads_each(processes: int) -> int:
    """With how many threads each of so many computes: as the user or the launcher says, else as cores are there."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() else max(1, cores() // processes)


def threads_for(free: float) -> int:
    """As many threads as `free` cores have room for."""
    return max(1, int(min(cores(), free + _SPARED)))


def openmp_settings(threads: int) -> dict[str, str]:
    """What a process is told that computes with so many threads, but for what the user has set."""
    chosen = {} if os.environ.keys() & THREADS_SET else {"OMP_NUM_THREADS": str(threads)}
    return chosen if os.environ.keys() & WAITING_SET else chosen | (_SPIN if threads > 1 else SLEEP)


@contextmanager
def fit_openmp(since: CpuTimes) -> Generator[None]:
    """Whatever imports torch within: OpenMP takes a thread for each core that has been free since then.

    With several free cores its threads spin as they wait for one another. It reads that from the environment as it is
    loaded; afterwards the environment is as it was, for the processes that are started then. What the user has set
    there stays.
    """
    added: dict[str, str] = {}
    if "torch" not in sys.modules and since.cores and os.environ.get("OMP_NUM_THREADS") != "1":  # which waits for none
        added = openmp_settings(threads_for(free_cores(since)))
    os.environ |= added
    try:
        yield
        if torch := sys.modules.get("torch"):
            torch.get_num_threads()  # Intel's OpenMP begins when it is first asked
    finally:
        for name in added:
            del os.environ[name]
