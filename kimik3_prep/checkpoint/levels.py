"""The 256 levels of a colour channel and the values they become. Numpy only: readers need neither torch nor Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def level_table(mean: Sequence[float], std: Sequence[float]) -> Floats:
    """Normalised value of each level, float32 `[3, 256]`: the checkpoint's three roundings, one after the other."""
    levels = (np.arange(256) / 255.0).astype(np.float32)
    centred = (levels.astype(np.float64) - np.array(mean, np.float64)[:, None]).astype(np.float32)
    return (centred.astype(np.float64) * (1.0 / np.array(std, np.float64)[:, None])).astype(np.float32)


def stored_table(table: Floats, dtype: str) -> Floats:
    """What each level reads as from a shard of `dtype`, float32 `[3, 256]`: the table's values, rounded once."""
    if dtype == "uint8":
        return np.broadcast_to(np.arange(256, dtype=np.float32), (3, 256))
    if dtype == "float16":
        return table.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":  # numpy has none: the upper half of a float32, rounded to nearest, ties to even
        bits = table.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return rounded.astype(np.uint32).view(np.float32)
    return table


def levels_of(values: Floats, stored: Floats) -> tuple[npt.NDArray[np.uint8], int]:
    """The levels whose entries in `stored` `[3, 256]` the `values` `[n, 3, p, p]` are, and how many are no entry.

    A value between two entries, which features made elsewhere may hold, becomes the nearer level.
    """
    levels = np.empty(values.shape, np.uint8)
    strays = 0
    for channel in range(3):
        entries, wanted = stored[channel], np.nan_to_num(values[:, channel])
        above = np.searchsorted(entries, wanted).clip(1, 255)  # the table rises with the level
        found: npt.NDArray[Any] = np.where(wanted - entries[above - 1] < entries[above] - wanted, above - 1, above)
        strays += int(np.count_nonzero(entries[found] != values[:, channel]))
        levels[:, channel] = found
    return levels, strays
