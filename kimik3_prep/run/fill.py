"""Fill the shards of a plan: which are left to do, who fills them, and how many items may fail meanwhile."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.errors import ItemError, Problem, RunStopped, TooManyFailures
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.tables import shard_plan, split_shards
from kimik3_prep.run.check import Checked, Reporter, Settings
from kimik3_prep.run.threads import Stopped

if TYPE_CHECKING:
    from kimik3_prep.run.jobs import ShardJob


def fill(settings: Settings, checked: Checked, output: Output, recipe: Recipe, reporter: Reporter) -> int:
    """Run the shard jobs, of the range where there is one, that are not committed yet; returns how many were."""
    from kimik3_prep.pixels.cpu import lost_levels
    from kimik3_prep.run.engines import run_local, run_ray
    from kimik3_prep.run.jobs import Control
    from kimik3_prep.run.memory import Room

    if lost := lost_levels(checked.recipe.config, settings.dtype):
        what = f"with this image_mean and image_std {settings.dtype} merges {lost} of the 256 levels of a channel"
        reporter.warn(Problem("--dtype", what, "float32 or uint8 for lossless storage", severity="warning"))
    pending, patches, done, failures = _survey(settings, output)
    _warn_of_a_full_disk(output, recipe, patches, reporter)
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
    jobs = _jobs(settings, checked, output, recipe)
    if settings.engine == "ray":
        results = run_ray(jobs, settings.workers, settings.ray, control)
    else:
        results = run_local(jobs, settings.workers, max(2, len(checked.devices)), control)
    try:
        for _ in results:
            pass
    except Stopped:
        limit.check()
        raise RunStopped from None
    limit.check()  # the last item may have been the one too many
    return done


def _jobs(settings: Settings, checked: Checked, output: Output, recipe: Recipe) -> Iterator[ShardJob]:
    """A job for each shard that is not committed yet."""
    from kimik3_prep.run.jobs import ShardJob

    devices = itertools.cycle(checked.devices or ("cpu",))
    for name, rows in planned_shards(output, settings.shard_range):
        if name is not None and not output.committed(name):
            shard = shard_plan(name, rows)
            yield ShardJob(
                output=output,
                base=checked.manifest.base,
                shard=shard,
                recipe=recipe,
                device=next(devices) if shard.group == "gpu" else "cpu",
                batch_bytes=settings.batch_bytes,
            )


def planned_shards(output: Output, shard_range: tuple[int, int] | None = None) -> Iterator[tuple[str | None, pa.Table]]:
    """The plan's shards and their rows, None for the rows that failed while planning.

    shard_range: `(i, n)` keeps every n-th shard from the i-th on. It counts the shards of the plan, committed or not,
    so n ranges never share one, whenever each of them begins.
    """
    number = 0
    for name, rows in split_shards(output.read_plan()):
        if name is not None:
            number += 1
        if name is None or shard_range is None or (number - shard_range[0]) % shard_range[1] == 0:
            yield name, rows


def _survey(settings: Settings, output: Output) -> tuple[int, int, int, int]:
    """`(images to do, their patches, shards committed, rows that failed already)`."""
    pending = patches = done = failures = 0
    for name, rows in planned_shards(output, settings.shard_range):
        if name is None:
            failures += rows.num_rows
        elif output.committed(name):
            done += 1
            failures += pc.sum(pc.equal(output.read_shard_index(name, ["status"])["status"], "failed")).as_py()
        else:
            pending += pc.max(rows["row"]).as_py() + 1
            patches += pc.max(pc.add(rows["patch_start"], rows["patch_count"])).as_py()
    return pending, patches, done, failures


def _warn_of_a_full_disk(output: Output, recipe: Recipe, patches: int, reporter: Reporter) -> None:
    """A guess, so no error: others may free space meanwhile, and some file systems compress."""
    needed = patches * recipe.patch_bytes
    if output.is_mirrored:
        return  # a shard is gone before the next but one begins
    if needed <= (free := shutil.disk_usage(output.root).free):
        return
    hint = "the run stops when the disk is full, and the same command goes on once there is space"
    if recipe.dtype != "uint8":
        hint += f"; --dtype uint8 would need {patches * replace(recipe, dtype='uint8').patch_bytes:,}"
    what = f"{needed:,} bytes are to be written and {free:,} are free"
    reporter.warn(Problem(str(output.root), what, hint=hint, severity="warning"))


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
        raise TooManyFailures(self._failed, self._most, self._last)
