"""Locally preprocessed items: features somebody else computed, checked as a serving engine would, then packed.

The checks are SGLang's for processor output: rank and patch shape, dtype, finite values, as many patches as the grid
says. A file is safetensors or `.npy`, told apart by its first bytes; nothing is ever unpickled.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import safetensors.torch
import torch

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.errors import ItemError
from kimik3_prep.pixels.cpu import level_table

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_features(content: bytes, thw: tuple[int, int, int], config: PreprocessorConfig) -> torch.Tensor:
    """The features in a file's bytes, `[t * h * w, 3, p, p]` in their own dtype. Raises ItemError (bad_features)."""
    values = _load(content, thw)
    patch = config.patch_size
    if values.dtype not in (*_FLOATS, torch.uint8):
        raise _bad(f"pixel_values is {values.dtype}; floating point or uint8 is needed")
    if values.ndim != 4 or tuple(values.shape[1:]) != (3, patch, patch):
        raise _bad(f"pixel_values has the shape {list(values.shape)}; [patches, 3, {patch}, {patch}] is needed")
    patches = thw[0] * thw[1] * thw[2]
    if values.shape[0] != patches:
        raise _bad(f"pixel_values has {values.shape[0]:,} patches; grid_thw {list(thw)} needs {patches:,}")
    if values.is_floating_point() and not torch.isfinite(values).all():
        raise _bad("pixel_values holds NaN or infinite values")
    return values


def _load(content: bytes, thw: tuple[int, int, int]) -> torch.Tensor:
    if content.startswith(b"\x93NUMPY"):
        try:
            array = np.load(io.BytesIO(content), allow_pickle=False)
            return torch.from_numpy(np.ascontiguousarray(array))
        except (ValueError, TypeError, EOFError, OSError, MemoryError) as error:
            raise _bad(f"not a readable .npy file: {error}") from error
    try:
        tensors: dict[str, Any] = safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise _bad(f"neither a safetensors nor an .npy file: {error}") from error
    if "pixel_values" not in tensors:
        raise _bad(f"no pixel_values in it, only {', '.join(sorted(tensors)) or 'nothing'}")
    grids = tensors.get("grid_thws")
    if grids is not None and grids.reshape(-1).tolist() != list(thw):
        raise _bad(f"its grid_thws is {grids.tolist()}; the manifest says {list(thw)}")
    values: torch.Tensor = tensors["pixel_values"]
    return values


def cast_features(values: torch.Tensor, config: PreprocessorConfig, dtype: torch.dtype) -> torch.Tensor:
    """The features in the run's dtype. Raises ItemError where that would lose levels.

    uint8 levels become the normalised values of the config's table; floats become levels when each is one. Between
    floating dtypes the cast must be exact, or all values must be levels that stay apart in the new dtype.
    """
    if values.dtype == dtype:
        return values
    table = level_table(config)
    if values.dtype == torch.uint8:
        return _values_of(values, table.to(dtype))
    if dtype != torch.uint8:
        cast = values.to(dtype)
        if torch.equal(cast.to(torch.float64), values.to(torch.float64)):
            return cast
        narrowed = table.to(dtype).to(torch.float64)
        distinct = all(len(torch.unique(channel)) == 256 for channel in narrowed)
        if distinct and _levels_of(values, table) is not None:
            return cast
    elif (levels := _levels_of(values, table)) is not None:
        return levels
    raise _bad(f"a cast from {values.dtype} to {dtype} would lose levels; use --dtype {str(values.dtype)[6:]}")


def _values_of(levels: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Table entries of uint8 levels `[n, 3, p, p]`."""
    return torch.stack([table[channel][levels[:, channel].to(torch.int32)] for channel in range(3)], 1)


def _levels_of(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor | None:
    """The uint8 levels whose table entries `values` `[n, 3, p, p]` are, None when one of them is no entry."""
    levels = torch.empty(values.shape, dtype=torch.uint8)
    for channel in range(3):
        # The table rises with the level, and stays sorted in any dtype.
        entries = table[channel].to(values.dtype).to(torch.float64)
        wanted = values[:, channel].to(torch.float64)
        found = torch.searchsorted(entries, wanted.contiguous()).clamp_(max=255)
        if not torch.equal(entries[found], wanted):
            return None
        levels[:, channel] = found.to(torch.uint8)
    return levels


def _bad(message: str) -> ItemError:
    return ItemError("bad_features", message)
