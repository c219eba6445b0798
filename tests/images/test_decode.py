"""decode.py: the seam to Pillow, through `probe` and `decode`."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import os
import random
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, golden_cases, picture
from PIL import Image, ImageFile, ImageOps, PngImagePlugin, UnidentifiedImageError

from kimik3_prep.errors import ItemError, LibraryRefuses
from kimik3_prep.images.decode import FORMATS, codec_versions, decode, probe
from kimik3_prep.images.source import Stamp, read_whole

CASES = golden_cases("images")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden_outcome_and_header(case: dict[str, Any], golden: Path) -> None:
    path = str(golden / case["file"])
    if case["expect"] == "error":
        with pytest.raises(ItemError):
            decode(path)
        return
    header, decoded = probe(path), decode(path)
    assert [header.width, header.height] == case["size"] == list(decoded.image.size)
    assert (decoded.mode, decoded.format) == (case["mode"], case["format"])
    assert decoded.content_hash == f"sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()}"


@pytest.mark.parametrize("path", sorted((GOLDEN / "odd").iterdir()), ids=lambda path: path.name)
def test_odd_files_are_what_pillow_makes_of_them(path: Path) -> None:
    """The checkpoint opens a file with nothing but `Image.open`. DIB is the one of its formats that is not allowed."""
    try:
        with Image.open(path) as image:
            image.load()
    except OSError:
        image = None
    if image is None or image.format == "DIB":
        with pytest.raises(ItemError):
            decode(str(path))
        return
    decoded, header = decode(str(path)), probe(str(path))
    assert (decoded.image.mode, decoded.image.size) == (image.mode, image.size) == (header.mode, image.size)
    assert decoded.image.tobytes() == image.tobytes()
    assert decoded.image.info.get("transparency") == image.info.get("transparency")


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("not_there.png", "not_found", "No such file"),
        ("zero_byte.png", "unidentified", "empty"),
        ("html_as_jpg.jpg", "unidentified", "HTML"),
        ("lfs_pointer.png", "unidentified", "git lfs pull"),
        ("gz_png.png", "unidentified", "gzip"),
        ("svg_file.svg", "unidentified", "SVG"),
        ("eps_file.eps", "unidentified", "EPS is never decoded"),
        ("jpeg_trunc.jpg", "truncated", "truncated"),
        ("png_chunk_name.png", "corrupt", "SyntaxError"),
        ("png_iccp_bomb.png", "corrupt", "ValueError"),
        ("bomb_error.png", "too_many_pixels", "--max-pixels"),
    ],
)
def test_what_went_wrong_is_said(name: str, code: str, word: str, golden: Path) -> None:
    with pytest.raises(ItemError) as caught:
        decode(str(golden / "images" / name))
    assert caught.value.code == code
    assert word in caught.value.message
    assert str(golden) not in caught.value.message  # the same words on every machine


@pytest.mark.parametrize(
    ("size", "limit", "fine"), [((20, 10), 200, True), ((20, 10), 199, False), ((20, 10), 1, False)]
)
def test_pixel_limit(size: tuple[int, int], limit: int, fine: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(*size).save(path)
    if fine:
        assert probe(str(path), limit).width == size[0]
        return
    for read in (probe, decode):
        with pytest.raises(ItemError, match="too_many_pixels"):
            read(str(path), limit)


def test_a_raised_pixel_limit_lets_larger_images_in(golden: Path) -> None:
    assert probe(str(golden / "images" / "bomb_error.png"), 200_000_000).width == 14_000


def test_a_file_that_changed_after_the_probe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(30, 20).save(path)
    stamp = probe(str(path)).stamp
    assert isinstance(stamp, Stamp)
    assert decode(str(path), planned=stamp).image.size == (30, 20)
    os.utime(path, ns=(stamp.mtime_ns, stamp.mtime_ns + 1))
    with pytest.raises(ItemError, match="source_changed"):
        decode(str(path), planned=stamp)


@pytest.mark.parametrize("orientation", [1, 6, 8])
def test_exif_orientation_is_reported_and_not_applied(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for suffix in ("jpg", "png", "webp"):
        path = tmp_path / f"a.{suffix}"
        picture(30, 20).save(path, exif=exif)
        decoded = decode(str(path))
        assert decoded.image.size == (30, 20)
        assert decoded.exif_orientation == orientation


def test_tiff_orientation_is_reported_although_pillow_forgets_it(golden: Path) -> None:
    assert decode(str(golden / "images" / "tiff_orient6.tif")).exif_orientation == 6


def exif_with(kind: int, value: bytes, count: int = 1) -> bytes:
    """EXIF that holds one tag, an orientation. kind: the number of a TIFF type; value: its bytes, little-endian."""
    inline = len(value) <= 4
    entry = struct.pack("<HHI", 0x0112, kind, count) + (value.ljust(4, b"\0") if inline else struct.pack("<I", 26))
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4) + (b"" if inline else value)


#: An orientation as cameras and tools write it: as a SHORT, and in every other way that has been seen.
ORIENTATIONS = {
    **{f"short {value}": exif_with(3, struct.pack("<H", value)) for value in range(10)},
    "two shorts": exif_with(3, struct.pack("<HH", 6, 6), count=2),
    "byte": exif_with(1, b"\6"),
    "ascii": exif_with(2, b"6\0", count=2),
    "long": exif_with(4, struct.pack("<I", 6)),
    "rational": exif_with(5, struct.pack("<II", 6, 1)),
    "rational 12/2": exif_with(5, struct.pack("<II", 12, 2)),
    "rational 6/0": exif_with(5, struct.pack("<II", 6, 0)),
    "float": exif_with(11, struct.pack("<f", 6)),
    "float 6.5": exif_with(11, struct.pack("<f", 6.5)),
    "double": exif_with(12, struct.pack("<d", 6)),
}
TURNED = [
    *[
        (f"{kind}: {name}", kind, {"exif": exif})
        for kind in ("JPEG", "PNG", "WEBP")
        for name, exif in ORIENTATIONS.items()
    ],
    *[(f"AVIF: short {n}", "AVIF", {"exif": ORIENTATIONS[f"short {n}"]}) for n in range(1, 9)],
    *[(f"TIFF: short {n}", "TIFF", {"tiffinfo": {0x0112: n}}) for n in range(1, 9)],
    *[
        (f"{kind}: XMP {n}", kind, {"xmp": f'<x tiff:Orientation="{n}"/>'.encode()})
        for kind in ("JPEG", "WEBP")
        for n in range(1, 9)
    ],
    *[
        (
            f"MPO: short {n}",
            "MPO",
            {"exif": ORIENTATIONS[f"short {n}"], "save_all": True, "append_images": [picture(8, 8)]},
        )
        for n in range(1, 9)
    ],
]


@pytest.mark.parametrize(("kind", "options"), [case[1:] for case in TURNED], ids=[case[0] for case in TURNED])
def test_an_orientation_is_applied_as_pillow_applies_it(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    picture(30, 20).save(path, kind, **options)
    with Image.open(path) as image:
        expected = ImageOps.exif_transpose(image)
    decoded, header = decode(str(path), exif="apply"), probe(str(path), exif="apply")
    assert decoded.image.tobytes() == expected.tobytes()
    assert (header.width, header.height) == decoded.image.size == expected.size
    plain = decode(str(path))
    assert plain.exif_orientation == decoded.exif_orientation
    with Image.open(path) as image:
        assert plain.image.tobytes() == image.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize(
    "exif", [b"no TIFF head", b"II*\0", b"II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x05"]
)
def test_exif_that_cannot_be_parsed_hides_no_picture(kind: str, exif: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    picture(30, 20).save(path, kind, exif=exif)
    check_without_orientation(path)


@pytest.mark.parametrize("profile", ["\nexif\n      10\nno hex at all", "one line", "\n\n\n4949"])
def test_a_raw_exif_profile_that_cannot_be_parsed_hides_no_picture(profile: str, tmp_path: Path) -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Raw profile type exif", profile, zip=True)
    picture(30, 20).save(tmp_path / "a.bin", "PNG", pnginfo=texts)
    check_without_orientation(tmp_path / "a.bin")


def check_without_orientation(path: Path) -> None:
    with Image.open(path) as image:
        expected = image.tobytes()
    for exif in ("ignore", "apply"):
        decoded, header = decode(str(path), exif=exif), probe(str(path), exif=exif)
        assert (decoded.image.tobytes(), decoded.exif_orientation) == (expected, None)
        assert (header.width, header.height) == (30, 20)


def test_memory_that_runs_out_over_exif_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(image: Image.Image) -> Image.Exif:
        raise MemoryError

    picture(30, 20).save(tmp_path / "a.jpg")
    monkeypatch.setattr(Image.Image, "getexif", run_out)
    with pytest.raises(ItemError, match="out_of_memory"):
        decode(str(tmp_path / "a.jpg"))


def test_bytes_that_were_read_before_are_probed_and_decoded(golden: Path) -> None:
    for path in (golden / "images").glob("*.png"):
        try:
            decoded = decode(str(path))
        except ItemError:
            continue
        encoded = read_whole(str(path))
        again, header = decode(encoded), probe(encoded)
        assert again.image.tobytes() == decoded.image.tobytes()
        assert (again.content_hash, header.stamp) == (decoded.content_hash, probe(str(path)).stamp)


def test_a_probe_hands_on_the_bytes_that_it_read(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(30, 20).save(path)
    content = path.read_bytes()
    assert probe(str(path), hash=True).encoded is None
    assert probe(str(path), hash=True, keep=len(content) - 1).encoded is None
    assert probe(str(path), keep=1 << 20).encoded is None, "only the header was read"
    encoded = probe(str(path), hash=True, keep=len(content)).encoded
    assert encoded is not None
    assert encoded == read_whole(str(path))
    os.utime(path, ns=(1, 1))
    with pytest.raises(ItemError, match="source_changed"):
        decode(encoded, planned=probe(str(path)).stamp)


@pytest.mark.parametrize(("longer", "words"), [(True, "bytes then"), (False, "as before, written again")])
def test_how_a_file_changed_is_said_in_words(longer: bool, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(30, 20).save(path)
    planned = probe(str(path)).stamp
    path.write_bytes(path.read_bytes() + b"x" * longer)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ItemError, match=words) as caught:
        decode(str(path), planned=planned)
    assert "Stamp" not in caught.value.message


def test_flags_set_elsewhere_change_nothing(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)
    with pytest.raises(ItemError, match="truncated"):
        decode(str(golden / "images" / "jpeg_trunc.jpg"))
    assert decode(str(golden / "images" / "rgb_control.png")).image.size == (640, 480)


def test_a_foreign_plugin_never_runs(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    class Intruder(ImageFile.ImageFile):
        def _open(self) -> None:
            ran.append(self)
            raise SyntaxError

    Image.register_open("AAA", Intruder)
    monkeypatch.setitem(Image.OPEN, "AVIF", (Intruder, None))
    monkeypatch.setitem(Image.OPEN, "PNG", (Intruder, None))
    try:
        assert decode(str(golden / "images" / "avif_alpha.avif")).mode == "RGBA"
        assert decode(str(golden / "images" / "rgb_control.png")).mode == "RGB"
        with pytest.raises(ItemError):
            decode(str(golden / "images" / "html_as_jpg.jpg"))
    finally:
        Image.OPEN.pop("AAA")
        Image.ID.remove("AAA")
    assert not ran


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICNS", "PCX", "PSD", "WMF", "SGI", "DDS"])
def test_other_formats_are_not_allowed(kind: str) -> None:
    assert kind not in FORMATS


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *[(kind, "RGB") for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA")],
        *[("GIF", "P"), ("ICO", "RGBA"), ("XBM", "1")],
    ],
)
def test_allowed_formats_open(kind: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    picture(32, 32, mode).save(path, kind)
    assert probe(str(path)).format == kind
    assert decode(str(path)).image.size == (32, 32)


def test_mpo_opens_as_its_first_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.mpo"
    picture(32, 20).save(path, "MPO", save_all=True, append_images=[picture(32, 20, seed=1)])
    decoded = decode(str(path))
    assert decoded.format == "MPO"
    plain = io.BytesIO()
    picture(32, 20).save(plain, "JPEG")
    assert decoded.image.tobytes() == Image.open(plain).convert("RGB").tobytes()


def test_pillow_warnings_are_neither_printed_nor_raised(golden: Path) -> None:
    warnings_golden = ("ico_wrong_dims.ico", "png_gama.png", "jpeg_exif6.jpg", "px100000x1.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in warnings_golden:
            decode(str(golden / "images" / name))
    code = (
        "import sys; from kimik3_prep.images.decode import decode\n"
        "from kimik3_prep.errors import ItemError\n"
        "for path in sys.argv[1:]:\n"
        "    try: decode(path)\n"
        "    except ItemError: pass\n"
    )
    paths = [str(path) for path in sorted((golden / "images").iterdir())]
    for value in ("error", "always"):
        # ResourceWarning is Python's own complaint about files that were left open: it must stay silent too.
        done = subprocess.run(
            [sys.executable, "-W", value, "-c", code, *paths], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_files_are_closed(golden: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for path in sorted((golden / "images").iterdir()):
        for read in (probe, decode):
            try:
                kept = read(str(path))
            except ItemError:
                continue
            assert set(os.listdir("/proc/self/fd")) == before, path.name
            del kept


SEAM: list[tuple[Exception, str]] = [
    (FileNotFoundError(errno.ENOENT, "No such file"), "not_found"),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory"), "not_found"),
    (PermissionError(errno.EACCES, "Permission denied"), "permission_denied"),
    (IsADirectoryError(errno.EISDIR, "Is a directory"), "not_a_file"),
    (OSError(errno.ENXIO, "No such device"), "not_a_file"),
    (OSError(errno.EIO, "Input/output error"), "unreadable"),
    (OSError(errno.ELOOP, "Too many levels of symbolic links"), "unreadable"),
    (Image.DecompressionBombError("bomb"), "too_many_pixels"),
    (MemoryError(), "out_of_memory"),
    (UnidentifiedImageError("cannot identify"), "unidentified"),
    (EOFError("no more"), "truncated"),
    (OSError("image file is truncated (3 bytes not processed)"), "truncated"),
    (OSError("broken data stream when reading image file"), "corrupt"),
    (SyntaxError("broken PNG file"), "corrupt"),
    (ValueError("bad value"), "corrupt"),
    (struct.error("unpack requires"), "corrupt"),
    (IndexError("index"), "corrupt"),
    (KeyError("key"), "corrupt"),
    (TypeError("type"), "corrupt"),
    (ZeroDivisionError("division"), "corrupt"),
    (OverflowError("overflow"), "corrupt"),
    (RecursionError("deep"), "corrupt"),
    (RuntimeError("anything else"), "corrupt"),
]


@pytest.mark.parametrize(("error", "code"), SEAM, ids=lambda value: getattr(value, "args", value) and str(value))
@pytest.mark.parametrize("stage", ["open", "load"])
def test_every_foreign_exception_is_mapped(
    error: Exception, code: str, stage: str, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> Any:
        raise error

    if stage == "open":
        monkeypatch.setattr(Image, "open", fail)
    else:
        monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(ItemError) as caught:
        decode(str(golden / "images" / "jpeg_420.jpg"))
    assert caught.value.code == code
    assert caught.value.message


def test_interrupts_pass_the_seam(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Image, "open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode(str(golden / "images" / "jpeg_420.jpg"))


def test_pillow_log_lines_reach_nobody() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in logging.getLogger("PIL").handlers)


def test_codec_versions_name_pillow_and_its_libraries() -> None:
    versions = codec_versions()
    assert versions["pillow"]
    assert versions["libjpeg_turbo"]


def test_a_library_without_a_version_is_an_error_and_no_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import features

    asked = features.version
    monkeypatch.setattr(features, "version", lambda name: None if name == "littlecms2" else asked(name))
    with pytest.raises(LibraryRefuses, match=r"littlecms2 .* cannot say its version"):
        codec_versions()


# --- hostile files ------------------------------------------------------------------------------------------------

MUTATIONS = 2000


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The bytes with a few of them changed, removed, repeated, or the end cut off."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        if not data:
            break
        # Headers first: most of what a decoder trusts stands in the first bytes.
        at = chance.randrange(min(len(data), 200) if chance.random() < 0.6 else len(data))
        kind = chance.randrange(5)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at : at + 4] = chance.choice([b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff"])
        elif kind == 2:
            del data[at : at + chance.randint(1, 30)]
        elif kind == 3:
            data[at:at] = data[at : at + chance.randint(1, 30)]
        else:
            del data[max(1, at) :]
    return bytes(data)


def test_mutated_files_only_ever_give_item_errors(tmp_path: Path) -> None:
    chance = random.Random(20)
    files = sorted(path for path in (GOLDEN / "images").iterdir() if path.is_file())
    seeds = [path.read_bytes() for path in files if 100 < path.stat().st_size < 20_000]
    path, opened = tmp_path / "mutated", 0
    for number in range(MUTATIONS):
        path.write_bytes(mutated(seeds[number % len(seeds)], chance))
        for step in (probe, decode):
            with contextlib.suppress(ItemError):
                step(str(path), 1_000_000)
                opened += 1
    assert 200 < opened < 2 * MUTATIONS


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def png(width: int, height: int, *chunks: bytes) -> bytes:
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    rows = zlib.compress(bytes(2))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + b"".join(chunks) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


BOMB = zlib.compress(bytes(200_000_000), 9)


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (png(65_535, 65_535), {"too_many_pixels"}),
        (png(2**31 - 1, 2**31 - 1), {"too_many_pixels"}),
        (png(1, 1, chunk(b"zTXt", b"a\x00\x00" + BOMB)), {"corrupt", None}),
        (png(1, 1, chunk(b"iTXt", b"a\x00\x01\x00\x00\x00" + BOMB)), {"corrupt", None}),
        (png(1, 1, chunk(b"iCCP", b"a\x00\x00" + BOMB)), {"corrupt", None}),
        (png(9000, 9000), {"truncated", "corrupt"}),
    ],
)
def test_bombs_and_lying_headers_take_little_memory(content: bytes, codes: set[str | None], tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "a.png").write_bytes(content)
    tracemalloc.start()
    try:
        decode(str(tmp_path / "a.png"))
        code = None
    except ItemError as error:
        code = error.code
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code in codes
    assert peak < 100_000_000
