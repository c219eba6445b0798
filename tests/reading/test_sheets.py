"""pictures.py: runs and shards on a page, bounded whatever it holds, and harmless whatever its ids are."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from conftest import Run, Silent, picture, shard_format, write_manifest
from PIL import Image, ImageFont

from kimik3_prep.errors import InputError, StoreError
from kimik3_prep.output.shard_file import ShardWriter
from kimik3_prep.reading import pictures as sheets
from kimik3_prep.reading.pictures import Entry, ShardSource, make_thumbnail, render
from kimik3_prep.run.prepare import Settings, prepare

METADATA = {"format": 1, "dtype": "uint8", "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_size": 2}
NASTY = "\x1b[31m\n\u202e" + "x" * 70_000 + "\U0001f600 end"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard in every dtype: an image that fits, named twice, one of many tokens, a long one, a nasty id."""
    folder = tmp_path_factory.mktemp("sheets")
    rows: list[dict[str, Any]] = []
    for number, (width, height) in enumerate([(50, 28), (1200, 900), (9000, 20), (30, 30)]):
        picture(width, height, "RGB", number + 2).save(folder / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png"})
    rows[3]["id"] = NASTY
    rows += [{"id": "again", "image": "0.png"}, {"id": "gone", "image": "gone.png"}]
    manifest = write_manifest(folder / "m.jsonl", rows)
    for dtype in ("float32", "bfloat16", "float16", "uint8"):
        prepare(Settings(str(manifest), folder / dtype, "kimi-k3", "cpu", dtype), Silent())
    return folder


def shard_of(path: Path, grids: list[tuple[int, int, int]], **metadata: Any) -> Path:
    """A uint8 shard of random levels, without an index."""
    patches = sum(math.prod(grid) for grid in grids)
    writer = ShardWriter(path, shard_format("uint8", 14, {**METADATA, **metadata}), len(grids), patches)
    os.pwrite(writer.descriptor, np.random.default_rng(0).bytes(patches * 588), writer.offset(0))
    starts = np.cumsum([0, *map(math.prod, grids)]).tolist()
    writer.finish([(grid, start, math.prod(grid)) for grid, start in zip(grids, starts, strict=False)])
    return path


def pixels(path: Path | str) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.asarray(image)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
def test_a_small_image_is_enlarged_and_its_levels_are_there(made: Path, tmp_path: Path, dtype: str) -> None:
    (sheet,) = render(made / dtype / "shards" / "cpu-00000.safetensors", tmp_path, first=1, grid=True)
    assert sheet.path == str(tmp_path / "cpu-00000-01.png")
    shown = pixels(sheet.path)
    assert shown.shape == (256 + 3 * 17 + 2 * 16, 256 + 2 * 16, 3)
    levels = reference.levels(Image.open(made / "0.png"), reference.PUBLISHED)  # 2 x 4 patches
    whole = levels.reshape(2, 4, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 56, 3)
    x, y = 16 + (256 - 4 * 56) // 2, 16 + 256 - 4 * 28  # four times as large, in the middle, at the bottom
    thumbnail = shown[y : y + 4 * 28, x : x + 4 * 56]
    seen = thumbnail[2::4, 2::4]
    assert np.array_equal(seen[:, :50], whole[:, :50])
    assert (thumbnail[:, 28 * 4] != np.repeat(whole[:, 28], 4, axis=0)).any(axis=1).all()  # the line between its tokens
    striped = (thumbnail[:, 200:] == (255, 170, 0)).all(axis=2)
    assert 0.25 < striped.mean() < 0.45
    assert not (thumbnail[:, :200] == (255, 170, 0)).all(axis=2).any()


def test_a_page_of_all(made: Path, tmp_path: Path) -> None:
    shard = made / "uint8" / "shards" / "cpu-00000.safetensors"
    (sheet,) = render(shard, tmp_path)
    assert str(sheet) == f"{tmp_path / 'cpu-00000-01.png'}: 1104 x 339, 4 images from row 0"
    assert pixels(sheet.path).shape == (339, 1104, 3)
    (some,) = render(shard, tmp_path, [NASTY, "again"])
    assert (some.rows, pixels(some.path).shape) == ((3, 0), (339, 560, 3))


def test_ids_that_are_not_in_the_shard_are_all_named(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        render(made / "uint8" / "shards" / "cpu-00000.safetensors", tmp_path / "new", ["n0", "gone", "x", "y"])
    assert [problem.what.split(" in ")[0] for problem in caught.value.problems] == [
        *('no stored image "gone"', 'no stored image "x"', 'no stored image "y"')
    ]
    assert not (tmp_path / "new").exists()


def test_many_images_are_pages_of_twenty(tmp_path: Path) -> None:
    shard = shard_of(tmp_path / "cpu-00007.safetensors", [(1, 2, 2)] * 45)
    pages = render(shard, tmp_path / "png", first=1000)
    assert [Path(page.path).name for page in pages] == [f"cpu-00007-0{number}.png" for number in (1, 2, 3)]
    assert [len(page.rows) for page in pages] == [20, 20, 5]
    assert [row for page in pages for row in page.rows] == list(range(45))
    assert pixels(pages[0].path).shape == (4 * 323 + 16, 5 * 272 + 16, 3)
    assert len(render(shard, tmp_path / "png")) == 1


def test_lines_keep_their_distance_and_strips_are_cut(tmp_path: Path) -> None:
    """A line for each of 256 tokens would be all there is to see, and a strip of 256 pixels a hair."""
    source = ShardSource(shard_of(tmp_path / "cpu-00000.safetensors", [(1, 2, 512), (1, 512, 2), (1, 40, 40)]))
    small = [make_thumbnail(source.pixels(entry)[0], source, (0, 0), 256, True) for entry in source.entries((), 3)]
    assert [thumbnail.note for thumbnail in small] == [
        *["cut into 16 pieces"] * 2,
        "",
    ]
    assert small[0].image.size == small[1].image.size[::-1]
    assert min(small[0].image.size) > 128


def test_the_pieces_of_a_strip_are_in_reading_order() -> None:
    class Nothing:
        patch_size, merge_size = 14, 2

    strip = np.zeros((10, 160, 3), np.uint8)
    strip[:, :, 0] = np.arange(160)  # redder and redder to the right
    for turned in (False, True):
        pixels = strip.swapaxes(0, 1) if turned else strip
        thumbnail = make_thumbnail(pixels, Nothing(), (0, 0), 256, False)  # type: ignore[arg-type]
        assert thumbnail.note == "cut into 4 pieces"
        shown = np.asarray(thumbnail.image)
        shown = shown.swapaxes(0, 1) if turned else shown
        assert shown.shape == (4 * 40 + 6, 160, 3)
        assert [shown[line, 0, 0] for line in (0, 42, 84, 126)] == [0, 40, 80, 120]
        assert (shown[40:42] == 245).all()


def test_a_sheet_of_a_run_shows_failed_items_and_no_lines(made: Path, tmp_path: Path) -> None:
    (sheet,) = render(made / "uint8", tmp_path, sheets=True)
    assert str(sheet) == f"{tmp_path / 'items-01.png'}: 1376 x 662, 6 images from row 0, 1 of them failed"
    shown = pixels(sheet.path)
    (marked,) = render(made / "uint8", tmp_path / "grid", sheets=True, grid=True)
    stripes = [(image == (255, 170, 0)).all(axis=2).sum() for image in (shown, pixels(marked.path))]
    assert stripes[0] < 100 < 1000 < stripes[1]
    assert tuple(shown[16 + 323 + 200, 16 + 200]) == (240, 205, 205)  # where the sixth item's picture would be
    (some,) = render(made / "uint8", tmp_path, ["gone", "again"], sheets=True)
    assert (some.rows, some.failed) == ((5, 4), 1)  # type: ignore[union-attr]
    with pytest.raises(InputError, match='no item "nobody"'):
        render(made / "uint8", tmp_path, ["gone", "nobody"], sheets=True)


@pytest.mark.parametrize(
    ("entry", "label"),
    [
        (Entry(row=0, tokens=1), "1 token"),
        (Entry(row=0, tokens=2000, size=(9000, 20), new_size=(7168, 15)), "9000 x 20 to 7168 x 15, 2,000 tokens"),
        (Entry(row=0, tokens=4, size=(50, 28), new_size=(50, 28)), "50 x 28, 4 tokens"),
    ],
)
def test_a_label_says_size_and_tokens(entry: Entry, label: str) -> None:
    assert sheets._size_label(entry) == label


@pytest.mark.parametrize(
    "id", [NASTY, "x" * 70_000, "\u202e\u200f", "\x00\r\n\t\x9b", "图片" * 100, "W" * 400, "", "plain"]
)
@pytest.mark.parametrize("rows", [0, 1, 1_000_001])
def test_a_caption_is_short_and_harmless(id: str, rows: int) -> None:
    font = ImageFont.load_default(13)
    text = sheets._caption(Entry(row=123_456, id=id, more_ids=max(0, rows - 1)), font)
    assert text.isascii()
    assert text.isprintable()
    assert font.getlength(text) <= 256
    assert text.startswith("123456")
    assert text.endswith("+1000000") is (rows > 1)
    if id == "plain":
        assert text.startswith("123456: plain")
    if id.startswith("W"):
        assert "WWWW...WW" in text


def test_a_shard_without_its_index(tmp_path: Path) -> None:
    shard = shard_of(tmp_path / "cpu-00000.safetensors", [(1, 2, 2), (1, 4, 2)])
    (sheet,) = render(shard, tmp_path / "png")
    assert sheet.rows == (0, 1)
    with pytest.raises(InputError, match="no id is known"):
        render(shard, tmp_path / "png", ["a"])
    assert render(shard_of(tmp_path / "empty.safetensors", []), tmp_path / "png") == []


@pytest.mark.parametrize(
    ("grids", "metadata", "words"),
    [
        ([(1, 2, 2), (1, 2, 4)], {}, "its grids come to 12 patches, it holds 10"),
        ([(1, 2, 2), (1, 2, 2**62)], {}, "its grids come to"),
        ([(1, 2, 2), (1, -2, -3)], {}, r"a grid is not \[1, rows, columns\]"),
        ([(5, 2, 1), (0, 2, 3)], {}, r"a grid is not \[1, rows, columns\]"),
        ([(1, 2, 2), (2, 3, 1)], {}, r"a grid is not \[1, rows, columns\]"),
        ([(1, 2, 2), (1, 2, 3)], {"merge_size": None}, "does not say its merge_size"),
        ([(1, 2, 2), (1, 2, 3)], {"merge_size": 0}, "its merge_size is 0, not a whole number"),
        ([(1, 2, 2), (1, 2, 3)], {"merge_size": -1}, "its merge_size is -1, not"),
        ([(1, 2, 2), (1, 2, 3)], {"image_mean": "x"}, 'its image_mean is "x", not three finite numbers'),
        ([(1, 2, 2), (1, 2, 3)], {"image_std": [0.5, 0, 0.5]}, "not three finite numbers above 0"),
    ],
)
def test_a_damaged_shard_is_said(
    tmp_path: Path, grids: list[tuple[int, int, int]], metadata: dict[str, Any], words: str
) -> None:
    form = shard_format("uint8", 14, {key: value for key, value in (METADATA | metadata).items() if value is not None})
    writer = ShardWriter(tmp_path / "cpu-00000.safetensors", form, 2, 10)
    writer.finish([(grids[0], 0, 4), (grids[1], 4, 6)])
    with pytest.raises(InputError, match=words):
        render(tmp_path / "cpu-00000.safetensors", tmp_path / "png")


def test_the_command(made: Path, tmp_path: Path, run: Run) -> None:
    shard = made / "float16" / "shards" / "cpu-00000.safetensors"
    done = run("inspect", shard, "--render", "png", "--first", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "png/cpu-00000-01.png: 832 x 339, 3 images from row 0"
    shown = json.loads(run("inspect", shard, "--render", "png", "--id", "n1", "--format", "json").stdout)
    assert shown["pictures"] == [
        {"path": "png/cpu-00000-01.png", "width": 288, "height": 339, "rows": [1], "failed": 0, "strays": 0}
    ]
    marked = run("inspect", made / "uint8", "--render", "png", "--id", "n0", "--grid")
    assert marked.stdout.splitlines()[-1] == "png/000000-n0-grid.png: 56 x 28, zero padding hatched: 6 right, 0 below"
    refused = run("inspect", shard, "--render", "png", "--id", "nobody")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert 'no stored image "nobody"' in refused.stderr


def test_a_folder_gives_pictures(made: Path, tmp_path: Path) -> None:
    (found,) = render(made / "uint8", tmp_path, first=1)
    assert found.path == str(tmp_path / "000000-n0.png")
    with pytest.raises((InputError, StoreError)):
        render(tmp_path / "nothing.safetensors", tmp_path)
