"""A flipped bit anywhere in a run: verify names that very file, or no reader notices anything."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import encode, flip, picture, write_manifest

from kimik3_prep import FeatureStore
from kimik3_prep.errors import PrepError
from kimik3_prep.reading.verify import verify

#: Bytes of a file between two flips. scripts/torture leaves none out.
_STRIDE = 149


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rows: two images, a repeat, a failure."""
    folder = tmp_path_factory.mktemp("damage")
    picture(20, 20).save(folder / "a.png")
    picture(30, 20, seed=1).save(folder / "b.png")
    rows: list[dict[str, Any]] = [{"id": name, "image": f"{name}.png"} for name in ("a", "b", "gone")]
    rows.append({"id": "again", "image": "a.png", "caption": "the first once more"})
    encode(write_manifest(folder / "m.jsonl", rows), folder / "out", dtype="uint8")
    return folder / "out"


def everything(root: Path) -> object:
    """All that FeatureStore gives of a run, or the sentence with which it refuses."""
    try:
        store = FeatureStore(root)
        items = [(item.pixel_values.numpy().tobytes(), item.grid_thw, item.num_tokens, item.row) for item in store]
        return items, [str(failure) for failure in store.failures], store.num_tokens.tolist(), store.ok.tolist()
    except PrepError as error:
        return str(error)


def named(root: Path, damaged: str) -> bool:
    """Whether verify names the damaged file. It names intact files only where it cannot know which of two it is."""
    try:
        findings = verify(root).problems
    except PrepError as error:
        return damaged in str(error)
    intact = [finding for finding in findings if finding.file != damaged]
    assert all("one of the two files is damaged" in finding.what for finding in intact), (damaged, intact)
    return bool(findings)


@pytest.mark.parametrize(
    "name", ["run.json", "plan.parquet", "shards/cpu-00000.parquet", "shards/cpu-00000.safetensors", "index.parquet"]
)
def test_nobody_waits_for_a_pipe(whole: Path, tmp_path: Path, name: str) -> None:
    root = Path(shutil.copytree(whole, tmp_path / "out"))
    (root / name).unlink()
    os.mkfifo(root / name)
    assert named(root, name)
    refused = isinstance(everything(root), str)
    assert refused == (name in ("shards/cpu-00000.safetensors", "index.parquet"))


@pytest.mark.parametrize(
    "name", ["run.json", "plan.parquet", "shards/cpu-00000.parquet", "shards/cpu-00000.safetensors", "index.parquet"]
)
def test_a_flipped_bit_is_named_or_without_effect(whole: Path, tmp_path: Path, name: str) -> None:
    root = Path(shutil.copytree(whole, tmp_path / "out"))
    good, before = everything(root), (root / name).read_bytes()
    assert not isinstance(good, str)
    chance = random.Random(name)
    found = 0
    for at in range(chance.randrange(_STRIDE), len(before), _STRIDE):
        bit = chance.randrange(8)
        flip(root / name, at, bit)
        if named(root, name):
            found += 1
        else:
            assert everything(root) == good, (at, bit)
        (root / name).write_bytes(before)
    assert found > len(before) / _STRIDE / 4
    assert not named(root, name)
