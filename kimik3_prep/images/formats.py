"""Formats that Pillow reads only with a package of their own. Each is read only where a run asks for it.

The decoder of such a package may give other pixels in another version, and a package that somebody installed must not
change a run. So `--formats` is part of the Recipe, and so are the versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO

from kimik3_prep.errors import InputError, Problem

_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
_JXL_CODESTREAM = b"\xff\x0a"
_JXL_BOXES = b"\x00\x00\x00\x0cJXL \x0d\x0a\x87\x0a"


@dataclass(frozen=True, slots=True)
class Extra:
    """A format, and the package that reads it."""

    pillow_name: str
    """What Pillow calls the format."""
    packages: tuple[str, ...]
    """The package to install, and the module in it that holds the decoder."""
    decoder: str
    """The class in that module that opens a file."""
    accepts: Callable[[bytes], bool]
    """Whether a file's first 16 bytes are of this format."""


#: Formats by the name that `--formats` takes.
EXTRAS = {
    "heif": Extra(
        "HEIF",
        ("pillow-heif", "pillow_heif"),
        "HeifImageFile",
        lambda start: start[4:8] == b"ftyp" and start[8:12] in _HEIF_BRANDS,
    ),
    "jxl": Extra(
        "JXL",
        ("pillow-jxl-plugin", "pillow_jxl.JpegXLImagePlugin"),
        "JXLImageFile",
        lambda start: start.startswith((_JXL_CODESTREAM, _JXL_BOXES)),
    ),
}


def parse_formats(text: str) -> tuple[str, ...]:
    """Return the formats that an option like `+heif,+jxl` asks for, sorted. Raises InputError for any other text."""
    names = {name.strip().removeprefix("+").lower() for name in text.split(",") if name.strip()}
    if unknown := sorted(names - EXTRAS.keys()):
        known = ", ".join(f"+{name}" for name in EXTRAS)
        raise InputError([Problem("--formats", f"{name!r} is no format to add", known) for name in unknown])
    return tuple(sorted(names))


def decoder(name: str) -> tuple[Any, Callable[[bytes], bool]]:
    """Return what opens files of an extra format, and what recognises them. Raises InputError where it is missing."""
    extra = EXTRAS[name]
    package, module = extra.packages
    try:
        return getattr(import_module(module), extra.decoder), extra.accepts
    except ImportError as error:
        what = f"{name} needs the package {package}, which cannot be imported: {error}"
        raise InputError([Problem("--formats", what, hint=f"pip install 'kimik3-prep[{name}]'")]) from error


def missing(names: Iterable[str]) -> list[Problem]:
    """Return a problem for each of these formats whose package is missing."""
    problems: list[Problem] = []
    for name in names:
        try:
            decoder(name)
        except InputError as error:
            problems += error.problems
    return problems


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that read these formats. Raises InputError where one is missing."""
    from importlib import metadata  # it takes a while, and most runs ask for no extra format

    for name in names:
        decoder(name)
    return {EXTRAS[name].packages[0]: metadata.version(EXTRAS[name].packages[0]) for name in names}


# --- JPEG XL: its decoder decodes a file as it opens it, so its size is read here before ------------------------------

#: Width over height, by the three bits in a header that say so.
_RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}
_SIDE_BITS = (9, 13, 18, 30)
_MOST_BOXES = 1000


def jxl_size(file: BinaryIO) -> tuple[int, int] | None:
    """Return width and height of a JPEG XL image, before its orientation; None for what is none.

    Leaves the file at its start.
    """
    try:
        return _size_header(_codestream_start(file))
    finally:
        file.seek(0)


def _codestream_start(file: BinaryIO) -> bytes:
    """The first bytes of the codestream, bare or in the first box that holds some of it."""
    file.seek(0)
    start = file.read(16)
    if not start.startswith(_JXL_BOXES):
        return start
    place = 0
    for _ in range(_MOST_BOXES):
        file.seek(place)
        head = file.read(36)
        size, kind, begin = int.from_bytes(head[:4], "big"), head[4:8], 8
        if size == 1:
            size, begin = int.from_bytes(head[8:16], "big"), 16
        if kind == b"jxlc":
            return head[begin:]
        if kind == b"jxlp":
            return head[begin + 4 :]  # behind the number of the part
        if size < 8:
            break
        place += size
    return b""


def _size_header(codestream: bytes) -> tuple[int, int] | None:
    if not codestream.startswith(_JXL_CODESTREAM):
        return None
    bits, place = int.from_bytes(codestream[2:], "little"), 0

    def take(count: int) -> int:
        nonlocal place
        value = bits >> place & ((1 << count) - 1)
        place += count
        return value

    def side(is_small: bool) -> int:
        return 8 * (take(5) + 1) if is_small else take(_SIDE_BITS[take(2)]) + 1

    is_small = bool(take(1))
    height = side(is_small)
    ratio = take(3)
    if not ratio:
        return side(is_small), height
    over, under = _RATIOS[ratio]
    return height * over // under, height
