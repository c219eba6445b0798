"""What bytes are, by their first ones: an image, a table, an archive, or something that is named for what it is."""

from __future__ import annotations

import base64
import binascii
import re
import tarfile
from collections.abc import Iterable
from typing import NamedTuple

from PIL import Image

from kimik3_prep.images.decode import FORMATS
from kimik3_prep.images.packed import PACKINGS

#: What file names of images end in: the suffixes Pillow gives the formats that are decoded.
SUFFIXES = frozenset(suffix for suffix, name in Image.EXTENSION.items() if name in (*FORMATS, "MPO", "DIB"))

#: Those of formats that packages of their own read, by the names in `EXTRAS`.
_EXTRA_SUFFIXES = {"heif": (".heic", ".heif", ".hif"), "jxl": (".jxl",)}

#: Bytes that tell the kind of a file: a tar has its mark in the first block.
START = 512

_BASE64 = re.compile(r"[A-Za-z0-9+/]{40,}")


class Kind(NamedTuple):
    """A kind of file. `way` says what to do with one that is not read."""

    role: str
    name: str
    way: str = ""


_EXTRACT = "extract it, and give the folder"
#: By first bytes: offset, bytes, kind. The roles that are read: image, parquet, arrow, tar, packed.
_MAGIC: tuple[tuple[int, bytes, Kind], ...] = (
    (0, b"\xff\xd8\xff", Kind("image", "a JPEG photograph")),
    (0, b"\x89PNG", Kind("image", "a PNG picture")),
    (0, b"GIF8", Kind("image", "a GIF picture")),
    (8, b"WEBP", Kind("image", "a WebP picture")),
    (0, b"II*\0", Kind("image", "a TIFF picture")),
    (0, b"MM\0*", Kind("image", "a TIFF picture")),
    (0, b"II+\0", Kind("image", "a TIFF picture")),
    (4, b"ftypavi", Kind("image", "an AVIF picture")),
    (4, b"jP  ", Kind("image", "a JPEG 2000 picture")),
    (0, b"\xff\x4f\xff\x51", Kind("image", "a JPEG 2000 picture")),
    (0, b"\0\0\1\0", Kind("image", "an icon")),
    *((4, b"ftyp" + brand, Kind("image", "a HEIC photograph")) for brand in (b"heic", b"heix", b"hevc", b"mif1")),
    (0, b"\xff\x0a", Kind("image", "a JPEG XL picture")),
    (4, b"JXL ", Kind("image", "a JPEG XL picture")),
    (4, b"ftyp", Kind("other", "a video", "Kimi-K3 encoder mode supports image input only")),
    (0, b"PAR1", Kind("parquet", "Parquet")),
    (0, b"ARROW1", Kind("arrow", "Arrow")),
    (0, b"\xff\xff\xff\xff", Kind("arrow", "Arrow")),
    *((0, magic, Kind("packed", packing)) for magic, packing in PACKINGS.items()),
    (0, b"PK\x03\x04", Kind("other", "a zip archive", f"name its images as zip://NAME::FILE.zip, or {_EXTRACT}")),
    (0, b"7z\xbc\xaf\x27\x1c", Kind("other", "a 7z archive", _EXTRACT)),
    (0, b"Rar!", Kind("other", "a RAR archive", _EXTRACT)),
    (0, b"%PDF", Kind("other", "a PDF", "render its pages to images first")),
    (0, b"\x89HDF", Kind("other", "an HDF5 file", "write its images into files, Parquet or a tar")),
    (0, b"SQLite format 3", Kind("other", "an SQLite database", "export its rows to CSV or Parquet")),
    (0, b"\x93NUMPY", Kind("other", "a NumPy array", "write its pictures into files")),
    (0, b"\x80\x04", Kind("other", "a Python pickle, which is never read", "write its rows as JSON Lines or Parquet")),
    (0, b"\x80\x05", Kind("other", "a Python pickle, which is never read", "write its rows as JSON Lines or Parquet")),
    (0, b"8BPS", Kind("other", "a Photoshop file", "export it to PNG")),
    (0, b"\x1aE\xdf\xa3", Kind("other", "a video", "Kimi-K3 encoder mode supports image input only")),
    (0, b"version https://git-lfs", Kind("other", "a Git LFS pointer, not the file itself", "run `git lfs pull`")),
)
_TEXT = Kind("text", "text")


def kind_of(start: bytes) -> Kind:
    """The kind of a file that begins with these bytes, `START` of them or all there are."""
    for offset, magic, kind in _MAGIC:
        if start.startswith(magic, offset):
            return kind
    if start[:2] == b"BM" and start[6:10] == bytes(4):
        return Kind("image", "a BMP picture")
    if _is_tar(start):
        return Kind("tar", "a tar")
    return _TEXT


def _is_tar(start: bytes) -> bool:
    if start[257:262] == b"ustar":
        return True
    try:  # an old one, without a mark
        return len(start) >= START and tarfile.TarInfo.frombuf(start[:512], "utf-8", "replace").chksum > 0
    except tarfile.HeaderError:
        return False


def begins_like_an_image(content: bytes) -> bool:
    """Whether a cell's bytes are a picture, by their first ones."""
    return len(content) > 8 and kind_of(content[:32]).role == "image"


def base64_image(text: str) -> str | None:
    """The `data:` URL of base64 text that begins like an image; None for any other text."""
    if len(text) < 64 or not _BASE64.match(head := "".join(text[:96].split())[:64]):
        return None
    try:
        start = base64.b64decode(head[: len(head) // 4 * 4])
    except binascii.Error:
        return None
    return f"data:image;base64,{text}" if begins_like_an_image(start) else None


def suffix_of(name: str) -> str:
    """The suffix of a path or URL, in lower case; empty without one."""
    if "://" in name:
        name = name.partition("?")[0].partition("#")[0]
    name = name[max(name.rfind("/"), name.rfind("\\")) + 1 :]
    dot = name.rfind(".")
    return name[dot:].lower() if dot > 0 else ""


def suffixes(formats: Iterable[str]) -> frozenset[str]:
    """The suffixes of images, with those of extra formats."""
    return SUFFIXES.union(*(_EXTRA_SUFFIXES[name] for name in formats))


_ALL_SUFFIXES = suffixes(_EXTRA_SUFFIXES)


def names_an_image(text: str) -> bool:
    """Whether a text is a path or URL with the suffix of an image, also of a format only read when asked for."""
    return len(text) < 4096 and suffix_of(text) in _ALL_SUFFIXES and "\n" not in text and "\0" not in text
