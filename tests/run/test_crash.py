"""Runs that are killed: at every step that touches the disk, and at random moments; then the same command again.

The command runs in forks of one process that has imported everything, because there are hundreds of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import picture, tree, write_manifest

#: Reads `{"command", "out", "kills" | "seconds", "template"}` as JSON and prints what became of each run.
DRIVER = r"""
import fcntl, json, os, shutil, signal, socket, sys, threading, time
from multiprocessing.connection import Connection
from pyarrow import parquet
from kimik3_prep import cli
from kimik3_prep.reading import inspection
from kimik3_prep.run import item, prepare, worker, workers
from kimik3_prep.screen import answers

class Forked:
    # A new interpreter for each of some hundred workers would take minutes. A forked one dies as others do.

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

def start(pool, slot):
    ours, theirs = socket.socketpair()
    worker.SLOT.pack_into(pool._board, slot * worker.SLOT_BYTES, 0, 0, 0.0)
    driver = os.getpid()
    pid = os.fork()
    if pid == 0:
        for name, real in REAL.items():
            setattr(os, name, real)
        ours.close()
        files = (pool._board_file.fileno(), pool._spool.fileno())
        worker.main(theirs.detach(), *files, slot, pool.count, driver)
    theirs.close()
    return workers._Worker(Forked(pid), Connection(ours.detach()), slot)

workers.Workers._started = start
STEPS = ("replace", "fsync", "ftruncate", "pwrite", "write", "unlink")
REAL = {name: getattr(os, name) for name in STEPS}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def arm(at):
    say, (lock, count) = os.write, (threading.RLock(), [0])
    def wrapped(owner, name):
        real = getattr(owner, name)
        def step(*args, **more):
            with lock:
                count[0] += 1
                if count[0] == at:
                    if name == "pwrite":  # torn: half of it gets to the disk
                        real(args[0], args[1][: len(args[1]) // 2], args[2])
                    if name == "write_table":  # the file is there, and not whole
                        real(*args, **more)
                    say(3, name.encode())
                    die()
            return real(*args, **more)
        setattr(owner, name, step)
    for name in STEPS:
        wrapped(os, name)
    wrapped(fcntl, "flock")
    wrapped(parquet.ParquetWriter, "write_table")

def run(arguments, at=None, after=None):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 3)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["kimik3-prep", *arguments]
        if at is not None:
            arm(at)
        try:
            cli.main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        os._exit(99)
    os.close(write)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with os.fdopen(read) as said:
        return code, said.read()

task = json.load(sys.stdin)
began = time.monotonic()
results = []
tries = enumerate(task["seconds"]) if "seconds" in task else ((n, None) for n in range(1, 1000))
for number, seconds in tries:
    out = f"{task['out']}-{number}"
    if task.get("template"):
        shutil.copytree(task["template"], out)
    command = [*task["command"], "-o", out]
    code, step = run(command, None, seconds) if "seconds" in task else run(command, number)
    killed = code == -signal.SIGKILL
    last = run(command)[0] if killed else code
    results.append([out, step, killed, last])
    if not killed and "seconds" not in task:
        break
print(json.dumps({"results": results, "seconds": time.monotonic() - began}))
"""

COMMAND = ["encode", "m.jsonl", "--config", "kimi-k3", "--backend", "cpu", "--dtype", "uint8"]
COMMAND += ["--shard-size", "120kB", "-j", "2", "--no-progress"]
ROWS = 7


def drive(folder: Path, **task: Any) -> list[tuple[str, str, bool, int]]:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=json.dumps(task), cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)["results"]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven rows, one image twice, one missing, one cut: two shards."""
    folder = tmp_path_factory.mktemp("crash")
    for number in range(4):
        picture(100 + 3 * number, 90, seed=number).save(folder / f"{number}.png")
    shutil.copy2(folder / "1.png", folder / "cut.png")
    os.truncate(folder / "cut.png", 2000)
    rows = [{"id": f"n{number}", "image": f"{number}.png"} for number in range(4)]
    rows[2:2] = [{"id": "gone", "image": "gone.png"}, {"id": "cut", "image": "cut.png"}]
    write_manifest(folder / "m.jsonl", [*rows, {"id": "again", "image": "0.png"}])
    return folder


def undisturbed(folder: Path, name: str) -> dict[str, str]:
    """The tree of a run that nobody kills; the driver's command without a fault."""
    from kimik3_prep.run.check import Settings
    from kimik3_prep.run.prepare import prepare

    class Silent:
        def warn(self, problem: Any) -> None: ...
        def pass_over(self, kinds: Any) -> None: ...
        def phase(self, name: str, total: int) -> None: ...
        def advance(self, images: int, pixels: int, size: int, failed: int) -> None: ...

    settings = Settings(
        str(folder / "m.jsonl"), folder / name, "kimi-k3", "cpu", "uint8", shard_size=120_000, overwrite=True
    )
    prepare(settings, Silent())
    assert len(list((folder / name / "shards").glob("*.safetensors"))) >= 2
    return tree(folder / name)


def check(folder: Path, results: list[tuple[str, str, bool, int]], whole: dict[str, str], code: int) -> None:
    for out, step, _, last in results:
        assert last == code, (out, step, (folder / "log.txt").read_text()[-2000:])
        assert tree(folder / out) == whole, (out, step)
        items = pq.read_table(folder / out / "index.parquet", columns=["item"])["item"].to_pylist()
        assert items == list(range(ROWS)), (out, step)


def test_killed_at_every_step(sources: Path) -> None:
    whole = undisturbed(sources, "whole")
    results = drive(sources, command=COMMAND, out="step")
    assert len(results) > 30
    assert {step for _, step, killed, _ in results if killed} >= {"replace", "fsync", "pwrite", "unlink", "flock"}
    check(sources, results, whole, 1)


def test_killed_at_every_step_of_starting_anew(sources: Path) -> None:
    whole = undisturbed(sources, "whole")
    shutil.copytree(sources / "whole", sources / "other")
    results = drive(sources, command=[*COMMAND, "--overwrite"], out="anew", template="other")
    assert len(results) > 50
    check(sources, results, whole, 1)


def test_killed_at_every_step_of_retrying(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(sources, folder, copy_function=shutil.copy2)
    undisturbed(folder, "failed")
    shutil.copy2(folder / "1.png", folder / "cut.png")
    shutil.copy2(folder / "2.png", folder / "gone.png")
    whole = undisturbed(folder, "whole")
    results = drive(folder, command=[*COMMAND, "--retry-failed"], out="retry", template="failed")
    assert len(results) > 30
    check(folder, results, whole, 0)


def test_killed_at_random_moments(sources: Path) -> None:
    import random

    whole = undisturbed(sources, "whole")
    chance = random.Random(5)
    seconds = [chance.uniform(0.0, 0.25) for _ in range(15)]
    results = drive(sources, command=COMMAND, out="random", seconds=seconds)
    assert sum(killed for _, _, killed, _ in results) > 5
    check(sources, results, whole, 1)
