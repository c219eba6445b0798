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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from kimik3_prep.disk import disk_errors, write_whole
from kimik3_prep.errors import InputError, ItemError, PlanMismatch, Problem
from kimik3_prep.fields import short_image
from kimik3_prep.plan import PLAN_SCHEMA, canonical_json, fingerprint
from kimik3_prep.shards import METADATA_KEY

#: Version of everything below; a reader refuses what it does not know.
FORMAT = 1

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
        ("patch_start", pa.int64()),
        ("patch_count", pa.int64()),
        ("grid_t", pa.int64()),
        ("grid_h", pa.int64()),
        ("grid_w", pa.int64()),
        ("num_tokens", pa.int64()),
        ("width", pa.int64()),  # original pixels
        ("height", pa.int64()),
        ("new_width", pa.int64()),
        ("new_height", pa.int64()),
        ("pad_width", pa.int64()),
        ("pad_height", pa.int64()),
        ("mode", pa.string()),
        ("format", pa.string()),
        ("exif_orientation", pa.int64()),
        ("content_hash", pa.string()),  # sha256:<hex> of the encoded bytes
        ("checksum", pa.string()),  # xxh3-128 of the stored feature bytes, 32 hex digits
        ("extra", pa.string()),
    ]
)

#: Null for a failed item: it has no place in a shard and no tokens.
_PLACE = (
    "shard",
    "patch_count",
    "grid_h",
    "grid_w",
    "num_tokens",
    "new_width",
    "new_height",
    "pad_width",
    "pad_height",
)
_ROW_GROUP = 65_536


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths inside an output folder."""

    root: Path

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
        """Whether the shard is complete on disk."""
        return self.shard_index(name).is_file() and self.shard(name).is_file()


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


def open_run(layout: Layout, facts: dict[str, Any], versions: Mapping[str, str], overwrite: bool) -> None:
    """Make the output folder ready: new, resumed, or cleared. `facts` is everything that decides output bytes.

    Raises InputError where the folder holds something else, PlanMismatch naming each fact that differs.
    """
    if layout.root.exists() and not layout.root.is_dir():
        raise InputError([Problem(str(layout.root), "is a file", "a folder for the output", "choose another --output")])
    record = read_run(layout)
    if record is None and (foreign := foreign_entries(layout)):
        what = f"holds files that are not kimik3-prep's, {foreign[0]!r} among them"
        raise InputError([Problem(str(layout.root), what, "a new or empty folder", "choose another --output")])
    if record is not None and overwrite:
        clear_output(layout)
        record = None
    if record is None:
        record = {"format": FORMAT, "fingerprint": fingerprint(facts), "facts": facts, "versions": dict(versions)}
        text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        write_whole(layout.run, lambda path: path.write_text(text, encoding="utf-8"))
        return
    changed = list(_differences(record.get("facts", {}), facts))
    if changed:
        hint = "use the same settings, another --output, or --overwrite to start anew"
        raise PlanMismatch(
            [
                Problem(f"{layout.run}: {name}", f"this run was started with {old!r}, now it is {new!r}", hint=hint)
                for name, old, new in changed
            ]
        )


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after


def read_run(layout: Layout) -> dict[str, Any] | None:
    """The run record, None where there is none. Raises InputError for one that is not ours."""
    try:
        record = json.loads(layout.run.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError([Problem(str(layout.run), f"not a run record: {error}")]) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else None
        hint = "use the version of kimik3-prep that wrote it, or another --output"
        raise InputError([Problem(str(layout.run), f"format {found!r}", f"format {FORMAT}", hint)])
    return record


_OURS = re.compile(r"(cpu|gpu|local)-\d{5,}\.(safetensors|parquet)(\.tmp)?")
_OURS_IN_ROOT = ("index.parquet", "plan.parquet", "run.json")


def foreign_entries(layout: Layout) -> list[str]:
    """Names in the output folder that this package would not have written."""
    if not layout.root.is_dir():
        return []
    ours = {"shards", *_OURS_IN_ROOT, *(f"{name}.tmp" for name in _OURS_IN_ROOT)}
    return sorted(entry.name for entry in layout.root.iterdir() if entry.name not in ours)


def clear_output(layout: Layout) -> None:
    """Remove what this package wrote, and only that; the run record goes last, so a kill leaves a run to resume."""
    with disk_errors(layout.root):
        (layout.root / "index.parquet").unlink(missing_ok=True)
        if layout.shards.is_dir():
            # Indexes first: a shard without its index is uncommitted, an index without its shard would be a lie.
            for path in sorted(layout.shards.iterdir(), key=lambda path: path.suffix != ".parquet"):
                if _OURS.fullmatch(path.name):
                    path.unlink()
            if not any(layout.shards.iterdir()):
                layout.shards.rmdir()
        for name in _OURS_IN_ROOT:
            (layout.root / f"{name}.tmp").unlink(missing_ok=True)
            (layout.root / name).unlink(missing_ok=True)


def write_plan(layout: Layout, table: pa.Table) -> None:
    """Write `plan.parquet`, a table of `PLAN_SCHEMA`."""
    write_whole(layout.plan, lambda path: _write_parquet(table, path))


def read_plan(layout: Layout) -> Iterator[pa.Table]:
    """The plan, one row group at a time."""
    with parquet.ParquetFile(layout.plan, memory_map=False) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group).cast(PLAN_SCHEMA)


def _write_parquet(table: pa.Table, path: Path) -> None:
    parquet.write_table(table, path, row_group_size=_ROW_GROUP, compression="zstd")


# --- indexes ------------------------------------------------------------------------------------------------------


def index_table(rows: pa.Table, outcomes: Mapping[int, Outcome]) -> pa.Table:
    """Index rows for plan rows. `outcomes` by planned row of the shard; rows without one failed while planning."""
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
    """An index, whole or some columns of it. Raises InputError for a file that is not one."""
    try:
        return parquet.read_table(path, columns=None if columns is None else list(columns), partitioning=None)
    except (OSError, pa.ArrowException) as error:
        raise InputError([Problem(str(path), f"not an index of kimik3-prep: {error}")]) from error


def write_index(layout: Layout, names: Iterable[str], failed: Sequence[pa.Table], metadata: Mapping[str, Any]) -> None:
    """Merge the shard indexes and the rows that failed while planning into `index.parquet`, in manifest order."""
    parts = [read_index(layout.shard_index(name)).replace_schema_metadata(None) for name in names]
    table = pa.concat_tables([*parts, *failed])
    table = table.combine_chunks()  # taking from thousands of chunks would walk all of them each time
    order = pc.sort_indices(table["item"])
    schema = INDEX_SCHEMA.with_metadata({METADATA_KEY: canonical_json(metadata)})

    def write(path: Path) -> None:
        with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            for begin in range(0, max(1, table.num_rows), _ROW_GROUP):
                writer.write_table(table.take(order.slice(begin, _ROW_GROUP)).cast(schema))

    write_whole(layout.index, write)
