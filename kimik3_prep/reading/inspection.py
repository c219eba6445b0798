"""What lies in a shard, an index or an output folder, as documents. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.errors import InputError, Problem
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.shard_file import Shard, open_shard
from kimik3_prep.output.tables import INDEX_SCHEMA, read_index
from kimik3_prep.output.totals import Bin, histogram
from kimik3_prep.reading.fetched import fetched_file, fetched_output
from kimik3_prep.reading.pictures import Picture, ReportPage, Sheet
from kimik3_prep.remote import as_url

_FIRST = 10  # rows shown
_LARGEST = 5
_CHUNK = 4096  # patches read at a time for the value range
_MOST_FAILURES = 50

# --- the documents ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """One tensor of a shard."""

    dtype: str
    """Its type, as safetensors names it: F32, BF16, F16, U8, I64."""
    shape: tuple[int, ...]
    """Its dimensions."""
    bytes: int
    """Its size."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One stored image of a shard."""

    row: int
    """Row of the shard's `grid_thws`."""
    grid_thw: tuple[int, ...]
    """Its grid: 1, rows and columns of patches."""
    patch_start: int
    """Row of its first patch in `pixel_values`."""
    ids: tuple[str, ...]
    """The items that name it; empty without the shard's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDescription:
    """A shard."""

    kind: Literal["shard"] = "shard"
    """What was inspected."""
    path: str
    """The file, as it was given."""
    size: int
    """Its bytes."""
    tensors: dict[str, TensorDescription]
    """Its tensors by name."""
    metadata: dict[str, Any]
    """What the run wrote into it about itself."""
    value_range: tuple[float, float] | None
    """The smallest and the largest stored value; null if there is none."""
    not_finite: int
    """Values that are NaN or infinite."""
    rows: tuple[StoredImage, ...]
    """The first ten stored images."""
    pictures: tuple[Picture | Sheet, ...] | None = None
    """The contact sheets that `--render` wrote; null without it."""


@dataclass(frozen=True, slots=True)
class FailedRow:
    """One item that failed."""

    line: int
    """Its line in the manifest."""
    id: str
    """Its id."""
    error_code: str
    """One of the codes listed in the README."""
    error_message: str
    """The reason in words."""


@dataclass(frozen=True, slots=True)
class LargeImage:
    """One of the stored images with the most tokens, described by the first row that names it."""

    item: int
    """Manifest row from 0."""
    line: int
    """Its line in the manifest."""
    id: str
    """Its id."""
    num_tokens: int
    """Its tokens."""
    width: int | None
    """Pixels of the source; null for features made elsewhere."""
    height: int | None
    """Pixels of the source; null for features made elsewhere."""
    shard: str | None
    """Name of its shard; null if the run stores no features."""
    grid_thw: tuple[int, ...]
    """Its grid: 1, rows and columns of patches."""
    rows: int
    """How many manifest rows name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What the rows of an index add up to."""

    rows: int
    """Manifest rows."""
    num_tokens: int
    """Tokens of all rows."""
    images: int
    """Stored images. An image that several rows name counts once."""
    histogram: tuple[Bin, ...]
    """Stored images by their tokens."""
    largest: tuple[LargeImage, ...]
    """The five stored images with the most tokens."""
    by_status: dict[str, int]
    """Rows that are ok and that failed."""
    by_group: dict[str, int]
    """Rows by the group of their shard: cpu, gpu, local."""
    by_mode: dict[str, int]
    """Rows by the Pillow mode of their image."""
    by_format: dict[str, int]
    """Rows by the file format of their image."""
    by_error_code: dict[str, int]
    """Failed rows by the reason."""
    failures: tuple[FailedRow, ...]
    """The first 50 failed rows."""
    failures_not_shown: int
    """How many more there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexDescription(Totals):
    """An index."""

    kind: Literal["index"] = "index"
    """What was inspected."""
    path: str
    """The file, as it was given."""
    columns: dict[str, str]
    """Its columns and their Arrow types."""
    first: tuple[dict[str, Any], ...]
    """The first ten rows, every column."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What an unfinished run will hold."""

    rows: int
    """Manifest rows."""
    shards: int
    """Shards."""


@dataclass(frozen=True, slots=True)
class ShardSize:
    """One committed shard."""

    bytes: int
    """Bytes of the file."""
    patches: int
    """Its patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDescription(Totals):
    """An output folder. An unfinished run is described as far as it is committed."""

    kind: Literal["output"] = "output"
    """What was inspected."""
    path: str
    """The folder, as it was given."""
    finished: bool
    """The run is finished: index.parquet is there."""
    planned: Planned | None
    """What the run will hold; null if it is finished, or has no plan yet."""
    dtype: str
    """Storage type of pixel_values."""
    settings: Recipe
    """Everything that decides the output's bytes, as run.json keeps it."""
    versions: dict[str, str]
    """Versions of the packages that made it."""
    fingerprint: str
    """Digest of the settings."""
    shards: dict[str, ShardSize]
    """Committed shards by name."""
    size: int
    """Bytes of all of them."""
    pictures: tuple[Picture | Sheet, ...] | None = None
    """The pictures that `--render` wrote; null without it."""
    report: ReportPage | None = None
    """The page that `--report` wrote; null without it."""


Description = ShardDescription | IndexDescription | OutputDescription

# --- looking ------------------------------------------------------------------------------------------------------


def inspect(place: Path | str, pictures: tuple[Picture | Sheet, ...] | None = None) -> Description:
    """Describe a shard, an index or an output, and name the pictures of it. Raises InputError for anything else.

    place: a path, or a URL.
    """
    if (url := as_url(place)) is not None:
        if not url.endswith((".safetensors", ".parquet")):
            with fetched_output(url) as output:
                return replace(_output(output), pictures=pictures)
        with fetched_file(url) as file:
            return replace(inspect(file, pictures), path=url)
    path = Path(place)
    if path.is_dir():
        return replace(_output(Output(path)), pictures=pictures)
    if path.is_file() and path.suffix == ".safetensors":
        return replace(_shard(path), pictures=pictures)
    if path.is_file() and path.suffix == ".parquet":
        return _index(path)
    what = "does not exist" if not path.exists() else "is none of these" if path.is_file() else "is no regular file"
    raise InputError([Problem(str(path), what, "a shard (.safetensors), an index (.parquet) or an output folder")])


def _shard(path: Path) -> ShardDescription:
    shard = open_shard(path)
    value_range, not_finite = _values(shard)
    return ShardDescription(
        path=str(path),
        size=path.stat().st_size,
        tensors={
            name: TensorDescription(tensor.dtype, tensor.shape, tensor.end - tensor.begin)
            for name, tensor in shard.tensors.items()
        },
        metadata=shard.metadata,
        value_range=value_range,
        not_finite=not_finite,
        rows=tuple(_shard_rows(shard)),
    )


def _values(shard: Shard) -> tuple[tuple[float, float] | None, int]:
    """Return the smallest and the largest stored value, None if there is none, and how many are not finite."""
    patches = shard.tensors["pixel_values"].shape[0]
    lows, highs, not_finite = [], [], 0
    for begin in range(0, patches, _CHUNK):
        values = shard.floats("pixel_values", begin, begin + _CHUNK)
        finite = np.isfinite(values)
        if not finite.all():  # JSON has no word for them
            not_finite += int(np.count_nonzero(~finite))
            values = values[finite]
        if values.size:
            lows.append(float(values.min()))
            highs.append(float(values.max()))
    return (min(lows), max(highs)) if lows else None, not_finite


def _shard_rows(shard: Shard) -> list[StoredImage]:
    """Return the first stored images; their ids come from the shard's index if it lies beside the shard."""
    grids = shard.raw("grid_thws")[:_FIRST]
    starts = np.concatenate([[0], np.cumsum(grids.prod(axis=1))])
    ids: dict[int, list[str]] = {}
    beside = shard.path.with_suffix(".parquet")
    if beside.is_file():
        table = read_index(beside, ["id", "row"])
        for row in table.filter(pc.less(table["row"], _FIRST)).to_pylist():
            ids.setdefault(row["row"], []).append(row["id"])
    return [
        StoredImage(row, tuple(grid.tolist()), int(starts[row]), tuple(ids.get(row, ())))
        for row, grid in enumerate(grids)
    ]


def _index(path: Path) -> IndexDescription:
    table = read_index(path)
    return IndexDescription(
        path=str(path),
        columns={field.name: str(field.type) for field in table.schema},
        first=tuple(table.slice(0, _FIRST).to_pylist()),
        **_totals(table),
    )


def _totals(table: pa.Table) -> dict[str, Any]:
    """Return the fields of `Totals`."""
    failed = table.filter(pc.equal(table["status"], "failed"))
    columns = [field.name for field in fields(FailedRow)]
    failures = tuple(FailedRow(**row) for row in failed.select(columns).slice(0, _MOST_FAILURES).to_pylist())
    stored, largest = _stored(table)
    return {
        "rows": table.num_rows,
        "num_tokens": pc.sum(table["num_tokens"]).as_py() or 0,
        "images": stored.num_rows,
        "histogram": histogram(stored["num_tokens_min"].to_numpy()),
        "largest": largest,
        "by_status": _counts(table["status"]),
        "by_group": _counts(pc.if_else(pc.equal(table["path"], "local"), "local", table["backend"])),
        "by_mode": _counts(table["mode"]),
        "by_format": _counts(table["format"]),
        "by_error_code": _counts(failed["error_code"]),
        "failures": failures,
        "failures_not_shown": failed.num_rows - len(failures),
    }


def _stored(table: pa.Table) -> tuple[pa.Table, tuple[LargeImage, ...]]:
    """Return one row for each stored image, and the largest images.

    Rows that share a span of a shard share an image; in an index without shards rows that name the same image do.
    """
    ok = table.filter(pc.equal(table["status"], "ok"))
    ok = ok.append_column("name", pc.if_else(pc.is_null(ok["shard"]), ok["image"], None))
    stored = ok.group_by(["shard", "row", "name"]).aggregate(
        [("num_tokens", "min"), ("item", "min"), ("item", "count")]
    )
    order = pc.sort_indices(stored, sort_keys=[("num_tokens_min", "descending"), ("item_min", "ascending")])
    top = stored.take(order[:_LARGEST])
    rows = {row["item"]: row for row in ok.filter(pc.is_in(ok["item"], top["item_min"].combine_chunks())).to_pylist()}
    counts = zip(top["item_min"].to_pylist(), top["item_count"].to_pylist(), strict=True)
    return stored, tuple(_large(rows[item], count) for item, count in counts)


def _large(row: dict[str, Any], rows: int) -> LargeImage:
    """Describe a stored image by the first of the `rows` that name it."""
    values = {name: row[name] for name in ("item", "line", "id", "num_tokens", "width", "height", "shard")}
    return LargeImage(**values, grid_thw=(row["grid_t"], row["grid_h"], row["grid_w"]), rows=rows)


def _counts(column: Any) -> dict[str, int]:
    counted = pc.value_counts(column)
    pairs = [(entry["values"] or "unknown", entry["counts"]) for entry in counted.to_pylist()]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _output(layout: Output) -> OutputDescription:
    record = layout.record()
    if record is None:
        raise InputError([Problem(layout.name, "no run.json in it", "a folder that `kimik3-prep encode` wrote")])
    sizes = layout.shard_sizes()
    for name in () if as_url(layout.name) else sizes:
        open_shard(layout.shard(name))  # which names a damaged one; from a URL it would bring them all
    finished = layout.index.is_file()
    if finished:
        table = layout.read_index()
    else:
        parts = [layout.read_shard_index(name).replace_schema_metadata(None) for name in sizes]
        table = pa.concat_tables([INDEX_SCHEMA.empty_table(), *parts])
    stored = table.filter(pc.is_valid(table["row"])).group_by(["shard", "row"]).aggregate([("patch_count", "min")])
    by_shard = stored.group_by("shard").aggregate([("patch_count_min", "sum")])
    patches = dict(zip(by_shard["shard"].to_pylist(), by_shard["patch_count_min_sum"].to_pylist(), strict=True))
    return OutputDescription(
        path=layout.name,
        finished=finished,
        planned=None if finished else _planned(layout),
        dtype=record.recipe.dtype,
        settings=record.recipe,
        versions=dict(record.versions),
        fingerprint=record.recipe.fingerprint,
        shards={name: ShardSize(size, patches.get(name, 0)) for name, size in sizes.items()},
        size=sum(sizes.values()),
        **_totals(table),
    )


def _planned(layout: Output) -> Planned | None:
    """Return what an unfinished run will hold, or None if it was stopped before its plan was written."""
    if not layout.plan.is_file():
        return None
    rows, shards = 0, set()
    for table in layout.read_plan():
        rows += table.num_rows
        shards.update(pc.unique(table["shard"].drop_null()).to_pylist())
    return Planned(rows, len(shards))
