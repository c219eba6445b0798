"""The whole run, and the only place that knows every stage.

check    manifest and config, every problem at once, before any image is opened
plan     image headers -> grids -> shards; from here on every byte has its place
fill     shard jobs on an engine; committed shards are skipped, so a killed run goes on where it was
merge    shard indexes -> index.parquet; its presence says the run is finished
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep import __version__
from kimik3_prep.disk import locks, only_run
from kimik3_prep.errors import Problem
from kimik3_prep.images.decode import codec_versions
from kimik3_prep.output import mirror
from kimik3_prep.output.folder import check_folder, open_run, sweep
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
from kimik3_prep.run.fill import fill, planned_shards
from kimik3_prep.run.machine import available_memory
from kimik3_prep.run.planning import plan, replan
from kimik3_prep.run.workers import Workers


def dry_run(settings: Settings, reporter: Reporter) -> PlanSummary:
    """Check and plan, write nothing."""
    checked = check(settings, reporter)
    with workers_of(settings) as workers:
        table = plan(settings, checked, workers, reporter)
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
    with mirror.staging(layout), only_run(layout.root), workers_of(settings) as workers:
        summary = _run(settings, checked, layout, recipe, workers, reporter)
        mirror.leave(layout)
        return summary


def _run(
    settings: Settings, checked: Checked, layout: Layout, recipe: Recipe, workers: Workers, reporter: Reporter
) -> RunSummary:
    base = checked.manifest.base if settings.index_only else None
    mirror.join(layout, settings.overwrite)
    open_run(layout, recipe, versions(), settings.overwrite, base)
    sweep(layout)
    mirror.publish(layout, layout.run)
    mirror.fetch(layout, settings.retry_failed)
    if not layout.plan.is_file():
        write_plan(layout, plan(settings, checked, workers, reporter))
    elif settings.retry_failed:
        replan(settings, checked, layout, workers, reporter)
    if layout.index.is_file():  # finished while this run waited to begin, or nothing had failed
        return summarize(layout, None, mirror.sizes(layout))
    mirror.publish(layout, layout.plan)
    skipped = 0
    if settings.index_only:
        parts = [planned_table(rows, settings.dedupe == "content") for rows in read_plan(layout)]
        write_index(layout, [], parts, recipe.metadata())
    else:
        checked = checked.without_items()  # the plan is read from disk from here on, a piece at a time
        skipped = fill(settings, checked, layout, recipe, workers, reporter)
        merge(layout, recipe.metadata())
    mirror.publish(layout, layout.index)
    tell_of_orientations(layout, settings.exif, reporter)
    return summarize(layout, skipped, mirror.sizes(layout))


def workers_of(settings: Settings) -> Workers:
    """Return the worker processes that the settings ask for; they start when there is something to do."""
    memory = available_memory() // 2 if settings.memory is None else settings.memory
    return Workers(settings.workers, settings.item_timeout, memory)


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
        decoders=codec_versions(settings.formats),
        formats=settings.formats,
    )


def versions() -> dict[str, str]:
    """The versions of what makes the files, for the run record."""
    from importlib.metadata import version

    return {"kimik3_prep": __version__} | {name: version(name) for name in ("torch", "numpy", "pyarrow", "safetensors")}


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


def merge(layout: Layout, metadata: dict[str, Any]) -> None:
    """Write the final index from the shard indexes and the rows that never got into a shard."""
    names: list[str] = []
    failed: list[pa.Table] = []
    for name, rows in planned_shards(layout):
        if name is None:
            failed.append(index_table(rows, {}))
        else:
            names.append(name)
    write_index(layout, names, failed, metadata)
