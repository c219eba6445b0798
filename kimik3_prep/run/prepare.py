"""The whole run, and the only place that knows every stage.

check    manifest and config, every problem at once, before any image is opened
plan     image headers -> grids -> shards; from here on every byte has its place
fill     shard jobs on an engine; committed shards are skipped, so a killed run goes on where it was
merge    shard indexes -> index.parquet; its presence says the run is finished
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep import __version__
from kimik3_prep.disk import locks, only_run
from kimik3_prep.errors import ItemError, Problem, RunError, TooManyFailures
from kimik3_prep.images.decode import codec_versions
from kimik3_prep.output import mirror
from kimik3_prep.output.folder import check_folder, open_run, sweep
from kimik3_prep.output.plan import shard_plan, split_shards
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.tables import (
    Layout,
    index_table,
    planned_table,
    read_index,
    read_plan,
    write_index,
    write_plan,
)
from kimik3_prep.output.totals import PlanSummary, RunSummary, summarize, summarize_plan
from kimik3_prep.run.check import Checked, Reporter, Settings, check
from kimik3_prep.run.planning import plan, replan
from kimik3_prep.run.threads import Stopped

if TYPE_CHECKING:
    from kimik3_prep.run.jobs import ShardJob


def dry_run(settings: Settings, reporter: Reporter) -> PlanSummary:
    """Check and plan, write nothing."""
    checked = check(settings, reporter)
    table = plan(settings, checked, reporter)
    return summarize_plan(table, checked.config.patch_size, settings.dtype)


def prepare(settings: Settings, reporter: Reporter) -> RunSummary:
    """Encode a manifest into an output folder, or finish what an earlier identical run began there.

    Raises InputError (bad input, or the folder holds another run), RunError (disk, too many failures); an item that
    fails is a row of the index.
    """
    checked = check(settings, reporter)
    layout = Layout(settings.output, settings.store)
    recipe = recipe_of(settings, checked)
    record = None if layout.store else check_folder(layout)
    finished = record is not None and layout.index.is_file() and not locks(layout.root)
    if finished and not settings.overwrite and not settings.retry_failed:
        open_run(layout, recipe, versions(), overwrite=False)  # compares, and writes nothing: the disk may be read-only
        return summarize(layout, skipped=None)
    with mirror.staging(layout), only_run(layout.root):
        summary = _run(settings, checked, layout, recipe, reporter)
        mirror.leave(layout)
        return summary


def _run(settings: Settings, checked: Checked, layout: Layout, recipe: Recipe, reporter: Reporter) -> RunSummary:
    base = checked.manifest.base if settings.index_only else None
    mirror.join(layout, settings.overwrite)
    open_run(layout, recipe, versions(), settings.overwrite, base)
    sweep(layout)
    mirror.publish(layout, layout.run)
    mirror.fetch(layout, settings.retry_failed)
    if not layout.plan.is_file():
        write_plan(layout, plan(settings, checked, reporter))
    elif settings.retry_failed:
        replan(settings, checked, layout, reporter)
    if layout.index.is_file():  # finished while this run waited to begin, or nothing had failed
        return summarize(layout, None, mirror.sizes(layout))
    mirror.publish(layout, layout.plan)
    skipped = 0
    if settings.index_only:
        parts = [planned_table(rows, settings.dedupe == "content") for rows in read_plan(layout)]
        write_index(layout, [], parts, recipe.metadata())
    else:
        checked = checked.without_items()  # the plan is read from disk from here on, a piece at a time
        skipped = fill(settings, checked, layout, recipe, reporter)
        merge(layout, recipe.metadata())
    mirror.publish(layout, layout.index)
    tell_of_orientations(layout, settings.exif, reporter)
    return summarize(layout, skipped, mirror.sizes(layout))


def recipe_of(settings: Settings, checked: Checked) -> Recipe:
    """Return the recipe that the settings and the input make together."""
    return Recipe(
        config=checked.config,
        manifest=checked.manifest.digest,
        limit=settings.limit,
        backend=checked.backend,
        dtype="uint8" if settings.index_only else settings.dtype,
        index_only=settings.index_only,
        shard_size=settings.shard_size,
        dedupe=settings.dedupe,
        max_pixels=settings.max_pixels,
        max_tokens=settings.max_tokens,
        exif=settings.exif,
        decoders=codec_versions(),
    )


def versions() -> dict[str, str]:
    """The versions of what makes the files, for the run record."""
    from importlib.metadata import version

    return {"kimik3_prep": __version__} | {name: version(name) for name in ("torch", "numpy", "pyarrow", "safetensors")}


def fill(settings: Settings, checked: Checked, layout: Layout, recipe: Recipe, reporter: Reporter) -> int:
    """Run the shard jobs, of the range where there is one, that are not committed yet; returns how many were."""
    from kimik3_prep.pixels.cpu import lost_levels
    from kimik3_prep.run.engines import run_local, run_ray
    from kimik3_prep.run.jobs import Control
    from kimik3_prep.run.memory import Room

    if lost := lost_levels(checked.config, settings.dtype):
        what = f"with this image_mean and image_std {settings.dtype} merges {lost} of the 256 levels of a channel"
        reporter.warn(Problem("--dtype", what, "float32 or uint8 for lossless storage", severity="warning"))
    pending, patches, done, failures = _survey(settings, layout)
    _warn_of_a_full_disk(layout, recipe, patches, reporter)
    limit = _FailureLimit(0 if settings.on_error == "fail" else settings.max_failures, failures)
    control = Control(item_timeout=settings.item_timeout, most_failures=limit.left())
    if settings.memory is not None:
        control.room = Room(settings.memory)

    def on_item(pixels: int, size: int, error: ItemError | None) -> None:
        reporter.advance(1, pixels, size, int(error is not None))
        if error is not None and limit.exceeded_by(error):
            control.stop.set()

    control.on_item = on_item
    control.note = lambda where, text: reporter.warn(Problem(where, text, severity="warning"))
    limit.check()
    reporter.phase("images", pending)
    jobs = _jobs(settings, checked, layout, recipe)
    if settings.engine == "ray":
        results = run_ray(jobs, settings.workers, settings.ray, control)
    else:
        results = run_local(jobs, settings.workers, max(2, len(checked.devices)), control)
    try:
        for _ in results:
            pass
    except Stopped:
        limit.check()
        raise RunError("the run was stopped") from None
    limit.check()  # the last item may have been the one too many
    return done


def _jobs(settings: Settings, checked: Checked, layout: Layout, recipe: Recipe) -> Iterator[ShardJob]:
    """A job for each shard that is not committed yet."""
    from kimik3_prep.run.jobs import ShardJob

    devices = itertools.cycle(checked.devices or ("cpu",))
    for name, rows in planned(layout, settings.shard_range):
        if name is not None and not layout.committed(name):
            shard = shard_plan(name, rows)
            yield ShardJob(
                root=layout.root,
                store=layout.store,
                base=checked.manifest.base,
                shard=shard,
                recipe=recipe,
                device=next(devices) if shard.group == "gpu" else "cpu",
                batch_bytes=settings.batch_bytes,
            )


def planned(layout: Layout, shard_range: tuple[int, int] | None = None) -> Iterator[tuple[str | None, pa.Table]]:
    """The plan's shards and their rows, None for the rows that failed while planning.

    shard_range: `(i, n)` keeps every n-th shard from the i-th on. It counts the shards of the plan, committed or not,
    so n ranges never share one, whenever each of them begins.
    """
    number = 0
    for name, rows in split_shards(read_plan(layout)):
        if name is not None:
            number += 1
        if name is None or shard_range is None or (number - shard_range[0]) % shard_range[1] == 0:
            yield name, rows


def _survey(settings: Settings, layout: Layout) -> tuple[int, int, int, int]:
    """`(images to do, their patches, shards committed, rows that failed already)`."""
    pending = patches = done = failures = 0
    for name, rows in planned(layout, settings.shard_range):
        if name is None:
            failures += rows.num_rows
        elif layout.committed(name):
            done += 1
            failures += pc.sum(pc.equal(read_index(layout.shard_index(name), ["status"])["status"], "failed")).as_py()
        else:
            pending += pc.max(rows["row"]).as_py() + 1
            patches += pc.max(pc.add(rows["patch_start"], rows["patch_count"])).as_py()
    return pending, patches, done, failures


def _warn_of_a_full_disk(layout: Layout, recipe: Recipe, patches: int, reporter: Reporter) -> None:
    """A guess, so no error: others may free space meanwhile, and some file systems compress."""
    needed = patches * recipe.patch_bytes
    if layout.store is not None:
        return  # a shard is gone before the next but one begins
    if needed <= (free := shutil.disk_usage(layout.root).free):
        return
    hint = "the run stops when the disk is full, and the same command goes on once there is space"
    if recipe.dtype != "uint8":
        hint += f"; --dtype uint8 would need {patches * replace(recipe, dtype='uint8').patch_bytes:,}"
    what = f"{needed:,} bytes are to be written and {free:,} are free"
    reporter.warn(Problem(str(layout.root), what, hint=hint, severity="warning"))


def tell_of_orientations(layout: Layout, exif: str, reporter: Reporter) -> None:
    """Engines differ in what they do with an EXIF orientation, so nobody should be surprised by it. Not for TIFF."""
    index = read_index(layout.index, ["exif_orientation", "format"])
    rows = pc.and_(pc.greater(index["exif_orientation"], 1), pc.not_equal(index["format"], "TIFF"))
    if not (count := pc.sum(rows).as_py() or 0):
        return
    does = "was ignored, as SGLang and the checkpoint do; vLLM's loader applies it, as --exif apply does"
    if exif == "apply":
        does = "was applied, as vLLM's loader does; SGLang and the checkpoint ignore it"
    what = f"the EXIF orientation of {count:,} item{'' if count == 1 else 's'} {does}"
    reporter.warn(Problem("--exif", what, severity="warning"))


class _FailureLimit:
    """Counts failed items of a run against `--max-failures` (None: no limit), from several threads."""

    def __init__(self, most: int | None, failed: int) -> None:
        self._most, self._failed = most, failed
        self._last: ItemError | None = None
        self._lock = threading.Lock()

    def left(self) -> int | None:
        """How many more items may fail."""
        return None if self._most is None else max(0, self._most - self._failed)

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


def merge(layout: Layout, metadata: dict[str, Any]) -> None:
    """Write the final index from the shard indexes and the rows that never got into a shard."""
    names: list[str] = []
    failed: list[pa.Table] = []
    for name, rows in planned(layout):
        if name is None:
            failed.append(index_table(rows, {}))
        else:
            names.append(name)
    write_index(layout, names, failed, metadata)
