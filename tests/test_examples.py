"""scripts/examples: each runs as its first lines say, on a small sample."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BINARY, Run, picture, write_manifest
from safetensors.torch import load_file
from stand_ins import tiny_tokenizer

from kimik3_prep import FeatureStore

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"


def example(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{BINARY.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(4):
        picture(400 + 50 * number, 300, seed=number).save(folder / f"{number}.jpg")
    (folder / "broken.jpg").write_bytes((folder / "0.jpg").read_bytes()[:-500])
    return folder


@pytest.fixture
def manifest(pictures: Path, tmp_path: Path) -> Path:
    rows = [{"id": path.stem, "image": str(path)} for path in sorted(pictures.iterdir())]
    return write_manifest(tmp_path / "m.jsonl", rows)


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    for path in EXAMPLES.glob("*"):
        assert f'example("{path.name}"' in tested, path.name


def test_folder_to_batches(pictures: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second time there is nothing left to encode
        done = example("folder_to_batches.py", pictures, tmp_path / "features")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("4 images, ")


def test_sglang_request(manifest: Path, run: Run, tmp_path: Path) -> None:
    assert run("encode", manifest, "--config", "kimi-k3", "-o", "out").returncode == 1
    tiny_tokenizer().save_pretrained(tmp_path / "checkpoint")
    more = ("--tokenizer", tmp_path / "checkpoint", "--question", "?")
    done = example("sglang_request.py", tmp_path / "out", "1", "0", *more)
    tokens = sum(FeatureStore(tmp_path / "out")[name].num_tokens for name in ("1", "0"))
    assert done.returncode == 0, done.stderr
    framing = len("image 450x300") + len("image 400x300") + 2 * 3 + len("?") + 3
    assert done.stdout.startswith(f"{tokens + framing:,} token ids\nformat: processor_output\nmodality: IMAGE\n")
    assert "pixel_values: torch.bfloat16 (" in done.stdout
    assert f"image_grid_thw: torch.int64 {(2, 3)}" in done.stdout
    for folder, name, said in [
        ("out", "7", "no item '7'"),
        ("none", "1", "does not exist"),
        ("out", "broken", "truncated"),
    ]:
        done = example("sglang_request.py", tmp_path / folder, name, *more)
        assert (done.returncode, done.stderr.count("\n  File")) == (1, 0), done.stderr
        assert said in done.stderr


def test_pack_by_tokens(manifest: Path, run: Run, tmp_path: Path) -> None:
    assert run("encode", manifest, "--config", "kimi-k3", "--index-only", "-o", "index").returncode == 0
    rows = manifest.read_text().splitlines()[:-1]  # the broken one is known for broken once it is decoded
    manifest.write_text("\n".join(rows))
    assert run("encode", manifest, "--config", "kimi-k3", "--index-only", "-o", "index", "--overwrite").returncode == 0
    done = example("pack_by_tokens.py", tmp_path / "index")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 images in 1 batches of ")
    assert "ids 0, 1, 2, 3" in done.stdout
    assert json.loads((tmp_path / "index" / "run.json").read_text())["base"] == ".."


def test_same_pixels(manifest: Path, run: Run, tmp_path: Path) -> None:
    assert run("encode", manifest, "--config", "kimi-k3", "-o", "out").returncode == 1
    values = FeatureStore(tmp_path / "out")["2"].pixel_values.numpy()
    np.save(tmp_path / "same.npy", values)
    assert example("same_pixels.py", tmp_path / "out", "2", tmp_path / "same.npy").stdout.startswith("0 of ")
    values[5, 1, 2, 3] += 0.1
    np.save(tmp_path / "other.npy", values)
    told = example("same_pixels.py", tmp_path / "out", "2", tmp_path / "other.npy").stdout
    assert told.startswith("1 of ")
    assert "by up to 12.8 levels" in told
    assert "most in patch 5: row 0, column 5" in told
    np.save(tmp_path / "short.npy", values[:-1])
    assert example("same_pixels.py", tmp_path / "out", "2", tmp_path / "short.npy").returncode == 1


TOWER = """
import torch

def make(device):
    weight = torch.linspace(-1, 1, 3 * 14 * 14 * 4 * 8, device=device).view(-1, 8).bfloat16()

    def tower(pixels, grids):
        _, rows, columns = grids[0].tolist()
        merged = pixels.view(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).reshape(rows * columns // 4, -1)
        return merged @ weight

    return tower
"""


def test_embed_tower(manifest: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tiny_tower.py").write_text(TOWER)
    command = ("encode", manifest, "--config", "kimi-k3", "--dtype", "uint8", "--shard-size", "1MB", "-o", "out")
    assert run(*command).returncode == 1
    arguments = (tmp_path / "out", tmp_path / "embedded", "tiny_tower:make")
    done = example("embed_tower.py", *arguments)
    assert done.returncode == 0, done.stderr
    store = FeatureStore(tmp_path / "out", dtype="bfloat16")
    shards = sorted({f"{item.row['shard']}.safetensors" for item in store})
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == shards
    assert len(shards) > 1
    tower = importlib.import_module("tiny_tower").make("cpu")
    for item in store:
        held = load_file(tmp_path / "embedded" / f"{item.row['shard']}.safetensors")
        begin = int(held["num_tokens"][: item.row["row"]].sum())
        own = held["embeddings"][begin : begin + item.num_tokens]
        assert torch.equal(own, tower(item.pixel_values, torch.tensor([item.grid_thw])))
    lost = tmp_path / "embedded" / shards[0]
    before = lost.read_bytes()
    lost.unlink()
    assert example("embed_tower.py", *arguments).stdout.startswith(
        f"{shards[0]}: "
    )  # it goes on, and nothing else is done again
    assert lost.read_bytes() == before
    assert example("embed_tower.py", *arguments).stdout == ""


#: As in README: one feature by id, normalised, without this package.
WITHOUT = """
import pyarrow.parquet as pq
from safetensors import safe_open

index = pq.read_table("out/index.parquet", filters=[("id", "=", "1"), ("status", "=", "ok")])  # not the failed ones
row = index.to_pylist()[0]
with safe_open(f"out/shards/{row['shard']}.safetensors", "numpy") as shard:
    begin, end = row["patch_start"], row["patch_start"] + row["patch_count"]
    values = shard.get_slice("pixel_values")[begin:end].astype("float32")
if index.schema.metadata[b"kimik3_prep"].find(b'"dtype":"uint8"') >= 0:  # levels: the published mean and std
    values = values / 127.5 - 1
"""


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_feature_without_the_package(manifest: Path, run: Run, tmp_path: Path, dtype: str) -> None:
    assert run("encode", manifest, "--config", "kimi-k3", "--dtype", dtype, "-o", "out").returncode == 1
    code = f"{WITHOUT}\nimport sys, numpy\nassert 'kimik3_prep' not in sys.modules\nnumpy.save('values.npy', values)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    values = np.load(tmp_path / "values.npy")
    assert values.dtype == np.float32
    assert np.array_equal(values, FeatureStore(tmp_path / "out")["1"].pixel_values.numpy())
