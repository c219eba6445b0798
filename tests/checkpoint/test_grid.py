"""grid.py against exact arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reference
from conftest import golden_cases
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimik3_prep.checkpoint.grid import Grid, GridRule

PUBLISHED = GridRule(14, 2, 65536, 512)
SIDE = st.one_of(st.integers(1, 64), st.integers(1, 8000), st.integers(7000, 20000), st.integers(1, 200_000))


def fields(grid: Grid) -> dict[str, int]:
    names = ("new_w", "new_h", "pad_w", "pad_h", "rows", "cols", "tokens")
    return {name: getattr(grid, name) for name in names}


@settings(max_examples=4000, deadline=None)
@given(SIDE, SIDE)
@example(3597, 3597)
@example(7169, 13)
def test_published_rule_is_exact_arithmetic(width: int, height: int) -> None:
    assert fields(PUBLISHED.grid(width, height)) == reference.grid(width, height, reference.PUBLISHED)


@settings(max_examples=1500, deadline=None)
@given(SIDE, SIDE, st.integers(1, 32), st.integers(1, 4), st.integers(1, 100_000), st.integers(1, 300))
def test_any_rule_is_exact_arithmetic(width: int, height: int, patch: int, merge: int, limit: int, side: int) -> None:
    cfg = {
        "patch_size": patch,
        "merge_kernel_size": merge,
        "in_patch_limit": limit,
        "patch_limit_on_one_side": side * merge,
    }
    rule = GridRule(patch, merge, limit, side * merge)
    assert fields(rule.grid(width, height)) == reference.grid(width, height, cfg)


@settings(max_examples=1000, deadline=None)
@given(SIDE, SIDE)
def test_a_grid_covers_the_image_and_keeps_its_limits(width: int, height: int) -> None:
    grid = PUBLISHED.grid(width, height)
    assert (grid.new_w + grid.pad_w, grid.new_h + grid.pad_h) == (grid.cols * 14, grid.rows * 14)
    assert 0 <= grid.pad_w < 28
    assert 0 <= grid.pad_h < 28
    assert grid.rows % 2 == grid.cols % 2 == 0
    assert max(grid.rows, grid.cols) <= 512
    # in_patch_limit is no cap: the cells it is held against are rounded down, and padding adds up to two a side.
    across, down = max(1, width // 14), max(1, height // 14)
    most = 65536 * (1 + 1 / across) * (1 + 1 / down)
    assert grid.patches <= most + 2 * (grid.rows + grid.cols) + 4
    assert grid.new_w <= width
    assert grid.new_h <= height


def test_every_width_up_to_20000() -> None:
    narrower = 0
    for width in range(1, 20_001):
        grid = PUBLISHED.grid(width, 14)
        assert fields(grid) == reference.grid(width, 14, reference.PUBLISHED)
        narrower += width > 7168 and grid.new_w == 7167
    assert narrower == 876


@pytest.mark.parametrize(
    ("size", "thw", "tokens"),
    [
        ((1, 1), (1, 2, 2), 1),
        ((30_000, 1), (1, 2, 512), 256),
        ((1, 30_000), (1, 512, 2), 256),
        ((2800, 2800), (1, 200, 200), 10_000),
        ((3597, 3597), (1, 258, 258), 16_641),
        ((3584, 3584), (1, 256, 256), 16_384),
        ((2400, 7006), (1, 440, 152), 16_720),
    ],
)
def test_known_sizes(size: tuple[int, int], thw: tuple[int, int, int], tokens: int) -> None:
    grid = PUBLISHED.grid(*size)
    assert grid.thw == thw
    assert grid.tokens == tokens
    assert grid.patches == thw[1] * thw[2]


@pytest.mark.parametrize("case", [c for c in golden_cases("images") if "grid_thw" in c], ids=lambda case: case["id"])
def test_golden_sizes(case: dict[str, list[int]]) -> None:
    assert list(PUBLISHED.grid(*case["size"]).thw) == case["grid_thw"]


def test_fixed_output_tokens_change_the_tokens_and_nothing_else() -> None:
    fixed = GridRule(14, 2, 65536, 512, fixed_output_tokens=64)
    free = fields(PUBLISHED.grid(640, 480))
    assert fields(fixed.grid(640, 480)) == {**free, "tokens": 64}


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)])
def test_no_size_below_one(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 x 1"):
        PUBLISHED.grid(*size)


def test_a_side_limit_that_padding_would_break_is_refused() -> None:
    with pytest.raises(ValueError, match="side limit of 511"):
        GridRule(14, 2, 65536, 511).grid(8000, 100)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 60), st.integers(1, 120))
@example(400, 1, 1, 120)
def test_the_lowered_limit_is_the_largest_that_fits(width: int, height: int, most: int, limit: int) -> None:
    """Against trying every limit there is."""
    rule = GridRule(14, 2, limit, 512)
    fitting = [n for n in range(1, limit + 1) if replace(rule, in_patch_limit=n).grid(width, height).tokens <= most]
    assert rule.limit_within(width, height, most) == (max(fitting) if fitting else None)


def test_what_no_limit_brings_down() -> None:
    assert PUBLISHED.limit_within(30_000, 1, 4) is None
    assert PUBLISHED.limit_within(28, 28, 1) == 65536


def test_a_fixed_number_of_tokens_is_no_grid() -> None:
    fixed = replace(PUBLISHED, fixed_output_tokens=7)
    limit = fixed.limit_within(2800, 2800, 100)
    assert limit is not None
    assert replace(fixed, in_patch_limit=limit).grid(2800, 2800).patches <= 400
