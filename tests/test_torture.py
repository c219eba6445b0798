"""The campaign itself: what it must see, it sees; and a few seeds of each kind of input find nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
from torture_pool import Attack, Fault, attack  # noqa: E402


def fails(seed: int, folder: Path) -> str:
    raise Fault("as it must not be")


def raises(seed: int, folder: Path) -> str:
    raise ValueError("unforeseen")


def hangs(seed: int, folder: Path) -> str:
    while True:
        time.sleep(1)


def crashes(seed: int, folder: Path) -> str:
    os.kill(os.getpid(), signal.SIGKILL)


def grows(seed: int, folder: Path) -> str:
    return "x" if len(bytearray(200 << 20)) else ""


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (fails, "as it must not be"),
        (raises, "ValueError: unforeseen"),
        (hangs, "hangs: not done after 0.5 s"),
        (crashes, "the process ended with -9"),
        (grows, "bytes of memory"),
    ],
)
def test_a_fault_is_seen_with_its_seed(tmp_path: Path, run: Callable[[int, Path], str], words: str) -> None:
    seconds = 0.5 if run is hangs else 60  # only a hang is to be stopped by the clock, however busy the machine is
    tally = attack(Attack("x", run, seconds=seconds, bytes=100 << 20), tmp_path, 90, 1, first_seed=7, most=1)
    ((seed, what),) = tally.faults
    assert (seed, words in what) == (7, True), what


def test_every_seed_is_tried_once_by_some_attacker(tmp_path: Path) -> None:
    """Also those behind a seed that killed its attacker."""

    def run(seed: int, folder: Path) -> str:
        if seed == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return str(seed)

    tally = attack(Attack("x", run), tmp_path, 20, 3, first_seed=10, most=9)
    told = {int(seed) for seed in tally.outcomes}
    assert told | {11} >= set(range(10, 19)) - {14, 17}  # what an attacker did before it died may be lost with it
    assert [seed for seed, _ in tally.faults] == [11]
    assert max(tally.outcomes.values()) == 1


def test_a_few_seeds_of_each_kind_of_input() -> None:
    kinds = "image,worker,features,config,manifest,flip,flip-index-only,run,run-index-only"
    command = [sys.executable, str(SCRIPTS / "torture.py"), "--only", kinds, "--seed", "40", "--most", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "324 hostile inputs, 0 faults" in done.stdout


def test_a_few_runs_are_killed() -> None:
    command = [
        sys.executable,
        str(SCRIPTS / "torture.py"),
        "--only",
        "kill-local,kill-retry",
        "--seed",
        "1",
        "--most",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
