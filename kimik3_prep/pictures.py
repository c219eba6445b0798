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

from kimik3_prep.disk import write_whole
from kimik3_prep.errors import FailedItem, InputError, Problem
from kimik3_prep.levels import level_table, levels_of, stored_table
from kimik3_prep.reading import StoredRun

_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)
_MOST_OF_AN_ID = 80  # letters of an id in a file name


@dataclass(frozen=True, slots=True)
class Picture:
    """One PNG that was written. width, height: its pixels. padding: columns right and rows below that were cut off.

    strays: values that are no level, which features made elsewhere may hold; the nearest level is shown.
    """

    id: str
    path: str
    width: int
    height: int
    padding: tuple[int, int]
    strays: int

    def __str__(self) -> str:
        text = f"{self.path}: {self.width} x {self.height}"
        if any(self.padding):
            text += f", zero padding cut off: {self.padding[0]} right, {self.padding[1]} below"
        return text + (f", {self.strays:,} values are no level: the nearest is shown" if self.strays else "")


def render(root: Path, folder: Path, ids: Sequence[str] = (), first: int = 20) -> list[Picture]:
    """Write items of a finished run into `folder` as PNG: those of `ids`, else the `first` ones that are ok.

    A file is named after manifest row and id. Raises InputError for a folder that is no finished run and with every id
    that has no features, before anything is written; StoreError, RunError.
    """
    run = StoredRun(root)
    rows = _rows(run, ids) if ids else [int(row) for row in run.ok[:first]]
    stored = stored_table(level_table(run.mean, run.std), run.dtype)
    return [_write(run, row, stored, folder) for row in rows]


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


def _write(run: StoredRun, row: int, stored: npt.NDArray[np.float32], folder: Path) -> Picture:
    about = run.values(row)
    pixels, strays = _pixels(run, row, stored)
    height, width = pixels.shape[:2]
    padding = about["pad_width"] or 0, about["pad_height"] or 0  # null for features made elsewhere
    pixels = pixels[: height - padding[1], : width - padding[0]]
    name = f"{row:06d}-{_UNSAFE.sub('_', about['id'])[:_MOST_OF_AN_ID]}.png"
    image = Image.fromarray(np.ascontiguousarray(pixels), "RGB")
    write_whole(folder / name, lambda path: image.save(path, "PNG"))
    return Picture(about["id"], str(folder / name), image.width, image.height, padding, strays)


def _pixels(run: StoredRun, row: int, stored: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], int]:
    """The levels of an item as a picture, uint8 `[h * p, w * p, 3]`, and how many values are none."""
    patches, rows, cols, side = run.patches([row]), int(run.grid_h[row]), int(run.grid_w[row]), run.patch_size
    picture = np.empty((rows, side, cols, side, 3), np.uint8)
    strays = 0
    for number in range(rows):  # a row of patches at a time: the search takes many times its bytes
        levels, found = _levels(patches[number * cols : (number + 1) * cols], run.dtype, stored)
        picture[number] = levels.transpose(2, 0, 3, 1)
        strays += found
    return picture.reshape(rows * side, cols * side, 3), strays


def _levels(
    patches: npt.NDArray[Any], dtype: str, stored: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.uint8], int]:
    if dtype == "uint8":
        return patches, 0
    if dtype == "bfloat16":
        return levels_of((patches.astype(np.uint32) << 16).view(np.float32), stored)
    return levels_of(patches.astype(np.float32), stored)
