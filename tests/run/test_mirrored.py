"""Whole runs from and to an object store: the same bytes as between folders, whatever fails on the way."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import Run, picture, write_manifest
from pyarrow import parquet
from stores import Store

from kimik3_prep.checkpoint.config import published_path
from kimik3_prep.errors import InputError
from kimik3_prep.manifest.read import read_manifest

QUIET = ["--backend", "cpu", "--dtype", "uint8", "--shard-size", "120000", "--no-progress"]


def tree(root: Path) -> dict[str, str]:
    """Digests of all files of an output folder that do not tell when and where the images were.

    The plan does, and the run record holds its digest.
    """
    files = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        if name not in ("plan.parquet", "run.json")
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config, a manifest and its images, one of them twice, and features made elsewhere: three shards and more."""
    folder = tmp_path / "set"
    (folder / "img").mkdir(parents=True)
    for number in range(5):
        picture(100 + 3 * number, 90, seed=number).save(folder / "img" / f"{number} #.png")
    np.save(folder / "f.npy", np.zeros((16, 3, 14, 14), np.uint8))
    shutil.copy(published_path(), folder / "preprocessor_config.json")
    rows: list[dict[str, Any]] = [
        {"id": f"n{n}", "image": f"img/{n} #.png"}
        for n in (
            0,
            1,
            2,
            3,
            4,
        )
    ]
    rows += [{"id": "again", "image": "./img/1 #.png"}, {"id": "f", "features": "f.npy", "grid_thw": [1, 4, 4]}]
    write_manifest(folder / "m.jsonl", rows)
    return folder


def upload(s3: Store, folder: Path, prefix: str = "set") -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            s3.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_run_from_a_store_is_the_run_from_a_folder(s3: Store, folder: Path, run: Run) -> None:
    upload(s3, folder)
    local = run("encode", folder / "m.jsonl", *QUIET, "-o", "local")
    failing: dict[str, int] = {}

    def fault(method: str, key: str) -> int | None:
        failing[key] = failing.get(key, 0) + 1
        return 500 if failing[key] == 1 else None

    s3.fault = fault  # the first request for each object fails
    stored = run("encode", "s3://bucket/set/m.jsonl", *QUIET, "-o", "stored")
    assert (local.returncode, stored.returncode) == (0, 0), stored.stderr
    assert tree(folder.parent / "local") == tree(folder.parent / "stored")
    assert len(failing) >= 8
    plan = parquet.read_table(folder.parent / "stored" / "plan.parquet").to_pylist()
    assert [row["source_size"] for row in plan[:3]] == [
        (folder / "img" / f"{n} #.png").stat().st_size for n in (0, 1, 1)
    ]
    again = run("verify", "stored", "--against-source", "--manifest", "s3://bucket/set/m.jsonl", "--format", "json")
    assert (json.loads(again.stdout)["compared"], json.loads(again.stdout)["problems"]) == (6, [])


def test_a_run_from_a_web_server(folder: Path, run: Run) -> None:
    """Python's own: it knows sizes and no ranges."""

    class Files(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=folder.parent))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/set/m.jsonl?signed=yes"
        local = run("encode", folder / "m.jsonl", *QUIET, "-o", "local")
        served = run("encode", url, *QUIET)
    finally:
        server.shutdown()
    assert (local.returncode, served.returncode) == (0, 0), served.stderr
    assert tree(folder.parent / "local") == tree(folder.parent / "m-features")


def test_an_item_that_a_store_does_not_give(s3: Store, folder: Path, run: Run) -> None:
    upload(s3, folder)
    write_manifest(folder / "m.jsonl", [{"image": f"{name}.png"} for name in ("fine", "gone", "secret", "broken")])
    s3.put("set/m.jsonl", (folder / "m.jsonl").read_bytes())
    for name in ("fine", "secret", "broken"):
        s3.put(f"set/{name}.png", (folder / "img" / "1 #.png").read_bytes())
    s3.asked.clear()
    s3.fault = lambda method, key: {"set/secret.png": 403, "set/broken.png": 500}.get(key)
    done = run("encode", "s3://bucket/set/m.jsonl", *QUIET)
    assert done.returncode == 1, done.stderr
    rows = parquet.read_table(folder.parent / "m-features" / "index.parquet").to_pylist()
    assert [(row["id"], row["error_code"]) for row in rows] == [
        ("fine.png", None),
        ("gone.png", "not_found"),
        ("secret.png", "permission_denied"),
        ("broken.png", "unreadable"),
    ]
    assert len(s3.of("set/gone.png")) == len(s3.of("set/secret.png")) == 1
    assert len(s3.of("set/broken.png")) == 4


def test_manifests_of_every_kind(s3: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimik3_prep.manifest.read._PIECE", 10_000)  # so that none comes in one piece
    rows = [{"id": f"n{n}", "image": f"{n}.png", "caption": os.urandom(100).hex()} for n in range(300)]
    plain = write_manifest(tmp_path / "m.jsonl", rows)
    s3.put("d/m.jsonl", plain.read_bytes())
    s3.put("d/m.jsonl.gz", gzip.compress(plain.read_bytes()))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet", row_group_size=50)
    s3.put("d/m.parquet", (tmp_path / "m.parquet").read_bytes())
    expected = read_manifest(str(plain))
    for name in ("m.jsonl", "m.jsonl.gz", "m.parquet"):
        found = read_manifest(f"s3://bucket/d/{name}")
        assert found.items["image"].to_pylist() == expected.items["image"].to_pylist()
        assert found.base == "s3://bucket/d"
        assert len(s3.of(f"d/{name}")) > 1
    assert read_manifest("s3://bucket/d/m.jsonl").digest == expected.digest
    assert read_manifest("s3://bucket/d/m.parquet").digest == read_manifest(str(tmp_path / "m.parquet")).digest
    for url, what in (("s3://bucket/d/no.jsonl", "there is no such object"), ("s3://no/m.jsonl", "no such object")):
        with pytest.raises(InputError, match=what):
            read_manifest(url)


def test_a_small_object_is_read_once(s3: Store, folder: Path, run: Run) -> None:
    """So it cannot change between plan and fill."""
    upload(s3, folder)
    seen: list[str] = []

    def note(method: str, key: str) -> int | None:
        if method == "GET":
            seen.append(key)
        return None

    s3.fault = note
    done = run("encode", "s3://bucket/set/m.jsonl", *QUIET, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert seen.count("set/img/2%20%23.png") == 1


def test_what_a_url_needs_is_said_before_any_work(run: Run, tmp_path: Path) -> None:
    write_manifest(tmp_path / "m.jsonl", [{"image": "a.png"}])
    for arguments in (["s9://b/m.jsonl"], ["m.jsonl", "--config", "s9://b/c"]):
        done = run("encode", *arguments)
        assert done.returncode == 2
        assert "s9:// is no protocol fsspec knows" in done.stderr.replace("\n", " ")


def test_a_config_in_a_store(s3: Store, run: Run) -> None:
    s3.put("ckpt/preprocessor_config.json", published_path().read_bytes())
    for argument in ("s3://bucket/ckpt", "s3://bucket/ckpt/preprocessor_config.json"):
        done = run("validate-config", argument)
        assert done.returncode == 0, done.stderr
        assert "s3://bucket/ckpt/preprocessor_config.json" in done.stdout
    assert (
        "there is none"
        in run("validate-config", "s3://bucket/other").stdout + run("validate-config", "s3://bucket/other").stderr
    )
