"""What lies in a shard, an index or an output folder, as plain values. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.errors import InputError, Problem
from kimik3_prep.output.folder import Output
from kimik3_prep.output.shard_file import Shard, open_shard
from kimik3_prep.output.tables import INDEX_SCHEMA, read_index
from kimik3_prep.output.totals import histogram
from kimik3_prep.remote import refuse

_FIRST = 10  # rows shown
_LARGEST = 5
_CHUNK = 4096  # patches read at a time for the value range
_MOST_FAILURES = 50


def inspect(path: Path) -> dict[str, Any]:
    """A JSON-ready description; `kind` is shard, index or output. Raises InputError for anything else."""
    refuse(path)
    if path.is_dir():
        return _output(path)
    if path.is_file() and path.suffix == ".safetensors":
        return _shard(path)
    if path.is_file() and path.suffix == ".parquet":
        return _index(path)
    what = "does not exist" if not path.exists() else "is none of these" if path.is_file() else "is no regular file"
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
        **_values(shard),
        "rows": _shard_rows(shard),
    }


def _values(shard: Shard) -> dict[str, Any]:
    """`value_range`: smallest and largest stored value, None where there is none; `not_finite`: NaN and infinities."""
    patches = shard.tensors["pixel_values"].shape[0]
    lows, highs, not_finite = [], [], 0
    for begin in range(0, patches, _CHUNK):
        values = shard.floats("pixel_values", begin, begin + _CHUNK)
        finite = np.isfinite(values)
        if not finite.all():  # JSON has no word for them
            not_finite += int(np.count_nonzero(~finite))
            values = values[finite]
        if values.size:
            lows.append(float(values.min()))
            highs.append(float(values.max()))
    return {"value_range": [min(lows), max(highs)] if lows else None, "not_finite": not_finite}


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
        **_sizes(table),
        "by_status": _counts(table["status"]),
        "by_group": _counts(group),
        "by_mode": _counts(table["mode"]),
        "by_format": _counts(table["format"]),
        "by_error_code": _counts(failed["error_code"]),
        "failures": shown,
        "failures_not_shown": failed.num_rows - len(shown),
    }


def _sizes(table: pa.Table) -> dict[str, Any]:
    """Stored images by their tokens: how many in each bin, and the largest. One that many rows name counts once.

    In an index without shards that is one that they name alike.
    """
    ok = table.filter(pc.equal(table["status"], "ok"))
    ok = ok.append_column("name", pc.if_else(pc.is_null(ok["shard"]), ok["image"], None))
    stored = ok.group_by(["shard", "row", "name"]).aggregate(
        [("num_tokens", "min"), ("item", "min"), ("item", "count")]
    )
    order = pc.sort_indices(stored, sort_keys=[("num_tokens_min", "descending"), ("item_min", "ascending")])
    top = stored.take(order[:_LARGEST])
    rows = {row["item"]: row for row in ok.filter(pc.is_in(ok["item"], top["item_min"].combine_chunks())).to_pylist()}
    named = zip(top["item_min"].to_pylist(), top["item_count"].to_pylist(), strict=True)
    return {
        "images": stored.num_rows,
        "histogram": [list(bin) for bin in histogram(stored["num_tokens_min"].to_numpy())],
        "largest": [_large(rows[item], count) for item, count in named],
    }


def _large(row: dict[str, Any], named: int) -> dict[str, Any]:
    """A stored image as the first row that names it tells; `rows`: how many do."""
    about = {name: row[name] for name in ("item", "line", "id", "num_tokens", "width", "height", "shard")}
    return {**about, "grid_thw": [row["grid_t"], row["grid_h"], row["grid_w"]], "rows": named}


def _counts(column: Any) -> dict[str, int]:
    counted = pc.value_counts(column)
    pairs = [(entry["values"] or "unknown", entry["counts"]) for entry in counted.to_pylist()]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _output(root: Path) -> dict[str, Any]:
    layout = Output(root)
    record = layout.record()
    if record is None:
        raise InputError([Problem(str(root), "no run.json in it", "a folder that `kimik3-prep encode` wrote")])
    committed = layout.committed_shards()
    finished = layout.index.is_file()
    if finished:
        table = layout.read_index()
    else:
        parts = [layout.read_shard_index(name).replace_schema_metadata(None) for name in committed]
        table = pa.concat_tables([INDEX_SCHEMA.empty_table(), *parts])
    return {
        "kind": "output",
        "path": str(root),
        "finished": finished,
        "planned": None if finished else _planned(layout),
        "dtype": record.recipe.dtype,
        "settings": record.recipe.facts(),
        "versions": dict(record.versions),
        "fingerprint": record.recipe.fingerprint,
        "shards": {
            name: {
                "bytes": layout.shard(name).stat().st_size,
                "patches": open_shard(layout.shard(name)).tensors["pixel_values"].shape[0],
            }
            for name in committed
        },
        "size": sum(layout.shard_sizes()),
        **_totals(table),
    }


def _planned(layout: Output) -> dict[str, int] | None:
    """What an unfinished run will come to; None where it was stopped before its plan was written."""
    if not layout.plan.is_file():
        return None
    rows, shards = 0, set()
    for table in layout.read_plan():
        rows += table.num_rows
        shards.update(pc.unique(table["shard"].drop_null()).to_pylist())
    return {"rows": rows, "shards": len(shards)}
