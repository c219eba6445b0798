"""Arrays of stored values as tensors, and back: the one place where torch's dtypes meet `DTYPES`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kimik3_prep.checkpoint.levels import DTYPES


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype of that name in `DTYPES`. Raises KeyError for any other name."""
    dtype: torch.dtype = getattr(torch, DTYPES[name].name)
    return dtype


def to_tensor(stored: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    """Stored values of `dtype` as a tensor on the same memory."""
    return torch.from_numpy(stored).view(torch_dtype(dtype))


def to_array(values: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU tensor of a storage dtype as stored values, on the same memory where it is contiguous."""
    dtype = DTYPES[str(values.dtype).removeprefix("torch.")]
    raw: npt.NDArray[np.uint8] = values.contiguous().view(torch.uint8).numpy()
    return raw.view(dtype.numpy)
