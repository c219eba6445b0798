"""formats.py: extra formats are read where a run asks for them, and nowhere else."""

from __future__ import annotations

import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from conftest import encode, picture, write_manifest
from PIL import Image, ImageFile

from kimik3_prep.errors import InputError, ItemError, LibraryRefuses
from kimik3_prep.images import decode as decoding
from kimik3_prep.images.decode import codec_versions, decode, probe
from kimik3_prep.images.formats import EXTRAS, jxl_size, parse_formats

HEIC = b"\0\0\0\x18ftypheic" + bytes(20)


class StubImage(ImageFile.ImageFile):
    """Reads every file as a picture of 6 x 4 gray pixels."""

    format = "HEIF"

    def _open(self) -> None:
        self._size, self._mode = (6, 4), "L"
        self.tile = [ImageFile._Tile("raw", (0, 0, 6, 4), 8, "L")]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A HEIF plugin that happens to be installed, and has put itself into Pillow's tables."""
    plugin = types.ModuleType("pillow_heif")
    plugin.HeifImageFile = StubImage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    monkeypatch.setitem(Image.OPEN, "HEIF", (StubImage, None))
    monkeypatch.setattr(Image, "ID", [*Image.ID, "HEIF"])


def test_what_the_option_takes() -> None:
    assert parse_formats("+jxl,+heif") == parse_formats("heif, JXL,") == ("heif", "jxl")
    assert parse_formats("") == ()
    with pytest.raises(InputError, match=r"'eps' is no format to add; expected \+heif, \+jxl"):
        parse_formats("+heif,+eps")


@pytest.mark.usefixtures("stub")
def test_a_plugin_that_happens_to_be_installed_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.heic"
    path.write_bytes(HEIC)
    versions = codec_versions()
    for look in (probe, decode):
        with pytest.raises(ItemError, match=r"unidentified: a HEIC photograph; --formats \+heif reads it"):
            look(str(path))  # type: ignore[operator]
    decoded, header = decode(str(path), formats=("heif",)), probe(str(path), formats=("heif",))
    assert (decoded.format, decoded.image.size, (header.width, header.height)) == ("HEIF", (6, 4), (6, 4))
    assert decoded.image.tobytes() == HEIC[8:32]
    with pytest.raises(ItemError, match="unidentified"):
        decode(str(path))
    assert codec_versions() == versions
    picture(30, 20).save(tmp_path / "a.png")
    assert decode(str(tmp_path / "a.png"), formats=("heif",)).format == "PNG", "Pillow's own formats come first"


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_is_said_with_what_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, EXTRAS[name].packages[1], None)
    picture(30, 20).save(tmp_path / "a.png")
    for ask in (
        lambda: codec_versions((name,)),
        lambda: decode(str(tmp_path / "a.png"), formats=(name,)),
        lambda: probe(str(tmp_path / "a.png"), formats=(name,)),
    ):
        with pytest.raises(InputError) as caught:
            ask()
        (problem,) = caught.value.problems
        assert problem.hint == f"pip install 'kimik3-prep[{name}]'"
    assert decode(str(tmp_path / "a.png")).format == "PNG"


@pytest.mark.parametrize("options", [{}, {"index_only": True}])
def test_a_missing_package_is_said_before_any_work(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    picture(30, 20).save(tmp_path / "a.png")
    manifest = write_manifest(tmp_path / "m.jsonl", [{"id": "a", "image": "a.png"}])
    with pytest.raises(InputError, match=r"pip install 'kimik3-prep\[heif\]'"):
        encode(manifest, tmp_path / "out", formats=("heif",), **options)
    assert not (tmp_path / "out").exists()


def test_pictures_of_both_packages_in_a_run(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    pytest.importorskip("pillow_jxl")
    for name in EXTRAS:
        import_plugin(name)
        picture(64, 40).save(tmp_path / f"a.{name}", EXTRAS[name].pillow_name)
    rows = [{"id": name, "image": f"a.{name}"} for name in EXTRAS]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    plain, both = encode(manifest, tmp_path / "plain"), encode(manifest, tmp_path / "both", formats=("heif", "jxl"))
    assert (plain.failed, both.failed) == (2, 0)
    facts = json.loads((tmp_path / "both" / "run.json").read_text())["facts"]
    assert facts["formats"] == ["heif", "jxl"]
    assert {"pillow-heif", "pillow-jxl-plugin"} <= facts["decoders"].keys()
    assert "formats" not in json.loads((tmp_path / "plain" / "run.json").read_text())["facts"]


def test_a_library_that_cannot_be_loaded_is_no_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoding.import_module

    def refuse(name: str) -> Any:
        if name == "PIL._webp":
            raise ImportError("failed to map segment from shared object")
        return real(name)

    monkeypatch.setattr(decoding, "import_module", refuse)
    with pytest.raises(LibraryRefuses, match=r"PIL\._webp cannot be used.*failed to map segment"):
        codec_versions()


# --- sizes of JPEG XL ---------------------------------------------------------------------------------------------


def bits(*fields: tuple[int, int]) -> bytes:
    """A codestream's head: each field is a value and its number of bits, the lowest bit first."""
    value = place = 0
    for number, count in fields:
        value |= number << place
        place += count
    return b"\xff\x0a" + value.to_bytes(16, "little")


def box(kind: bytes, content: bytes) -> bytes:
    return (8 + len(content)).to_bytes(4, "big") + kind + content


LARGE = bits((0, 1), (3, 2), (69_999, 30), (0, 3), (2, 2), (199_999, 18))
CONTAINER = b"\0\0\0\x0cJXL \x0d\x0a\x87\x0a" + box(b"ftyp", b"jxl \0\0\0\0jxl ") + box(b"Exif", bytes(50))


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (bits((1, 1), (3, 5), (0, 3), (7, 5)), (64, 32)),
        (bits((1, 1), (3, 5), (1, 3)), (32, 32)),
        (bits((0, 1), (0, 2), (299, 9), (3, 3)), (400, 300)),
        (LARGE, (200_000, 70_000)),
        (CONTAINER + box(b"jxlc", LARGE), (200_000, 70_000)),
        (CONTAINER + box(b"jxlp", bytes(4) + LARGE), (200_000, 70_000)),
        (CONTAINER, None),
        (CONTAINER[:30], None),
        (b"", None),
        (b"\x89PNG\r\n\x1a\n" + bytes(20), None),
        (CONTAINER[:12] + bytes(100), None),
    ],
)
def test_the_size_stands_in_the_head(content: bytes, size: tuple[int, int] | None) -> None:
    assert jxl_size(io.BytesIO(content)) == size


def test_a_jxl_picture_with_too_many_pixels_never_reaches_its_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Greedy(ImageFile.ImageFile):
        def _open(self) -> None:
            raise AssertionError

    plugin = types.ModuleType("pillow_jxl.JpegXLImagePlugin")
    plugin.JXLImageFile = Greedy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pillow_jxl", types.ModuleType("pillow_jxl"))
    monkeypatch.setitem(sys.modules, "pillow_jxl.JpegXLImagePlugin", plugin)
    monkeypatch.setitem(Image.OPEN, "JXL", (Greedy, None))  # decode puts it there: it must not stay
    (tmp_path / "a.jxl").write_bytes(LARGE)
    for look in (probe, decode):
        with pytest.raises(ItemError, match="too_many_pixels: 200,000 x 70,000 pixels"):
            look(str(tmp_path / "a.jxl"), formats=("jxl",))  # type: ignore[operator]


# --- the packages themselves, where they are installed ------------------------------------------------------------


@pytest.mark.parametrize(("name", "package"), [("heif", "pillow_heif"), ("jxl", "pillow_jxl")])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_a_picture_of_the_package_itself(name: str, package: str, mode: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    import_plugin(name)
    path = tmp_path / f"a.{name}"
    lossless = {"heif": {"quality": -1, "chroma": 444}, "jxl": {"lossless": True}}[name]
    picture(64, 40, mode).save(path, EXTRAS[name].pillow_name, **lossless)
    with Image.open(path) as image:
        expected = image.tobytes()
    header, decoded = probe(str(path), formats=(name,)), decode(str(path), formats=(name,))
    assert (header.width, header.height) == decoded.image.size == (64, 40)
    assert decoded.image.tobytes() == expected
    assert EXTRAS[name].packages[0] in codec_versions((name,))
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            decode(str(path), formats=(name,))
        except ItemError:
            continue


def import_plugin(name: str) -> None:
    if name == "heif":
        import pillow_heif

        pillow_heif.register_heif_opener()
    else:
        import pillow_jxl.JpegXLImagePlugin  # noqa: F401
