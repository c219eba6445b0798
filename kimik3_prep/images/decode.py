"""Encoded bytes in, opened image out, safely.

Only the decoders in `FORMATS` ever run, and whatever goes wrong comes out as one `ItemError`. Pillow keeps some of its
settings in module globals; a process that prepares features owns them (`_claim_pillow`), so no flag set elsewhere
changes a pixel.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
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

from kimik3_prep.errors import ItemError
from kimik3_prep.images.source import Stamp, foreign_errors, hashed, opened

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
class Probe:
    """What the header says, before any pixel is decoded.

    width, height: pixels, swapped where the orientation is applied. stamp: None for `data:` URLs.
    content_hash: "sha256:<hex>" of the bytes, where it was asked for.
    """

    width: int
    height: int
    mode: str
    format: str
    stamp: Stamp | None
    content_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Decoded:
    """A fully loaded first frame, in its own mode.

    content_hash: "sha256:<64 hex>" of the encoded bytes. exif_orientation: 1 to 8, or None where there is none.
    """

    image: Image.Image
    mode: str
    format: str
    exif_orientation: int | None
    content_hash: str


def probe(source: str, max_pixels: int = DEFAULT_MAX_PIXELS, exif: Exif = "ignore", hash: bool = False) -> Probe:
    """Read the header of a resolved `source`. Raises ItemError; RunError where no file can be opened any more.

    exif: apply gives the size of the image turned by its EXIF orientation. hash: read the whole file for its hash.
    """
    with foreign_errors(), opened(source, whole=hash) as (file, stamp):
        content_hash = None
        if hash:
            file, content_hash = hashed(file, stamp)
        image = _identify(file, max_pixels)
        return Probe(*_size(image, file, exif), image.mode, str(image.format), stamp, content_hash)


def decode(
    source: str,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    planned: Stamp | None = None,
    exif: Exif = "ignore",
    size: tuple[int, int] | None = None,
) -> Decoded:
    """Read, hash and decode a resolved `source`. Raises ItemError; RunError where no file can be opened any more.

    planned: the stamp the probe saw; a file that has changed since is refused before it is decoded.
    exif: apply turns the image by its EXIF orientation, as Pillow's `exif_transpose` does. Pillow turns TIFF always.
    size: width and height there is room for; an image of another size is refused before it is decoded.
    """
    with foreign_errors(), opened(source, whole=True) as (file, stamp):
        if planned is not None and stamp is not None and stamp != planned:
            raise ItemError("source_changed", f"the file changed after it was planned ({planned} then, {stamp} now)")
        encoded, content_hash = hashed(file, stamp)
        image = _identify(encoded, max_pixels)
        if size is not None and (found := _size(image, encoded, exif)) != size:
            turned = " as its EXIF orientation turns it" if exif == "apply" and found != image.size else ""
            raise ItemError("size_mismatch", f"the image is {found[0]} x {found[1]} pixels{turned}")
        # Pillow turns a TIFF on load and forgets the tag.
        tiff = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else None
        orientation = _orientation(tiff.get(_EXIF_ORIENTATION)) if tiff is not None else None
        image.load()
        if orientation is None:
            orientation = _orientation(image.getexif().get(_EXIF_ORIENTATION))
        wrong = exif == "apply" and tiff is None and orientation in _TURNS
        shown = image.transpose(_TURNS[orientation]) if wrong and orientation is not None else image
        return Decoded(shown, image.mode, str(image.format), orientation, content_hash)


def codec_versions() -> dict[str, str]:
    """Pillow's version and those of the libraries it decodes with: what the same file may decode differently under."""
    from PIL import __version__, features

    names = ("libjpeg_turbo", "jpg", "webp", "avif", "libtiff", "jpg_2000", "littlecms2")
    versions = {name: features.version(name) for name in names}
    return {"pillow": __version__, **{name: version for name, version in versions.items() if version}}


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


def _size(image: ImageFile.ImageFile, file: BinaryIO, exif: Exif) -> tuple[int, int]:
    """Width and height as they will be once the image is loaded, and turned if it is to be."""
    width, height = image.size
    return (height, width) if exif == "apply" and _header_orientation(image, file) in _SIDEWAYS else (width, height)


def _header_orientation(image: ImageFile.ImageFile, file: BinaryIO) -> int | None:
    """The orientation without decoding, but for a PNG whose metadata stand behind its pixels."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return None  # its size is that of the turned image already
    if isinstance(image, PngImagePlugin.PngImageFile):
        if not _metadata_behind_pixels(file):
            return _orientation(Image.Image.getexif(image).get(_EXIF_ORIENTATION))  # PNG's own would decode first
        image.load()
    return _orientation(image.getexif().get(_EXIF_ORIENTATION))


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


def _orientation(value: Any) -> int | None:
    return value if type(value) is int and 1 <= value <= 8 else None


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
