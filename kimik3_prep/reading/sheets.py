"""Contact sheets: what a shard holds on a page, each image with its tokens drawn in and its padding marked.

Needs no torch. One image at a time is in memory, however many the shard has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageDraw, ImageFont

from kimik3_prep.disk import write_whole
from kimik3_prep.errors import InputError, Problem
from kimik3_prep.manifest.report import show
from kimik3_prep.output.shard_file import Shard, open_shard
from kimik3_prep.output.tables import read_index
from kimik3_prep.reading import pictures

_COLUMNS, _ROWS = 5, 4
_SIDE = 256  # pixels of a thumbnail's longer side, at most
_MOST_LARGER = 4  # times that a small image is enlarged
_GAP = 16
_FONT_SIZE, _LEADING = 13, 17
_CLOSEST = 8  # pixels between two lines
_ABOUT = ("image_mean", "image_std", "merge_size")


@dataclass(frozen=True, slots=True)
class _Image:
    """A stored image. padding: columns right and rows below; ids: how many manifest rows name it, 0 where unknown."""

    row: int
    begin: int
    grid: tuple[int, int]
    padding: tuple[int, int]
    id: str
    ids: int


def render(
    path: Path, folder: Path, ids: Sequence[str] = (), first: int = 20, grid: bool = False
) -> Sequence[pictures.Sheet | pictures.Picture]:
    """Of a shard contact sheets of its first images, or those of `ids`; of an output folder `pictures.render`.

    Raises InputError, StoreError, RunError.
    """
    if path.suffix != ".safetensors" or not path.is_file():
        return pictures.render(path, folder, ids, first, grid)
    shard = open_shard(path)
    images = list(_images(shard, ids, first))
    pages = [images[at : at + _COLUMNS * _ROWS] for at in range(0, len(images), _COLUMNS * _ROWS)]
    digits = max(2, len(str(len(pages))))
    return [_write(shard, page, folder / f"{path.stem}-{n:0{digits}d}.png") for n, page in enumerate(pages, 1)]


# --- what to draw -------------------------------------------------------------------------------------------------


def _images(shard: Shard, ids: Sequence[str], first: int) -> Iterator[_Image]:
    """Raises InputError for ids that the shard does not hold, and for grids that are not those of its patches."""
    grids = np.asarray(shard.raw("grid_thws"))
    starts = _starts(shard, grids)
    beside = shard.path.with_suffix(".parquet")
    table = read_index(beside, ["id", "row", "pad_width", "pad_height"]) if beside.is_file() else None
    rows = _rows_of(shard, table, ids) if ids else list(range(min(first, len(grids))))
    told: dict[int, dict[str, Any]] = {}
    if table is not None:
        table = table.filter(pc.is_in(table["row"], pa.array(rows, pa.int64())))
        wanted = [("id", "first"), ("id", "count"), ("pad_width", "max"), ("pad_height", "max")]
        grouped = table.group_by("row", use_threads=False).aggregate(wanted)
        told = {row["row"]: row for row in grouped.to_pylist()}
    for row in rows:
        about = told.get(row, {})
        padding = about.get("pad_width_max") or 0, about.get("pad_height_max") or 0
        grid = int(grids[row, 1]), int(grids[row, 2])
        yield _Image(row, starts[row], grid, padding, about.get("id_first") or "", about.get("id_count", 0))


def _starts(shard: Shard, grids: npt.NDArray[Any]) -> list[int]:
    """The first patch of each image."""
    _, _, height, width = shard.tensors["pixel_values"].shape
    missing = [name for name in _ABOUT if name not in shard.metadata]
    starts = [0]
    for grid in grids.tolist():  # Python's integers do not overflow
        starts.append(starts[-1] + math.prod(grid))
    if missing:
        what = f"its metadata does not say its {missing[0]}"
    elif height != width or (grids.size and (grids.min() < 1 or grids[:, 0].max() > 1)):
        what = "its patches are not square, or a grid is not [1, rows, columns]"
    elif starts[-1] != shard.tensors["pixel_values"].shape[0]:
        what = f"its grids come to {starts[-1]:,} patches, it holds {shard.tensors['pixel_values'].shape[0]:,}"
    else:
        return starts
    raise InputError([Problem(str(shard.path), what, "a shard that `kimik3-prep encode` wrote")])


def _rows_of(shard: Shard, table: pa.Table | None, ids: Sequence[str]) -> list[int]:
    if table is None:
        what, hint = "its index does not lie beside it, so no id is known", "leave --id out"
        raise InputError([Problem(str(shard.path), what, hint=hint)])
    places = pc.index_in(pa.array(ids, pa.string()), table["id"]).to_pylist()
    rows = [None if place is None else table["row"][place].as_py() for place in places]
    problems = [
        Problem("--id", f"no stored image {show(name)} in {shard.path}")
        for name, row in zip(ids, rows, strict=True)
        if row is None
    ]
    if problems:
        raise InputError(problems)
    return [row for row in rows if row is not None]


# --- drawing ------------------------------------------------------------------------------------------------------


def _write(shard: Shard, images: Sequence[_Image], path: Path) -> pictures.Sheet:
    font = ImageFont.load_default(_FONT_SIZE)
    columns, lines = min(_COLUMNS, len(images)), math.ceil(len(images) / _COLUMNS)
    step = _SIDE + _GAP, _SIDE + 2 * _LEADING + _GAP
    page = Image.new("RGB", (columns * step[0] + _GAP, lines * step[1] + _GAP), (245, 245, 245))
    draw = ImageDraw.Draw(page)
    strays = 0
    for number, image in enumerate(images):
        x, y = (_GAP + at * size for at, size in zip((number % _COLUMNS, number // _COLUMNS), step, strict=True))
        shown, note, found = _thumbnail(shard, image)
        strays += found
        page.paste(shown, (x + (_SIDE - shown.width) // 2, y + _SIDE - shown.height))
        for line, text in enumerate((_caption(image, font), note)):
            draw.text((x, y + _SIDE + 3 + line * _LEADING), text, (0, 0, 0), font)
    write_whole(path, lambda file: page.save(file, "PNG"))
    return pictures.Sheet(str(path), page.width, page.height, tuple(image.row for image in images), strays)


def _thumbnail(shard: Shard, image: _Image) -> tuple[Image.Image, str, int]:
    """The image in its square, with its lines; what to say of it; its strays."""
    rows, cols = image.grid
    entries = pictures.entries_of(shard.metadata["image_mean"], shard.metadata["image_std"], shard.dtype)
    patches = shard.raw("pixel_values")[image.begin : image.begin + rows * cols]
    pixels, strays = pictures.put_together(np.asarray(patches), rows, cols, shard.dtype, entries)
    height, width = pixels.shape[:2]
    scale = _SIDE / max(width, height)
    scale = scale if scale < 1 else min(int(scale), _MOST_LARGER)  # whole pixels of the image stay squares
    size = max(1, round(width * scale)), max(1, round(height * scale))
    how = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    small = np.array(Image.fromarray(pixels, "RGB").resize(size, how))
    pictures.hatch(small, *(math.ceil(side * scale) for side in image.padding))
    merge = shard.metadata["merge_size"]
    cell, every = shard.tensors["pixel_values"].shape[2] * merge, 1
    while cell * every * scale < _CLOSEST:
        every *= 2
    pictures.draw_lines(small, cell * every, scale, pictures.TOKEN_LINE)
    lines = "" if every == 1 else f", a line every {every}"
    return Image.fromarray(small, "RGB"), f"{cols // merge} x {rows // merge} tokens{lines}", strays


def _caption(image: _Image, font: Any) -> str:
    """Row and id in the letters that the font has, shortened in the middle until they fit."""
    more = f" +{image.ids - 1}" if image.ids > 1 else ""
    name = image.id if len(image.id) < 400 else image.id[:200] + image.id[-200:]
    name = name.encode("unicode_escape").decode()  # ASCII only, and no control characters
    left, right = f"{image.row}" + (": " if name else ""), len(name)
    text = left + name + more
    while font.getlength(text) > _SIDE and right:
        right -= max(1, right // 8)
        text = f"{left}{name[: right - right // 4]}...{name[len(name) - right // 4 :]}{more}"
    return text
