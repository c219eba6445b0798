"""A finished run as it lies on disk, read back: which row is whose, and the stored patches of any rows.

Numpy and Arrow only. `features.py` makes tensors of it, `pictures.py` pictures.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import ChecksumDiffers, FailedItem, InputError, ItemError, Problem, SpanDiffers, StoreError
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.shard_file import open_shard
from kimik3_prep.output.tables import index_metadata
from kimik3_prep.remote import scheme

#: An item: its id, or its manifest row from 0 (negative: from the end).
Key = str | SupportsIndex

_NUMBERS = ("row", "patch_start", "patch_count", "grid_h", "grid_w", "num_tokens")
_ABOUT = ("fingerprint", "dtype", "image_mean", "image_std", "patch_size", "merge_size")
_OPEN_SHARDS = 64  # each map holds a file descriptor, of which a process has about a thousand

Ints = npt.NDArray[np.int64]


class OpenShard(NamedTuple):
    """A shard, mapped read-only."""

    pixels: npt.NDArray[Any]
    """pixel_values as stored, `[patches, 3, p, p]`."""

    grids: Ints
    """grid_thws, `[images, 3]`."""

    ends: Ints
    """Where the patches of each grid end."""

    begin: int
    """The byte of the file where patches begin."""


class StoredRun:
    """The index of a finished run in memory, its shards mapped as they are needed. Rows are manifest rows from 0.

    table: the index. dtype, patch_size, merge_size, mean, std: of all its shards. grid_h, grid_w, num_tokens: int64 by
    row, -1 for failed items. ok: the rows that have features, rising.
    index_only: there are no shards, so that patches are computed from the images, as levels (dtype uint8).

    images: the folder that image paths of an index-only run start from; None for the one it was made with.
    check: compare the checksum of every item that is read.

    Raises InputError for a folder that is no finished run.
    """

    def __init__(self, layout: Output, images: Path | None = None, check: bool = False) -> None:
        self._check = check
        self.layout = layout
        self._stamp = layout.index_stamp()
        table = _read_finished(self.layout)
        about = _metadata(self.layout, table)
        self.dtype, self.patch_size = str(about["dtype"]), int(about["patch_size"])
        self.merge_size = int(about["merge_size"])
        self.mean, self.std = tuple(about["image_mean"]), tuple(about["image_std"])
        self._fingerprint = about["fingerprint"]
        self.index_only = bool(about.get("index_only", False))
        self._images = images
        self._names: list[str] = sorted(pc.unique(table["shard"].drop_null()).to_pylist())
        self._shard = pc.fill_null(pc.index_in(table["shard"], pa.array(self._names, pa.string())), -1).to_numpy()
        self._open = lru_cache(_OPEN_SHARDS)(self._open_shard)
        self._take(table)

    def _take(self, table: pa.Table) -> None:
        """Keep the rows of an index."""
        self.table = table
        # Numbers as numpy columns: an element costs no Arrow scalar, and a million rows no million objects.
        numbers: dict[str, Ints] = {name: pc.fill_null(self.table[name], -1).to_numpy() for name in _NUMBERS}
        self._row, self._start, self._count, self.grid_h, self.grid_w, self.num_tokens = numbers.values()
        self._is_ok: npt.NDArray[np.bool_] = pc.equal(self.table["status"], "ok").to_numpy()
        self.ok: Ints = np.flatnonzero(self._is_ok)

    @property
    def name(self) -> str:
        """Where it lies, for people."""
        return self.layout.name

    @property
    def _index(self) -> str:
        """Where the index is, for people."""
        return self.layout.place_of(self.layout.index)

    @property
    def patch_bytes(self) -> int:
        """Bytes of a stored patch."""
        return int(DTYPES[self.dtype].numpy.itemsize) * 3 * self.patch_size**2

    @cached_property
    def lines(self) -> Ints:
        """The manifest line of each row."""
        return np.asarray(self.table["line"].to_numpy(), np.int64)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    # --- rows ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> int | None:
        """The row with this id, None where there is none."""
        ids = self.table["id"]

        def at(row: Any) -> str:
            return str(ids[int(row)])

        # Arrow sorts UTF-8 bytes, Python compares code points: the same order.
        place = bisect_left(self._by_id, name, key=at)
        return int(self._by_id[place]) if place < len(self) and at(self._by_id[place]) == name else None

    @cached_property
    def _by_id(self) -> Ints:
        """Rows in the order of their ids: eight bytes a row, where a dict of strings would take a hundred."""
        return np.asarray(pc.sort_indices(self.table["id"]).to_numpy(), np.int64)

    def ready(self, key: Key) -> int:
        """The row of an item that has features. Raises KeyError, IndexError, or FailedItem for one that has none."""
        if isinstance(key, str):
            found = self.find(key)
            if found is None:
                raise KeyError(f"no item {key!r} in {self.name}")
            row = found
        else:
            row = operator.index(key)
            row += len(self) if row < 0 else 0
            if not 0 <= row < len(self):
                raise IndexError(f"no row {operator.index(key):,} in {self.name}, which has {len(self):,}")
        if not self._is_ok[row]:
            raise self.failure(row)
        return row

    def by_shard(self) -> Ints:
        """The rows that have features as the shards store them; rows that share a span stand together, rising."""
        return self.ok[np.lexsort((self._start[self.ok], self._shard[self.ok]))]  # a stable sort

    def values(self, row: int) -> dict[str, Any]:
        """A row of the index, every column by name."""
        found: dict[str, Any] = self.table.slice(row, 1).to_pylist()[0]
        return found

    def label(self, row: int) -> str:
        """How a message names the item: `line 3, sunset`."""
        return f"line {self.table['line'][row]}, {self.table['id'][row]}"

    def failed(self) -> list[FailedItem]:
        """The failed items in manifest order, each as the error that asking for it raises."""
        return [self.failure(int(row)) for row in np.flatnonzero(~self._is_ok)]

    def failure(self, row: int) -> FailedItem:
        """Why a failed item has no features."""
        values = self.table.select(["id", "line", "error_code", "error_message"]).slice(row, 1).to_pylist()[0]
        return FailedItem(values["error_code"], values["error_message"], values["id"], values["line"])

    # --- patches ------------------------------------------------------------------------------------------------

    def patches(self, rows: list[int]) -> npt.NDArray[Any]:
        """The stored patches of some rows, one after the other, `[ΣL, 3, p, p]` as stored: one copy, no more.

        Raises StoreError where a shard is gone, damaged, or does not belong to the index.
        """
        spans = self.spans(rows)
        packed = np.empty((sum(map(len, spans)), 3, self.patch_size, self.patch_size), DTYPES[self.dtype].numpy)
        begin = 0
        for span in spans:
            packed[begin : begin + len(span)] = span
            begin += len(span)
        return packed

    def spans(self, rows: Sequence[int]) -> list[npt.NDArray[Any]]:
        """The patches of each row, mapped where a shard holds them. Raises StoreError as `patches`."""
        return [self._computed(row) if self.index_only else self._mapped(row) for row in rows]

    def portions(self, rows: Ints) -> Iterator[list[int]]:
        """Rows that are worth asking for together, in order: one by one, where they lie on this machine."""
        return ([row] for row in rows.tolist())

    def _mapped(self, row: int) -> npt.NDArray[Any]:
        """The patches of a row in its mapped shard, whose own grids say where they are."""
        name = self._names[self._shard[row]]
        pixels, grids, ends, _ = self._open(name)
        place, begin, count = (int(numbers[row]) for numbers in (self._row, self._start, self._count))
        grid = [1, int(self.grid_h[row]), int(self.grid_w[row])]
        agree = 0 <= place < len(grids) and grids[place].tolist() == grid and count == grid[1] * grid[2]
        if not agree or begin + count != ends[place] or int(self.num_tokens[row]) < 1:
            raise SpanDiffers(self.label(row), self.layout.place_of(self.layout.shard(name)))
        span = pixels[begin : begin + count]
        if self._check and self.table["checksum"][row].as_py() != xxhash.xxh3_128_hexdigest(span.data):
            raise ChecksumDiffers(self.label(row), self.layout.place_of(self.layout.shard(name)))
        return span

    # --- without shards -----------------------------------------------------------------------------------------

    def _computed(self, row: int) -> npt.NDArray[np.uint8]:
        """The levels of an item, from its image. Raises FailedItem where that is not the one that was indexed."""
        from kimik3_prep.run.item import item_patches, planned_items

        base, recipe, planned = self._recipe
        (item,) = planned_items(planned.slice(row, 1))
        try:
            # A copy of a file has another time.
            _, levels = item_patches(item, base, recipe, same_file=self._images is None)
        except ItemError as error:
            raise self._failed(row, error) from error
        if len(levels) != self._count[row] or len(levels) != self.grid_h[row] * self.grid_w[row]:
            raise SpanDiffers(self.label(row), self._index)
        return levels

    def _failed(self, row: int, error: ItemError) -> FailedItem:
        return FailedItem(error.code, error.message, self.table["id"][row].as_py(), self.table["line"][row].as_py())

    @cached_property
    def _recipe(self) -> tuple[str, Recipe, pa.Table]:
        """Where image paths start, how features are made, and the plan in manifest order: it has data: URLs whole."""
        record = self.layout.record()
        base = None
        if record is not None and record.recipe.fingerprint == self._fingerprint:
            base = str(self._images) if self._images else self.layout.image_base(record)
        if record is None or base is None:
            run = self.layout.place_of(self.layout.run)
            raise StoreError(f"{run} is not that of {self._index}, which has no features of its own")
        plan = pa.concat_tables(self.layout.read_plan())
        return base, record.recipe, plan.take(pc.sort_indices(plan["item"]))

    def _open_shard(self, name: str) -> OpenShard:
        """Map a shard read-only. Raises StoreError."""
        try:
            path = self.layout.shard(name)
            shard = open_shard(path)
        except InputError as error:  # its problems would not survive the way from a DataLoader's worker
            raise StoreError("; ".join(map(str, error.problems))) from error
        if shard.metadata.get("fingerprint") != self._fingerprint:
            raise StoreError(f"{path} is of another run than {self._index}")
        pixels, patch = shard.tensors["pixel_values"], self.patch_size
        kind = DTYPES[self.dtype].safetensors
        if pixels.dtype != kind or pixels.shape[1:] != (3, patch, patch):
            held = f"{path} holds {pixels.dtype} {list(pixels.shape)}"
            raise StoreError(f"{held}, {self._index} says {kind} [patches, 3, {patch}, {patch}]")
        if self.layout.index_stamp() != self._stamp:  # a retry of failed items moves the others in their shard
            raise StoreError(f"{self._index} is not the one that was read: the run was changed; open it anew")
        grids: Ints = np.asarray(shard.raw("grid_thws"))
        ends: Ints = np.cumsum(grids.prod(-1))
        values = np.asarray(shard.raw("pixel_values"))
        if (grids < 1).any() or (grids > len(values)).any() or (len(ends) and ends[-1] != len(values)):
            raise SpanDiffers("grid_thws", str(path))
        return OpenShard(values, grids, ends, pixels.begin)


class StoredRuns(StoredRun):
    """Several finished runs as one: rows, and lines, go on from folder to folder.

    Raises InputError for a folder that is no finished run, for runs whose recipes make other bytes of an image, and for
    an id that two of them hold.
    """

    def __init__(self, runs: Sequence[StoredRun]) -> None:
        self._runs, first = runs, runs[0]
        _refuse_unequal(runs)
        self.dtype, self.patch_size, self.merge_size = first.dtype, first.patch_size, first.merge_size
        self.mean, self.std, self.index_only = first.mean, first.std, first.index_only
        self._begins: Ints = np.cumsum([0, *map(len, runs[:-1])])
        self._take(pa.concat_tables([run.table.replace_schema_metadata(None) for run in runs]))
        _refuse_repeated(self.table["id"], runs)

    @property
    def name(self) -> str:
        """Where they lie, for people."""
        return ", ".join(run.name for run in self._runs)

    @cached_property
    def lines(self) -> Ints:
        """The manifest line of each row; those of a further folder go on after the last one's."""
        lines = [run.lines for run in self._runs]
        return _joined(lines, np.cumsum([0, *(each.max(initial=0) for each in lines[:-1])]))

    def label(self, row: int) -> str:
        """How a message names the item: `more: line 3, sunset`."""
        run, own = self._at(row)
        return f"{run.name}: {run.label(own)}"

    def by_shard(self) -> Ints:
        """The rows that have features as the shards store them, folder by folder."""
        return _joined([run.by_shard() for run in self._runs], self._begins)

    def spans(self, rows: Sequence[int]) -> list[npt.NDArray[Any]]:
        """The patches of each row, from its own folder."""
        spans: dict[int, npt.NDArray[Any]] = {}
        for number, run in enumerate(self._runs):
            mine = [row for row in rows if self._number(row) == number]
            spans |= zip(mine, run.spans([row - int(self._begins[number]) for row in mine]), strict=True)
        return [spans[row] for row in rows]

    def portions(self, rows: Ints) -> Iterator[list[int]]:
        """Rows that are worth asking for together, in order; never of two folders."""
        for number, group in groupby(rows.tolist(), self._number):
            begin = int(self._begins[number])
            for portion in self._runs[number].portions(np.asarray(list(group), np.int64) - begin):
                yield [row + begin for row in portion]

    def _at(self, row: int) -> tuple[StoredRun, int]:
        """The run that holds a row, and its row there."""
        number = self._number(row)
        return self._runs[number], row - int(self._begins[number])

    def _number(self, row: int) -> int:
        """Which run holds a row."""
        return int(np.searchsorted(self._begins, row, "right")) - 1


def _joined(parts: Sequence[Ints], shifts: Ints) -> Ints:
    """Numbers of several runs one after the other, each run's moved up by its shift."""
    return np.concatenate([part + shift for part, shift in zip(parts, shifts, strict=True)])


def _refuse_unequal(runs: Sequence[StoredRun]) -> None:
    """Raise InputError that names each fact by which a run would make other bytes of an image than the first."""
    first = _recipe_of(runs[0])
    hint = "encode it with the settings of the first, or open it as a store of its own"
    problems = [
        Problem(f"{run.name}: {fact}", f"it is {theirs!r}, and {mine!r} in {runs[0].name}", hint=hint)
        for run in runs[1:]
        for fact, mine, theirs in first.differences(_recipe_of(run))
    ]
    if problems:
        raise InputError(problems)


def _recipe_of(run: StoredRun) -> Recipe:
    """The recipe of a run. Raises InputError where it is not there, or not that of the index."""
    record = run.layout.record()
    if record is None or record.recipe.fingerprint != index_metadata(run.table).get("fingerprint"):
        what = "is gone, or of another run than the index, so that nobody knows whether it fits the other folders"
        raise InputError([Problem(run.layout.place_of(run.layout.run), what)])
    return record.recipe


def _refuse_repeated(ids: pa.ChunkedArray, runs: Sequence[StoredRun]) -> None:
    """Raise InputError that names ids which several runs hold: they would each hide another."""
    if pc.count_distinct(ids).as_py() == len(ids):
        return
    counts = pc.value_counts(ids)
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    named = ", ".join(map(repr, repeated.slice(0, 3).to_pylist()))
    holders = [run.name for run in runs if run.find(repeated[0].as_py()) is not None]
    what = f"{len(repeated):,} ids are in several folders: {named}{', …' if len(repeated) > 3 else ''}"
    hint = f"{repeated[0].as_py()!r} is in {' and '.join(holders)}; `encode --since` leaves out what a folder holds"
    raise InputError([Problem("ids", what, "an id in one folder only", hint)])


def _read_finished(layout: Output) -> pa.Table:
    """The index of a finished run. Raises InputError, which tells an unfinished run from a folder of something else."""
    root, expected = layout.name, "what `kimik3-prep encode` wrote"
    if layout.index.is_file():
        return layout.read_index()
    if not (layout.root.is_dir() or scheme(root)):
        what = "is a file" if layout.root.exists() else "does not exist"
        raise InputError([Problem(root, what, expected)])
    if layout.record() is None:
        raise InputError([Problem(root, "no index.parquet and no run.json in it", expected)])
    what, hint = "the run in it is not finished", "run the same encode command again: it goes on where it was"
    raise InputError([Problem(root, what, hint=hint)])


def _metadata(layout: Output, table: pa.Table) -> dict[str, Any]:
    """What the index says of all its shards. Raises InputError for an index that does not say it."""
    metadata = index_metadata(table)
    missing = [name for name in _ABOUT if name not in metadata]
    if missing:
        what = f"does not say the {missing[0]} of its shards"
        raise InputError(
            [Problem(layout.place_of(layout.index), what, "the index.parquet that `kimik3-prep encode` wrote")]
        )
    return metadata
