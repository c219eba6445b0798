"""Pillow's 8-bit BICUBIC resize, bit for bit, on torch tensors of any device.

Pillow does not filter bytes in floating point. It computes the weights of every output pixel in double precision,
turns them into integers of 22 fractional bits, and from there on adds and shifts integers. So the weights are made
here on the CPU, once per pair of sizes, and the passes run in int32 wherever the pixels are. Integer addition gives
the same sum in any order, which is why a GPU and Pillow's C loop cannot disagree.

    transparency       colours are multiplied by alpha first and divided by it afterwards (`_to_premultiplied`)
    weights            `_taps_of`: where each output's window starts, and its integer weights
    one pass           `_resample`: a loop over the taps, not over the pixels, in tiles of bounded size
    the whole resize   `resize_bicubic`: one pass, then the other on its rounded bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

#: Fractional bits of a weight: an int32 has 32, a byte needs 8, and 2 are spare for overshoot and sign.
_PRECISION_BITS = 22
_HALF = 1 << (_PRECISION_BITS - 1)

#: Temporary bytes of one tile. A CPU is fastest when a tile stays in its cache; other devices want few, large kernels.
_CPU_TILE_BYTES = 4 << 20
_DEVICE_TILE_BYTES = 64 << 20
#: Columns a tile should keep before it is split along the outputs: shorter runs are copied inefficiently.
_TILE_COLUMNS = 2048

#: Weight tables above this many entries are not kept: 32 of them at 4 bytes each are at most 128 MiB.
_CACHED_TAPS = 1 << 20
#: Temporary float64 values while a table is made, about 8 MiB each.
_WEIGHT_BLOCK = 1 << 20

_INT_MAX = 2**31 - 1


class _Taps(NamedTuple):
    """What every output pixel of one axis reads.

    start: int64 [out], first input of each window; `start + taps <= in` everywhere.
    weights: int32 [taps, out], fixed point; zero where a window is shorter than the longest one.
    """

    start: torch.Tensor
    weights: torch.Tensor


def resize_bicubic(pixels: torch.Tensor, size: tuple[int, int], *, alpha: bool) -> torch.Tensor:
    """What `Image.resize(size, Image.Resampling.BICUBIC)` gives for each of a batch of 8-bit images of one size.

    pixels: uint8 [n, height, width, channels], contiguous or not; never written to.
    size: `(new_width, new_height)` as in Pillow.
    alpha: whether the last channel is alpha (LA, RGBA); False for L, RGB and whatever else is plain bands.
    Returns uint8 [n, new_height, new_width, channels], contiguous, on the device of `pixels`.

    Beyond the result and the image between the passes, memory stays within a tile budget plus the weights, which are
    16 bytes per input pixel of the longer side. Raises MemoryError for the sizes whose weights Pillow cannot hold.
    """
    new_width, new_height = size
    _check(pixels, new_width, new_height, alpha)
    _, height, width, _ = pixels.shape
    if (new_width, new_height) == (width, height):
        return pixels.clone(memory_format=torch.contiguous_format)  # Pillow copies: no rounding through alpha
    if alpha:
        pixels = _to_premultiplied(pixels)
    if _rows_first(pixels.shape, new_width, new_height):
        pixels = _resize_columns(_resize_rows(pixels, new_height), new_width)
    else:
        pixels = _resize_rows(_resize_columns(pixels, new_width), new_height)
    return _from_premultiplied(pixels) if alpha else pixels


def _check(pixels: torch.Tensor, new_width: int, new_height: int, alpha: bool) -> None:
    """Raises ValueError for what cannot be resized."""
    if pixels.dtype != torch.uint8 or pixels.ndim != 4:
        raise ValueError(f"pixels are uint8 [n, height, width, channels], not {pixels.dtype} {list(pixels.shape)}")
    if min(pixels.shape[1:]) < 1 or min(new_width, new_height) < 1:
        raise ValueError(f"no side may be empty: {list(pixels.shape)} to {new_width} x {new_height}")
    if alpha and pixels.shape[3] < 2:
        raise ValueError("alpha needs a colour channel beside it")


def _rows_first(shape: torch.Size, new_width: int, new_height: int) -> bool:
    """Whether Pillow shrinks the height before it touches the width of images [n, height, width, c].

    The byte between the passes is rounded, so the order shows in the result. Pillow 13 starts with the height where
    that drops more than twice as many rows as the other pass drops columns (python-pillow/Pillow#9549); at one scale
    for both sides these are the images more than twice as high as wide. Earlier versions have other rules.
    """
    fewer_rows, fewer_columns = shape[1] - new_height, shape[2] - new_width
    return fewer_rows > 0 and fewer_rows > 2 * fewer_columns


def _resize_columns(pixels: torch.Tensor, new_width: int) -> torch.Tensor:
    """Pillow's horizontal pass, skipped at an unchanged width: uint8 [n, h, w, c] to uint8 [n, h, new_width, c]."""
    n, height, width, channels = pixels.shape
    if new_width == width:
        return pixels
    resized = pixels.new_empty((n, height, new_width, channels))
    _resample(pixels.flatten(0, 1).transpose(0, 1), resized.flatten(0, 1).transpose(0, 1))
    return resized


def _resize_rows(pixels: torch.Tensor, new_height: int) -> torch.Tensor:
    """Pillow's vertical pass, skipped at an unchanged height: uint8 [n, h, w, c] to uint8 [n, new_height, w, c]."""
    n, height, width, channels = pixels.shape
    if new_height == height:
        return pixels
    resized = pixels.new_empty((n, new_height, width, channels))
    _resample(pixels.flatten(2, 3).transpose(0, 1), resized.flatten(2, 3).transpose(0, 1))
    return resized


def _resample(source: torch.Tensor, target: torch.Tensor) -> None:
    """Filter `source` along its first axis into `target`.

    source: uint8 [in, a, b]; target: uint8 [out, a, b], written in place. Both may be transposed views.

    The sum fits an int32. Weights add up to one and the negative ones of a bicubic window are few and small: the sum
    of their absolute values peaks at 1.25 (an output halfway between two inputs), so with bytes and the rounding half
    it stays below 1.25 * 255 * 2^22 + 2^21 < 1.34e9, and so does every partial sum.
    """
    taps = _taps(source.shape[0], target.shape[0])
    start, weights = taps.start, taps.weights.to(source.device)
    for outputs, outer, inner in _tiles(source.shape, target.shape, weights.shape[0], _budget(source.device)):
        first = int(start[outputs.start])
        last = int(start[outputs.stop - 1]) + weights.shape[0]
        tile = source[first:last, outer, inner]
        strip = tile.reshape(last - first, -1).contiguous()  # rows of bytes side by side, so that a tap copies rows
        window = (start[outputs] - first).to(source.device)
        total = torch.full((window.shape[0], strip.shape[1]), _HALF, dtype=torch.int32, device=source.device)
        for tap, weight in enumerate(weights[:, outputs, None]):
            total.addcmul_(strip.index_select(0, window + tap).to(torch.int32), weight)
        total.bitwise_right_shift_(_PRECISION_BITS).clamp_(0, 255)  # an arithmetic shift: it floors negative sums
        target[outputs, outer, inner] = total.view(-1, *tile.shape[1:])


def _budget(device: torch.device) -> int:
    """Bytes of temporaries one tile may use on `device`."""
    return _CPU_TILE_BYTES if device.type == "cpu" else _DEVICE_TILE_BYTES


def _tiles(source: torch.Size, target: torch.Size, taps: int, budget: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut `target` [out, a, b] into blocks whose temporaries fit `budget` bytes: slices of outputs, a and b.

    A single output of a single column is the smallest block, whatever the budget.
    """
    count, outer, inner = target
    # Per column: 1 byte for every input the block spans, 10 for every output (one tap's bytes, the same as int32,
    # the int32 sums, the result's bytes).
    per_output = ceil(source[0] / count) + 10
    columns = max(1, min(outer * inner, _TILE_COLUMNS))
    outputs = min(count, max(1, (budget // columns - taps) // per_output))
    columns = max(1, budget // (outputs * per_output + taps))
    inner_step = min(inner, columns)
    outer_step = max(1, columns // inner_step)
    for out in range(0, count, outputs):
        for a in range(0, outer, outer_step):
            for b in range(0, inner, inner_step):
                yield (
                    slice(out, min(out + outputs, count)),
                    slice(a, min(a + outer_step, outer)),
                    slice(b, min(b + inner_step, inner)),
                )


def _taps(inputs: int, outputs: int) -> _Taps:
    """The windows and weights from `inputs` to `outputs` pixels, from the cache when they are of moderate size.

    Raises MemoryError where Pillow does: it counts the bytes of its table of doubles in an int.
    """
    longest = ceil(2 * max(inputs / outputs, 1.0)) * 2 + 1
    if outputs > _INT_MAX // (longest * 8):
        raise MemoryError(f"resizing {inputs} to {outputs} pixels needs more weights than Pillow can hold")
    if outputs * longest > _CACHED_TAPS:
        return _taps_of(inputs, outputs)
    return _cached_taps(inputs, outputs)


def _taps_of(inputs: int, outputs: int) -> _Taps:
    """Compute the windows and weights from `inputs` to `outputs` pixels, in Pillow's order of float64 operations."""
    scale = float(np.float32(inputs)) / outputs  # Pillow passes the box it resizes as C floats
    filter_scale = max(scale, 1.0)
    support = 2.0 * filter_scale
    center = (np.arange(outputs, dtype=np.float64) + 0.5) * scale
    # astype truncates towards zero like a C cast; a negative window start is then clipped either way.
    low = np.maximum((center - support + 0.5).astype(np.int64), 0)
    high = np.minimum((center + support + 0.5).astype(np.int64), inputs)
    taps = int((high - low).max())
    start = np.minimum(low, inputs - taps)  # every window gets `taps` valid inputs; the surplus weighs nothing
    weights = np.empty((taps, outputs), dtype=np.int32)
    block = max(1, _WEIGHT_BLOCK // taps)
    for first in range(0, outputs, block):
        rows = slice(first, first + block)
        position = start[rows, None] + np.arange(taps)
        kernel = _bicubic((position - center[rows, None] + 0.5) * (1.0 / filter_scale))
        kernel[(position < low[rows, None]) | (position >= high[rows, None])] = 0.0
        # `accumulate` adds from left to right as a C loop does; `sum` would add in pairs and round differently.
        kernel /= np.add.accumulate(kernel, axis=1)[:, -1:]
        kernel *= 1 << _PRECISION_BITS
        weights[:, rows] = (kernel + np.copysign(0.5, kernel)).T.astype(np.int32)  # truncates: half away from zero
    return _Taps(torch.from_numpy(start), torch.from_numpy(weights))


_cached_taps = lru_cache(maxsize=32)(_taps_of)


def _bicubic(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Keys' cubic with a = -0.5, in the factored form and the order of operations that Pillow uses."""
    t = np.abs(distance)
    near = ((-0.5 + 2.0) * t - (-0.5 + 3.0)) * t * t + 1.0
    far = (((t - 5.0) * t + 8.0) * t - 4.0) * -0.5
    return np.where(t < 1.0, near, np.where(t < 2.0, far, 0.0))


def _to_premultiplied(pixels: torch.Tensor) -> torch.Tensor:
    """Colours times alpha / 255, rounded: Pillow's conversion to RGBa or La. uint8 [n, h, w, c] in and out.

    Hidden colours under alpha 0 vanish here, so that they cannot bleed into their neighbours.
    """
    premultiplied = torch.empty_like(pixels, memory_format=torch.contiguous_format)
    for source, target in _pixel_blocks(pixels, premultiplied):
        alpha = source[-1].to(torch.int32)
        for colour, result in zip(source[:-1], target[:-1], strict=True):
            product = (colour.to(torch.int32) * alpha).add_(128)
            result.copy_(product.add_(product >> 8).bitwise_right_shift_(8))
        target[-1].copy_(source[-1])
    return premultiplied


def _from_premultiplied(pixels: torch.Tensor) -> torch.Tensor:
    """Colours times 255 / alpha, truncated and clipped: Pillow's conversion back. uint8 [n, h, w, c] in and out."""
    straight = torch.empty_like(pixels, memory_format=torch.contiguous_format)
    for source, target in _pixel_blocks(pixels, straight):
        alpha = source[-1].to(torch.int32)
        divisor = alpha.masked_fill_(alpha == 0, 255)  # Pillow leaves colours alone under alpha 0 and 255
        for colour, result in zip(source[:-1], target[:-1], strict=True):
            widened = colour.to(torch.int32).mul_(255)
            result.copy_(widened.div_(divisor, rounding_mode="floor").clamp_(max=255))
        target[-1].copy_(source[-1])
    return straight


def _pixel_blocks(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Matching runs of pixels of two tensors [n, h, w, c] as bands, uint8 [c, pixels]; those of `target` are views."""
    channels = source.shape[3]
    run = max(1, _budget(source.device) // 16)  # per pixel, up to four int32 values of a single band live at once
    pixels, results = source.reshape(-1, channels), target.view(-1, channels)
    for first in range(0, len(pixels), run):
        yield pixels[first : first + run].t(), results[first : first + run].t()
