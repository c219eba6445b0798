"""The CPU backend: a decoded image becomes patches, written into a given slice of the shard.

The steps are the checkpoint's own processor's, in its order and with its rounding: resize in the image's own mode, fill
the background behind transparency, pad with zeros, normalise, cut into patches. Pillow does the resizing and the
conversions, as it does there; everything after is arithmetic on 8-bit levels, and there are only 256 of those.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from kimik3_prep.config import Background, PreprocessorConfig
from kimik3_prep.grid import Grid

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
}

_BAND = 256  # image rows composited at a time, so that float temporaries stay small
_FLAT = {"white": 255, "black": 0, "gray": 128}


def write_patches(image: Image.Image, grid: Grid, config: PreprocessorConfig, out: torch.Tensor) -> None:
    """Preprocess one loaded image into `out`, a contiguous `[grid.patches, 3, p, p]` tensor of any storage dtype.

    uint8 receives the levels before normalisation, the other dtypes the normalised values, rounded once to nearest.
    """
    pixels = rgb_pixels(image, grid, config)
    patchify(pixels, grid, config, out)


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


def patchify(pixels: torch.Tensor, grid: Grid, config: PreprocessorConfig, out: torch.Tensor) -> None:
    """Cut uint8 `[h, w, >= 3]` pixels into `out` `[patches, 3, p, p]`, zero padded right and below, normalised.

    One row of patches at a time: its levels stay in the processor's cache between the cut and the normalisation.
    """
    levels = out if out.dtype == torch.uint8 else None
    scratch = None if levels is not None else torch.empty((grid.cols, *out.shape[1:]), dtype=torch.uint8)
    normalise = None if levels is not None else Normaliser.of(config, out.dtype)
    for row in range(grid.rows):
        target = out[row * grid.cols : (row + 1) * grid.cols]
        if scratch is None or normalise is None:
            _cut_row(pixels, row, target)
        else:
            _cut_row(pixels, row, scratch)
            normalise(scratch, target)


def _cut_row(pixels: torch.Tensor, row: int, out: torch.Tensor) -> None:
    """One row of patches, uint8 `[cols, 3, p, p]`."""
    width = pixels.shape[1]
    patch = out.shape[-1]
    band = pixels[row * patch : (row + 1) * patch, :, :3]
    whole = width // patch
    if band.shape[0] == patch:
        out[:whole].copy_(band[:, : whole * patch].reshape(patch, whole, patch, 3).permute(1, 3, 0, 2))
        if whole == out.shape[0]:
            return
        out[whole:].zero_()
        if width > whole * patch:
            rest = band[:, whole * patch :]
            out[whole, :, :, : rest.shape[1]].copy_(rest.permute(2, 0, 1))
        return
    out.zero_()
    full = torch.zeros((patch, out.shape[0] * patch, 3), dtype=torch.uint8)
    full[: band.shape[0], :width].copy_(band)
    out.copy_(full.view(patch, out.shape[0], patch, 3).permute(1, 3, 0, 2))


def level_table(config: PreprocessorConfig) -> torch.Tensor:
    """Normalised value of each level, float32 `[3, 256]`: the checkpoint's three roundings, one after the other."""
    levels = (np.arange(256) / 255.0).astype(np.float32)
    mean = np.array(config.image_mean, np.float64)[:, None]
    std = np.array(config.image_std, np.float64)[:, None]
    centred = (levels.astype(np.float64) - mean).astype(np.float32)
    return torch.from_numpy((centred.astype(np.float64) * (1.0 / std)).astype(np.float32))


class Normaliser:
    """Levels to normalised values, exactly the table's, by the quickest way that provably gives it.

    For the published constants `level / 127.5 - 1` in float32 gives all 256 values bit for bit, which the constructor
    checks; for any other constants the table itself is read.
    """

    def __init__(self, table: torch.Tensor, dtype: torch.dtype) -> None:
        self._table = table.to(dtype)
        straight = torch.empty(256)
        torch.div(torch.arange(256, dtype=torch.uint8), 127.5, out=straight).sub_(1.0)
        self._straight = all(torch.equal(channel, straight) for channel in table)

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(config: PreprocessorConfig, dtype: torch.dtype) -> Normaliser:
        """The normaliser of a config and storage dtype."""
        return Normaliser(level_table(config), dtype)

    def __call__(self, levels: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of uint8 `levels` `[n, 3, p, p]` into `out` of the same shape."""
        if not self._straight:
            for channel in range(3):
                index = levels[:, channel].flatten().to(torch.int32)
                out[:, channel].copy_(self._table[channel].index_select(0, index).view(out[:, channel].shape))
        elif out.dtype == torch.float32:
            torch.div(levels, 127.5, out=out).sub_(1.0)
        else:
            out.copy_(torch.div(levels, 127.5).sub_(1.0))


def lost_levels(config: PreprocessorConfig, dtype: str) -> int:
    """How many of the 256 levels of a channel share a stored value with another one; 0 means lossless storage."""
    if dtype == "uint8":
        return 0
    table = level_table(config).to(TORCH_DTYPES[dtype])
    return max(256 - len(torch.unique(channel.to(torch.float64))) for channel in table)
