"""The manifest: one row per item, read as a stream, every problem of the file reported at once.

A row is a JSON object (or a Parquet row) with the fields of `README.md`'s manifest table. Rows end up in an Arrow table
of `ITEM_SCHEMA`, because a million Python objects would not fit where a million columns entries do.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa

from kimik3_prep import strict_json
from kimik3_prep.errors import InputError
from kimik3_prep.fields import Report, kind, read_item, show

ITEM_SCHEMA = pa.schema(
    [
        ("item", pa.int64()),  # 0-based manifest row
        ("line", pa.int64()),  # 1-based line of the file (row number for Parquet)
        ("id", pa.large_string()),
        ("image", pa.large_string()),  # as written; the features file for local items
        ("path", pa.string()),  # preprocessing path: deferred | local
        ("backend", pa.string()),  # what the row asks for: cpu | gpu | null
        ("content_hash", pa.string()),  # what the row promises
        ("width", pa.int64()),
        ("height", pa.int64()),
        ("grid_thw", pa.list_(pa.int64(), 3)),  # local items only
        ("extra", pa.large_string()),  # the row's other fields, JSON
    ]
)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BATCH = 16_384


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest without problems.

    items: Arrow table of `ITEM_SCHEMA`. base: folder that relative image paths start from.
    digest: sha256 of the bytes read (decompressed), so that a resume notices another manifest.
    """

    items: pa.Table
    base: str
    digest: str
    name: str


def read_manifest(path: str, limit: int | None = None) -> Manifest:
    """Read a JSON Lines (optionally gzip) or Parquet manifest; `-` is standard input, `limit` the first rows only.

    Raises InputError with every problem of the file: syntax, fields, duplicate ids, items that are no images.
    """
    report = Report()
    digest = hashlib.sha256()
    name = "<stdin>" if path == "-" else path
    columns: dict[str, list[Any]] = {field: [] for field in ITEM_SCHEMA.names}
    batches: list[pa.RecordBatch] = []
    try:
        for number, (line, row) in enumerate(_rows(path, name, digest, report)):
            if number == limit:
                break
            item = read_item(number, line, row, f"{name}:{line}", report) if row is not None else None
            if item is None or report.total:
                continue  # with a problem found the rows are only checked, not kept
            for field, values in columns.items():
                values.append(getattr(item, field))
            if len(columns["item"]) == _BATCH:
                batches.append(_batch(columns))
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        report.add(name, _cannot_read(error))
    batches.append(_batch(columns))
    items = pa.Table.from_batches(batches, ITEM_SCHEMA)
    if not report.total:
        if not items.num_rows:
            report.add(name, "the manifest has no items", 'one JSON object per line, for example {"image": "a.jpg"}')
        _check_unique_ids(items, name, report)
    if report.total:
        raise InputError(report.problems, report.total)
    base = os.getcwd() if path == "-" else os.path.dirname(os.path.abspath(path))
    return Manifest(items, base, digest.hexdigest(), name)


def _batch(columns: dict[str, list[Any]]) -> pa.RecordBatch:
    batch = pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in ITEM_SCHEMA], schema=ITEM_SCHEMA
    )
    for values in columns.values():
        values.clear()
    return batch


def _cannot_read(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot read the manifest: {error.strerror}"
    return f"cannot read the manifest: {error}"


# --- rows ---------------------------------------------------------------------------------------------------------


def _rows(path: str, name: str, digest: Any, report: Report) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """`(line, row)` for every non-blank line; None for a row whose syntax is a problem already reported."""
    if path == "-":
        yield from _json_rows(sys.stdin.buffer, name, digest, report)
        return
    with open(path, "rb") as file:
        start = file.peek(4)[:4]
        if start == b"PAR1":
            yield from _parquet_rows(path, digest)
        elif start[:2] == b"\x1f\x8b":
            with gzip.open(file) as plain:
                yield from _json_rows(cast("BinaryIO", plain), name, digest, report)
        else:
            yield from _json_rows(file, name, digest, report)


def _json_rows(file: BinaryIO, name: str, digest: Any, report: Report) -> Iterator[tuple[int, dict[str, Any] | None]]:
    for line, raw in enumerate(file, 1):
        digest.update(raw)
        if line == 1 and raw[:2] == b"\x1f\x8b":
            raise OSError("gzip data on standard input: pipe it through `gzip -dc`")
        text = raw.strip()
        if line == 1:
            text = text.removeprefix(b"\xef\xbb\xbf").strip()
        if not text:
            continue
        try:
            row = strict_json.parse_line(text, f"{name}:{line}")
        except strict_json.JsonProblem as problem:
            report.add_problem(problem.problem)
            yield line, None
            continue
        if isinstance(row, dict):
            yield line, row
            continue
        hint = "a JSON list? `jq -c '.[]' list.json > manifest.jsonl` writes one object per line"
        report.add(f"{name}:{line}", f"a row that is {kind(row)}", "a JSON object", hint if text[:1] == b"[" else "")
        yield line, None


def _parquet_rows(path: str, digest: Any) -> Iterator[tuple[int, dict[str, Any] | None]]:
    from pyarrow import parquet

    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    line = 0
    with parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(batch_size=4096):
            for row in batch.to_pylist():
                line += 1
                yield line, {key: _from_parquet(value) for key, value in row.items() if value is not None}


def _from_parquet(value: Any) -> Any:
    """Parquet has NaN for absent and 640.0 for 640 where pandas wrote it; JSON has neither."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    return value


# --- sources ------------------------------------------------------------------------------------------------------


def resolve(image: str, base: str) -> str:
    """The manifest's image string as something that can be opened: `data:` and scheme URLs stay, paths become absolute.

    `base` is the folder that relative paths start from.
    """
    if image.startswith("data:"):
        return image
    if image.startswith("file://"):
        return os.path.normpath(unquote(urlsplit(image).path))
    if _SCHEME.match(image):
        return image
    return os.path.normpath(os.path.join(base, image))


def scheme(image: str) -> str | None:
    """The fsspec protocol of a URL that needs a network or an archive, None for local paths and `data:` URLs."""
    if image.startswith(("data:", "file://")) or not (match := _SCHEME.match(image)):
        return None
    return match.group()[:-3].lower()


# --- ids ----------------------------------------------------------------------------------------------------------


def _check_unique_ids(items: pa.Table, name: str, report: Report) -> None:
    codes = items["id"].combine_chunks().dictionary_encode()
    if len(codes.dictionary) == len(codes):
        return
    indices = codes.indices.to_numpy()
    lines = items["line"].to_numpy()
    order = np.argsort(indices, kind="stable")
    repeats = order[1:][np.diff(indices[order]) == 0]
    _, first = np.unique(indices, return_index=True)
    hint = 'give the rows an "id" of their own; rows may name the same image'
    for row in np.sort(repeats):
        code = indices[row]
        what = f"id {show(codes.dictionary[code].as_py())} stands on line {lines[first[code]]} already"
        report.add(f"{name}:{lines[row]}", what, "ids that are unique", hint)
