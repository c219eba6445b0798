"""The 256 levels of a colour channel, the values they become, and the table of storage dtypes. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.uint8]

_AT_ONCE = 128  # patches that are normalised together: with their indexes and values they fit into a processor's cache


@dataclass(frozen=True, slots=True)
class DType:
    """A way to store values: a row of `DTYPES`."""

    name: str
    """Its name on the command line, in records and in torch."""
    safetensors: str
    """Its name in the header of a shard."""
    numpy: np.dtype[Any]
    """How numpy holds stored values. Numpy has no bfloat16, so its bit patterns stand in as uint16."""

    @property
    def itemsize(self) -> int:
        """Bytes of one stored value."""
        return self.numpy.itemsize

    @property
    def holds_levels(self) -> bool:
        """Whether levels are stored as they are, before normalisation."""
        return self.name == "uint8"

    def narrow(self, values: Floats) -> npt.NDArray[Any]:
        """Float32 values as they are stored: each rounded once, to nearest, ties to even."""
        with np.errstate(over="ignore"):  # a value beyond the dtype becomes infinite
            if self.name != "bfloat16":
                return values.astype(self.numpy)
            bits = np.ascontiguousarray(values, np.float32).view(np.uint32)  # of which bfloat16 is the upper half
        return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(self.numpy)

    def widen(self, stored: npt.NDArray[Any]) -> Floats:
        """Stored values as float32, exactly; a level stays its number."""
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)

    def of_levels(self, table: Floats) -> npt.NDArray[Any]:
        """What each level is stored as, `[3, 256]`. `table`: the normalised values, from `level_table`."""
        return np.tile(np.arange(256, dtype=np.uint8), (3, 1)) if self.holds_levels else self.narrow(table)


#: Every storage dtype, by name. Nothing else lists them.
DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("float32", "F32", np.dtype("<f4")),
        DType("bfloat16", "BF16", np.dtype("<u2")),
        DType("float16", "F16", np.dtype("<f2")),
        DType("uint8", "U8", np.dtype("u1")),
    )
}


def level_table(mean: Sequence[float], std: Sequence[float]) -> Floats:
    """Normalised value of each level, float32 `[3, 256]`: the checkpoint's three roundings, one after the other."""
    levels = (np.arange(256) / 255.0).astype(np.float32)
    centred = (levels.astype(np.float64) - np.array(mean, np.float64)[:, None]).astype(np.float32)
    return (centred.astype(np.float64) * (1.0 / np.array(std, np.float64)[:, None])).astype(np.float32)


class Normaliser:
    """Levels to the values they are stored as, exactly those of the table, by the quickest way that gives them.

    For the published constants `level / 127.5 - 1` in float32 gives all 256 values bit for bit, which the constructor
    checks. Where the channels share their values, 16-bit values are read two at a time from a table of all pairs. All
    others are read from the table itself. Several threads may use one.
    """

    def __init__(self, table: Floats, dtype: DType) -> None:
        self._dtype = dtype.numpy
        entries = dtype.of_levels(table).view(f"u{dtype.itemsize}")
        alike = bool((entries == entries[0]).all())
        straight = np.arange(256, dtype=np.float32) / np.float32(127.5) - np.float32(1)
        self._straight = alike and dtype.name == "float32" and entries[0].tobytes() == straight.tobytes()
        self._pairs = _pairs(entries[0]) if alike and dtype.itemsize == 2 else None
        self._entries = entries.ravel()

    def __call__(self, levels: Levels, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """The stored values of uint8 `levels` `[n, 3, p, p]`, in `out` or in an array of the caller's own.

        Both arrays are contiguous.
        """
        values: npt.NDArray[Any] = np.empty(levels.shape, self._dtype) if out is None else out
        for begin in range(0, len(levels), _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            self._normalise(levels[some], values[some])
        return values

    def _normalise(self, levels: Levels, values: npt.NDArray[Any]) -> None:
        if self._straight:
            np.divide(levels, np.float32(127.5), out=values)
            np.subtract(values, np.float32(1), out=values)
        elif self._pairs is not None and levels.size % 2 == 0:
            index = levels.reshape(-1).view(np.uint16).astype(np.intp)
            np.take(self._pairs, index, out=values.reshape(-1).view(np.uint32), mode="clip")
        else:
            index = levels + np.arange(0, 768, 256).reshape(3, 1, 1)
            np.take(self._entries, index, out=values.view(self._entries.dtype), mode="clip")


def _pairs(entries: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The entries of any two levels side by side: those of the bytes 3 and 5 are at the index that the bytes are."""
    levels = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return entries[levels].view(np.uint32)


def nearest_levels(values: npt.NDArray[Any], entries: npt.NDArray[Any]) -> tuple[Levels, int]:
    """The level of each of the `values` `[n, 3, p, p]`, and how many values are none.

    entries: what each level reads as, `[3, 256]`, rising. A value between two entries, which features made elsewhere
    may hold, becomes the nearer level.
    """
    levels = np.empty(values.shape, np.uint8)
    strays = 0
    for channel in range(3):
        row, wanted = entries[channel], np.nan_to_num(values[:, channel])
        above = np.searchsorted(row, wanted).clip(1, 255)
        nearest = np.where(wanted - row[above - 1] <= row[above] - wanted, above - 1, above)
        strays += int(np.count_nonzero(row[nearest] != values[:, channel]))
        levels[:, channel] = nearest
    return levels, strays
