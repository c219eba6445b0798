"""Shard jobs on a Ray cluster: a task a shard, and in each task the same worker processes as on one machine."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from kimik3_prep import __version__
from kimik3_prep.errors import INSTALL_RAY, InputError, ItemError, PrepError, Problem, RunError
from kimik3_prep.images.decode import codec_versions
from kimik3_prep.remote import scheme
from kimik3_prep.run.machine import available_memory, processors
from kimik3_prep.run.shard import Control, ShardJob, ShardResult, Stopped, fill_shards
from kimik3_prep.run.workers import Workers

_RETRIES = 3  # of a shard whose worker is lost; our own errors are never tried again
_LOOK = 0.5  # seconds between two looks at whether the run was stopped
_GRACE = 15.0  # seconds for Ray to end the worker of a stopped run
_PATIENCE = 120.0  # seconds until a lost worker's shard must be free: a lost machine keeps its locks for a while
_REACH = 10.0  # seconds to reach a Ray; by itself it would try for minutes
_STORE = 80 << 20  # bytes of shared memory for a Ray of our own: only jobs and reports pass through it

#: What a Ray of ours, and its workers, are told before it is imported: send no statistics, never upload the working
#: directory (as it does under `uv run`), leave CUDA_VISIBLE_DEVICES alone where no GPU was asked for.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True, slots=True)
class Crew:
    """The worker processes that each Ray task starts."""

    workers: int
    """Processes, and processors that the task asks Ray for."""

    item_timeout: float
    """Seconds that one item may take."""

    memory: int | None
    """Bytes that decoded images may take together; None: half of what is free where the task runs."""

    most_failures: int | None
    """A task with more failed items stops by itself, because the driver hears of them late; None: no limit."""


def fill_on_ray(jobs: Iterable[ShardJob], crew: Crew, address: str, control: Control) -> Iterator[ShardResult]:
    """Run jobs as Ray tasks, each with `crew.workers` processors and worker processes, and a GPU if it asks for one.

    address: what `ray.init` takes; `local` starts a Ray on this machine and ends it with the run.

    Yields results as they come. `control` hears of a shard's items once the shard is done. Ray runs a shard again,
    three times at most, when it loses the shard's task. Whatever ends the iteration early ends the tasks.
    """
    workers = crew.workers
    pending: dict[Future[_Report], ShardJob] = {}
    try:
        with _connected(address, workers, pending) as ray:
            task = ray.remote(max_retries=_RETRIES)(_ray_task)
            most = _room(ray, workers, control)
            for job in map(_portable, jobs):
                while len(pending) >= most:
                    yield from _done(ray, pending, control)
                    most = _room(ray, workers)
                gpus = _gpus(ray, job, control)
                order = (job, crew, _versions(job.recipe.formats))
                pending[task.options(num_cpus=workers, num_gpus=gpus).remote(*order).future()] = job
            while pending:
                yield from _done(ray, pending, control)
    except BaseException:
        for job in pending.values():
            job.output.clear_shard(job.name, _GRACE)
        raise


@contextmanager
def _connected(address: str, workers: int, pending: Mapping[Future[_Report], object]) -> Iterator[Any]:
    """The `ray` module, connected. Leaving ends the workers, with what they are at: cancelling can crash Ray (2.60).

    A Ray that this process has connected already is used and left as it is, once its tasks, `pending`, are done.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise InputError([Problem("--engine ray", f"Ray cannot be imported: {error}", hint=INSTALL_RAY)]) from error
    if ray.is_initialized():
        try:
            yield ray
        finally:
            if pending:
                wait(pending)
        return
    how: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        how |= {"num_cpus": max(workers, processors()), "include_dashboard": False, "object_store_memory": _STORE}
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        _reach(address)
        ray.init(**how)
    except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        what = "no Ray could be started here" if address == "local" else f"no Ray can be used at {address}"
        hint = "--ray-address takes auto, host:port or ray://host:port; without it a Ray is started on this machine"
        raise RunError(f"{what}: {' '.join(str(error).split())} ({hint})") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray's own would end this process without a word
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()


def _room(ray: Any, workers: int, control: Control | None = None) -> int:
    """Tasks to have in flight: twice what the cluster runs now, so that it has a reason to grow. Warns of `control`."""
    if control is not None:
        most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
        if most < workers:
            text = f"no node of this Ray has {workers} processors, {most} at most: shards wait until one joins"
            control.note("--workers", text)
    return max(2, 2 * int(ray.cluster_resources().get("CPU", 0) // workers))


def _gpus(ray: Any, job: ShardJob, control: Control) -> int:
    """GPUs that a job needs."""
    if job.device != "cuda":
        return 0
    if ray.cluster_resources().get("GPU", 0) < 1:
        control.note("--device", f"no node of this Ray has a GPU: {job.name} waits until one joins")
    return 1


def _portable(job: ShardJob) -> ShardJob:
    """The job for another process: no path of this one's folder, no Arrow buffers of the shards beside it.

    Ray chooses the GPU and shows the worker no other, so it is always the first.
    """
    return replace(
        job,
        output=job.output.absolute(),
        base=job.base if scheme(job.base) else os.path.abspath(job.base),
        rows=job.rows.take(pa.array(range(job.rows.num_rows))),
        device="cuda" if job.device.startswith("cuda") else job.device,
    )


@dataclass(slots=True)
class _Report:
    """What a Ray task sends back. Without result and error the job was stopped by its own failures."""

    items: list[tuple[int, int, ItemError | None]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    result: ShardResult | None = None
    error: PrepError | None = None


def _ray_task(job: ShardJob, crew: Crew, versions: dict[str, str]) -> _Report:
    """Runs in a Ray worker. Errors that we raise on purpose are values here: Ray would wrap them, or try again."""
    report = _Report()
    failures = itertools.count(1)
    control = Control(note=lambda where, text: report.notes.append((where, text)))

    def on_item(pixels: int, size: int, error: ItemError | None) -> None:
        report.items.append((pixels, size, error))
        if error is not None and crew.most_failures is not None and next(failures) > crew.most_failures:
            control.stopped = True

    control.on_item = on_item
    memory = available_memory() // 2 if crew.memory is None else crew.memory
    try:
        _check_versions(versions, job.recipe.formats)
        # The next run in this folder must not meet a task that has outlived its own run.
        with (
            job.output.holding_shard(job.name, _PATIENCE),
            Workers(crew.workers, crew.item_timeout, memory) as workers,
        ):
            for result in fill_shards([job], workers, control):
                report.result = result
    except Stopped:
        pass
    except PrepError as error:
        report.error = error
    return report


def _versions(formats: tuple[str, ...]) -> dict[str, str]:
    """What must be the same on all machines of a run: the output says which it was made with."""
    return {"kimik3-prep": __version__, **codec_versions(formats)}


def _check_versions(expected: dict[str, str], formats: tuple[str, ...]) -> None:
    found = _versions(formats)
    names = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    if names:
        told = ", ".join(f"{name} {found.get(name)} instead of {expected.get(name)}" for name in names)
        raise RunError(f"the Ray node {socket.gethostname()} would give other bytes than this machine: it has {told}")


def _done(ray: Any, pending: dict[Future[_Report], ShardJob], control: Control) -> Iterator[ShardResult]:
    """Results of the tasks that have ended, if some do soon. Raises RunError, or Stopped once the run was stopped."""
    ready, _ = wait(pending, _LOOK, FIRST_COMPLETED)  # not ray.wait, which makes a KeyboardInterrupt of every signal
    for future in ready:
        report = _fetch(ray, future, pending.pop(future).name)
        for where, text in report.notes:
            control.note(where, text)
        for item in report.items:
            control.on_item(*item)
        if report.error is not None:
            raise report.error
        if report.result is not None:
            yield report.result
    if control.stopped:
        raise Stopped


def _fetch(ray: Any, future: Future[_Report], name: str) -> _Report:
    try:
        return future.result()
    except ray.exceptions.RayTaskError as error:
        cause = " ".join(f"{type(error.cause).__name__}: {error.cause}".split())
        hint = "; every node needs the same kimik3-prep" if isinstance(error.cause, ImportError) else ""
        raise RunError(f"shard {name} failed in its Ray worker: {cause}{hint}") from error
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RunError(
            f"shard {name} was tried {_RETRIES + 1} times and its Ray worker was lost each time: {lines[0]} "
            "What is committed stays valid: run the same command to continue."
        ) from error
