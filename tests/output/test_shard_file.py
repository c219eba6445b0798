"""shards.py: the file's bytes are the safetensors library's, whatever was dropped on the way."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import shard_format
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.disk import disk_errors
from kimik3_prep.errors import InputError, RunError
from kimik3_prep.output import shard_file as shards
from kimik3_prep.output.recipe import METADATA_KEY, canonical_json
from kimik3_prep.output.shard_file import ShardFormat, ShardWriter, open_shard
from kimik3_prep.pixels.tensors import torch_dtype
from kimik3_prep.run.item import write_blocks

METADATA = {"format": 1, "dtype": "float32", "image_mean": [0.5, 0.5, 0.5], "text": 'quote " and ü'}


def library_bytes(pixels: torch.Tensor, grids: list[tuple[int, int, int]]) -> bytes:
    tensors = {"pixel_values": pixels, "grid_thws": torch.tensor(grids, dtype=torch.int64).view(-1, 3)}
    return safetensors.torch.save(tensors, {METADATA_KEY: canonical_json(METADATA)})


def put(writer: ShardWriter, patch: int, content: bytes | memoryview) -> None:
    """Write patches as a worker does."""
    with disk_errors(writer.temporary, 1200):
        write_blocks(writer.descriptor, writer.offset(patch), iter([np.frombuffer(content, np.uint8)]))


def write(path: Path, form: ShardFormat, pixels: torch.Tensor, sizes: list[tuple[int, int]], kept: list[bool]) -> None:
    writer = ShardWriter(path, form, len(sizes), sum(rows * cols for rows, cols in sizes))
    survivors, start = [], 0
    for (rows, cols), keep in zip(sizes, kept, strict=True):
        count = rows * cols
        part = pixels[start : start + count].contiguous().view(torch.uint8).numpy()
        half = count // 2 * form.patch_bytes
        content = memoryview(part.tobytes())
        put(writer, start + count // 2, content[half:])
        put(writer, start, content[:half])
        if keep:
            survivors.append(((1, rows, cols), start, count))
        start += count
    writer.finish(survivors)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.booleans()), min_size=1, max_size=12),
)
def test_bytes_are_the_librarys(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, patch: int, images: list[tuple[int, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("shard") / "cpu-00000.safetensors"
    sizes = [(rows, cols) for rows, cols, _ in images]
    kept = [keep for _, _, keep in images]
    total = sum(rows * cols for rows, cols in sizes)
    pixels = torch.arange(total * 3 * patch * patch).view(total, 3, patch, patch).to(torch_dtype(dtype))
    write(path, shard_format(dtype, patch, METADATA), pixels, sizes, kept)
    keep_patches = torch.tensor([keep for rows, cols, keep in images for _ in range(rows * cols)])
    expected = library_bytes(pixels[keep_patches].contiguous(), [(1, r, c) for r, c, keep in images if keep])
    assert path.read_bytes() == expected
    assert os.listdir(path.parent) == [path.name]


def test_the_library_reads_it_back(tmp_path: Path) -> None:
    path = tmp_path / "cpu-00000.safetensors"
    pixels = torch.linspace(-1, 1, 6 * 3 * 4).view(6, 3, 2, 2)
    write(path, shard_format("float32", 2, METADATA), pixels, [(2, 1), (2, 2)], [True, True])
    loaded = safetensors.torch.load_file(path)
    assert torch.equal(loaded["pixel_values"], pixels)
    assert loaded["grid_thws"].tolist() == [[1, 2, 1], [1, 2, 2]]
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()[METADATA_KEY]) == METADATA


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_open_shard_reads_values_without_torch(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "cpu-00000.safetensors"
    pixels = torch.linspace(0, 200, 6 * 3 * 4).view(6, 3, 2, 2).to(torch_dtype(dtype))
    write(path, shard_format(dtype, 2, METADATA), pixels, [(2, 1), (2, 2)], [True, True])
    shard = open_shard(path)
    assert shard.metadata == METADATA
    assert np.array_equal(shard.floats("pixel_values", 1, 5), pixels[1:5].to(torch.float32).numpy())
    assert shard.raw("grid_thws").tolist() == [[1, 2, 1], [1, 2, 2]]


def test_a_shard_whose_images_all_failed_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "cpu-00000.safetensors"
    write(path, shard_format("uint8", 2, METADATA), torch.zeros(4, 3, 2, 2, dtype=torch.uint8), [(2, 2)], [False])
    shard = open_shard(path)
    assert shard.tensors["pixel_values"].shape == (0, 3, 2, 2)
    assert shard.raw("pixel_values").shape == (0, 3, 2, 2)
    assert shard.floats("grid_thws", 0, 10).shape == (0, 3)


def test_the_file_mode_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        path = tmp_path / "cpu-00000.safetensors"
        write(path, shard_format("uint8", 2, METADATA), torch.zeros(4, 3, 2, 2, dtype=torch.uint8), [(2, 2)], [True])
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path / "cpu-00000.safetensors", shard_format("uint8", 2, METADATA), 1, 100)

    def full(*args: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunError, match=r"No space left on device; 1,200 bytes needed"):
        put(writer, 0, bytes(12))
    with pytest.raises(RunError, match="No space left on device"):
        writer.finish([])
    assert os.listdir(tmp_path) == []


def test_a_write_that_takes_less_than_it_is_given_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: pwrite(file, content[:5], offset))
    path = tmp_path / "cpu-00000.safetensors"
    pixels = torch.arange(72, dtype=torch.uint8).view(6, 3, 2, 2)
    write(path, shard_format("uint8", 2, METADATA), pixels, [(1, 2), (2, 2)], [False, True])
    assert path.read_bytes() == library_bytes(pixels[2:], [(1, 2, 2)])


def test_an_aborted_shard_leaves_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "cpu-00000.safetensors", shard_format("uint8", 2, METADATA), 1, 100)
    put(writer, 0, bytes(12))
    writer.abort()
    assert os.listdir(tmp_path) == []


def test_a_move_larger_than_its_buffer_overlaps_safely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MOVED_AT_ONCE", 7)
    path = tmp_path / "cpu-00000.safetensors"
    pixels = torch.arange(240, dtype=torch.uint8).view(20, 3, 2, 2)
    write(path, shard_format("uint8", 2, METADATA), pixels, [(1, 1), (19, 1)], [False, True])
    assert path.read_bytes() == library_bytes(pixels[1:], [(1, 19, 1)])


@pytest.mark.parametrize("content", [b"", b"not a shard", b"\x08\0\0\0\0\0\0\0{}      ", b"\xff" * 64])
def test_what_is_no_shard_is_said(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a shard"):
        open_shard(path)


def test_a_shard_of_somebody_elses_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path, {METADATA_KEY: "{}"})
    with pytest.raises(InputError, match="weight"):
        open_shard(path)
