"""What lies in a shard, an index or an output folder, as plain values. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.errors import InputError, Problem
from kimik3_prep.shards import Shard, open_shard
from kimik3_prep.store import INDEX_SCHEMA, Layout, read_index, read_run

_FIRST = 10  # rows shown
_CHUNK = 4096  # patches read at a time for the value range
_MOST_FAILURES = 50


def inspect(path: Path) -> dict[str, Any]:
    """A JSON-ready description; `kind` is shard, index or output. Raises InputError for anything else."""
    if path.is_dir():
        return _output(path)
    if path.suffix == ".safetensors":
        return _shard(path)
    if path.suffix == ".parquet":
        return _index(path)
    what = "does not exist" if not path.exists() else "is none of these"
    raise InputError([Problem(str(path), what, "a shard (.safetensors), an index (.parquet) or an output folder")])


def _shard(path: Path) -> dict[str, Any]:
    shard = open_shard(path)
    sizes = {name: tensor.end - tensor.begin for name, tensor in shard.tensors.items()}
    return {
        "kind": "shard",
        "path": str(path),
        "size": path.stat().st_size,
        "tensors": {
            name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": sizes[name]}
            for name, tensor in shard.tensors.items()
        },
        "metadata": shard.metadata,
        "value_range": _value_range(shard),
        "rows": _shard_rows(shard),
    }


def _value_range(shard: Shard) -> list[float] | None:
    """Smallest and largest stored value; None for an empty shard."""
    patches = shard.tensors["pixel_values"].shape[0]
    lows, highs = [], []
    for begin in range(0, patches, _CHUNK):
        values = shard.floats("pixel_values", begin, begin + _CHUNK)
        lows.append(float(values.min()))
        highs.append(float(values.max()))
    return [min(lows), max(highs)] if lows else None


def _shard_rows(shard: Shard) -> list[dict[str, Any]]:
    """The first stored images: grid and place, with the ids of the shard's index where it lies beside it."""
    grids = shard.raw("grid_thws")[:_FIRST]
    starts = np.concatenate([[0], np.cumsum(grids.prod(axis=1))])
    ids: dict[int, list[str]] = {}
    beside = shard.path.with_suffix(".parquet")
    if beside.is_file():
        table = read_index(beside, ["id", "row"])
        for row in table.filter(pc.less(table["row"], _FIRST)).to_pylist():
            ids.setdefault(row["row"], []).append(row["id"])
    return [
        {"row": row, "grid_thw": grid.tolist(), "patch_start": int(starts[row]), "ids": ids.get(row, [])}
        for row, grid in enumerate(grids)
    ]


def _index(path: Path) -> dict[str, Any]:
    table = read_index(path)
    if missing := [name for name in INDEX_SCHEMA.names if name not in table.column_names]:
        raise InputError([Problem(str(path), f"no index: it has no column {missing[0]!r}", "an index.parquet")])
    return {
        "kind": "index",
        "path": str(path),
        "columns": {field.name: str(field.type) for field in table.schema},
        **_totals(table),
        "first": table.slice(0, _FIRST).to_pylist(),
    }


def _totals(table: pa.Table) -> dict[str, Any]:
    failed = table.filter(pc.equal(table["status"], "failed"))
    shown = failed.select(["line", "id", "error_code", "error_message"]).slice(0, _MOST_FAILURES).to_pylist()
    group = pc.if_else(pc.equal(table["path"], "local"), "local", table["backend"])
    return {
        "rows": table.num_rows,
        "num_tokens": pc.sum(table["num_tokens"]).as_py() or 0,
        "by_status": _counts(table["status"]),
        "by_group": _counts(group),
        "by_mode": _counts(table["mode"]),
        "by_format": _counts(table["format"]),
        "by_error_code": _counts(failed["error_code"]),
        "failures": shown,
        "failures_not_shown": failed.num_rows - len(shown),
    }


def _counts(column: Any) -> dict[str, int]:
    counted = pc.value_counts(column)
    pairs = [(entry["values"] or "unknown", entry["counts"]) for entry in counted.to_pylist()]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _output(root: Path) -> dict[str, Any]:
    layout = Layout(root)
    record = read_run(layout)
    if record is None:
        raise InputError([Problem(str(root), "no run.json in it", "a folder that `kimik3-prep encode` wrote")])
    shards = sorted(layout.shards.glob("*.safetensors")) if layout.shards.is_dir() else []
    committed = [path for path in shards if layout.committed(path.stem)]
    finished = layout.index.is_file()
    if finished:
        table = read_index(layout.index)
    else:
        parts = [read_index(layout.shard_index(path.stem)).replace_schema_metadata(None) for path in committed]
        table = pa.concat_tables([INDEX_SCHEMA.empty_table(), *parts])
    return {
        "kind": "output",
        "path": str(root),
        "finished": finished,
        "dtype": record["facts"]["dtype"],
        "settings": record["facts"],
        "versions": record["versions"],
        "fingerprint": record["fingerprint"],
        "shards": {path.stem: {"bytes": path.stat().st_size, "patches": _shard_patches(path)} for path in committed},
        "size": sum(path.stat().st_size for path in committed),
        **_totals(table),
    }


def _shard_patches(path: Path) -> int:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return int(header["pixel_values"]["shape"][0])
