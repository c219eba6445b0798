"""Whether an output folder holds what its run says: every file, every row, every byte. Needs no torch.

run.json -> plan.parquet -> each shard's index -> each shard's bytes -> index.parquet: each is held against the one
before, so whatever was cut, flipped, swapped, lost or added differs from something.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import parquet

from kimik3_prep.disk import locks
from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.output.plan import split_shards
from kimik3_prep.output.recipe import Recipe, canonical_json
from kimik3_prep.output.shard_file import METADATA_KEY, Shard, ShardFormat, open_shard
from kimik3_prep.output.tables import (
    INDEX_SCHEMA,
    OURS,
    OURS_IN_ROOT,
    Layout,
    Outcome,
    Stored,
    index_table,
    planned_table,
    read_index,
    read_plan,
    read_run,
)
from kimik3_prep.remote import refuse

_AGAIN = "run the same encode command again"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong. file: relative to the folder. item: an id, None for the whole file. todo: how it is mended."""

    file: str
    item: str | None
    what: str
    todo: str


def verify(root: Path) -> dict[str, Any]:
    """A JSON-ready report; `problems` is empty where all is as it was written. Raises InputError for other folders."""
    refuse(root)
    layout = Layout(root)
    record = read_run(layout)
    if record is None:
        raise InputError([Problem(str(root), "no run.json in it", "a folder that `kimik3-prep encode` wrote")])
    run = _Run(layout, record.recipe)
    findings = list(run.findings())
    return {
        "path": str(root),
        "finished": layout.index.is_file(),
        "rows": run.rows,
        "images": run.images,
        "shards": run.shards,
        "bytes": run.bytes,
        "problems": [asdict(finding) for finding in findings],
    }


class _Run:
    """One pass over a folder; counts what it has read."""

    def __init__(self, layout: Layout, recipe: Recipe) -> None:
        self.layout = layout
        self.recipe = recipe
        self.rows = self.images = self.shards = self.bytes = 0

    def findings(self) -> Iterator[Finding]:
        """Everything wrong, in the order of the files."""
        planned: set[str] = set()
        parts: list[pa.Table] | None = []
        index: pa.Table | None
        try:
            for name, rows in split_shards(read_plan(self.layout)):
                self.rows += rows.num_rows
                if self.recipe.index_only:
                    index = planned_table(rows, self.recipe.dedupe == "content")
                elif name is None:
                    index = index_table(rows, {})
                else:
                    planned.add(name)
                    index = self._index(name)
                    yield from self._shard(name, rows, index)
                if index is None:
                    parts = None
                elif parts is not None:
                    parts.append(index)
        except InputError as error:
            parts = None
            todo = "run the same encode command with --overwrite"
            yield Finding("plan.parquet", None, error.problems[0].what, todo)
        else:
            yield from self._merged(parts)
        yield from self._extra(planned if parts is not None or planned else None)

    # --- shards ---

    def _index(self, name: str) -> pa.Table | None:
        try:
            return read_index(self.layout.shard_index(name)).replace_schema_metadata(None)
        except InputError:
            return None

    def _shard(self, name: str, rows: pa.Table, index: pa.Table | None) -> Iterator[Finding]:
        path, file = self.layout.shard_index(name), f"shards/{name}.safetensors"
        todo = f"delete index.parquet, shards/{name}.parquet and {file}, then {_AGAIN}"
        for missing in (path, self.layout.shard(name)):
            if not missing.is_file():
                yield Finding(f"shards/{missing.name}", None, "is missing", todo)
        if index is None:
            if path.is_file():
                yield Finding(f"shards/{path.name}", None, "cannot be read as an index", todo)
            return
        group = name.rpartition("-")[0]
        yield from self._index_matches(path, rows, index, self.recipe.metadata(group, name), todo)
        if not self.layout.shard(name).is_file():
            return
        try:
            shard = open_shard(self.layout.shard(name))
        except InputError as error:
            yield Finding(file, None, error.problems[0].what, todo)
            return
        self.shards += 1
        yield from self._bytes_match(shard, file, ShardFormat.of(self.recipe, group), index, todo)

    def _index_matches(
        self, path: Path, rows: pa.Table, index: pa.Table, about: dict[str, Any], todo: str
    ) -> Iterator[Finding]:
        """The index against the plan: with the outcomes it tells, it must be the table that the run would write."""
        file = f"shards/{path.name}"
        if _about(path) != canonical_json(about):
            yield Finding(file, None, "its metadata is not this run's", todo)
        if index["item"].to_pylist() != rows["item"].to_pylist():
            yield Finding(file, None, "its rows are not those that were planned for this shard", todo)
            return
        planned = rows["row"].to_pylist()
        outcomes: dict[int, Outcome] = {}
        for row, told in zip(planned, index.to_pylist(), strict=True):
            outcomes.setdefault(row, _outcome(told))
        yield from _differences(file, index_table(rows, outcomes), index, "the plan", todo)
        places = [outcomes[row] for row in sorted(outcomes)]
        stored = [place for place in places if isinstance(place, Stored)]
        counts = dict(zip(planned, rows["patch_count"].to_pylist(), strict=True))
        kept = [counts[row] for row in sorted(outcomes) if isinstance(outcomes[row], Stored)]
        starts = [0, *np.cumsum(kept).tolist()][: len(kept)]
        if [place.row for place in stored] != list(range(len(stored))) or [p.patch_start for p in stored] != starts:
            yield Finding(file, None, "its rows and offsets do not follow one another without gaps", todo)

    def _bytes_match(self, shard: Shard, file: str, form: ShardFormat, index: pa.Table, todo: str) -> Iterator[Finding]:
        """The shard's header, grids and patches against its index. Between them these cover every byte of the file."""
        names = ["id", "row", "patch_start", "patch_count", "grid_t", "grid_h", "grid_w", "checksum"]
        images: dict[int, dict[str, Any]] = {}
        for told in index.select(names).to_pylist():
            if told["row"] is not None:
                images.setdefault(told["row"], told)
        patches = sum(told["patch_count"] or 0 for told in images.values())
        header = form.header(len(images), patches)
        with open(shard.path, "rb") as raw:
            same = raw.read(len(header)) == header
        size = len(header) + 24 * len(images) + patches * form.patch_bytes
        if not same or (found := os.path.getsize(shard.path)) != size:
            what = "its header is not this run's" if not same else f"it has {found:,} bytes, its index says {size:,}"
            yield Finding(file, None, what, todo)
            return
        grids, pixels = shard.raw("grid_thws"), shard.raw("pixel_values")
        self.images += len(images)
        self.bytes += size
        for row, told in images.items():
            grid = [told["grid_t"], told["grid_h"], told["grid_w"]]
            if not 0 <= row < len(grids) or grids[row].tolist() != grid:
                stored = grids[row].tolist() if 0 <= row < len(grids) else "not there"
                yield Finding(file, told["id"], f"grid_thws[{row}] is {stored}, the index says {grid}", todo)
                continue
            begin, count = told["patch_start"], told["patch_count"]
            values = np.ascontiguousarray(pixels[begin : begin + count])
            if xxhash.xxh3_128_hexdigest(values.view(np.uint8).data) != told["checksum"]:
                what = f"pixel_values[{begin}:{begin + count}] are not the bytes that were stored (checksum)"
                yield Finding(file, told["id"], what, todo)

    # --- the whole ---

    def _merged(self, parts: list[pa.Table] | None) -> Iterator[Finding]:
        """index.parquet against the shard indexes and the rows that failed while planning."""
        file, todo = "index.parquet", f"delete index.parquet, then {_AGAIN}"
        if not self.layout.index.is_file():
            yield Finding(file, None, "is missing: the run is not finished", _AGAIN)
            return
        try:
            index = read_index(self.layout.index).replace_schema_metadata(None)
        except InputError as error:
            yield Finding(file, None, error.problems[0].what, todo)
            return
        if _about(self.layout.index) != canonical_json(self.recipe.metadata()):
            yield Finding(file, None, "its metadata is not this run's", todo)
        if index["item"].to_pylist() != list(range(self.rows)):
            what = f"its rows are not the {self.rows:,} manifest rows, each once and in order"
            yield Finding(file, None, what, todo)
        elif parts is not None:
            merged = pa.concat_tables([INDEX_SCHEMA.empty_table(), *parts])
            order = np.argsort(merged["item"].to_numpy(), kind="stable")
            if not np.array_equal(merged["item"].to_numpy()[order], np.arange(self.rows)):
                yield Finding("plan.parquet", None, "it does not place every manifest row once", todo)
            else:
                yield from _differences(file, merged.take(pa.array(order)), index, "the shard indexes", todo)

    def _extra(self, planned: set[str] | None) -> Iterator[Finding]:
        """Files with names of ours that no finished run has. Files of others are nobody's business."""
        left = f"delete it, or {_AGAIN}: if its run was killed, that cleans up"
        for name in (*(path.name for path in locks(self.layout.root)), *(f"{name}.tmp" for name in OURS_IN_ROOT)):
            if (self.layout.root / name).exists():
                yield Finding(name, None, "is left of a run that was killed, or that goes on now", left)
        for path in sorted(self.layout.shards.glob("*")):
            file = f"shards/{path.name}"
            if OURS.fullmatch(path.name) and path.suffix == ".tmp":
                yield Finding(file, None, "is left of a run that was killed, or that goes on now", left)
            elif OURS.fullmatch(path.name) and planned is not None and path.stem not in planned:
                yield Finding(file, None, "belongs to no shard of the plan", "delete it")


def _about(path: Path) -> str:
    """The run's metadata in an index."""
    found: bytes = (parquet.read_schema(path).metadata or {}).get(METADATA_KEY.encode(), b"")
    return found.decode("utf-8", "replace")


def _outcome(told: dict[str, Any]) -> Outcome:
    """What an index row says became of its image."""
    if told["row"] is None:
        return ItemError(told["error_code"], told["error_message"])
    names = ("row", "patch_start", "mode", "format", "exif_orientation", "content_hash", "checksum")
    return Stored(**{name: told[name] for name in names})


def _differences(file: str, expected: pa.Table, found: pa.Table, source: str, todo: str) -> Iterator[Finding]:
    """The first column of the first row that is not as it should be."""
    if found.equals(expected):
        return
    for begin in range(0, expected.num_rows, 1024):
        if found.slice(begin, 1024).equals(expected.slice(begin, 1024)):
            continue
        pairs = zip(expected.slice(begin, 1024).to_pylist(), found.slice(begin, 1024).to_pylist(), strict=True)
        for should, told in pairs:
            for name in (name for name in should if should[name] != told[name]):
                what = f"{name} is {told[name]!r}, {source} says {should[name]!r}"
                yield Finding(file, should["id"], what, todo)
                return
