"""Whether an output folder holds what its run says: every file, every row, every byte. On request, also every image.

run.json -> plan.parquet -> each shard's index -> each shard's bytes -> index.parquet. Each file is compared with the
one before it, so a byte that was cut, flipped, swapped, lost or added differs from something.

Two kinds of findings differ in their advice. Damage means that a file is not the one that was written. A difference
means that the files are as they were written, and that the image or the software of today gives something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pyarrow import parquet

from kimik3_prep.disk import locks
from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.images.address import resolve
from kimik3_prep.images.decode import codec_versions
from kimik3_prep.images.source import foreign_errors
from kimik3_prep.manifest.read import base_of
from kimik3_prep.manifest.row import show
from kimik3_prep.output.folder import OURS, OURS_IN_ROOT, Output, RunRecord
from kimik3_prep.output.recipe import METADATA_KEY, Recipe, canonical_json
from kimik3_prep.output.shard_file import Shard, ShardFormat, open_shard
from kimik3_prep.output.tables import (
    INDEX_SCHEMA,
    Outcome,
    PlannedItem,
    Stored,
    index_table,
    planned_table,
    shard_plan,
    split_shards,
)
from kimik3_prep.remote import refuse

_AGAIN = "run the same encode command again"
_COMPARED_AT_ONCE = 1024  # index rows


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong."""

    file: str
    """Relative to the folder."""
    item: str | None
    """The id; None where the whole file is meant."""
    what: str
    todo: str
    """What a person can do. It never destroys the only good copy of anything."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked, and everything that is wrong."""

    path: str
    finished: bool
    """Whether index.parquet is there."""
    rows: int
    """Manifest rows."""
    images: int
    """Stored images whose bytes were read."""
    shards: int
    bytes: int
    """Of the shards that were read."""
    findings: tuple[Finding, ...]
    """Empty where everything is as it was written."""
    compared: int | None = None
    """Images that were computed again; None where nobody asked for that."""

    def as_dict(self) -> dict[str, Any]:
        """The JSON document: the findings are its `problems`, and `compared` is there where it was asked for."""
        document = asdict(self)
        document["problems"] = list(document.pop("findings"))
        if self.compared is None:
            del document["compared"]
        return document


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


def verify(root: Path, comparison: Comparison | None = None) -> Verification:
    """Check an output folder. Raises InputError where it is none, and where the comparison cannot be made."""
    refuse(root)
    layout = Output(root)
    record = layout.record()
    if record is None:
        raise InputError([Problem(str(root), "no run.json in it", "a folder that `kimik3-prep encode` wrote")])
    again = None if comparison is None else _Again(layout, record, comparison)
    run = _Run(layout, record.recipe)
    findings = list(run.findings())
    if again is not None:
        findings += again.findings()
    return Verification(
        path=str(root),
        finished=layout.index.is_file(),
        rows=run.rows,
        images=run.images,
        shards=run.shards,
        bytes=run.bytes,
        findings=tuple(findings),
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
    """One pass over a folder; counts what it has read."""

    def __init__(self, layout: Output, recipe: Recipe) -> None:
        self.layout = layout
        self.recipe = recipe
        self.rows = self.images = self.shards = self.bytes = 0

    def findings(self) -> Iterator[Finding]:
        """Everything wrong, in the order of the files."""
        planned: set[str] = set()
        parts: list[pa.Table] | None = []
        index: pa.Table | None
        try:
            for name, rows in split_shards(self.layout.read_plan()):
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
            yield Finding("plan.parquet", None, error.problems[0].what, "encode into another --output")
        else:
            yield from self._merged(parts)
        yield from self._left_over(planned if parts is not None or planned else None)

    # --- shards ---

    def _index(self, name: str) -> pa.Table | None:
        try:
            return self.layout.read_shard_index(name).replace_schema_metadata(None)
        except InputError:
            return None

    def _shard(self, name: str, rows: pa.Table, index: pa.Table | None) -> Iterator[Finding]:
        path, file = self.layout.shard_index(name), f"shards/{name}.safetensors"
        todo = f"move index.parquet, shards/{name}.parquet and {file} out of the folder, then {_AGAIN}"
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
        yield from self._bytes_match(shard, file, ShardFormat(self.recipe, group), index, todo)

    def _index_matches(
        self, path: Path, rows: pa.Table, index: pa.Table, metadata: dict[str, Any], todo: str
    ) -> Iterator[Finding]:
        """The index against the plan: with the outcomes that it records, it must be the table that the run writes."""
        file = f"shards/{path.name}"
        if _metadata_text(path) != canonical_json(metadata):
            yield Finding(file, None, "its metadata is not this run's", todo)
        if index["item"].to_pylist() != rows["item"].to_pylist():
            yield Finding(file, None, "its rows are not those that were planned for this shard", todo)
            return
        planned = rows["row"].to_pylist()
        outcomes: dict[int, Outcome] = {}
        for row, values in zip(planned, index.to_pylist(), strict=True):
            outcomes.setdefault(row, _outcome(values))
        yield from _differences(file, index_table(rows, outcomes), index, "the plan", todo)
        places = [outcomes[row] for row in sorted(outcomes)]
        stored = [place for place in places if isinstance(place, Stored)]
        counts = dict(zip(planned, rows["patch_count"].to_pylist(), strict=True))
        kept = [counts[row] for row in sorted(outcomes) if isinstance(outcomes[row], Stored)]
        starts = [0, *np.cumsum(kept).tolist()][: len(kept)]
        if [place.row for place in stored] != list(range(len(stored))) or [p.patch_start for p in stored] != starts:
            yield Finding(file, None, "its rows and offsets do not follow one another without gaps", todo)

    def _bytes_match(self, shard: Shard, file: str, form: ShardFormat, index: pa.Table, todo: str) -> Iterator[Finding]:
        """The shard's header, grids and patches against its index. Together these are every byte of the file."""
        images = _images(index)
        patches = sum(image.patch_count for image in images)
        header = form.header(len(images), patches)
        with open(shard.path, "rb") as raw:
            same = raw.read(len(header)) == header
        size, expected = os.path.getsize(shard.path), len(header) + 24 * len(images) + patches * form.patch_bytes
        if not same or size != expected:
            what = "its header is not this run's" if not same else f"it has {size:,} bytes, its index says {expected:,}"
            yield Finding(file, None, what, todo)
            return
        grids, pixels = shard.raw("grid_thws"), shard.raw("pixel_values")
        self.images += len(images)
        self.bytes += size
        for image in images:
            grid = grids[image.row].tolist() if 0 <= image.row < len(grids) else "not there"
            if grid != image.grid:
                what = f"grid_thws[{image.row}] is {grid}, the index says {image.grid}"
                yield Finding(file, image.id, what, todo)
            elif not image.intact(image.patches(pixels)):
                span = f"pixel_values[{image.patch_start}:{image.patch_start + image.patch_count}]"
                yield Finding(file, image.id, f"{span} are not the bytes that were stored (checksum)", todo)

    # --- the whole ---

    def _merged(self, parts: list[pa.Table] | None) -> Iterator[Finding]:
        """index.parquet against the shard indexes and the rows that failed while planning."""
        file, todo = "index.parquet", f"move index.parquet out of the folder, then {_AGAIN}"
        if not self.layout.index.is_file():
            yield Finding(file, None, "is missing: the run is not finished", _AGAIN)
            return
        try:
            index = self.layout.read_index().replace_schema_metadata(None)
        except InputError as error:
            yield Finding(file, None, error.problems[0].what, todo)
            return
        if _metadata_text(self.layout.index) != canonical_json(self.recipe.metadata()):
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

    def _left_over(self, planned: set[str] | None) -> Iterator[Finding]:
        """Files with names of ours that no finished run has. Files with other names are not ours to judge."""
        what = "was left by a run that was killed, or belongs to one that is running now"
        todo = f"wait until no run works in the folder, then {_AGAIN}: it clears up"
        for name in (*(path.name for path in locks(self.layout.root)), *(f"{name}.tmp" for name in OURS_IN_ROOT)):
            if (self.layout.root / name).exists():
                yield Finding(name, None, what, todo)
        for path in sorted(self.layout.shards.glob("*")):
            file = f"shards/{path.name}"
            if OURS.fullmatch(path.name) and path.suffix == ".tmp":
                yield Finding(file, None, what, todo)
            elif OURS.fullmatch(path.name) and planned is not None and path.stem not in planned:
                yield Finding(file, None, "belongs to no shard of the plan", "move it out of the folder")


def _metadata_text(path: Path) -> str:
    """The run's metadata in an index."""
    text: bytes = (parquet.read_schema(path).metadata or {}).get(METADATA_KEY.encode(), b"")
    return text.decode("utf-8", "replace")


def _outcome(values: dict[str, Any]) -> Outcome:
    """What an index row says became of its image."""
    if values["row"] is None:
        return ItemError(values["error_code"], values["error_message"])
    names = ("row", "patch_start", "mode", "format", "exif_orientation", "content_hash", "checksum")
    return Stored(**{name: values[name] for name in names})


def _differences(file: str, expected: pa.Table, actual: pa.Table, source: str, todo: str) -> Iterator[Finding]:
    """The first column that differs in the first row that differs."""
    if actual.equals(expected):
        return
    for begin in range(0, expected.num_rows, _COMPARED_AT_ONCE):
        expected_rows, actual_rows = (table.slice(begin, _COMPARED_AT_ONCE) for table in (expected, actual))
        if actual_rows.equals(expected_rows):
            continue
        for right, wrong in zip(expected_rows.to_pylist(), actual_rows.to_pylist(), strict=True):
            for name in (name for name in right if right[name] != wrong[name]):
                what = f"{name} is {wrong[name]!r}, {source} says {right[name]!r}"
                yield Finding(file, right["id"], what, todo)
                return


# --- differences --------------------------------------------------------------------------------------------------


class _Computer(Protocol):
    """Something that computes an image's features anew."""

    name: str

    def compute(self, item: PlannedItem, source: str) -> tuple[npt.NDArray[np.uint8], str] | None:
        """The bytes of the patches and the content hash of the source; None for an item that it cannot take.

        Raises ItemError where the source cannot be read any more.
        """


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
            items = {item.row: item for item in shard_plan(name, rows).items}
            for image in _images(index):
                yield name, image, items[planned_row[image.row]]

    def _compare(self, file: str, image: _Image, item: PlannedItem, stored: npt.NDArray[np.uint8]) -> Iterator[Finding]:
        compared = False
        for computer in self._computers:
            try:
                result = computer.compute(item, resolve(item.image, self._base))
            except ItemError as error:
                compared = True
                yield Finding(file, image.id, f"{computer.name} cannot compute it: {error}", "restore the image")
                continue
            if result is None:
                continue
            compared = True
            values, content_hash = result
            if content_hash != image.content_hash:
                what = f"the image is another one now ({content_hash}, encoded was {image.content_hash})"
                yield Finding(file, image.id, what, "restore the image, or encode the new one into another folder")
            elif not np.array_equal(values, stored):
                what = f"{computer.name} gives other bytes; {_versions_compared(self._record)}"
                yield Finding(file, image.id, what, _DIFFERENT)
        self.compared += compared


_DIFFERENT = (
    "nothing is damaged: the stored bytes are those that were encoded. Compare with the versions of the run, "
    "or encode into another folder to get the bytes of today"
)


def _versions_compared(record: RunRecord) -> str:
    """Which versions differ between the run and this machine, as a sentence."""
    before = {**record.versions, **record.recipe.decoders}
    here = codec_versions()
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

    def compute(self, item: PlannedItem, source: str) -> tuple[npt.NDArray[np.uint8], str]:
        """As in `_Computer`."""
        import torch

        from kimik3_prep.run.compute import features

        values, content_hash = features(item, source, self._recipe)
        return values.contiguous().view(torch.uint8).numpy().reshape(-1), content_hash


class _Processor:
    """The image processor of a checkpoint folder, whose Python code runs."""

    name = "the checkpoint's processor"

    def __init__(self, folder: Path, recipe: Recipe, trusted: bool) -> None:
        self._recipe = recipe
        self._processor = _load_processor(folder, trusted)

    def compute(self, item: PlannedItem, source: str) -> tuple[npt.NDArray[np.uint8], str] | None:
        """As in `_Computer`. It takes no features made elsewhere, and no images scaled by --max-tokens."""
        import torch

        from kimik3_prep.pixels.cpu import TORCH_DTYPES
        from kimik3_prep.pixels.ready import cast_features
        from kimik3_prep.run.compute import planned_image

        if not item.grid.new_w or item.in_patch_limit is not None:
            return None
        decoded = planned_image(item, source, self._recipe)
        with foreign_errors():
            result = self._processor.preprocess([{"type": "image", "image": decoded.image}], return_tensors="pt")
        grids = np.asarray(result["grid_thws"]).reshape(-1).tolist()
        if grids != list(item.grid.thw):
            raise ItemError("size_mismatch", f"its grid is {grids}, stored is {list(item.grid.thw)}")
        values = cast_features(
            torch.as_tensor(result["pixel_values"]), self._recipe.config, TORCH_DTYPES[self._recipe.dtype]
        )
        return values.contiguous().view(torch.uint8).numpy().reshape(-1), decoded.content_hash


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
