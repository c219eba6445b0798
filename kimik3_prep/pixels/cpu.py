"""The CPU backend: a decoded image becomes patches, written into a given slice of the shard.

The steps are the checkpoint's own processor's, in its order and with its rounding: resize in the image's own mode, fill
the background behind transparency, pad with zeros, normalise, cut into patches. Pillow does the resizing and the
conversions, as it does there; everything after is arithmetic on 8-bit levels, and there are only 256 of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from kimik3_prep.checkpoint.config import Background, PreprocessorConfig
from kimik3_prep.checkpoint.grid import Grid
from kimik3_prep.checkpoint.levels import DTYPES, Levels, Normaliser, level_table
from kimik3_prep.pixels.lent import lent_pixels

_BAND = 256  # image rows composited at a time, so that float temporaries stay small
_BLOCK_PIXELS = 1 << 16  # of a block of patches: numpy's loops are long enough, and the block stays in a cache
_DEVICE_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_FLAT = {"white": 255, "black": 0, "gray": 128}


#: The mode of pixels that are resized and over their background; see `pixels_for_device`.
FINISHED = "finished"


def write_patches(
    image: Image.Image, grid: Grid, config: PreprocessorConfig, out: npt.NDArray[Any], dtype: str
) -> None:
    """Preprocess one loaded image into `out`, `[grid.patches, 3, p, p]` of `DTYPES[dtype].numpy`.

    uint8 receives the levels before normalisation, the other dtypes the normalised values, rounded once to nearest.
    """
    begin = 0
    for block in PatchMaker(config, dtype).blocks(rgb_pixels(image, grid, config), grid):
        out[begin : begin + len(block)] = block
        begin += len(block)


def rgb_pixels(image: Image.Image, grid: Grid, config: PreprocessorConfig) -> Levels:
    """The image resized, over its background: uint8 `[new_h, new_w, >= 3]`, of which the first three channels are RGB.

    The order of the steps is the checkpoint's processor's.
    """
    if config.fill_stage == "before_resize":
        image = fill_background(image, config.background)
    size = (grid.new_w, grid.new_h)
    if image.size != size:  # an unchanged size is no operation at all in Pillow, not even a premultiply round trip
        image = image.resize(size, Image.Resampling.BICUBIC)
    if config.fill_stage == "after_resize":
        image = fill_background(image, config.background)
    return _pixels_of(image)


def pixels_for_device(image: Image.Image, grid: Grid, config: PreprocessorConfig) -> tuple[str, Levels]:
    """What a device is given of a loaded image: its mode and its pixels, uint8 `[h, w, c]`, contiguous.

    A mode that no device resizes exactly is resized and over its background already, and called `FINISHED`.
    """
    exact = image.mode in _DEVICE_CHANNELS and (image.mode == "RGB" or "transparency" not in image.info)
    if not exact:
        return FINISHED, np.ascontiguousarray(rgb_pixels(image, grid, config)[..., :3])
    return image.mode, np.array(image).reshape(image.height, image.width, _DEVICE_CHANNELS[image.mode])


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


def _pixels_of(image: Image.Image) -> Levels:
    """An RGB image's pixels as uint8 `[h, w, 4]`, lent by Pillow where it can, else `[h, w, 3]`, a copy."""
    lent = lent_pixels(image)
    return np.array(image) if lent is None else lent


# --- patches ------------------------------------------------------------------------------------------------------


class PatchMaker:
    """Cuts RGB pixels into normalised patches, a block at a time, in buffers it keeps: for one thread.

    A block stays in the processor's second-level cache from step to step.
    """

    def __init__(self, config: PreprocessorConfig, dtype: str) -> None:
        self._patch = config.patch_size
        self._normalise = None if DTYPES[dtype].holds_levels else Normaliser(_table(config), DTYPES[dtype])
        self._dtype = DTYPES[dtype].numpy
        self._buffers: dict[str, npt.NDArray[Any]] = {}

    def blocks(self, pixels: Levels, grid: Grid) -> Iterator[npt.NDArray[Any]]:
        """All patches of uint8 `[h, w, >= 3]` pixels in order, zero padded right and below.

        Yields contiguous `[n, 3, p, p]` blocks of the storage dtype, each valid until the next is asked for.
        """
        patch, cols = self._patch, grid.cols
        whole = _whole_pixels(pixels)
        rows = max(1, min(grid.rows, _BLOCK_PIXELS // (cols * patch * patch)))
        tiles = self._buffer("tiles", "<u4", rows, cols, patch, patch)
        levels = self._buffer("levels", np.uint8, rows * cols, 3, patch, patch)
        for first in range(0, grid.rows, rows):
            count = min(rows, grid.rows - first)
            _cut(whole[first * patch : (first + count) * patch], tiles[:count])
            block = levels[: count * cols]
            _separate(tiles[:count].reshape(-1, patch, patch), block)
            if self._normalise is not None:
                block = self._normalise(block, self._buffer("values", self._dtype, *block.shape))
            yield block

    def _buffer(self, name: str, dtype: npt.DTypeLike, *shape: int) -> npt.NDArray[Any]:
        """A view of the buffer of that name, which grows where it is too small."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, dtype)
        return self._buffers[name][:size].reshape(shape)


def _whole_pixels(pixels: Levels) -> npt.NDArray[np.uint32]:
    """Uint8 `[h, w, >= 3]` as one integer a pixel, `[h, w]`: `[1, 2, 3, 0]` becomes 0x030201.

    Whole pixels move in a quarter of the steps, and shifts run on vectors where picking every fourth byte does not.
    """
    if pixels.shape[2] != 4 or not pixels.flags.c_contiguous:
        four = np.zeros((*pixels.shape[:2], 4), np.uint8)
        four[..., :3] = pixels[..., :3]
        pixels = four
    return pixels.view("<u4")[..., 0]


def _cut(band: npt.NDArray[np.uint32], tiles: npt.NDArray[np.uint32]) -> None:
    """Rows of pixels to tiles `[rows, cols, p, p]`. Where the band is smaller than the tiles, zeros fill up."""
    whole, rest = divmod(len(band), tiles.shape[2])
    _cut_rows(band[: len(band) - rest], tiles[:whole])
    tiles[whole:] = 0
    if rest:
        _cut_rows(band[len(band) - rest :], tiles[whole : whole + 1, :, :rest])


def _cut_rows(band: npt.NDArray[np.uint32], tiles: npt.NDArray[np.uint32]) -> None:
    """Rows of pixels `[rows * n, <= cols * p]` to `[rows, cols, n, p]`; where columns are missing, zeros fill up."""
    rows, _, height, patch = tiles.shape
    whole, rest = divmod(band.shape[1], patch)
    lines = band.reshape(rows, height, band.shape[1])
    run = np.dtype((np.void, 4 * patch))  # a patch's part of a line moves as one element
    tiles.view(run)[:, :whole, :, 0] = lines[..., : whole * patch].view(run).swapaxes(1, 2)
    tiles[:, whole:] = 0
    if rest:
        tiles[:, whole, :, :rest] = lines[..., whole * patch :]


def _separate(tiles: npt.NDArray[np.uint32], levels: Levels) -> None:
    """Whole pixels `[n, p, p]`, which are used up, to `[n, 3, p, p]`, a plane for each channel."""
    np.copyto(levels[:, 0], tiles, casting="unsafe")  # keeps the lowest byte
    for channel in (1, 2):
        np.right_shift(tiles, 8, out=tiles)
        np.copyto(levels[:, channel], tiles, casting="unsafe")


def lost_levels(config: PreprocessorConfig, dtype: str) -> int:
    """How many of the 256 levels of a channel share a stored value with another one; 0 means lossless storage."""
    stored = DTYPES[dtype].of_levels(_table(config))
    return max(256 - len(np.unique(DTYPES[dtype].widen(channel))) for channel in stored)


def _table(config: PreprocessorConfig) -> npt.NDArray[np.float32]:
    return level_table(config.image_mean, config.image_std)
