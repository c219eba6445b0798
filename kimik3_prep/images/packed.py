"""Compressed files: read from the front on, and from the front again where a reader looks back."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

#: Compressions by the bytes that they begin with.
PACKINGS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_SUFFIXES = (".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".tzst")
_PIECE = 1 << 20
_KEPT = 2  # readers that stay open: images come in the order of their archive, so each goes on where it was


def packing_of(start: bytes) -> str | None:
    """How a file that begins with these bytes is compressed; None for one that is not."""
    return next((name for magic, name in PACKINGS.items() if start.startswith(magic)), None)


def looks_packed(url: str) -> bool:
    """Whether the name of an object says that it is compressed: a request to see its bytes would cost too much."""
    return url.partition("?")[0].lower().endswith(_SUFFIXES)


class _Borrowed(io.RawIOBase):
    """A file that stays open when its reader is done: Arrow's streams close what they read from."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is something."""
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


class Unpacked(io.RawIOBase):
    """What a compressed file holds, as a file. Moving forward reads what lies between; moving back begins anew."""

    def __init__(self, file: BinaryIO, packing: str) -> None:
        self._file, self._packing = file, packing
        self._place = 0
        self._stream: Any = None
        self._begin()

    def _begin(self) -> None:
        if self._place:
            self._file.seek(0)
        if self._packing == "zstd":
            import pyarrow as pa

            self._stream = pa.CompressedInputStream(pa.PythonFile(_Borrowed(self._file), "r"), "zstd")
        else:
            kinds: dict[str, Callable[[BinaryIO], Any]] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
            self._stream = kinds[self._packing](self._file)
        self._place = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always, for a file that is."""
        return self._file.seekable()

    def tell(self) -> int:
        """Where the next read begins."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there is something."""
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place. The end is known once it was read."""
        if whence == io.SEEK_END:
            while self.read(_PIECE):
                pass
        target = max(0, offset + (0 if whence == io.SEEK_SET else self._place))
        if target < self._place:
            self._begin()
        while self._place < target and self.read(min(_PIECE, target - self._place)):
            pass
        return self._place


_readers: OrderedDict[Any, tuple[threading.Lock, Unpacked]] = OrderedDict()
_lock = threading.Lock()


def read_part(open_file: Callable[[], BinaryIO], version: Any, begin: int, size: int) -> bytes:
    """Bytes of what a compressed file holds. `version` tells the file from any other, and its reader is kept.

    Raises OSError and what the compressions raise.
    """
    key = (os.getpid(), version)
    with _lock:
        reader = _readers.get(key)
        if reader is None:
            file = open_file()
            packing = packing_of(file.read(8))
            if packing is None:
                raise OSError("the archive is not compressed any more")
            file.seek(0)
            reader = _readers[key] = (threading.Lock(), Unpacked(file, packing))
            while len(_readers) > _KEPT:
                _readers.popitem(last=False)
        _readers.move_to_end(key)
    lock, unpacked = reader
    with lock:
        unpacked.seek(begin)
        return _all(unpacked, size)


def _all(file: io.RawIOBase, size: int) -> bytes:
    parts = []
    while size > 0 and (part := file.read(min(size, _PIECE))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
