"""From checked input to a plan, before any pixel is decoded: headers -> spans -> places.

headers    the size of each image, from the manifest or from the image's own header
spans      manifest rows that share one stored image, and so one decode and one copy of the patches
places     which shard each span lands in, at which row and patch

A plan depends on the manifest, the headers and the settings, and on nothing else: not on threads, time or machine.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.errors import ItemError, TooManyFailures
from kimik3_prep.images.address import resolve
from kimik3_prep.manifest.read import Manifest
from kimik3_prep.output.folder import Output
from kimik3_prep.output.tables import GRID_FIELDS, GROUPS, PLAN_SCHEMA, split_shards
from kimik3_prep.run.check import Checked, Reporter, Settings
from kimik3_prep.run.item import Header, ProbeImages, is_slow
from kimik3_prep.run.workers import Task, Workers

_WINDOW = 8192  # rows that are Python objects at a time
_MOST_PATCHES = 1 << 22  # of features made elsewhere: room is made for them before their file, 2.5 GB or more, is read
_HEADER_WEIGHT = 30_000  # pixels that could be decoded in the time that a header takes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A plan that was made before."""

    rows: pa.Table
    """In manifest order."""

    anew: npt.NDArray[np.bool_]
    """Which of its rows are planned anew."""


def plan(
    settings: Settings, checked: Checked, workers: Workers, reporter: Reporter, earlier: _Earlier | None = None
) -> pa.Table:
    """Return the plan, a table of `PLAN_SCHEMA`: headers are read where the manifest gives no size."""
    recipe, items = checked.recipe, checked.manifest.items
    content = recipe.dedupe == "content"
    spans = find_spans(items, checked.manifest.base, recipe.backend, recipe.dedupe != "off")
    headers = Headers(len(spans.first_row))
    unknown = np.ones(len(spans.first_row), bool)
    if earlier is not None:
        unknown = earlier.anew[spans.first_row]
        headers.recall(earlier.rows.take(pa.array(spans.first_row)), ~unknown, content)
    _read_headers(settings, checked.manifest, spans, unknown, headers, workers, reporter)
    if content:
        spans, headers = join_equal(spans, headers)
    # An index-only run stores nothing: its shards are those that --dtype would give.
    patch_bytes = replace(recipe, dtype=settings.dtype).patch_bytes
    return make_plan(items, spans, headers, recipe.rule(), max(1, recipe.shard_size // patch_bytes), recipe.max_tokens)


def replan(settings: Settings, checked: Checked, output: Output, workers: Workers, reporter: Reporter) -> None:
    """Plan again for `--retry-failed`, as a new run would; the headers of stored images are not read again.

    Commits that the new plan does not keep are taken back before it is written. A kill in between leaves the old plan
    with some of its shards to do, and the same command begins here again: an image in no shard is planned anew.
    """
    rows = pa.concat_tables(output.read_plan())
    rows = rows.take(pa.array(np.argsort(rows["item"].to_numpy())))
    before = {name: shard for name, shard in split_shards(output.read_plan()) if name is not None}
    stored = np.zeros(rows.num_rows, bool)
    faulty = set()
    if checked.recipe.index_only:
        stored = pc.is_null(rows["error_code"]).to_numpy()
    for name in filter(output.committed, before):
        index = output.read_shard_index(name, ["item", "status"])
        fine = pc.equal(index["status"], "ok").to_numpy()
        stored[index["item"].to_numpy()[fine]] = True
        if not fine.all():
            faulty.add(name)
    if stored.all():
        return
    table = plan(settings, checked, workers, reporter, _Earlier(rows, ~stored))
    after = dict(split_shards(iter([table])))
    anew = [n for n, old in before.items() if n in faulty or n not in after or not old.equals(after[n])]
    output.take_back(anew)
    output.write_plan(table)


# --- headers --------------------------------------------------------------------------------------------------------


class Headers:
    """What planning knows about each span: its size, or why it failed. Columns, because there may be millions.

    width, height: pixels, 0 where unknown. mode, format: None where no header was read.
    source_size, source_mtime_ns: of the file that was read, -1 where none was. content_hash: of its bytes, None where
    they were not read.
    """

    def __init__(self, spans: int) -> None:
        self.width, self.height = np.zeros(spans, np.int64), np.zeros(spans, np.int64)
        self.source_size, self.source_mtime_ns = np.full(spans, -1, np.int64), np.full(spans, -1, np.int64)
        self.mode: list[str | None] = [None] * spans
        self.format: list[str | None] = [None] * spans
        self.content_hash: list[str | None] = [None] * spans
        self.error_code: list[str | None] = [None] * spans
        self.error_message: list[str | None] = [None] * spans

    def fail(self, span: int, error: ItemError) -> None:
        """Note that the span's image cannot be prepared."""
        self.error_code[span], self.error_message[span] = error.code, error.message

    def take(self, spans: Ints) -> Headers:
        """Return the headers of some spans, in that order."""
        taken = Headers(0)
        for name, column in vars(self).items():
            setattr(taken, name, column[spans] if isinstance(column, np.ndarray) else [column[n] for n in spans])
        return taken

    def recall(self, rows: pa.Table, known: npt.NDArray[np.bool_], measured: bool) -> None:
        """Take over what an earlier plan knew of the `known` spans; `rows` has a plan row for each span.

        measured: its content hashes are those of the bytes, not what the manifest promises.
        """
        for name in ("width", "height", "source_size", "source_mtime_ns"):
            column: Ints = getattr(self, name)
            column[known] = pc.fill_null(rows[name], int(name.startswith("source")) * -1).to_numpy()[known]
        for name in ("mode", "format", *(["content_hash"] if measured else [])):
            values: list[str | None] = rows[name].to_pylist()
            setattr(self, name, [value if keep else None for value, keep in zip(values, known, strict=True)])


def _read_headers(
    settings: Settings,
    manifest: Manifest,
    spans: Spans,
    unknown: npt.NDArray[np.bool_],
    headers: Headers,
    workers: Workers,
    reporter: Reporter,
) -> None:
    """Take the sizes of the `unknown` spans from the manifest where it gives them, else from the image headers.

    Raises TooManyFailures as soon as more headers fail than items may: nobody waits for a million missing files.
    """
    items = manifest.items.select(["image", "width", "height", "content_hash"])
    given = pc.fill_null(items["width"], 0).to_numpy()[spans.first_row]
    headers.width[unknown] = given[unknown]
    headers.height[unknown] = pc.fill_null(items["height"], 0).to_numpy()[spans.first_row][unknown]
    content = settings.dedupe == "content"  # then every file is read whole, once more than otherwise
    wanted = np.flatnonzero(unknown & ((given == 0) | content) & (spans.groups != GROUPS.index("local")))
    if not len(wanted):
        return
    reporter.phase("headers", len(wanted))

    call = pickle.dumps(ProbeImages(manifest.base, settings.max_pixels, settings.exif, content, settings.formats))

    def tasks() -> Iterator[Task]:
        for begin in range(0, len(wanted), _WINDOW):
            window = wanted[begin : begin + _WINDOW]
            rows = items.take(pa.array(spans.first_row[window]))
            columns = (rows["image"].to_pylist(), rows["content_hash"].to_pylist())
            for span, image, promised in zip(window.tolist(), *columns, strict=True):
                slow = is_slow(image, manifest.base)
                yield Task(call, image, weight=_HEADER_WEIGHT, slow=slow, tag=(span, promised))

    limit = FailureLimit(settings.most_failures)
    for task, answer in workers.run(tasks()):
        span, promised = task.tag
        if error := _error_of(answer, promised):
            headers.fail(span, error)
            reporter.advance(1, 0, 0, 1)
            limit.count(error)
            limit.check()
            continue
        if answer.kept is not None:
            workers.kept[task.payload] = answer.kept
        _keep(headers, span, answer)
        reporter.advance(1, answer.width * answer.height, 0, 0)


def _error_of(answer: Header | ItemError, promised: str | None) -> ItemError | None:
    """Return why an image cannot be planned, or None. promised: the hash that the manifest gives."""
    if isinstance(answer, ItemError):
        return answer
    if promised is not None and answer.content_hash not in (None, promised):
        return ItemError("content_hash_mismatch", f"the file's is {answer.content_hash}")
    return None


def _keep(headers: Headers, span: int, header: Header) -> None:
    headers.content_hash[span] = header.content_hash
    if not headers.width[span]:  # else the manifest gave a size, which is checked when the image is decoded
        headers.width[span], headers.height[span] = header.width, header.height
        headers.mode[span], headers.format[span] = header.mode, header.format
    if header.stamp is not None:
        headers.source_size[span], headers.source_mtime_ns[span] = header.stamp


class FailureLimit:
    """Counts the failed items of a run against `--max-failures`; None: no limit."""

    def __init__(self, most: int | None, failed: int = 0) -> None:
        self._most, self._failed = most, failed
        self._first: ItemError | None = None

    def left(self) -> int | None:
        """Return how many more items may fail."""
        return None if self._most is None else max(0, self._most - self._failed)

    def count(self, error: ItemError) -> bool:
        """Count a failed item, and return whether it was one too many."""
        self._failed += 1
        self._first = self._first or error
        return self._most is not None and self._failed > self._most

    def check(self) -> None:
        """Raise TooManyFailures once there was one too many."""
        if self._most is not None and self._failed > self._most:
            raise TooManyFailures(self._failed, self._most, self._first)


# --- spans ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows that share stored patches.

    of_row: span number of every manifest row. first_row: manifest row that names a span first.
    groups: position in `GROUPS`, by span.
    """

    of_row: Ints
    first_row: Ints
    groups: Ints


def find_spans(items: pa.Table, base: str, default_backend: str, dedupe: bool) -> Spans:
    """Which rows share stored patches. `items` is a table of `ITEM_SCHEMA`; without `dedupe` every row has its own."""
    backend = pc.fill_null(items["backend"], default_backend)
    group = pc.if_else(pc.equal(items["path"], "local"), "local", backend).combine_chunks()
    if dedupe:
        codes = _identity(items, group, base).dictionary_encode().indices.to_numpy()
        _, first_row, of_row = np.unique(codes, return_index=True, return_inverse=True)
    else:
        of_row = first_row = np.arange(items.num_rows)
    groups = pc.index_in(group, pa.array(GROUPS)).to_numpy()[first_row]
    return Spans(of_row.astype(np.int64), first_row.astype(np.int64), groups.astype(np.int64))


def join_equal(spans: Spans, headers: Headers) -> tuple[Spans, Headers]:
    """Spans whose files hold the same bytes become one, the first of them: `--dedupe content`.

    Only within a group, and where the sizes agree: a row that promises a wrong one fails alone. A span whose bytes were
    not read (`content_hash` None) stays as it is.
    """
    codes = pa.array(headers.content_hash, pa.string()).dictionary_encode().indices
    alone = pc.is_null(codes).to_numpy(zero_copy_only=False)
    content = pc.fill_null(codes, 0).to_numpy().astype(np.int64)
    content[alone] = len(content) + np.flatnonzero(alone)
    columns = (content, headers.height, headers.width, spans.groups)
    order = np.lexsort(columns)
    fresh = np.any([np.diff(column[order], prepend=column[order[:1]] - 1) != 0 for column in columns], axis=0)
    of_span = np.empty(len(order), np.int64)
    of_span[order] = np.cumsum(fresh) - 1
    first_row = np.full(int(fresh.sum()), np.iinfo(np.int64).max)
    np.minimum.at(first_row, of_span, spans.first_row)
    first = spans.of_row[first_row]  # the old span of each new one's first row
    joined = Spans(of_span[spans.of_row].astype(np.int64), first_row, spans.groups[first])
    return joined, headers.take(first)


def _identity(items: pa.Table, groups: pa.Array, base: str) -> pa.Array:
    """What makes two rows name the same image: the resolved path, the group, and what the row promises of the image.

    Digests of 16 bytes, because the text of millions of rows, or of images written as text, would be there once more.
    """
    base = base.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # Arrow holds UTF-8 only
    said = items.select(["image", "content_hash", "width", "height", "grid_thw"])
    said = said.append_column("group", groups)
    digests = bytearray()
    for batch in said.to_batches(max_chunksize=_WINDOW):
        for image, *rest in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            text = repr((resolve(image, base), *rest)).encode("utf-8", "surrogatepass")
            digests += hashlib.blake2b(text, digest_size=16).digest()
    return pa.Array.from_buffers(pa.binary(16), items.num_rows, [None, pa.py_buffer(digests)])


# --- places ---------------------------------------------------------------------------------------------------------


def make_plan(
    items: pa.Table,
    spans: Spans,
    headers: Headers,
    rule: GridRule,
    shard_patches: int,
    max_tokens: int | None = None,
) -> pa.Table:
    """The plan as a table of `PLAN_SCHEMA`: shard by shard in filling order, failed items last.

    shard_patches: patches that fit into one shard; a larger image gets a shard of its own.
    max_tokens: most merged patches of an image, which is scaled down to them; one that cannot be has failed.
    """
    grids, limits = _grids(items, spans, headers, rule, max_tokens)
    failed = np.array([code is not None for code in headers.error_code], bool)
    patches = grids[4] * grids[5]
    names, shard, row, start = _pack(spans, patches, failed, shard_patches)
    of_row = spans.of_row
    order = np.lexsort((np.arange(len(of_row)), row[of_row], np.where(failed, len(names), shard)[of_row]))
    unsized = headers.width == 0
    resized_here = ~failed & (spans.groups != GROUPS.index("local"))
    columns: dict[str, pa.Array] = {
        "group": pa.array(GROUPS).take(pa.array(spans.groups)),
        "width": pa.array(headers.width, mask=unsized),
        "height": pa.array(headers.height, mask=unsized),
        "mode": pa.array(headers.mode, pa.string()),
        "format": pa.array(headers.format, pa.string()),
        "source_size": pa.array(headers.source_size, mask=headers.source_size < 0),
        "source_mtime_ns": pa.array(headers.source_mtime_ns, mask=headers.source_size < 0),
        "shard": pa.array(names, pa.string()).take(pa.array(shard, mask=failed)),
        "row": pa.array(row, mask=failed),
        "patch_start": pa.array(start, mask=failed),
        "patch_count": pa.array(patches, mask=failed),
        "error_code": pa.array(headers.error_code, pa.string()),
        "error_message": pa.array(headers.error_message, pa.string()),
    }
    columns["in_patch_limit"] = pa.array(limits, mask=failed | (limits == 0))
    if any(headers.content_hash):  # measured where the bytes were read, else what the row promises
        measured = pa.array(headers.content_hash, pa.string()).take(pa.array(of_row))
        hashes = pc.coalesce(measured, items["content_hash"].combine_chunks())
        items = items.set_column(items.schema.get_field_index("content_hash"), "content_hash", hashes)
    for index, name in enumerate(GRID_FIELDS):
        columns[name] = pa.array(grids[index], mask=failed if index > 3 else ~resized_here)
    items = _taken(items, order)
    spans_of = of_row[order]
    # One column after the other leaves: of ten million rows they would be gigabytes twice.
    arrays = [_taken(columns.pop(f.name), spans_of) if f.name in columns else items[f.name] for f in PLAN_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=PLAN_SCHEMA)


def _taken(values: Any, places: Ints) -> Any:
    """A column or table in another order; itself where that is the one it has."""
    same = len(places) == len(values) and np.array_equal(places, np.arange(len(places)))
    return values if same else values.take(pa.array(places))


def _grids(
    items: pa.Table, spans: Spans, headers: Headers, rule: GridRule, max_tokens: int | None
) -> tuple[Ints, Ints]:
    """By span: the fields of `Grid`, `[7, spans]`, zeros for the failed ones; the lowered in_patch_limit, else zero.

    Spans that no limit brings under `max_tokens` fail here.
    """
    wanted = np.array([code is None for code in headers.error_code], bool)
    grids, limits = np.zeros((len(GRID_FIELDS), len(wanted)), np.int64), np.zeros(len(wanted), np.int64)
    local = spans.groups == GROUPS.index("local")
    sized = np.flatnonzero(wanted & ~local)
    # Photographs come in few sizes: each one's grid is computed once.
    codes = pa.array(headers.width[sized] << 32 | headers.height[sized]).dictionary_encode()
    sizes, inverse = codes.dictionary.to_numpy(), codes.indices.to_numpy()
    unfit: list[int] = []
    by_size = np.zeros((len(sizes), len(GRID_FIELDS) + 1), np.int64)
    for number, size in enumerate(sizes):
        width, height = int(size) >> 32, int(size) & 0xFFFFFFFF
        limit = rule.in_patch_limit if max_tokens is None else rule.limit_within(width, height, max_tokens)
        if limit is None:
            unfit.append(number)
            continue
        grid = replace(rule, in_patch_limit=limit).grid(width, height)
        fields = (grid.new_w, grid.new_h, grid.pad_w, grid.pad_h, grid.rows, grid.cols, grid.tokens)
        by_size[number] = (*fields, limit if limit < rule.in_patch_limit else 0)
    for span in sized[np.isin(inverse, unfit)].tolist():
        headers.fail(span, ItemError("too_many_tokens", f"no scale brings it down to {max_tokens:,} tokens"))
    for values, of_size in zip((*grids, limits), by_size.T, strict=True):
        values[sized] = of_size[inverse]
    given = np.flatnonzero(wanted & local)
    for span, (_, rows, cols) in zip(
        given.tolist(), items["grid_thw"].take(pa.array(spans.first_row[given])).to_pylist(), strict=True
    ):
        if rows * cols > _MOST_PATCHES:
            text = f"grid_thw {[1, rows, cols]} is {rows * cols:,} patches; the limit is {_MOST_PATCHES:,}"
            headers.fail(span, ItemError("bad_features", text))
            continue
        grids[4:, span] = rows, cols, rule.tokens(rows, cols)
        if max_tokens is not None and rule.tokens(rows, cols) > max_tokens:
            text = f"{rule.tokens(rows, cols):,} tokens, above --max-tokens; features made elsewhere cannot be scaled"
            headers.fail(span, ItemError("too_many_tokens", text))
    return grids, limits


def _pack(
    spans: Spans, patches: Ints, failed: npt.NDArray[np.bool_], shard_patches: int
) -> tuple[list[str], Ints, Ints, Ints]:
    """Shard names in filling order, and by span: position among the names, row, patch_start (-1 for the failed)."""
    names: list[str] = []
    shard, row, start = (np.full(len(failed), -1, np.int64) for _ in range(3))
    by_appearance = np.argsort(spans.first_row, kind="stable")
    for number, group in enumerate(GROUPS):
        mine = by_appearance[(spans.groups == number)[by_appearance] & ~failed[by_appearance]]
        ends = np.cumsum(patches[mine])
        begin = count = 0
        while begin < len(mine):
            before = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, before + shard_patches, "right")))
            members = mine[begin:end]
            shard[members] = len(names)
            row[members] = np.arange(end - begin)
            start[members] = ends[begin:end] - patches[members] - before
            names.append(f"{group}-{count:05d}")
            begin, count = end, count + 1
    return names, shard, row, start
