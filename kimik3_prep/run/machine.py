"""What this machine lets the process use: processors and memory, as the system and its control groups say."""

from __future__ import annotations

import math
import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")
_UNKNOWN_MEMORY = 4 << 30


def processors() -> int:
    """Return how many processors the process may use: its affinity, or less where a control group (v2) limits it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_own_group("cpu.max") / "cpu.max").read_text().split()
        limit = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no control group of this kind, or "max": no limit
        return allowed
    return max(1, min(allowed, limit))


def available_memory() -> int:
    """Return the bytes that the process may still take; 4 GiB where neither the system nor a control group says."""
    known = [free for free in (_free_in_machine(), _free_in_group()) if free is not None]
    return min(known, default=_UNKNOWN_MEMORY)


def _own_group(file: str) -> Path:
    """The folder of the process's control group (v2), or the root's where that one lacks `file`."""
    lines = _OWN_GROUP.read_text().splitlines()
    name = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    own = _GROUPS / name
    return own if (own / file).is_file() else _GROUPS


def _free_in_machine() -> int | None:
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:  # no Linux
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _free_in_group() -> int | None:
    """The limit of the control group less what it uses; cached files do not count, because the kernel drops them."""
    try:
        folder = _own_group("memory.max")
        limit, used, stat = ((folder / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:  # no control group of this kind
        return None
    cached = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
    return None if limit.strip() == "max" else max(0, int(limit) - int(used) + cached)
