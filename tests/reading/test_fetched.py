"""fetched.py: outputs in a bucket give what the folder gives, through caches that are shared, cleared and damaged."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, Silent, picture, write_manifest
from stores import Store
from torch.utils.data import DataLoader

from kimik3_prep.errors import ChecksumDiffers, FailedItem, InputError, StoreError
from kimik3_prep.reading import fetched
from kimik3_prep.reading.features import Features, FeatureStore
from kimik3_prep.reading.inspection import OutputDescription, inspect
from kimik3_prep.reading.training import FeatureDataset, TokenBudgetSampler
from kimik3_prep.reading.verify import verify
from kimik3_prep.run.check import Settings
from kimik3_prep.run.prepare import prepare

URL = "s3://bucket/runs/features"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of nine pictures in several shards, one picture named twice and one missing."""
    folder = tmp_path_factory.mktemp("fetched")
    rows: list[dict[str, Any]] = [{"id": "gone", "image": "gone.png"}, {"id": "again", "image": "3.png"}]
    for number in range(9):
        picture(40 + 20 * number, 90 - 7 * number, seed=number).save(folder / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png", "caption": f"no {number}"})
    manifest = write_manifest(folder / "m.jsonl", rows)
    prepare(Settings(str(manifest), folder / "out", "kimi-k3", dtype="uint8", shard_size=100 * 588), Silent())
    assert len(list(folder.glob("out/shards/*.safetensors"))) > 2
    return folder / "out"


@pytest.fixture
def bucket(folder: Path, s3: Store) -> Store:
    """The bucket with a copy of the run."""
    for path in folder.rglob("*"):
        if path.is_file():
            s3.put(f"runs/features/{path.relative_to(folder)}", path.read_bytes())
    s3.asked.clear()
    return s3


def same(one: Features, other: Features) -> bool:
    return bool(torch.equal(one.pixel_values, other.pixel_values)) and (one.row, one.scale) == (other.row, other.scale)


def shards_in(cache: Path) -> list[Path]:
    return sorted(cache.glob("store-*/shards/*.safetensors"))


@pytest.mark.parametrize("order", ["manifest", "shard"])
def test_a_store_in_a_bucket_gives_what_the_folder_gives(
    order: Any, folder: Path, bucket: Store, tmp_path: Path
) -> None:
    here, there = FeatureStore(folder), FeatureStore(URL + "/", cache=tmp_path)
    assert len(there) == len(here)
    pairs = list(zip(here.iterate(order), there.iterate(order), strict=True))
    assert len(pairs) == 10
    assert all(same(*pair) for pair in pairs)
    ids = ["n7", "again", "n0", "n7", 5]
    for one, other in zip(here.batch(ids)._each(torch.Tensor.clone).pixel_values, there.batch(ids).pixel_values):  # noqa: B905
        assert torch.equal(one, other)
    assert all(map(same, here.items(ids), there.items(ids)))
    with pytest.raises(FailedItem):
        there["gone"]
    raw = pickle.loads(pickle.dumps(FeatureStore(URL, raw=True, cache=tmp_path)))
    assert torch.equal(raw["n4"].pixel_values, FeatureStore(folder, raw=True)["n4"].pixel_values)
    assert repr(raw).startswith(f"FeatureStore('{URL}'")


def test_only_what_is_asked_for_is_brought_and_only_once(folder: Path, bucket: Store, tmp_path: Path) -> None:
    store = FeatureStore(URL, cache=tmp_path)
    store["n4"]
    (name,) = {key for _, key, _ in bucket.asked if key.endswith(".safetensors")}
    first, second = bucket.of(name)
    assert first.startswith("bytes=0-")
    count = store["n4"].row["patch_count"] * 588
    begin, end = map(int, second.removeprefix("bytes=").split("-"))
    assert end - begin + 1 == count
    bucket.asked.clear()
    assert same(FeatureStore(URL, cache=tmp_path)["n4"], FeatureStore(folder)["n4"])
    assert [(verb, key) for verb, key, _ in bucket.asked if verb == "GET" and "list-type" not in key] == []


def test_items_that_lie_beside_each_other_come_in_one_request(folder: Path, bucket: Store, tmp_path: Path) -> None:
    store = FeatureStore(URL, cache=tmp_path)
    list(store.iterate("shard"))
    for path in folder.glob("shards/*.safetensors"):
        assert len(bucket.of(f"runs/features/shards/{path.name}")) == 2  # the head, and all items


def test_without_a_cache_the_files_go_when_the_process_ends(folder: Path, bucket: Store, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from kimik3_prep import FeatureStore
print(len(FeatureStore({URL!r})["n1"].pixel_values))
print(len(list(Path({str(tmp_path)!r}).rglob("*.safetensors"))))
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == [str(len(FeatureStore(folder)["n1"].pixel_values)), "1"]
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_was_damaged_is_filled_again(folder: Path, bucket: Store, tmp_path: Path) -> None:
    store = FeatureStore(URL, cache=tmp_path)
    assert len(list(store)) == 10
    for path in shards_in(tmp_path):
        content = bytearray(path.read_bytes())
        content[-300:] = bytes(300)
        with open(path, "r+b") as file:
            file.write(content)
    for opened in (store, FeatureStore(URL, cache=tmp_path)):
        assert all(map(same, opened, FeatureStore(folder)))


def test_a_shard_that_is_cleared_away_while_it_is_open_is_brought_again(
    folder: Path, bucket: Store, tmp_path: Path
) -> None:
    store = FeatureStore(URL, cache=tmp_path)
    store["n4"]
    fetched.trim(tmp_path, 0)
    assert shards_in(tmp_path) == []
    assert all(map(same, store, FeatureStore(folder)))


def test_damage_in_the_bucket_is_named(folder: Path, bucket: Store, tmp_path: Path) -> None:
    for path in folder.glob("shards/*.safetensors"):
        content = path.read_bytes()
        bucket.put(f"runs/features/shards/{path.name}", content[:-1] + bytes([content[-1] ^ 1]))
    store = FeatureStore(URL, cache=tmp_path)
    outcomes = []
    for row in store.ok:
        try:
            outcomes.append(same(store[row], FeatureStore(folder)[row]))
        except ChecksumDiffers as error:
            outcomes.append(URL in str(error))
    assert all(outcomes)
    bucket.client().delete_object(Bucket="bucket", Key="runs/features/shards/cpu-00000.safetensors")
    with pytest.raises(StoreError, match=rf"cannot read {URL}/shards/cpu-00000.safetensors: there is no such object"):
        list(FeatureStore(URL, cache=tmp_path / "other"))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 64,
        (9).to_bytes(8, "little") + b"[1, 2, 3]",
        b"\x40" + bytes(7) + b'{"pixel_values": {"data_offsets": [0, 9999999999999999999999999]}}',
        b"\x28" + bytes(7) + b'{"pixel_values": {"data_offsets": "abc"}}',
    ],
)
def test_a_shard_with_an_odd_head_is_refused(head: bytes, bucket: Store, tmp_path: Path, folder: Path) -> None:
    for path in folder.glob("shards/*.safetensors"):
        bucket.put(f"runs/features/shards/{path.name}", head)
    with pytest.raises(StoreError, match=r"is no shard of kimik3-prep"):
        FeatureStore(URL, cache=tmp_path)["n4"]


def test_a_run_that_changes_in_the_bucket_gives_no_wrong_data(folder: Path, bucket: Store, tmp_path: Path) -> None:
    old = FeatureStore(URL, cache=tmp_path)
    old["n4"]
    other = tmp_path / "set"
    shutil.copytree(folder.parent, other, ignore=shutil.ignore_patterns("out"))
    for number in range(9):
        picture(40 + 20 * number, 90 - 7 * number, seed=number + 50).save(other / f"{number}.png")
    prepare(Settings(str(other / "m.jsonl"), other / "out", "kimi-k3", dtype="uint8", shard_size=100 * 588), Silent())
    for path in (other / "out").rglob("*"):
        if path.is_file():
            bucket.put(f"runs/features/{path.relative_to(other / 'out')}", path.read_bytes())
    with pytest.raises(StoreError):
        list(old)
    assert all(map(same, FeatureStore(URL, cache=tmp_path), FeatureStore(other / "out")))


def test_processes_share_a_cache_that_is_cleared_under_them(
    folder: Path, bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched, "_TRIM_EVERY", 1)
    store, size = FeatureStore(URL, cache=tmp_path, cache_size=120_000), 120_000
    dataset = FeatureDataset(store)
    expected = list(FeatureStore(folder))
    for seed in range(2):
        sampler = TokenBudgetSampler(dataset.num_tokens, 60, shuffle=True, seed=seed)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, collate_fn=list)
        by_id = {item.id: item for batch in loader for item in batch}
        assert all(same(by_id[item.id], item) for item in expected)
    fetched.trim(tmp_path, size)
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.glob("store-*/**/*") if path.is_file()) <= size


def test_several_stores_in_a_folder_and_in_a_bucket_are_one(folder: Path, bucket: Store, tmp_path: Path) -> None:
    picture(70, 60, seed=9).save(tmp_path / "new.png")
    manifest = write_manifest(tmp_path / "m.jsonl", [{"id": "new", "image": "new.png"}])
    prepare(Settings(str(manifest), tmp_path / "more", "kimi-k3", dtype="uint8", shard_size=100 * 588), Silent())
    store = FeatureStore([URL, tmp_path / "more"], cache=tmp_path / "cache")
    assert [item.id for item in store][-2:] == ["n8", "new"]
    assert same(store["n3"], FeatureStore(folder)["n3"])
    assert torch.equal(
        store.batch(["new", "n1"]).num_tokens, torch.tensor([store["new"].num_tokens, store["n1"].num_tokens])
    )


@pytest.fixture
def web(folder: Path) -> Iterator[str]:
    """The run on a web server that knows no ranges and no lists."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_a_web_server_serves_a_store(web: str, folder: Path, tmp_path: Path, run: Run) -> None:
    assert all(map(same, FeatureStore(web, cache=tmp_path), FeatureStore(folder)))
    done = run("verify", web)
    assert done.returncode == 2
    assert "a web server does not say which files there are" in " ".join(done.stderr.split())
    shard = json.loads(run("inspect", f"{web}/shards/cpu-00000.safetensors", "--format", "json").stdout)
    here = json.loads(run("inspect", str(folder / "shards/cpu-00000.safetensors"), "--format", "json").stdout)
    assert {**shard, "path": 0} == {**here, "path": 0}


# --- inspect and verify -----------------------------------------------------------------------------------------------


def test_inspect_and_verify_take_urls(folder: Path, bucket: Store, run: Run, tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        there, here = run(command, URL, "--format", "json"), run(command, str(folder), "--format", "json")
        assert (there.returncode, there.stderr) == (0, "")
        assert json.loads(there.stdout) == {**json.loads(here.stdout), "path": URL}
    done = run("inspect", URL, "--render", "png", "--first", "2", "--report", "page.html")
    assert done.returncode == 0, done.stderr
    assert run("inspect", str(folder), "--render", "here", "--first", "2", "--report", "here.html").returncode == 0
    for path in (tmp_path / "here").iterdir():
        assert path.read_bytes() == (tmp_path / "png" / path.name).read_bytes()
    assert (tmp_path / "page.html").read_bytes() == (tmp_path / "here.html").read_bytes().replace(
        str(folder).encode(), URL.encode()
    )


@pytest.mark.parametrize("name", ["index.parquet", "shards/cpu-00001.parquet"])
def test_an_index_at_a_url_is_described(name: str, folder: Path, bucket: Store) -> None:
    there, here = inspect(f"{URL}/{name}"), inspect(folder / name)
    assert (there.path, here.path) == (f"{URL}/{name}", str(folder / name))
    assert there.first == here.first  # type: ignore[union-attr]


def test_an_unfinished_output_at_a_url_is_described(folder: Path, bucket: Store) -> None:
    bucket.client().delete_object(Bucket="bucket", Key="runs/features/index.parquet")
    bucket.client().delete_object(Bucket="bucket", Key="runs/features/shards/cpu-00001.parquet")
    described = inspect(URL)
    assert isinstance(described, OutputDescription)
    assert described.finished is False
    assert "cpu-00001" not in described.shards
    assert len(described.shards) > 1
    with pytest.raises(InputError, match=r"the run in it is not finished"):
        FeatureStore(URL)


def test_verify_names_what_is_damaged_in_a_bucket(folder: Path, bucket: Store, tmp_path: Path) -> None:
    content = (folder / "shards/cpu-00001.safetensors").read_bytes()
    bucket.put("runs/features/shards/cpu-00001.safetensors", content[:-1] + bytes([content[-1] ^ 1]))
    bucket.put("runs/features/shards/cpu-00077.safetensors", b"")
    bucket.client().delete_object(Bucket="bucket", Key="runs/features/shards/cpu-00000.parquet")
    report = verify(URL)
    assert {finding.file for finding in report.problems} == {
        "shards/cpu-00000.parquet",
        "shards/cpu-00001.safetensors",
        "shards/cpu-00077.safetensors",
    }
    assert report.shards == len(list(folder.glob("shards/*.safetensors")))


def test_what_is_no_output_is_refused_in_a_sentence(bucket: Store, run: Run) -> None:
    with pytest.raises(InputError, match=r"no index.parquet and no run.json in it"):
        FeatureStore("s3://bucket/nothing")
    for command in ("inspect", "verify"):
        done = run(command, "s3://bucket/nothing")
        assert (done.returncode, done.stdout) == (2, "")
        assert "s3://bucket/nothing: no run.json in it" in " ".join(done.stderr.split())
    done = run("verify", "nowhere://bucket/features")
    assert "nowhere:// is no protocol fsspec knows" in " ".join(done.stderr.split())
    bucket.fault = lambda method, key: 403
    with pytest.raises(InputError, match=r"the store does not allow it"):
        FeatureStore(URL)
