"""A shard job: skip it if it is committed, fill it from worker processes, commit it.

Several shards are in work at a time: workers begin with the next one while the last items of one are still decoded, and
a thread commits a full one while others are filled. The bytes do not depend on any of it.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.errors import ItemError
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.shard_file import ShardFormat, ShardWriter
from kimik3_prep.output.tables import Outcome, Stored, index_table
from kimik3_prep.run.item import LoadItems, Met, StoreItems, planned_values, write_blocks
from kimik3_prep.run.workers import Task, Workers

if TYPE_CHECKING:
    from kimik3_prep.pixels.device import Batches

_COMMITS_WAITING = 2  # full shards that may wait for the disk before the next one is begun
_PLAIN_MODES = ("RGB", "L", "YCbCr")


class Stopped(Exception):
    """The run was asked to stop; shards that are not committed are gone."""


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Everything that one shard needs, picklable."""

    output: Output
    recipe: Recipe
    name: str

    rows: pa.Table
    """The shard's rows of the plan."""

    base: str
    """Where relative image paths start: a folder, or the URL of one."""

    device: str
    """The torch device of a gpu shard."""

    batch_bytes: int
    """Most source pixels of one batch on the device, in bytes."""

    @property
    def group(self) -> str:
        """The shard's preprocessing path: cpu, gpu or local."""
        return self.name.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class ShardResult:
    """A committed shard in numbers."""

    name: str
    ok_rows: int
    failed_rows: int
    """Manifest rows."""

    images: int
    """Stored images; several rows may share one."""

    patches: int
    size: int
    """Bytes of the shard file."""


@dataclass(slots=True)
class Control:
    """How a run watches its jobs, and stops them. It lives in the process that planned."""

    on_item: Callable[[int, int, ItemError | None], None] = lambda pixels, size, error: None
    """Called after each image with its source pixels, its stored bytes, and its error or None."""

    note: Callable[[str, str], None] = lambda where, text: None
    """Called with an option and a sentence about it that a person should see."""

    stopped: bool = False
    """Set it, and the jobs end with Stopped at their next item."""


def fill_shards(jobs: Iterable[ShardJob], workers: Workers, control: Control) -> Iterator[ShardResult]:
    """Fill and commit the shards of all jobs that are not committed yet; yield each once it is.

    A failed image is recorded and leaves no gap. Raises RunError where the disk refuses, and Stopped; then nothing of
    the uncommitted shards stays behind.
    """
    in_work: set[_Filling] = set()
    commits: deque[Future[ShardResult]] = deque()

    def tasks() -> Iterator[Task]:
        for job in jobs:
            if not job.output.committed(job.name):
                wait([commit for commit in commits if not commit.done()][:-_COMMITS_WAITING])
                shard = _Filling(job, workers, control)
                in_work.add(shard)
                yield from shard.tasks()

    with ThreadPoolExecutor(1, "commit") as thread:
        try:
            for task, answer in workers.run(tasks()):
                shard: _Filling = task.tag
                shard.take(task, answer)
                if control.stopped:
                    raise Stopped
                if shard.full:
                    commits.append(thread.submit(shard.commit))
                    in_work.remove(shard)
                while commits and commits[0].done():
                    yield commits.popleft().result()
            while commits:
                yield commits.popleft().result()
        finally:
            for shard in in_work:
                shard.abandon()


class _Filling:
    """One shard while it is filled. `tasks` goes to the workers, `take` gets their answers, `commit` ends it."""

    def __init__(self, job: ShardJob, workers: Workers, control: Control) -> None:
        self._job, self._control, self._shared = job, control, workers.shared
        numbers = job.rows["row"].to_numpy()
        stored = job.rows.take(pa.array(np.flatnonzero(np.diff(numbers, prepend=-1))))  # one plan row an image
        self._items = planned_values(stored)
        self._counts: list[int] = stored["patch_count"].to_pylist()
        self._needs = _memory_of(stored, job.recipe)
        self._results: dict[int, tuple[Met, str] | ItemError] = {}
        patches = int(stored["patch_start"][-1].as_py()) + self._counts[-1]
        form = ShardFormat(job.recipe, job.group)
        self._writer = ShardWriter(job.output.shard(job.name), form, len(self._items), patches)
        self._batches = self._device_batches() if job.group == "gpu" else None

    @property
    def full(self) -> bool:
        """Whether every image has its result."""
        return len(self._results) == len(self._items)

    def tasks(self) -> Iterator[Task]:
        """Yield a task for each image."""
        job, writer = self._job, self._writer
        if self._batches is None:
            store = StoreItems(job.base, job.recipe, str(writer.temporary), writer.inode, writer.offset(0))
            call = pickle.dumps(store)
        else:
            call = pickle.dumps(LoadItems(job.base, job.recipe, self._shared.descriptor))
        for row, (values, count, need) in enumerate(zip(self._items, self._counts, self._needs, strict=True)):
            weight = count * job.recipe.config.patch_size**2
            if self._batches is None:
                yield Task(call, values, need, weight, (self, row))
            else:
                place = self._shared.allocate(_most_pixels(values))
                yield Task(call, (values, place), need, weight, (self, row))

    def take(self, task: Task, answer: Any) -> None:
        """Note what became of an image."""
        row = task.tag[1]
        if self._batches is None:
            self._keep(row, answer if isinstance(answer, ItemError) else answer[:2])
            return
        place = task.payload[1]
        if isinstance(answer, ItemError):
            self._keep(row, answer)
        else:
            met, mode, shape = answer
            pixels = self._shared.read(place, shape)
            self._batches.add((row, met), mode, pixels, PlannedItem.of(self._items[row]).grid)
        self._shared.free(place)
        self._loaded += 1
        if self._loaded == len(self._items):
            self._batches.finish()

    def commit(self) -> ShardResult:
        """Close the gaps of failed images, write the index, and commit both."""
        job = self._job
        kept = [row for row in range(len(self._items)) if not isinstance(self._results[row], ItemError)]
        grids = [PlannedItem.of(self._items[row]).grid for row in kept]
        starts = [self._items[row][_PATCH_START] for row in kept]
        places = self._writer.finish([(grid.thw, start, grid.patches) for grid, start in zip(grids, starts, strict=True)])
        outcomes: dict[int, Outcome] = {row: result for row, result in self._results.items() if isinstance(result, ItemError)}
        for row, (place, start) in zip(kept, places, strict=True):
            met, checksum = self._results[row]
            outcomes[row] = Stored(place, start, met.mode, met.format, met.exif_orientation, met.content_hash, checksum)
        index = index_table(job.rows, outcomes)
        size = job.output.commit(job.name, index, job.recipe)
        failed = pc.sum(pc.equal(index["status"], "failed")).as_py()
        patches = sum(grid.patches for grid in grids)
        return ShardResult(job.name, index.num_rows - failed, failed, len(kept), patches, size)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self._writer.abort()

    def _keep(self, row: int, result: tuple[Met, str] | ItemError) -> None:
        self._results[row] = result
        width, height = self._items[row][_WIDTH] or 0, self._items[row][_HEIGHT] or 0
        if isinstance(result, ItemError):
            self._control.on_item(width * height, 0, result)
        else:
            self._control.on_item(width * height, self._counts[row] * self._job.recipe.patch_bytes, None)
