"""ranges.py: one run in several processes, the folder they share, and the index that ends it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from conftest import BINARY, Run, Silent, picture, tree, write_manifest

from kimik3_prep import disk
from kimik3_prep.disk import claim, hold
from kimik3_prep.errors import InputError, PlanMismatch, RunError
from kimik3_prep.output.totals import RangeSummary, RunSummary
from kimik3_prep.run.check import Settings
from kimik3_prep.run.prepare import finish, prepare, prepare_range

ENCODE = ["encode", "m.jsonl", "--config", "kimi-k3", "--backend", "cpu", "--dtype", "uint8", "--shard-size", "120kB"]
OF_TWO = [*ENCODE, "-o", "out", "--shard-range"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve rows in five shards; one is missing, one is cut, one comes twice."""
    rows = []
    for number in range(10):
        picture(100 + 3 * number, 90, seed=number).save(tmp_path / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png"})
    os.truncate(tmp_path / "4.png", 2000)
    rows += [{"id": "gone", "image": "gone.png"}, {"id": "again", "image": "0.png"}]
    return write_manifest(tmp_path / "m.jsonl", rows)


def settings(manifest: Path, out: str, **more: Any) -> Settings:
    return Settings(str(manifest), manifest.parent / out, "kimi-k3", "cpu", "uint8", shard_size=120_000, **more)


def whole(manifest: Path) -> tuple[dict[str, str], RunSummary]:
    """What one plain run gives."""
    summary = prepare(settings(manifest, "whole"), Silent())
    assert summary.shards == 5
    return tree(manifest.parent / "whole"), summary


def fill_range(manifest: Path, number: int, count: int, **more: Any) -> RangeSummary:
    return prepare_range(settings(manifest, "out", shard_range=(number, count), **more), Silent())


def test_bad_ranges_are_usage_errors(pictures: Path, run: Run, tmp_path: Path) -> None:
    assert run(*OF_TWO, "0/2").returncode == 2
    done = run(*OF_TWO, "1/2", "--overwrite", "--retry-failed")
    assert done.returncode == 2
    assert done.stderr.count("concerns the whole folder") == 2
    assert not (tmp_path / "out").exists()


def test_two_ranges_at_once_and_finish_are_one_plain_run(pictures: Path, run: Run, tmp_path: Path) -> None:
    expected, summary = whole(pictures)
    environment = {**os.environ, "COLUMNS": "200"}
    ranges = [
        subprocess.Popen(
            [str(BINARY), *OF_TWO, f"{number}/2"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for number in (1, 2)
    ]
    told = [each.communicate(timeout=120)[0] for each in ranges]
    assert [each.returncode for each in ranges] == [0, 1]  # the cut picture lies in the second shard
    assert "range 1/2: 3 shards" in told[0]
    assert "range 2/2: 2 shards" in told[1]
    assert "5 of the run's 5 shards are in out" in "".join(told)
    assert "`kimik3-prep finish out`" in "".join(told)
    assert not (tmp_path / "out" / "index.parquet").exists()
    done = run("finish", "out")
    assert (done.returncode, done.stderr.count("gone.png")) == (1, 0), done.stderr
    assert f"{summary.ok} of 12 items ok, 2 failed" in done.stdout
    assert tree(tmp_path / "out") == expected
    again = run("finish", "out")
    assert again.returncode == 1
    assert "nothing to do" in again.stdout
    assert tree(tmp_path / "out") == expected


def test_ranges_one_after_the_other_and_more_of_them_than_shards(pictures: Path, tmp_path: Path) -> None:
    expected, _ = whole(pictures)
    made = [fill_range(pictures, number, 7) for number in (4, 1, 7, 2, 3, 5, 6)]
    assert [each.shards for each in made] == [1, 1, 0, 1, 1, 1, 0]
    assert [each.committed for each in made] == [1, 2, 2, 3, 4, 5, 5]
    assert sum(each.rows for each in made) == 11  # the missing file is in no shard
    assert [[failure[:3] for failure in each.failures] for each in made if each.failed] == [[(5, "n4", "truncated")]]
    assert finish(tmp_path / "out", Silent()).failed == 2
    assert tree(tmp_path / "out") == expected


def test_a_range_takes_its_shards_of_the_plan_whatever_is_committed_when_it_begins(pictures: Path) -> None:
    first = fill_range(pictures, 1, 2)
    assert (first.skipped, first.shards, first.committed) == (0, 3, 3)
    again = fill_range(pictures, 1, 2)
    assert (again.skipped, again.shards, again.committed) == (3, 3, 3)


def test_finish_names_what_is_missing(pictures: Path, run: Run, tmp_path: Path) -> None:
    assert run("finish", ".").returncode == 2
    fill_range(pictures, 2, 2)
    before = tree(tmp_path / "out")
    done = run("finish", "out")
    assert done.returncode == 3
    assert "3 of 5 shards are not there yet: cpu-00000, cpu-00002, cpu-00004" in done.stderr
    assert tree(tmp_path / "out") == before
    (tmp_path / "out" / "plan.parquet").unlink()
    with pytest.raises(RunError, match="no plan yet"):
        finish(tmp_path / "out", Silent())


def test_a_plain_run_does_the_rest_of_a_range(pictures: Path, tmp_path: Path) -> None:
    expected, _ = whole(pictures)
    fill_range(pictures, 2, 2)
    (tmp_path / "out" / ".lock-1-of-2").write_text("process 1 on a machine that was switched off\n")
    (tmp_path / "out" / ".lock-plan").touch()
    assert prepare(settings(pictures, "out"), Silent()).skipped == 2
    assert tree(tmp_path / "out") == expected


def test_a_range_with_other_settings_is_refused(pictures: Path) -> None:
    fill_range(pictures, 1, 2)
    with pytest.raises(PlanMismatch, match="max_tokens"):
        fill_range(pictures, 2, 2, max_tokens=100)


def test_while_a_range_is_at_work(pictures: Path, run: Run, tmp_path: Path) -> None:
    fill_range(pictures, 2, 2)
    with hold(tmp_path / "out" / ".lock-1-of-2"):
        before = tree(tmp_path / "out")
        for more in ({}, {"overwrite": True}, {"retry_failed": True}):
            with pytest.raises(InputError, match=rf"--shard-range 1/2\): process {os.getpid()}"):
                prepare(settings(pictures, "out", **more), Silent())
        for number, count in ((1, 2), (1, 3), (2, 3)):
            with pytest.raises(InputError, match="--shard-range 1/2"):
                fill_range(pictures, number, count)
        with pytest.raises(InputError, match="--shard-range 1/2"):
            finish(tmp_path / "out", Silent())
        assert run(*OF_TWO, "1/2").returncode == 2
        assert fill_range(pictures, 2, 2).skipped == 2
        assert tree(tmp_path / "out") == before


def test_a_range_waits_while_another_plans(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with contextlib.ExitStack() as planner:
        planner.enter_context(hold(tmp_path / "out" / ".lock-plan"))
        planner.enter_context(hold(tmp_path / "out" / ".lock"))
        command = [str(BINARY), *OF_TWO, "2/2"]
        waiting = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        said = waiting.stderr.readline()
        assert re.search(rf"waiting while another range plans: process {os.getpid()}", said)
        assert not (tmp_path / "out" / "run.json").exists()
    assert waiting.wait(60) == 1  # it holds the cut picture
    waiting.stderr.close()
    assert fill_range(pictures, 1, 2).committed == 5


def test_a_plain_run_is_not_waited_for(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with hold(tmp_path / "out" / ".lock"), pytest.raises(InputError, match="another run is writing"):
        fill_range(pictures, 1, 2)


def test_a_range_leaves_its_neighbours_unfinished_files_alone(pictures: Path, tmp_path: Path) -> None:
    fill_range(pictures, 2, 2)
    unfinished = tmp_path / "out" / "shards" / "cpu-00000.safetensors.tmp"
    index = tmp_path / "out" / "shards" / "cpu-00002.parquet.tmp"
    index.touch()
    descriptor = claim(unfinished)
    fill_range(pictures, 2, 2)
    assert unfinished.exists()
    assert index.exists()
    os.close(descriptor)
    fill_range(pictures, 1, 2)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_range_that_is_killed_goes_on(run: Run, tmp_path: Path) -> None:
    rows = []
    for number in range(3):
        picture(1200, 900, seed=number).save(tmp_path / f"{number}.jpg")
        rows += [{"id": f"{number}-{copy}", "image": f"{number}.jpg"} for copy in range(16)]
    write_manifest(tmp_path / "m.jsonl", rows)
    command = ["encode", "m.jsonl", "--config", "kimi-k3", "--backend", "cpu", "--dedupe", "off", "--dtype", "uint8"]
    command += ["--shard-size", "9MB", "-j", "1", "-o"]
    process = subprocess.Popen([str(BINARY), *command, "out", "--shard-range", "1/2"], cwd=tmp_path)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("out/shards/*.parquet")) and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) == -9
    assert (tmp_path / "out" / ".lock-1-of-2").exists()
    other = run(*command, "out", "--shard-range", "2/2")
    assert (other.returncode, other.stderr.count("another run")) == (0, 0)
    assert run("finish", "out").returncode == 3
    again = run(*command, "out", "--shard-range", "1/2")
    assert again.returncode == 0
    assert "committed before" in again.stdout
    assert run("finish", "out").returncode == 0
    assert run(*command, "whole").returncode == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_ranges_need_locks(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them two would plan at once, or a plain run clear what a range has made."""

    def refuse(descriptor: int, how: int) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    with pytest.raises(RunError, match="No locks available"):
        fill_range(pictures, 1, 2)


def test_a_limit_of_failures_stops_a_range(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--max-failures 1"):
        fill_range(pictures, 2, 2, max_failures=1)  # the missing file fails in every range
    assert fill_range(pictures, 1, 2, max_failures=1).committed < 5
