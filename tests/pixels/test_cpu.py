"""pixels_cpu.py against the golden bytes and against the plain reference."""

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
from kimik3_prep.images.decode import decode
from kimik3_prep.pixels.cpu import (
    TORCH_DTYPES,
    Normaliser,
    backdrop,
    fill_background,
    level_table,
    lost_levels,
    write_patches,
)

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


def features(image: Image.Image, config: PreprocessorConfig, dtype: str = "float32") -> torch.Tensor:
    grid = config.grid_rule().grid(*image.size)
    patch = config.patch_size
    out = torch.full((grid.patches, 3, patch, patch), 77, dtype=TORCH_DTYPES[dtype])
    write_patches(image, grid, config, out)
    return out


def as_float32(stored: torch.Tensor, config: PreprocessorConfig) -> torch.Tensor:
    """What a reader makes of stored patches."""
    if stored.dtype != torch.uint8:
        return stored.to(torch.float32)
    table = level_table(config)
    return torch.stack([table[channel][stored[:, channel].long()] for channel in range(3)], 1)


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("case", IMAGES, ids=lambda case: case["id"])
def test_golden_images_in_every_dtype(case: dict[str, Any], published: PreprocessorConfig) -> None:
    decoded = decode(str(GOLDEN / case["file"]))
    values = features(decoded.image, published)
    assert digest(values) == case["sha256"]
    levels = features(decoded.image, published, "uint8")
    assert digest(as_float32(levels, published)) == case["sha256"]
    table = level_table(published)
    for dtype in ("bfloat16", "float16"):
        stored = features(decoded.image, published, dtype)
        # 256 distinct values before and after: each stored value names one level, and so one float32.
        assert torch.equal(stored, values.to(stored.dtype))
        back, order = table[0].to(stored.dtype).to(torch.float32).sort()
        nearest = order[torch.searchsorted(back, stored.to(torch.float32))]
        assert torch.equal(table[0][nearest], values)


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
    assert np.array_equal(features(image, config).numpy(), expected, equal_nan=True)


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
    assert np.array_equal(features(image, config).numpy(), reference.features(image, cfg))
    assert np.array_equal(features(image, config, "uint8").numpy(), reference.levels(image, cfg))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1), min_size=3, max_size=3),
    st.lists(st.floats(0.01, 2), min_size=3, max_size=3),
)
def test_any_mean_and_std_is_three_roundings(mean: list[float], std: list[float]) -> None:
    cfg, config = cfg_and_config(image_mean=mean, image_std=std)
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3), "RGB")
    expected = reference.features(ramp, cfg)
    assert np.array_equal(features(ramp, config).numpy(), expected)
    for dtype in ("bfloat16", "float16"):
        assert torch.equal(features(ramp, config, dtype), torch.from_numpy(expected).to(TORCH_DTYPES[dtype]))


def test_published_constants_need_no_table_and_others_get_one(published: PreprocessorConfig) -> None:
    levels = torch.arange(256, dtype=torch.uint8).repeat(3 * 7).view(7, 3, 16, 16)
    for mean in (published.image_mean, (0.48145466, 0.4578275, 0.40821073)):
        _, config = cfg_and_config(image_mean=mean)
        table = level_table(config)
        for dtype in TORCH_DTYPES.values():
            if dtype == torch.uint8:
                continue
            out = torch.empty(levels.shape, dtype=dtype)
            Normaliser(table, dtype)(levels, out)
            expected = torch.stack([table[channel][levels[:, channel].long()] for channel in range(3)], 1)
            assert torch.equal(out, expected.to(dtype))


def test_published_constants_lose_no_level_in_any_dtype(published: PreprocessorConfig) -> None:
    assert {dtype: lost_levels(published, dtype) for dtype in TORCH_DTYPES} == dict.fromkeys(TORCH_DTYPES, 0)
    _, shifted = cfg_and_config(image_mean=[-1.0, -1.0, -1.0], image_std=[1.0, 1.0, 1.0])
    assert lost_levels(shifted, "bfloat16") > 100
    assert lost_levels(shifted, "uint8") == lost_levels(shifted, "float32") == 0


def test_an_rgb_image_with_a_colour_key_is_untouched(published: PreprocessorConfig) -> None:
    image = picture(40, 30)
    keyed = image.copy()
    keyed.info["transparency"] = image.getpixel((0, 0))
    assert fill_background(keyed, published.background) is keyed
    assert torch.equal(features(keyed, published), features(image, published))


def test_an_opaque_image_is_its_rgb(published: PreprocessorConfig) -> None:
    image = picture(300, 200, "RGB")
    opaque = image.convert("RGBA")
    assert torch.equal(features(opaque, published), features(image, published))


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
    assert torch.equal(features(scattered, published, "uint8"), features(whole, published, "uint8"))
