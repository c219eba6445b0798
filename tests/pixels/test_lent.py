"""lent.py: the same pixels as Pillow's own copy, in Pillow's own memory, for as long as somebody holds the array."""

from __future__ import annotations

import gc
import io

import numpy as np
import pytest
from conftest import picture
from PIL import Image

from kimik3_prep.images import decode  # noqa: F401  (asks Pillow for one block an image)
from kimik3_prep.pixels.lent import lent_pixels


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (640, 480), (3000, 2000)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "CMYK"])
def test_the_pixels_are_pillows(mode: str, size: tuple[int, int]) -> None:
    image = picture(*size, mode)
    pixels = lent_pixels(image)
    assert pixels is not None
    assert pixels.shape == (size[1], size[0], 4)
    bands = len(image.getbands())
    assert np.array_equal(pixels[..., :bands], np.asarray(image))


def test_they_are_lent_not_copied_and_nobody_writes_into_them() -> None:
    image = picture(40, 30)
    pixels = lent_pixels(image)
    assert pixels is not None
    image.putpixel((7, 5), (1, 2, 3))
    assert pixels[5, 7, :3].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        pixels[0, 0, 0] = 1


def test_the_memory_lives_as_long_as_a_view_of_it() -> None:
    image = picture(1000, 800)
    expected = np.asarray(image).copy()
    pixels = lent_pixels(image)
    assert pixels is not None
    view = pixels[1:, ::2, 1]
    del image, pixels
    gc.collect()
    noise = [picture(1000, 800, seed=seed) for seed in range(1, 6)]  # would take the memory if it were free
    assert np.array_equal(view, expected[1:, ::2, 1])
    assert len(noise) == 5


def test_it_is_given_back_with_the_last_view() -> None:
    def peak_of(count: int) -> int:
        for _ in range(count):
            image = Image.new("RGB", (4000, 4000))
            pixels = lent_pixels(image)
            assert pixels is not None
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    first = peak_of(2)
    assert peak_of(20) < first + 200_000_000  # twenty of them take 1.2 GB


@pytest.mark.parametrize("mode", ["L", "1", "P", "I;16", "I", "F", "LA"])
def test_other_modes_are_not_mistaken_for_pixels_of_four_bytes(mode: str) -> None:
    pixels = lent_pixels(Image.new(mode, (8, 6)))
    assert pixels is None or pixels.shape == (6, 8, 4)


def test_pixels_in_several_blocks_are_not_lent() -> None:
    buffer = io.BytesIO()
    picture(3000, 2000).save(buffer, "PNG")
    Image.core.set_use_block_allocator(0)
    try:
        scattered = Image.open(buffer)
        scattered.load()
    finally:
        Image.core.set_use_block_allocator(1)
    assert lent_pixels(scattered) is None
