"""Images in the cells of tables: read by their place, with the row group around them kept for the next."""

from __future__ import annotations

import base64
import binascii
import mmap
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO

import numpy as np

from kimik3_prep.images.address import TableCell

_MOST_OF_A_GROUP = 2 << 30  # bytes of a column in a row group
_HELD_BYTES = 1 << 30  # of row groups that are kept; two are always: two shards are filled at a time


class _Kept:
    """What was loaded last, for all threads: a thing that many ask for at once is loaded once."""

    def __init__(self, least: int, most_bytes: int) -> None:
        self._least, self._most_bytes = least, most_bytes
        self._things: OrderedDict[Any, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, load: Callable[[], Any]) -> Any:
        """The thing of that name, loaded by this thread or by another."""
        with self._lock:
            mine = key not in self._things
            thing = self._things.setdefault(key, Future())
            self._things.move_to_end(key)
        if mine:
            try:
                thing.set_result(load())
            except BaseException as error:
                with self._lock:
                    self._things.pop(key, None)
                thing.set_exception(error)
                raise
            with self._lock:
                self._shrink()
        return thing.result()

    def _shrink(self) -> None:
        done = [key for key, thing in self._things.items() if thing.done()]
        size = sum(getattr(self._things[key].result(), "nbytes", 0) for key in done)
        for key in done[: -self._least]:
            if size <= self._most_bytes:
                break
            size -= getattr(self._things.pop(key).result(), "nbytes", 0)


_footers = _Kept(64, 0)
_groups = _Kept(2, _HELD_BYTES)

_STEP = re.compile(r"\[(\d+)\]|\.([^.\[]+)")


def read_cell(file: BinaryIO, version: Any, cell: TableCell) -> bytes:
    """The bytes in a cell of an open Parquet or Arrow file; `version` tells that file from any other.

    A cell may hold its image as base64 text. Raises OSError for a cell that is not there, ArrowException.
    """
    file.seek(0)
    is_parquet = file.read(4) == b"PAR1"
    column, steps = _column(cell.column)
    if is_parquet:
        value = _parquet_value(file, version, cell.row, column if steps[:1] and steps[0][0] else cell.column)
    else:
        value = _arrow_value(file, version, cell.row, column)
    for number, name in steps:
        if number:
            value = value[int(number)] if isinstance(value, list) and int(number) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(name)
    if isinstance(value, dict):
        value = value.get("bytes")
    if isinstance(value, str):
        try:
            value = base64.b64decode("".join(value.split()), validate=True)
        except binascii.Error:
            value = None
    if not isinstance(value, bytes):
        raise OSError(f"row {cell.row} of the table holds no bytes")
    return value


def _column(path: str) -> tuple[str, list[tuple[str, str]]]:
    """The column of a path like `images[2].bytes`, and the steps inside it."""
    match = re.search(r"(\[\d+\])?(\.bytes)?$", path)
    start = match.start() if match else len(path)
    return path[:start], _STEP.findall(path[start:])


def _parquet_value(file: BinaryIO, version: Any, row: int, column: str) -> Any:
    from pyarrow import parquet

    footer = _footers.get(version, lambda: parquet.read_metadata(file))
    ends = np.cumsum([footer.row_group(group).num_rows for group in range(footer.num_row_groups)])
    if not len(ends) or row >= ends[-1]:
        raise OSError(f"the table has no row {row}")
    group = int(np.searchsorted(ends, row, "right"))

    def load() -> Any:
        chunks = [footer.row_group(group).column(n) for n in range(footer.num_columns)]
        size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] == column.split(".")[0])
        if size > _MOST_OF_A_GROUP:
            raise OSError(f"row group {group} holds {size:,} bytes of images, which are in memory at once")
        with parquet.ParquetFile(file, metadata=footer, pre_buffer=False) as opened:
            return opened.read_row_group(group, columns=[column], use_threads=False)

    table = _groups.get((version, group, column), load)
    if table.num_columns != 1:
        raise OSError(f"the table has no column {column}")
    return table.column(0)[row - int(ends[group] - footer.row_group(group).num_rows)].as_py()


def _arrow_value(file: BinaryIO, version: Any, row: int, column: str) -> Any:
    import pyarrow as pa

    def load() -> Any:
        try:  # of a local file the system keeps in memory what is read of it
            buffer = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError):
            file.seek(0)
            buffer = pa.py_buffer(file.read())
        is_file = buffer[:6].to_pybytes() == b"ARROW1"
        return (pa.ipc.open_file(buffer) if is_file else pa.ipc.open_stream(buffer)).read_all()

    table = _groups.get((version, "arrow"), load)
    if row >= table.num_rows:
        raise OSError(f"the table has no row {row}")
    if table.schema.names.count(column) != 1:
        raise OSError(f"the table has no column {column}")
    value = table.column(column).slice(row, 1)
    value.validate(full=True)  # in a damaged table a value may lie anywhere
    return value[0].as_py()
