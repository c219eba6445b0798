"""Images in the cells of Parquet files: read by their place, with the row group around them kept for the next."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, BinaryIO

import numpy as np

from kimik3_prep.images.address import TableCell

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


def read_cell(file: BinaryIO, version: Any, cell: TableCell) -> bytes:
    """The bytes in a cell of an open Parquet file; `version` tells that file from any other.

    Raises OSError for a cell that is not there, ArrowException.
    """
    from pyarrow import parquet

    footer = _footers.get(version, lambda: parquet.read_metadata(file))
    ends = np.cumsum([footer.row_group(group).num_rows for group in range(footer.num_row_groups)])
    if not len(ends) or cell.row >= ends[-1]:
        raise OSError(f"the table has no row {cell.row}")
    group = int(np.searchsorted(ends, cell.row, "right"))

    def load() -> Any:
        with parquet.ParquetFile(file, metadata=footer, pre_buffer=False) as opened:
            return opened.read_row_group(group, columns=[cell.column], use_threads=False)

    table = _groups.get((version, group, cell.column), load)
    if table.num_columns != 1:
        raise OSError(f"the table has no column {cell.column}")
    value = table.column(0)[cell.row - int(ends[group] - footer.row_group(group).num_rows)].as_py()
    value = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(value, bytes):
        raise OSError(f"row {cell.row} of the table holds no bytes")
    return value
