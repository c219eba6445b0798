"""What a plan will make and what a run has made, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.output.folder import Output
from kimik3_prep.output.tables import GROUPS


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a plan will make. `histogram`: `(most tokens of the bin, images)`; bins double."""

    rows: int
    failed: int
    failures: tuple[tuple[int, str, str, str], ...]
    images: int
    pixels: int
    patches: int
    tokens: int
    bytes_by_dtype: dict[str, int]
    shards: dict[str, int]
    histogram: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a finished run holds, read from its index. `failures`: `(line, id, code, message)`, the first ones.

    index_only: it has no shards; `patches` are those its items would have.
    """

    output: str
    rows: int
    ok: int
    failed: int
    failures: tuple[tuple[int, str, str, str], ...]
    images: int
    patches: int
    tokens: int
    size: int
    shards: int
    skipped: int | None
    index_only: bool = False


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """What a range of a run has made; rows that failed while planning are in no range.

    committed, planned: shards of the whole run. failures, skipped: as in `RunSummary`.
    """

    output: str
    shard_range: str
    rows: int
    ok: int
    failed: int
    failures: tuple[tuple[int, str, str, str], ...]
    shards: int
    size: int
    skipped: int
    committed: int
    planned: int


_FAILURE = ["line", "id", "error_code", "error_message"]
_NUMBERS = ["shard", "row", "patch_start", "patch_count", "num_tokens", "width", "height"]


def summarize_plan(table: pa.Table, patch_size: int) -> PlanSummary:
    """Totals of a plan, a table of `PLAN_SCHEMA`."""
    failed = table.select(_FAILURE).filter(pc.is_null(table["shard"]))
    planned = table.select(_NUMBERS).filter(pc.is_valid(table["shard"]))
    stored = _first_of_span(planned)
    tokens = stored["num_tokens"].to_numpy()
    patches = int(pc.sum(stored["patch_count"]).as_py() or 0)
    levels = patches * 3 * patch_size**2
    shards = pc.unique(planned["shard"]).to_pylist()
    groups = [name.rpartition("-")[0] for name in shards]
    return PlanSummary(
        rows=table.num_rows,
        failed=table.num_rows - planned.num_rows,
        failures=_failures(failed),
        images=stored.num_rows,
        pixels=pc.sum(pc.multiply(stored["width"], stored["height"])).as_py() or 0,  # null for features files
        patches=patches,
        tokens=int(pc.sum(planned["num_tokens"]).as_py() or 0),
        bytes_by_dtype={name: levels * dtype.itemsize for name, dtype in DTYPES.items()},
        shards={group: groups.count(group) for group in GROUPS if group in groups},
        histogram=histogram(tokens),
    )


def summarize(output: Output, skipped: int | None = 0) -> RunSummary:
    """Totals of a finished run. `skipped`: shards that were committed before; None when all of the run was."""
    columns = [*_FAILURE, "status", "shard", "row", "patch_count", "num_tokens"]
    table = output.read_index(columns)
    failed = table.filter(pc.equal(table["status"], "failed"))
    ok = table.filter(pc.equal(table["status"], "ok"))
    stored = ok.filter(pc.is_valid(ok["shard"])).group_by(["shard", "row"]).aggregate([("patch_count", "min")])
    index_only = ok.num_rows > 0 and stored.num_rows == 0
    sizes = output.shard_sizes()
    return RunSummary(
        output=output.name,
        rows=table.num_rows,
        ok=ok.num_rows,
        failed=failed.num_rows,
        failures=_failures(failed),
        images=stored.num_rows,
        patches=pc.sum(ok["patch_count"] if index_only else stored["patch_count_min"]).as_py() or 0,
        tokens=pc.sum(ok["num_tokens"]).as_py() or 0,
        size=sum(sizes),
        shards=len(sizes),
        skipped=skipped,
        index_only=index_only,
    )


def summarize_range(
    output: Output, shard_range: tuple[int, int], planned: Sequence[str], mine: Sequence[str], skipped: int
) -> RangeSummary:
    """Totals of a range whose shards, `mine` among all that are `planned`, are committed."""
    tables = [output.read_shard_index(name, [*_FAILURE, "status"]).replace_schema_metadata(None) for name in mine]
    failed = [table.filter(pc.equal(table["status"], "failed")) for table in tables]
    rows, lost = (sum(table.num_rows for table in some) for some in (tables, failed))
    return RangeSummary(
        output=output.name,
        shard_range=f"{shard_range[0]}/{shard_range[1]}",
        rows=rows,
        ok=rows - lost,
        failed=lost,
        failures=_failures(pa.concat_tables(failed)) if failed else (),
        shards=len(mine),
        size=sum(output.shard(name).stat().st_size for name in mine),
        skipped=skipped,
        committed=sum(map(output.committed, planned)),
        planned=len(planned),
    )


def _failures(table: pa.Table, most: int = 20) -> tuple[tuple[int, str, str, str], ...]:
    rows = table.select(_FAILURE).slice(0, most).to_pylist()
    return tuple((row["line"], row["id"], row["error_code"], row["error_message"]) for row in rows)


def _first_of_span(planned: pa.Table) -> pa.Table:
    """One row for each stored image: within a shard, the first row of each span."""
    row, start = planned["row"].to_numpy(), planned["patch_start"].to_numpy()
    fresh = np.ones(len(row), bool)
    fresh[1:] = (np.diff(row) != 0) | (np.diff(start) != 0)
    shard = planned["shard"].combine_chunks().dictionary_encode().indices.to_numpy()
    fresh[1:] |= np.diff(shard) != 0
    return planned.filter(pa.array(fresh))


def histogram(tokens: Any) -> tuple[tuple[int, int], ...]:
    """How many of the token counts fall into each bin: `(most tokens of the bin, images)`; bins double."""
    if not len(tokens):
        return ()
    top = max(4, (int(tokens.max()) - 1).bit_length())
    edges = [-1, *(2**power for power in range(4, top + 1))]
    counts, _ = np.histogram(tokens, bins=np.array(edges) + 0.5)  # halves, so that a power of two ends its bin
    return tuple((edge, int(count)) for edge, count in zip(edges[1:], counts, strict=True))
