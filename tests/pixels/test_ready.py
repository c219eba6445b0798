"""local.py: tensors that somebody else preprocessed."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import cfg_and_config, picture
from PIL import Image

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.errors import ItemError
from kimik3_prep.pixels.cpu import TORCH_DTYPES, write_patches
from kimik3_prep.pixels.ready import cast_features, read_features

THW = (1, 4, 6)


def features(image: Image.Image, config: PreprocessorConfig, dtype: str = "float32") -> torch.Tensor:
    grid = config.grid_rule().grid(*image.size)
    patch = config.patch_size
    out = torch.full((grid.patches, 3, patch, patch), 77, dtype=TORCH_DTYPES[dtype])
    write_patches(image, grid, config, out)
    return out


def npy(array: Any, **more: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **more)
    return buffer.getvalue()


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, 24 * 588).view(24, 3, 14, 14).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8])
def test_safetensors_come_back_unchanged(dtype: torch.dtype, published: PreprocessorConfig) -> None:
    tensor = values().mul(100).to(dtype)
    content = safetensors.torch.save({"pixel_values": tensor, "grid_thws": torch.tensor([THW])})
    assert torch.equal(read_features(content, THW, published), tensor)
    assert torch.equal(read_features(safetensors.torch.save({"pixel_values": tensor}), THW, published), tensor)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8"])
def test_npy_comes_back_unchanged(dtype: str, published: PreprocessorConfig) -> None:
    array = values().numpy().astype(dtype)
    assert np.array_equal(read_features(npy(array), THW, published).numpy(), array)
    assert np.array_equal(read_features(npy(np.asfortranarray(array)), THW, published).numpy(), array)


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
        (npy(np.array([{"a": 1}], dtype=object), allow_pickle=True), "allow_pickle"),
        (npy(np.zeros((24, 3, 14, 14), np.float32))[:-5], "npy"),
        (npy(np.array(["a"])), "npy"),
        (safetensors.torch.save({"features": torch.zeros(3)}), "no pixel_values in it, only features"),
        (
            safetensors.torch.save({"pixel_values": torch.zeros(24, 3, 14, 14), "grid_thws": torch.tensor([1, 6, 4])}),
            "the manifest says",
        ),
    ],
)
def test_files_that_hold_no_features(content: bytes, words: str, published: PreprocessorConfig) -> None:
    with pytest.raises(ItemError, match=words) as caught:
        read_features(content, THW, published)
    assert caught.value.code == "bad_features"


@pytest.mark.parametrize("source", TORCH_DTYPES)
@pytest.mark.parametrize("target", TORCH_DTYPES)
def test_features_of_an_image_survive_every_cast(source: str, target: str, published: PreprocessorConfig) -> None:
    image = picture(70, 50)
    given = features(image, published, source)
    cast = cast_features(given, published, TORCH_DTYPES[target])
    if (source, target) in (("bfloat16", "float32"), ("float16", "float32")):
        assert torch.equal(cast, given.to(torch.float32))  # widening is exact, and is all a reader could do
    elif {source, target} == {"bfloat16", "float16"}:
        assert torch.equal(cast, given.to(cast.dtype))
    else:
        assert torch.equal(cast, features(image, published, target))


@pytest.mark.parametrize("target", ["bfloat16", "float16", "uint8"])
def test_a_cast_that_would_lose_levels_is_refused(target: str, published: PreprocessorConfig) -> None:
    with pytest.raises(ItemError, match="would lose levels; use --dtype float32"):
        cast_features(values(), published, TORCH_DTYPES[target])
    one_off = features(picture(70, 50), published)
    one_off[3, 1, 2, 3] += 1e-6
    with pytest.raises(ItemError, match="would lose levels"):
        cast_features(one_off, published, TORCH_DTYPES[target])


def test_levels_of_another_config_are_no_levels_of_this_one(published: PreprocessorConfig) -> None:
    _, clip = cfg_and_config(image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.275])
    foreign = features(picture(70, 50), clip)
    with pytest.raises(ItemError, match="would lose levels"):
        cast_features(foreign, published, torch.uint8)


def test_double_precision_that_float32_holds_is_narrowed(published: PreprocessorConfig) -> None:
    exact = values().to(torch.float64)
    assert torch.equal(cast_features(exact, published, torch.float32), values())
    with pytest.raises(ItemError, match="would lose levels"):
        cast_features(exact + 1e-12, published, torch.float32)
