"""Fill the shards of a plan: which are left to do, who fills them, and how many items may fail meanwhile."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.errors import ItemError, Problem, RunStopped
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.tables import split_shards
from kimik3_prep.pixels.cpu import lost_levels
from kimik3_prep.run.check import Checked, Reporter, Settings
from kimik3_prep.run.planning import FailureLimit
from kimik3_prep.run.shard import Control, ShardJob, Stopped, fill_shards
from kimik3_prep.run.workers import Workers


def fill(
    settings: Settings, checked: Checked, output: Output, recipe: Recipe, workers: Workers, reporter: Reporter
) -> int:
    """Fill the shards, of the range where there is one, that are not committed yet; return how many were.

    Raises RunError where the machine fails or the output folder is removed, TooManyFailures.
    """
    _warn_of_lost_levels(recipe, reporter)
    left = _survey(settings, output)
    _warn_of_a_full_disk(output, recipe, left.patches, reporter)
    limit = FailureLimit(settings.most_failures, left.failed_rows)
    control = Control(note=lambda where, text: reporter.warn(Problem(where, text, severity="warning")))

    def on_item(pixels: int, size: int, error: ItemError | None) -> None:
        reporter.advance(1, pixels, size, int(error is not None))
        if error is not None:
            control.stopped = limit.count(error) or control.stopped

    control.on_item = on_item
    limit.check()
    reporter.phase("images", left.images)
    if not left.images:
        return left.committed
    jobs = _jobs(settings, checked, output, recipe)
    with output.filling():
        try:
            if settings.engine == "ray":
                from kimik3_prep.run.ray import Crew, fill_on_ray

                crew = Crew(settings.workers, settings.item_timeout, settings.memory, limit.left())
                results = fill_on_ray(jobs, crew, settings.ray, control)
            else:
                results = fill_shards(jobs, workers, control)
            for _ in results:
                control.stopped = control.stopped or not output.run.exists()
        except Stopped:
            limit.check()
            raise RunStopped from None
    limit.check()  # the last item may have been the one too many
    return left.committed


def planned_shards(output: Output, shard_range: tuple[int, int] | None = None) -> Iterator[tuple[str | None, pa.Table]]:
    """Yield the plan's shards with their rows; None names the rows that failed while planning.

    shard_range: `(i, n)` keeps every n-th shard from the i-th on. It counts the shards of the plan, committed or not,
    so n ranges never share one, whenever each of them begins.
    """
    number = 0
    for name, rows in split_shards(output.read_plan()):
        if name is not None:
            number += 1
        if name is None or shard_range is None or (number - shard_range[0]) % shard_range[1] == 0:
            yield name, rows


def _jobs(settings: Settings, checked: Checked, output: Output, recipe: Recipe) -> Iterator[ShardJob]:
    """Yield a job for each shard that is not committed yet; the devices take turns."""
    devices = itertools.cycle(checked.devices or ("cpu",))
    for name, rows in planned_shards(output, settings.shard_range):
        if name is not None and not output.committed(name):
            device = next(devices) if name.startswith("gpu-") else "cpu"
            yield ShardJob(output, recipe, name, rows, checked.manifest.base, device, settings.batch_bytes)


@dataclass(slots=True)
class _Left:
    """What is left to do of a plan, and what was done before."""

    images: int = 0
    patches: int = 0
    committed: int = 0
    """Shards."""

    failed_rows: int = 0
    """While planning, and in committed shards."""


def _survey(settings: Settings, output: Output) -> _Left:
    left = _Left()
    for name, rows in planned_shards(output, settings.shard_range):
        if name is None:
            left.failed_rows += rows.num_rows
        elif output.committed(name):
            left.committed += 1
            status = output.read_shard_index(name, ["status"])["status"]
            left.failed_rows += pc.sum(pc.equal(status, "failed")).as_py()
        else:
            left.images += pc.max(rows["row"]).as_py() + 1
            left.patches += pc.max(pc.add(rows["patch_start"], rows["patch_count"])).as_py()
    return left


def _warn_of_lost_levels(recipe: Recipe, reporter: Reporter) -> None:
    if lost := lost_levels(recipe.config, recipe.dtype):
        what = f"with this image_mean and image_std {recipe.dtype} merges {lost} of the 256 levels of a channel"
        reporter.warn(Problem("--dtype", what, "float32 or uint8 for lossless storage", severity="warning"))


def _warn_of_a_full_disk(output: Output, recipe: Recipe, patches: int, reporter: Reporter) -> None:
    """Warn only: others may free space meanwhile, and some file systems compress."""
    needed = patches * recipe.patch_bytes
    if output.is_mirrored:  # a shard leaves the disk before the next but one begins
        return
    free = shutil.disk_usage(output.root).free
    if needed <= free:
        return
    hint = "the run stops when the disk is full, and the same command goes on once there is space"
    if recipe.dtype != "uint8":
        hint += f"; --dtype uint8 would need {patches * 3 * recipe.config.patch_size**2:,}"
    what = f"{needed:,} bytes are to be written and {free:,} are free"
    reporter.warn(Problem(str(output.root), what, hint=hint, severity="warning"))
