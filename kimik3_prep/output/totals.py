"""What a plan will make and what a run has made, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import Problem
from kimik3_prep.manifest.report import PassedOver
from kimik3_prep.output.folder import Output
from kimik3_prep.output.tables import GROUPS


class Failure(NamedTuple):
    """One item that failed."""

    line: int
    """Its line in the manifest."""
    id: str
    """Its id."""
    error_code: str
    """One of the codes listed in the README."""
    error_message: str
    """The reason in words."""


class Bin(NamedTuple):
    """One bar of the histogram of tokens; each bar reaches twice as far as the one before."""

    most_tokens: int
    """The most tokens that an image of this bar has."""
    images: int
    """How many images it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What a run would make."""

    status: Literal["ok"] = "ok"
    """The command did its work."""
    rows: int
    """Manifest rows."""
    failed: int
    """Rows whose image cannot be read."""
    failures: tuple[Failure, ...]
    """The first 20 of them."""
    images: int
    """Images to store. An image that several rows name counts once."""
    pixels: int
    """Source pixels of these images."""
    patches: int
    """Patches to store."""
    tokens: int
    """Tokens of all rows."""
    dtype: str
    """The chosen storage type."""
    bytes_by_dtype: dict[str, int]
    """Bytes of pixel_values in each storage type."""
    shards: dict[str, int]
    """Number of shards in each group: cpu, gpu, local."""
    histogram: tuple[Bin, ...]
    """Images by their tokens."""
    warnings: tuple[Problem, ...] = ()
    """What the reader should know, and nothing stops at."""
    passed_over: tuple[PassedOver, ...] = ()
    """What the source holds that became no item, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a finished run holds."""

    status: Literal["ok"] = "ok"
    """The command did its work. Items may have failed: see `failed`."""
    output: str
    """The output folder or URL, as it was given."""
    rows: int
    """Manifest rows."""
    ok: int
    """Rows that have features."""
    failed: int
    """Rows that have none."""
    failures: tuple[Failure, ...]
    """The first 20 of them; the index has all."""
    images: int
    """Stored images. An image that several rows name counts once."""
    patches: int
    """Stored patches; with `index_only` those that the items would have."""
    tokens: int
    """Tokens of all rows."""
    size: int
    """Bytes of all shards."""
    shards: int
    """Number of shards."""
    skipped: int | None
    """Shards that an earlier command had committed; null if the whole run was finished before."""
    index_only: bool = False
    """The run wrote an index and no shards."""
    warnings: tuple[Problem, ...] = ()
    """What the reader should know, and nothing stops at."""
    passed_over: tuple[PassedOver, ...] = ()
    """What the source holds that became no item, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSummary:
    """What one range of a run has made. Rows that failed while planning are in no range."""

    status: Literal["ok"] = "ok"
    """The command did its work. Items may have failed: see `failed`."""
    output: str
    """The output folder, as it was given."""
    shard_range: str
    """The range as `i/n`."""
    rows: int
    """Manifest rows in the shards of this range."""
    ok: int
    """Rows that have features."""
    failed: int
    """Rows that have none."""
    failures: tuple[Failure, ...]
    """The first 20 of them; the indexes of the shards have all."""
    shards: int
    """Shards of this range."""
    size: int
    """Bytes of these shards."""
    skipped: int
    """Shards of this range that an earlier command had committed."""
    committed: int
    """Shards of the whole run that are committed."""
    planned: int
    """Shards of the whole run."""
    warnings: tuple[Problem, ...] = ()
    """What the reader should know, and nothing stops at."""
    passed_over: tuple[PassedOver, ...] = ()
    """What the source holds that became no item, by kind."""


_FAILURE = list(Failure._fields)
_NUMBERS = ["shard", "row", "patch_start", "patch_count", "num_tokens", "width", "height"]


def summarize_plan(table: pa.Table, patch_size: int, dtype: str) -> PlanSummary:
    """Return the totals of a plan, a table of `PLAN_SCHEMA`. dtype: the storage type that was chosen."""
    many = table.num_rows - table["shard"].null_count  # the failed rows come last
    planned, failed = table.select(_NUMBERS).slice(0, many), table.select(_FAILURE).slice(many)
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
        dtype=dtype,
        bytes_by_dtype={name: levels * kind.itemsize for name, kind in DTYPES.items()},
        shards={group: groups.count(group) for group in GROUPS if group in groups},
        histogram=histogram(tokens),
    )


def summarize(output: Output, skipped: int | None = 0) -> RunSummary:
    """Return the totals of a finished run, read from its index.

    skipped: shards that were committed before, None if the whole run was.
    """
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
        size=sum(sizes.values()),
        shards=len(sizes),
        skipped=skipped,
        index_only=index_only,
    )


def summarize_range(
    output: Output, shard_range: tuple[int, int], planned: Sequence[str], mine: Sequence[str], skipped: int
) -> RangeSummary:
    """Return the totals of a range. Its shards, `mine` among all that are `planned`, are committed."""
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


def _failures(table: pa.Table, most: int = 20) -> tuple[Failure, ...]:
    return tuple(Failure(**row) for row in table.select(_FAILURE).slice(0, most).to_pylist())


def _first_of_span(planned: pa.Table) -> pa.Table:
    """Return one row for each stored image: within a shard, the first row of each span."""
    row, start = planned["row"].to_numpy(), planned["patch_start"].to_numpy()
    fresh = np.ones(len(row), bool)
    fresh[1:] = (np.diff(row) != 0) | (np.diff(start) != 0)
    shard = planned["shard"].combine_chunks().dictionary_encode().indices.to_numpy()
    fresh[1:] |= np.diff(shard) != 0
    return planned if fresh.all() else planned.filter(pa.array(fresh))


def histogram(tokens: Any) -> tuple[Bin, ...]:
    """Count the images of each bin, given the tokens of each image."""
    if not len(tokens):
        return ()
    top = max(4, (int(tokens.max()) - 1).bit_length())
    edges = [-1, *(2**power for power in range(4, top + 1))]
    counts, _ = np.histogram(tokens, bins=np.array(edges) + 0.5)  # halves, so that a power of two ends its bin
    return tuple(Bin(edge, int(count)) for edge, count in zip(edges[1:], counts, strict=True))
