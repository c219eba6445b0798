"""Small files from slow places, kept after their headers were read, so that nobody fetches them a second time.

The driver makes one unlinked file and gives each worker a region of it. The file is sparse: regions take up what is
written. What finds no room is fetched again; nothing depends on the spool.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kimik3_prep.images.source import Encoded, Stamp

#: Bytes of the largest file that is kept.
MOST = 4 << 20

#: Bytes that all regions of a spool may take together.
ROOM = 2 << 30


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a file lies in the spool."""

    begin: int
    size: int
    stamp: Stamp | None
    """Of the source, when it was read."""


class Region:
    """The part of a spool that one worker writes into; it reads from all of them."""

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        self._descriptor = descriptor
        self._next = begin
        self._end = begin + size

    def keep(self, encoded: Encoded) -> Kept | None:
        """Write a file's bytes; return where they lie, or None where there is no room for them."""
        content = memoryview(encoded.content)
        if len(content) > self._end - self._next:
            return None
        kept = Kept(self._next, len(content), encoded.stamp)
        try:
            while content:
                written = os.pwrite(self._descriptor, content, self._next)
                content, self._next = content[written:], self._next + written
        except OSError:  # the disk of temporary files is full: the source is still there
            self._end = self._next
            return None
        return kept

    def read(self, kept: Kept) -> Encoded:
        """Return the bytes that a worker of this run has kept."""
        return Encoded(os.pread(self._descriptor, kept.size, kept.begin), kept.stamp)


#: The region of this process, once `worker.main` has set it; elsewhere None, and nothing is kept.
mine: Region | None = None
