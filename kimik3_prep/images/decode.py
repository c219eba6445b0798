"""Encoded bytes in, opened image out, safely.

Only the decoders in `FORMATS` run, and those of `EXTRAS` that a run asks for. Whatever goes wrong leaves as one
`ItemError`. Pillow keeps some of its settings in module globals. A process that prepares features sets them before each
image (`_claim_pillow`), so a flag that somebody else set changes no pixel.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, BinaryIO, Literal

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

from kimik3_prep.errors import ItemError, LibraryRefuses
from kimik3_prep.images.formats import EXTRAS, decoder, jxl_size
from kimik3_prep.images.formats import versions as extra_versions
from kimik3_prep.images.source import Encoded, Stamp, foreign_errors, hashed, opened

#: Pillow's own limit before it calls an image a decompression bomb, in pixels.
DEFAULT_MAX_PIXELS = 178_956_970

#: What to do with an EXIF orientation.
Exif = Literal["ignore", "apply"]

_EXIF_ORIENTATION = 0x0112
#: What an orientation asks for; 1 asks for nothing. Source: Pillow's `ImageOps.exif_transpose`.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_PILLOW_MODULES = r"PIL\.|kimik3_prep\.images|pillow_jxl|pillow_heif"
#: Parts of Pillow that load a library of their own. Others are built into Pillow's core.
_LIBRARY_MODULES = ("PIL._webp", "PIL._avif", "PIL._imagingcms")

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
class Probe:
    """What the header says, before any pixel is decoded."""

    width: int
    """Pixels; width and height are swapped where an applied orientation swaps them."""
    height: int
    mode: str
    format: str
    stamp: Stamp | None
    """None for `data:` URLs."""
    content_hash: str | None = None
    """The hash of the bytes, `sha256:<64 hex>`, where the caller asked for it."""
    encoded: Encoded | None = None
    """The bytes themselves, where all were read and the caller keeps so many."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A fully loaded first frame, in its own mode."""

    image: Image.Image
    mode: str
    format: str
    exif_orientation: int | None
    """1 to 8; None where the file has none that can be read."""
    content_hash: str
    """The hash of the encoded bytes, `sha256:<64 hex>`."""


def probe(
    source: str | Encoded,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    exif: Exif = "ignore",
    hash: bool = False,
    keep: int = 0,
    formats: tuple[str, ...] = (),
) -> Probe:
    """Read the header of a resolved source. Raises ItemError; RunError where the process may open no more files.

    exif: `apply` gives the size of the image as its EXIF orientation turns it. hash: read everything, for its hash.
    keep: hand on the bytes of a source that was read to its end, where they are at most so many.
    formats: names of `EXTRAS` that may be read as well.
    """
    with foreign_errors(), opened(source, whole=hash) as (file, stamp):
        content_hash = None
        if hash:
            file, content_hash = hashed(file, stamp)
        image = _identify(file, max_pixels, formats)
        width, height = _size(image, file, exif)
        encoded = None
        if isinstance(file, io.BytesIO) and file.getbuffer().nbytes <= keep:
            encoded = Encoded(file.getvalue(), stamp)
        return Probe(width, height, image.mode, str(image.format), stamp, content_hash, encoded)


def decode(
    source: str | Encoded,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    planned: Stamp | None = None,
    exif: Exif = "ignore",
    size: tuple[int, int] | None = None,
    formats: tuple[str, ...] = (),
) -> Decoded:
    """Read, hash and decode a resolved source, or the bytes that `read_whole` or `probe` read from it.

    planned: the stamp that the probe saw. A file that has changed since is refused before it is decoded.
    exif: `apply` turns the image by its EXIF orientation, as Pillow's `exif_transpose` does. Pillow turns TIFF always.
    size: width and height there is room for. An image of another size is refused before it is decoded.
    formats: names of `EXTRAS` that may be read as well.

    Raises ItemError; RunError where the process may open no more files.
    """
    with foreign_errors(), opened(source, whole=True) as (file, stamp):
        if planned is not None and stamp is not None and stamp != planned:
            raise ItemError("source_changed", f"the file changed after it was planned ({_difference(planned, stamp)})")
        file, content_hash = hashed(file, stamp)
        image = _identify(file, max_pixels, formats)
        if size is not None and (announced := _size(image, file, exif)) != size:
            turned = " as its EXIF orientation turns it" if exif == "apply" and announced != image.size else ""
            raise ItemError("size_mismatch", f"the image is {announced[0]} x {announced[1]} pixels{turned}")
        tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else None
        orientation = None if tags is None else _orientation(lambda: tags)  # on loading, Pillow turns it and forgets
        image.load()
        if orientation is None:
            orientation = _orientation(image.getexif)
        turn = _TURNS.get(orientation or 1) if exif == "apply" and tags is None else None
        shown = image if turn is None else image.transpose(turn)
        return Decoded(shown, image.mode, str(image.format), orientation, content_hash)


def _difference(planned: Stamp, now: Stamp) -> str:
    if planned.size != now.size:
        return f"{planned.size:,} bytes then, {now.size:,} now"
    return f"{now.size:,} bytes as before, written again"


def codec_versions(formats: tuple[str, ...] = ()) -> dict[str, str]:
    """Pillow's version and those of the libraries it decodes with: the same file may decode differently with others.

    Raises RunError where a library that is there cannot be loaded or asked, which would look like one that is not.
    """
    from PIL import __version__, features

    for module in _LIBRARY_MODULES:
        if find_spec(module) is not None:
            try:
                import_module(module)
            except ImportError as error:
                raise LibraryRefuses(module, str(error)) from error
    names = ("libjpeg_turbo", "jpg", "webp", "avif", "libtiff", "jpg_2000", "littlecms2")
    versions = {name: features.version(name) or "" for name in names if features.check(name)}
    if silent := [name for name, version in versions.items() if not version]:
        raise LibraryRefuses(silent[0], "Pillow has it and cannot say its version")
    return {"pillow": __version__, **versions, **extra_versions(formats)}


def _identify(file: BinaryIO, max_pixels: int, formats: tuple[str, ...]) -> ImageFile.ImageFile:
    allowed = _claim_pillow(max_pixels, formats)
    if "jxl" in formats and (size := jxl_size(file)):
        _check_pixels(*size, max_pixels)
    try:
        image = Image.open(file, formats=allowed)
    except UnidentifiedImageError as error:
        file.seek(0)
        raise ItemError("unidentified", _what_it_looks_like(file.read(64), formats)) from error
    except Image.DecompressionBombError as error:
        raise ItemError("too_many_pixels", f"above the limit of {max_pixels:,} pixels (--max-pixels)") from error
    _check_pixels(image.width, image.height, max_pixels)
    return image


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        size = f"{width:,} x {height:,} pixels"
        raise ItemError("too_many_pixels", f"{size}, above the limit of {max_pixels:,} (--max-pixels)")


def _claim_pillow(max_pixels: int, formats: tuple[str, ...]) -> tuple[str, ...]:
    """Set Pillow's module globals, so that results do not depend on who else set them; return the decoders allowed.

    Called before every open: another library, or a test runner that restores the warning filters, may have moved one.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    GifImagePlugin.LOADING_STRATEGY = GifImagePlugin.LoadingStrategy.RGB_AFTER_FIRST
    TiffImagePlugin.READ_LIBTIFF = False
    Image.MAX_IMAGE_PIXELS = (max_pixels + 1) // 2  # Pillow warns above this and refuses above twice this
    extras = {EXTRAS[name].pillow_name: decoder(name) for name in formats}
    for pillow_name, opens in {**_DECODERS, **extras}.items():
        Image.OPEN[pillow_name] = opens
    first = warnings.filters[0] if warnings.filters else None
    if first is None or first[0] != "ignore" or getattr(first[3], "pattern", None) != _PILLOW_MODULES:
        warnings.filterwarnings("ignore", module=_PILLOW_MODULES)
    return (*FORMATS, *extras)


def _size(image: ImageFile.ImageFile, file: BinaryIO, exif: Exif) -> tuple[int, int]:
    """Width and height that the image will have once it is loaded, and turned where `exif` asks for it."""
    width, height = image.size
    return (height, width) if exif == "apply" and _header_orientation(image, file) in _SIDEWAYS else (width, height)


def _header_orientation(image: ImageFile.ImageFile, file: BinaryIO) -> int | None:
    """The orientation, without decoding. Only a PNG whose metadata stand behind its pixels is decoded for it."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return None  # its size is that of the turned image already
    if isinstance(image, PngImagePlugin.PngImageFile):
        if not _metadata_behind_pixels(file):
            return _orientation(lambda: Image.Image.getexif(image))  # PNG's own method would decode first
        image.load()
    return _orientation(image.getexif)


def _metadata_behind_pixels(file: BinaryIO) -> bool:
    """Whether EXIF or text chunks of a PNG follow its pixels. Leaves the file where it was."""
    place, seen = file.tell(), False
    file.seek(8)
    try:
        while len(head := file.read(8)) == 8:
            if head[4:] in (b"eXIf", b"iTXt", b"tEXt", b"zTXt") and seen:
                return True
            seen = seen or head[4:] == b"IDAT"
            file.seek(int.from_bytes(head[:4], "big") + 4, 1)
        return False
    finally:
        file.seek(place)


def _orientation(read_tags: Callable[[], Mapping[int, Any]]) -> int | None:
    """The orientation among an image's tags, 1 to 8; None where there is none, or where they cannot be parsed.

    A seam: whatever Pillow's EXIF parser raises, the picture is there, and the checkpoint never reads its EXIF.
    """
    try:
        value = read_tags().get(_EXIF_ORIENTATION)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001
        return None
    # Pillow compares by value: 6, 6.0 and the fraction 6/1 are one orientation.
    return next((orientation for orientation in range(1, 9) if value == orientation), None)


_EXTRA_NAMES = {"heif": "a HEIC photograph", "jxl": "a JPEG XL picture"}

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


def _what_it_looks_like(start: bytes, formats: tuple[str, ...]) -> str:
    if not start:
        return "the file is empty"
    for name, extra in EXTRAS.items():
        if extra.accepts(start[:16]):
            if name in formats:
                return f"starts like {_EXTRA_NAMES[name]}, but its header cannot be read"
            return f"{_EXTRA_NAMES[name]}; --formats +{name} reads it"
    if start[4:8] == b"ftyp":
        return "an MP4-family file (a video?); only images can be prepared"
    for magic, text in _LOOKS:
        if start.lstrip().lower().startswith(magic):
            return text
    return f"no allowed decoder recognises it; allowed are {', '.join(FORMATS)}"
