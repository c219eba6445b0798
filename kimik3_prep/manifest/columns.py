"""Rows in columns: Parquet and Arrow files, and images that lie in the table itself.

A column of images is binary, or a struct of `bytes` and `path` as the data set libraries write it, or base64 text, or a
list of any of these. It is not read with the rows: rows name their cells, and a cell is read when its image is opened.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.images.address import name_in_table
from kimik3_prep.manifest.magic import base64_image, begins_like_an_image
from kimik3_prep.manifest.report import Report, show
from kimik3_prep.manifest.row import ID_KEYS, IMAGE_KEYS, Cell, Row, Selection

#: Fields that a row may hold as 640.0: pandas turns whole numbers into floats where a row lacks one.
_WHOLE = (*ID_KEYS, "width", "height")

_MOST_OF_A_GROUP = 1 << 30  # bytes of images in a row group, which is in memory while they are read
_BATCH = 4096
_MOST_AT_A_TIME = 128 << 20  # bytes of rows that are in memory at once, several times
_BATCH_OF_IMAGES = 16
_LOOKED_AT = 16  # cells that are read at a time to tell whether a column holds images
_LOOKED_FOR = 64  # times that so many are read, where all of them are null


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of images."""

    name: str
    field: str
    """What the bytes are called in a struct, `bytes`; empty where the cell itself is the image."""
    is_list: bool
    has_path: bool

    def address(self, position: int | None) -> str:
        """What the address of a cell calls the column: `image.bytes`, `images[2].bytes`."""
        place = "" if position is None else f"[{position}]"
        return self.name + place + (f".{self.field}" if self.field else "")


@dataclass(frozen=True, slots=True)
class _Table:
    """A table whose rows are read."""

    address: str
    """What image strings call it."""
    images: tuple[_Column, ...]
    digest: Any

    def rows(self, batch: pa.RecordBatch, number: int, there: dict[str, bool]) -> Iterator[Row]:
        """The rows of a batch, the first of which is row `number` of the table.

        there: columns whose bytes are not in the batch, and whether they are all there or none.
        """
        names = tuple(column.name for column in self.images)
        others = [name for name in batch.schema.names if name not in names]
        cells = [self._cells(batch, column, number, there.get(column.name)) for column in self.images]
        for place, values in enumerate(_values(batch.select(others), number)):
            fields = as_json(values)
            for column, of_rows in zip(self.images, cells, strict=True):
                if (value := of_rows[place]) is not None:
                    fields[column.name] = value
            path = getattr(fields.get(names[0]), "path", None) if len(names) == 1 else None
            marks = fields if path is None else {**fields, "image_path": path}
            self.digest.update(json.dumps(marks, sort_keys=True, default=str).encode())
            yield Row(str(number + place + 1), fields, names)

    def _cells(self, batch: pa.RecordBatch, column: _Column, number: int, there: bool | None) -> list[Any]:
        """By row: the address of the image, or its path where it has no bytes; a list of them for a column of lists."""
        if column.name not in batch.schema.names:
            return [self._cell(column, number + row, None, bool(there), None) for row in range(batch.num_rows)]
        array = batch.column(column.name)
        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        flat = array.flatten() if column.is_list else array
        flat = flat.storage if isinstance(flat, pa.ExtensionArray) else flat
        paths = pc.struct_field(flat, "path").to_pylist() if column.has_path else [None] * len(flat)
        held = flat
        if column.field and there is None:
            held = pc.struct_field(flat, column.field)
        valid = held.is_valid().to_pylist() if there is None else [there] * len(flat)
        if not column.is_list:
            return [self._cell(column, number + n, None, *one) for n, one in enumerate(zip(valid, paths, strict=True))]
        ends = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
        rows, begin = [], 0
        for row, length in enumerate(ends):
            parts = enumerate(zip(valid[begin : begin + length], paths[begin : begin + length], strict=True))
            rows.append([self._cell(column, number + row, place, *one) for place, one in parts])
            begin += length
        return rows

    def _cell(self, column: _Column, row: int, position: int | None, there: bool, path: str | None) -> str | None:
        if not there:
            return path
        cell = Cell(name_in_table(self.address, row, column.address(position)))
        cell.path = path
        return cell


def parquet_rows(
    file: BinaryIO, address: str, name: str, digest: Any, report: Report, select: Selection
) -> Iterator[Row]:
    """The rows of a Parquet file. `address` is what image strings call it, `name` what people do."""
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        schema = opened.schema_arrow
        if not _names_are_unique(schema, name, report):
            return
        columns = _image_columns(schema, select, lambda column: _first_of_parquet(opened, column))
        table = _Table(address, columns, digest)
        _hash(file, digest, footer=bool(table.images))
        leaves = _leaves(opened, table, name, report)
        if not table.images:
            number = 0
            size = _rows_at_a_time(opened, leaves)
            for batch in opened.iter_batches(batch_size=size, columns=leaves) if leaves else ():
                for place, values in enumerate(_values(_as_text(batch, name, report), number), number + 1):
                    yield Row(str(place), as_json(values))
                number += batch.num_rows
            return
        for group in range(opened.num_row_groups):
            if not _fits(opened, group, table, name, report):
                return
        number = 0
        for group in range(opened.num_row_groups):
            there = {c.name: known for c in table.images if (known := _all_there(opened, group, c)) is not None}
            unsure = [leaf for c in table.images if c.name not in there for leaf in _bytes_of(opened, c)]
            size = _BATCH_OF_IMAGES if unsure else _rows_at_a_time(opened, leaves)
            for batch in _batches(opened, group, [*leaves, *unsure], size):
                yield from table.rows(_as_text(batch, name, report), number, there)
                number += batch.num_rows


def arrow_rows(
    file: BinaryIO, address: str, name: str, digest: Any, report: Report, select: Selection
) -> Iterator[Row]:
    """The rows of an Arrow file or stream, as `datasets` and Feather write them."""
    with open_arrow(file) as opened:
        schema = opened.schema
        digest.update(schema.serialize())
        if not _names_are_unique(schema, name, report):
            return
        table: _Table | None = None
        number = 0
        for batch in arrow_batches(opened):
            for begin in range(0, batch.num_rows, _BATCH):
                part = batch.slice(begin, _BATCH)
                if table is None:
                    head = part.slice(0, 1000)
                    columns = _image_columns(schema, select, partial(_first_of_arrow, head))
                    table = _Table(address, columns, digest)
                    images = {column.name for column in columns}
                    keep = [field.name for field in schema if field.name in images or not _is_binary(field.type)]
                    for left_out in set(schema.names) - set(keep):
                        report.warn(name, f"the column {show(left_out)} holds binary, and is left out")
                yield from table.rows(_as_text(part.select(keep), name, report), number, {})
                number += part.num_rows


def open_arrow(file: BinaryIO) -> Any:
    """A reader of an Arrow file or stream. Raises pyarrow's exceptions."""
    start = file.read(6)
    file.seek(0)
    return pa.ipc.open_file(file) if start == b"ARROW1" else pa.ipc.open_stream(file)


def arrow_batches(opened: Any) -> Iterator[pa.RecordBatch]:
    """The batches of either, in order. Raises ArrowInvalid for a damaged one, whose values may lie anywhere."""
    is_file = isinstance(opened, pa.ipc.RecordBatchFileReader)
    for batch in map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened:
        batch.validate(full=True)
        yield batch


# --- which columns are images -------------------------------------------------------------------------------------


def _image_columns(schema: pa.Schema, select: Selection, first: Callable[[str], list[Any]]) -> tuple[_Column, ...]:
    """The columns of images: by their name, by what `datasets` says of them, or by what their first cells hold."""
    chosen = {re.split(r"[.\[]", path)[0] for path in select.image_fields}
    if not chosen.isdisjoint(schema.names):
        return tuple(
            column for name in schema.names if name in chosen and (column := _column(schema.field(name))) is not None
        )
    said = _hugging_face_images(schema)
    found = []
    for field in schema:
        column = _column(field)
        if column is None and (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)):
            if any(isinstance(value, str) and base64_image(value) for value in first(field.name)):
                found.append(_Column(field.name, "", False, False))
        elif column is not None:
            sure = field.name in said or (field.name in IMAGE_KEYS and not column.is_list)
            cells = list(_bytes_in(first(field.name), column.field))
            empty = not cells and column.has_path  # as the libraries write them, with no image so far
            if sure or empty or any(map(begins_like_an_image, cells)):
                found.append(column)
    return tuple(found)


def _column(field: pa.Field) -> _Column | None:
    """A column that may hold images; None for one of another type."""
    kind = _storage(field.type)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    kind = _storage(kind.value_type) if is_list else kind
    if _is_binary(kind):
        return _Column(field.name, "", is_list, False)
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and _is_binary(kind.field("bytes").type):
        return _Column(field.name, "bytes", is_list, kind.get_field_index("path") >= 0)
    return None


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _hugging_face_images(schema: pa.Schema) -> set[str]:
    """Columns that the `datasets` library calls images, in the notes that it leaves in the schema."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return set()
    return {name for name, feature in features.items() if '"_type": "Image"' in json.dumps(feature)}


def _bytes_in(values: list[Any], field: str) -> Iterator[bytes]:
    for value in values:
        if isinstance(value, list):
            yield from _bytes_in(value, field)
        elif isinstance(inner := value.get(field) if isinstance(value, dict) else value, bytes):
            yield inner


def _first_of_arrow(batch: pa.RecordBatch, name: str) -> list[Any]:
    values: list[Any] = batch.column(name).to_pylist()
    return values


def _first_of_parquet(opened: Any, name: str) -> list[Any]:
    """The first cells of a column that are not null."""
    for batch in itertools.islice(opened.iter_batches(batch_size=_LOOKED_AT, columns=[name]), _LOOKED_FOR):
        if batch.num_columns and batch.column(0).null_count < batch.num_rows:
            values: list[Any] = batch.column(0).to_pylist()
            if any(value not in (None, "", [], {"bytes": None, "path": None}) for value in values):
                return values
    return []


# --- Parquet ------------------------------------------------------------------------------------------------------


def _names_are_unique(schema: pa.Schema, name: str, report: Report) -> bool:
    doubled = sorted({column for column in schema.names if schema.names.count(column) > 1})
    for column in doubled:
        report.add(name, f"two columns are named {show(column)}", "names that are unique")
    return not doubled


def _leaves(opened: Any, table: _Table, name: str, report: Report) -> list[str]:
    """The Parquet columns to read with the rows: all but bytes, which JSON cannot hold."""
    columns = {column.name: column for column in table.images}
    leaves = []
    for number in range(len(opened.schema)):
        leaf = opened.schema.column(number)
        head, _, rest = leaf.path.partition(".")
        image = columns.get(leaf.path) or columns.get(head)
        if image is not None:
            leaves += [leaf.path] if rest.endswith("path") and image.has_path else []
        elif leaf.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY") and leaf.logical_type.type == "NONE":
            report.warn(name, f"the column {show(leaf.path)} holds binary, and is left out")
        else:
            leaves.append(leaf.path)
    return leaves


def _bytes_of(opened: Any, column: _Column) -> list[str]:
    """The Parquet path of a column's bytes."""
    paths = [opened.schema.column(number).path for number in range(len(opened.schema))]
    return [p for p in paths if (p == column.name or p.startswith(f"{column.name}.")) and p.endswith(column.field or p)]


def _hash(file: BinaryIO, digest: Any, footer: bool) -> None:
    """All of a file; of one that holds images its footer, which tells sizes and places of all there is."""
    begin = 0
    if footer:
        end = file.seek(-8, 2)
        begin = max(0, end - int.from_bytes(file.read(4), "little"))
    file.seek(begin)
    while chunk := file.read(1 << 20):
        digest.update(chunk)


def _chunks(opened: Any, group: int, column: _Column) -> list[Any]:
    """What the footer says of a column's bytes in a row group."""
    about = opened.metadata.row_group(group)
    paths = _bytes_of(opened, column)
    return [chunk for n in range(about.num_columns) if (chunk := about.column(n)).path_in_schema in paths]


def _fits(opened: Any, group: int, table: _Table, name: str, report: Report) -> bool:
    """Row groups of images are read whole, so none may be larger than memory can be expected to hold."""
    size: int = sum(c.total_uncompressed_size for column in table.images for c in _chunks(opened, group, column))
    if size > _MOST_OF_A_GROUP:
        what = f"row group {group} holds {size:,} bytes of images"
        hint = "pyarrow.parquet.write_table(table, file, row_group_size=100) makes smaller ones"
        report.add(name, what, f"at most {_MOST_OF_A_GROUP:,}, which are in memory at once", hint)
    return size <= _MOST_OF_A_GROUP


def _all_there(opened: Any, group: int, column: _Column) -> bool | None:
    """Whether all cells of a row group have bytes, or none; None where the footer does not tell."""
    (chunk,) = _chunks(opened, group, column)
    if column.is_list or chunk.statistics is None or not chunk.statistics.has_null_count:
        return None
    nulls = chunk.statistics.null_count
    return bool(nulls == 0) if nulls in (0, opened.metadata.row_group(group).num_rows) else None


def _rows_at_a_time(opened: Any, leaves: list[str]) -> int:
    """As many rows as memory can be expected to hold: by the first ones, for text that repeats is small in the file."""
    first = next(opened.iter_batches(batch_size=_LOOKED_AT, columns=leaves), None) if leaves else None
    if first is None or not first.num_rows:
        return _BATCH
    bytes_of_a_row = sum(_expanded(column) for column in first.columns) // first.num_rows + 1
    return int(min(_BATCH, max(1, _MOST_AT_A_TIME // bytes_of_a_row)))


def _expanded(column: pa.Array) -> int:
    """Bytes of a column's values, each for itself."""
    plain = column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
    return int(plain.nbytes)


def _batches(opened: Any, group: int, leaves: list[str], size: int) -> Iterator[pa.RecordBatch]:
    if leaves:
        yield from opened.iter_batches(batch_size=size, columns=leaves, row_groups=[group])
    else:
        yield pa.RecordBatch.from_struct_array(
            pa.array([{}] * opened.metadata.row_group(group).num_rows, pa.struct([]))
        )


# --- values -------------------------------------------------------------------------------------------------------


def _as_text(batch: pa.RecordBatch, name: str, report: Report) -> pa.RecordBatch:
    """The batch with dates, times and decimals as text, which JSON has no other way to hold."""
    for number, field in enumerate(batch.schema):
        if pa.types.is_temporal(field.type) or pa.types.is_decimal(field.type):
            report.warn_once(name, f"the column {show(field.name)} holds {field.type}, and is kept as text")
            values = [None if value is None else str(value) for value in batch.column(number).to_pylist()]
            batch = batch.set_column(number, field.name, pa.array(values, pa.string()))
    return batch


def _values(batch: pa.RecordBatch, row: int) -> list[dict[str, Any]]:
    if not batch.num_columns:
        return [{} for _ in range(batch.num_rows)]
    try:
        values: list[dict[str, Any]] = batch.to_pylist()
        return values
    except UnicodeDecodeError:
        raise OSError(f"a text in rows {row + 1} to {row + batch.num_rows} is not UTF-8") from None


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """The row as JSON Lines would have it: what is null or NaN is not there, whole numbers are integers."""
    for key in _WHOLE:
        value = row.get(key)
        if isinstance(value, float) and value.is_integer():
            row[key] = int(value)
    return {key: value for key, value in row.items() if value is not None and value == value}
