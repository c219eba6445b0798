"""levels.py: the table of the 256 levels, how each dtype stores it, and the way back. Torch's casts are the oracle."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from kimik3_prep.checkpoint.levels import DTYPES, level_table, nearest_levels

PUBLISHED = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CONSTANTS = [
    PUBLISHED,
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ((0.0, 127.5, -3.25), (1.0, 127.5, 1e-3)),
]
FLOATS = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize(("mean", "std"), CONSTANTS)
def test_the_table_is_three_roundings(mean: tuple[float, float, float], std: tuple[float, float, float]) -> None:
    table = level_table(mean, std)
    assert (table.dtype, table.shape) == (np.float32, (3, 256))
    for channel in range(3):
        for level in (0, 1, 77, 128, 254, 255):
            centred = np.float32(float(np.float32(level / 255.0)) - mean[channel])
            assert table[channel, level] == np.float32(float(centred) * (1.0 / std[channel]))


def test_the_dtypes_are_numpys_and_torchs_in_the_order_of_the_documentation() -> None:
    assert list(DTYPES) == ["float32", "bfloat16", "float16", "uint8"]
    for name, dtype in DTYPES.items():
        assert (dtype.name, dtype.itemsize) == (name, getattr(torch, name).itemsize)
        assert pickle.loads(pickle.dumps(dtype)) == dtype
    assert [dtype.holds_levels for dtype in DTYPES.values()] == [False, False, False, True]


@pytest.mark.parametrize(("mean", "std"), CONSTANTS)
@pytest.mark.parametrize("name", FLOATS)
def test_stored_values_are_torchs_casts(
    name: str, mean: tuple[float, float, float], std: tuple[float, float, float]
) -> None:
    table = level_table(mean, std)
    cast = torch.from_numpy(table).to(getattr(torch, name))
    stored = DTYPES[name].of_levels(table)
    assert stored.dtype == DTYPES[name].numpy
    assert stored.tobytes() == cast.view(torch.uint8).numpy().tobytes()
    assert DTYPES[name].widen(stored).tobytes() == cast.float().numpy().tobytes()


def test_levels_are_stored_as_they_are() -> None:
    stored = DTYPES["uint8"].of_levels(level_table(*PUBLISHED))
    assert stored.tobytes() == bytes(range(256)) * 3
    assert DTYPES["uint8"].widen(stored)[2].tolist() == list(range(256))


@pytest.mark.parametrize("name", FLOATS)
def test_any_float_is_rounded_once_ties_to_even(name: str) -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x3F801000, 0x3F803000], np.uint32)
    edges = np.array([0, -0.0, 65519, 65520, -1e30, 3.4e38, 1e-40, 6e-8, np.inf], np.float32)
    random = np.random.default_rng(0).integers(0, 0x7F800000, 10_000).astype(np.uint32).view(np.float32)
    values = np.concatenate([ties.view(np.float32), edges, random, -random])
    cast = torch.from_numpy(values).to(getattr(torch, name))
    stored = DTYPES[name].narrow(values)
    assert stored.tobytes() == cast.view(torch.uint8).numpy().tobytes()
    assert DTYPES[name].widen(stored).tobytes() == cast.float().numpy().tobytes()


@pytest.mark.parametrize("name", DTYPES)
def test_levels_come_back_from_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    stored = dtype.of_levels(level_table(*PUBLISHED))
    levels = np.random.default_rng(0).permutation(np.arange(3 * 256 * 196) % 256).astype(np.uint8)
    levels = levels.reshape(-1, 3, 14, 14)
    values = np.stack([stored[channel][levels[:, channel]] for channel in range(3)], 1)
    back, strays = nearest_levels(dtype.widen(values), dtype.widen(stored))
    assert np.array_equal(back, levels)
    assert strays == 0


def test_a_value_that_is_no_level_becomes_the_nearest_and_is_counted() -> None:
    entries = level_table(*PUBLISHED)
    values = np.array([-9, -1.001, -0.9999, 0.999, 1.5, np.inf, -np.inf, np.nan, entries[0][7]], np.float32)
    levels, strays = nearest_levels(np.tile(values[:, None, None, None], (1, 3, 1, 1)), entries)
    assert levels[:7, 1, 0, 0].tolist() == [0, 0, 0, 255, 255, 255, 0]
    assert levels[8, 2, 0, 0] == 7
    assert strays == 3 * 8
    nothing = np.full((1, 3, 1, 1), np.nan, np.float32)
    assert nearest_levels(nothing, np.tile(np.arange(256, dtype=np.float32), (3, 1)))[1] == 3  # where zero is a level


def test_of_levels_that_share_a_value_the_lowest_is_taken() -> None:
    entries = np.repeat(np.arange(128, dtype=np.float32), 2)[None].repeat(3, 0)
    levels, strays = nearest_levels(np.array([0, 5, 127], np.float32).reshape(3, 1, 1, 1).repeat(3, 1), entries)
    assert levels[:, 0, 0, 0].tolist() == [0, 10, 254]
    assert strays == 0
