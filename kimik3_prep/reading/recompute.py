"""Stored features against features computed again: by the CPU backend, or by the checkpoint's own image processor."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.images.address import resolve
from kimik3_prep.images.source import foreign_errors
from kimik3_prep.manifest.read import base_of
from kimik3_prep.manifest.row import show
from kimik3_prep.output.plan import PlannedItem, shard_plan, split_shards
from kimik3_prep.output.shard_file import open_shard
from kimik3_prep.output.tables import Layout, read_index, read_plan, read_run
from kimik3_prep.pixels.ready import ReadyFeatures, cast_features
from kimik3_prep.reading.verify import Finding
from kimik3_prep.run.compute import Recipe, features, planned_image

Compute = Callable[[PlannedItem, str], tuple[npt.NDArray[Any], str] | None]

_MEND = "if the image is the one that was encoded, delete the shard, its index and index.parquet, and encode again"


def processor_folder(folder: Path | None, trusted: bool) -> Path | None:
    """The folder, once all is there to run its code. Raises InputError where it is not, or where nobody allowed it."""
    if folder is None:
        return None
    if not trusted:
        hint = "read its .py files, then add --trust-remote-code"
        raise InputError([Problem("--processor", f"would run the Python code in {folder}", hint=hint)])
    try:
        import transformers  # noqa: F401
    except ImportError:
        hint = "pip install 'kimik3-prep[verify]'"
        raise InputError([Problem("--processor", "needs transformers, which is not installed", hint=hint)]) from None
    return folder


def against_source(
    root: Path, manifest: str | None, sample: int | None, backend: bool, processor: Path | None
) -> dict[str, Any]:
    """Compute stored images again, all or an evenly spread `sample`; `differences` are findings as `verify` gives them.

    backend: with this package's CPU backend. processor: with the image processor of that folder, deferred items only.
    """
    layout = Layout(root)
    record = read_run(layout) or {"facts": {}}
    recipe = Recipe.of_run(record["facts"])
    base = base_of(manifest) if manifest else str(Path.cwd())
    if manifest is None:
        _check_base(layout, base)
    computers: list[Compute] = [_by_backend(recipe)] if backend else []
    if processor is not None:
        computers.append(_by_processor(processor, recipe))
    total = sum(len(_stored(layout, name)) for name, _ in split_shards(read_plan(layout)) if name)
    chosen = set(np.linspace(0, total - 1, min(sample or total, total)).astype(int).tolist()) if total else set()
    differences: list[Finding] = []
    compared = number = 0
    for name, rows in split_shards(read_plan(layout)):
        stored = _stored(layout, name) if name else {}
        for item in shard_plan(name, rows).items if name and stored else ():
            if (told := stored.get(rows["item"][rows["row"].index(item.row).as_py()].as_py())) is None:
                continue
            number += 1
            if number - 1 in chosen:
                found = _compare(layout, told, item, resolve(item.image, base), computers)
                compared += found is not None
                differences += found or []
    return {"compared": compared, "differences": [asdict(finding) for finding in differences]}


def _check_base(layout: Layout, base: str) -> None:
    """Raises InputError where images were named relative to a manifest that is elsewhere: none of them is here."""
    missing = ""
    for rows in read_plan(layout):
        for image in rows.filter(pc.is_null(rows["error_code"]))["image"].to_pylist():
            if resolve(image, base) == resolve(image, "/"):
                continue
            if os.path.lexists(resolve(image, base)):
                return
            missing = missing or image
    if missing:
        what = f"{show(missing)} was named relative to the manifest's folder, and is not in this one"
        raise InputError([Problem("--against-source", what, hint="add --manifest FILE")])


def _stored(layout: Layout, name: str) -> dict[int, dict[str, Any]]:
    """Index rows of a shard's stored images, one for each, by manifest row."""
    if not layout.committed(name):
        return {}
    index = read_index(layout.shard_index(name))
    rows = index.filter(pc.equal(index["status"], "ok")).to_pylist()
    first: dict[int, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["row"], row)
    return {row["item"]: row for row in first.values()}


def _compare(
    layout: Layout, told: dict[str, Any], item: PlannedItem, source: str, computers: list[Compute]
) -> list[Finding] | None:
    """What differs of one image, of which the index tells; None where nothing could be compared with it."""
    file = f"shards/{told['shard']}.safetensors"
    try:
        pixels = open_shard(layout.shard(told["shard"])).raw("pixel_values")
    except InputError:
        return None
    begin = told["patch_start"]
    stored = np.ascontiguousarray(pixels[begin : begin + told["patch_count"]]).view(np.uint8).tobytes()
    found: list[Finding] | None = None
    for compute in computers:
        try:
            if (again := compute(item, source)) is None:
                continue
            found = found or []
            values, content_hash = again
        except ItemError as error:
            found = found or []
            found.append(Finding(file, told["id"], f"cannot be computed again: {error}", "restore the image"))
            continue
        if content_hash != told["content_hash"]:
            what = f"the image is another one now ({content_hash}, encoded was {told['content_hash']})"
            found.append(Finding(file, told["id"], what, "restore the image, or encode the new one"))
        elif values.tobytes() != stored:
            found.append(Finding(file, told["id"], f"{compute.__doc__} gives other bytes", _MEND))
    return found


def _by_backend(recipe: Recipe) -> Compute:
    def compute(item: PlannedItem, source: str) -> tuple[npt.NDArray[Any], str] | None:
        """the CPU backend"""
        return features(item, source, recipe)

    return compute


def _load_processor(folder: Path) -> Any:
    """The checkpoint's image processor, an object with `preprocess`. Its code may raise anything."""
    from transformers import AutoImageProcessor

    loader: Any = AutoImageProcessor
    try:
        return loader.from_pretrained(str(folder), trust_remote_code=True)
    except Exception as error:
        what = f"no image processor could be loaded from it: {type(error).__name__}: {str(error).strip()[:500]}"
        hint = "a checkpoint folder with preprocessor_config.json and the .py files it names"
        raise InputError([Problem(str(folder), what, hint)]) from error


def _by_processor(folder: Path, recipe: Recipe) -> Compute:
    made = _load_processor(folder)

    def compute(item: PlannedItem, source: str) -> tuple[npt.NDArray[Any], str] | None:
        """the checkpoint's processor"""
        if not item.grid.new_w or item.in_patch_limit is not None:
            return None  # made elsewhere, or with a limit that its config does not have
        decoded = planned_image(item, source, recipe)
        with foreign_errors():
            given = made.preprocess([{"type": "image", "image": decoded.image}], return_tensors="pt")
        grids = np.asarray(given["grid_thws"]).reshape(-1).tolist()
        if grids != list(item.grid.thw):
            raise ItemError("size_mismatch", f"its grid is {grids}, stored is {list(item.grid.thw)}")
        values = np.asarray(given["pixel_values"])
        ready = ReadyFeatures(values, values.dtype.name)
        return cast_features(ready, recipe.config, recipe.dtype), decoded.content_hash

    return compute
