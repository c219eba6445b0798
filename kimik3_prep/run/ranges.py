"""A run that several processes do together, on one machine or many: each a range of the shards, one the final index.

All work in the same folder and see each other by its locks (`disk.py`). Whoever comes first plans, the others wait for
that; then each fills its shards. A shard belongs to one range, so ranges can be killed and run again one by one.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from kimik3_prep.disk import LOCK_NAME, PLAN_LOCK_NAME, clear_locks, hold, only_run
from kimik3_prep.errors import InputError, Problem, RunError
from kimik3_prep.output.folder import check_folder, open_run, sweep
from kimik3_prep.output.tables import Layout, read_run, write_plan
from kimik3_prep.output.totals import RangeSummary, RunSummary, summarize, summarize_range
from kimik3_prep.run.check import Reporter, Settings, check
from kimik3_prep.run.fill import fill, planned_shards
from kimik3_prep.run.planning import plan
from kimik3_prep.run.prepare import merge, recipe_of, tell_of_orientations, versions, workers_of

_NAMED = 10  # missing shards in a sentence


def parse_range(text: str) -> tuple[int, int]:
    """`(i, n)` from "i/n": the i-th of n ranges, counted from 1. Raises InputError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*(?:/|of)\s*(\d{1,9})\s*", text, re.ASCII)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if match and 1 <= number <= count:
        return number, count
    hint = ""
    if match and count:
        hint = f"ranges are counted from 1: the first is 1/{count}, the last {count}/{count}"
    expected = "i/n, the i-th of n ranges, as 1/8 to 8/8"
    raise InputError([Problem("--shard-range", f"{text!r} is no range", expected, hint)])


def prepare_range(settings: Settings, reporter: Reporter) -> RangeSummary:
    """Fill every n-th shard of a run, and write no final index.

    Raises InputError where a run, this very range, or a range of another n is at work in the folder; else as `prepare`.
    """
    if settings.shard_range is None:
        raise ValueError("settings.shard_range says which shards")
    checked = check(settings, reporter)
    layout = Layout(settings.output)
    recipe = recipe_of(settings, checked)
    check_folder(layout)
    number, count = settings.shard_range
    with contextlib.ExitStack() as held, workers_of(settings) as workers:
        with _planning(layout, count, reporter):
            open_run(layout, recipe, versions(), overwrite=False)
            sweep(layout, shards=False)
            if not layout.plan.is_file():
                write_plan(layout, plan(settings, checked, workers, reporter))
            held.enter_context(hold(layout.root / f"{LOCK_NAME}-{number}-of-{count}", must=True))
        skipped = fill(settings, checked.without_items(), layout, recipe, workers, reporter)
        whole, mine = (_names(layout, part) for part in (None, settings.shard_range))
        return summarize_range(layout, settings.shard_range, whole, mine, skipped)


@contextlib.contextmanager
def _planning(layout: Layout, count: int, reporter: Reporter) -> Iterator[None]:
    """The folder for this process alone, once the ranges that came before have planned."""

    def waiting(holder: str) -> None:
        text = f"waiting while another range plans: {holder}"
        reporter.warn(Problem(str(layout.root), text, severity="warning"))

    def neighbour(name: str) -> bool:
        return not re.fullmatch(rf"{re.escape(LOCK_NAME)}-\d+-of-(?!{count}$)\d+", name)

    with hold(layout.root / PLAN_LOCK_NAME, math.inf, waiting, must=True), hold(layout.root / LOCK_NAME, must=True):
        clear_locks(layout.root, neighbour)
        yield


def finish(root: Path, reporter: Reporter) -> RunSummary:
    """Write the final index of a run whose shards are all there; nothing where it is written already.

    Raises InputError for other folders and while ranges are at work, RunError that names the shards which are missing.
    """
    layout = Layout(root)
    record = read_run(layout)
    if record is None:
        raise InputError([Problem(str(root), "no run.json in it", "a folder that `kimik3-prep encode` filled")])
    with only_run(root):
        sweep(layout)
        if not layout.plan.is_file():
            raise RunError(f"{root} has no plan yet: run `kimik3-prep encode --shard-range` first")
        if layout.index.is_file():
            return summarize(layout, skipped=None)
        names = _names(layout)
        if missing := [name for name in names if not layout.committed(name)]:
            more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
            raise RunError(
                f"{len(missing):,} of {len(names):,} shards are not there yet: {', '.join(missing[:_NAMED])}{more}. "
                "Run the ranges again that they belong to, or `kimik3-prep encode` without a range: it does the rest."
            )
        merge(layout, record.recipe.metadata())
        tell_of_orientations(layout, record.recipe.exif, reporter)
        return summarize(layout)


def _names(layout: Layout, shard_range: tuple[int, int] | None = None) -> list[str]:
    return [name for name, _ in planned_shards(layout, shard_range) if name is not None]
