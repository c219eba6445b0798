"""Images inside of larger files: how a manifest names one, and how it is read without what lies around it.

    set.tar!tar:1536+20480!dir/cat.jpg     20,480 bytes from byte 1,536 on; the name is for people
    set.parquet!parquet:17!image.bytes     that column of row 17, counted from 0

The file in front of the first `!` is a path or a URL like that of any image.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from kimik3_prep.offsets import OffsetFile
from kimik3_prep.remote import beneath, scheme

_MEMBER = re.compile(r"(.+?)(!tar:(\d{1,18})\+(\d{1,18})!.*|!parquet:(\d{1,18})!(.+))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TarMember:
    """Bytes of a tar: `size` of them from `begin` on."""

    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of a Parquet file: row from 0, and a column, `image`, or a field of one, `image.bytes`."""

    row: int
    column: str


def is_data_url(image: str) -> bool:
    """Whether the image's bytes stand in the string itself."""
    return image[:5].lower() == "data:"


def split(image: str) -> tuple[str, str]:
    """The file of an image string, and the rest, which begins with `!`; the rest is empty for an image of its own."""
    if "!" not in image or image.startswith("data:") or not (match := _MEMBER.fullmatch(image)):
        return image, ""
    return match[1], match[2]


def member(source: str) -> TarMember | TableCell | None:
    """What of its file an image string means; None for all of it."""
    if not split(source)[1] or not (match := _MEMBER.fullmatch(source)):
        return None
    return TarMember(int(match[3]), int(match[4])) if match[3] else TableCell(int(match[5]), match[6])


def name_in_tar(tar: str, begin: int, size: int, name: str) -> str:
    """The image string of a member."""
    return f"{tar}!tar:{begin}+{size}!{name}"


def name_in_table(table: str, row: int, column: str) -> str:
    """The image string of a cell."""
    return f"{table}!parquet:{row}!{column}"


def resolve(image: str, base: str) -> str:
    """The manifest's image string as something that can be opened: `data:` and scheme URLs stay, paths become absolute.

    `base` is the folder, or the URL of one, that relative paths start from.
    """
    if image.startswith("data:"):
        return image
    image, inside = split(image)
    return _resolve(image, base) + inside


def _resolve(image: str, base: str) -> str:
    if image[:7].lower() == "file://":  # all behind the host is the path: file names hold "?" and "#"
        return os.path.normpath(f"/{unquote(image[7:].partition('/')[2])}")
    if scheme(image):
        return image
    if scheme(base) and not os.path.isabs(image):
        return beneath(base, image)
    return os.path.normpath(os.path.join(base, image))


class Part(OffsetFile):
    """Part of an open local file, as a file. Reads by offset, so several may share a descriptor."""

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        super().__init__()
        self._descriptor, self._begin, self._size = descriptor, begin, size

    def size(self) -> int:
        """Bytes of the part."""
        return self._size

    def _read(self, place: int, count: int) -> bytes:
        return os.pread(self._descriptor, max(0, min(count, self._size - place)), self._begin + place)

    def readall(self) -> bytes:
        """What is left."""
        parts = []
        while data := self.read(max(1, min(self._size - self._place, 1 << 30))):
            parts.append(data)
        return b"".join(parts)
