"""pixels_device.py: the device kernels, run on the CPU device, against the CPU backend and the golden bytes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from conftest import GOLDEN, cfg_and_config, golden_cases, in_mode, picture
from PIL import Image

from kimik3_prep.checkpoint.config import PreprocessorConfig, load_config
from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import ItemError
from kimik3_prep.images.decode import decode
from kimik3_prep.pixels import device as pixels_device
from kimik3_prep.pixels.cpu import pixels_for_device, write_patches
from kimik3_prep.pixels.device import Batches, DeviceBackend, resizes_like_pillow
from kimik3_prep.pixels.tensors import to_tensor

CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"),
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]
IMAGES = [case for case in golden_cases("images") if case["expect"] == "ok"]
CONFIGS = [case for case in golden_cases("configs") if case["expect"] == "ok"]


def on_cpu(image: Image.Image, config: PreprocessorConfig, dtype: str) -> torch.Tensor:
    grid = config.grid_rule().grid(*image.size)
    out = np.empty((grid.patches, 3, config.patch_size, config.patch_size), DTYPES[dtype].numpy)
    write_patches(image, grid, config, out, dtype)
    return to_tensor(out, dtype)


def on_device(
    images: list[Image.Image],
    config: PreprocessorConfig,
    dtype: str,
    device: torch.device = CPU,
    batch_bytes: int = 1 << 28,
) -> list[torch.Tensor]:
    """The patches of each image through shared batches."""
    results: dict[int, torch.Tensor] = {}

    def emit(tag: Any, patches: torch.Tensor | ItemError) -> None:
        assert isinstance(patches, torch.Tensor)
        assert tag not in results
        results[tag] = patches.cpu().clone()

    batches = Batches(DeviceBackend(device, config, dtype), batch_bytes, emit, lambda text: None)
    for number, image in enumerate(images):
        grid = config.grid_rule().grid(*image.size)
        batches.add(number, *pixels_for_device(image, grid, config), grid)
    batches.finish()
    return [results[number] for number in range(len(images))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", IMAGES, ids=lambda case: case["id"])
def test_golden_images(case: dict[str, Any], device: torch.device, published: PreprocessorConfig) -> None:
    image = decode(str(GOLDEN / case["file"])).image
    (values,) = on_device([image], published, "float32", device)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == case["sha256"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case["id"])
def test_golden_configs(case: dict[str, Any], device: torch.device) -> None:
    config, _ = load_config(GOLDEN / case["file"])
    for name, expected in case["features"].items():
        (values,) = on_device([decode(str(GOLDEN / "images" / name)).image], config, "float32", device)
        assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == expected["sha256"]


def random_image(random: np.random.Generator) -> Image.Image:
    """A picture of any mode and a size that is resized, or not, in one direction, the other, or both."""
    shapes = ((1, 400), (1, 30), (20, 90), (200, 700))
    width, height = (int(random.integers(*shapes[random.integers(4)])) for _ in range(2))
    modes = ("RGB", "RGBA", "LA", "L", "P", "1", "CMYK", "I;16", "PA", "F", "YCbCr")
    mode = modes[random.choice(len(modes), p=[0.3, 0.3, 0.1, 0.1, *[0.2 / 7] * 7])]
    image = in_mode(mode, width, height, int(random.integers(1 << 30)))
    if mode in ("RGBA", "LA") and random.integers(3) == 0:
        image.putalpha(int(random.choice([0, 255, 128])))
    if mode in ("L", "P", "RGB") and random.integers(4) == 0:
        image.info["transparency"] = (0, 0, 0) if mode == "RGB" else int(random.integers(256))
    return image


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_random_images_in_mixed_batches(seed: int, device: torch.device) -> None:
    """Forty runs of ten images: four hundred sizes and modes, several images of one shape among them."""
    random = np.random.default_rng(seed)
    background = {
        "pattern": str(random.choice(["white", "black", "gray", "chessboard", "chessboard"])),
        "chessboard_square_size": int(random.integers(1, 30)),
        "chessboard_square_on_top_left": bool(random.integers(2)),
    }
    _, config = cfg_and_config(
        transparent_bg_config=background if random.integers(6) else None,
        transparent_bg_fill_stage=str(random.choice(["before_resize", "after_resize"])),
        in_patch_limit=int(random.integers(4, 900)),
        patch_limit_on_one_side=int(random.integers(1, 20)) * 2,
        image_mean=[0.5] * 3 if seed % 2 else [0.48145466, 0.4578275, 0.40821073],
        image_std=[0.5] * 3 if seed % 2 else [0.26862954, 0.26130258, 0.27577711],
    )
    images = [random_image(random) for _ in range(7)]
    images += [in_mode(images[0].mode, *images[0].size, seed=seed + i) for i in range(3)]
    dtype = list(DTYPES)[seed % 4]
    results = on_device(images, config, dtype, device, batch_bytes=int(random.integers(1, 300_000)))
    for image, result in zip(images, results, strict=True):
        assert torch.equal(result, on_cpu(image, config, dtype)), (image.mode, image.size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("size", "mode"),
    [
        *[((8366, 90), "RGB"), ((8366, 40), "RGBA"), ((90, 8366), "RGBA"), ((1, 9000), "LA"), ((9000, 1), "RGBA")],
        ((4200, 3300), "RGB"),
    ],
)
def test_the_published_limits(
    size: tuple[int, int], mode: str, device: torch.device, published: PreprocessorConfig
) -> None:
    image = picture(*size, mode, seed=3)
    assert published.grid_rule().grid(*size).new_w < size[0] or published.grid_rule().grid(*size).new_h < size[1]
    (values,) = on_device([image], published, "uint8", device)
    assert torch.equal(values, on_cpu(image, published, "uint8"))


def test_images_of_one_shape_share_a_batch(published: PreprocessorConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    compute = DeviceBackend.patches
    monkeypatch.setattr(
        DeviceBackend, "patches", lambda self, key, batch: (sizes.append(len(batch)), compute(self, key, batch))[1]
    )
    images = [picture(60, 40, seed=i) for i in range(6)] + [picture(40, 60, seed=9)]
    on_device(images, published, "uint8")
    assert sorted(sizes) == [1, 6]
    sizes.clear()
    on_device(images, published, "uint8", batch_bytes=2 * 60 * 40 * 3)
    assert sorted(sizes) == [1, 2, 2, 2]


def test_too_little_memory_halves_the_batch_and_says_so(
    published: PreprocessorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = DeviceBackend.patches
    most = 3

    def patches(self: DeviceBackend, key: Any, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(self, key, batch)

    monkeypatch.setattr(DeviceBackend, "patches", patches)
    images = [picture(60, 40, seed=i) for i in range(11)]
    results: dict[int, Any] = {}
    notes: list[str] = []
    batches = Batches(
        DeviceBackend(CPU, published, "uint8"),
        1 << 28,
        lambda tag, value: results.update({tag: value}),
        notes.append,
    )
    grid = published.grid_rule().grid(60, 40)
    for number, image in enumerate(images):
        batches.add(number, *pixels_for_device(image, grid, published), grid)
    batches.finish()
    for number, image in enumerate(images):
        assert torch.equal(results[number], on_cpu(image, published, "uint8"))
    assert "ran out of memory at a batch of 11; going on with 5" in notes[0]
    most = 0
    batches.add("alone", *pixels_for_device(images[0], grid, published), grid)
    batches.finish()
    assert isinstance(results["alone"], ItemError)
    assert results["alone"].code == "out_of_memory"


def test_waiting_pixels_are_bounded(published: PreprocessorConfig) -> None:
    """Images that never fill a batch do not pile up."""
    emitted: list[int] = []
    limit = 100_000
    batches = Batches(
        DeviceBackend(CPU, published, "uint8"), limit, lambda tag, value: emitted.append(tag), lambda text: None
    )
    held = 0
    for number in range(100):
        image = picture(60 + number, 50, seed=number)
        grid = published.grid_rule().grid(*image.size)
        batches.add(number, *pixels_for_device(image, grid, published), grid)
        held += image.width * image.height * 3
    # All but two batches' worth, and the one that is still computing, was handed out on the way.
    assert len(emitted) > 100 * (1 - 3.5 * limit / held)
    batches.finish()
    assert sorted(emitted) == list(range(100))


def test_pillow_is_checked_against_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resizes_like_pillow()
    monkeypatch.setattr(pixels_device, "resize_bicubic", lambda pixels, size, alpha: torch.zeros(1, *size[::-1], 4))
    assert not resizes_like_pillow()
