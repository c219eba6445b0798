"""The device backend: batches of decoded images become patches on a GPU, bit for bit what the CPU backend makes.

Three things keep it exact. Resizing is Pillow's own integer arithmetic (`resample`). Everything that would be a float
division on the device is a table made on the CPU: alpha / 255, and the normalised value of each level. And products and
sums of the background blend are separate kernels, so no device fuses them into one rounding.

Modes that Pillow resizes in other ways (palettes, bilevel, CMYK, 16 bit, a colour key) are brought to RGB on the CPU,
as the CPU backend does it, and join the batches there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from kimik3_prep.checkpoint.config import Background, PreprocessorConfig
from kimik3_prep.checkpoint.grid import Grid
from kimik3_prep.checkpoint.levels import DTYPES, Levels, level_table
from kimik3_prep.errors import ItemError
from kimik3_prep.pixels.cpu import FINISHED, backdrop
from kimik3_prep.pixels.resample import resize_bicubic
from kimik3_prep.pixels.tensors import to_tensor, torch_dtype


class BatchKey(NamedTuple):
    """Images that may share a batch: one mode, one source size, one grid (which follows from the size)."""

    mode: str
    width: int
    height: int
    grid: Grid


class DeviceBackend:
    """A device with the tables one config and storage dtype need."""

    def __init__(self, device: torch.device, config: PreprocessorConfig, dtype: str) -> None:
        self.device = device
        self._config = config
        self._dtype = torch_dtype(dtype)
        table = level_table(config.image_mean, config.image_std)
        self._table = to_tensor(DTYPES[dtype].of_levels(table), dtype).to(device)
        alpha = torch.from_numpy(np.arange(256, dtype=np.float32) / np.float32(255))
        self._alpha = alpha.to(device)
        self._beta = (1 - alpha).to(device)

    def patches(self, key: BatchKey, batch: torch.Tensor) -> torch.Tensor:
        """`[n * grid.patches, 3, p, p]` in the storage dtype from uint8 `[n, h, w, c]`, both on the device."""
        grid = key.grid
        if key.mode != FINISHED:
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


@functools.lru_cache(maxsize=16)
def device_backend(device: str, config: PreprocessorConfig, dtype: str) -> DeviceBackend:
    """Return the backend of a torch device, made once for each config and storage dtype."""
    return DeviceBackend(torch.device(device), config, dtype)


def _patchify(batch: torch.Tensor, grid: Grid, patch: int) -> torch.Tensor:
    """uint8 `[n, h, w, 3]` to `[n * rows * cols, 3, p, p]`, zero padded right and below."""
    count, height, width, _ = batch.shape
    padded = torch.zeros((count, grid.rows * patch, grid.cols * patch, 3), dtype=torch.uint8, device=batch.device)
    padded[:, :height, :width] = batch
    cut = padded.view(count, grid.rows, patch, grid.cols, patch, 3).permute(0, 1, 3, 5, 2, 4)
    return cut.reshape(-1, 3, patch, patch)


class Batches:
    """Collects uploads of one shape until a batch is full, runs it, and hands out each image's patches.

    emit: called with an image's tag and its patches on the device, or the ItemError it ended with.
    note: called with a sentence when a batch had to be made smaller.
    On CUDA a batch computes while the one before it is copied out.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        batch_bytes: int,
        emit: Callable[[Any, torch.Tensor | ItemError], None],
        note: Callable[[str], None],
    ) -> None:
        self._backend, self._limit, self._emit, self._note = backend, batch_bytes, emit, note
        self._waiting: dict[BatchKey, list[tuple[Any, torch.Tensor]]] = {}
        self._held = 0  # bytes of all waiting pixels
        self._running: _Running | None = None
        self._down = torch.cuda.Stream(backend.device) if backend.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def add(self, tag: Any, mode: str, pixels: Levels, grid: Grid) -> None:
        """Queue an image from `pixels_for_device`.

        A batch runs when its shape has enough images, or when too much waits in all.
        """
        height, width = pixels.shape[:2]
        key = BatchKey(mode, width, height, grid)
        self._waiting.setdefault(key, []).append((tag, torch.from_numpy(pixels)))
        self._held += pixels.size
        if _bytes(self._waiting[key]) >= self._limit:
            self._run(key)
        elif self._held >= 2 * self._limit:
            self._run(max(self._waiting, key=lambda key: _bytes(self._waiting[key])))

    def finish(self) -> None:
        """Run all that waits and hand out everything."""
        for key in list(self._waiting):
            self._run(key)
        self._hand_out()

    def _run(self, key: BatchKey) -> None:
        members = self._waiting.pop(key)
        self._held -= _bytes(members)
        todo = [members]
        while todo:
            part = todo.pop()
            started = self._start(key, part)
            if started is not None:
                self._hand_out()
                self._running = started
            elif len(part) == 1:
                message = f"{self._backend.device} has too little memory for this image alone"
                self._emit(part[0][0], ItemError("out_of_memory", message))
            else:
                half = len(part) // 2
                self._note(f"{self._backend.device} ran out of memory at a batch of {len(part)}; going on with {half}")
                todo += [part[half:], part[:half]]

    def _start(self, key: BatchKey, members: list[tuple[Any, torch.Tensor]]) -> _Running | None:
        """Upload and compute; None when the device has not enough memory."""
        device = self._backend.device
        try:
            batch = torch.stack([pixels for _, pixels in members])
            if device.type == "cuda":
                batch = batch.pin_memory()
            patches = self._backend.patches(key, batch.to(device, non_blocking=True))
        except torch.OutOfMemoryError:
            self._hand_out()  # what is finished need not take up memory while a smaller batch is tried
            if device.type == "cuda":
                torch.cuda.empty_cache()
            return None
        computed = None
        if self._down is not None:
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record(torch.cuda.current_stream(device))
            patches.record_stream(self._down)
        return _Running([tag for tag, _ in members], patches, computed)

    def _hand_out(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        count = running.patches.shape[0] // len(running.tags)
        with torch.cuda.stream(self._down):  # None is no stream: the CPU and MPS have one order only
            if self._down is not None and running.computed is not None:
                self._down.wait_event(running.computed)
            for index, tag in enumerate(running.tags):
                self._emit(tag, running.patches[index * count : (index + 1) * count])


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch on the device. `computed` is passed when its patches are there (CUDA only)."""

    tags: list[Any]
    patches: torch.Tensor
    computed: torch.cuda.Event | None


def _bytes(members: list[tuple[Any, torch.Tensor]]) -> int:
    return sum(pixels.numel() for _, pixels in members)


def resizes_like_pillow() -> bool:
    """Whether this Pillow resizes as `resample` does; before version 13 it takes the two passes in another order."""
    random = np.random.default_rng(0)
    for height, width, new in ((300, 40, (20, 150)), (64, 200, (100, 32))):
        pixels = random.integers(0, 256, (height, width, 4), dtype=np.uint8)
        expected = np.asarray(Image.fromarray(pixels, "RGBA").resize(new, Image.Resampling.BICUBIC))
        if not np.array_equal(resize_bicubic(torch.from_numpy(pixels)[None], new, alpha=True)[0].numpy(), expected):
            return False
    return True
