"""The manifest: one row per item, read as a stream, every problem of the file reported at once.

A row is a JSON object (or a Parquet row) with the fields of `README.md`'s manifest table. Rows end up in an Arrow table
of `ITEM_SCHEMA`, because a million Python objects would not fit where a million columns entries do.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from itertools import islice
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa

from kimik3_prep import remote, strict_json
from kimik3_prep.errors import InputError, Problem
from kimik3_prep.manifest.columns import table_rows
from kimik3_prep.manifest.row import MAX_PROBLEMS, Item, Report, kind, read_item, show
from kimik3_prep.manifest.tar import looks_like_a_tar, tar_rows
from kimik3_prep.remote import parent, scheme

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

_BATCH = 16_384
_START = 512  # bytes that tell what kind of file it is
_PIECE = 4 << 20  # bytes of a manifest at a URL that are asked for at a time

_MOST_OF_A_ROW = 256 << 20  # bytes; a row is several times in memory while it is read
_SHORTER = "a path or a URL of the image", "write what a data: URL of this size holds into a file"

#: The first line of a JSON file that holds all rows in one value: `[`, `{`, or a list whose first rows follow.
_SPREAD = re.compile(rb"[\[{]|\[.*[\[{,]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest without problems.

    items: Arrow table of `ITEM_SCHEMA`. base: folder, or URL of one, that relative image paths start from.
    digest: sha256 of the lines read (decompressed) or of the Parquet file, so that a resume notices another manifest.
    """

    items: pa.Table
    base: str
    digest: str
    name: str


def read_manifest(path: str, limit: int | None = None) -> Manifest:
    """Read a manifest at a path or URL: JSON Lines (may be gzip), Parquet, a tar of images, or a pattern for several.

    `-` is standard input, `limit` the first rows only.

    Raises InputError with every problem of the file: syntax, fields, duplicate ids, items that are no images.
    """
    report = Report()
    digest = hashlib.sha256()
    name = "<stdin>" if path == "-" else path
    rows: list[Item] = []
    batches: list[pa.RecordBatch] = []
    line = 0
    try:
        # Stops in front of the first row too many: nothing that stands there is a problem or part of the digest.
        for number, (line, row) in enumerate(islice(_rows(path, name, digest, report), limit)):
            item = read_item(number, line, row, f"{name}:{line}", report) if row is not None else None
            if item is not None:
                rows.append(item)
            if len(rows) == _BATCH:
                batches.append(_batch(rows))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, pa.ArrowException) as error:
        hint = "`kimik3-prep manifest FOLDER` makes one" if isinstance(error, IsADirectoryError) else ""
        report.add_first(Problem(f"{name}:{line}" if line else name, _cannot_read(error, line), hint=hint))
    batches.append(_batch(rows))
    items = pa.Table.from_batches(batches, ITEM_SCHEMA)
    _check_unique_ids(items, name, report)
    if not items.num_rows and not report.total:
        report.add(name, "the manifest has no items", 'one JSON object per line, for example {"image": "a.jpg"}')
    if report.total:
        raise InputError(report.problems, report.total)
    return Manifest(items, base_of(path), digest.hexdigest(), name)


def _batch(rows: list[Item]) -> pa.RecordBatch:
    """The rows as columns; the list is empty afterwards."""
    columns = list(zip(*rows, strict=True)) or [()] * len(ITEM_SCHEMA)
    rows.clear()
    arrays = [pa.array(values, field.type) for values, field in zip(columns, ITEM_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ITEM_SCHEMA)


def base_of(path: str) -> str:
    """Where a manifest's relative paths start: in its folder, also where that is at a URL.

    In the working folder for standard input, and for the pipe that a shell makes of `<(…)`.
    """
    if is_pattern(path):
        path = path[: min(path.find(letter) for letter in "*?[" if letter in path)] + "x"
    if scheme(path):
        return parent(path)
    folder = os.path.dirname(os.path.abspath(path))
    is_pipe = path in ("-", "/dev/stdin") or folder == "/dev/fd" or folder.startswith("/proc/")
    return os.getcwd() if is_pipe else folder


def _cannot_read(error: Exception, line: int) -> str:
    what = "cannot read on after this line" if line else "cannot read the manifest"
    if isinstance(error, OSError) and error.strerror:
        return f"{what}: {error.strerror}"
    return f"{what}: {error}"


# --- rows ---------------------------------------------------------------------------------------------------------


def _rows(path: str, name: str, digest: Any, report: Report) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """`(line, row)` for every non-blank line; None for a row whose syntax is a problem already reported.

    The lines of a tar or a Parquet file are its images or rows, counted from 1 on through all files of a pattern.
    """
    parts = matches(path) if is_pattern(path) else None
    line = 0
    for part in [path] if parts is None else parts:
        with opened(part) as file:
            start = file.peek(_START)[:_START]
            kind = "Parquet" if start[:4] == b"PAR1" else "a tar" if looks_like_a_tar(start) else ""
            if kind and not scheme(part) and not os.path.isfile(part):
                raise OSError(f"it is {kind}, which is not read from front to end: name the file, a pipe has no end")
            if kind:
                rows = table_rows if kind == "Parquet" else tar_rows
                for row in rows(file, _relative(part, base_of(path)), name if parts is None else part, digest, report):
                    line += 1
                    yield line, row
            elif parts is not None:
                report.add(part, "neither a tar nor a Parquet file", "only these where a pattern names the manifest")
            elif start[:2] == b"\x1f\x8b":
                with gzip.open(file) as plain:
                    if looks_like_a_tar(cast("BufferedReader", plain).peek(_START)[:_START]):
                        raise OSError("it is a compressed tar, whose images have no offsets: decompress it first")
                    yield from json_rows(cast("BinaryIO", plain), name, digest, report)
            else:
                yield from json_rows(file, name, digest, report)


def _relative(part: str, base: str) -> str:
    """What image strings call a file: its path from the folder that relative paths start from."""
    if scheme(part):
        return part if "?" in part else part.removeprefix(f"{base}/")
    return os.path.relpath(os.path.abspath(part), base)


def is_pattern(path: str) -> bool:
    """Whether a manifest's name stands for several files: `shards/*.tar`. A file of that very name comes first."""
    address = scheme(path)
    if address in ("http", "https"):  # there, a question mark begins what is no path
        return False
    return any(letter in path for letter in "*?[") and (address is not None or not os.path.lexists(path))


def matches(pattern: str) -> list[str]:
    """The files that a pattern names, sorted. Raises OSError where there are none."""
    found = remote.glob(pattern) if scheme(pattern) else glob.glob(pattern, recursive=True)
    if not found:
        raise OSError("no file matches")
    return sorted(found)


def opened(path: str) -> AbstractContextManager[BufferedReader]:
    """The bytes of a file, of an object at a URL, or of standard input for `-`. Raises OSError."""
    if scheme(path):
        return BufferedReader(remote.opened(path), _PIECE)
    if path != "-":
        return open(path, "rb")
    if sys.stdin is None:  # so it is where a shell closed it: `<&-`
        raise OSError("standard input is closed")
    return nullcontext(cast("BufferedReader", sys.stdin.buffer))


def json_rows(file: BinaryIO, name: str, digest: Any, report: Report) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """`(line, row)` of JSON Lines; None for a row whose syntax is a problem already reported."""
    first = True
    for line, raw in enumerate(iter(partial(file.readline, _MOST_OF_A_ROW + 1), b""), 1):
        digest.update(raw)
        if len(raw) > _MOST_OF_A_ROW:
            report.add(f"{name}:{line}", f"a row of more than {_MOST_OF_A_ROW >> 20} MiB", *_SHORTER)
            while raw and not raw.endswith(b"\n"):
                digest.update(raw := file.readline(_MOST_OF_A_ROW))
            yield line, None
            continue
        text = raw.strip()
        if line == 1:
            text = text.removeprefix(b"\xef\xbb\xbf").strip()
        if not text:
            continue
        where = f"{name}:{line}"
        try:
            row = strict_json.parse_line(text, where)
        except strict_json.JsonProblem as problem:
            if first and _SPREAD.fullmatch(text):
                report.add(where, "one JSON value spread over several lines", *_per_line(text))
                return  # every line that follows would be a problem of its own
            report.add_problem(problem.problem)
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16: the same
                return
            row = None
        else:
            if not isinstance(row, dict):
                report.add(where, f"a row that is {kind(row)}", *_per_line(text))
                row = None
        first = False
        yield line, row


def _per_line(text: bytes) -> tuple[str, str]:
    """What is expected of a line, and how to get there from other JSON."""
    hints = {
        b"[": "`kimik3-prep manifest rows.json -o manifest.jsonl` makes lines of a list",
        b"{": "`jq -c .` makes one line of it",
    }
    return "a JSON object on one line", hints.get(text[:1], "")


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
    for row in np.sort(repeats)[:MAX_PROBLEMS]:
        code = indices[row]
        what = f"id {show(codes.dictionary[code].as_py())} stands on line {lines[first[code]]} already"
        report.add(f"{name}:{lines[row]}", what, "ids that are unique", hint)
    report.total += max(0, len(repeats) - MAX_PROBLEMS)
