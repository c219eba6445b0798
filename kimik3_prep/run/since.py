"""Adding data: which items an earlier output holds already, by id and content, under the same recipe."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.errors import InputError, ItemError, PlanMismatch, Problem
from kimik3_prep.images.address import is_data_url, resolve, split
from kimik3_prep.images.source import read_whole
from kimik3_prep.manifest.read import Manifest
from kimik3_prep.manifest.report import PassedOver
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.remote import scheme

_NAMED = 5


def without_held(manifest: Manifest, recipe: Recipe, earlier: Path, workers: int) -> tuple[Manifest, Recipe]:
    """Return the manifest without the items that a finished output holds, and the recipe of what is left.

    Held is an item of that id whose image has the same bytes: its file is unchanged since it was planned, or has the
    hash that the index names. Raises InputError for an output that is not finished, PlanMismatch for another recipe.
    """
    output = Output(earlier)
    record = output.record()
    if record is None or not output.finished:
        what = "no finished run is in it"
        raise InputError([Problem(f"--since {earlier}", what, "a folder that `kimik3-prep encode` finished")])
    _check_recipe(earlier, record.recipe, recipe)
    held = _held(output)
    with ThreadPoolExecutor(workers) as pool:
        same = list(pool.map(lambda item: _is_held(item, held.get(item["id"]), manifest.base), _items(manifest)))
    fresh = manifest.items.filter(pa.array([not each for each in same], pa.bool_()))
    if not fresh.num_rows:
        hint = "there is nothing to do"
        raise InputError([Problem(manifest.name, f"all {len(same):,} items are in {earlier} already", hint=hint)])
    names = manifest.items["id"].filter(pa.array(same, pa.bool_())).slice(0, _NAMED).to_pylist()
    passed_over = manifest.passed_over
    if names:
        passed_over += (PassedOver(f"items that {earlier} holds", sum(same), tuple(names)),)
    fresh = fresh.set_column(0, "item", pa.array(range(fresh.num_rows), pa.int64()))
    digest = hashlib.sha256(f"{manifest.digest} since {record.recipe.fingerprint}".encode()).hexdigest()
    smaller = replace(manifest, items=fresh, digest=digest, passed_over=passed_over)
    return smaller, replace(recipe, manifest=digest)


def _check_recipe(earlier: Path, before: Recipe, now: Recipe) -> None:
    """Raise PlanMismatch that names each fact which makes other bytes."""
    hint = "use the settings of that run, or encode everything anew"
    problems = [
        Problem(f"--since {earlier}: {name}", f"that run has {old!r}, this one {new!r}", hint=hint)
        for name, old, new in before.differences(now)
    ]
    if problems:
        raise PlanMismatch(problems)


def _held(output: Output) -> dict[str, dict[str, Any]]:
    """What is known of each item that has features: its image, the stamp of its file, its hash."""
    stamps: dict[int, tuple[int | None, int | None]] = {}
    for rows in output.read_plan():
        for item, size, mtime in zip(
            *(rows[n].to_pylist() for n in ("item", "source_size", "source_mtime_ns")), strict=True
        ):
            stamps[item] = (size, mtime)
    index = output.read_index(["item", "id", "image", "status", "content_hash"])
    index = index.filter(pc.equal(index["status"], "ok"))
    return {row["id"]: {**row, "stamp": stamps.get(row["item"], (None, None))} for row in index.to_pylist()}


def _items(manifest: Manifest) -> Iterator[dict[str, Any]]:
    for batch in manifest.items.select(["id", "image", "content_hash"]).to_batches(max_chunksize=4096):
        yield from batch.to_pylist()


def _is_held(item: dict[str, Any], known: dict[str, Any] | None, base: str) -> bool:
    if known is None:
        return False
    if item["content_hash"] is not None:
        return bool(item["content_hash"] == known["content_hash"])
    source = resolve(item["image"], base)
    file = split(source)[0]
    try:
        if item["image"] == known["image"] and not is_data_url(file) and not scheme(file):
            status = os.stat(file)
            if (status.st_size, status.st_mtime_ns) == known["stamp"]:
                return True
        return bool(read_whole(source).content_hash == known["content_hash"])
    except (OSError, ValueError, ItemError):
        return False  # it is tried again with the new ones, and its failure recorded there
