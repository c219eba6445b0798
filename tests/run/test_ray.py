"""ray.py: the local bytes on a cluster, whatever becomes of its workers and of the driver."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import BINARY, Run, Silent, local_row, picture, slow_jpeg, tree, until, write_manifest

from kimik3_prep.errors import DiskRefuses, InputError, RunError, TooManyFailures
from kimik3_prep.output.folder import Output
from kimik3_prep.run import fill
from kimik3_prep.run import ray as ray_engine
from kimik3_prep.run.check import Settings
from kimik3_prep.run.item import planned_items
from kimik3_prep.run.prepare import prepare
from kimik3_prep.run.ray import Crew, _connected, _gpus, _portable, _ray_task, _room, _versions, fill_on_ray
from kimik3_prep.run.shard import Control, ShardJob

ONE = Crew(workers=1, item_timeout=60, memory=None, most_failures=None)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A Ray of two processors in this process; `ray.address` is where other processes find it."""
    folder = tempfile.mkdtemp(prefix="k3-", dir="/tmp")  # the names of its sockets must be short
    for name, value in ray_engine._ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
        _temp_dir=folder,
    )
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def address(ray: Any) -> str:
    """Where another process finds the Ray of these tests."""
    return str(ray.get_runtime_context().gcs_address)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Every path an item can take, in seven shards; one file is missing, one is cut, one tensor is wrong."""
    rows: list[dict[str, Any]] = []
    for number, mode in enumerate(["RGB", "RGBA", "L", "P", "CMYK", "1"] * 2):
        name = f"{number}.{'tif' if mode == 'CMYK' else 'png'}"
        picture(100 + 3 * number, 90, mode, number).save(tmp_path / name)
        rows.append({"id": name, "image": name, "backend": "cpu" if number % 2 else "gpu"})
    (tmp_path / "cut.png").write_bytes((tmp_path / "1.png").read_bytes()[:-900])
    rows[3:3] = [{"image": "gone.png"}, {"image": "cut.png", "backend": "cpu"}]
    rows.append(local_row(tmp_path, "a.npy", picture(100, 70)))
    rows.append({**local_row(tmp_path, "b.npy", picture(30, 170)), "grid_thw": [1, 2, 2]})
    return write_manifest(tmp_path / "m.jsonl", rows)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Three shards of one slow image each, most of a second."""
    rows = []
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(slow_jpeg(700 + number, 150))
        rows.append({"id": str(number), "image": f"{number}.jpg"})
    return write_manifest(tmp_path / "m.jsonl", rows)


def settings(manifest: Path, out: str, engine: str, **more: Any) -> Settings:
    chosen: dict[str, Any] = {"dtype": "uint8", "shard_size": 120_000, "backend": "cpu", "device": "cpu", **more}
    return Settings(str(manifest), manifest.parent / out, "kimi-k3", engine=engine, **chosen)  # type: ignore[arg-type]


def encode(manifest: Path, out: str, engine: str, **more: Any) -> Silent:
    reporter = Silent()
    prepare(settings(manifest, out, engine, **more), reporter)
    return reporter


def at_work(out: Path) -> dict[str, int]:
    """The shards that Ray workers fill now, and the processes."""
    found = {}
    for path in out.glob(".lock-cpu-*"):
        try:
            text = path.read_text()
        except FileNotFoundError:
            continue
        if text.startswith("process "):
            found[path.name] = int(text.split()[1])
    return found


@pytest.mark.usefixtures("ray")
def test_ray_gives_the_bytes_of_the_local_engine(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = encode(sources, "local", "local")
    monkeypatch.chdir(tmp_path)  # the workers are in another folder
    out = Path("ray")
    reporter = Silent()
    prepare(replace(settings(Path(sources.name), "ray", "ray", workers=2, batch_bytes=50_000), output=out), reporter)
    shards = list((tmp_path / "ray" / "shards").glob("*.safetensors"))
    assert {path.name.partition("-")[0] for path in shards} == {"cpu", "gpu", "local"}
    assert len(shards) == 7
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    assert (reporter.done, reporter.failed, reporter.phases) == (local.done, local.failed, local.phases)
    assert reporter.failed == 3
    assert reporter.warnings == local.warnings == []


def test_a_ray_of_its_own_and_nothing_but_json_on_stdout(sources: Path, run: Run, tmp_path: Path) -> None:
    encode(sources, "local", "local")
    command = ["encode", "m.jsonl", "--config", "kimi-k3", "--backend", "cpu", "--device", "cpu", "--dtype", "uint8"]
    folder = tempfile.mkdtemp(prefix="k3-", dir="/tmp")
    environment = {"RAY_TMPDIR": folder, "RAY_ADDRESS": ""}
    more = ["--shard-size", "120kB", "--engine", "ray", "-j", "1", "-o", "out", "--no-progress", "--format", "json"]
    done = run(*command, *more, env=environment)
    shutil.rmtree(folder)
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["failed"] == 3
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


@pytest.mark.usefixtures("ray")
def test_a_killed_worker_costs_nothing(slow: Path, tmp_path: Path) -> None:
    encode(slow, "local", "local")
    with ThreadPoolExecutor(1) as driver:
        running = driver.submit(encode, slow, "out", "ray")
        name, process = until(lambda: list(at_work(tmp_path / "out").items()))[0]
        os.kill(process, signal.SIGKILL)
        again = until(lambda: {at_work(tmp_path / "out").get(name)} - {None, process})
        assert again
        reporter = running.result(300)
    assert reporter.done == 6  # three headers, three images
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


@pytest.mark.usefixtures("ray")
def test_a_shard_that_loses_every_worker_ends_the_run(slow: Path, tmp_path: Path) -> None:
    killed = set()
    with ThreadPoolExecutor(1) as driver:
        running = driver.submit(encode, slow, "out", "ray")
        while not running.done():
            process = at_work(tmp_path / "out").get(".lock-cpu-00001")
            if process is not None and process not in killed:
                killed.add(process)
                os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        with pytest.raises(RunError, match="shard cpu-00001 was tried 4 times and its Ray worker was lost") as caught:
            running.result()
    assert caught.value.exit_code == 3
    assert len(killed) == 4
    encode(slow, "out", "local")
    encode(slow, "local", "local")
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


RAY = ["encode", "m.jsonl", "--config", "kimi-k3", "--backend", "cpu", "--dtype", "uint8", "--shard-size", "120kB"]
RAY += ["-j", "1", "-o", "out", "--engine", "ray", "--ray-address"]


def test_a_killed_driver_goes_on(slow: Path, run: Run, address: str, tmp_path: Path) -> None:
    encode(slow, "local", "local")
    driver = subprocess.Popen([str(BINARY), *RAY, address], cwd=tmp_path)
    until(lambda: list(tmp_path.glob("out/shards/*.parquet")) and at_work(tmp_path / "out"))
    driver.kill()
    driver.wait()
    done = run(*RAY, address)
    assert (done.returncode, done.stderr.count("rror")) == (0, 0), done.stderr
    assert "committed before" in done.stdout
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_driver_that_is_told_to_end_takes_its_workers_along(
    how: signal.Signals, code: int, slow: Path, address: str, tmp_path: Path
) -> None:
    driver = subprocess.Popen([str(BINARY), *RAY, address], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: at_work(tmp_path / "out"))
    driver.send_signal(how)
    _, stderr = driver.communicate(timeout=240)
    assert (driver.returncode, stderr.count("Traceback")) == (code, 0), stderr
    assert "run the same command to continue" in stderr
    assert not at_work(tmp_path / "out")
    assert not list(tmp_path.glob("out/**/*.tmp"))


@pytest.mark.parametrize("gone", ["out", "out/shards"])
def test_a_folder_that_is_removed_under_a_run_is_said(gone: str, slow: Path, address: str, tmp_path: Path) -> None:
    driver = subprocess.Popen([str(BINARY), *RAY, address], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: list(tmp_path.glob("out/shards/*.parquet")) and at_work(tmp_path / "out"))
    until(lambda: shutil.rmtree(tmp_path / gone, ignore_errors=True) or not (tmp_path / gone).exists())
    _, stderr = driver.communicate(timeout=240)
    assert driver.returncode == 3, stderr
    assert f"the output folder was removed while the run was writing into it: {gone}" in stderr
    encode(slow, "out", "local")
    encode(slow, "local", "local")
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


@pytest.mark.usefixtures("ray")
def test_on_error_fail_stops_before_the_shard_is_committed(sources: Path, tmp_path: Path) -> None:
    text = sources.read_text().splitlines(keepends=True)
    sources.write_text("".join(line for line in text if "gone" not in line))
    with pytest.raises(TooManyFailures, match="--on-error fail"):
        encode(sources, "out", "ray", on_error="fail")
    assert not (tmp_path / "out" / "index.parquet").exists()
    encode(sources, "out", "ray")
    encode(sources, "local", "local")
    assert tree(tmp_path / "out") == tree(tmp_path / "local")


class _Counted(BaseHTTPRequestHandler):
    """Serves one picture, and counts."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.picture)))  # type: ignore[attr-defined]
        self.end_headers()

    def do_GET(self) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]
        self.do_HEAD()
        self.wfile.write(self.server.picture)  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.mark.usefixtures("ray")
def test_a_disk_that_refuses_is_our_error_and_is_not_tried_again(tmp_path: Path) -> None:
    picture(100, 90).save(tmp_path / "a.png")
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Counted)
    server.picture, server.asked = (tmp_path / "a.png").read_bytes(), 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    row = {"image": f"http://127.0.0.1:{server.server_port}/a.png", "width": 100, "height": 90}
    manifest = write_manifest(tmp_path / "m.jsonl", [row])
    asked = []
    for engine in ("local", "ray"):
        encode(manifest, engine, "local")
        (tmp_path / engine / "index.parquet").unlink()
        (tmp_path / engine / "shards" / "cpu-00000.parquet").unlink()
        (tmp_path / engine / "shards" / "cpu-00000.safetensors").unlink()
        (tmp_path / engine / "shards" / "cpu-00000.safetensors").mkdir()
        server.asked = 0
        with pytest.raises(RunError, match=r"cannot write .*cpu-00000\.safetensors: Is a directory") as caught:
            encode(manifest, engine, engine)
        assert type(caught.value) is DiskRefuses
        asked.append(server.asked)
    server.shutdown()
    server.server_close()
    assert asked[0] == asked[1] > 0


def jobs_of(manifest: Path, out: str) -> list[ShardJob]:
    """The jobs that a run would give its engine."""
    seen: list[ShardJob] = []

    def engine(jobs: Any, *rest: Any) -> list[Any]:
        seen.extend(jobs)
        raise RunError("that is all")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "fill_shards", engine)
        with pytest.raises(RunError):
            encode(manifest, out, "local")
    return seen


def test_a_fault_in_a_worker_is_a_sentence(ray: Any, sources: Path) -> None:
    job = jobs_of(sources, "out")[0]
    broken = replace(job, recipe=replace(job.recipe, dtype="float77"))
    with pytest.raises(RunError, match="shard cpu-00000 failed in its Ray worker: KeyError: 'float77'"):
        list(fill_on_ray([broken], ONE, "local", Control()))


def test_a_job_for_another_process_carries_what_it_needs_and_no_more(sources: Path, tmp_path: Path) -> None:
    job = jobs_of(sources, "out")[0]
    away = _portable(replace(job, output=Output(Path("out")), base="set", device="cuda:3"))
    assert (away.output.root, away.base, away.device) == (Path.cwd() / "out", str(Path.cwd() / "set"), "cuda")
    assert away.rows.equals(job.rows)
    assert len(pickle.dumps(away.rows)) < len(pickle.dumps(job.rows))
    assert _portable(job).device == "cpu"


def test_a_gpu_is_asked_for_by_cuda_jobs_only(ray: Any, sources: Path) -> None:
    notes: list[tuple[str, str]] = []
    control = Control(note=lambda where, text: notes.append((where, text)))
    job = jobs_of(sources, "out")[0]
    assert (_gpus(ray, job, control), notes) == (0, [])
    assert _gpus(ray, replace(job, device="cuda"), control) == 1
    assert notes == [("--device", "no node of this Ray has a GPU: cpu-00000 waits until one joins")]


def test_a_worker_with_other_libraries_makes_nothing(sources: Path, tmp_path: Path) -> None:
    job = jobs_of(sources, "out")[0]
    versions = {**_versions(()), "pillow": "1.1.7"}
    report = _ray_task(job, ONE, versions)
    assert report.result is None
    assert "instead of 1.1.7" in str(report.error)
    assert not list(tmp_path.glob("out/shards/*"))
    assert _ray_task(job, ONE, _versions(())).result is not None


def test_a_shard_stops_at_the_failures_that_are_left(sources: Path, tmp_path: Path) -> None:
    job = next(job for job in jobs_of(sources, "out") if any("cut" in item.image for item in planned_items(job.rows)))
    stopped = _ray_task(job, replace(ONE, most_failures=0), _versions(()))
    assert (stopped.result, stopped.error) == (None, None)
    assert [error.code for _, _, error in stopped.items if error] == ["truncated"]
    assert not list(tmp_path.glob("out/shards/*"))
    result = _ray_task(job, replace(ONE, most_failures=1), _versions(())).result
    assert result is not None
    assert result.failed_rows == 1


def test_a_shard_that_waits_for_processors_which_are_not_there_says_so(ray: Any) -> None:
    notes: list[tuple[str, str]] = []
    control = Control(note=lambda where, text: notes.append((where, text)))
    assert _room(ray, 2, control) == 2
    assert notes == []
    _room(ray, 64, control)
    assert notes == [("--workers", "no node of this Ray has 64 processors, 2 at most: shards wait until one joins")]


def test_without_ray_the_install_line_is_said_before_any_work(sources: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text("import sys; sys.modules['ray'] = None\n")
    paths = os.pathsep.join([str(tmp_path / "hidden"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run("encode", "m.jsonl", "--config", "kimi-k3", "-o", "out", "--engine", "ray", env={"PYTHONPATH": paths})
    assert done.returncode == 2
    assert "pip install 'kimik3-prep[ray]'" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_ray_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'kimik3-prep\[ray\]'"), _connected("local", 1, {}):
        pass


@pytest.mark.parametrize("place", ["127.0.0.1:1", "nonsense"])
def test_a_ray_that_is_not_there(place: str, sources: Path, run: Run) -> None:
    done = run(*RAY, place)
    assert done.returncode == 3
    assert f"no Ray can be used at {place}: " in done.stderr
    assert "--ray-address takes" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_needs_the_engine(sources: Path) -> None:
    with pytest.raises(InputError, match="add --engine ray"):
        encode(sources, "out", "local", ray_address="auto")
