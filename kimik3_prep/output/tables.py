"""Everything on disk, written and read: run record, plan, shards, indexes.

    OUT/run.json                        settings and fingerprint; written first
    OUT/plan.parquet                    the plan, so that a resume does not probe again
    OUT/shards/cpu-00000.safetensors    pixel_values [L, 3, p, p] and grid_thws int64 [n, 3]
    OUT/shards/cpu-00000.parquet        that shard's index; its presence commits the shard
    OUT/index.parquet                   all rows in manifest order; written last

A file appears under its name only when it is whole: it is written beside it with `.tmp` appended, synced, renamed, and
the folder synced. A shard's index follows its shard, so a run that is killed anywhere loses only uncommitted shards.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from kimik3_prep import strict_json
from kimik3_prep.disk import regular, write_whole
from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.manifest.row import short_image
from kimik3_prep.output.plan import PLAN_SCHEMA
from kimik3_prep.output.recipe import FORMAT, Recipe, canonical_json, fingerprint, odd_metadata
from kimik3_prep.output.shard_file import METADATA_KEY

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

#: The names that are ours to remove.
OURS = re.compile(r"(cpu|gpu|local)-\d{5,}\.(safetensors|parquet)(\.tmp)?")
OURS_IN_ROOT = ("index.parquet", "plan.parquet", "run.json")


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths inside an output folder.

    store: URL of the object store that the output goes to; then `root` only stages it, and a shard that was committed
    there has left its index here and nothing else. See `mirror.py`.
    """

    root: Path
    store: str | None = None

    @property
    def name(self) -> str:
        """Where the output is, for people."""
        return self.store or str(self.root)

    @property
    def run(self) -> Path:
        """The run record."""
        return self.root / "run.json"

    @property
    def plan(self) -> Path:
        """The plan."""
        return self.root / "plan.parquet"

    @property
    def index(self) -> Path:
        """The final index; its presence says the run is finished."""
        return self.root / "index.parquet"

    @property
    def shards(self) -> Path:
        """The folder of shards and their indexes."""
        return self.root / "shards"

    def shard(self, name: str) -> Path:
        """A shard's safetensors file."""
        return self.shards / f"{name}.safetensors"

    def shard_index(self, name: str) -> Path:
        """A shard's index; its presence commits the shard."""
        return self.shards / f"{name}.parquet"

    def committed(self, name: str) -> bool:
        """Whether the shard is complete, on disk or in the store."""
        return self.shard_index(name).is_file() and (self.store is not None or self.shard(name).is_file())

    def committed_shards(self) -> list[Path]:
        """The safetensors files of all complete shards, by name; whatever else lies there is not ours to count."""
        if not self.shards.is_dir():
            return []
        found = (path for path in self.shards.glob("*.safetensors") if OURS.fullmatch(path.name))
        return sorted(path for path in found if self.committed(path.stem))


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of one stored image. `row` and `patch_start` are final, after failed images were closed up."""

    row: int
    patch_start: int
    mode: str | None
    format: str | None
    exif_orientation: int | None
    content_hash: str | None
    checksum: str


Outcome = Stored | ItemError


# --- run record and plan -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What `run.json` says of a run."""

    recipe: Recipe

    versions: Mapping[str, str]
    """Of the packages that made the files."""

    base: str | None = None
    """Index-only runs: the way from the output folder to the folder that image paths start from, or its URL."""

    def document(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {
            "format": self.recipe.format,
            "fingerprint": self.recipe.fingerprint,
            "facts": self.recipe.facts(),
            "versions": dict(self.versions),
            **({} if self.base is None else {"base": self.base}),
        }


def read_run(layout: Layout) -> RunRecord | None:
    """The run record, None where there is none. Raises InputError for one that is not ours."""
    where, expected = str(layout.run), "the run.json that `kimik3-prep encode` wrote"
    try:
        record = strict_json.parse(regular(layout.run).read_bytes(), where)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError([Problem(where, f"cannot be read: {error.strerror or error}")]) from error
    except strict_json.JsonProblem as error:
        what = f"not a run record: {error.problem.what}"
        raise InputError([Problem(error.problem.where, what, expected, "choose another --output")]) from None
    version = record.get("format") if isinstance(record, dict) else None
    if type(version) is int and version != FORMAT:
        hint = "use the version of kimik3-prep that wrote it, or another --output"
        raise InputError([Problem(where, f"format {version}", f"format {FORMAT}", hint)])
    if version is None or not all(isinstance(record.get(key), dict) for key in ("facts", "versions")):
        raise InputError([Problem(where, "not a run record of kimik3-prep", expected, "choose another --output")])
    if record.get("fingerprint") != fingerprint(record["facts"]):
        what = "was changed by hand: the settings are not those of its fingerprint"
        raise InputError([Problem(where, what, expected, "choose another --output")])
    try:
        recipe = Recipe.from_facts(record["facts"], f"{where}: facts")
    except InputError as error:
        hint = "choose another --output"
        raise InputError([replace(problem, hint=hint) for problem in error.problems]) from None
    base = record.get("base")
    odd = [name for name, version in record["versions"].items() if type(version) is not str]
    if odd or not (base is None or type(base) is str):
        place = f"{where}: " + (f"versions.{odd[0]}" if odd else "base")
        raise InputError([Problem(place, "is no text", "a text", "choose another --output")])
    return RunRecord(recipe, record["versions"], base)


def write_plan(layout: Layout, table: pa.Table) -> None:
    """Write `plan.parquet`, a table of `PLAN_SCHEMA`."""
    write_whole(layout.plan, lambda path: _write_parquet(table, path))


def read_plan(layout: Layout) -> Iterator[pa.Table]:
    """The plan, one row group at a time. Raises InputError for a file that is not one."""
    try:
        with parquet.ParquetFile(regular(layout.plan), memory_map=False) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group).cast(PLAN_SCHEMA)
                table.validate(full=True)  # a text that is not UTF-8 breaks readers far from here
                yield table
    except (OSError, ValueError, pa.ArrowException) as error:
        what, hint = f"not a plan of kimik3-prep: {_one_line(error)}", "--overwrite starts the run anew"
        raise InputError([Problem(str(layout.plan), what, hint=hint)]) from error


def _write_parquet(table: pa.Table, path: Path) -> None:
    parquet.write_table(table, path, row_group_size=_ROW_GROUP, compression="zstd")


def _one_line(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())


# --- indexes ------------------------------------------------------------------------------------------------------


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


def write_shard_index(layout: Layout, name: str, table: pa.Table, metadata: Mapping[str, Any]) -> None:
    """Write a shard's index and with it commit the shard."""
    table = table.replace_schema_metadata({METADATA_KEY: canonical_json({**metadata, "shard": name})})
    write_whole(layout.shard_index(name), lambda path: _write_parquet(table, path))


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


def write_index(layout: Layout, shards: Iterable[str], failed: Sequence[pa.Table], metadata: Mapping[str, Any]) -> None:
    """Merge the shard indexes and the rows that failed while planning into `index.parquet`, in manifest order.

    Only the order of all rows is held at once; the rows themselves come from the shard indexes a window at a time.
    """
    names = list(shards)

    held: OrderedDict[int, pa.Table] = OrderedDict()
    sizes: dict[int, int] = {}

    def part(number: int) -> pa.Table:
        """A part's rows, kept while there is room: those of one window lie in few shards, or, repeated, in many."""
        if number >= len(names):
            return failed[number - len(names)]
        if number not in held:
            held[number] = read_index(layout.shard_index(names[number])).replace_schema_metadata(None)
            sizes[number] = held[number].nbytes
            while len(held) > 1 and sum(sizes.values()) > _HELD_BYTES:
                del sizes[held.popitem(last=False)[0]]
        held.move_to_end(number)
        return held[number]

    columns = [read_index(layout.shard_index(name), ["item"])["item"] for name in names]
    items = [column.to_numpy() for column in (*columns, *(table["item"] for table in failed))]
    starts = np.cumsum([0, *map(len, items)])[:-1]
    order = np.argsort(np.concatenate([np.zeros(0, np.int64), *items]), kind="stable")
    schema = INDEX_SCHEMA.with_metadata({METADATA_KEY: canonical_json(metadata)})

    def write(path: Path) -> None:
        with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
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

    write_whole(layout.index, write)
