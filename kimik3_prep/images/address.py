"""Images inside of larger files: how a manifest names one, and how it is read without what lies around it.

    set.tar!tar:1536+20480!dir/cat.jpg     20,480 bytes from byte 1,536 on; the name is for people
    set.parquet!parquet:17!image.bytes     that column of row 17, counted from 0

The file in front of the first `!` is a path or a URL like that of any image. A URL may be a chain of fsspec's, whose
last link is a path or a URL as well:

    zip://dir/cat.jpg::pictures.zip        the member dir/cat.jpg of that archive
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from kimik3_prep.remote import beneath, links, scheme

_LONGEST_SCHEME = 40
_LONGEST_PATH = 4096

_MEMBER = re.compile(r"(.+?)!(?:tar:(\d{1,18})\+(\d{1,18})!.*|parquet:(\d{1,18})!(.+))", re.DOTALL)


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


def split(source: str) -> tuple[str, TarMember | TableCell | None]:
    """The file of a resolved source, and what is meant in that file; None for all of it."""
    match = _member(source)
    if match is None or (os.path.isabs(source) and _is_file_name(source, "")):
        return source, None
    file, begin, size, row, column = match.groups()
    return file, TarMember(int(begin), int(size)) if row is None else TableCell(int(row), column)


def _member(image: str) -> re.Match[str] | None:
    return _MEMBER.fullmatch(image) if "!" in image and not is_data_url(image) else None


def name_in_tar(tar: str, begin: int, size: int, name: str) -> str:
    """The image string of a member."""
    return f"{tar}!tar:{begin}+{size}!{name}"


def name_in_table(table: str, row: int, column: str) -> str:
    """The image string of a cell."""
    return f"{table}!parquet:{row}!{column}"


def resolve(image: str, base: str) -> str:
    """The manifest's image string as something that can be opened, wherever the process runs: absolute in every part.

    `base` is the folder, or the URL of one, that relative paths start from. A file that exists by that very name comes
    before an address that looks like it.
    """
    if _is_address(image) and _is_file_name(image, base):
        return os.path.normpath(os.path.join(base, image))
    if is_data_url(image):
        return image
    match = _member(image)
    file = image if match is None else match[1]
    return _resolve(file, base) + image[len(file) :]


def _is_address(image: str) -> bool:
    return "!" in image or ":" in image[:_LONGEST_SCHEME]


def _is_file_name(image: str, base: str) -> bool:
    """Whether an image string is the name of a file here, however much it looks like an address."""
    return len(image) <= _LONGEST_PATH and not scheme(base) and os.path.lexists(os.path.join(base, image))


def _resolve(file: str, base: str) -> str:
    if file[:7].lower() == "file://":  # all behind the host is the path: file names hold "?" and "#"
        return os.path.normpath(f"/{unquote(file[7:].partition('/')[2])}")
    first, rest = links(file)
    if rest:
        inner, colons, outer = rest.rpartition("::")
        return f"{first}{inner}{colons}{_resolve_outer(outer, base)}"
    if scheme(file):
        return file
    if scheme(base) and not os.path.isabs(file):
        return beneath(base, file)
    return os.path.normpath(os.path.join(base, file))


def _resolve_outer(outer: str, base: str) -> str:
    """The last link of a chain: the archive, as a URL. fsspec would take a relative path to start where it runs."""
    path = outer[len("file://") :] if outer[:7].lower() == "file://" else outer
    resolved = _resolve(path, base)
    return resolved if scheme(resolved) else f"file://{resolved}"
