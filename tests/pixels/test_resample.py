"""The resize gives Pillow's bytes: Pillow itself is the oracle of nearly every test here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kimik3_prep.pixels import resample
from kimik3_prep.pixels.resample import resize_bicubic

CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
MODES = list(CHANNELS)
ALPHA_MODES = ["LA", "RGBA"]


def noise(shape: tuple[int, ...], seed: int, kind: str = "levels") -> torch.Tensor:
    """uint8 noise. "extremes" are 0 and 255 only: overshoot in every pixel, and with alpha, hidden colours."""
    rng = np.random.default_rng(seed)
    if kind == "extremes":
        return torch.from_numpy(rng.integers(0, 2, shape, dtype=np.uint8) * np.uint8(255))
    values = rng.integers(0, 256, shape, dtype=np.uint8)
    if kind == "mixed":  # a third of all values at either end, so that alpha is often 0 or 255 beside a half-tone
        ends = rng.integers(0, 3, shape)
        values[ends == 0], values[ends == 1] = 0, 255
    return torch.from_numpy(values)


def to_pillow(pixels: torch.Tensor, mode: str) -> Image.Image:
    """The Pillow image of uint8 [h, w, c]."""
    height, width, _ = pixels.shape
    return Image.frombytes(mode, (width, height), pixels.contiguous().numpy().tobytes())


def from_pillow(image: Image.Image) -> torch.Tensor:
    """uint8 [h, w, c] of a Pillow image."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, -1)


def by_pillow(pixels: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """Each image of uint8 [n, h, w, c] resized by Pillow."""
    return torch.stack([from_pillow(to_pillow(one, mode).resize(size, Image.Resampling.BICUBIC)) for one in pixels])


def assert_like_pillow(pixels: torch.Tensor, size: tuple[int, int], mode: str) -> None:
    resized = resize_bicubic(pixels, size, alpha=mode in ALPHA_MODES)
    assert resized.dtype == torch.uint8
    assert resized.is_contiguous()
    expected = by_pillow(pixels, size, mode)
    assert resized.shape == expected.shape
    wrong = int((resized != expected).sum())
    assert wrong == 0, f"{wrong} of {expected.numel()} values differ from Pillow, {mode} {list(pixels.shape)} to {size}"


sides = st.one_of(st.integers(1, 12), st.integers(1, 160))


@settings(max_examples=400, deadline=None)
@given(
    mode=st.sampled_from([*MODES, "CMYK"]),
    source=st.tuples(sides, sides),
    size=st.tuples(sides, sides),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["levels", "extremes", "mixed"]),
)
def test_random_sizes(mode: str, source: tuple[int, int], size: tuple[int, int], seed: int, kind: str) -> None:
    pixels = noise((1, *source, CHANNELS.get(mode, 4)), seed, kind)
    assert_like_pillow(pixels, size, mode)


@settings(max_examples=200, deadline=None)
@given(
    long=st.integers(1, 20_000),
    out=st.integers(1, 7168),
    upright=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_lines(long: int, out: int, upright: bool, seed: int) -> None:
    pixels = noise((1, 1, long, 3), seed, "mixed")
    if upright:
        assert_like_pillow(pixels.transpose(1, 2), (1, out), "RGB")
    else:
        assert_like_pillow(pixels, (out, 1), "RGB")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("source", "size"),
    [
        pytest.param((1, 1), (1, 2), id="one pixel, only height"),
        pytest.param((1, 1), (9, 7), id="one pixel"),
        pytest.param((2, 3), (1, 1), id="to one pixel"),
        pytest.param((300, 40), (300, 17), id="same width"),
        pytest.param((40, 300), (17, 300), id="same height"),
        pytest.param((300, 40), (299, 41), id="one less, one more"),
        pytest.param((256, 64), (128, 16), id="exact ratios"),
        pytest.param((8366, 9), (7167, 7), id="8366 wide"),
        pytest.param((9, 8366), (7, 7167), id="8366 high"),
        pytest.param((30_000, 8), (7168, 1), id="30000 wide"),
        pytest.param((100_000, 1), (7168, 1), id="100000 wide"),
        pytest.param((1, 100_000), (1, 7168), id="100000 high"),
        pytest.param((5000, 3), (1, 3), id="row to one pixel"),
        pytest.param((3, 5000), (3, 1), id="column to one pixel"),
        pytest.param((2, 2), (1500, 3), id="far up"),
        pytest.param((3, 5), (2, 1200), id="up and down"),
        pytest.param((31, 20), (90, 11), id="down and up"),
    ],
)
def test_chosen_sizes(mode: str, source: tuple[int, int], size: tuple[int, int]) -> None:
    width, height = source
    pixels = noise((1, height, width, CHANNELS[mode]), seed=width * 31 + height, kind="mixed")
    assert_like_pillow(pixels, size, mode)


def test_kernel_distance_is_multiplied_by_the_reciprocal() -> None:
    """Dividing by the filter scale moves two weights of this pair by one unit; these bytes make that visible."""
    line = torch.zeros(19912, dtype=torch.uint8)
    line[5689:5701] = torch.tensor([83, 113, 29, 212, 106, 203, 198, 191, 32, 16, 185, 172])
    line[14211:14223] = torch.tensor([99, 115, 215, 109, 198, 180, 46, 133, 53, 144, 169, 227])
    assert_like_pillow(line.view(1, 1, -1, 1), (6991, 1), "L")
    assert_like_pillow(line.view(1, -1, 1, 1), (1, 6991), "L")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("source", "size", "rows_first"),
    [
        ((100, 200), (80, 160), False),
        ((100, 200), (80, 159), True),
        ((100, 60), (90, 40), False),
        ((100, 60), (90, 39), True),
        ((100, 300), (50, 150), True),
        ((50, 80), (51, 79), True),
        ((50, 80), (51, 81), False),
        ((50, 80), (90, 100), False),
        ((80, 50), (40, 25), False),
    ],
)
def test_order_of_the_passes(mode: str, source: tuple[int, int], size: tuple[int, int], rows_first: bool) -> None:
    (width, height), (new_width, new_height) = source, size
    pixels = noise((1, height, width, CHANNELS[mode]), seed=11, kind="mixed")
    assert resample._rows_first(pixels.shape, *size) is rows_first
    by_rows = resample._resize_columns(resample._resize_rows(pixels, new_height), new_width)
    by_columns = resample._resize_rows(resample._resize_columns(pixels, new_width), new_height)
    assert not torch.equal(by_rows, by_columns), "the picture cannot tell the orders apart"
    assert_like_pillow(pixels, size, mode)


@pytest.mark.parametrize(
    ("source", "size"),
    [((4200, 3200), (4071, 3102)), ((2000, 6600), (1970, 6502))],
    ids=["landscape", "tall"],
)
def test_photograph_above_the_patch_limit(source: tuple[int, int], size: tuple[int, int]) -> None:
    assert_like_pillow(noise((1, source[1], source[0], 3), seed=5), size, "RGB")


@pytest.mark.parametrize("mode", ALPHA_MODES)
def test_every_colour_under_every_alpha(mode: str) -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    alpha, colour = torch.meshgrid(levels, levels, indexing="ij")
    bands = [colour, colour.flip(1), colour.roll(77, 1)][: CHANNELS[mode] - 1]
    pairs = torch.stack([*bands, alpha], dim=-1)
    premultiplied = {"LA": "La", "RGBA": "RGBa"}[mode]

    forward = resample._to_premultiplied(pairs[None])[0]
    assert torch.equal(forward, from_pillow(to_pillow(pairs, mode).convert(premultiplied)))
    back = resample._from_premultiplied(pairs[None])[0]
    assert torch.equal(back, from_pillow(to_pillow(pairs, premultiplied).convert(mode)))


@pytest.mark.parametrize("mode", ALPHA_MODES)
@pytest.mark.parametrize("levels", [(0,), (255,), (0, 255), (0, 1, 254, 255), (0, 255, 128)])
def test_alpha_levels_over_hidden_colours(mode: str, levels: tuple[int, ...]) -> None:
    pixels = noise((1, 61, 83, CHANNELS[mode]), seed=len(levels), kind="mixed")
    choice = np.random.default_rng(9).integers(0, len(levels), (61, 83))
    pixels[0, :, :, -1] = torch.tensor(levels, dtype=torch.uint8)[torch.from_numpy(choice)]
    for size in [(40, 30), (75, 20), (83, 20), (20, 61), (100, 90)]:
        assert_like_pillow(pixels, size, mode)


@pytest.mark.parametrize("mode", MODES)
def test_unchanged_size_is_a_copy(mode: str) -> None:
    pixels = noise((2, 16, 24, CHANNELS[mode]), seed=1, kind="mixed")
    resized = resize_bicubic(pixels, (24, 16), alpha=mode in ALPHA_MODES)
    assert torch.equal(resized, pixels), "hidden colours included"
    assert resized.data_ptr() != pixels.data_ptr()
    assert_like_pillow(pixels, (24, 16), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(50, 31), (97, 31), (50, 64), (130, 90)])
def test_batch_equals_one_by_one(mode: str, size: tuple[int, int]) -> None:
    pixels = noise((5, 64, 97, CHANNELS[mode]), seed=2, kind="mixed")
    together = resize_bicubic(pixels, size, alpha=mode in ALPHA_MODES)
    alone = [resize_bicubic(one[None], size, alpha=mode in ALPHA_MODES)[0] for one in pixels]
    assert torch.equal(together, torch.stack(alone))
    assert_like_pillow(pixels, size, mode)


@pytest.mark.parametrize("alpha", [False, True])
def test_empty_batch(alpha: bool) -> None:
    resized = resize_bicubic(torch.empty((0, 5, 6, 4), dtype=torch.uint8), (3, 2), alpha=alpha)
    assert resized.shape == (0, 2, 3, 4)


@pytest.mark.parametrize("size", [(30, 20), (41, 20), (30, 37), (41, 37), (60, 50)])
def test_strided_input(size: tuple[int, int]) -> None:
    base = noise((3, 37, 41, 4), seed=3, kind="mixed")
    strided = {
        "channels first": base.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        "turned": base.transpose(1, 2).contiguous().transpose(1, 2),
        "cropped": noise((3, 90, 100, 4), seed=4)[:, 5:42, 7:48],
        "every second": noise((6, 74, 41, 4), seed=5)[::2, ::2],
        "expanded": base[:1].expand(3, -1, -1, -1),
        "reversed bands": base.transpose(2, 3).contiguous().transpose(2, 3),
    }
    for pixels in strided.values():
        before = pixels.clone()
        assert_like_pillow(pixels, size, "RGBA")
        assert_like_pillow(pixels[..., :3], size, "RGB")
        assert torch.equal(pixels, before), "the input was written to"


@pytest.mark.parametrize("tile_bytes", [1, 900, 5_000, 50_000])
@pytest.mark.parametrize("mode", MODES)
def test_tile_size_changes_nothing(monkeypatch: pytest.MonkeyPatch, tile_bytes: int, mode: str) -> None:
    few, many = (2, 13, 17, CHANNELS[mode]), (2, 70, 81, CHANNELS[mode])
    pixels = noise(few if tile_bytes < 100 else many, seed=6, kind="mixed")
    sizes = [(11, 7), (16, 5), (pixels.shape[2], 9), (13, pixels.shape[1]), (20, 21)]
    expected = [resize_bicubic(pixels, size, alpha=mode in ALPHA_MODES) for size in sizes]
    monkeypatch.setattr(resample, "_CPU_TILE_BYTES", tile_bytes)
    for size, whole in zip(sizes, expected, strict=True):
        assert torch.equal(resize_bicubic(pixels, size, alpha=mode in ALPHA_MODES), whole)
        assert_like_pillow(pixels, size, mode)


@settings(max_examples=150, deadline=None)
@given(
    inputs=st.integers(1, 400),
    target=st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(1, 40)),
    budget=st.integers(1, 100_000),
)
def test_tiles_cover_everything_once_within_the_budget(inputs: int, target: tuple[int, int, int], budget: int) -> None:
    start, weights = resample._taps(inputs, target[0])
    taps = weights.shape[0]
    seen = np.zeros(target, dtype=int)
    for outputs, outer, inner in resample._tiles(torch.Size((inputs, *target[1:])), torch.Size(target), taps, budget):
        seen[outputs, outer, inner] += 1
        count, columns = outputs.stop - outputs.start, (outer.stop - outer.start) * (inner.stop - inner.start)
        span = int(start[outputs.stop - 1] - start[outputs.start]) + taps
        assert (count, columns) == (1, 1) or columns * (span + 10 * count) <= budget
    assert (seen == 1).all()


@pytest.mark.parametrize("block", [1, 50, 3000])
def test_weight_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    whole = [resample._taps_of(*pair) for pair in [(97, 31), (31, 97), (1000, 3)]]
    monkeypatch.setattr(resample, "_WEIGHT_BLOCK", block)
    cut = [resample._taps_of(*pair) for pair in [(97, 31), (31, 97), (1000, 3)]]
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one.start, other.start)
        assert torch.equal(one.weights, other.weights)


def test_sums_stay_far_inside_an_int32() -> None:
    rng = np.random.default_rng(7)
    pairs = [(i, o) for i in range(1, 41) for o in range(1, 41)]
    pairs += [(int(i), int(o)) for i, o in zip(rng.integers(1, 9000, 150), rng.integers(1, 7169, 150), strict=True)]
    # Where a weight is about one unit, rounding has most to add to the sum.
    pairs += [(1_000_000, 3), (4_000_000, 1)]
    worst = max(int(resample._taps_of(*pair).weights.abs().sum(0, dtype=torch.int64).max()) for pair in pairs)
    assert worst <= 1.3 * 2**22
    assert worst * 255 + 2**21 < 2**31


def test_windows_stay_inside_the_source() -> None:
    for inputs, outputs in [(1, 1), (1, 50), (2, 7), (5, 3), (8366, 7167), (300, 299)]:
        start, weights = resample._taps_of(inputs, outputs)
        assert int(start.min()) >= 0
        assert int(start.max()) + weights.shape[0] <= inputs
        assert weights.dtype == torch.int32


def test_tables_are_kept_when_they_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resample._taps(640, 480).weights is resample._taps(640, 480).weights
    monkeypatch.setattr(resample, "_CACHED_TAPS", 100)
    assert resample._taps(640, 480).weights is not resample._taps(640, 480).weights


def test_gives_up_where_pillow_gives_up() -> None:
    too_long, out = 67_110_000, 7168
    with pytest.raises(MemoryError):
        Image.new("L", (too_long, 1)).resize((out, 1), Image.Resampling.BICUBIC)
    with pytest.raises(MemoryError, match=r"67110000 to 7168 pixels"):
        resize_bicubic(torch.zeros((1, 1, 1, 1), dtype=torch.uint8).expand(1, 1, too_long, 1), (out, 1), alpha=False)


@pytest.mark.parametrize(
    ("pixels", "size", "alpha", "message"),
    [
        (torch.zeros((1, 4, 4, 3)), (2, 2), False, "float32"),
        (torch.zeros((4, 4, 3), dtype=torch.uint8), (2, 2), False, r"\[4, 4, 3\]"),
        (torch.zeros((1, 0, 4, 3), dtype=torch.uint8), (2, 2), False, "empty"),
        (torch.zeros((1, 4, 4, 3), dtype=torch.uint8), (0, 2), False, "empty"),
        (torch.zeros((1, 4, 4, 3), dtype=torch.uint8), (2, -1), False, "empty"),
        (torch.zeros((1, 4, 4, 1), dtype=torch.uint8), (2, 2), True, "alpha"),
    ],
)
def test_refuses(pixels: torch.Tensor, size: tuple[int, int], alpha: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resize_bicubic(pixels, size, alpha=alpha)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_cuda_gives_the_same_bytes(mode: str) -> None:
    pixels = noise((3, 301, 407, CHANNELS[mode]), seed=8, kind="mixed")
    for size in [(200, 100), (407, 100), (200, 301), (500, 400)]:
        resized = resize_bicubic(pixels.cuda(), size, alpha=mode in ALPHA_MODES)
        assert resized.is_cuda
        assert torch.equal(resized.cpu(), by_pillow(pixels, size, mode))
