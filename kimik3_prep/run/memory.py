"""Memory that decoded images may take together, so that many large ones at a time do not end the process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kimik3_prep.run.threads import Stopped

_CGROUP, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Room:
    """`size` bytes for images in work. Who finds no room waits; what needs more than all of it goes alone."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def held(self, need: int, stop: threading.Event) -> Iterator[Callable[[], None]]:
        """Take `need` bytes while the block runs, or until somebody calls what it is given.

        Raises Stopped when `stop` is set while it waits.
        """
        with self._changed:
            while self._taken and self._taken + need > self.size:
                self._changed.wait(0.2)
                if stop.is_set():
                    raise Stopped
            self._taken += need
        given_back = threading.Event()

        def give_back() -> None:
            with self._changed:
                if not given_back.is_set():
                    given_back.set()
                    self._taken -= need
                    self._changed.notify_all()

        try:
            yield give_back
        finally:
            give_back()


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
    """Of the control group of this process: what it may have, less what it has but for files that can be dropped."""
    try:
        lines = _OWN.read_text().splitlines()
        own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
        folder = _CGROUP / own if (_CGROUP / own / "memory.max").is_file() else _CGROUP
        most, used, stat = ((folder / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
    except OSError:  # no control group of this kind
        return None
    files = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
    return None if most.strip() == "max" else max(0, int(most) - int(used) + files)
