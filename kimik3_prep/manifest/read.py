"""Any source to items: JSON, cells, Parquet, Arrow, tars, folders, patterns; every problem of the source at once.

A row is a JSON object (or a row of a table) with the fields of `README.md`'s manifest table. Items end up in an Arrow
table of `ITEM_SCHEMA`, because a million Python objects would not fit where a million column entries do.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import lzma
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
from typing import Any, cast

import numpy as np
import pyarrow as pa

from kimik3_prep import remote
from kimik3_prep.errors import Problem
from kimik3_prep.images.packed import Unpacked
from kimik3_prep.manifest.columns import arrow_rows, parquet_rows
from kimik3_prep.manifest.folder import Folder, files_of, image_rows, saved_dataset
from kimik3_prep.manifest.items import ITEM_SCHEMA
from kimik3_prep.manifest.magic import START, SUFFIXES, kind_of, suffixes
from kimik3_prep.manifest.report import MAX_PROBLEMS, PassedOver, Report, show
from kimik3_prep.manifest.row import NO_SELECTION, Item, Row, Selection, read_row
from kimik3_prep.manifest.tar import tar_rows
from kimik3_prep.manifest.text import text_rows
from kimik3_prep.remote import parent, scheme

_BATCH = 16_384
_MOST_WITHOUT = 1_000_000  # rows without an image, after which nobody expects one any more
_PIECE = 4 << 20  # bytes of a manifest at a URL that are asked for at a time
_LETTERS = "*?["
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)$")

#: What reading may raise where a file cannot be read on.
_CANNOT_READ = (
    OSError,
    EOFError,
    UnicodeError,
    MemoryError,  # where a damaged table asks for more than there is
    zlib.error,
    lzma.LZMAError,
    csv.Error,
    pa.ArrowException,
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A source without problems."""

    items: pa.Table
    """Arrow table of `ITEM_SCHEMA`."""
    base: str
    """Folder, or URL of one, that relative image paths start from."""
    digest: str
    """sha256 of the lines read (decompressed) or of the tables, so that a resume notices another manifest."""
    name: str
    """The source, as people call it."""
    rows: int = 0
    """Rows that were read, also those that name no image."""
    warnings: tuple[Problem, ...] = ()
    """What a person should know, although nothing stops at it."""
    passed_over: tuple[PassedOver, ...] = ()
    """What the source holds that became no item."""


def read_manifest(
    path: str, limit: int | None = None, select: Selection = NO_SELECTION, image_dir: str | None = None
) -> Manifest:
    """Read a source at a path or URL: a file of rows, a table, a tar, a folder, or a pattern for several.

    `-` is standard input, `limit` the first rows only. image_dir: where relative paths start; without it, where the
    source lies.

    Raises InputError with every problem of the source: syntax, fields, duplicate ids, items that are no images.
    """
    report = Report()
    digest = hashlib.sha256()
    if select.is_said:
        digest.update(repr((select.image_fields, select.id_fields, select.number_rows)).encode())
    name = "<stdin>" if path == "-" else path
    base = base_of(path) if image_dir is None else image_dir if scheme(image_dir) else os.path.abspath(image_dir)
    source = _Source(path, name, base, select, digest, report)
    items: list[Item] = []
    batches: list[pa.RecordBatch] = []
    number = -1
    place = ""
    fields: list[str] = []
    try:
        # Stops in front of the first row too many: nothing that stands there is a problem or part of the digest.
        for number, row in enumerate(islice(source.rows(), limit)):
            place = row.place
            fields = fields or list(row.fields or ())[:20]
            items += read_row(row, number, f"{name}:{place}", report, select)
            if number == _MOST_WITHOUT and not items and not batches:
                report.add(name, f"none of the first {number:,} rows names an image", *_fields_hint(fields, select))
                break
            if len(items) >= _BATCH:
                batches.append(_batch(items, batches))
    except _CANNOT_READ as error:
        report.add_first(Problem(f"{name}:{place}" if place else name, _cannot_read(error, place)))
    batches.append(_batch(items, batches))
    table = pa.Table.from_batches(batches, ITEM_SCHEMA)
    _check_unique_ids(table, name, report)
    if not table.num_rows and not report.total:
        _nothing_found(name, fields, select, report)
    report.raise_problems()
    return Manifest(table, base, digest.hexdigest(), name, number + 1, report.all_warnings(name), report.passed_over)


def _batch(items: list[Item], before: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The items as columns, numbered after those before; the list is empty afterwards."""
    first = sum(batch.num_rows for batch in before)
    columns = list(zip(*items, strict=True)) or [()] * len(ITEM_SCHEMA)
    columns[0] = tuple(range(first, first + len(items)))
    items.clear()
    arrays = [pa.array(values, field.type) for values, field in zip(columns, ITEM_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ITEM_SCHEMA)


def _nothing_found(name: str, fields: list[str], select: Selection, report: Report) -> None:
    if not fields:
        left = "".join(f"; passed over: {each.count:,} {each.kind}" for each in report.passed_over)
        report.add(name, f"the manifest has no items{left}", 'one JSON object per line, for example {"image": "a.jpg"}')
        return
    report.add(name, "no row names an image", *_fields_hint(fields, select))


def _fields_hint(fields: list[str], select: Selection) -> tuple[str, str]:
    """What rows should hold, and what they do."""
    expected = " or ".join(select.image_fields) or "a path, a URL or the bytes of an image in one of their fields"
    return (
        expected,
        f"--image-field NAME says which field it is; the rows have {', '.join(map(show, fields)) or 'none'}",
    )


def _cannot_read(error: Exception, place: str) -> str:
    what = "cannot read on after this line" if place else "cannot read the manifest"
    if isinstance(error, OSError) and error.strerror:
        return f"{what}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"{what}: it needs more memory than the system gives"
    return f"{what}: {error}"


# --- where a source lies ------------------------------------------------------------------------------------------


def base_of(path: str) -> str:
    """Where a source's relative paths start: in its folder, also where that is at a URL; in a folder, there.

    In the working folder for standard input, and for the pipe that a shell makes of `<(…)`.
    """
    if is_pattern(path):
        path = path[: min(path.find(letter) for letter in f"{_LETTERS}{{" if letter in path)] + "x"
    if scheme(path):
        return path.rstrip("/") if path.endswith("/") else parent(path)
    if path != "-" and os.path.isdir(path):
        return os.path.abspath(path)
    folder = os.path.dirname(os.path.abspath(path))
    is_pipe = path in ("-", "/dev/stdin") or folder == "/dev/fd" or folder.startswith("/proc/")
    return os.getcwd() if is_pipe else folder


def is_pattern(path: str) -> bool:
    """Whether a source's name stands for several files: `shards/*.tar`. A file of that very name comes first."""
    address = scheme(path)
    if address in ("http", "https") and not _BRACES.search(path):  # there, a question mark begins what is no path
        return False
    letters = any(letter in path for letter in _LETTERS) or _BRACES.search(path) is not None
    return letters and (address is not None or not os.path.lexists(path))


def matches(pattern: str) -> list[str]:
    """The files that a pattern names, sorted for each of its braces. Raises OSError where there are none."""
    found: list[str] = []
    for each in _without_braces(pattern):
        if any(letter in each for letter in _LETTERS) and scheme(each) not in ("http", "https"):
            found += sorted(remote.glob(each) if scheme(each) else glob.glob(each, recursive=True))
        else:
            found.append(each)
    if not found:
        raise OSError("no file matches")
    return found


def _without_braces(pattern: str) -> list[str]:
    """`shard-{000..009}.tar` and `{train,val}.tar` as the names that a shell makes of them."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    words = match[1].split(",")
    if numbers := _RANGE.match(match[1]):
        first, last, width = int(numbers[1]), int(numbers[2]), len(numbers[1])
        words = [str(number).zfill(width) for number in range(first, min(last, first + 10**6) + 1)]
    return [
        each for word in words for each in _without_braces(pattern[: match.start()] + word + pattern[match.end() :])
    ]


def opened(path: str) -> AbstractContextManager[BufferedReader]:
    """The bytes of a file, of an object at a URL, or of standard input for `-`. Raises OSError."""
    if scheme(path):
        return BufferedReader(remote.opened(path), _PIECE)
    if path != "-":
        return open(path, "rb", 1 << 16)  # type: ignore[return-value]  # a BufferedReader, whatever its size
    if sys.stdin is None:  # so it is where a shell closed it: `<&-`
        raise OSError("standard input is closed")
    return nullcontext(cast("BufferedReader", sys.stdin.buffer))


def name_from(base: str, path: str) -> str:
    """What image strings call a file: its path from the folder that relative paths start from."""
    if scheme(path):
        return path if "?" in path else path.removeprefix(f"{base}/")
    if scheme(base):
        return os.path.abspath(path)
    relative = os.path.relpath(os.path.abspath(path), base)
    return f"./{relative}" if relative[:5].lower() == "data:" else relative


# --- rows ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Source:
    """A source while it is read."""

    path: str
    name: str
    base: str
    select: Selection
    digest: Any
    report: Report

    def rows(self) -> Iterator[Row]:
        """The rows of all its files. Those of tables, tars and several files are counted from 1 on through all."""
        if self.path != "-" and not is_pattern(self.path) and _is_folder(self.path):
            yield from self._folder_rows(self.path)
        elif is_pattern(self.path):
            yield from self._part_rows(matches(self.path))
        else:
            yield from self._file_rows(self.path, self.name)

    def _part_rows(self, parts: list[str]) -> Iterator[Row]:
        number = 0
        for part in parts:
            is_folder = not scheme(part) and os.path.isdir(part)
            for row in self._folder_rows(part) if is_folder else self._file_rows(part, part):
                number += 1
                yield row._replace(place=str(number))

    def _folder_rows(self, path: str) -> Iterator[Row]:
        """The rows of a folder: of its tars, else of its tables, else its images, else its lists."""
        files = saved_dataset(path)
        if files is not None:
            yield from self._part_rows([_joined(path, file) for file in files])
            return
        folder = Folder.of(iter(files_of(path, self.report)), suffixes(self.select.formats))
        parts = folder.tars or (folder.tables if not folder.images or self._hold_images(path, folder.tables) else [])
        if parts:
            rest = (folder.images, folder.metadata, folder.lists, [] if parts is folder.tables else folder.tables)
            folder.pass_over(self.report, *rest)
            yield from self._part_rows([_joined(path, part) for part in parts])
        elif folder.images:
            for image in folder.images:
                self.digest.update(f"{image}\0".encode())
            folder.pass_over(self.report, folder.lists, folder.tables)
            said = (row for part in folder.metadata for row in self._metadata(path, part))
            yield from image_rows(folder.images, said, partial(self._name_below, path), self.report)
        else:
            folder.pass_over(self.report)
            yield from self._part_rows([_joined(path, part) for part in (*folder.metadata, *folder.lists)])

    def _name_below(self, folder: str, name: str) -> str:
        return name_from(self.base, _joined(folder, name))

    def _metadata(self, folder: str, file: str) -> Iterator[tuple[str, Row]]:
        """The rows of a file that describes images, each with its place."""
        name = f"{self.name}/{file}"
        for row in self._file_rows(_joined(folder, file), name):
            yield file, row

    def _hold_images(self, folder: str, tables: list[str]) -> bool:
        """Whether a folder's tables hold images: the others are lists of what lies beside them."""
        if not tables:
            return False
        probe = _Source(self.path, self.name, self.base, self.select, hashlib.sha256(), Report())
        return any(row.cells for row in islice(probe._file_rows(_joined(folder, tables[0]), ""), 1))

    def _file_rows(self, path: str, name: str) -> Iterator[Row]:
        with opened(path) as file:
            start = file.peek(START)[:START]
            kind = kind_of(start)
            if kind.role in ("parquet", "tar", "arrow") and not scheme(path) and not os.path.isfile(path):
                what = f"it is {kind.name}, which is not read from front to end"
                raise OSError(f"{what}: name the file, a pipe has no end")
            address = name_from(self.base, path)
            if kind.role == "packed":
                yield from self._packed_rows(file, kind.name, path, address, name)
            elif kind.role == "parquet":
                yield from parquet_rows(file, address, name, self.digest, self.report, self.select)
            elif kind.role == "arrow":
                yield from arrow_rows(file, address, name, self.digest, self.report, self.select)
            elif kind.role == "tar":
                yield from tar_rows(file, address, name, self.digest, self.report, suffixes(self.select.formats))
            elif kind.role == "image" or (kind.role == "text" and os.path.splitext(path)[1].lower() in SUFFIXES):
                self.digest.update(f"{address}\0".encode())
                yield Row("1", {"image": address})
            elif kind.role == "text":
                yield from text_rows(file, name, self.digest, self.report)
            else:
                self.report.add(name, f"it is {kind.name}", "rows, tables, tars or images", kind.way)

    def _packed_rows(self, file: BufferedReader, packing: str, path: str, address: str, name: str) -> Iterator[Row]:
        """The rows of what a compressed file holds."""
        plain = cast("BufferedReader", io.BufferedReader(Unpacked(file, packing)))
        kind = kind_of(plain.peek(START)[:START])
        if kind.role == "text":
            yield from text_rows(plain, name, self.digest, self.report)
        elif kind.role == "tar" and (scheme(path) or os.path.isfile(path)):
            yield from tar_rows(plain, address, name, self.digest, self.report, suffixes(self.select.formats))
        else:
            raise OSError(f"it is {kind.name} that is compressed, in which no image has a place: decompress it first")


def _is_folder(path: str) -> bool:
    return remote.is_folder(path) if scheme(path) else os.path.isdir(path)


def _joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if scheme(folder) else os.path.join(folder, name)


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
    hint = 'give the rows an "id" of their own, or name a field of theirs with --id-field, or --number-rows'
    for row in np.sort(repeats)[:MAX_PROBLEMS]:
        code = indices[row]
        what = f"id {show(codes.dictionary[code].as_py())} stands on line {lines[first[code]]} already"
        report.add(f"{name}:{lines[row]}", what, "ids that are unique", hint)
    report.total += max(0, len(repeats) - MAX_PROBLEMS)
