"""Spans: manifest rows that share one stored image, and what planning knows of each before it has a place.

Rows with the same preprocessing path, backend and image, and the same promises of it, share one decode and one copy of
the patches; each keeps an index row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.errors import ItemError
from kimik3_prep.images.address import resolve

#: Preprocessing paths in the order their shards are filled; the group names a shard: `cpu-00000`.
GROUPS = ("cpu", "gpu", "local")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows that share stored patches.

    of_row: span number of every manifest row. first_row: manifest row that names a span first.
    groups: position in `GROUPS`, by span.
    """

    of_row: Ints
    first_row: Ints
    groups: Ints


class Headers:
    """What planning knows about each span: its size, or why it failed. Columns, because there may be millions.

    width, height: pixels, 0 where unknown. mode, format: None where no header was read.
    source_size, source_mtime_ns: of the file that was read, -1 where there was none. content_hash: of its bytes, where
    they were read.
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
        """The span's image cannot be prepared."""
        self.error_code[span], self.error_message[span] = error.code, error.message

    def take(self, spans: Ints) -> Headers:
        """Those of some spans, in that order."""
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
    """What makes two rows name the same image: the resolved path, the group, and what the row promises of the image."""
    base = base.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # Arrow holds UTF-8 only
    sources = pa.chunked_array(
        [
            pa.array([resolve(image, base) for image in chunk.to_pylist()], pa.large_string())
            for chunk in items["image"].chunks
        ],
        pa.large_string(),
    ).combine_chunks()
    text = [
        pc.fill_null(pc.cast(items[name].combine_chunks(), pa.large_string()), "")
        for name in ("content_hash", "width", "height")
    ]
    if pc.any(pc.is_valid(items["grid_thw"])).as_py():
        grids = [None if grid is None else str(grid) for grid in items["grid_thw"].to_pylist()]
        text.append(pc.fill_null(pa.array(grids, pa.large_string()), ""))
    return pc.binary_join_element_wise(
        pc.cast(groups, pa.large_string()), sources, *text, pa.scalar("\x00", pa.large_string())
    )
