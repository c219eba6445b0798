"""The whole run, and the only place that knows every stage.

check    manifest and config, every problem at once, before any image is opened
plan     image headers -> grids -> shards; from here on every byte has its place
fill     shard jobs on an engine; committed shards are skipped, so a killed run goes on where it was
merge    shard indexes -> index.parquet; its presence says the run is finished
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep import __version__
from kimik3_prep.config import PreprocessorConfig, find_config, load_config
from kimik3_prep.errors import InputError, ItemError, Problem, RunError, TooManyFailures
from kimik3_prep.images import DEFAULT_MAX_PIXELS, codec_versions, probe
from kimik3_prep.manifest import Manifest, read_manifest, resolve, scheme
from kimik3_prep.plan import (
    GROUPS,
    ITEM_BYTES,
    Headers,
    Spans,
    find_spans,
    fingerprint,
    make_plan,
    shard_plan,
    split_shards,
)
from kimik3_prep.shards import ShardFormat
from kimik3_prep.store import (
    FORMAT,
    Layout,
    index_table,
    open_run,
    read_index,
    read_plan,
    write_index,
    write_plan,
)
from kimik3_prep.summary import PlanSummary, RunSummary, summarize, summarize_plan

_WINDOW = 8192  # headers probed at a time, so that a million futures never exist at once


@dataclass(frozen=True, slots=True)
class Settings:
    """What `encode` was asked to do. Only `workers`, `on_error` and `max_failures` leave the output bytes alone."""

    manifest: str
    output: Path
    config: str | None = None
    backend: Literal["auto", "cpu", "gpu"] = "auto"
    dtype: str = "float32"
    shard_size: int = 512 << 20
    workers: int = 1
    dedupe: bool = True
    limit: int | None = None
    max_pixels: int = DEFAULT_MAX_PIXELS
    on_error: Literal["record", "fail"] = "record"
    max_failures: int | None = None
    overwrite: bool = False


class Reporter(Protocol):
    """Who watches a run. `advance` is called from several threads."""

    def warn(self, problem: Problem) -> None:
        """Something to know that stops nothing."""

    def phase(self, name: str, total: int) -> None:
        """A stage of `total` images begins."""

    def advance(self, images: int, pixels: int, size: int, failed: int) -> None:
        """So many images more are done: their source pixels, their stored bytes, how many failed."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Input without problems."""

    config: PreprocessorConfig
    config_path: Path
    manifest: Manifest


def default_output(manifest: str) -> Path:
    """`<manifest stem>-features` in the working directory."""
    name = "manifest" if manifest == "-" else Path(manifest).name.removesuffix(".gz")
    return Path(f"{Path(name).stem}-features")


def default_workers() -> int:
    """One image thread a processor this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- check --------------------------------------------------------------------------------------------------------


def check(settings: Settings, reporter: Reporter) -> Checked:
    """Read config and manifest. Raises InputError with the problems of both; warnings go to the reporter."""
    problems: list[Problem] = []
    total = 0
    config = config_path = manifest = None
    try:
        beside = None if settings.manifest == "-" else Path(settings.manifest).resolve().parent
        config_path = find_config(settings.config, beside)
        config, warnings = load_config(config_path)
        for warning in warnings:
            reporter.warn(warning)
    except InputError as error:
        problems += error.problems
        total += error.total
    try:
        manifest = read_manifest(settings.manifest, settings.limit)
        found = list(_unsupported(manifest, settings))
        problems += found
        total += len(found)
    except InputError as error:
        problems += error.problems
        total += error.total
    if config is None or config_path is None or manifest is None or problems:
        raise InputError(problems, total)
    return Checked(config, config_path, manifest)


def _unsupported(manifest: Manifest, settings: Settings) -> Iterator[Problem]:
    """Rows that nothing here can prepare, found without opening them."""
    items = manifest.items
    for number, line in _lines(items, pc.equal(items["path"], "local")):
        yield Problem(f"{manifest.name}:{line}", "a locally preprocessed item (features)", "an image", f"row {number}")
    if settings.backend == "gpu":
        yield Problem("--backend", "gpu: this version has the CPU backend only", "cpu or auto")
    for _, line in _lines(items, pc.equal(items["backend"], "gpu")):
        yield Problem(f"{manifest.name}:{line}", 'backend "gpu": this version has the CPU backend only', '"cpu"')
    seen: set[str] = set()
    for batch in items.select(["image", "line"]).to_batches():
        for image, line in zip(batch["image"].to_pylist(), batch["line"].to_pylist(), strict=True):
            protocol = scheme(image)
            if protocol is not None and protocol not in seen:
                seen.add(protocol)
                yield from _protocol_problem(protocol, f"{manifest.name}:{line}")


def _lines(items: pa.Table, mask: Any) -> list[tuple[int, int]]:
    rows = items.filter(pc.fill_null(mask, False)).select(["item", "line"])
    return list(zip(rows["item"].to_pylist(), rows["line"].to_pylist(), strict=True))


def _protocol_problem(protocol: str, where: str) -> Iterator[Problem]:
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        yield Problem(where, f"{protocol}:// is no protocol fsspec knows", "a path, a data: URL, s3://, https://, …")
    except ImportError as error:
        extra = "pip install 'kimik3-prep[s3]'" if protocol in ("s3", "s3a") else str(error)
        yield Problem(where, f"{protocol}:// needs a package that is not installed", hint=extra)


# --- plan ---------------------------------------------------------------------------------------------------------


def plan(settings: Settings, checked: Checked, reporter: Reporter) -> pa.Table:
    """Probe headers where the manifest gives no size, and place every image. A table of `PLAN_SCHEMA`."""
    spans = find_spans(checked.manifest.items, checked.manifest.base, _default_backend(settings), settings.dedupe)
    headers = _headers(settings, checked.manifest, spans, reporter)
    patch_bytes = 3 * checked.config.patch_size**2 * ITEM_BYTES[settings.dtype]
    shard_patches = max(1, settings.shard_size // patch_bytes)
    return make_plan(checked.manifest.items, spans, headers, checked.config.grid_rule(), shard_patches)


def dry_run(settings: Settings, reporter: Reporter) -> PlanSummary:
    """Check and plan, write nothing."""
    checked = check(settings, reporter)
    table = plan(settings, checked, reporter)
    return summarize_plan(table, checked.config.patch_size)


def _default_backend(settings: Settings) -> str:
    return "cpu" if settings.backend == "auto" else settings.backend


def _headers(settings: Settings, manifest: Manifest, spans: Spans, reporter: Reporter) -> Headers:
    """Sizes by span: the manifest's where it gives them, else from the image headers, on a thread pool."""
    items = manifest.items.select(["image", "width", "height"])
    headers = Headers(len(spans.first_row))
    given = pc.fill_null(items["width"], 0).to_numpy()[spans.first_row]
    headers.width[:] = given
    headers.height[:] = pc.fill_null(items["height"], 0).to_numpy()[spans.first_row]
    wanted = np.flatnonzero((given == 0) & (spans.groups != GROUPS.index("local")))
    if not len(wanted):
        return headers
    reporter.phase("headers", len(wanted))

    def read(span: int, image: str) -> None:
        try:
            header = probe(resolve(image, manifest.base), settings.max_pixels)
        except ItemError as error:
            headers.error_code[span], headers.error_message[span] = error.code, error.message
            reporter.advance(1, 0, 0, 1)
            return
        headers.width[span], headers.height[span] = header.width, header.height
        headers.mode[span], headers.format[span] = header.mode, header.format
        if header.stamp is not None:
            headers.source_size[span], headers.source_mtime_ns[span] = header.stamp.size, header.stamp.mtime_ns
        reporter.advance(1, header.width * header.height, 0, 0)

    with ThreadPoolExecutor(settings.workers, "header") as pool:
        try:
            for begin in range(0, len(wanted), _WINDOW):
                window = wanted[begin : begin + _WINDOW]
                names = items["image"].take(pa.array(spans.first_row[window])).to_pylist()
                list(pool.map(read, window.tolist(), names))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return headers


# --- run ----------------------------------------------------------------------------------------------------------


def prepare(settings: Settings, reporter: Reporter) -> RunSummary:
    """Encode a manifest into an output folder, or finish what an earlier identical run began there.

    Raises InputError (bad input, or the folder holds another run), RunError (disk, too many failures); an item that
    fails is a row of the index.
    """
    checked = check(settings, reporter)
    layout = Layout(settings.output)
    facts = _facts(settings, checked)
    open_run(layout, facts, _versions(), settings.overwrite)
    if layout.index.is_file():
        return summarize(layout, skipped=-1)
    if not layout.plan.is_file():
        write_plan(layout, plan(settings, checked, reporter))
    skipped = _fill(settings, checked, layout, facts, reporter)
    _merge(layout, _metadata(facts))
    return summarize(layout, skipped)


def _facts(settings: Settings, checked: Checked) -> dict[str, Any]:
    """Everything that decides output bytes."""
    return {
        "format": FORMAT,
        "config": checked.config.to_dict(),
        "manifest": checked.manifest.digest,
        "limit": settings.limit,
        "backend": _default_backend(settings),
        "dtype": settings.dtype,
        "shard_size": settings.shard_size,
        "dedupe": settings.dedupe,
        "max_pixels": settings.max_pixels,
        "exif": "ignore",
        "decoders": codec_versions(),
    }


def _metadata(facts: dict[str, Any]) -> dict[str, Any]:
    config = facts["config"]
    return {
        "format": FORMAT,
        "fingerprint": fingerprint(facts),
        "dtype": facts["dtype"],
        "image_mean": config["image_mean"],
        "image_std": config["image_std"],
        "patch_size": config["patch_size"],
        "merge_size": config["merge_size"],
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"kimik3_prep": __version__} | {name: version(name) for name in ("torch", "numpy", "pyarrow", "safetensors")}


def _fill(settings: Settings, checked: Checked, layout: Layout, facts: dict[str, Any], reporter: Reporter) -> int:
    """Run the shard jobs that are not committed yet; returns how many were."""
    from kimik3_prep.engines import run_local
    from kimik3_prep.pixels_cpu import lost_levels
    from kimik3_prep.work import Control, ShardJob, Stopped

    if lost := lost_levels(checked.config, settings.dtype):
        what = f"with this image_mean and image_std {settings.dtype} merges {lost} of the 256 levels of a channel"
        reporter.warn(Problem("--dtype", what, "float32 or uint8 for lossless storage", severity="warning"))
    pending, done, failures = _survey(layout)
    limit = _FailureLimit(0 if settings.on_error == "fail" else settings.max_failures, failures)
    control = Control()

    def on_item(pixels: int, size: int, error: ItemError | None) -> None:
        reporter.advance(1, pixels, size, int(error is not None))
        if error is not None and limit.exceeded_by(error):
            control.stop.set()

    control.on_item = on_item
    form = {
        group: ShardFormat(settings.dtype, checked.config.patch_size, {**_metadata(facts), "group": group})
        for group in GROUPS
    }

    def jobs() -> Iterator[ShardJob]:
        for name, rows in split_shards(read_plan(layout)):
            if name is not None and not layout.committed(name):
                shard = shard_plan(name, rows)
                yield ShardJob(
                    layout.root, checked.manifest.base, shard, form[shard.group], checked.config, settings.max_pixels
                )

    limit.check()
    reporter.phase("images", pending)
    try:
        for _ in run_local(jobs(), settings.workers, control):
            pass
    except Stopped:
        limit.check()
        raise RunError("the run was stopped") from None
    return done


def _survey(layout: Layout) -> tuple[int, int, int]:
    """`(images to do, shards committed, rows that failed already)`."""
    pending = done = failures = 0
    for name, rows in split_shards(read_plan(layout)):
        if name is None:
            failures += rows.num_rows
        elif layout.committed(name):
            done += 1
            failures += pc.sum(pc.equal(read_index(layout.shard_index(name), ["status"])["status"], "failed")).as_py()
        else:
            pending += pc.max(rows["row"]).as_py() + 1
    return pending, done, failures


class _FailureLimit:
    """Counts failed items of a run against `--max-failures` (None: no limit), from several threads."""

    def __init__(self, most: int | None, failed: int) -> None:
        self._most, self._failed = most, failed
        self._last: ItemError | None = None
        self._lock = threading.Lock()

    def exceeded_by(self, error: ItemError) -> bool:
        with self._lock:
            self._failed += 1
            self._last = self._last or error
            return self._most is not None and self._failed > self._most

    def check(self) -> None:
        if self._most is None or self._failed <= self._most:
            return
        last = f" ({self._last})" if self._last else ""
        allowed = "--on-error fail" if self._most == 0 else f"--max-failures {self._most}"
        raise TooManyFailures(
            f"stopped at {self._failed:,} failed items{last}, as {allowed} asks. Committed shards stay valid: mend the "
            "items or record failures (--on-error record), and run again to continue."
        )


def _merge(layout: Layout, metadata: dict[str, Any]) -> None:
    """Write the final index from the shard indexes and the rows that never got into a shard."""
    names: list[str] = []
    failed: list[pa.Table] = []
    for name, rows in split_shards(read_plan(layout)):
        if name is None:
            failed.append(index_table(rows, {}))
        else:
            names.append(name)
    write_index(layout, names, failed, metadata)
