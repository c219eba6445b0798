"""ready.py: features made elsewhere. Files are written by torch, numpy and safetensors themselves."""

from __future__ import annotations

import contextlib
import io
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import cfg_and_config, picture
from PIL import Image

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import ItemError
from kimik3_prep.pixels.cpu import write_patches
from kimik3_prep.pixels.ready import ReadyFeatures, cast_features, read_features
from kimik3_prep.pixels.tensors import to_array, to_tensor

THW = (1, 4, 6)


def features(image: Image.Image, config: PreprocessorConfig, dtype: str = "float32") -> ReadyFeatures:
    grid = config.grid_rule().grid(*image.size)
    patch = config.patch_size
    out = np.full((grid.patches, 3, patch, patch), 77, DTYPES[dtype].numpy)
    write_patches(image, grid, config, out, dtype)
    return ReadyFeatures(out, dtype)


def npy(array: Any, **more: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **more)
    return buffer.getvalue()


def header(text: str) -> bytes:
    """A .npy file of nothing but its header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, 24 * 588).view(24, 3, 14, 14).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_safetensors_come_back_unchanged(dtype: torch.dtype, published: PreprocessorConfig) -> None:
    tensor = values().mul(100).to(dtype)
    raw = tensor.view(torch.uint8).numpy().tobytes()
    for more in ({}, {"grid_thws": torch.tensor([THW])}, {"grid_thws": torch.tensor(THW, dtype=torch.int32)}):
        ready = read_features(safetensors.torch.save({"pixel_values": tensor, **more}), THW, published)
        assert (ready.dtype, ready.values.shape) == (str(dtype)[6:], (24, 3, 14, 14))
        assert ready.values.tobytes() == raw


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8"])
def test_npy_comes_back_unchanged(dtype: str, published: PreprocessorConfig) -> None:
    array = values().numpy().astype(dtype)
    for content in (npy(array), npy(np.asfortranarray(array))):
        ready = read_features(content, THW, published)
        assert ready.dtype == dtype
        assert ready.values.flags.c_contiguous
        assert np.array_equal(ready.values, array)
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(2, 0))
    assert np.array_equal(read_features(buffer.getvalue(), THW, published).values, array)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(23, 3, 14, 14), "23 patches"),
        (torch.zeros(24, 588), "shape"),
        (torch.zeros(24, 14, 14, 3), "shape"),
        (torch.zeros(24, 3, 16, 16), "shape"),
        (torch.zeros(1, 24, 3, 14, 14), "shape"),
        (torch.zeros(24, 3, 14, 14, dtype=torch.int32), "floating point or uint8"),
        (torch.zeros(24, 3, 14, 14, dtype=torch.bool), "floating point or uint8"),
        (torch.zeros(24, 3, 14, 14, dtype=torch.uint16), "floating point or uint8"),
        (torch.full((24, 3, 14, 14), float("nan"), dtype=torch.bfloat16), "NaN"),
        (torch.full((24, 3, 14, 14), float("nan")), "NaN"),
        (torch.full((24, 3, 14, 14), float("-inf")), "infinite"),
    ],
)
def test_what_a_serving_engine_would_refuse(tensor: torch.Tensor, words: str, published: PreprocessorConfig) -> None:
    with pytest.raises(ItemError, match=words) as caught:
        read_features(safetensors.torch.save({"pixel_values": tensor}), THW, published)
    assert caught.value.code == "bad_features"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "neither"),
        (b"junk" * 100, "neither"),
        (pickle.dumps({"pixel_values": 1}), "neither"),
        (npy(np.array([{"a": 1}], dtype=object), allow_pickle=True), "object; floating point"),
        (npy(np.zeros((24, 3, 14, 14), np.float32))[:-5], "npy"),
        (npy(np.zeros((24, 3, 14, 14), np.uint16)), "uint16; floating point"),
        (npy(np.zeros((24, 3, 14, 14), ">f4")), ">f4; floating point"),
        (npy(np.array(["a"])), "<U1; floating point"),
        (b"\x93NUMPY", "npy"),
        (b"\x93NUMPY\x09\x00\x00\x00", "version is 9.0"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "npy"),
        (header("(" * 3000), "npy"),
        (header("{'descr': '<f4', 'fortran_order': False, 'shape': (24, -3)}"), "shape"),
        (header("{'descr': ('<f4', (1 << 40,)), 'fortran_order': False, 'shape': (24,)}"), "npy"),
        (safetensors.torch.save({"features": torch.zeros(3)}), "no pixel_values in it, only features"),
        (
            safetensors.torch.save({"pixel_values": torch.zeros(24, 3, 14, 14), "grid_thws": torch.tensor([1, 6, 4])}),
            "the manifest says",
        ),
        (safetensors.torch.save({"pixel_values": values(), "grid_thws": torch.zeros(1, 3)}), "grid_thws is F32"),
    ],
)
def test_files_that_hold_no_features(content: bytes, words: str, published: PreprocessorConfig) -> None:
    with pytest.raises(ItemError, match=words) as caught:
        read_features(content, THW, published)
    assert caught.value.code == "bad_features"


@pytest.mark.parametrize("shape", [(2**70, 3, 14, 14), (2**62, 3, 14, 14), (2**31, 3, 14, 14)])
@pytest.mark.parametrize("order", [True, False])
def test_a_shape_that_no_file_holds_takes_no_memory(
    shape: tuple[int, ...], order: bool, published: PreprocessorConfig
) -> None:
    """Also where the manifest says the same."""
    content = header(str({"descr": "<f4", "fortran_order": order, "shape": shape}))
    for thw in ((1, 4, 6), (1, 1, shape[0])):
        tracemalloc.start()
        with pytest.raises(ItemError, match=r"patches|bytes of data") as caught:
            read_features(content, thw, published)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (caught.value.code, peak < 100_000) == ("bad_features", True)


def test_no_broken_file_ends_in_another_error(published: PreprocessorConfig) -> None:
    random = np.random.default_rng(0)
    whole = [npy(values().numpy()), safetensors.torch.save({"pixel_values": values(torch.bfloat16)})]
    for number in range(600):
        content = bytearray(whole[number % 2])
        for _ in range(random.integers(1, 5)):
            content[random.integers(0, 128)] = random.integers(0, 256)
        with contextlib.suppress(ItemError):
            read_features(bytes(content), THW, published)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_features_of_an_image_survive_every_cast(source: str, target: str, published: PreprocessorConfig) -> None:
    image = picture(70, 50)
    given = features(image, published, source)
    cast = to_tensor(cast_features(given, published, target).copy(), target)
    if "uint8" not in (source, target) and source != "float32":
        # What the source rounded away does not come back: the cast of what it holds is all a reader could do.
        assert torch.equal(cast, to_tensor(given.values, source).to(cast.dtype))
    else:
        assert torch.equal(cast, to_tensor(features(image, published, target).values, target))


@pytest.mark.parametrize("target", ["bfloat16", "float16", "uint8"])
def test_a_cast_that_would_lose_levels_is_refused(target: str, published: PreprocessorConfig) -> None:
    with pytest.raises(ItemError, match="would lose levels; use --dtype float32"):
        cast_features(ReadyFeatures(values().numpy(), "float32"), published, target)
    one_off = features(picture(70, 50), published)
    one_off.values[3, 1, 2, 3] += 1e-6
    with pytest.raises(ItemError, match="would lose levels"):
        cast_features(one_off, published, target)


def test_levels_of_another_config_are_no_levels_of_this_one(published: PreprocessorConfig) -> None:
    _, clip = cfg_and_config(image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.275])
    foreign = features(picture(70, 50), clip)
    with pytest.raises(ItemError, match="would lose levels"):
        cast_features(foreign, published, "uint8")
    levels = features(picture(70, 50), clip, "uint8")
    assert np.array_equal(cast_features(levels, clip, "float32"), foreign.values)
    assert np.array_equal(cast_features(foreign, clip, "uint8"), levels.values)


def test_double_precision_that_float32_holds_is_narrowed(published: PreprocessorConfig) -> None:
    exact = values().to(torch.float64).numpy()
    assert np.array_equal(cast_features(ReadyFeatures(exact, "float64"), published, "float32"), values().numpy())
    for more in (1e-12, 1e300):
        with pytest.raises(ItemError, match="would lose levels; no --dtype holds"):
            cast_features(ReadyFeatures(exact + more, "float64"), published, "float32")
    levels = features(picture(70, 50), published)
    double = ReadyFeatures(levels.values.astype(np.float64), "float64")
    for target in ("bfloat16", "float16"):
        expected = torch.from_numpy(levels.values).to(getattr(torch, target))
        assert np.array_equal(cast_features(double, published, target), to_array(expected))
