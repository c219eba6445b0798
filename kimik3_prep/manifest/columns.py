"""Parquet manifests: rows as JSON Lines would have them, and images that lie in the table itself.

A column of images is binary, or a struct of `bytes` and `path` as the data set libraries write it. It is not read with
the manifest: rows name their cells, and a cell is read with the row group around it when its image is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from kimik3_prep.images.address import name_in_table
from kimik3_prep.manifest.row import ID_KEYS, IMAGE_KEYS, JSON_VALUES, Report, show

#: Fields that a Parquet row may hold as 640.0: pandas turns whole numbers into floats where a row lacks one.
_WHOLE = (*ID_KEYS, "width", "height")

_MOST_OF_A_GROUP = 1 << 30  # bytes of images in a row group, which is in memory while they are read


def table_rows(file: BinaryIO, table: str, name: str, digest: Any, report: Report) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet manifest. `table` is what image strings call it, `name` what people do."""
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        schema = opened.schema_arrow
        column = _image_column(schema)
        _hash(file, digest, footer=column is not None)
        if column is None:
            columns = _usable_columns(schema, name, report)
            for values in _group_rows(opened, None, columns) if columns else ():
                yield as_json(values)
            return
        head, _, field = column.partition(".")
        at = schema.get_field_index(head)
        columns = _usable_columns(schema.remove(at), name, report)
        _check_groups(opened, column, name, report)
        if field and schema.field(at).type.get_field_index("path") >= 0:
            columns.append(f"{head}.path")
        row = 0
        for group in range(0 if report.total else opened.num_row_groups):
            for values, there in zip(_group_rows(opened, group, columns), _present(opened, group, column), strict=True):
                path = (values.pop(head, None) or {}).get("path")
                # The path that the bytes once had is one of the other fields; a row without bytes is read from there.
                given = {head: name_in_table(table, row, column), "image_path": path} if there else {head: path}
                found = as_json({**values, **given})
                digest.update(json.dumps(found, sort_keys=True, default=str).encode())
                yield found
                row += 1


def _image_column(schema: pa.Schema) -> str | None:
    """The column of encoded images, None where images are named."""
    for key in IMAGE_KEYS:
        if schema.names.count(key) != 1:
            continue
        kind = schema.field(key).type
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        if _is_binary(kind):
            return key
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 and _is_binary(kind.field("bytes").type):
            return f"{key}.bytes"
    return None


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _hash(file: BinaryIO, digest: Any, footer: bool) -> None:
    """All of a file; of one that holds images its footer, which tells sizes and places of all there is."""
    begin = 0
    if footer:
        end = file.seek(-8, 2)
        begin = max(0, end - int.from_bytes(file.read(4), "little"))
    file.seek(begin)
    while chunk := file.read(1 << 20):
        digest.update(chunk)


def _check_groups(opened: Any, column: str, name: str, report: Report) -> None:
    """Row groups are read whole, so none may be larger than memory can be expected to hold."""
    for group in range(opened.num_row_groups):
        about = opened.metadata.row_group(group)
        chunks = [about.column(number) for number in range(about.num_columns)]
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
        if size > _MOST_OF_A_GROUP:
            what = f"row group {group} holds {size:,} bytes of images"
            hint = "pyarrow.parquet.write_table(table, file, row_group_size=100) makes smaller ones"
            report.add(name, what, f"at most {_MOST_OF_A_GROUP:,}, which are in memory at once", hint)
            return


def _group_rows(opened: Any, group: int | None, columns: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of a row group, or of all, with some columns."""
    if group is not None and not columns:
        yield from ({} for _ in range(opened.metadata.row_group(group).num_rows))
        return
    row = 0
    groups = range(opened.num_row_groups) if group is None else [group]
    for batch in opened.iter_batches(batch_size=4096, columns=columns, row_groups=list(groups)):
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            raise OSError(f"a text in rows {row + 1} to {row + batch.num_rows} is not UTF-8") from None
        row += batch.num_rows
        yield from rows


def _present(opened: Any, group: int, column: str) -> Iterator[bool]:
    """Whether each row of a group has bytes; they are read only where the file does not tell."""
    about = opened.metadata.row_group(group)
    chunks = [about.column(number) for number in range(about.num_columns)]
    found = next(chunk for chunk in chunks if chunk.path_in_schema == column)
    known = found.statistics.null_count if found.statistics and found.statistics.has_null_count else None
    if known in (0, about.num_rows):
        yield from (known == 0 for _ in range(about.num_rows))
        return
    for batch in opened.iter_batches(batch_size=16, columns=[column], row_groups=[group]):
        for value in batch.column(0):
            yield value.is_valid and (not column.endswith(".bytes") or value["bytes"].is_valid)


def _usable_columns(schema: pa.Schema, name: str, report: Report) -> list[str]:
    """The columns whose values JSON can hold; each other one is one problem, not one a row."""
    names = schema.names
    for column in sorted({column for column in names if names.count(column) > 1}):
        report.add(name, f"two columns are named {show(column)}", "names that are unique")
    if report.total:
        return []
    wrong = [field for field in schema if not _json_type(field.type)]
    for field in wrong:
        hint = (
            "write the picture to a file and give its path" if field.name in IMAGE_KEYS else "cast it or leave it out"
        )
        report.add(name, f"the column {show(field.name)} holds {field.type}", JSON_VALUES, hint)
    if any(field.name in (*IMAGE_KEYS, "features") for field in wrong):
        return []  # every row would lack its image
    return [field.name for field in schema if field not in wrong]


def _json_type(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _json_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _json_type(kind.value_type)
    if pa.types.is_nested(kind):
        return all(_json_type(kind.field(number).type) for number in range(kind.num_fields))
    tests = (
        *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        *(pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null),
    )
    return any(test(kind) for test in tests)


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """The row as JSON Lines would have it: what is null or NaN is not there, whole numbers are integers."""
    for key in _WHOLE:
        value = row.get(key)
        if isinstance(value, float) and value.is_integer():
            row[key] = int(value)
    return {key: value for key, value in row.items() if value is not None and value == value}
