"""Memory that decoded images may take together, so that many large ones at a time do not end the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


class Room:
    """`size` bytes for images in work. Who finds no room waits; what needs more than all of it goes alone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def held(self, need: int) -> Iterator[None]:
        """Take `need` bytes while the block runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + need <= self._size)
            self._taken += need
        try:
            yield
        finally:
            with self._changed:
                self._taken -= need
                self._changed.notify_all()


def available_memory() -> int:
    """Bytes that this process may still take, as the system and its control group (v2) tell; 4 GiB where none does."""
    found = [free for free in (_of_machine(), _of_group()) if free is not None]
    return min(found, default=4 << 30)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _of_group() -> int | None:
    try:
        most, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no control group of this kind
        return None
    return None if most == "max" else max(0, int(most) - int(used))
