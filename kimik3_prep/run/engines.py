"""Ways to run shard jobs. An engine is a function: jobs in, results out, in any order it likes."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from kimik3_prep import __version__
from kimik3_prep.errors import INSTALL_RAY, InputError, ItemError, PrepError, Problem, RunError
from kimik3_prep.images.decode import codec_versions
from kimik3_prep.run.jobs import Control, ShardJob, ShardResult
from kimik3_prep.run.threads import ImageThreads, Stopped
from kimik3_prep.run.work import materialize_shard


def run_local(jobs: Iterable[ShardJob], workers: int, in_flight: int, control: Control) -> Iterator[ShardResult]:
    """Run jobs on `workers` image threads of this process; Pillow and torch release the interpreter lock.

    in_flight: shards at a time. With two, one fills while the other is written out; memory holds as many buffers.

    Yields results in job order. Whatever ends the iteration early (an error, Ctrl-C, a closed generator) stops the
    jobs in flight at their next image and waits for them, for a decoder that does not return two seconds at most.
    """
    with (
        ImageThreads(workers, "image", control.item_timeout, control.stop) as images,
        ThreadPoolExecutor(in_flight, "shard") as shards,
    ):
        pending: deque[Future[ShardResult]] = deque()
        try:
            for job in jobs:
                if len(pending) == in_flight:
                    yield pending.popleft().result()
                pending.append(shards.submit(materialize_shard, job, images, control))
            while pending:
                yield pending.popleft().result()
        except BaseException:
            control.stop.set()
            raise


# --- Ray ----------------------------------------------------------------------------------------------------------

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


def run_ray(jobs: Iterable[ShardJob], workers: int, address: str, control: Control) -> Iterator[ShardResult]:
    """Run jobs as Ray tasks: each has a worker process, `workers` processors and image threads, and a GPU if it asks.

    address: what `ray.init` takes; `local` starts a Ray on this machine and ends it with the run.

    Yields results as they come. `control` hears of a shard's items once the shard is done. A shard whose worker is lost
    is run again, three times at most. Whatever ends the iteration early ends the workers.
    """
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
                order = (job, workers, control.item_timeout, control.most_failures, _versions())
                pending[task.options(num_cpus=workers, num_gpus=gpus).remote(*order).future()] = job
            while pending:
                yield from _done(ray, pending, control)
    except BaseException:
        control.stop.set()
        for job in pending.values():
            job.output.clear_shard(job.shard.name, _GRACE)
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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        how |= {"num_cpus": max(workers, cores), "include_dashboard": False, "object_store_memory": _STORE}
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
        control.note("--device", f"no node of this Ray has a GPU: {job.shard.name} waits until one joins")
    return 1


def _portable(job: ShardJob) -> ShardJob:
    """The job for another process: no path of this one's folder, no Arrow buffers of the shards beside it.

    Ray chooses the GPU and shows the worker no other, so it is always the first.
    """
    rows = job.shard.rows.take(pa.array(range(job.shard.rows.num_rows)))
    return replace(
        job,
        output=job.output.absolute(),
        base=os.path.abspath(job.base),
        shard=replace(job.shard, rows=rows),
        device="cuda" if job.device.startswith("cuda") else job.device,
    )


@dataclass(slots=True)
class _Report:
    """What a Ray task sends back. Without result and error the job was stopped by its own failures."""

    items: list[tuple[int, int, ItemError | None]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    result: ShardResult | None = None
    error: PrepError | None = None


def _ray_task(
    job: ShardJob, workers: int, item_timeout: float, most_failures: int | None, versions: dict[str, str]
) -> _Report:
    """Runs in a Ray worker. Errors that we raise on purpose are values here: Ray would wrap them, or try again."""
    report = _Report()
    failures = itertools.count(1)
    control = Control(item_timeout=item_timeout, note=lambda where, text: report.notes.append((where, text)))

    def on_item(pixels: int, size: int, error: ItemError | None) -> None:
        report.items.append((pixels, size, error))
        if error is not None and most_failures is not None and next(failures) > most_failures:
            control.stop.set()

    control.on_item = on_item
    try:
        _check_versions(versions)
        with (
            # Whoever is given this folder next must not meet a worker that has outlived its run.
            job.output.holding_shard(job.shard.name, _PATIENCE),
            ImageThreads(workers, "image", item_timeout, control.stop) as images,
        ):
            report.result = materialize_shard(job, images, control)
    except Stopped:
        pass
    except PrepError as error:
        report.error = error
    return report


def _versions() -> dict[str, str]:
    """What must be the same on all machines of a run: the output says which it was made with."""
    return {"kimik3-prep": __version__, **codec_versions()}


def _check_versions(expected: dict[str, str]) -> None:
    found = _versions()
    names = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    if names:
        told = ", ".join(f"{name} {found.get(name)} instead of {expected.get(name)}" for name in names)
        raise RunError(f"the Ray node {socket.gethostname()} would give other bytes than this machine: it has {told}")


def _done(ray: Any, pending: dict[Future[_Report], ShardJob], control: Control) -> Iterator[ShardResult]:
    """Results of the tasks that have ended, if some do soon. Raises RunError, or Stopped once the run was stopped."""
    ready, _ = wait(pending, _LOOK, FIRST_COMPLETED)  # not ray.wait, which makes a KeyboardInterrupt of every signal
    for future in ready:
        report = _fetch(ray, future, pending.pop(future).shard.name)
        for where, text in report.notes:
            control.note(where, text)
        for item in report.items:
            control.on_item(*item)
        if report.error is not None:
            raise report.error
        if report.result is not None:
            yield report.result
    if control.stop.is_set():
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
