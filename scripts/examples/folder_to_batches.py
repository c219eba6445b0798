"""From a folder of pictures to training batches: encode once, then read packed batches under a token budget.

    python scripts/examples/folder_to_batches.py PICTURES FEATURES

What it trains is a toy; what matters is the shape of the loop.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from kimik3_prep import FeatureStore
from kimik3_prep.reading.training import FeatureDataset, TokenBudgetSampler, collate


def encode(pictures: Path, features: Path) -> None:
    """Features of every picture in the folder; running it again does nothing."""
    manifest = features.with_suffix(".jsonl")
    subprocess.run(["kimik3-prep", "manifest", pictures, "--output", manifest, "--overwrite"], check=True)
    command = ["kimik3-prep", "encode", manifest, "--config", "kimi-k3", "--dtype", "uint8", "--output", features]
    if (code := subprocess.run(command).returncode) not in (0, 1):  # 1: some items failed, they are in the index
        sys.exit(code)


def main(pictures: Path, features: Path) -> None:
    """Encode, then one epoch."""
    encode(pictures, features)
    dataset = FeatureDataset(FeatureStore(features, dtype="bfloat16"))
    sampler = TokenBudgetSampler(dataset.num_tokens, budget=4096, shuffle=True, oversized="alone")
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=2)
    embed = torch.nn.Linear(3 * 14 * 14, 32, dtype=torch.bfloat16)
    for batch in loader:
        patches = embed(batch.pixel_values.flatten(1))  # [ΣL, 32]
        images = patches.split(batch.grid_thws.prod(-1).tolist())  # one [L, 32] an image
        print(f"{len(images)} images, {len(patches):,} patches, {int(batch.num_tokens.sum()):,} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
