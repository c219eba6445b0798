"""memory.py: images together never take more than the room there is, and one that is larger still gets in."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kimik3_prep import memory
from kimik3_prep.memory import Room, available_memory


def test_never_more_than_the_room_and_everyone_gets_in() -> None:
    room, lock, taken, most, alone = Room(100), threading.Lock(), [0], [0], []

    def work(need: int) -> int:
        with room.held(need):
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
    with pytest.raises(ValueError, match="no"), room.held(10):
        raise ValueError("no")
    with room.held(10):
        pass


def test_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < available_memory() < 1 << 50
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    machine = available_memory()
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_memory() == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 2000
    assert abs(available_memory() - machine) < 4 << 30
