"""engines.py: order, overlap and clean endings of the local engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import pytest

from kimik3_prep import engines
from kimik3_prep.engines import run_local
from kimik3_prep.work import Control, Stopped


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs are strings here; what ran is recorded."""
    ran: list[str] = []

    def materialize(job: str, images: Executor, control: Control) -> str:
        ran.append(job)
        if job == "wait":
            control.stop.wait(10)
            raise Stopped
        if job == "fail":
            raise OSError("broken")
        return images.submit(job.upper).result()

    monkeypatch.setattr(engines, "materialize_shard", materialize)
    return ran


def test_results_come_in_job_order(tasks: list[str]) -> None:
    jobs: Any = [f"job-{number}" for number in range(20)]
    assert list(run_local(jobs, 4, 2, Control())) == [job.upper() for job in jobs]


def test_jobs_are_taken_as_they_are_needed(tasks: list[str]) -> None:
    taken = []

    def jobs() -> Iterator[Any]:
        for number in range(10):
            taken.append(number)
            yield f"job-{number}"

    results = run_local(jobs(), 1, 2, Control())
    next(results)
    assert len(taken) <= 3
    assert len(list(results)) == 9


def test_an_error_stops_the_others_and_comes_out(tasks: list[str]) -> None:
    jobs: Any = ["fail", "wait", "never"]
    control = Control()
    with pytest.raises(OSError, match="broken"):
        list(run_local(jobs, 1, 2, control))
    assert control.stop.is_set()
    assert "never" not in tasks


def test_closing_the_iteration_stops_the_jobs_in_flight(tasks: list[str]) -> None:
    jobs: Any = ["job", "wait", "wait", "never"]
    control = Control()
    results = run_local(jobs, 1, 2, control)
    next(results)
    results.close()
    assert control.stop.is_set()
    assert "never" not in tasks
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("shard", "image"))]
