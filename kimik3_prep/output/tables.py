"""Plan and indexes: their columns, their rows, and the Parquet files that hold them.

A plan has a row for each manifest row and says where its image goes. An index has the same rows and says what became of
them. Shards have indexes of their own; the final one holds all their rows in manifest order.
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from kimik3_prep import strict_json
from kimik3_prep.disk import regular
from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.manifest.items import ITEM_SCHEMA, short_image
from kimik3_prep.output.recipe import FORMAT, METADATA_KEY, canonical_json, odd_metadata

#: Preprocessing paths in the order their shards are filled; the group names a shard: `cpu-00000`.
GROUPS = ("cpu", "gpu", "local")

#: Columns of the plan and the index that make a `Grid`, in its order.
GRID_FIELDS = ("new_width", "new_height", "pad_width", "pad_height", "grid_h", "grid_w", "num_tokens")

PLAN_SCHEMA = pa.schema(
    [
        *[field for field in ITEM_SCHEMA if field.name != "grid_thw"],
        ("group", pa.string()),
        ("mode", pa.string()),  # null where the manifest gave the size and no header was read
        ("format", pa.string()),
        ("source_size", pa.int64()),  # bytes and mtime of the file that was probed
        ("source_mtime_ns", pa.int64()),
        *[(name, pa.int64()) for name in GRID_FIELDS],
        ("in_patch_limit", pa.int64()),  # null where the config's own was not lowered
        ("shard", pa.string()),  # null for an item that failed while planning
        ("row", pa.int64()),
        ("patch_start", pa.int64()),
        ("patch_count", pa.int64()),
        ("error_code", pa.string()),
        ("error_message", pa.string()),
    ]
)

INDEX_SCHEMA = pa.schema(
    [
        ("item", pa.int64()),  # 0-based manifest row
        ("line", pa.int64()),
        ("id", pa.string()),
        ("image", pa.string()),
        ("path", pa.string()),  # deferred | local
        ("backend", pa.string()),  # cpu | gpu, null for local
        ("status", pa.string()),  # ok | failed
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        ("shard", pa.string()),
        ("row", pa.int64()),  # row of the shard's grid_thws
        *[(name, pa.int64()) for name in ("patch_start", "patch_count", "grid_t", "grid_h", "grid_w", "num_tokens")],
        *[(name, pa.int64()) for name in ("width", "height", "new_width", "new_height", "pad_width", "pad_height")],
        ("in_patch_limit", pa.int64()),  # what --max-tokens lowered the config's to; null where it did not
        ("mode", pa.string()),
        ("format", pa.string()),
        ("exif_orientation", pa.int64()),
        ("content_hash", pa.string()),  # sha256:<hex> of the encoded bytes
        ("checksum", pa.string()),  # xxh3-128 of the stored feature bytes, 32 hex digits
        ("extra", pa.string()),
    ]
)

#: Null for a failed item: it has no place in a shard and no tokens.
_GRID = ("grid_h", "grid_w", "num_tokens", "new_width", "new_height", "pad_width", "pad_height", "in_patch_limit")
_PLACE = ("shard", "patch_count", *_GRID)
_ROW_GROUP = 65_536
_HELD_BYTES = 256 << 20  # of shard indexes while they are merged
_MOST_IN_A_GROUP = 1 << 30  # bytes: a column of strings cannot hold twice as many
_AT_ONCE = 16_384  # index rows that are Python objects at a time: one image may have a million rows


# --- plan rows ------------------------------------------------------------------------------------------------------


def split_shards(tables: Iterator[pa.Table]) -> Iterator[tuple[str | None, pa.Table]]:
    """Cut a stream of plan tables where the shard changes: `(shard name, its rows)`, None for the failed rows."""
    held: list[pa.Table] = []
    name: str | None = None
    for table in tables:
        shards = table["shard"].combine_chunks().dictionary_encode()
        codes = pc.fill_null(shards.indices, -1).to_numpy()
        cuts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        for begin, end in itertools.pairwise(cuts):
            this = None if codes[begin] < 0 else shards.dictionary[int(codes[begin])].as_py()
            if held and this != name:
                yield name, pa.concat_tables(held)
                held = []
            name = this
            held.append(table.slice(begin, end - begin))
    if held:
        yield name, pa.concat_tables(held)


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of one stored image."""

    row: int
    patch_start: int
    """Both are final, after the gaps of failed images were closed."""

    mode: str | None
    format: str | None
    exif_orientation: int | None
    content_hash: str | None
    checksum: str


Outcome = Stored | ItemError


def index_table(rows: pa.Table, outcomes: Mapping[int, Outcome]) -> pa.Table:
    """Index rows for plan rows. `outcomes` by planned row of the shard; rows without one failed while planning."""
    parts = (rows.slice(begin, _AT_ONCE) for begin in range(0, rows.num_rows, _AT_ONCE))
    return pa.concat_tables([INDEX_SCHEMA.empty_table(), *(_index_part(part, outcomes) for part in parts)])


def planned_table(rows: pa.Table, measured: bool) -> pa.Table:
    """Index rows for plan rows of which nothing is stored: an index of grids and tokens (`--index-only`).

    measured: the content hashes are those of the bytes, not what the manifest promises.
    """
    parts = (rows.slice(begin, _AT_ONCE) for begin in range(0, rows.num_rows, _AT_ONCE))
    return pa.concat_tables([INDEX_SCHEMA.empty_table(), *(_planned_part(part, measured) for part in parts)])


def _planned_part(rows: pa.Table, measured: bool) -> pa.Table:
    failed = pc.is_valid(rows["error_code"])
    columns: dict[str, Any] = {
        "status": pc.if_else(failed, "failed", "ok"),
        "image": pa.array([short_image(image) for image in rows["image"].to_pylist()], pa.string()),
        "backend": pc.if_else(pc.equal(rows["group"], "local"), None, rows["group"]),
        "grid_t": pc.if_else(failed, None, pa.scalar(1, pa.int64())),
    }
    unknown = ["shard", "row", "patch_start", "exif_orientation", "checksum"] + ["content_hash"] * (not measured)
    for name in unknown:
        columns[name] = pa.nulls(rows.num_rows, INDEX_SCHEMA.field(name).type)
    arrays = [columns[f.name] if f.name in columns else rows[f.name] for f in INDEX_SCHEMA]
    typed = [array.cast(field.type) for array, field in zip(arrays, INDEX_SCHEMA, strict=True)]
    return pa.table(typed, schema=INDEX_SCHEMA)


def _index_part(rows: pa.Table, outcomes: Mapping[int, Outcome]) -> pa.Table:
    result = [outcomes.get(row) if row is not None else None for row in rows["row"].to_pylist()]
    stored = [outcome if isinstance(outcome, Stored) else None for outcome in result]
    failed = pa.array([outcome is None for outcome in stored])
    codes, messages = rows["error_code"].to_pylist(), rows["error_message"].to_pylist()
    columns: dict[str, Any] = {
        "status": ["failed" if outcome is None else "ok" for outcome in stored],
        "error_code": [o.code if isinstance(o, ItemError) else codes[i] for i, o in enumerate(result)],
        "error_message": [o.message if isinstance(o, ItemError) else messages[i] for i, o in enumerate(result)],
        "image": [short_image(image) for image in rows["image"].to_pylist()],
        "backend": [None if group == "local" else group for group in rows["group"].to_pylist()],
        "grid_t": [None if outcome is None else 1 for outcome in stored],
        "mode": _known(stored, "mode", rows),
        "format": _known(stored, "format", rows),
    }
    for name in ("row", "patch_start", "exif_orientation", "content_hash", "checksum"):
        columns[name] = [None if outcome is None else getattr(outcome, name) for outcome in stored]
    arrays = []
    for field in INDEX_SCHEMA:
        if field.name in columns:
            arrays.append(pa.array(columns[field.name], field.type))
            continue
        column = rows[field.name].cast(field.type)
        arrays.append(pc.if_else(failed, None, column) if field.name in _PLACE else column)
    return pa.table(arrays, schema=INDEX_SCHEMA)


def _known(stored: Iterable[Stored | None], name: str, rows: pa.Table) -> list[Any]:
    planned = rows[name].to_pylist()
    return [planned[i] if outcome is None else getattr(outcome, name) for i, outcome in enumerate(stored)]


# --- files ----------------------------------------------------------------------------------------------------------


def write_plan(table: pa.Table, file: BinaryIO) -> None:
    """Write a table of `PLAN_SCHEMA`."""
    parquet.write_table(table, file, row_group_size=_ROW_GROUP, compression="zstd")


def read_plan(path: Path) -> Iterator[pa.Table]:
    """Yield a plan, one row group at a time. Raises InputError for a file that is not one."""
    try:
        with parquet.ParquetFile(regular(path), memory_map=False) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group).cast(PLAN_SCHEMA)
                table.validate(full=True)  # a text that is not UTF-8 breaks readers far from here
                yield table
    except (OSError, ValueError, pa.ArrowException) as error:
        what, hint = f"not a plan of kimik3-prep: {_one_line(error)}", "--overwrite starts the run anew"
        raise InputError([Problem(str(path), what, hint=hint)]) from error


def write_index(table: pa.Table, metadata: Mapping[str, Any], file: BinaryIO) -> None:
    """Write the index of one shard, a table of `INDEX_SCHEMA`."""
    table = table.replace_schema_metadata({METADATA_KEY: canonical_json(metadata)})
    parquet.write_table(table, file, row_group_size=_ROW_GROUP, compression="zstd")


def read_index(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return an index, whole or some columns of it. Raises InputError for a file that is not one.

    Every text in it is UTF-8, and `index_metadata` can read its metadata.
    """
    wanted = INDEX_SCHEMA.names if columns is None else list(columns)
    try:
        with parquet.ParquetFile(regular(path), memory_map=False) as file:
            reason = _unlike_an_index(file, wanted)
            if not reason:
                table = file.read(None if columns is None else wanted)
                table.validate(full=True)
                return table
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = _one_line(error)
    raise InputError([Problem(str(path), f"not an index of kimik3-prep: {reason}", "an index.parquet")])


def index_metadata(table: pa.Table) -> dict[str, Any]:
    """Return what an index from `read_index` says of its run and its shard."""
    return dict(json.loads((table.schema.metadata or {}).get(METADATA_KEY.encode(), b"{}")))


def _unlike_an_index(file: parquet.ParquetFile, wanted: Iterable[str]) -> str:
    """What tells a well-formed Parquet file from an index; empty for an index."""
    schema = file.schema_arrow
    places = {name: schema.get_field_index(name) for name in wanted}
    if missing := [name for name, place in places.items() if place < 0]:
        return f"it has no column {missing[0]!r}"
    for name, place in places.items():
        if schema.field(place).type != INDEX_SCHEMA.field(name).type:
            return f"its column {name!r} is {schema.field(place).type}, not {INDEX_SCHEMA.field(name).type}"
    # A Parquet file holds the metadata twice. pyarrow takes a schema's from one place and a table's from the other.
    texts = {(holder or {}).get(METADATA_KEY.encode(), b"{}") for holder in (schema.metadata, file.metadata.metadata)}
    if len(texts) > 1:
        return "its metadata is there twice, and the two differ"
    try:
        metadata = strict_json.parse(texts.pop(), "its metadata")
    except strict_json.JsonProblem as error:
        return str(error)
    if not isinstance(metadata, dict):
        return "its metadata is no object"
    if (version := metadata.get("format", FORMAT)) != FORMAT:
        return f"its format is {version!r}, this version reads format {FORMAT}"
    return odd_metadata(metadata)


def merge_indexes(
    indexes: Sequence[Path], failed: Sequence[pa.Table], metadata: Mapping[str, Any], file: BinaryIO
) -> None:
    """Write the final index: the rows of all shard indexes and those that are in none, in manifest order.

    Only the order of all rows is held at once; the rows themselves come from the shard indexes a window at a time.
    """
    held: OrderedDict[int, pa.Table] = OrderedDict()
    sizes: dict[int, int] = {}

    def part(number: int) -> pa.Table:
        """A part's rows, kept while there is room: those of one window lie in few shards, or, repeated, in many."""
        if number >= len(indexes):
            return failed[number - len(indexes)]
        if number not in held:
            held[number] = read_index(indexes[number]).replace_schema_metadata(None)
            sizes[number] = held[number].nbytes
            while len(held) > 1 and sum(sizes.values()) > _HELD_BYTES:
                del sizes[held.popitem(last=False)[0]]
        held.move_to_end(number)
        return held[number]

    columns = [read_index(index, ["item"])["item"] for index in indexes]
    items = [column.to_numpy() for column in (*columns, *(table["item"] for table in failed))]
    starts = np.cumsum([0, *map(len, items)])[:-1]
    order = np.argsort(np.concatenate([np.zeros(0, np.int64), *items]), kind="stable")
    schema = INDEX_SCHEMA.with_metadata({METADATA_KEY: canonical_json(metadata)})

    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for begin in range(0, max(1, len(order)), _ROW_GROUP):
            rows = order[begin : begin + _ROW_GROUP]
            by_part = np.sort(rows)  # rows of one part stand together in this numbering
            owner = np.searchsorted(starts, by_part, "right") - 1
            pieces = [
                part(int(number)).take(pa.array(by_part[owner == number] - starts[number]))
                for number in np.unique(owner)
            ]
            window = pa.concat_tables([INDEX_SCHEMA.empty_table(), *pieces])
            places = np.searchsorted(by_part, rows)
            step = len(places) if window.nbytes < _MOST_IN_A_GROUP else _AT_ONCE // 16
            for first in range(0, max(1, len(places)), max(1, step)):
                group = window.take(pa.array(places[first : first + step]))
                writer.write_table(group.cast(schema))


def _one_line(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
