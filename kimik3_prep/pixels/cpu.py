"""The CPU backend: a decoded image becomes patches, written into a given slice of the shard.

The steps are the checkpoint's own processor's, in its order and with its rounding: resize in the image's own mode, fill
the background behind transparency, pad with zeros, normalise, cut into patches. Pillow does the resizing and the
conversions, as it does there; everything after is arithmetic on 8-bit levels, and there are only 256 of those.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from kimik3_prep.checkpoint import levels
from kimik3_prep.checkpoint.config import Background, PreprocessorConfig
from kimik3_prep.checkpoint.grid import Grid

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}

_BAND = 256  # image rows composited at a time, so that float temporaries stay small
_BLOCK_BYTES = 2 << 20  # of one block of patches: smaller ones cost threads more in turns at the interpreter lock
_FLAT = {"white": 255, "black": 0, "gray": 128}


def write_patches(image: Image.Image, grid: Grid, config: PreprocessorConfig, out: torch.Tensor) -> None:
    """Preprocess one loaded image into `out`, a contiguous `[grid.patches, 3, p, p]` tensor of any storage dtype.

    uint8 receives the levels before normalisation, the other dtypes the normalised values, rounded once to nearest.
    """
    begin = 0
    for block in PatchMaker(config, out.dtype).blocks(rgb_pixels(image, grid, config), grid):
        out[begin : begin + len(block)] = block
        begin += len(block)


def rgb_pixels(image: Image.Image, grid: Grid, config: PreprocessorConfig) -> torch.Tensor:
    """The image resized, over its background: uint8 `[new_h, new_w, >= 3]`, a view whose first three channels are RGB.

    Valid as long as `image` or the tensor is held. Source of the order of steps: the checkpoint's processor.
    """
    if config.fill_stage == "before_resize":
        image = fill_background(image, config.background)
    size = (grid.new_w, grid.new_h)
    if image.size != size:  # an unchanged size is no operation at all in Pillow, not even a premultiply round trip
        image = image.resize(size, Image.Resampling.BICUBIC)
    if config.fill_stage == "after_resize":
        image = fill_background(image, config.background)
    return _view(image)


def fill_background(image: Image.Image, background: Background | None) -> Image.Image:
    """The image as RGB. Transparent pixels show `background`; None drops the alpha channel.

    An RGB image stays untouched even when it carries a transparent colour key, as in the checkpoint's processor.
    """
    if image.mode == "RGB":
        return image
    transparent = "A" in image.getbands() or "transparency" in image.info
    if background is None or not transparent:
        return image.convert("RGB")
    rgba = np.asarray(image.convert("RGBA"))
    out = np.empty((*rgba.shape[:2], 3), np.uint8)
    for top in range(0, rgba.shape[0], _BAND):
        band = rgba[top : top + _BAND]
        behind = backdrop(background, band.shape[1], band.shape[0], top)
        # Two products and a sum, each rounded to float32 by itself: numpy never fuses them.
        alpha = band[..., 3:].astype(np.float32) / np.float32(255)
        blend = alpha * band[..., :3].astype(np.float32) + (np.float32(1) - alpha) * behind[..., None]
        out[top : top + _BAND] = blend.astype(np.uint8)
    return Image.fromarray(out, "RGB")


def backdrop(background: Background, width: int, height: int, top: int = 0) -> npt.NDArray[np.float32]:
    """Gray levels behind a transparent image, float32 `[height, width]`, for the rows from `top` on."""
    if background.pattern in _FLAT:
        return np.full((height, width), _FLAT[background.pattern], np.float32)
    square = background.square_size
    odd = ((np.arange(top, top + height) // square)[:, None] + np.arange(width) // square) % 2
    even_level, odd_level = background.white_value, background.gray_value
    if not background.square_on_top_left:
        even_level, odd_level = odd_level, even_level
    return np.where(odd == 1, np.float32(odd_level), np.float32(even_level))


def _view(image: Image.Image) -> torch.Tensor:
    """An RGB image's pixels as uint8 `[h, w, 4]` without a copy where Pillow can lend them, else `[h, w, 3]`."""
    try:
        lent = pa.array(image)
    except ValueError:  # the pixels lie in several blocks: allocated before this process asked for one
        return torch.from_numpy(np.array(image))
    return from_dlpack(lent.flatten()).view(image.height, image.width, 4)


# --- patches ------------------------------------------------------------------------------------------------------


class PatchMaker:
    """Cuts RGB pixels into normalised patches, a block at a time, in buffers it keeps: for one thread.

    A block and its levels stay in the processor's second cache between the steps, and memory that is used again costs
    no page faults; both cost more than the arithmetic.
    """

    def __init__(self, config: PreprocessorConfig, dtype: torch.dtype) -> None:
        self._patch = config.patch_size
        self._dtype = dtype
        self._normalise = None if dtype == torch.uint8 else Normaliser(level_table(config), dtype)
        self._buffers: dict[str, torch.Tensor] = {}

    def blocks(self, pixels: torch.Tensor, grid: Grid) -> Iterator[torch.Tensor]:
        """All patches of uint8 `[h, w, >= 3]` pixels in order, zero padded right and below.

        Yields contiguous `[n, 3, p, p]` blocks of the storage dtype, each valid until the next is asked for.
        """
        patch, cols = self._patch, grid.cols
        rows = max(1, min(grid.rows, _BLOCK_BYTES // (cols * 3 * patch * patch * self._dtype.itemsize)))
        planes = self._buffer("planes", torch.uint8, 3, rows * patch, cols * patch).numpy()
        spare = self._buffer("spare", torch.int32, rows * patch, pixels.shape[1]).numpy().view(np.uint32)
        levels = self._buffer("levels", torch.uint8, rows * cols, 3, patch, patch)
        values = levels if self._normalise is None else self._buffer("values", self._dtype, *levels.shape)
        planes[:, :, pixels.shape[1] :] = 0
        source = pixels.numpy()
        for first in range(0, grid.rows, rows):
            count = min(rows, grid.rows - first)
            _separate(source[first * patch : (first + count) * patch], planes, spare)
            _gather(planes[:, : count * patch], levels[: count * cols].numpy())
            block = values[: count * cols]
            if self._normalise is not None:
                self._normalise(levels[: count * cols], block)
            yield block

    def _buffer(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A view of the buffer of that name, which grows where it is too small."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=dtype)
        return self._buffers[name][:size].view(shape)


def _separate(band: npt.NDArray[np.uint8], planes: npt.NDArray[np.uint8], spare: npt.NDArray[np.uint32]) -> None:
    """Rows of pixels `[n, w, >= 3]` to one plane a channel, `[3, >= n, >= w]`; the missing rows become zeros."""
    rows, width = band.shape[:2]
    planes[:, rows:] = 0
    target = planes[:, :rows, :width]
    if band.shape[2] == 4 and band.flags.c_contiguous and sys.byteorder == "little":
        # Whole pixels as integers: shifting and narrowing runs on vectors, picking every fourth byte does not.
        whole = band.view(np.uint32)[..., 0]
        np.copyto(target[0], whole, casting="unsafe")
        for channel in (1, 2):
            shifted = np.right_shift(whole, 8 * channel, out=spare[:rows])
            np.copyto(target[channel], shifted, casting="unsafe")
        return
    for channel in range(3):
        target[channel] = band[..., channel]


def _gather(planes: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    """Planes `[3, rows * p, cols * p]` to patches `[rows * cols, 3, p, p]`, a run of p bytes as one element."""
    patch = out.shape[-1]
    run = np.dtype((np.void, patch))
    runs = planes.reshape(3, planes.shape[1] // patch, patch, -1, patch).view(run)[..., 0]
    rows, cols = runs.shape[1], runs.shape[3]
    out.reshape(rows, cols, 3, patch, patch).view(run)[..., 0] = runs.transpose(1, 3, 0, 2)


def level_table(config: PreprocessorConfig) -> torch.Tensor:
    """`levels.level_table` of a config, as a float32 tensor `[3, 256]`."""
    return torch.from_numpy(levels.level_table(config.image_mean, config.image_std))


class Normaliser:
    """Levels to normalised values, exactly the table's, by the quickest way that provably gives it.

    For the published constants `level / 127.5 - 1` in float32 gives all 256 values bit for bit, which the constructor
    checks; for any other constants the table itself is read.
    """

    def __init__(self, table: torch.Tensor, dtype: torch.dtype) -> None:
        self._table = table.to(dtype)
        straight = torch.empty(256).copy_(torch.arange(256, dtype=torch.uint8)).div_(127.5).sub_(1.0)
        self._straight = all(torch.equal(channel, straight) for channel in table)

    def __call__(self, levels: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of uint8 `levels` `[n, 3, p, p]` into `out` of the same shape."""
        if not self._straight:
            for channel in range(3):
                index = levels[:, channel].flatten().to(torch.int32)
                out[:, channel].copy_(self._table[channel].index_select(0, index).view(out[:, channel].shape))
        elif out.dtype == torch.float32:
            out.copy_(levels).div_(127.5).sub_(1.0)
        else:
            out.copy_(levels.to(torch.float32).div_(127.5).sub_(1.0))


def lost_levels(config: PreprocessorConfig, dtype: str) -> int:
    """How many of the 256 levels of a channel share a stored value with another one; 0 means lossless storage."""
    if dtype == "uint8":
        return 0
    table = level_table(config).to(TORCH_DTYPES[dtype])
    return max(256 - len(torch.unique(channel.to(torch.float64))) for channel in table)
