"""threads.py: results, errors and clean endings as any executor has them; and tasks that do not come back."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from conftest import BINARY, Run, picture, slow_jpeg, write_manifest

from kimik3_prep.errors import ItemError
from kimik3_prep.run.threads import ImageThreads, Stopped, limited


def test_results_and_errors_come_through_the_futures() -> None:
    with ImageThreads(3, "test", 60) as pool:
        assert list(pool.map(lambda n: n * n, range(100))) == [n * n for n in range(100)]
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()
    with pytest.raises(RuntimeError):
        pool.submit(int)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]


def test_every_thread_is_prepared_once() -> None:
    prepared: list[str] = []
    with ImageThreads(2, "test", 60, prepare=lambda: prepared.append(threading.current_thread().name)) as pool:
        pool.submit(int).result()
    assert len(prepared) == 2


def test_a_task_that_hangs_is_left_behind_and_its_thread_replaced() -> None:
    release, wrote = threading.Event(), []

    def hang() -> None:
        with limited():
            release.wait(60)
        wrote.append(True)

    with ImageThreads(1, "test", 0.1) as pool:
        lost = pool.submit(hang)
        with pytest.raises(ItemError, match=r"timed_out: not done after 0\.1 seconds \(--item-timeout\)"):
            lost.result(30)
        assert pool.submit(lambda: "next").result(30) == "next"
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("test"):
            thread.join(30)
    assert not wrote


def test_the_limit_holds_only_inside() -> None:
    def write() -> str:
        time.sleep(0.4)
        with limited():
            pass
        time.sleep(0.4)
        return "written"

    with ImageThreads(1, "test", 0.1) as pool:
        assert pool.submit(write).result(30) == "written"


def test_an_error_that_comes_too_late_is_not_told_twice() -> None:
    release, seen = threading.Event(), []

    def hang() -> None:
        try:
            with limited():
                release.wait(60)
                raise ItemError("corrupt", "late")
        except ItemError:
            seen.append("told")

    with ImageThreads(1, "test", 0.1) as pool:
        lost = pool.submit(hang)
        with pytest.raises(ItemError, match="timed_out"):
            lost.result(30)
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("test"):
            thread.join(30)
    assert not seen


def test_limits_mean_nothing_elsewhere() -> None:
    with limited():
        pass


def test_a_stopped_run_waits_two_seconds_at_most_and_blames_no_image() -> None:
    stop, release = threading.Event(), threading.Event()

    def hang() -> None:
        with limited():
            release.wait(60)

    with ImageThreads(1, "test", 600, stop) as pool:
        lost = pool.submit(hang)
        began = time.monotonic()
        stop.set()
        with pytest.raises(Stopped):
            lost.result(30)
    assert time.monotonic() - began < 30
    release.set()


def test_what_a_lost_task_holds_is_given_back() -> None:
    release, given_back = threading.Event(), threading.Event()

    def hang() -> None:
        with limited(given_back.set):
            release.wait(60)

    with ImageThreads(1, "test", 0.1) as pool:
        lost = pool.submit(hang)
        with pytest.raises(ItemError, match="timed_out"):
            lost.result(30)
        assert given_back.is_set()
    release.set()


def test_leaving_after_an_error_waits_for_nobody_who_hangs() -> None:
    stop, release = threading.Event(), threading.Event()

    def hang() -> None:
        with limited():
            release.wait(60)

    def leave() -> None:
        with ImageThreads(2, "test", 600, stop) as pool:
            pool.submit(hang)
            try:
                raise KeyboardInterrupt
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        leave()
    assert time.monotonic() - began < 30
    release.set()


def test_what_waits_can_be_cancelled() -> None:
    release = threading.Event()
    pool = ImageThreads(1, "test", 60)
    running = pool.submit(release.wait, 60)
    while not running.running():
        time.sleep(0.001)
    waiting = pool.submit(int)
    pool.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    release.set()
    assert running.result(30)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_an_image_that_takes_for_ever_fails_alone(backend: str, run: Run, tmp_path: Path) -> None:
    """A hundred kilobytes of JPEG that keep a decoder busy for a minute: every scan goes over the whole picture."""
    (tmp_path / "slow.jpg").write_bytes(slow_jpeg(4000, 4000))
    picture(64, 48).save(tmp_path / "a.png")
    picture(64, 48).save(tmp_path / "b.png")
    manifest = write_manifest(tmp_path / "m.jsonl", [{"image": name} for name in ("a.png", "slow.jpg", "b.png")])
    options = ["--config", "kimi-k3", "-o", "out", "--backend", backend, "--device", "cpu", "--item-timeout", "0.7"]
    result = run("encode", manifest, *options, "-j", "1", "--format", "json")
    summary = json.loads(result.stdout)
    assert (result.returncode, summary["ok"], summary["failed"]) == (1, 2, 1)
    assert summary["failures"] == [[2, "slow.jpg", "timed_out", "not done after 0.7 seconds (--item-timeout)"]]
    assert run("verify", "out").returncode == 0


def test_a_run_that_is_stopped_commits_nobody_as_timed_out(tmp_path: Path) -> None:
    (tmp_path / "slow.jpg").write_bytes(slow_jpeg(4000, 1500))
    picture(64, 48).save(tmp_path / "a.png")
    write_manifest(tmp_path / "m.jsonl", [{"image": "a.png"}, {"image": "slow.jpg", "width": 4000, "height": 4000}])
    command = [str(BINARY), "encode", "m.jsonl", "--config", "kimi-k3", "--backend", "cpu", "-o", "out", "-j", "2"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("out/shards/*.tmp")) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["plan.parquet", "run.json", "shards"]
