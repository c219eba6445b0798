"""Debugging an engine: do the pixels it sees differ from the checkpoint's? Hold its tensor against the stored one.

    python scripts/examples/same_pixels.py FEATURES ID TENSOR.npy

TENSOR.npy is what the engine made of the image: normalised patches [L, 3, 14, 14], as numpy saved them.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from kimik3_prep import FeatureStore


def main(features: str, name: str, tensor: str) -> None:
    """Where and by how many levels of 255 they differ."""
    item = FeatureStore(features)[name]
    theirs = torch.from_numpy(np.load(tensor)).to(torch.float32)
    if theirs.shape != item.pixel_values.shape:
        sys.exit(f"the shapes differ: {tuple(theirs.shape)}, stored {tuple(item.pixel_values.shape)}: another grid")
    apart = (theirs - item.pixel_values.to(torch.float32)).abs() * 127.5
    differing = int((apart > 0.5).sum())
    print(f"{differing:,} of {apart.numel():,} values differ, by up to {float(apart.max()):.1f} levels")
    if differing:
        patch = int(apart.flatten(1).amax(1).argmax())
        row, column = divmod(patch, item.grid_thw[2])
        print(f"most in patch {patch}: row {row}, column {column} of {item.grid_thw[1]} x {item.grid_thw[2]}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
