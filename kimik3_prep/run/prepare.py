"""The life of a run, whole or a range of its shards.

check    settings, config and manifest, every problem at once, before any image is opened
plan     image headers -> grids -> shards; from here on every byte has its place
fill     shard by shard; committed shards are skipped, so a killed run goes on where it was
merge    shard indexes -> index.parquet; its presence says that the run is finished

Ranges are processes, on one machine or many, that fill the shards of one run together, in one folder. The first of them
plans and the others wait for it. A shard belongs to one range, so ranges can be killed and run again one by one; then
`finish` merges.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep import __version__
from kimik3_prep.errors import InputError, PlanMissing, Problem, ShardsMissing
from kimik3_prep.output.folder import Output
from kimik3_prep.output.mirror import open_output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.tables import index_table, planned_table
from kimik3_prep.output.totals import PlanSummary, RangeSummary, RunSummary, summarize, summarize_plan, summarize_range
from kimik3_prep.run.check import Reporter, Settings, check
from kimik3_prep.run.fill import fill, planned_shards
from kimik3_prep.run.machine import available_memory
from kimik3_prep.run.planning import plan, replan
from kimik3_prep.run.workers import Workers


def dry_run(settings: Settings, reporter: Reporter) -> PlanSummary:
    """Check and plan, write nothing."""
    open_output(settings.output, settings.staging)
    checked = check(settings, reporter)
    with workers_of(settings) as workers:
        unlimited = replace(settings, on_error="record", max_failures=None)  # it counts what would fail, all of it
        table = plan(unlimited, checked, workers, reporter)
    return summarize_plan(table, checked.recipe.config.patch_size, settings.dtype)


def prepare(settings: Settings, reporter: Reporter) -> RunSummary:
    """Encode a manifest into an output, or finish what an earlier run with the same recipe began there.

    Raises InputError where the input is wrong or the output holds another run, RunError where the machine fails or too
    many items do. An item that fails is a row of the index.
    """
    output = open_output(settings.output, settings.staging)
    checked = check(settings, reporter)
    recipe, base = checked.recipe, checked.manifest.base
    if not settings.overwrite and not settings.retry_failed and output.is_done(recipe):
        return summarize(output, skipped=None)
    with output.alone(), workers_of(settings) as workers:
        output.begin(
            recipe,
            versions(),
            overwrite=settings.overwrite,
            retry=settings.retry_failed,
            base=base if recipe.index_only else None,
        )
        if not output.plan.is_file():
            output.write_plan(plan(settings, checked, workers, reporter))
        elif settings.retry_failed:
            replan(settings, checked, output, workers, reporter)
        output.seal_plan()
        skipped = None
        if not output.finished:  # it may be: finished while this run waited to begin, or nothing had failed
            checked = checked.without_items()  # the plan is read from disk from here on, a piece at a time
            skipped = 0 if recipe.index_only else fill(settings, checked, output, recipe, workers, reporter)
            merge(output, recipe)
            tell_of_orientations(output, recipe, reporter)
        summary = summarize(output, skipped)
        output.leave()
        return summary


def prepare_range(settings: Settings, reporter: Reporter) -> RangeSummary:
    """Fill every n-th shard of a run, and write no final index.

    Raises InputError where a run, this very range, or a range of another n is at work in the folder; else as `prepare`.
    """
    if settings.shard_range is None:
        raise ValueError("settings.shard_range says which shards")
    number, count = settings.shard_range
    output = open_output(settings.output, settings.staging)
    checked = check(settings, reporter)
    recipe = checked.recipe
    output.is_done(recipe)  # compares, before there is a lock in a folder of somebody else

    def waiting(holder: str) -> None:
        what = f"waiting while another range plans: {holder}"
        reporter.warn(Problem(output.name, what, severity="warning"))

    with contextlib.ExitStack() as held, workers_of(settings) as workers:
        with output.planning_range(count, waiting):
            output.begin(recipe, versions(), others_fill=True)
            if not output.plan.is_file():
                output.write_plan(plan(settings, checked, workers, reporter))
            output.seal_plan()
            held.enter_context(output.holding_range(number, count))
        skipped = fill(settings, checked.without_items(), output, recipe, workers, reporter)
        whole, mine = (_names(output, part) for part in (None, settings.shard_range))
        return summarize_range(output, settings.shard_range, whole, mine, skipped)


def finish(root: Path, reporter: Reporter) -> RunSummary:
    """Write the final index of a run whose shards are all there; nothing where it is written already.

    Raises InputError for other folders and while ranges are at work, RunError that names the shards which are missing.
    """
    output = Output(root)
    record = output.record()
    if record is None:
        raise InputError([Problem(str(root), "no run.json in it", "a folder that `kimik3-prep encode` filled")])
    with output.alone():
        output.sweep()
        if not output.plan.is_file():
            raise PlanMissing(str(root))
        if output.finished:
            return summarize(output, skipped=None)
        names = _names(output)
        if missing := tuple(name for name in names if not output.committed(name)):
            raise ShardsMissing(missing, len(names))
        merge(output, record.recipe)
        tell_of_orientations(output, record.recipe, reporter)
        return summarize(output)


def workers_of(settings: Settings) -> Workers:
    """Return the worker processes that the settings ask for; they start when there is something to do."""
    memory = available_memory() // 2 if settings.memory is None else settings.memory
    return Workers(settings.workers, settings.item_timeout, memory)


def merge(output: Output, recipe: Recipe) -> None:
    """Write the final index: from the shard indexes, and from the plan what is in no shard."""
    names: list[str] = []
    others: list[pa.Table] = []
    for name, rows in planned_shards(output):
        if recipe.index_only:
            others.append(planned_table(rows, recipe.dedupe == "content"))
        elif name is None:
            others.append(index_table(rows, {}))
        else:
            names.append(name)
    output.finish(names, others, recipe)


def versions() -> dict[str, str]:
    """Return the versions of the packages that make the files, for the run record."""
    from importlib.metadata import version

    return {"kimik3_prep": __version__} | {name: version(name) for name in ("torch", "numpy", "pyarrow", "safetensors")}


def tell_of_orientations(output: Output, recipe: Recipe, reporter: Reporter) -> None:
    """Warn where images have an EXIF orientation, because engines differ in what they do with it. Not for TIFF."""
    index = output.read_index(["exif_orientation", "format"])
    rows = pc.and_(pc.greater(index["exif_orientation"], 1), pc.not_equal(index["format"], "TIFF"))
    if not (count := pc.sum(rows).as_py() or 0):
        return
    did = "was ignored, as SGLang and the checkpoint do; vLLM's loader applies it, as --exif apply does"
    if recipe.exif == "apply":
        did = "was applied, as vLLM's loader does; SGLang and the checkpoint ignore it"
    what = f"the EXIF orientation of {count:,} item{'' if count == 1 else 's'} {did}"
    reporter.warn(Problem("--exif", what, severity="warning"))


def _names(output: Output, shard_range: tuple[int, int] | None = None) -> list[str]:
    """Return the planned shards, of a range or all."""
    return [name for name, _ in planned_shards(output, shard_range) if name is not None]
