"""Stored features back to pictures, to look at: the levels exactly as the model is given them. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from kimik3_prep.checkpoint.levels import DTYPES, DType, Floats, Levels, level_table, nearest_levels
from kimik3_prep.disk import write_whole
from kimik3_prep.errors import FailedItem, InputError, Problem
from kimik3_prep.reading.stored import StoredRun

_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)
_MOST_OF_AN_ID = 80  # letters of an id in a file name


#: What marks a picture: token lines and patch lines, and stripes over the padding. None of them is a usual sight.
_LINE, _STRIPE = (255, 0, 110), (255, 170, 0)
TOKEN_LINE, PATCH_LINE = 0.75, 0.3  # how much of a line is its colour; the rest is the picture


@dataclass(frozen=True, slots=True)
class Picture:
    """One item as a PNG."""

    id: str
    """The item's id."""
    path: str
    """The PNG."""
    width: int
    """Its pixels."""
    height: int
    """Its pixels."""
    padding: tuple[int, int]
    """Columns of zero padding at the right, and rows of it below."""
    strays: int
    """Values that are no level. Features made elsewhere may hold some; the picture shows the nearest level."""
    marked: bool
    """The padding is hatched, and lines run between patches. Else the padding is cut off and every pixel is a level."""

    def __str__(self) -> str:
        text = f"{self.path}: {self.width} x {self.height}"
        if any(self.padding):
            what = "hatched" if self.marked else "cut off"
            text += f", zero padding {what}: {self.padding[0]} right, {self.padding[1]} below"
        return text + (f", {self.strays:,} values are no level: the nearest is shown" if self.strays else "")


@dataclass(frozen=True, slots=True)
class Sheet:
    """One contact sheet as a PNG."""

    path: str
    """The PNG."""
    width: int
    """Its pixels."""
    height: int
    """Its pixels."""
    rows: tuple[int, ...]
    """The rows of the shard's `grid_thws` that it shows."""
    strays: int
    """Values that are no level. Features made elsewhere may hold some; the picture shows the nearest level."""

    def __str__(self) -> str:
        text = f"{self.path}: {self.width} x {self.height}, "
        text += f"row {self.rows[0]}" if len(self.rows) == 1 else f"{len(self.rows)} images from row {self.rows[0]}"
        return text + (f", {self.strays:,} values are no level: the nearest is shown" if self.strays else "")


def render(root: Path, folder: Path, ids: Sequence[str] = (), first: int = 20, grid: bool = False) -> list[Picture]:
    """Write items of a finished run into `folder` as PNG: those of `ids`, else the `first` ones that are ok.

    A file is named after manifest row and id. grid: with the padding and lines between patches and tokens, as
    `…-grid.png`. Raises InputError for a folder that is no finished run and with every id that has no features, before
    anything is written; StoreError, RunError.
    """
    run = StoredRun(root)
    rows = _rows(run, ids) if ids else [int(row) for row in run.ok[:first]]
    entries = entries_of(run.mean, run.std, DTYPES[run.dtype])
    return [_write(run, row, entries, folder, grid) for row in rows]


def _rows(run: StoredRun, ids: Sequence[str]) -> list[int]:
    rows, problems = [], []
    for name in ids:
        try:
            rows.append(run.ready(name))
        except KeyError:
            problems.append(Problem("--id", f"no item {name!r} in {run.layout.root}"))
        except FailedItem as error:
            problems.append(Problem("--id", str(error)))
    if problems:
        raise InputError(problems)
    return rows


def _write(run: StoredRun, row: int, entries: Floats, folder: Path, grid: bool) -> Picture:
    about = run.values(row)
    patches, dtype = run.patches([row]), DTYPES[run.dtype]
    pixels, strays = put_together(patches, int(run.grid_h[row]), int(run.grid_w[row]), dtype, entries)
    height, width = pixels.shape[:2]
    padding = about["pad_width"] or 0, about["pad_height"] or 0  # null for features made elsewhere
    if grid:
        hatch(pixels, *padding)
        draw_lines(pixels, run.patch_size, 1, PATCH_LINE)
        draw_lines(pixels, run.patch_size * run.merge_size, 1, TOKEN_LINE)
    else:
        pixels = pixels[: height - padding[1], : width - padding[0]]
    name = f"{row:06d}-{_UNSAFE.sub('_', about['id'])[:_MOST_OF_AN_ID]}{'-grid' * grid}.png"
    image = Image.fromarray(np.ascontiguousarray(pixels), "RGB")
    write_whole(folder / name, lambda file: image.save(file, "PNG"))
    return Picture(about["id"], str(folder / name), image.width, image.height, padding, strays, grid)


def entries_of(mean: Sequence[float], std: Sequence[float], dtype: DType) -> Floats:
    """What each level reads as from a shard, float32 `[3, 256]`."""
    return dtype.widen(dtype.of_levels(level_table(mean, std)))


def put_together(patches: npt.NDArray[Any], rows: int, cols: int, dtype: DType, entries: Floats) -> tuple[Levels, int]:
    """The levels of `[rows * cols, 3, p, p]` as a picture, uint8 `[rows * p, cols * p, 3]`, and how many are none.

    entries: from `entries_of`.
    """
    side = patches.shape[2]
    picture = np.empty((rows, side, cols, side, 3), np.uint8)
    strays = 0
    for number in range(rows):  # a row of patches at a time: the search takes many times its bytes
        levels, found = _levels(patches[number * cols : (number + 1) * cols], dtype, entries)
        picture[number] = levels.transpose(2, 0, 3, 1)
        strays += found
    return picture.reshape(rows * side, cols * side, 3), strays


def hatch(pixels: npt.NDArray[np.uint8], right: int, below: int) -> None:
    """Stripe the last columns and rows of a picture."""
    height, width = pixels.shape[:2]
    left, top = max(0, width - right), max(0, height - below)
    for part, start in ((pixels[:, left:], left), (pixels[top:], top)):  # a mask of all would outgrow the picture
        y, x = np.ogrid[: part.shape[0], : part.shape[1]]
        part[(x + y + start) % 6 < 2] = _STRIPE


def draw_lines(pixels: npt.NDArray[np.uint8], every: int, scale: float, strength: float) -> None:
    """A line between cells of `every` pixels, across and down, in a picture that was scaled by `scale`."""
    for axis in (0, 1):
        along = pixels if axis == 0 else pixels.swapaxes(0, 1)
        places = np.round(np.arange(every, len(along) / scale, every) * scale).astype(int)
        places = places[places < len(along)]
        mixed = (1 - strength) * along[places] + strength * np.array(_LINE)
        along[places] = mixed.round().astype(np.uint8)


def _levels(patches: npt.NDArray[Any], dtype: DType, entries: Floats) -> tuple[Levels, int]:
    return (patches, 0) if dtype.holds_levels else nearest_levels(dtype.widen(patches), entries)
