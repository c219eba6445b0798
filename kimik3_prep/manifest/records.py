"""Rows as people have them: a JSON list, JSON Lines, CSV or Parquet, each row with its place in the file."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from kimik3_prep import strict_json
from kimik3_prep.manifest.columns import as_json
from kimik3_prep.manifest.read import json_rows, opened
from kimik3_prep.manifest.row import Report, kind, show

#: Where a row stands, `file:line`, and the row; None for one whose problem is reported already.
Row = tuple[str, dict[str, Any] | None]

_OPENED = re.compile(r"\s*\[\s*(?=.)", re.DOTALL)
_AFTER_A_ROW = re.compile(r"\s*(?:,\s*(?=[^\s\]])|(?=\]))")
_CLOSED = re.compile(r"\]\s*\Z")
_NUMBERS = ("width", "height")  # the fields of a CSV file that are read as integers

#: What a Parquet column may hold to be JSON: physical and logical type.
_PLAIN = ("BOOLEAN", "INT32", "INT64", "FLOAT", "DOUBLE")
_JSON_TYPES = {*((name, word) for name in _PLAIN for word in ("NONE", "INT", "UNKNOWN"))} | {
    *(("BYTE_ARRAY", word) for word in ("STRING", "ENUM", "JSON")),
    ("FIXED_LEN_BYTE_ARRAY", "FLOAT16"),
}


def read_records(path: str, name: str, report: Report, left_out: list[str]) -> Iterator[Row]:
    """Every row with its place: `file:line`, the row's number for Parquet, and line and column in a JSON list.

    left_out: gets the Parquet columns that JSON cannot hold, such as the bytes of pictures. Raises OSError, EOFError,
    UnicodeDecodeError, zlib.error, csv.Error or pyarrow's exceptions where the file cannot be read on.
    """
    with opened(path) as file:
        start = file.peek(4)[:4]
        if start == b"PAR1":
            yield from _parquet_records(path, name, report, left_out)
        elif start[:2] == b"\x1f\x8b":
            with gzip.open(file) as plain:
                yield from _text_records(cast("io.BufferedReader", plain), name.removesuffix(".gz"), name, report)
        else:
            yield from _text_records(file, name, name, report)


def _text_records(file: io.BufferedReader, kind_of: str, name: str, report: Report) -> Iterator[Row]:
    if kind_of.lower().endswith((".csv", ".tsv")):
        yield from _csv_records(file, name, "\t" if kind_of.lower().endswith(".tsv") else ",", report)
    elif file.peek(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _list_records(file.read(), name, report)
    else:
        for line, row in json_rows(cast("BinaryIO", file), name, hashlib.sha256(), report):
            yield f"{name}:{line}", row


def _list_records(content: bytes, name: str, report: Report) -> Iterator[Row]:
    """The rows of one JSON list, one at a time: all of them take ten times the memory of their text."""
    decode = json.JSONDecoder().raw_decode  # finds where a row ends; strict_json says whether it may be read so
    line, start, counted = 1, -1, 0  # many a list is one long line: the column tells its rows apart
    try:
        text = content.decode().removeprefix("\ufeff")
        place = _OPENED.match(text)
        while place is not None and text[begin := place.end()] != "]":
            line += text.count("\n", counted, begin)
            start = max(start, text.rfind("\n", counted, begin))
            counted = begin
            where = f"{name}:{line}:{begin - start}"
            _, end = decode(text, begin)
            row = strict_json.parse_line(text[begin:end].encode(), where)
            if not isinstance(row, dict):
                report.add(where, f"a row that is {kind(row)}", "a JSON object")
            yield where, row if isinstance(row, dict) else None
            place = _AFTER_A_ROW.match(text, end)
        if place is not None and _CLOSED.match(text, place.end()):
            return
    except (ValueError, RecursionError, strict_json.JsonProblem):
        pass  # the whole file says better what is wrong, and where
    try:
        strict_json.parse(content, name)
    except strict_json.JsonProblem as problem:
        report.add_problem(problem.problem)


def _csv_records(file: io.BufferedReader, name: str, delimiter: str, report: Report) -> Iterator[Row]:
    """An empty cell is a field that is not there."""
    reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    header = next(reader, [])
    for column in sorted({column for column in header if header.count(column) > 1}):
        report.add(f"{name}:1", f"two columns are named {show(column)}", "names that are unique")
    for cells in reader:
        if not cells:
            continue
        where = f"{name}:{reader.line_num}"
        if len(cells) != len(header):
            what = f"{len(cells)} cells under a header of {len(header)}"
            report.add(where, what, "as many cells as columns", "quote text that has commas")
            yield where, None
            continue
        row: dict[str, Any] = {key: cell for key, cell in zip(header, cells, strict=True) if cell}
        for key in _NUMBERS:
            if (digits := row.get(key, "")).isascii() and digits.isdecimal() and len(digits) < 10:
                row[key] = int(digits)
        yield where, row


def _parquet_records(path: str, name: str, report: Report, left_out: list[str]) -> Iterator[Row]:
    from pyarrow import parquet

    if not os.path.isfile(path):
        raise OSError("it is Parquet, whose rows are found from its end: name the file, a pipe has no end")
    with parquet.ParquetFile(path) as table:
        leaves = [table.schema.column(number) for number in range(len(table.schema))]
        paths = [leaf.path for leaf in leaves]
        if doubled := sorted({leaf for leaf in paths if paths.count(leaf) > 1}):
            report.add(name, f"two columns are named {show(doubled[0])}", "names that are unique")
            return
        usable = [leaf.path for leaf in leaves if (leaf.physical_type, leaf.logical_type.type) in _JSON_TYPES]
        left_out += [leaf for leaf in paths if leaf not in usable]
        line = 0
        for batch in table.iter_batches(batch_size=1024, columns=usable):
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                raise OSError(f"a text in rows {line + 1} to {line + batch.num_rows} is not UTF-8") from None
            for row in rows:
                line += 1
                yield f"{name}:{line}", as_json(row)
