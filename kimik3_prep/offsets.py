"""What files have in common that are read by offset: part of a local file, part of an object at a URL."""

from __future__ import annotations

import io
from typing import Any


class OffsetFile(io.RawIOBase):
    """A file that is read by offset: whoever derives from it says how large it is and reads from a place."""

    def __init__(self) -> None:
        self._place = 0

    def size(self) -> int:
        """All bytes there are."""
        raise NotImplementedError

    def _read(self, place: int, count: int) -> bytes:
        raise NotImplementedError

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; nothing is read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place}.get(whence)
        self._place = max(0, offset + (self.size() if start is None else start))
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is something."""
        data = self._read(self._place, len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
