"""What may be done to an output folder: begin in it, go on in it, clear it, take commits back.

Only files that this package wrote are ever removed, in an order that a kill at any moment cannot turn into a lie.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kimik3_prep.disk import LOCK_NAME, LOCKS, claim, disk_errors, hold, sync, write_whole
from kimik3_prep.errors import InputError, PlanMismatch, Problem
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.tables import OURS, OURS_IN_ROOT, Layout, RunRecord, read_run
from kimik3_prep.remote import scheme

#: In a folder that only stages what goes to an object store: the URL of that.
STAGED_NAME = ".staged"


def check_folder(layout: Layout) -> RunRecord | None:
    """The run record of the folder, None for a new one. Raises InputError where something of others lies; no writes."""
    for folder in (layout.root, *layout.root.parents):
        if folder.exists() and not folder.is_dir():
            raise InputError([Problem(str(folder), "is a file", "a folder for the output", "choose another --output")])
    record = read_run(layout)
    if record is None and (foreign := foreign_entries(layout)):
        what = f"holds {foreign[0]!r} and no run.json, so it is not a folder that kimik3-prep filled"
        raise InputError([Problem(str(layout.root), what, "a new or empty folder", "choose another --output")])
    return record


def open_run(
    layout: Layout, recipe: Recipe, versions: Mapping[str, str], overwrite: bool, base: str | None = None
) -> None:
    """Make the output folder ready: new, resumed, or cleared.

    base: the folder that image paths start from, recorded, as the way from the output folder, for readers that will
    need the images; where the run has moved it is recorded anew.

    Raises InputError where the folder holds something else, PlanMismatch naming each fact that differs.
    """
    record = check_folder(layout)
    if record is not None and overwrite:
        clear_output(layout)
        record = None
    way = None if base is None else _way(layout, base)
    if record is None:
        _write_record(layout, RunRecord(recipe, versions, way))
        return
    hint = "use the same settings, another --output, or --overwrite to start anew"
    changed = [
        Problem(
            f"{layout.name}/{layout.run.name}: {name}",
            f"this run was started with {old!r}, now it is {new!r}",
            hint=hint,
        )
        for name, old, new in _differences(record.recipe.facts(), recipe.facts())
    ]
    if changed:
        raise PlanMismatch(changed)
    if way is not None and way != record.base:
        _write_record(layout, replace(record, base=way))


def _write_record(layout: Layout, record: RunRecord) -> None:
    text = json.dumps(record.document(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_whole(layout.run, lambda path: path.write_text(text, encoding="utf-8"))


def _way(layout: Layout, base: str) -> str:
    """From the output folder to the images, so that both can move together; a URL is the same from everywhere."""
    if scheme(base) or layout.store is not None:
        return base
    return os.path.relpath(os.path.realpath(base), os.path.realpath(layout.root))


def beneath_run(layout: Layout, base: str) -> str:
    """The folder that the `base` of a run record names."""
    return base if scheme(base) else os.path.normpath(os.path.join(os.path.realpath(layout.root), base))


def _differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after


def foreign_entries(layout: Layout) -> list[str]:
    """Names in a folder without a run record, but for those that a run killed before its record leaves."""
    if not layout.root.is_dir():
        return []
    names = {entry.name for entry in layout.root.iterdir()} - {f"{layout.run.name}.tmp", STAGED_NAME}
    return sorted(name for name in names if not LOCKS.fullmatch(name))


def clear_output(layout: Layout) -> None:
    """Remove what this package wrote, and only that; the run record goes last, so a kill leaves a run to resume."""
    with disk_errors(layout.root):
        layout.index.unlink(missing_ok=True)
        if layout.shards.is_dir():
            # Indexes first: a shard without its index is uncommitted, an index without its shard would be a lie.
            for path in sorted(layout.shards.iterdir(), key=lambda path: path.suffix != ".parquet"):
                if OURS.fullmatch(path.name):
                    path.unlink()
            sync(layout.shards)  # else a loss of power could bring old shards back under a new run record
            if not any(layout.shards.iterdir()) and not layout.shards.is_symlink():
                layout.shards.rmdir()
        for name in OURS_IN_ROOT:
            (layout.root / f"{name}.tmp").unlink(missing_ok=True)
            (layout.root / name).unlink(missing_ok=True)


def uncommit(layout: Layout, names: Iterable[str]) -> None:
    """Take back the final index and the commits of these shards, so that the run fills them anew."""
    with disk_errors(layout.root):
        layout.index.unlink(missing_ok=True)
        names = list(names)
        for name in names:  # a shard without its index is uncommitted, an index without its shard would be a lie
            layout.shard_index(name).unlink(missing_ok=True)
        if names and layout.shards.is_dir():
            sync(layout.shards)
        for name in names:
            layout.shard(name).unlink(missing_ok=True)
        sync(layout.root)


def sweep(layout: Layout, shards: bool = True) -> None:
    """Remove the unfinished files of a run that was killed. Only for the holder of the folder.

    shards: not for a range, whose neighbours are filling theirs. What a living process writes stays in any case.
    """
    with disk_errors(layout.root):
        for name in OURS_IN_ROOT:
            (layout.root / f"{name}.tmp").unlink(missing_ok=True)
        for path in layout.shards.glob("*.tmp") if shards and layout.shards.is_dir() else ():
            if OURS.fullmatch(path.name):
                _unlink_unless_held(path)


def clear_shard(layout: Layout, name: str, patience: float) -> None:
    """Remove what the worker of a shard leaves when it is ended; it may take so many seconds to die."""
    lock = layout.root / f"{LOCK_NAME}-{name}"
    if not lock.exists():
        return
    try:
        with disk_errors(layout.root), hold(lock, patience):
            for path in (layout.shard(name), layout.shard_index(name)):
                path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
    except InputError:
        return  # it lives: the next run waits for it


def _unlink_unless_held(path: Path) -> None:
    if path.is_symlink():  # nobody of ours writes through one
        return path.unlink()
    try:
        descriptor = claim(path)
    except BlockingIOError:
        return
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
