"""pictures.py: features back to pictures, exactly, and the command that does it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import reference
from conftest import Run, Silent, picture, write_manifest
from PIL import Image

from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import InputError, RunError
from kimik3_prep.reading.pictures import render
from kimik3_prep.run.prepare import Settings, prepare

NAMES = ["rgb", "rgba", "a/../b c\n", "panorama", "local"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in every dtype: padded, exactly fitting, resized and local items, and one that failed."""
    folder = tmp_path_factory.mktemp("pictures")
    rows: list[dict[str, Any]] = []
    sizes = [(50, 61, "RGB"), (56, 28, "RGBA"), (33, 90, "L"), (9000, 20, "P")]
    for number, (width, height, mode) in enumerate(sizes):
        picture(width, height, mode, number).save(folder / f"{number}.png")
        rows.append({"id": NAMES[number], "image": f"{number}.png"})
    np.save(folder / "local.npy", np.arange(8 * 588, dtype=np.uint8).reshape(8, 3, 14, 14))
    rows.insert(2, {"id": "gone", "image": "gone.png"})
    rows.append({"id": "local", "features": "local.npy", "grid_thw": [1, 2, 4]})
    manifest = write_manifest(folder / "m.jsonl", rows)
    for dtype in DTYPES:
        prepare(Settings(str(manifest), folder / dtype, "kimi-k3", "cpu", dtype, shard_size=200_000), Silent())
    return folder


def pixels(path: Path | str) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.asarray(image)


def whole(levels: np.ndarray[Any, Any], rows: int, cols: int) -> np.ndarray[Any, Any]:
    """Patches put together, one by one."""
    out = np.zeros((rows * 14, cols * 14, 3), np.uint8)
    for number, patch in enumerate(levels):
        y, x = number // cols * 14, number % cols * 14
        out[y : y + 14, x : x + 14] = np.moveaxis(patch, 0, 2)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_pictures_are_the_levels_the_model_is_given(made: Path, tmp_path: Path, dtype: str) -> None:
    pictures = render(made / dtype, tmp_path / "new" / "folder")
    assert [found.id for found in pictures] == NAMES
    files = [Path(found.path).name for found in pictures]
    assert files == [f"00000{n}.png" for n in ("0-rgb", "1-rgba", "3-a_.._b_c_", "4-panorama", "5-local")]
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == files
    for number, found in enumerate(pictures[:4]):
        image = Image.open(made / f"{number}.png")
        size = reference.grid(*image.size, reference.PUBLISHED)
        levels = whole(reference.levels(image, reference.PUBLISHED), size["rows"], size["cols"])
        shown = pixels(found.path)
        assert np.array_equal(shown, levels[: size["new_h"], : size["new_w"]]), found.id
        assert (found.width, found.height, found.padding) == (*shown.shape[1::-1], (size["pad_w"], size["pad_h"]))
        assert found.strays == 0
    local = np.load(made / "local.npy")
    assert np.array_equal(pixels(pictures[4].path), whole(local, 2, 4))
    assert pictures[4].padding == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_marked_picture_is_the_levels_between_the_marks(made: Path, tmp_path: Path, dtype: str) -> None:
    """Lines at every 14th pixel, stronger ones at every 28th, stripes over the padding; all else is as it is."""
    (found,) = render(made / dtype, tmp_path, ["rgb"], grid=True)
    assert (Path(found.path).name, found.marked, found.padding) == ("000000-rgb-grid.png", True, (6, 23))
    assert str(found) == f"{found.path}: 56 x 84, zero padding hatched: 6 right, 23 below"
    levels = whole(reference.levels(Image.open(made / "0.png"), reference.PUBLISHED), 6, 4)
    shown = pixels(found.path)
    y, x = np.mgrid[:84, :56]
    line = ((y % 14 == 0) & (y > 0)) | ((x % 14 == 0) & (x > 0))
    padded = (x >= 50) | (y >= 61)
    assert np.array_equal(shown[~line & ~padded], levels[~line & ~padded])
    stripe = padded & ((x + y) % 6 < 2)
    assert (shown[stripe & ~line] == (255, 170, 0)).all()
    assert np.array_equal(shown[padded & ~stripe & ~line], levels[padded & ~stripe & ~line])
    for place, strength in ((14, 0.3), (28, 0.3 + 0.7 * 0.75)):
        mixed = levels[place, 1:14] * (1 - strength) + np.array([255, 0, 110]) * strength
        assert np.abs(shown[place, 1:14] - mixed).max() <= 1
        assert (shown[1:14, place] != levels[1:14, place]).any()


def test_what_a_picture_says(made: Path, tmp_path: Path) -> None:
    told = [str(found) for found in render(made / "uint8", tmp_path)]
    assert told[0] == f"{tmp_path / '000000-rgb.png'}: 50 x 61, zero padding cut off: 6 right, 23 below"
    assert told[1] == f"{tmp_path / '000001-rgba.png'}: 56 x 28"


def test_the_first_ones_or_those_that_are_named(made: Path, tmp_path: Path) -> None:
    assert [found.id for found in render(made / "float16", tmp_path, first=3)] == NAMES[:3]
    assert [found.id for found in render(made / "float16", tmp_path, ["local", "rgb"], first=1)] == ["local", "rgb"]


def test_ids_without_features_are_all_named_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        render(made / "uint8", tmp_path / "out", ["rgb", "gone", "nobody"])
    told = [problem.what for problem in caught.value.problems]
    assert told[1:] == ['no item "nobody" in the run']
    assert told[0].startswith("line 3, gone has no features: not_found: ")
    assert not (tmp_path / "out").exists()


def test_values_that_are_no_level_are_counted(made: Path, tmp_path: Path) -> None:
    values = np.zeros((4, 3, 14, 14), np.float32) - 1
    values[0, 0, 0, :5] = [0.3, 7, -0.999, 1, -1]
    np.save(tmp_path / "odd.npy", values)
    row = {"id": "odd", "features": "odd.npy", "grid_thw": [1, 2, 2]}
    manifest = write_manifest(tmp_path / "m.jsonl", [row])
    prepare(Settings(str(manifest), tmp_path / "out", "kimi-k3", "cpu"), Silent())
    (found,) = render(tmp_path / "out", tmp_path / "png")
    assert found.strays == 3
    assert str(found).endswith("28 x 28, 3 values are no level: the nearest is shown")
    assert pixels(found.path)[0, :5, 0].tolist() == [166, 255, 0, 255, 0]


def test_a_folder_that_cannot_be_made_is_a_run_error(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        render(made / "uint8", tmp_path / "file", first=1)


def test_the_command(made: Path, tmp_path: Path, run: Run) -> None:
    done = run("inspect", made / "bfloat16", "--render", "png", "--first", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2:] == [
        "png/000000-rgb.png: 50 x 61, zero padding cut off: 6 right, 23 below",
        "png/000001-rgba.png: 56 x 28",
    ]
    shown = run("inspect", made / "uint8", "--render", "png", "--id", "local", "--id", "rgb", "--format", "json")
    found = json.loads(shown.stdout)
    assert found["kind"] == "output"
    assert found["pictures"][1] == {
        **{"id": "rgb", "path": "png/000000-rgb.png", "width": 50, "height": 61},
        **{"padding": [6, 23], "strays": 0, "marked": False},
    }
    assert np.array_equal(pixels(tmp_path / "png" / "000005-local.png"), whole(np.load(made / "local.npy"), 2, 4))
    for arguments, what in [
        ([made / "uint8", "--id", "rgb"], "--id"),
        ([made / "uint8", "--grid"], "--grid"),
        ([made / "uint8", "--render", "png", "--id", "gone"], "line 3, gone has no features"),
        ([made / "uint8" / "index.parquet", "--render", "png"], "is a file"),
    ]:
        refused = run("inspect", *arguments)
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
        assert what in refused.stderr
        assert refused.stdout == ""


def test_rendering_needs_no_torch(made: Path, tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from kimik3_prep.reading.pictures import render
render(Path(sys.argv[1]), Path(sys.argv[2]), first=1)
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, made / "bfloat16", tmp_path], check=True)
    assert pq.read_table(made / "bfloat16" / "index.parquet")["id"][0].as_py() == "rgb"
