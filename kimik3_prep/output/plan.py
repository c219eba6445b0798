"""The plan: which image lands in which shard, at which row and patch, before any pixel is touched.

Spans (`spans.py`) are grouped by preprocessing path and packed into shards in manifest order, so the plan depends on
the manifest, the image headers and the settings, and on nothing else: not on threads, time or machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.checkpoint.grid import GridRule

if TYPE_CHECKING:
    pass

from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.manifest.read import ITEM_SCHEMA
from kimik3_prep.output.spans import GROUPS, Headers, Ints, Spans

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
    patches = grids[:, 4] * grids[:, 5]
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
        columns[name] = pa.array(grids[:, index].copy(), mask=failed if index > 3 else ~resized_here)
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
    """By span: the fields of `Grid`, `[spans, 7]`, zeros for the failed ones; the lowered in_patch_limit, else zero.

    Spans that no limit brings under `max_tokens` fail here.
    """
    wanted = np.array([code is None for code in headers.error_code], bool)
    grids, limits = np.zeros((len(wanted), len(GRID_FIELDS)), np.int64), np.zeros(len(wanted), np.int64)
    local = spans.groups == GROUPS.index("local")
    sized = np.flatnonzero(wanted & ~local)
    # Photographs come in few sizes: each one's grid is computed once.
    sizes, inverse = np.unique(headers.width[sized] << 32 | headers.height[sized], return_inverse=True)
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
    grids[sized], limits[sized] = by_size[inverse, :-1], by_size[inverse, -1]
    given = np.flatnonzero(wanted & local)
    for span, (_, rows, cols) in zip(
        given.tolist(), items["grid_thw"].take(pa.array(spans.first_row[given])).to_pylist(), strict=True
    ):
        grids[span, 4:] = rows, cols, rule.tokens(rows, cols)
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


# --- from the table back to objects -------------------------------------------------------------------------------


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


def parse_size(text: str, option: str = "size") -> int:
    """Bytes from "200MB", "2GiB", "512 mib" or "1000000". Raises InputError for anything else, and for zero."""
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    units |= {f"{u}b": 1000**n for n, u in enumerate("kmgt", 1)} | {f"{u}ib": 1024**n for n, u in enumerate("kmgt", 1)}
    digits = text.strip().lower()
    unit = digits.lstrip("0123456789.").strip()
    number = digits[: len(digits) - len(digits.lstrip("0123456789."))]
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise InputError([Problem(option, f"{text!r} is not a size", "a number with a unit: 200MB, 512MiB, 2GiB")])
    return size
