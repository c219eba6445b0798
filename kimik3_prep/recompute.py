"""Stored features against features computed again: by the CPU backend, or by the checkpoint's own image processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from kimik3_prep.config import PreprocessorConfig
from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.images import Decoded, decode, read_file
from kimik3_prep.manifest import resolve
from kimik3_prep.plan import PlannedItem, shard_plan, split_shards
from kimik3_prep.shards import open_shard
from kimik3_prep.store import Layout, read_index, read_plan, read_run
from kimik3_prep.verify import Finding

if TYPE_CHECKING:
    import torch

    Compute = Callable[[PlannedItem, str], tuple["torch.Tensor", str] | None]

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
    root: Path, manifest: Path | None, sample: int | None, backend: bool, processor: Path | None
) -> dict[str, Any]:
    """Compute stored images again, all or an evenly spread `sample`; `differences` are findings as `verify` gives them.

    backend: with this package's CPU backend. processor: with the image processor of that folder, deferred items only.
    """
    layout = Layout(root)
    record = read_run(layout) or {"facts": {}}
    facts = record["facts"]
    config = PreprocessorConfig.from_dict(facts["config"])
    base = str(manifest.resolve().parent if manifest else Path.cwd())
    computers: list[Compute] = [_by_backend(config, facts)] if backend else []
    if processor is not None:
        computers.append(_by_processor(processor, config, facts))
    total = sum(_stored(rows) for name, rows in split_shards(read_plan(layout)) if name and layout.committed(name))
    chosen = set(np.linspace(0, total - 1, min(sample or total, total)).astype(int).tolist()) if total else set()
    differences: list[Finding] = []
    compared = number = 0
    for name, rows in split_shards(read_plan(layout)):
        if name is None or not layout.committed(name):
            continue
        for item in shard_plan(name, rows).items:
            number += 1
            if number - 1 in chosen:
                compared += 1
                differences += _compare(layout, name, rows, item, resolve(item.image, base), computers)
    return {"compared": compared, "differences": [asdict(finding) for finding in differences]}


def _stored(rows: pa.Table) -> int:
    return int(rows["row"].to_numpy().max()) + 1


def _compare(
    layout: Layout, name: str, rows: pa.Table, item: PlannedItem, source: str, computers: list[Compute]
) -> list[Finding]:
    import torch

    file = f"shards/{name}.safetensors"
    at = rows["row"].to_pylist().index(item.row)
    told = read_index(layout.shard_index(name)).slice(at, 1).to_pylist()[0]
    if told["status"] == "failed":
        return []
    try:
        pixels = open_shard(layout.shard(name)).raw("pixel_values")
    except InputError:
        return []  # said by `verify`
    begin = told["patch_start"]
    stored = np.ascontiguousarray(pixels[begin : begin + told["patch_count"]]).view(np.uint8).tobytes()
    found = []
    for compute in computers:
        try:
            if (again := compute(item, source)) is None:
                continue
            values, content_hash = again
        except ItemError as error:
            found.append(Finding(file, told["id"], f"cannot be computed again: {error}", "restore the image"))
            continue
        if content_hash != told["content_hash"]:
            what = f"the image is another one now ({content_hash}, encoded was {told['content_hash']})"
            found.append(Finding(file, told["id"], what, "restore the image, or encode the new one"))
        elif values.contiguous().view(torch.uint8).numpy().tobytes() != stored:
            found.append(Finding(file, told["id"], f"{compute.__doc__} gives other bytes", _MEND))
    return found


def _by_backend(config: PreprocessorConfig, facts: dict[str, Any]) -> Compute:
    import torch

    from kimik3_prep.local import cast_features, read_features
    from kimik3_prep.pixels_cpu import TORCH_DTYPES, write_patches

    dtype = TORCH_DTYPES[facts["dtype"]]

    def compute(item: PlannedItem, source: str) -> tuple[torch.Tensor, str] | None:
        """the CPU backend"""
        if not item.grid.new_w:  # features made elsewhere
            content, content_hash = read_file(source)
            return cast_features(read_features(content, item.grid.thw, config), config, dtype), content_hash
        decoded = _decode(item, source, facts)
        out = torch.empty((item.patch_count, 3, config.patch_size, config.patch_size), dtype=dtype)
        write_patches(decoded.image, item.grid, config, out)
        return out, decoded.content_hash

    return compute


def _decode(item: PlannedItem, source: str, facts: dict[str, Any]) -> Decoded:
    decoded = decode(source, facts["max_pixels"])
    if decoded.image.size != (item.width, item.height):
        raise ItemError("source_changed", f"the image is {decoded.image.width} x {decoded.image.height} pixels")
    return decoded


def _by_processor(folder: Path, config: PreprocessorConfig, facts: dict[str, Any]) -> Compute:
    import torch
    from transformers import AutoImageProcessor

    from kimik3_prep.local import cast_features
    from kimik3_prep.pixels_cpu import TORCH_DTYPES

    dtype = TORCH_DTYPES[facts["dtype"]]
    made = AutoImageProcessor.from_pretrained(str(folder), trust_remote_code=True)

    def compute(item: PlannedItem, source: str) -> tuple[torch.Tensor, str] | None:
        """the checkpoint's processor"""
        if not item.grid.new_w:
            return None  # made elsewhere
        decoded = _decode(item, source, facts)
        given = made.preprocess([{"type": "image", "image": decoded.image}], return_tensors="pt")
        grids = torch.as_tensor(given["grid_thws"]).reshape(-1).tolist()
        if grids != list(item.grid.thw):
            raise ItemError("size_mismatch", f"its grid is {grids}, stored is {list(item.grid.thw)}")
        return cast_features(torch.as_tensor(given["pixel_values"]), config, dtype), decoded.content_hash

    return compute
