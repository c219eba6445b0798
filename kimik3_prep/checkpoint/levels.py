"""The 256 levels of a colour channel, the values they become, and the table of storage dtypes. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Levels = npt.NDArray[np.uint8]


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
    """Levels to the values they are stored as, read from a table.

    Arrow reads tables by 8-bit and 16-bit indices as they are, in the calling thread. Numpy would first make indices of
    64 bits of them, which takes longer than all the rest.
    """

    def __init__(self, table: Floats, dtype: DType) -> None:
        import pyarrow as pa  # most users of this module need no values

        self._dtype = dtype.numpy
        entries = dtype.of_levels(table).view(f"u{dtype.itemsize}")
        self._channels_differ = bool((entries != entries[0]).any())
        self._entries = pa.array(entries.ravel() if self._channels_differ else entries[0])
        self._first_entries = np.arange(0, 768, 256, dtype=np.uint16).reshape(3, 1, 1)

    def __call__(self, levels: Levels) -> npt.NDArray[Any]:
        """The stored values of uint8 `levels` `[n, 3, p, p]`, an array of the caller's own."""
        import pyarrow as pa
        import pyarrow.compute as pc

        index: npt.NDArray[Any] = levels + self._first_entries if self._channels_differ else levels
        kind = pa.uint16() if self._channels_differ else pa.uint8()
        lent = pa.Array.from_buffers(kind, index.size, [None, pa.py_buffer(index)])
        values = pc.take(self._entries, lent, boundscheck=False)
        # Its memory is new and nobody else's, so it may be written to, which a view of an Arrow array forbids.
        return np.frombuffer(values.buffers()[1], self._dtype, levels.size).reshape(levels.shape)


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
