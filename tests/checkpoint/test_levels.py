"""levels.py: the table of the 256 levels, how each dtype stores it, and the way back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.checkpoint.levels import level_table, levels_of, stored_table
from kimik3_prep.pixels import cpu as pixels_cpu

CONSTANTS = [
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ((0.0, 127.5, -3.25), (1.0, 127.5, 1e-3)),
]


@pytest.mark.parametrize(("mean", "std"), CONSTANTS)
def test_the_table_is_the_processors(
    published: PreprocessorConfig, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> None:
    config = replace(published, image_mean=mean, image_std=std)
    table = level_table(mean, std)
    assert (table.dtype, table.shape) == (np.float32, (3, 256))
    assert table.tobytes() == pixels_cpu.level_table(config).numpy().tobytes()


@pytest.mark.parametrize(("mean", "std"), CONSTANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_values_are_torchs_casts(
    dtype: str, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> None:
    table = level_table(mean, std)
    cast = torch.from_numpy(table).to(pixels_cpu.TORCH_DTYPES[dtype]).float().numpy()
    assert stored_table(table, dtype).tobytes() == cast.tobytes()


def test_bfloat16_rounds_ties_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000], np.uint32)
    values = np.resize(bits, (3, 256)).view(np.float32)
    assert stored_table(values, "bfloat16").tobytes() == torch.from_numpy(values).bfloat16().float().numpy().tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
def test_levels_come_back_from_every_dtype(dtype: str) -> None:
    stored = stored_table(level_table(*CONSTANTS[0]), dtype)
    levels = np.random.default_rng(0).permutation(np.arange(3 * 256 * 196) % 256).astype(np.uint8)
    levels = levels.reshape(-1, 3, 14, 14)
    values = np.stack([stored[channel][levels[:, channel]] for channel in range(3)], 1)
    found, strays = levels_of(values, stored)
    assert np.array_equal(found, levels)
    assert strays == 0


def test_a_value_that_is_no_level_becomes_the_nearest_and_is_counted() -> None:
    stored = stored_table(level_table(*CONSTANTS[0]), "float32")
    values = np.array([-9, -1.001, -0.9999, 0.999, 1.5, np.inf, -np.inf, np.nan, stored[0][7]], np.float32)
    found, strays = levels_of(np.tile(values[:, None, None, None], (1, 3, 1, 1)), stored)
    assert found[:7, 1, 0, 0].tolist() == [0, 0, 0, 255, 255, 255, 0]
    assert found[8, 2, 0, 0] == 7
    assert strays == 3 * 8
    nothing = np.full((1, 3, 1, 1), np.nan, np.float32)
    assert levels_of(nothing, stored_table(stored, "uint8"))[1] == 3  # where zero is a level
