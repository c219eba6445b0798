"""cpu.py against the golden bytes and against the plain reference."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from conftest import GOLDEN, cfg_and_config, golden_cases, in_mode, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kimik3_prep.checkpoint.config import Background, PreprocessorConfig, load_config
from kimik3_prep.checkpoint.levels import DTYPES, level_table
from kimik3_prep.images.decode import decode
from kimik3_prep.pixels.cpu import (
    PatchMaker,
    backdrop,
    fill_background,
    lost_levels,
    rgb_pixels,
    write_patches,
)
from kimik3_prep.pixels.tensors import to_tensor

IMAGES = [case for case in golden_cases("images") if case["expect"] == "ok"]
CONFIGS = [case for case in golden_cases("configs") if case["expect"] == "ok"]
MODES = (
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "I;16",
    "RGBa",
)


def features(image: Image.Image, config: PreprocessorConfig, dtype: str = "float32") -> np.ndarray[Any, Any]:
    grid = config.grid_rule().grid(*image.size)
    patch = config.patch_size
    out = np.full((grid.patches, 3, patch, patch), 77, DTYPES[dtype].numpy)
    write_patches(image, grid, config, out, dtype)
    return out


def values_of(levels: np.ndarray[Any, Any], config: PreprocessorConfig) -> np.ndarray[Any, Any]:
    """What a reader makes of stored levels, float32."""
    table = level_table(config.image_mean, config.image_std)
    return np.stack([table[channel][levels[:, channel]] for channel in range(3)], 1)


def cast(values: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    """Torch's own rounding of float32 values."""
    return torch.from_numpy(values).to(getattr(torch, dtype))


def digest(values: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


@pytest.mark.parametrize("case", IMAGES, ids=lambda case: case["id"])
def test_golden_images_in_every_dtype(case: dict[str, Any], published: PreprocessorConfig) -> None:
    decoded = decode(str(GOLDEN / case["file"]))
    values = features(decoded.image, published)
    assert digest(values) == case["sha256"]
    levels = features(decoded.image, published, "uint8")
    assert digest(values_of(levels, published)) == case["sha256"]
    for dtype in ("bfloat16", "float16"):
        stored = to_tensor(features(decoded.image, published, dtype), dtype)
        assert torch.equal(stored, cast(values, dtype))


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case["id"])
def test_golden_configs(case: dict[str, Any]) -> None:
    config, _ = load_config(GOLDEN / case["file"])
    for name, expected in case["features"].items():
        image = decode(str(GOLDEN / "images" / name)).image
        assert list(config.grid_rule().grid(*image.size).thw) == expected["grid_thw"]
        assert digest(features(image, config)) == expected["sha256"]


@pytest.mark.parametrize("stage", ["before_resize", "after_resize"])
@pytest.mark.parametrize("size", [(45, 31), (700, 30)])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_at_both_stages(mode: str, size: tuple[int, int], stage: str) -> None:
    cfg, config = cfg_and_config(
        transparent_bg_fill_stage=stage, patch_limit_on_one_side=16, patch_size=14, in_patch_limit=500
    )
    image = in_mode(mode, *size, seed=len(mode))
    assert image.mode == mode
    expected = reference.features(image, cfg)
    assert np.array_equal(features(image, config), expected, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from(["RGBA", "LA", "P", "RGB", "L"]),
    st.sampled_from(["before_resize", "after_resize"]),
    st.sampled_from(["white", "black", "gray", "chessboard", None]),
    st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 255), st.integers(0, 255)),
    st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(1, 60), st.integers(1, 8)),
    st.integers(0, 5),
)
def test_any_config_is_the_reference(
    width: int,
    height: int,
    mode: str,
    stage: str,
    pattern: str | None,
    board: tuple[int, bool, int, int],
    sizes: tuple[int, int, int, int],
    seed: int,
) -> None:
    square, top_left, white, gray = board
    patch, merge, limit, side = sizes
    background = None
    if pattern is not None:
        background = {
            "pattern": pattern,
            "chessboard_square_size": square,
            "chessboard_square_on_top_left": top_left,
            "chessboard_white_value": white,
            "chessboard_gray_value": gray,
        }
    cfg, config = cfg_and_config(
        patch_size=patch,
        merge_kernel_size=merge,
        in_patch_limit=limit,
        patch_limit_on_one_side=side * merge,
        transparent_bg_config=background,
        transparent_bg_fill_stage=stage,
    )
    image = picture(width, height, mode, seed)
    if mode == "P" and seed % 2:
        image.info["transparency"] = seed
    assert np.array_equal(features(image, config), reference.features(image, cfg))
    assert np.array_equal(features(image, config, "uint8"), reference.levels(image, cfg))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1), min_size=3, max_size=3),
    st.lists(st.floats(0.01, 2), min_size=3, max_size=3),
)
def test_any_mean_and_std_is_three_roundings(mean: list[float], std: list[float]) -> None:
    cfg, config = cfg_and_config(image_mean=mean, image_std=std)
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3), "RGB")
    expected = reference.features(ramp, cfg)
    assert np.array_equal(features(ramp, config), expected)
    for dtype in ("bfloat16", "float16"):
        assert torch.equal(to_tensor(features(ramp, config, dtype), dtype), cast(expected, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [(0.5, 0.5, 0.5), (0.48145466, 0.4578275, 0.40821073)])
def test_blocks_are_contiguous_and_come_to_all_patches(mean: tuple[float, float, float], dtype: str) -> None:
    """Of small and large images in turn, whose blocks share buffers."""
    cfg, config = cfg_and_config(image_mean=mean)
    maker = PatchMaker(config, dtype)
    for size in ((800, 600), (30, 40), (1500, 29), (15, 2000), (1, 1)):
        image = picture(*size)
        grid = config.grid_rule().grid(*size)
        blocks = []
        for block in maker.blocks(rgb_pixels(image, grid, config), grid):
            assert block.flags.c_contiguous
            assert block.dtype == DTYPES[dtype].numpy
            blocks.append(block.copy())
        made = np.concatenate(blocks)
        expected = reference.levels(image, cfg) if dtype == "uint8" else reference.features(image, cfg)
        assert torch.equal(to_tensor(made, dtype), cast(expected, dtype))


def test_published_constants_lose_no_level_in_any_dtype(published: PreprocessorConfig) -> None:
    assert {dtype: lost_levels(published, dtype) for dtype in DTYPES} == dict.fromkeys(DTYPES, 0)
    _, shifted = cfg_and_config(image_mean=[-1.0, -1.0, -1.0], image_std=[1.0, 1.0, 1.0])
    assert lost_levels(shifted, "bfloat16") > 100
    assert lost_levels(shifted, "uint8") == lost_levels(shifted, "float32") == 0


def test_an_rgb_image_with_a_colour_key_is_untouched(published: PreprocessorConfig) -> None:
    image = picture(40, 30)
    keyed = image.copy()
    keyed.info["transparency"] = image.getpixel((0, 0))
    assert fill_background(keyed, published.background) is keyed
    assert np.array_equal(features(keyed, published), features(image, published))


def test_an_opaque_image_is_its_rgb(published: PreprocessorConfig) -> None:
    image = picture(300, 200, "RGB")
    opaque = image.convert("RGBA")
    assert np.array_equal(features(opaque, published), features(image, published))


def test_the_chessboard_keeps_its_phase_across_bands() -> None:
    background = Background("chessboard", 7, False, 250, 10)
    whole = backdrop(background, 50, 600)
    parts = np.concatenate([backdrop(background, 50, 200, top) for top in (0, 200, 400)])
    assert np.array_equal(whole, parts)
    assert whole[0, 0] == 10
    tall = picture(30, 700, "RGBA")
    filled = np.asarray(fill_background(tall, background))
    rgba = np.asarray(tall).astype(np.float32)
    alpha = rgba[..., 3:] / np.float32(255)
    expected = alpha * rgba[..., :3] + (np.float32(1) - alpha) * backdrop(background, 30, 700)[..., None]
    assert np.array_equal(filled, expected.astype(np.uint8))


def test_images_whose_pixels_lie_in_blocks_are_read_too(published: PreprocessorConfig, tmp_path: Path) -> None:
    Image.core.set_use_block_allocator(0)
    try:
        buffer = io.BytesIO()
        picture(3000, 2000).save(buffer, "PNG")
        scattered = Image.open(buffer)
        scattered.load()
    finally:
        Image.core.set_use_block_allocator(1)
    whole = Image.open(buffer)
    whole.load()
    assert np.array_equal(features(scattered, published, "uint8"), features(whole, published, "uint8"))
