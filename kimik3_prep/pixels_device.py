"""The device backend: batches of decoded images become patches on a GPU, bit for bit what the CPU backend makes.

Three things keep it exact. Resizing is Pillow's own integer arithmetic (`resample`). Everything that would be a float
division on the device is a table made on the CPU: alpha / 255, and the normalised value of each level. And products and
sums of the background blend are separate kernels, so no device fuses them into one rounding.

Modes that Pillow resizes in other ways (palettes, bilevel, CMYK, 16 bit, a colour key) are brought to RGB on the CPU,
as the CPU backend does it, and join the batches there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from kimik3_prep.config import Background, PreprocessorConfig
from kimik3_prep.grid import Grid
from kimik3_prep.pixels_cpu import backdrop, level_table, rgb_pixels
from kimik3_prep.resample import resize_bicubic

_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


class BatchKey(NamedTuple):
    """Images that may share a batch: one mode, one source size, one grid (which follows from the size)."""

    mode: str
    width: int
    height: int
    grid: Grid


@dataclass(frozen=True, slots=True)
class Upload:
    """One image on its way to the device.

    pixels: uint8 `[h, w, c]` on the CPU, of `key.mode`; already resized and over its background where `finished`.
    """

    key: BatchKey
    pixels: torch.Tensor
    finished: bool


def upload(image: Image.Image, grid: Grid, config: PreprocessorConfig) -> Upload:
    """Take a loaded image's pixels, doing on the CPU only what the device cannot do exactly."""
    device_can = image.mode in _CHANNELS and (image.mode == "RGB" or "transparency" not in image.info)
    if not device_can:
        pixels = rgb_pixels(image, grid, config)[..., :3].contiguous()
        return Upload(BatchKey("finished", grid.new_w, grid.new_h, grid), pixels, True)
    pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, _CHANNELS[image.mode])
    return Upload(BatchKey(image.mode, image.width, image.height, grid), pixels, False)


class DeviceBackend:
    """A device with the tables one config and storage dtype need."""

    def __init__(self, device: torch.device, config: PreprocessorConfig, dtype: torch.dtype) -> None:
        self.device = device
        self._config = config
        self._dtype = dtype
        self._table = level_table(config).to(dtype).to(device)
        alpha = torch.from_numpy(np.arange(256, dtype=np.float32) / np.float32(255))
        self._alpha = alpha.to(device)
        self._beta = (1 - alpha).to(device)

    def patches(self, key: BatchKey, batch: torch.Tensor) -> torch.Tensor:
        """`[n * grid.patches, 3, p, p]` in the storage dtype from uint8 `[n, h, w, c]`, both on the device."""
        grid = key.grid
        if key.mode != "finished":
            alpha = key.mode in ("LA", "RGBA")
            if self._config.fill_stage == "before_resize":
                batch, alpha = self._rgb(batch), False
            batch = resize_bicubic(batch, (grid.new_w, grid.new_h), alpha=alpha)
            batch = self._rgb(batch)
        return self._normalised(_patchify(batch, grid, self._config.patch_size))

    def _rgb(self, batch: torch.Tensor) -> torch.Tensor:
        """uint8 `[n, h, w, 3]`: gray spread over three channels, transparent pixels over the background."""
        channels = batch.shape[3]
        colour = batch[..., :1].expand(-1, -1, -1, 3) if channels < 3 else batch[..., :3]
        background = self._config.background
        if background is None or channels in (1, 3):
            return colour
        return self._blend(colour, batch[..., -1], background)

    def _blend(self, colour: torch.Tensor, alpha: torch.Tensor, background: Background) -> torch.Tensor:
        height, width = alpha.shape[1:]
        behind = torch.from_numpy(backdrop(background, width, height)).to(self.device)
        level = alpha.to(torch.int32)
        shown = (self._beta[level] * behind).unsqueeze(-1)
        blend = self._alpha[level].unsqueeze(-1) * colour
        return blend.add_(shown).to(torch.uint8)

    def _normalised(self, levels: torch.Tensor) -> torch.Tensor:
        if self._dtype == torch.uint8:
            return levels
        out = torch.empty(levels.shape, dtype=self._dtype, device=self.device)
        for channel in range(3):
            index = levels[:, channel].to(torch.int32)
            out[:, channel] = self._table[channel][index]
        return out


def _patchify(batch: torch.Tensor, grid: Grid, patch: int) -> torch.Tensor:
    """uint8 `[n, h, w, 3]` to `[n * rows * cols, 3, p, p]`, zero padded right and below."""
    count, height, width, _ = batch.shape
    padded = torch.zeros((count, grid.rows * patch, grid.cols * patch, 3), dtype=torch.uint8, device=batch.device)
    padded[:, :height, :width] = batch
    cut = padded.view(count, grid.rows, patch, grid.cols, patch, 3).permute(0, 1, 3, 5, 2, 4)
    return cut.reshape(-1, 3, patch, patch)
