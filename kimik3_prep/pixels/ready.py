"""Features made elsewhere, checked as a serving engine would check them, then brought to the run's dtype.

The checks are SGLang's for processor output: rank and patch shape, dtype, finite values, as many patches as the grid
says. A file is safetensors or `.npy`; its first bytes tell which. Nothing is ever unpickled, and no memory is taken for
a shape before the file is known to hold it.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.checkpoint.levels import DTYPES, DType, Levels, Normaliser, level_table, nearest_levels
from kimik3_prep.errors import ItemError
from kimik3_prep.pixels.cpu import lost_levels

#: What a file may hold: every storage dtype, and double precision, which no shard holds.
_READABLE = {**DTYPES, "float64": DType("float64", "F64", np.dtype("<f8"))}

_AT_ONCE = 1024  # patches: comparing takes many times the bytes of what is compared


@dataclass(frozen=True, slots=True)
class ReadyFeatures:
    """The features of one file."""

    values: npt.NDArray[Any]
    """`[patches, 3, p, p]`."""
    dtype: str
    """Its name. The numpy type alone does not tell: bfloat16 bit patterns look like any uint16."""


def read_features(content: bytes, thw: tuple[int, int, int], config: PreprocessorConfig) -> ReadyFeatures:
    """The features in a file's bytes, in their own dtype. Raises ItemError (bad_features)."""
    tensor = _npy(content) if content.startswith(b"\x93NUMPY") else _safetensors(content, thw)
    if tensor.dtype is None:
        raise _bad(f"pixel_values is {tensor.kind}; floating point or uint8 is needed")
    patch, patches = config.patch_size, thw[0] * thw[1] * thw[2]
    if len(tensor.shape) != 4 or tensor.shape[1:] != (3, patch, patch):
        raise _bad(f"pixel_values has the shape {list(tensor.shape)}; [patches, 3, {patch}, {patch}] is needed")
    if tensor.shape[0] != patches:
        raise _bad(f"pixel_values has {tensor.shape[0]:,} patches; grid_thw {list(thw)} needs {patches:,}")
    size = patches * 3 * patch * patch * tensor.dtype.itemsize
    if len(tensor.data) < size:
        raise _bad(f"not a readable .npy file: {len(tensor.data):,} bytes of data where its header needs {size:,}")
    values: npt.NDArray[Any] = np.ndarray(
        tensor.shape, tensor.dtype.numpy, tensor.data, order="F" if tensor.fortran_order else "C"
    )
    if not all(np.isfinite(_numbers(values[part], tensor.dtype)).all() for part in _parts(values)):
        raise _bad("pixel_values holds NaN or infinite values")
    return ReadyFeatures(np.ascontiguousarray(values), tensor.dtype.name)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor as its file describes it. Nothing of the description is checked."""

    kind: str
    """The file's own name of the dtype, for messages."""
    dtype: DType | None
    """None where features cannot be of this dtype."""
    shape: tuple[int, ...]
    data: memoryview
    fortran_order: bool = False


def _npy(content: bytes) -> _Tensor:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise _bad(f"not a readable .npy file: its version is {version[0]}.{version[1]}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, kind = read(file)
    except (ValueError, TypeError, SyntaxError, EOFError, MemoryError, RecursionError, tokenize.TokenError) as error:
        raise _bad(f"not a readable .npy file: {error}") from error
    # bfloat16 is left out: numpy writes its bit patterns as uint16, which could be anything.
    dtype = next((row for row in _READABLE.values() if row.numpy == kind and row.name != "bfloat16"), None)
    return _Tensor(str(kind), dtype, shape, memoryview(content)[file.tell() :], fortran_order)


def _safetensors(content: bytes, thw: tuple[int, int, int]) -> _Tensor:
    try:
        tensors: dict[str, dict[str, Any]] = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise _bad(f"neither a safetensors nor an .npy file: {error}") from error
    if "pixel_values" not in tensors:
        raise _bad(f"no pixel_values in it, only {', '.join(sorted(tensors)) or 'nothing'}")
    if "grid_thws" in tensors:
        _check_grid(tensors["grid_thws"], thw)
    pixels = tensors["pixel_values"]
    dtype = next((row for row in _READABLE.values() if row.safetensors == pixels["dtype"]), None)
    return _Tensor(pixels["dtype"], dtype, tuple(pixels["shape"]), memoryview(pixels["data"]))


def _check_grid(tensor: dict[str, Any], thw: tuple[int, int, int]) -> None:
    kinds = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1"}
    if tensor["dtype"] not in kinds:
        raise _bad(f"its grid_thws is {tensor['dtype']}; integers are needed")
    grid = np.frombuffer(tensor["data"], kinds[tensor["dtype"]])
    if grid.tolist() != list(thw):
        raise _bad(f"its grid_thws is {grid[:12].tolist()}; the manifest says {list(thw)}")


def cast_features(features: ReadyFeatures, config: PreprocessorConfig, dtype: str) -> npt.NDArray[Any]:
    """The features in the run's dtype, contiguous. Raises ItemError where that would lose levels.

    uint8 levels become the normalised values of the config's table; floats become levels when each is one. Between
    floating dtypes the cast must be exact, or all values must be levels that stay apart in the new dtype.
    """
    if features.dtype == dtype:
        return features.values
    source, target = _READABLE[features.dtype], DTYPES[dtype]
    if source.holds_levels:
        return Normaliser(level_table(config.image_mean, config.image_std), target)(features.values)
    if target.holds_levels:
        levels = _levels_of(features, config)
        if levels is not None:
            return levels
    else:
        cast = np.empty(features.values.shape, target.numpy)
        exact = True
        for part in _parts(cast):
            numbers = _numbers(features.values[part], source)
            cast[part] = target.narrow(numbers)
            exact &= np.array_equal(target.widen(cast[part]), numbers)
        if exact or (not lost_levels(config, dtype) and _levels_of(features, config) is not None):
            return cast
    hint = f"use --dtype {source.name}" if source.name in DTYPES else "no --dtype holds double precision"
    raise _bad(f"a cast from {source.name} to {dtype} would lose levels; {hint}")


def _levels_of(features: ReadyFeatures, config: PreprocessorConfig) -> Levels | None:
    """The levels whose table entries the values are, None when one of them is no entry."""
    source = _READABLE[features.dtype]
    entries = _numbers(source.of_levels(level_table(config.image_mean, config.image_std)), source)
    levels = np.empty(features.values.shape, np.uint8)
    for part in _parts(levels):
        levels[part], strays = nearest_levels(_numbers(features.values[part], source), entries)
        if strays:
            return None
    return levels


def _numbers(stored: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Stored values as numbers that numpy compares, without rounding one: it knows all but bfloat16."""
    return dtype.widen(stored) if dtype.name == "bfloat16" else stored


def _parts(values: npt.NDArray[Any]) -> Iterator[slice]:
    """All patches, some at a time."""
    return (slice(begin, begin + _AT_ONCE) for begin in range(0, len(values), _AT_ONCE))


def _bad(message: str) -> ItemError:
    return ItemError("bad_features", message)
