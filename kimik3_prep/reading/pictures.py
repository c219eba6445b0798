"""Stored features as pictures: the levels exactly as the model is given them, alone or on contact sheets. No torch.

One image at a time is in memory, however many a run has.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image, ImageDraw, ImageFont

from kimik3_prep.checkpoint.levels import DTYPES, DType, Floats, Levels, level_table, nearest_levels
from kimik3_prep.disk import write_whole
from kimik3_prep.errors import FailedItem, InputError, Problem
from kimik3_prep.manifest.report import show
from kimik3_prep.output.shard_file import open_shard
from kimik3_prep.output.tables import read_index
from kimik3_prep.reading.fetched import fetched_file, open_runs
from kimik3_prep.reading.stored import StoredRun
from kimik3_prep.remote import as_url

_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)
_MOST_OF_AN_ID = 80  # letters of an id in a file name

#: What marks a picture: token lines and patch lines, and stripes over the padding. None of them is a usual sight.
_LINE, _STRIPE = (255, 0, 110), (255, 170, 0)
TOKEN_LINE, PATCH_LINE = 0.75, 0.3  # how much of a line is its colour; the rest is the picture
_CLOSEST = 8  # pixels between two lines of a thumbnail

_COLUMNS, _ROWS = 5, 4  # thumbnails on a sheet
_SIDE = 256  # pixels of a thumbnail's longer side, at most
_MOST_LARGER = 4  # times that a small image is enlarged
_LONG = 4  # a picture whose sides differ more than that many times is cut into pieces
_GAP = 16
_FONT_SIZE, _LEADING, _LINES = 13, 17, 3
_PAGE, _CUT, _FAILED, _INK = (245, 245, 245), (245, 245, 245), (240, 205, 205), (0, 0, 0)

Pixels = npt.NDArray[np.uint8]


# --- the documents ------------------------------------------------------------------------------------------------


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
        return text + _strays(self.strays)


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
    """What it shows: manifest rows of a run, or rows of a shard's `grid_thws`."""
    failed: int
    """How many of them have no features."""
    strays: int
    """Values that are no level. Features made elsewhere may hold some; the sheet shows the nearest level."""

    def __str__(self) -> str:
        text = f"{self.path}: {self.width} x {self.height}, "
        text += f"row {self.rows[0]}" if len(self.rows) == 1 else f"{len(self.rows)} images from row {self.rows[0]}"
        return text + (f", {self.failed} of them failed" if self.failed else "") + _strays(self.strays)


@dataclass(frozen=True, slots=True)
class ReportPage:
    """The HTML page of a run."""

    path: str
    """The file."""
    items: int
    """Items on it: the first ones of the run."""
    rows: int
    """Items of the run."""
    size: int
    """Bytes of the file."""

    def __str__(self) -> str:
        shown = f"{self.items:,}" if self.items == self.rows else f"the first {self.items:,} of {self.rows:,}"
        return f"{self.path}: {shown} items, {self.size:,} bytes"


def _strays(count: int) -> str:
    return f", {count:,} values are no level: the nearest is shown" if count else ""


# --- what to draw -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One item of a run, or one stored image of a shard."""

    row: int
    """Manifest row, or row of the shard's `grid_thws`."""
    id: str = ""
    """The item's id; of a shard the first one that names the image, empty if its index is missing."""
    more_ids: int = 0
    """How many other items of a shard name the same image."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of patches."""
    tokens: int = 0
    """Its tokens."""
    size: tuple[int, int] | None = None
    """Width and height of the source in pixels; None if unknown."""
    new_size: tuple[int, int] | None = None
    """Width and height without padding, as the model sees it; None if unknown."""
    padding: tuple[int, int] = (0, 0)
    """Columns of zero padding at the right, and rows of it below."""
    error_code: str = ""
    """Why a failed item has no features; empty for others."""
    error_message: str = ""
    """The same in words."""


class Source(Protocol):
    """Something that holds stored images: a run or a shard."""

    name: str
    """Begins the names of its sheets."""
    patch_size: int
    """Side of a patch in pixels."""
    merge_size: int
    """Side of a token in patches."""

    def entries(self, ids: Sequence[str], first: int) -> Iterator[Entry]:
        """Give the entries of `ids`, or the `first` ones. Raises InputError that names every unknown id."""

    def pixels(self, entry: Entry) -> tuple[Pixels, int]:
        """Return the levels of an image, uint8 `[height, width, 3]`, and how many values are no level."""


class RunSource:
    """The items of a finished run, failed ones too."""

    name = "items"

    def __init__(self, run: StoredRun) -> None:
        self.run, self.patch_size, self.merge_size = run, run.patch_size, run.merge_size
        self._dtype = DTYPES[run.dtype]
        self._levels = entries_of(run.mean, run.std, self._dtype)

    def entries(self, ids: Sequence[str], first: int) -> Iterator[Entry]:
        """Give the items of `ids`, or the `first` ones of the manifest."""
        rows = [self.run.find(name) for name in ids] if ids else range(min(first, len(self.run)))
        unknown = [name for name, row in zip(ids, rows, strict=False) if row is None]
        if unknown:
            raise InputError([Problem("--id", f"no item {show(name)} in the run") for name in unknown])
        return (self.entry(row) for row in rows if row is not None)

    def entry(self, row: int) -> Entry:
        """Return the item of a manifest row."""
        return entry_of(row, self.run.values(row))

    def pixels(self, entry: Entry) -> tuple[Pixels, int]:
        """Return the levels of an item that has features. Raises StoreError, FailedItem."""
        return put_together(self.run.patches([entry.row]), *entry.grid, self._dtype, self._levels)


class ShardSource:
    """The stored images of a shard. Its index, if it lies beside it, says more about them."""

    def __init__(self, path: Path) -> None:
        self.name, self._path, self._shard = path.stem, path, open_shard(path)
        self._grids = np.asarray(self._shard.raw("grid_thws"))
        self._starts = self._check()
        metadata, pixels = self._shard.metadata, self._shard.tensors["pixel_values"]
        self.patch_size, self.merge_size = pixels.shape[2], metadata["merge_size"]
        self._dtype = next(dtype for dtype in DTYPES.values() if dtype.safetensors == pixels.dtype)
        self._levels = entries_of(metadata["image_mean"], metadata["image_std"], self._dtype)

    def _check(self) -> list[int]:
        """Return the first patch of each image. Raises InputError for a shard that no picture can be made of."""
        count, _, height, width = self._shard.tensors["pixel_values"].shape
        starts = [0]
        for grid in self._grids.tolist():  # Python's integers do not overflow
            starts.append(starts[-1] + math.prod(grid))
        missing = [name for name in ("image_mean", "image_std", "merge_size") if name not in self._shard.metadata]
        if missing:
            what = f"its metadata does not say its {missing[0]}"
        elif height != width or (self._grids.size and (self._grids.min() < 1 or self._grids[:, 0].max() > 1)):
            what = "its patches are not square, or a grid is not [1, rows, columns]"
        elif starts[-1] != count:
            what = f"its grids come to {starts[-1]:,} patches, it holds {count:,}"
        else:
            return starts
        raise InputError([Problem(str(self._path), what, "a shard that `kimik3-prep encode` wrote")])

    def entries(self, ids: Sequence[str], first: int) -> Iterator[Entry]:
        """Give the images of `ids`, or the `first` ones of the shard."""
        beside = self._path.with_suffix(".parquet")
        table = read_index(beside) if beside.is_file() else None
        rows = self._rows_of(table, ids) if ids else list(range(min(first, len(self._grids))))
        named: dict[int, list[dict[str, Any]]] = {}
        if table is not None:
            for values in table.filter(pc.is_in(table["row"], pa.array(rows, pa.int64()))).to_pylist():
                named.setdefault(values["row"], []).append(values)
        return (self._entry(row, named.get(row, [])) for row in rows)

    def _entry(self, row: int, named: Sequence[Mapping[str, Any]]) -> Entry:
        """Return a stored image, described by the first of the index rows that name it."""
        if named:
            return entry_of(row, named[0], len(named) - 1)
        height, width = (int(side) for side in self._grids[row, 1:])
        return Entry(row=row, grid=(height, width), tokens=height * width // self.merge_size**2)

    def _rows_of(self, table: pa.Table | None, ids: Sequence[str]) -> list[int]:
        if table is None:
            what, hint = "its index does not lie beside it, so no id is known", "leave --id out"
            raise InputError([Problem(str(self._path), what, hint=hint)])
        places = pc.index_in(pa.array(ids, pa.string()), table["id"]).to_pylist()
        rows = [None if place is None else table["row"][place].as_py() for place in places]
        unknown = [name for name, row in zip(ids, rows, strict=True) if row is None]
        if unknown:
            raise InputError([Problem("--id", f"no stored image {show(name)} in {self._path}") for name in unknown])
        return [row for row in rows if row is not None]

    def pixels(self, entry: Entry) -> tuple[Pixels, int]:
        """Return the levels of a stored image."""
        begin, (rows, columns) = self._starts[entry.row], entry.grid
        patches = self._shard.raw("pixel_values")[begin : begin + rows * columns]
        return put_together(np.asarray(patches), rows, columns, self._dtype, self._levels)


def entry_of(row: int, values: Mapping[str, Any], more_ids: int = 0) -> Entry:
    """Return what an index row says. Features made elsewhere may come without any size."""
    if values["status"] == "failed":
        code, message = values["error_code"], values["error_message"]
        return Entry(row=row, id=values["id"], error_code=code or "failed", error_message=message or "")
    return Entry(
        row=row,
        id=values["id"],
        more_ids=more_ids,
        grid=(values["grid_h"], values["grid_w"]),
        tokens=values["num_tokens"],
        size=(values["width"], values["height"]) if values["width"] else None,
        new_size=(values["new_width"], values["new_height"]) if values["new_width"] else None,
        padding=(values["pad_width"] or 0, values["pad_height"] or 0),
    )


# --- levels -------------------------------------------------------------------------------------------------------


def entries_of(mean: Sequence[float], std: Sequence[float], dtype: DType) -> Floats:
    """Return what each level reads as from a shard, float32 `[3, 256]`."""
    return dtype.widen(dtype.of_levels(level_table(mean, std)))


def put_together(patches: npt.NDArray[Any], rows: int, cols: int, dtype: DType, entries: Floats) -> tuple[Pixels, int]:
    """Return the levels of patches `[rows * cols, 3, p, p]` as a picture, and how many values are no level.

    The picture is uint8 `[rows * p, cols * p, 3]`. entries: from `entries_of`.
    """
    side = patches.shape[2]
    picture = np.empty((rows, side, cols, side, 3), np.uint8)
    strays = 0
    for number in range(rows):  # a row of patches at a time: the search takes many times its bytes
        levels, more = _levels(patches[number * cols : (number + 1) * cols], dtype, entries)
        picture[number] = levels.transpose(2, 0, 3, 1)
        strays += more
    return picture.reshape(rows * side, cols * side, 3), strays


def _levels(patches: npt.NDArray[Any], dtype: DType, entries: Floats) -> tuple[Levels, int]:
    return (patches, 0) if dtype.holds_levels else nearest_levels(dtype.widen(patches), entries)


def without_padding(pixels: Pixels, padding: tuple[int, int]) -> Pixels:
    """Return the picture without its last columns and rows."""
    height, width = pixels.shape[:2]
    return pixels[: max(1, height - padding[1]), : max(1, width - padding[0])]


def hatch(pixels: Pixels, right: int, below: int) -> None:
    """Stripe the last columns and rows of a picture."""
    height, width = pixels.shape[:2]
    left, top = max(0, width - right), max(0, height - below)
    for part, start in ((pixels[:, left:], left), (pixels[top:], top)):  # a mask of all would outgrow the picture
        y, x = np.ogrid[: part.shape[0], : part.shape[1]]
        part[(x + y + start) % 6 < 2] = _STRIPE


def draw_lines(pixels: Pixels, every: int, scale: float, strength: float) -> None:
    """Draw a line between cells of `every` pixels, across and down, in a picture that was scaled by `scale`."""
    for axis in (0, 1):
        along = pixels if axis == 0 else pixels.swapaxes(0, 1)
        places = np.round(np.arange(every, len(along) / scale, every) * scale).astype(int)
        places = places[places < len(along)]
        mixed = (1 - strength) * along[places] + strength * np.array(_LINE)
        along[places] = mixed.round().astype(np.uint8)


# --- writing ------------------------------------------------------------------------------------------------------


def render(
    place: Path | str, folder: Path, ids: Sequence[str] = (), first: int = 20, grid: bool = False, sheets: bool = False
) -> list[Picture | Sheet]:
    """Write pictures into `folder` as PNG: of the items `ids`, or of the `first` ones.

    A finished run gives a picture of each item that is ok, or contact sheets with the failed ones on them; a shard
    always gives sheets. place: a path, or a URL. grid: draw lines between patches and tokens, and hatch the padding.

    Raises InputError for anything else and with every id that has no picture, before anything is written; StoreError,
    RunError.
    """
    url = as_url(place)
    if url is not None and url.endswith(".safetensors"):
        with fetched_file(url) as file:
            return render(file, folder, ids, first, grid, sheets)
    path = Path(place)
    if path.suffix == ".safetensors" and path.is_file():
        return list(_sheets(ShardSource(path), folder, ids, first, grid))
    run = open_runs([place])
    source = RunSource(run)
    if sheets:
        return list(_sheets(source, folder, ids, first, grid))
    rows = _ready(run, ids) if ids else [int(row) for row in run.ok[:first]]
    return [_write(source, source.entry(row), folder, grid) for row in rows]


def _ready(run: StoredRun, ids: Sequence[str]) -> list[int]:
    """Return the rows of items that have features. Raises InputError that names all others."""
    rows, problems = [], []
    for name in ids:
        try:
            rows.append(run.ready(name))
        except KeyError:
            problems.append(Problem("--id", f"no item {show(name)} in the run"))
        except FailedItem as error:
            problems.append(Problem("--id", str(error)))
    if problems:
        raise InputError(problems)
    return rows


def _write(source: Source, entry: Entry, folder: Path, grid: bool) -> Picture:
    pixels, strays = source.pixels(entry)
    if grid:
        hatch(pixels, *entry.padding)
        draw_lines(pixels, source.patch_size, 1, PATCH_LINE)
        draw_lines(pixels, source.patch_size * source.merge_size, 1, TOKEN_LINE)
    else:
        pixels = without_padding(pixels, entry.padding)
    end = "-grid.png" if grid else ".png"
    path = folder / f"{entry.row:06d}-{_UNSAFE.sub('_', entry.id)[:_MOST_OF_AN_ID]}{end}"
    image = Image.fromarray(np.ascontiguousarray(pixels))
    write_whole(path, lambda target: image.save(target, "PNG"), parents=True)
    return Picture(entry.id, str(path), image.width, image.height, entry.padding, strays, grid)


def _sheets(source: Source, folder: Path, ids: Sequence[str], first: int, grid: bool) -> Iterator[Sheet]:
    entries = list(source.entries(ids, first))
    size = _COLUMNS * _ROWS
    digits = max(2, len(str(math.ceil(len(entries) / size))))
    for number, begin in enumerate(range(0, len(entries), size), 1):
        yield _sheet(source, entries[begin : begin + size], folder / f"{source.name}-{number:0{digits}d}.png", grid)


def _sheet(source: Source, entries: Sequence[Entry], path: Path, grid: bool) -> Sheet:
    font = ImageFont.load_default(_FONT_SIZE)
    columns, lines = min(_COLUMNS, len(entries)), math.ceil(len(entries) / _COLUMNS)
    step = _SIDE + _GAP, _SIDE + _LINES * _LEADING + _GAP
    page = Image.new("RGB", (columns * step[0] + _GAP, lines * step[1] + _GAP), _PAGE)
    draw = ImageDraw.Draw(page)
    strays = 0
    for number, entry in enumerate(entries):
        x, y = (_GAP + at * size for at, size in zip((number % _COLUMNS, number // _COLUMNS), step, strict=True))
        labels = [_caption(entry, font)]
        if entry.error_code:
            shown = _failed_box(entry, font)
            labels.append(f"failed: {entry.error_code}")
        else:
            pixels, more = source.pixels(entry)
            strays += more
            thumbnail = make_thumbnail(pixels, source, entry.padding, _SIDE, grid)
            shown = thumbnail.image
            labels += [_size_label(entry), thumbnail.note]
        page.paste(shown, (x + (_SIDE - shown.width) // 2, y + _SIDE - shown.height))
        for line, text in enumerate(labels):
            draw.text((x, y + _SIDE + 3 + line * _LEADING), text, _INK, font)
    write_whole(path, lambda target: page.save(target, "PNG"), parents=True)
    failed = sum(bool(entry.error_code) for entry in entries)
    return Sheet(str(path), page.width, page.height, tuple(entry.row for entry in entries), failed, strays)


# --- thumbnails ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A small picture."""

    image: Image.Image
    """The picture."""
    note: str
    """What a reader must know to read it; empty for a plain one."""


def make_thumbnail(pixels: Pixels, source: Source, padding: tuple[int, int], side: int, grid: bool) -> Thumbnail:
    """Return a picture of at most `side` pixels. A long strip is cut into pieces that lie one under the other.

    grid: with the padding hatched and lines between the tokens; else the padding is cut off.
    """
    if not grid:
        pixels = without_padding(pixels, padding)
    height, width = pixels.shape[:2]
    pieces = _pieces(width, height)
    length, breadth = math.ceil(max(width, height) / pieces), min(width, height) * pieces
    scale = min(side / length, (side - 2 * (pieces - 1)) / breadth)
    if scale >= 1:
        scale = min(int(scale), _MOST_LARGER)  # whole pixels of the image stay squares
    size = max(1, round(width * scale)), max(1, round(height * scale))
    how = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    small = np.array(Image.fromarray(np.ascontiguousarray(pixels)).resize(size, how))
    notes = []
    if grid:
        hatch(small, *(math.ceil(part * scale) for part in padding))
        cell, every = source.patch_size * source.merge_size, 1
        while cell * every * scale < _CLOSEST:
            every *= 2
        draw_lines(small, cell * every, scale, TOKEN_LINE)
        notes += [f"a line every {every} tokens"] if every > 1 else []
    if pieces > 1:
        notes.append(f"cut into {pieces} pieces")
        small = _stacked(small, pieces)
    return Thumbnail(Image.fromarray(small), "; ".join(notes))


def _pieces(width: int, height: int) -> int:
    """Return how many pieces of a strip, one under the other, come close to a square."""
    ratio = max(width, height) / min(width, height)
    return 1 if ratio <= _LONG else round(math.sqrt(ratio))


def _stacked(strip: Pixels, pieces: int) -> Pixels:
    """Return the pieces of a strip side by side: of a wide one under one another, in reading order."""
    wide = strip if strip.shape[1] >= strip.shape[0] else strip.swapaxes(0, 1)
    height, width = wide.shape[:2]
    length = math.ceil(width / pieces)
    page = np.empty((pieces * (height + 2) - 2, length, 3), np.uint8)
    page[:] = _CUT
    for number in range(pieces):
        piece = wide[:, number * length : (number + 1) * length]
        page[number * (height + 2) : number * (height + 2) + height, : piece.shape[1]] = piece
    return page if strip.shape[1] >= strip.shape[0] else np.ascontiguousarray(page.swapaxes(0, 1))


# --- labels -------------------------------------------------------------------------------------------------------


def _size_label(entry: Entry) -> str:
    """Say how large the source was, how large the model sees it, and how many tokens it takes."""
    tokens = f"{entry.tokens:,} token{'' if entry.tokens == 1 else 's'}"
    if entry.size is None:
        return tokens
    size = f"{entry.size[0]} x {entry.size[1]}"
    if entry.new_size is not None and entry.new_size != entry.size:
        size += f" to {entry.new_size[0]} x {entry.new_size[1]}"
    return f"{size}, {tokens}"


def _caption(entry: Entry, font: Any) -> str:
    """Return row and id in the letters that the font has, shortened in the middle until they fit."""
    more = f" +{entry.more_ids}" if entry.more_ids else ""
    name = entry.id if len(entry.id) < 400 else entry.id[:200] + entry.id[-200:]
    name = name.encode("unicode_escape").decode()  # ASCII only, and no control characters
    left, right = f"{entry.row}" + (": " if name else ""), len(name)
    text = left + name + more
    while font.getlength(text) > _SIDE and right:
        right -= max(1, right // 8)
        text = f"{left}{name[: right - right // 4]}...{name[len(name) - right // 4 :]}{more}"
    return text


def _failed_box(entry: Entry, font: Any) -> Image.Image:
    """Return what stands in the place of an item without features: the reason."""
    box = Image.new("RGB", (_SIDE, _SIDE), _FAILED)
    message = entry.error_message[:400].encode("unicode_escape").decode()
    lines = [entry.error_code.encode("unicode_escape").decode()[:40], "", *textwrap.wrap(message, 34)[:10]]
    draw = ImageDraw.Draw(box)
    for number, line in enumerate(lines):
        draw.text((12, 12 + number * _LEADING), line, _INK, font)
    return box
