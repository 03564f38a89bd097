"""What a machine has left of memory and of disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mtgrpo.errors import RunError

_CGROUP = Path("/sys/fs/cgroup")


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
    return (free, limit) if free < left else (left, total)


def resident_bytes() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def check_disk(folder: Path, needed: int) -> None:
    """Raise RunError where the disk of `folder` has not `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunError(
            f"{folder} needs {needed / 2**30:.2f} GiB for a checkpoint and its disk has {free / 2**30:.2f} left; make "
            "room; nothing was written"
        )
