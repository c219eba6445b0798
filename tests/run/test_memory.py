"""memory.py: images together never take more than the room there is, and one that is larger still gets in."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kimik3_prep.run import memory
from kimik3_prep.run.memory import Room, available_memory
from kimik3_prep.run.threads import Stopped


def test_never_more_than_the_room_and_everyone_gets_in() -> None:
    room, lock, taken, most, alone = Room(100), threading.Lock(), [0], [0], []

    def work(need: int) -> int:
        with room.held(need, threading.Event()):
            with lock:
                taken[0] += need
                most[0] = max(most[0], taken[0] if need <= 100 else 0)
                if need > 100:
                    alone.append(taken[0] == need)
            time.sleep(0.001)
            with lock:
                taken[0] -= need
        return need

    needs = [40, 70, 250, 10, 100, 1, 60] * 12
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, needs)) == needs
    assert 70 < most[0] <= 100
    assert all(alone)
    assert len(alone) == 12


def test_room_is_given_back_after_an_error() -> None:
    room = Room(10)
    with pytest.raises(ValueError, match="no"), room.held(10, threading.Event()):
        raise ValueError("no")
    with room.held(10, threading.Event()):
        pass


def test_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < available_memory() < 1 << 50
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    machine = available_memory()
    monkeypatch.setattr(memory, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text("0::/a/b\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2500\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 1500\n")  # files are dropped when they must be
    assert available_memory() == 2000
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("max", "current", "stat"):
        (tmp_path / "a" / "b" / f"memory.{name}").write_text({"max": "1200\n", "current": "200\n"}.get(name, "x 1\n"))
    assert available_memory() == 1000
    (tmp_path / "a" / "b" / "memory.max").unlink()
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 2000
    assert abs(available_memory() - machine) < 4 << 30


def test_who_waits_can_be_stopped_and_what_is_given_back_early_counts_once() -> None:
    room, stop = Room(10), threading.Event()
    with ThreadPoolExecutor(1) as pool, room.held(10, stop) as give_back:
        waiting = pool.submit(lambda: room.held(5, stop).__enter__())
        stop.set()
        with pytest.raises(Stopped):
            waiting.result(10)
        give_back()
        with room.held(10, stop):  # no wait, though the first block has not ended
            pass
    with room.held(10, stop):
        pass
