"""Features through a vision tower of yours, once: one output file of embeddings for each shard of pixels.

    python scripts/examples/embed_tower.py FEATURES EMBEDDINGS MODULE:FUNCTION [--device cuda]

FUNCTION takes the device and returns a callable: `tower(pixel_values [L, 3, 14, 14] bfloat16, grid_thws [1, 3])` gives
the embeddings `[tokens, width]` of one image. MODULE is found as from your own script.

Each EMBEDDINGS/NAME.safetensors holds `embeddings [Σ tokens, width]` and `num_tokens [n]` of the images of that shard
in their order, so the index's `shard` and `row` columns lead to them. The same command goes on where it was stopped: a
file that is there is whole.

Images go through the tower one at a time. On one machine that gives the same bits every time, while packed batches need
not, and bits differ between processors. In bfloat16 an image token of Kimi-K3's tower takes 8,192 bytes, projected
14,336: 3.5 to 6 times its uint8 pixels. Caching pays where the tower's time is worth more than that space.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kimik3_prep import FeatureStore
from kimik3_prep.errors import PrepError

Tower = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def images_of(store: FeatureStore, rows: list[dict[str, Any]]) -> list[str]:
    """One id for each image of a shard in its order; rows that share an image count once."""
    return [next(same)["id"] for _, same in groupby(rows, key=lambda row: row["row"])]


def embed(store: FeatureStore, ids: list[str], tower: Tower) -> dict[str, torch.Tensor]:
    """The embeddings of some images, one after the other."""
    parts = []
    for name in ids:
        batch = store.batch([name])
        part = tower(batch.pixel_values, batch.grid_thws)
        if len(part) != int(batch.num_tokens):
            sys.exit(f"{name}: the tower gave {len(part):,} embeddings for {int(batch.num_tokens):,} tokens")
        parts.append(part.cpu())
    return {"embeddings": torch.cat(parts), "num_tokens": torch.tensor([len(part) for part in parts])}


@torch.inference_mode()
def main() -> None:
    """A file for each shard that has none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features")
    parser.add_argument("embeddings", type=Path)
    parser.add_argument("tower", metavar="MODULE:FUNCTION")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    store = FeatureStore(options.features, dtype="bfloat16", device=options.device)
    sys.path.insert(0, os.getcwd())
    module, _, function = options.tower.partition(":")
    tower: Tower = getattr(importlib.import_module(module), function)(options.device)
    options.embeddings.mkdir(parents=True, exist_ok=True)
    ok = [row for row in store.table.to_pylist() if row["status"] == "ok"]
    for shard, rows in groupby(sorted(ok, key=lambda row: (row["shard"], row["row"])), key=lambda row: row["shard"]):
        target = options.embeddings / f"{shard}.safetensors"
        if target.exists():
            continue
        ids = images_of(store, list(rows))
        part = target.with_suffix(".part")
        save_file(embed(store, ids, tower), part)
        os.replace(part, target)  # whole, or not there
        print(f"{target.name}: {len(ids):,} images")


if __name__ == "__main__":
    try:
        main()
    except PrepError as error:
        sys.exit(f"error: {error}")
