"""workers.py: every answer comes, whoever hangs or dies is blamed for its own task only, and nobody stays behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import Echo
from conftest import until

from kimik3_prep.errors import ItemError, RunError, WorkersDoNotStart
from kimik3_prep.run.workers import SharedMemory, Task, WorkerFault, Workers

GIB = 1 << 30


def run(workers: Workers, *payloads: Any, log: str = "", **more: Any) -> dict[Any, Any]:
    """The answers by payload."""
    call = pickle.dumps(Echo(log))
    tasks = [Task(call, payload, **more) for payload in payloads]
    return {task.payload: answer for task, answer in workers.run(tasks)}


def told(answer: Any) -> str:
    """An error's code and message, for comparison."""
    assert isinstance(answer, ItemError), answer
    return str(answer)


@pytest.fixture
def two() -> Iterator[Workers]:
    with Workers(2, 60, GIB) as workers:
        yield workers


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_task_is_answered_once(two: Workers) -> None:
    payloads = [("say", number) for number in range(500)]
    assert run(two, *payloads) == {payload: payload[1] for payload in payloads}
    assert run(two, ("say", "again"), ("fail", "bad")).keys() == {("say", "again"), ("fail", "bad")}


def test_errors_of_items_are_answers_and_others_end_the_run(two: Workers) -> None:
    answers = run(two, ("say", 1), ("fail", "no picture"))
    assert told(answers["fail", "no picture"]) == "corrupt: no picture"
    with pytest.raises(RunError, match="disk full"):
        run(two, ("end the run", "disk full"))
    with pytest.raises(WorkerFault, match="ZeroDivisionError: oops"):
        run(two, ("bug", "oops"))
    assert run(two, ("say", 2)) == {("say", 2): 2}  # the workers are as before


def test_a_task_that_hangs_costs_itself_only() -> None:
    with Workers(2, 0.5, GIB) as workers:
        answers = run(workers, *[("say", number) for number in range(40)], ("hang", 0), ("say", "after"))
    assert told(answers.pop(("hang", 0))) == "timed_out: not done after 0.5 seconds (--item-timeout)"
    assert answers == {("say", value): value for value in [*range(40), "after"]}


@pytest.mark.parametrize(
    ("what", "value", "error"),
    [
        ("signal", signal.SIGSEGV, "decoder_crashed: the process that decoded it ended twice, with signal SIGSEGV"),
        ("signal", signal.SIGABRT, "decoder_crashed: the process that decoded it ended twice, with signal SIGABRT"),
        ("exit", 3, "decoder_crashed: the process that decoded it ended twice, with exit code 3"),
        ("signal", signal.SIGKILL, "out_of_memory: the system killed the process that decoded it, twice"),
    ],
)
def test_a_worker_that_dies_costs_the_task_in_hand(
    two: Workers, tmp_path: Path, what: str, value: int, error: str
) -> None:
    log = tmp_path / "log"
    others = [("say", number) for number in range(60)]
    answers = run(two, *others[:30], (what, value), *others[30:], log=str(log))
    assert told(answers.pop((what, value))) == error
    assert answers == {payload: payload[1] for payload in others}
    begun = Counter(line.split(" ", 1)[1] for line in log.read_text().splitlines())
    assert begun[f"{what} {value}"] == 2


def test_a_task_whose_worker_died_is_tried_again_with_nothing_beside_it(two: Workers, tmp_path: Path) -> None:
    log = tmp_path / "log"
    once = ("signal once", str(tmp_path / "once"))
    answers = run(
        two,
        *[("say", number) for number in range(20)],
        once,
        *[("sleep", 0.01 + n / 1e6) for n in range(20)],
        log=str(log),
    )
    assert answers[once] == "second time"
    assert len(answers) == 41


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("before", [0, 1, 20])
def test_the_last_task_is_answered_although_no_worker_is_left(tmp_path: Path, count: int, before: int) -> None:
    once = ("signal once", str(tmp_path / "once"))
    with Workers(count, 60, 1 << 30) as workers:
        answers = run(workers, *[("say", number) for number in range(before)], once)
    assert answers == {("say", number): number for number in range(before)} | {once: "second time"}


def test_workers_that_cannot_start_are_said_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with Workers(1, 60, GIB) as workers, pytest.raises(WorkersDoNotStart, match=r"exit code 1: .*ModuleNotFoundError"):
        run(workers, ("say", 1))


def test_memory_bounds_what_is_in_work_and_a_large_task_is_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Workers(3, 60, 100) as workers:
        call = pickle.dumps(Echo(str(log)))
        needs = [40, 40, 40, 250, 40, 10, 100, 1, 60, 60]
        tasks = [Task(call, ("sleep", 0.02 + number / 1e6), need, 10**9) for number, need in enumerate(needs)]
        taken: list[int] = []
        for _ in workers.run(iter(tasks)):
            taken.append(sum(worker.need for worker in workers._workers))
    assert len(taken) == len(needs)
    assert all(need <= 100 or need == 250 for need in taken)


def test_bytes_are_fetched_ahead(two: Workers) -> None:
    payloads = [("bytes", b"%d" % number) for number in range(50)]
    assert run(two, *payloads) == {payload: payload[1] for payload in payloads}


def test_a_large_payload_reaches_a_worker(two: Workers) -> None:
    large = [("say", "x" * 3_000_000 + str(number)) for number in range(6)]
    assert run(two, *large) == {payload: payload[1] for payload in large}


def test_a_worker_imports_what_images_need_and_no_more(two: Workers) -> None:
    (modules,) = run(two, ("modules", 0)).values()
    assert {"PIL.Image", "numpy", "xxhash"} <= set(modules)
    assert not {"torch", "pyarrow", "fsspec", "rich", "typer", "ray"} & set(modules)


def test_leaving_early_ends_the_workers_that_have_tasks(two: Workers) -> None:
    call = pickle.dumps(Echo())
    answers = two.run(Task(call, ("sleep", 0.001)) for _ in range(10_000))
    busy = next(answers)[1]
    answers.close()
    until(lambda: not lives(busy))
    assert run(two, ("say", 1)) == {("say", 1): 1}


def test_no_worker_outlives_the_block() -> None:
    with Workers(2, 60, GIB) as workers:
        processes = set(run(workers, *[("sleep", 0.01 + number / 1e6) for number in range(60)], weight=10**5).values())
        assert len(processes) == 2
    assert not any(map(lives, processes))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's death on Linux only")
def test_no_worker_outlives_a_driver_that_was_killed(tmp_path: Path) -> None:
    """Also where the worker is in a decoder that never returns."""
    log = tmp_path / "log"
    code = f"""
import pickle, sys
from calls import Echo
from kimik3_prep.run.workers import Task, Workers
call = pickle.dumps(Echo({str(log)!r}))
with Workers(2, 600, 1 << 30) as workers:
    for answer in workers.run(Task(call, ("hang", n), weight=10**9) for n in range(2)):
        pass
"""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    driver = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    until(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    processes = [int(line.split()[0]) for line in log.read_text().splitlines()]
    assert all(map(lives, processes))
    driver.kill()
    driver.wait()
    until(lambda: not any(map(lives, processes)))


def test_shared_memory_is_used_again() -> None:
    memory = SharedMemory()
    first, second = memory.allocate(100), memory.allocate(50)
    assert (first, second) == (0, 100)
    os.pwrite(memory.descriptor, bytes(range(50)), second)
    assert memory.read(second, (5, 10)).tolist() == [list(range(row * 10, row * 10 + 10)) for row in range(5)]
    memory.free(first)
    assert memory.allocate(60) == 0
    assert memory.allocate(60) == 150
    assert memory.allocate(40) == 60
    memory.close()
