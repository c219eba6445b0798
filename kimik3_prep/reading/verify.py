"""Whether an output folder holds what its run says: every file, every row, every byte. On request, also every image.

run.json -> plan.parquet -> each shard's index -> each shard's bytes -> index.parquet. Each file is compared with the
one before it, so a byte that was cut, flipped, swapped, lost or added differs from something.

Two kinds of findings differ in their advice. Damage means that a file is not the one that was written. A difference
means that the files are as they were written, and that the image or the software of today gives something else.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from kimik3_prep.disk import LOCKS
from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.images.address import resolve
from kimik3_prep.images.decode import codec_versions
from kimik3_prep.images.source import foreign_errors
from kimik3_prep.manifest.read import base_of
from kimik3_prep.manifest.report import show
from kimik3_prep.output.folder import Output, RunRecord
from kimik3_prep.output.recipe import Recipe, canonical_json
from kimik3_prep.output.shard_file import ShardFormat, open_shard
from kimik3_prep.output.tables import (
    Outcome,
    Stored,
    index_metadata,
    index_table,
    planned_table,
    read_index,
    split_shards,
)
from kimik3_prep.reading.fetched import fetched_output
from kimik3_prep.remote import as_url
from kimik3_prep.run.item import PlannedItem, decode_item, item_patches, planned_items

_AGAIN = "run the same encode command again"
_MERGE = f"move index.parquet out of the folder, then {_AGAIN}: it writes it anew from the indexes of the shards"
_COMPARED_AT_ONCE = 1024  # index rows


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong."""

    file: str
    """The file, relative to the folder."""
    item: str | None
    """The id; null if the whole file is meant."""
    what: str
    """What is wrong with it."""
    todo: str
    """What a person can do. It never destroys the only good copy of anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was checked, and everything that is wrong."""

    path: str
    """The folder, as it was given."""
    finished: bool
    """The run is finished: index.parquet is there."""
    rows: int
    """Manifest rows."""
    images: int
    """Stored images whose bytes were read."""
    shards: int
    """Shards that were read."""
    bytes: int
    """Bytes of these shards."""
    compared: int | None = None
    """Images that were computed again; null if no option asked for that."""
    problems: tuple[Finding, ...]
    """Everything that is wrong; empty if everything is as it was written."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the stored images are compared with, beside the folder's own checksums."""

    manifest: str | None = None
    """The manifest that was encoded: relative image paths start beside it. None: they start in the working folder."""
    sample: int | None = None
    """So many images, evenly spread. None: all."""
    backend: bool = True
    """Compute them with this package's CPU backend."""
    processor: Path | None = None
    """A checkpoint folder whose image processor computes them too. Rows of features made elsewhere are left out."""
    trusted: bool = False
    """Whether the Python code in that folder may run."""


def verify(place: Path | str, comparison: Comparison | None = None) -> Verification:
    """Check an output, in a folder or at a URL; from there its shards come one at a time.

    Raises InputError where it is none, and where the comparison cannot be made.
    """
    if (url := as_url(place)) is not None:
        with fetched_output(url) as output:
            return _verify(output, comparison)
    return _verify(Output(Path(place)), comparison)


def _verify(layout: Output, comparison: Comparison | None) -> Verification:
    record = layout.record()
    if record is None:
        raise InputError([Problem(layout.name, "no run.json in it", "what `kimik3-prep encode` wrote")])
    again = None if comparison is None else _Again(layout, record, comparison)
    run = _Run(layout, record.recipe)
    findings = list(run.findings())
    if again is not None:
        findings += again.findings()
    return Verification(
        path=layout.name,
        finished=layout.index.is_file(),
        rows=run.rows,
        images=run.images,
        shards=run.shards,
        bytes=run.bytes,
        problems=tuple(findings),
        compared=None if again is None else again.compared,
    )


@dataclass(frozen=True, slots=True)
class _Image:
    """One stored image as its shard's index describes it."""

    id: str
    row: int
    patch_start: int
    patch_count: int
    grid: list[int]
    content_hash: str
    checksum: str

    def patches(self, pixels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Its stored bytes."""
        values = np.ascontiguousarray(pixels[self.patch_start : self.patch_start + self.patch_count])
        return values.reshape(-1).view(np.uint8)

    def intact(self, stored: npt.NDArray[np.uint8]) -> bool:
        """Whether these are the bytes that were stored."""
        return bool(xxhash.xxh3_128_hexdigest(stored.data) == self.checksum)

    def unlike(self, grids: npt.NDArray[np.int64], pixels: npt.NDArray[Any]) -> str:
        """How the shard differs from what the index says of this image; empty where it does not."""
        if grids[self.row].tolist() != self.grid:
            return f"grid_thws[{self.row}] is {grids[self.row].tolist()}, the index says {self.grid}"
        if not self.intact(self.patches(pixels)):
            span = f"pixel_values[{self.patch_start}:{self.patch_start + self.patch_count}]"
            return f"{span} are not the bytes that were stored (checksum)"
        return ""


def _images(index: pa.Table) -> list[_Image]:
    """The stored images of a shard's index, each once, in the order of its rows."""
    names = ["id", "row", "patch_start", "patch_count", "grid_t", "grid_h", "grid_w", "content_hash", "checksum"]
    images: dict[int, _Image] = {}
    for values in index.select(names).filter(pc.is_valid(index["row"])).to_pylist():
        grid = [values.pop(name) for name in ("grid_t", "grid_h", "grid_w")]
        for name in ("patch_start", "patch_count"):
            values[name] = values[name] or 0
        images.setdefault(values["row"], _Image(**values, grid=grid))
    return list(images.values())


# --- damage -------------------------------------------------------------------------------------------------------


class _Run:
    """One pass over a folder; counts what it has read.

    A shard's index and its rows in index.parquet are two witnesses of the same facts. The plan, the shard's bytes and
    the other witness show which file is damaged. Where nothing can show it, both are named.
    """

    def __init__(self, layout: Output, recipe: Recipe) -> None:
        self.layout = layout
        self.recipe = recipe
        self.rows = self.images = self.shards = self.bytes = 0
        self._planned: bool = False
        """Whether the plan is there and sound."""
        self._index: pa.Table | None = None
        """index.parquet, where it can be read and has every manifest row once and in order."""

    def findings(self) -> Iterator[Finding]:
        """Everything wrong."""
        yield from self._open_plan()
        yield from self._open_index()
        if self._planned:
            yield from self._planned_rows()
        else:
            for name in sorted({path.stem for path in self._in_shards() if path.suffix == ".parquet"}):
                yield from self._shard(name, None)
        yield from self._left_over()

    # --- the two files that describe everything ---

    def _open_plan(self) -> Iterator[Finding]:
        todo = f"move plan.parquet out of the folder, then {_AGAIN}: it goes on if it can plan the same"
        try:
            places = [rows["item"].to_numpy() for rows in self.layout.read_plan()]
        except InputError as error:
            yield Finding("plan.parquet", None, error.problems[0].what, todo)
            return
        items = np.sort(np.concatenate([np.zeros(0, np.int64), *places]))
        if not np.array_equal(items, np.arange(len(items))):
            yield Finding("plan.parquet", None, "it does not place every manifest row once", todo)
            return
        self._planned, self.rows = True, len(items)

    def _open_index(self) -> Iterator[Finding]:
        file = "index.parquet"
        if not self.layout.index.is_file():
            yield Finding(file, None, "is missing: the run is not finished", _AGAIN)
            return
        try:
            index = self.layout.read_index()
        except InputError as error:
            yield Finding(file, None, error.problems[0].what, _MERGE)
            return
        if not _is_of(index, self.recipe.metadata()):
            yield Finding(file, None, "its metadata is not this run's", _MERGE)
        if not self._planned:
            self.rows = index.num_rows
        if index["item"].to_pylist() != list(range(self.rows)):
            what = f"its rows are not the {self.rows:,} manifest rows, each once and in order"
            yield Finding(file, None, what, _MERGE)
            return
        self._index = index.replace_schema_metadata(None)

    def _rows_of(self, items: pa.ChunkedArray) -> pa.Table | None:
        """These manifest rows of index.parquet; None without a sound one."""
        if self._index is None or not np.isin(items.to_numpy(), np.arange(self._index.num_rows)).all():
            return None
        return self._index.take(items.combine_chunks())

    # --- shards ---

    def _planned_rows(self) -> Iterator[Finding]:
        """Every shard of the plan, and the rows that are in none."""
        for name, rows in split_shards(self.layout.read_plan()):
            if name is not None and not self.recipe.index_only:
                yield from self._shard(name, rows)
            elif (actual := self._rows_of(rows["item"])) is not None:
                measured = self.recipe.dedupe == "content"
                expected = planned_table(rows, measured) if self.recipe.index_only else index_table(rows, {})
                if difference := _difference(expected, actual):
                    yield Finding("index.parquet", difference.item, str(difference), _MERGE)

    def _shard(self, name: str, rows: pa.Table | None) -> Iterator[Finding]:
        """A shard, its index, and its rows in index.parquet. rows: of the plan, None without a sound one."""
        files = (f"shards/{name}.parquet", "index.parquet")
        todo = f"move index.parquet, {files[0]} and shards/{name}.safetensors out of the folder, then {_AGAIN}"
        own = yield from self._shard_index(name, files[0], todo)
        numbered = own if rows is None else rows
        merged = None if numbered is None else self._rows_of(numbered["item"])
        witnesses: dict[str, pa.Table] = {}
        for file, index in zip(files, (own, merged), strict=True):
            if index is None:
                continue
            if contradiction := _contradiction(rows, index):
                yield Finding(file, *contradiction, todo if index is own else _MERGE)
            else:
                witnesses[file] = index
        readable = yield from self._bytes(name, witnesses, todo)
        if len(witnesses) < 2:
            return
        first, second = witnesses.values()
        if difference := _difference(first, second, "checksum" if readable else ""):
            what = (
                f"{difference.column} is {difference.expected!r} in {files[0]} and {difference.actual!r} in {files[1]}"
            )
            for file in files:
                yield Finding(file, difference.item, f"{what}: one of the two files is damaged", todo)

    def _shard_index(self, name: str, file: str, todo: str) -> Generator[Finding, None, pa.Table | None]:
        """A shard's index, where it can be read and is of this shard."""
        path = self.layout.shard_index(name)
        if not path.is_file():
            yield Finding(file, None, "is missing", todo)
            return None
        try:
            index = read_index(path)
        except InputError as error:
            yield Finding(file, None, error.problems[0].what, todo)
            return None
        if not _is_of(index, self.recipe.metadata(_group(name), name)):
            yield Finding(file, None, "its metadata is not this run's", todo)
            return None
        return index.replace_schema_metadata(None)

    def _bytes(self, name: str, witnesses: dict[str, pa.Table], todo: str) -> Generator[Finding, None, bool]:
        """The shard's header, grids and patches, which are every byte of the file, against what the indexes say of it.

        Returns whether the patches could be compared with their checksums.
        """
        path, file = self.layout.shard(name), f"shards/{name}.safetensors"
        if not path.is_file():
            yield Finding(file, None, "is missing", todo)
            return False
        try:
            shard = open_shard(path)
        except InputError as error:
            yield Finding(file, None, error.problems[0].what, todo)
            return False
        self.shards += 1
        form = ShardFormat(self.recipe, _group(name))
        images, patches = (shard.tensors[tensor].shape[0] for tensor in ("grid_thws", "pixel_values"))
        header = form.header(images, patches)
        size, expected = os.path.getsize(path), len(header) + 24 * images + patches * form.patch_bytes
        with open(path, "rb") as raw:
            same = raw.read(len(header)) == header
        if not same or size != expected:
            what = f"it has {size:,} bytes, its header says {expected:,}" if same else "its header is not this run's"
            yield Finding(file, None, what, todo)
            return False
        self.bytes += size
        described = {index_file: _images(index) for index_file, index in witnesses.items()}
        unlike = {index_file: _unlike(images, patches, rows) for index_file, rows in described.items()}
        yield from self._blame(file, None, unlike, todo)
        fitting = {index_file: rows for index_file, rows in described.items() if not unlike[index_file]}
        if not fitting:
            return False
        self.images += images
        grids, pixels = shard.raw("grid_thws"), shard.raw("pixel_values")
        for row in range(images):
            unlike = {index_file: rows[row].unlike(grids, pixels) for index_file, rows in fitting.items()}
            yield from self._blame(file, next(iter(fitting.values()))[row].id, unlike, todo)
        return True

    def _blame(self, shard: str, item: str | None, unlike: dict[str, str], todo: str) -> Iterator[Finding]:
        """Name the damaged files. unlike: how the shard differs from each index; one without a difference clears it."""
        cleared = not all(unlike.values())
        for index_file, what in unlike.items():
            if what and cleared:
                yield Finding(index_file, item, what, _MERGE if index_file == "index.parquet" else todo)
        if unlike and not cleared:
            yield Finding(shard, item, next(iter(unlike.values())), todo)

    # --- what else lies there ---

    def _in_shards(self) -> list[PurePosixPath]:
        """The files in the folder of shards that have names of ours."""
        return [PurePosixPath(name) for name in self.layout.files() if name.startswith("shards/")]

    def _left_over(self) -> Iterator[Finding]:
        """Files with names of ours that no finished run has. Files with other names are not ours to judge."""
        what = "was left by a run that was killed, or belongs to one that is running now"
        todo = f"wait until no run works in the folder, then {_AGAIN}: it clears up"
        for name in self.layout.files():
            if name.endswith(".tmp") or LOCKS.fullmatch(name):
                yield Finding(name, None, what, todo)
        planned = {name for name, _ in split_shards(self.layout.read_plan())} if self._planned else None
        for path in self._in_shards():
            if planned is not None and path.suffix != ".tmp" and path.stem not in planned:
                yield Finding(str(path), None, "belongs to no shard of the plan", "move it out of the folder")


def _group(name: str) -> str:
    """`cpu` of `cpu-00000`."""
    return name.rpartition("-")[0]


def _is_of(index: pa.Table, metadata: dict[str, Any]) -> bool:
    """Whether an index says exactly this of its run."""
    return canonical_json(index_metadata(index)) == canonical_json(metadata)


def _unlike(images: int, patches: int, described: list[_Image]) -> str:
    """How a shard's sizes differ from what an index says of it; empty where they do not."""
    said = len(described), sum(image.patch_count for image in described)
    if said == (images, patches):
        return ""
    return f"the shard has {images:,} images of {patches:,} patches, the index says {said[0]:,} of {said[1]:,}"


def _contradiction(rows: pa.Table | None, index: pa.Table) -> tuple[str | None, str] | None:
    """Where a shard's index contradicts the plan or itself: `(item, sentence)`; None where it does neither.

    With the outcomes that it records, it must be the table that the run writes, without gaps between its images.
    """
    if rows is not None:
        if index["item"].to_pylist() != rows["item"].to_pylist():
            return None, "its rows are not those that were planned for this shard"
        outcomes: dict[int, Outcome] = {}
        for row, values in zip(rows["row"].to_pylist(), index.to_pylist(), strict=True):
            outcomes.setdefault(row, _outcome(values))
        if difference := _difference(index_table(rows, outcomes), index):
            return difference.item, str(difference)
    images = _images(index)
    ends = np.cumsum([image.patch_count for image in images]).tolist()
    if [image.row for image in images] != list(range(len(images))) or (
        [image.patch_start for image in images] != [0, *ends][: len(images)]
    ):
        return None, "its rows and offsets do not follow one another without gaps"
    return None


def _outcome(values: dict[str, Any]) -> Outcome:
    """What an index row says became of its image."""
    if values["row"] is None:
        return ItemError(values["error_code"], values["error_message"])
    names = ("row", "patch_start", "mode", "format", "exif_orientation", "content_hash", "checksum")
    return Stored(**{name: values[name] for name in names})


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first column that differs in the first row that differs."""

    item: str
    column: str
    expected: Any
    actual: Any

    def __str__(self) -> str:
        return f"{self.column} is {self.actual!r}, it should be {self.expected!r}"


def _difference(expected: pa.Table, actual: pa.Table, ignored: str = "") -> _Difference | None:
    """How two tables with the same number of rows differ. ignored: a column that may differ."""
    if actual.equals(expected):
        return None
    for begin in range(0, expected.num_rows, _COMPARED_AT_ONCE):
        expected_rows, actual_rows = (table.slice(begin, _COMPARED_AT_ONCE) for table in (expected, actual))
        if actual_rows.equals(expected_rows):
            continue
        for right, wrong in zip(expected_rows.to_pylist(), actual_rows.to_pylist(), strict=True):
            for name in right:
                if right[name] != wrong[name] and name != ignored:
                    return _Difference(right["id"], name, right[name], wrong[name])
    return None


# --- differences --------------------------------------------------------------------------------------------------


class _Computer(Protocol):
    """Something that computes an image's features anew."""

    name: str

    def compute(self, item: PlannedItem, base: str) -> _Computed | None:
        """Compute the item's features; None for an item that it cannot take.

        Raises ItemError where the image cannot be read any more, or is another one.
        """


@dataclass(frozen=True, slots=True)
class _Computed:
    """The features of one item as of today."""

    content_hash: str
    """Of the encoded bytes that were read."""
    unlike: str = ""
    """Why there are no patches to compare, in words that go on after the computer's name."""
    patches: npt.NDArray[Any] | None = None
    """`[L, 3, p, p]`; None where `unlike` says why."""


class _Again:
    """Stored images computed anew. Only images whose stored bytes are intact: damage has a finding already."""

    def __init__(self, layout: Output, record: RunRecord, comparison: Comparison) -> None:
        self.compared = 0
        self._layout, self._record, self._sample = layout, record, comparison.sample
        self._base = base_of(comparison.manifest) if comparison.manifest else str(Path.cwd())
        recipe = record.recipe
        self._computers: list[_Computer] = [_Backend(recipe)] if comparison.backend else []
        if comparison.processor is not None:
            self._computers.append(_Processor(comparison.processor, recipe, comparison.trusted))
        if comparison.manifest is None:
            _check_base(layout, self._base)

    def findings(self) -> Iterator[Finding]:
        """What gives other bytes today."""
        total = sum(1 for _ in self._stored())
        count = min(self._sample or total, total)
        chosen = set(np.linspace(0, total - 1, count).astype(int).tolist())
        for number, (name, image, item) in enumerate(self._stored()):
            if number not in chosen:
                continue
            try:
                stored = image.patches(open_shard(self._layout.shard(name)).raw("pixel_values"))
            except InputError:
                continue
            if image.intact(stored):
                yield from self._compare(f"shards/{name}.safetensors", image, item, stored)

    def _stored(self) -> Iterator[tuple[str, _Image, PlannedItem]]:
        """Every stored image with its place in the plan, shard by shard; shards without a sound index are left out."""
        for name, rows in split_shards(_readable(self._layout)):
            if name is None or not self._layout.committed(name):
                continue
            try:
                index = self._layout.read_shard_index(name)
            except InputError:
                continue
            if index["item"].to_pylist() != rows["item"].to_pylist():
                continue
            planned_row = dict(zip(index["row"].to_pylist(), rows["row"].to_pylist(), strict=True))
            items = {item.row: item for item in planned_items(rows)}
            for image in _images(index):
                yield name, image, items[planned_row[image.row]]

    def _compare(self, file: str, image: _Image, item: PlannedItem, stored: npt.NDArray[np.uint8]) -> Iterator[Finding]:
        compared = False
        for computer in self._computers:
            try:
                result = computer.compute(item, self._base)
            except ItemError as error:
                compared = True
                yield Finding(file, image.id, f"the image cannot be computed again: {error}", "restore the image")
                continue
            if result is None:
                continue
            compared = True
            unlike = result.unlike
            if result.patches is not None and not np.array_equal(result.patches.reshape(-1).view(np.uint8), stored):
                unlike = "gives other bytes"
            if result.content_hash != image.content_hash:
                what = f"the image is another one now ({result.content_hash}, encoded was {image.content_hash})"
                yield Finding(file, image.id, what, "restore the image, or encode the new one into another folder")
            elif unlike:
                what = f"{computer.name} {unlike}; {_versions_compared(self._record)}"
                yield Finding(file, image.id, what, _DIFFERENT)
        self.compared += compared


_DIFFERENT = (
    "nothing is damaged: the stored bytes are those that were encoded. Compare with the versions of the run, "
    "or encode into another folder to get the bytes of today"
)


def _versions_compared(record: RunRecord) -> str:
    """Which versions differ between the run and this machine, as a sentence."""
    before = {**record.versions, **record.recipe.decoders}
    here = codec_versions(record.recipe.formats)
    for name in record.versions:
        try:
            here[name] = version(name)
        except PackageNotFoundError:
            continue
    changed = [name for name in sorted({*before, *here}) if before.get(name) != here.get(name)]
    if not changed:
        return "its versions are the run's own: " + ", ".join(f"{name} {before[name]}" for name in sorted(before))
    return "versions differ: " + ", ".join(
        f"{name} {before.get(name, 'none')} in the run and {here.get(name, 'none')} here" for name in changed
    )


def _readable(layout: Output) -> Iterator[pa.Table]:
    """The plan up to where it is damaged. That has a finding of its own."""
    with suppress(InputError):
        yield from layout.read_plan()


def _check_base(layout: Output, base: str) -> None:
    """Raises InputError where images were named relative to a manifest that lies elsewhere: none of them is here."""
    missing = ""
    for rows in _readable(layout):
        for image in rows.filter(pc.is_null(rows["error_code"]))["image"].to_pylist():
            if resolve(image, base) == resolve(image, "/"):
                continue
            if os.path.lexists(resolve(image, base)):
                return
            missing = missing or image
    if missing:
        what = f"{show(missing)} was named relative to the manifest's folder, and is not in this one"
        raise InputError([Problem("--against-source", what, hint="add --manifest FILE")])


class _Backend:
    """This package's CPU backend."""

    name = "the CPU backend"

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def compute(self, item: PlannedItem, base: str) -> _Computed:
        """As in `_Computer`."""
        met, patches = item_patches(item, base, self._recipe, same_file=False)
        return _Computed(met.content_hash, patches=patches)


class _Processor:
    """The image processor of a checkpoint folder, whose Python code runs."""

    name = "the checkpoint's processor"

    def __init__(self, folder: Path, recipe: Recipe, trusted: bool) -> None:
        self._recipe = recipe
        self._processor = _load_processor(folder, trusted)

    def compute(self, item: PlannedItem, base: str) -> _Computed | None:
        """As in `_Computer`. It takes no features made elsewhere, and no images scaled by --max-tokens."""
        from kimik3_prep.pixels.ready import ReadyFeatures, cast_features

        if item.made_elsewhere or item.in_patch_limit is not None:
            return None
        decoded = decode_item(item, base, self._recipe, same_file=False)
        try:
            with foreign_errors():
                result = self._processor.preprocess([{"type": "image", "image": decoded.image}], return_tensors="pt")
                grid = np.asarray(result["grid_thws"]).reshape(-1).tolist()
                pixels = np.ascontiguousarray(result["pixel_values"])
                features = ReadyFeatures(pixels, pixels.dtype.name)
                patches = cast_features(features, self._recipe.config, self._recipe.dtype)
        except ItemError as error:
            return _Computed(decoded.content_hash, f"fails: {error.message}")
        if grid != list(item.grid.thw):
            return _Computed(decoded.content_hash, f"gives the grid {grid}, stored is {list(item.grid.thw)}")
        return _Computed(decoded.content_hash, patches=np.ascontiguousarray(patches))


def _load_processor(folder: Path, trusted: bool) -> Any:
    """The checkpoint's image processor, an object with `preprocess`. Its code may raise anything.

    Raises InputError where nobody allowed the code to run, where transformers is missing, and where loading fails.
    """
    if not trusted:
        hint = "read its .py files, then add --trust-remote-code"
        raise InputError([Problem("--processor", f"would run the Python code in {folder}", hint=hint)])
    try:
        from transformers import AutoImageProcessor
    except ImportError:
        hint = "pip install 'kimik3-prep[verify]'"
        raise InputError([Problem("--processor", "needs transformers, which is not installed", hint=hint)]) from None
    loader: Any = AutoImageProcessor
    try:
        return loader.from_pretrained(str(folder), trust_remote_code=True)
    except Exception as error:
        what = f"no image processor could be loaded from it: {type(error).__name__}: {str(error).strip()[:500]}"
        hint = "a checkpoint folder with preprocessor_config.json and the .py files it names"
        raise InputError([Problem(str(folder), what, hint)]) from error
