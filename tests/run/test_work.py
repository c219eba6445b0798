"""work.py: one job, one committed shard, on any executor."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from conftest import picture, recipe, write_manifest

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.errors import ItemError
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.output.folder import Output
from kimik3_prep.output.tables import shard_plan
from kimik3_prep.run.jobs import Control, ShardJob
from kimik3_prep.run.planning import Headers, find_spans, make_plan
from kimik3_prep.run.threads import Stopped
from kimik3_prep.run.work import materialize_shard


def job(folder: Path, config: PreprocessorConfig, root: str = "out", backend: str = "cpu", **sizes: Any) -> ShardJob:
    """A shard of five pictures, one of them no picture."""
    rows = []
    for number in range(5):
        picture(50 + number, 40, "RGBA", seed=number).save(folder / f"{number}.png")
        rows.append({"id": str(number), "image": f"{number}.png", "width": 50 + number, "height": 40})
    (folder / "2.png").write_bytes(b"no picture")
    manifest = read_manifest(str(write_manifest(folder / "m.jsonl", rows)))
    spans = find_spans(manifest.items, manifest.base, backend, True)
    headers = Headers(5)
    headers.width[:] = [50 + number for number in range(5)]
    headers.height[:] = 40
    table = make_plan(manifest.items, spans, headers, config.grid_rule(), 10_000)
    shard = shard_plan(table["shard"][0].as_py(), table)
    made_by = recipe(config=config, dtype="uint8", max_pixels=10**6)
    return ShardJob(Output(folder / root), manifest.base, shard, made_by, "cpu", 1 << 20)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_pickled_job_gives_the_same_bytes(backend: str, tmp_path: Path, published: PreprocessorConfig) -> None:
    outputs = []
    for root in ("one", "two"):
        task = pickle.loads(pickle.dumps(job(tmp_path, published, root, backend)))
        with ThreadPoolExecutor(3) as images:
            result = materialize_shard(task, images, Control())
        assert (result.ok_rows, result.failed_rows, result.images) == (4, 1, 4)
        names = sorted(os.listdir(tmp_path / root / "shards"))
        assert names == [f"{backend}-00000.parquet", f"{backend}-00000.safetensors"]
        outputs.append([(tmp_path / root / "shards" / name).read_bytes() for name in names])
        assert result.size == len(outputs[-1][1])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_failed_image_leaves_a_row_and_no_gap(backend: str, tmp_path: Path, published: PreprocessorConfig) -> None:
    seen: list[tuple[int, int, ItemError | None]] = []
    with ThreadPoolExecutor(2) as images:
        result = materialize_shard(
            job(tmp_path, published, backend=backend), images, Control(on_item=lambda *event: seen.append(event))
        )
    folder = tmp_path / "out" / "shards"
    tensors = safetensors.numpy.load_file(folder / f"{result.name}.safetensors")
    rows = pq.read_table(folder / f"{result.name}.parquet").to_pylist()
    assert [row["row"] for row in rows] == [0, 1, None, 2, 3]
    assert [row["error_code"] for row in rows] == [None, None, "unidentified", None, None]
    starts = [row["patch_start"] for row in rows if row["status"] == "ok"]
    assert starts == [0, *np.cumsum(tensors["grid_thws"].prod(1))[:-1]]
    assert len(tensors["pixel_values"]) == result.patches
    assert len(seen) == 5
    assert sorted(event[0] for event in seen) == [40 * (50 + number) for number in range(5)]
    assert [error.code for _, _, error in seen if error] == ["unidentified"]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_stop_leaves_nothing(backend: str, tmp_path: Path, published: PreprocessorConfig) -> None:
    control = Control()
    control.stop.set()
    with ThreadPoolExecutor(2) as images, pytest.raises(Stopped):
        materialize_shard(job(tmp_path, published, backend=backend), images, control)
    assert os.listdir(tmp_path / "out" / "shards") == []
