"""Encoded bytes in, opened image out, safely.

Only the decoders in `FORMATS` ever run, only regular files are opened, and whatever goes wrong comes out as one
`ItemError`: this module is the single seam to Pillow, the file system and fsspec. Pillow keeps some of its settings in
module globals; a process that prepares features owns them (`_claim_pillow`), so no flag set elsewhere changes a pixel.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import io
import logging
import os
import re
import stat
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import unquote, unquote_to_bytes

from PIL import (  # noqa: F401  (importing a plugin registers its decoder)
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    ImageFile,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TgaImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
    XbmImagePlugin,
)
from PIL.Image import core as _core  # type: ignore[attr-defined]

from kimik3_prep.errors import ItemError, ItemErrorCode
from kimik3_prep.manifest import scheme

#: Pillow's own limit before it calls an image a decompression bomb, in pixels.
DEFAULT_MAX_PIXELS = 178_956_970

_READ_WHOLE = 256 << 20  # bytes; a larger file is hashed in pieces and decoded from disk
_EXIF_ORIENTATION = 0x0112
_PILLOW_MODULES = r"PIL\.|kimik3_prep\.images"

# Somebody's plugin may have registered itself under an allowed name (AVIF plugins do): remember Pillow's own.
_DECODERS: dict[str, tuple[Any, Any]] = {
    "BMP": (BmpImagePlugin.BmpImageFile, BmpImagePlugin._accept),
    "GIF": (GifImagePlugin.GifImageFile, GifImagePlugin._accept),
    "JPEG": (JpegImagePlugin.jpeg_factory, JpegImagePlugin._accept),
    "PPM": (PpmImagePlugin.PpmImageFile, PpmImagePlugin._accept),
    "PNG": (PngImagePlugin.PngImageFile, PngImagePlugin._accept),
    "AVIF": (AvifImagePlugin.AvifImageFile, AvifImagePlugin._accept),
    "ICO": (IcoImagePlugin.IcoImageFile, IcoImagePlugin._accept),
    "JPEG2000": (Jpeg2KImagePlugin.Jpeg2KImageFile, Jpeg2KImagePlugin._accept),
    "TGA": (TgaImagePlugin.TgaImageFile, None),
    "TIFF": (TiffImagePlugin.TiffImageFile, TiffImagePlugin._accept),
    "WEBP": (WebPImagePlugin.WebPImageFile, WebPImagePlugin._accept),
    "XBM": (XbmImagePlugin.XbmImageFile, XbmImagePlugin._accept),
}

#: Decoders that may run, in the order Pillow itself tries them. JPEG opens MPO files too.
FORMATS = tuple(_DECODERS)

logging.getLogger("PIL").addHandler(logging.NullHandler())  # else Pillow's log errors reach the user's stderr
_core.set_use_block_allocator(1)  # one block per image: pixels can be viewed without a copy


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one version of a local file from another: `size` in bytes, `mtime_ns` since the epoch."""

    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Probe:
    """What the header says, before any pixel is decoded. Sizes in pixels; `stamp` is None for URLs."""

    width: int
    height: int
    mode: str
    format: str
    stamp: Stamp | None


@dataclass(frozen=True, slots=True)
class Decoded:
    """A fully loaded first frame, in its own mode, not turned by EXIF.

    content_hash: "sha256:<64 hex>" of the encoded bytes. exif_orientation: 1 to 8, or None where there is none.
    """

    image: Image.Image
    mode: str
    format: str
    exif_orientation: int | None
    content_hash: str


def probe(source: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> Probe:
    """Read the header of a resolved `source`. Raises ItemError, and nothing else."""
    with foreign_errors(), _opened(source) as (file, stamp):
        image = _identify(file, max_pixels)
        return Probe(image.width, image.height, image.mode, str(image.format), stamp)


def decode(source: str, max_pixels: int = DEFAULT_MAX_PIXELS, planned: Stamp | None = None) -> Decoded:
    """Read, hash and decode a resolved `source`. Raises ItemError, and nothing else.

    `planned` is the stamp the probe saw: a file that has changed since is refused before it is decoded.
    """
    with foreign_errors(), _opened(source) as (file, stamp):
        if planned is not None and stamp is not None and stamp != planned:
            raise ItemError("source_changed", f"the file changed after it was planned ({planned} then, {stamp} now)")
        encoded, content_hash = _hashed(file, stamp)
        image = _identify(encoded, max_pixels)
        orientation = _tiff_orientation(image)
        image.load()
        if orientation is None:
            orientation = _orientation(image.getexif().get(_EXIF_ORIENTATION))
        return Decoded(image, image.mode, str(image.format), orientation, content_hash)


def read_file(source: str) -> tuple[bytes, str]:
    """All bytes of a resolved `source` and their hash as in `Decoded`. Raises ItemError, and nothing else."""
    with foreign_errors(), _opened(source) as (file, _):
        content = file.read()
        return content, f"sha256:{hashlib.sha256(content).hexdigest()}"


def codec_versions() -> dict[str, str]:
    """Pillow's version and those of the libraries it decodes with: what the same file may decode differently under."""
    from PIL import __version__, features

    names = ("libjpeg_turbo", "jpg", "webp", "avif", "libtiff", "jpg_2000", "littlecms2")
    versions = {name: features.version(name) for name in names}
    return {"pillow": __version__, **{name: version for name, version in versions.items() if version}}


# --- opening -----------------------------------------------------------------------------------------------------


@contextmanager
def _opened(source: str) -> Iterator[tuple[BinaryIO, Stamp | None]]:
    """A binary, seekable file for a resolved source, closed on the way out."""
    if source.startswith("data:"):
        yield io.BytesIO(_data_url(source)), None
    elif scheme(source):
        yield io.BytesIO(_fetch(source)), None
    else:
        with _regular_file(source) as file:
            status = os.fstat(file.fileno())
            yield file, Stamp(status.st_size, status.st_mtime_ns)


def _regular_file(path: str) -> BinaryIO:
    try:
        # A named pipe without a writer would block here for ever; O_NONBLOCK means nothing to a regular file.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # a NUL byte in the path
        raise ItemError("not_found", f"not a path: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ItemError("not_a_file", "not a regular file (a folder, a named pipe, a socket or a device)")
    return os.fdopen(descriptor, "rb")


def _data_url(url: str) -> bytes:
    header, comma, data = url[len("data:") :].partition(",")
    if not comma:
        raise ItemError("bad_data_url", "a data: URL needs a comma between its media type and its data")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(unquote(data), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ItemError("bad_data_url", f"the data is not base64: {error}") from error


def _fetch(url: str) -> bytes:
    import fsspec

    try:
        with fsspec.open(url, "rb") as file:
            content: bytes = file.read()
            return content
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        raise ItemError("unreadable", f"{type(error).__name__}: {_sentence(error)}") from error


def _hashed(file: BinaryIO, stamp: Stamp | None) -> tuple[BinaryIO, str]:
    """The file to decode from, and the hash of its bytes. Read once where it fits in memory."""
    digest = hashlib.sha256()
    if stamp is not None and stamp.size > _READ_WHOLE:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        file.seek(0)
    else:
        content = file.read()
        digest.update(content)
        file = io.BytesIO(content)
    return file, f"sha256:{digest.hexdigest()}"


def _identify(file: BinaryIO, max_pixels: int) -> ImageFile.ImageFile:
    _claim_pillow(max_pixels)
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        file.seek(0)
        raise ItemError("unidentified", _what_it_looks_like(file.read(64))) from error
    except Image.DecompressionBombError as error:
        raise ItemError("too_many_pixels", f"above the limit of {max_pixels:,} pixels (--max-pixels)") from error
    if image.width * image.height > max_pixels:
        found = f"{image.width:,} x {image.height:,} pixels"
        raise ItemError("too_many_pixels", f"{found}, above the limit of {max_pixels:,} (--max-pixels)")
    return image


def _claim_pillow(max_pixels: int) -> None:
    """Put Pillow's module globals where results cannot depend on who else set them.

    Called before every open: another library, or a test runner that restores the warning filters, may have moved one.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    GifImagePlugin.LOADING_STRATEGY = GifImagePlugin.LoadingStrategy.RGB_AFTER_FIRST
    TiffImagePlugin.READ_LIBTIFF = False
    Image.MAX_IMAGE_PIXELS = (max_pixels + 1) // 2  # Pillow warns above this and refuses above twice this
    for name, decoder in _DECODERS.items():
        Image.OPEN[name] = decoder
    first = warnings.filters[0] if warnings.filters else None
    if first is None or first[0] != "ignore" or getattr(first[3], "pattern", None) != _PILLOW_MODULES:
        warnings.filterwarnings("ignore", module=_PILLOW_MODULES)


def _tiff_orientation(image: Image.Image) -> int | None:
    """Pillow turns a TIFF on load and then forgets the tag, so it is read before."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return _orientation(image.tag_v2.get(_EXIF_ORIENTATION))
    return None


def _orientation(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= 8 else None


# --- what went wrong ----------------------------------------------------------------------------------------------


@contextmanager
def foreign_errors() -> Iterator[None]:
    """The seam: whatever Pillow, the file system or a protocol raises leaves as an ItemError."""
    try:
        yield
    except ItemError:
        raise
    except Exception as error:
        raise translate(error) from error


#: First match wins. A test raises every one of these through the seam.
_CODES: tuple[tuple[type[Exception], ItemErrorCode], ...] = (
    (FileNotFoundError, "not_found"),
    (NotADirectoryError, "not_found"),
    (PermissionError, "permission_denied"),
    (IsADirectoryError, "not_a_file"),
    (Image.DecompressionBombError, "too_many_pixels"),
    (MemoryError, "out_of_memory"),
    (UnidentifiedImageError, "unidentified"),
    (EOFError, "truncated"),
)


def translate(error: Exception) -> ItemError:
    """The ItemError for an exception that a decoder, the file system or a protocol raised."""
    text = _sentence(error)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return ItemError(code, text)
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # what opening a socket or an absent device gives
            return ItemError("not_a_file", text)
        return ItemError("unreadable", text)
    if "truncated" in text.lower():
        return ItemError("truncated", text)
    if isinstance(error, struct.error):
        return ItemError("corrupt", f"the data does not have the shape its header announces: {text}")
    return ItemError("corrupt", text if isinstance(error, OSError) else f"{type(error).__name__}: {text}")


def _sentence(error: BaseException) -> str:
    """The exception's text without paths (the index has the image) and memory addresses (bytes must repeat)."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror
    text = re.sub(r" at 0x[0-9a-f]+", "", str(error)).strip()
    return (text or type(error).__name__)[:500]


#: First bytes that tell a person what to do. Longer and more particular ones first.
_LOOKS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the image itself: run `git lfs pull`"),
    (b"%!ps", "a PostScript file; EPS is never decoded, convert it first"),
    (b"%pdf", "a PDF; render its pages to images first"),
    (b"<svg", "an SVG drawing; render it to PNG first"),
    (b"<?xml", "an XML or SVG file; render it to PNG first"),
    (b"<", "an HTML page, perhaps the saved error message of a download"),
    (b"{", "a JSON text, perhaps the saved error message of a download"),
    (b"\x1f\x8b", "gzip data; decompress it first"),
    (b"pk\x03\x04", "a ZIP archive"),
    (b"\xff\xd8\xff", "starts like a JPEG, but its header cannot be read"),
    (b"\x89png", "starts like a PNG, but its header cannot be read"),
    (b"ii*\x00", "starts like a TIFF, but its header cannot be read"),
    (b"mm\x00*", "starts like a TIFF, but its header cannot be read"),
    (b"riff", "starts like a WebP, but its header cannot be read"),
    (b"gif8", "starts like a GIF, but its header cannot be read"),
)


def _what_it_looks_like(start: bytes) -> str:
    if not start:
        return "the file is empty"
    if start[4:8] == b"ftyp":
        if start[8:12] in (b"heic", b"heix", b"hevc", b"mif1"):
            return "a HEIC photograph; no allowed decoder reads it, convert it to JPEG or PNG first"
        return "an MP4-family file (a video?); only images can be prepared"
    for magic, text in _LOOKS:
        if start.lstrip().lower().startswith(magic):
            return text
    return f"no allowed decoder recognises it; allowed are {', '.join(FORMATS)}"
