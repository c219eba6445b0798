"""shard.py and item.py through whole runs: hanging and crashing decoders, stops, memory, and slow places."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import BINARY, Run, Silent, encode, picture, slow_jpeg, tree, until, write_manifest
from PIL import Image

from kimik3_prep.output import shard_file
from kimik3_prep.run.check import Settings
from kimik3_prep.run.prepare import prepare

ENCODE = ["encode", "m.jsonl", "--config", "kimi-k3", "-o", "out", "--no-progress"]


def children(process: int) -> list[int]:
    """Processes that `process` has started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == process and state != "Z":
            found.append(int(path.parent.name))
    return found


def codes(out: Path) -> list[str | None]:
    codes: list[str | None] = pq.read_table(out / "index.parquet")["error_code"].to_pylist()
    return codes


@functools.cache
def jpeg2000(side: int) -> bytes:
    """A picture of noise: seconds of a decoder that holds the interpreter's lock throughout."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (side, side), os.urandom(3 * side * side)).save(buffer, "JPEG2000")
    return buffer.getvalue()


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["progressive JPEG", "JPEG 2000"])
def test_an_image_that_takes_for_ever_fails_alone(backend: str, kind: str, run: Run, tmp_path: Path) -> None:
    content = slow_jpeg(4000, 4000) if kind == "progressive JPEG" else jpeg2000(3000)
    (tmp_path / "slow").write_bytes(content)
    for name in ("a.png", "b.png"):
        picture(64, 48).save(tmp_path / name)
    write_manifest(tmp_path / "m.jsonl", [{"image": name} for name in ("a.png", "slow", "b.png")])
    done = run(*ENCODE, "--backend", backend, "--device", "cpu", "--item-timeout", "0.9", "-j", "1", "--format", "json")
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["ok"], summary["failed"]) == (1, 2, 1)
    assert codes(tmp_path / "out") == [None, "timed_out", None]
    assert run("verify", "out").returncode == 0


@pytest.fixture
def crashing(tmp_path: Path) -> Iterator[Path]:
    """A manifest of five images; the decoder of one of them kills its process, as damaged decoders do."""
    for number in range(5):
        picture(64 + number, 48).save(tmp_path / f"{number}.png")
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os, signal\n"
        "from PIL import PngImagePlugin\n"
        "load = PngImagePlugin.PngImageFile.load\n"
        "def crash(self):\n"
        "    if self.size == (66, 48) and os.environ.get('CRASH'):\n"
        "        os.kill(os.getpid(), getattr(signal, os.environ['CRASH']))\n"
        "    return load(self)\n"
        "PngImagePlugin.PngImageFile.load = crash\n"
    )
    write_manifest(tmp_path / "m.jsonl", [{"image": f"{number}.png"} for number in range(5)])
    return hook


@pytest.mark.parametrize(("name", "code"), [("SIGSEGV", "decoder_crashed"), ("SIGKILL", "out_of_memory")])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_decoder_that_crashes_costs_its_image(crashing: Path, run: Run, name: str, code: str, backend: str) -> None:
    path = os.pathsep.join([str(crashing), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["--backend", backend, "--device", "cpu", "-j", "2"]
    done = run(*ENCODE, *options, env={"PYTHONPATH": path, "CRASH": name})
    assert done.returncode == 1, done.stderr
    assert codes(crashing.parent / "out") == [None, None, code, None, None]
    assert run(*ENCODE, *options, "--retry-failed").returncode == 0
    assert codes(crashing.parent / "out") == [None] * 5


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_ends_at_once_and_blames_no_image(how: signal.Signals, code: int, tmp_path: Path) -> None:
    (tmp_path / "slow.jpg").write_bytes(slow_jpeg(4000, 20_000))
    picture(64, 48).save(tmp_path / "a.png")
    write_manifest(tmp_path / "m.jsonl", [{"image": "a.png"}, {"image": "slow.jpg", "width": 4000, "height": 4000}])
    process = subprocess.Popen([str(BINARY), *ENCODE, "--backend", "cpu", "-j", "2"], cwd=tmp_path)
    until(lambda: list(tmp_path.glob("out/shards/*.tmp")) and children(process.pid))
    workers = children(process.pid)
    process.send_signal(how)
    assert process.wait(120) == code
    assert not set(workers) & set(children(os.getpid()))
    until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["plan.parquet", "run.json", "shards"]


def test_a_driver_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "slow.jpg").write_bytes(slow_jpeg(4000, 20_000))
    write_manifest(tmp_path / "m.jsonl", [{"image": "slow.jpg", "width": 4000, "height": 4000}])
    process = subprocess.Popen([str(BINARY), *ENCODE, "--backend", "cpu"], cwd=tmp_path)
    until(lambda: list(tmp_path.glob("out/shards/*.tmp")) and children(process.pid))
    workers = children(process.pid)
    process.kill()
    process.wait()
    until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))


def test_images_larger_than_all_memory_are_encoded_alone(tmp_path: Path) -> None:
    rows = []
    for number, side in enumerate([40, 900, 50, 800, 60, 70]):
        picture(side, side, seed=number).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png"})
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    assert encode(manifest, tmp_path / "little", memory=1_000_000, workers=3).ok == 6
    assert encode(manifest, tmp_path / "much", workers=2).ok == 6
    assert tree(tmp_path / "little") == tree(tmp_path / "much")


def test_the_number_of_workers_changes_no_byte(tmp_path: Path) -> None:
    rows = []
    for number in range(60):
        picture(20 + number, 30, ("RGB", "RGBA", "L", "P")[number % 4], number).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "backend": ("cpu", "gpu")[number % 2]})
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    trees = []
    for workers in (1, 2, 5):
        encode(manifest, tmp_path / f"{workers}", workers=workers, device="cpu", shard_size=100_000)
        trees.append(tree(tmp_path / f"{workers}"))
    assert trees[0] == trees[1] == trees[2]


class _Server(BaseHTTPRequestHandler):
    """Serves the files of a folder, counts requests, and answers none until several wait."""

    def do_GET(self) -> None:
        server: Any = self.server
        with server.lock:
            server.requests.append(self.path)
        content = (server.folder / self.path.strip("/")).read_bytes()
        begin, _, end = (self.headers.get("Range") or "bytes=0-").partition("=")[2].partition("-")
        part = content[int(begin) : int(end) + 1 if end else None]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def do_HEAD(self) -> None:
        server: Any = self.server
        self.send_response(200)
        self.send_header("Content-Length", str((server.folder / self.path.strip("/")).stat().st_size))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_small_file_in_a_slow_place_is_read_once(tmp_path: Path) -> None:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    server.folder, server.requests, server.lock = tmp_path, [], threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for number in range(30):
        picture(40 + number, 30).save(tmp_path / f"{number}.png")
    files, urls = ([{"id": str(n), "image": f"{base}{n}.png"} for n in range(30)] for base in ("", f"{address}/"))
    encode(write_manifest(tmp_path / "urls.jsonl", urls), tmp_path / "slow", workers=2)
    server.shutdown()
    server.server_close()
    assert sorted(server.requests) == sorted(f"/{number}.png" for number in range(30))
    encode(write_manifest(tmp_path / "files.jsonl", files), tmp_path / "quick", workers=2)
    features = [(tmp_path / out / "shards" / "cpu-00000.safetensors").read_bytes() for out in ("slow", "quick")]
    pixels = [content[8 + int.from_bytes(content[:8], "little") :] for content in features]
    assert pixels[0] == pixels[1]


def test_the_driver_opens_no_image_and_imports_no_torch(tmp_path: Path) -> None:
    picture(40, 30).save(tmp_path / "a.png")
    write_manifest(tmp_path / "m.jsonl", [{"image": "a.png"}])
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from PIL import Image\n"
        "Image.open = None\n"
        "from conftest import Silent\n"
        "from kimik3_prep.run.check import Settings\n"
        "from kimik3_prep.run.prepare import prepare\n"
        "settings = Settings('m.jsonl', Path('out'), 'kimi-k3', backend='cpu')\n"
        "sys.exit(prepare(settings, Silent()).failed + ('torch' in sys.modules))\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0


def test_workers_do_not_wait_for_each_other_at_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system lets one process at a time write into a file: two workers begin with two shards, long as they are."""
    picture(28, 28).save(tmp_path / "a.png")
    manifest = write_manifest(tmp_path / "m.jsonl", [{"id": str(n), "image": "a.png"} for n in range(400)])
    create, created, at_first = shard_file.create, list[Path](), list[int]()

    def counting(path: Path) -> int:
        created.append(path)
        return create(path)

    class Counting(Silent):
        def advance(self, images: int, pixels: int, size: int, failed: int) -> None:
            if self.phases[-1][0] == "images":
                at_first.append(len(created))

    monkeypatch.setattr(shard_file, "create", counting)
    plain = Settings(str(manifest), tmp_path / "out", "kimi-k3", dtype="uint8", shard_size=800 * 588, dedupe="off")
    for workers in (1, 2):
        created.clear()
        at_first.clear()
        prepare(replace(plain, workers=workers, output=tmp_path / str(workers)), Counting())
        assert (at_first[0], len(created)) == (workers, 2)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
