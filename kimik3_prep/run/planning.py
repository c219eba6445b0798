"""From checked input to a plan: image headers are read, and every image gets its place. Nothing is decoded."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import ItemError
from kimik3_prep.manifest.read import Manifest
from kimik3_prep.output import mirror
from kimik3_prep.output.folder import uncommit
from kimik3_prep.output.plan import make_plan, split_shards
from kimik3_prep.output.spans import GROUPS, Headers, Spans, find_spans, join_equal
from kimik3_prep.output.tables import Layout, read_index, read_plan, write_plan
from kimik3_prep.run.check import Checked, Reporter, Settings
from kimik3_prep.run.item import Header, ProbeImages, is_slow
from kimik3_prep.run.workers import Task, Workers

_WINDOW = 8192  # rows that are Python objects at a time
_HEADER_WEIGHT = 30_000  # pixels that could be decoded in the time that a header takes


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A plan that was made before, in manifest order, and which of its rows are to be planned anew."""

    rows: pa.Table
    anew: npt.NDArray[np.bool_]


def plan(
    settings: Settings, checked: Checked, workers: Workers, reporter: Reporter, earlier: _Earlier | None = None
) -> pa.Table:
    """Probe headers where the manifest gives no size, and place every image. A table of `PLAN_SCHEMA`."""
    spans = find_spans(checked.manifest.items, checked.manifest.base, checked.backend, settings.dedupe != "off")
    headers = Headers(len(spans.first_row))
    wanted = np.ones(len(spans.first_row), bool)
    if earlier is not None:
        wanted = earlier.anew[spans.first_row]
        headers.recall(earlier.rows.take(pa.array(spans.first_row)), ~wanted, settings.dedupe == "content")
    _read_headers(settings, checked.manifest, spans, wanted, headers, workers, reporter)
    if settings.dedupe == "content":
        spans, headers = join_equal(spans, headers)
    patch_bytes = 3 * checked.config.patch_size**2 * DTYPES[settings.dtype].itemsize
    shard_patches = max(1, settings.shard_size // patch_bytes)
    rule = checked.config.grid_rule()
    return make_plan(checked.manifest.items, spans, headers, rule, shard_patches, settings.max_tokens)


def _read_headers(
    settings: Settings,
    manifest: Manifest,
    spans: Spans,
    unknown: npt.NDArray[np.bool_],
    headers: Headers,
    workers: Workers,
    reporter: Reporter,
) -> None:
    """Take the sizes of the `unknown` spans from the manifest where it gives them, else from the image headers."""
    items = manifest.items.select(["image", "width", "height", "content_hash"])
    given = pc.fill_null(items["width"], 0).to_numpy()[spans.first_row]
    headers.width[unknown] = given[unknown]
    headers.height[unknown] = pc.fill_null(items["height"], 0).to_numpy()[spans.first_row][unknown]
    content = settings.dedupe == "content"  # then every file is read whole, once more than otherwise
    wanted = np.flatnonzero(unknown & ((given == 0) | content) & (spans.groups != GROUPS.index("local")))
    if not len(wanted):
        return
    reporter.phase("headers", len(wanted))

    call = pickle.dumps(ProbeImages(manifest.base, settings.max_pixels, settings.exif, content, settings.formats))

    def tasks() -> Iterator[Task]:
        for begin in range(0, len(wanted), _WINDOW):
            window = wanted[begin : begin + _WINDOW]
            rows = items.take(pa.array(spans.first_row[window]))
            columns = (rows["image"].to_pylist(), rows["content_hash"].to_pylist())
            for span, image, promised in zip(window.tolist(), *columns, strict=True):
                slow = is_slow(image, manifest.base)
                yield Task(call, image, weight=_HEADER_WEIGHT, slow=slow, tag=(span, promised))

    for task, answer in workers.run(tasks()):
        span, promised = task.tag
        if isinstance(answer, ItemError):
            headers.fail(span, answer)
            reporter.advance(1, 0, 0, 1)
            continue
        if answer.kept is not None:
            workers.kept[task.payload] = answer.kept
        _keep(headers, span, answer, promised)
        reporter.advance(1, answer.width * answer.height, 0, 0)


def _keep(headers: Headers, span: int, header: Header, promised: str | None) -> None:
    if header.content_hash is not None:
        if promised is not None and header.content_hash != promised:
            return headers.fail(span, ItemError("content_hash_mismatch", f"the file's is {header.content_hash}"))
        headers.content_hash[span] = header.content_hash
    if not headers.width[span]:  # else the manifest gave a size, which is checked when the image is decoded
        headers.width[span], headers.height[span] = header.width, header.height
        headers.mode[span], headers.format[span] = header.mode, header.format
    if header.stamp is not None:
        headers.source_size[span], headers.source_mtime_ns[span] = header.stamp


def replan(settings: Settings, checked: Checked, layout: Layout, workers: Workers, reporter: Reporter) -> None:
    """`--retry-failed`: plan as a new run would, but for the headers of what is stored already, which stay.

    Commits that the new plan does not keep are taken back before it is written, so a kill in between leaves the old
    plan with some of its shards to do, and the same command begins here again: what is in no shard is planned anew.
    """
    rows = pa.concat_tables(read_plan(layout))
    rows = rows.take(pa.array(np.argsort(rows["item"].to_numpy())))
    before = {name: shard for name, shard in split_shards(read_plan(layout)) if name is not None}
    stored = np.zeros(rows.num_rows, bool)
    faulty = set()
    if settings.index_only:
        stored = pc.is_null(rows["error_code"]).to_numpy()
    for name in filter(layout.committed, before):
        index = read_index(layout.shard_index(name), ["item", "status"])
        fine = pc.equal(index["status"], "ok").to_numpy()
        stored[index["item"].to_numpy()[fine]] = True
        if not fine.all():
            faulty.add(name)
    if stored.all():
        return
    table = plan(settings, checked, workers, reporter, _Earlier(rows, ~stored))
    after = dict(split_shards(iter([table])))
    anew = [n for n, old in before.items() if n in faulty or n not in after or not old.equals(after[n])]
    uncommit(layout, anew)
    mirror.take_back(layout, anew)
    write_plan(layout, table)
