"""The contract once more, written as plainly as possible and sharing no code with the package.

Slow on purpose: one image at a time, every value through float64 and back as the checkpoint's processor does it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image

PUBLISHED: dict[str, Any] = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
}


def exact_sqrt(value: float) -> float:
    """The square root of a float, correctly rounded, from integers alone."""
    fraction = Fraction(value)
    shift = 4**120
    root = math.isqrt(fraction.numerator * shift // fraction.denominator)
    return float(Fraction(root * 2 + 1, 2 * 2**120))  # the half unit stands for what isqrt cut off


def grid(width: int, height: int, cfg: dict[str, Any]) -> dict[str, int]:
    """New size, padding and grid; every float64 operation is an exact fraction, rounded once."""
    patch, merge, side = cfg["patch_size"], cfg["merge_kernel_size"], cfg["patch_limit_on_one_side"]
    cells = max(1, width // patch) * max(1, height // patch)
    scale = min(
        1.0,
        exact_sqrt(float(Fraction(cfg["in_patch_limit"], cells))),
        float(Fraction(side * patch, width)),
        float(Fraction(side * patch, height)),
    )
    new = [min(max(1, int(float(Fraction(length) * Fraction(scale)))), side * patch) for length in (width, height)]
    padded = [math.ceil(Fraction(length, merge * patch)) * merge * patch for length in new]
    cols, rows = (length // patch for length in padded)
    return {
        **{"new_w": new[0], "new_h": new[1], "pad_w": padded[0] - new[0], "pad_h": padded[1] - new[1]},
        **{"rows": rows, "cols": cols, "tokens": rows * cols // merge**2},
    }


def fill(image: Image.Image, background: dict[str, Any] | None) -> Image.Image:
    """The background behind a transparent image, pixel by pixel."""
    if background is None:
        return image.convert("RGB")
    if image.mode == "RGB":
        return image
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    rgba = np.array(image.convert("RGBA"))
    height, width = rgba.shape[:2]
    board = np.empty((height, width), np.float32)
    pattern = background.get("pattern", "black")
    square = background.get("chessboard_square_size", 16)
    levels = [background.get("chessboard_white_value", 255), background.get("chessboard_gray_value", 200)]
    if not background.get("chessboard_square_on_top_left", True):
        levels.reverse()
    for y in range(height):
        for x in range(width):
            flat = {"white": 255, "black": 0, "gray": 128}
            board[y, x] = flat[pattern] if pattern in flat else levels[(y // square + x // square) % 2]
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    first = alpha * rgba[..., :3].astype(np.float32)
    second = (np.float32(1) - alpha) * board[..., None]
    return Image.fromarray((first + second).astype(np.uint8), "RGB")


def levels(image: Image.Image, cfg: dict[str, Any]) -> np.ndarray[Any, Any]:
    """uint8 `[L, 3, p, p]` before normalisation."""
    size = grid(*image.size, cfg)
    background, stage = cfg.get("transparent_bg_config"), cfg.get("transparent_bg_fill_stage", "before_resize")
    if stage == "before_resize":
        image = fill(image, background)
    image = image.resize((size["new_w"], size["new_h"]), Image.Resampling.BICUBIC)
    if stage == "after_resize":
        image = fill(image, background)
    pixels = np.pad(np.array(image), ((0, size["pad_h"]), (0, size["pad_w"]), (0, 0)))
    patch = cfg["patch_size"]
    cut = pixels.reshape(size["rows"], patch, size["cols"], patch, 3).transpose(0, 2, 4, 1, 3)
    return cut.reshape(-1, 3, patch, patch)


def features(image: Image.Image, cfg: dict[str, Any]) -> np.ndarray[Any, Any]:
    """float32 `[L, 3, p, p]`: the checkpoint's three float64 operations, rounded to float32 after each."""
    values = (levels(image, cfg) / 255.0).astype(np.float32)
    mean, std = (np.array(cfg[name], np.float64).reshape(1, 3, 1, 1) for name in ("image_mean", "image_std"))
    values = (values.astype(np.float64) - mean).astype(np.float32)
    return (values.astype(np.float64) * (1.0 / std)).astype(np.float32)
