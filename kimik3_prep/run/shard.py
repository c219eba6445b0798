"""A shard job: skip it if it is committed, fill it from worker processes, commit it.

Several shards are filled at a time, up to one a worker, and a thread commits a full one meanwhile. The bytes do not
depend on any of it.
"""

from __future__ import annotations

import functools
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kimik3_prep.disk import disk_errors
from kimik3_prep.errors import ItemError, RunError
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.shard_file import ShardFormat, ShardWriter
from kimik3_prep.output.tables import Outcome, Stored, index_table
from kimik3_prep.run.item import (
    LoadItems,
    Met,
    PlannedItem,
    StoreItems,
    is_slow,
    memory_of,
    planned_values,
    write_blocks,
)
from kimik3_prep.run.workers import MOST_TASKS, MOST_WEIGHT, Task, Workers

if TYPE_CHECKING:
    from kimik3_prep.pixels.device import Batches

_MOST_AT_A_TIME = 8  # shards that are filled; what a kill costs grows with them
_COMMITS_WAITING = 2  # full shards that may wait for the disk before the next one is begun


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

    A failed image is recorded and leaves no gap. Raises RunError where the disk refuses, once all that is full is
    committed, and Stopped; then nothing of the uncommitted shards stays behind.
    """
    in_work: set[_Filling] = set()
    full: deque[tuple[_Filling, Future[ShardResult]]] = deque()
    refused: list[RunError] = []

    def shards() -> Iterator[_Filling]:
        for job in jobs:
            if job.output.committed(job.name):
                continue
            wait([commit for _, commit in full if not commit.done()][:-_COMMITS_WAITING])
            shard = _Filling(job, workers, control)
            in_work.add(shard)  # before there is a file: Ctrl-C may come at any moment
            try:
                shard.begin()
            except RunError as error:  # there is no room for the next shard: those in work are finished first
                in_work.remove(shard)
                refused.append(error)
                return
            yield shard

    answers = workers.run(_in_turn(shards(), min(workers.count, _MOST_AT_A_TIME)))
    with ThreadPoolExecutor(1, "commit") as thread:
        try:
            for task, answer in answers:
                shard: _Filling = task.tag[0]
                shard.take(task, answer)
                if control.stopped:
                    raise Stopped
                if shard.full:
                    full.append((shard, thread.submit(shard.commit)))
                    in_work.remove(shard)
                while full and full[0][1].done():
                    yield full[0][1].result()
                    full.popleft()
            while full:
                yield full[0][1].result()
                full.popleft()
            if refused:
                raise refused[0]
        except RunError:
            answers.close()
            workers.stop()  # a file that a worker has open takes up the disk even when it is removed
            while in_work:
                in_work.pop().abandon()  # gives disk space back
            for shard, commit in full:
                if commit.exception() is not None:
                    shard.commit_again()
            raise
        finally:
            for shard in in_work:
                shard.abandon()


def _in_turn(shards: Iterator[_Filling], most: int) -> Iterator[Task]:
    """Yield tasks of up to `most` shards in turn, a chunk of each; a shard that wants no other beside it waits.

    The system lets one process at a time write into a file, so workers that fill one shard wait for each other.
    """
    begun: deque[tuple[_Filling, Iterator[Task]]] = deque()
    while True:
        while len(begun) < most and not any(shard.alone for shard, _ in begun):
            shard = next(shards, None)
            if shard is None:
                break
            begun.append((shard, shard.tasks()))
        if not begun:
            return
        shard, tasks = begun.popleft()
        weight = 0
        for number, task in enumerate(tasks, 1):
            yield task
            weight += task.weight
            if number == MOST_TASKS or weight >= MOST_WEIGHT:
                begun.append((shard, tasks))
                break


class _Filling:
    """One shard while it is filled: `tasks` go to the workers, `take` gets their answers, `commit` ends it."""

    def __init__(self, job: ShardJob, workers: Workers, control: Control) -> None:
        self._job, self._workers, self._control = job, workers, control
        numbers = job.rows["row"].to_numpy()
        stored = job.rows.take(pa.array(np.flatnonzero(np.diff(numbers, prepend=-1))))  # one plan row an image
        self._values = planned_values(stored)
        self._items = [PlannedItem.of(values) for values in self._values]
        self._results: dict[int, tuple[Met, str] | ItemError] = {}
        self._places: list[tuple[int, int]] | None = None  # final rows and patch starts, once the shard is complete
        self._not_loaded = len(self._items)
        self._batches = self._device_batches() if job.group == "gpu" else None
        self._begun = False

    @property
    def alone(self) -> bool:
        """Whether no other shard is begun meanwhile: one that takes memory of a device, or room until it is sent."""
        return self._batches is not None or self._job.output.is_mirrored

    @property
    def full(self) -> bool:
        """Whether every image has its result."""
        return len(self._results) == len(self._items)

    def begin(self) -> None:
        """Create the file. Raises ShardInUse, DiskRefuses."""
        job, last = self._job, self._items[-1]
        form = ShardFormat(job.recipe, job.group)
        self._begun = True
        self._writer = ShardWriter(
            job.output.shard(job.name), form, len(self._items), last.patch_start + last.patch_count
        )

    def tasks(self) -> Iterator[Task]:
        """Yield a task for each image."""
        job, writer, on_device = self._job, self._writer, self._batches is not None
        if on_device:
            call = pickle.dumps(LoadItems(job.base, job.recipe, self._workers.shared.descriptor))
        else:
            place = str(writer.temporary), writer.size, writer.inode, writer.offset(0)
            call = pickle.dumps(StoreItems(job.base, job.recipe, *place))
        for values, item in zip(self._values, self._items, strict=True):
            shared = self._workers.shared.allocate(_most_pixel_bytes(item)) if on_device else None
            kept = self._workers.kept.get(item.image)
            payload = (values, kept) if shared is None else (values, kept, shared)
            yield Task(
                call,
                payload,
                need=memory_of(item, job.recipe),
                weight=item.width * item.height,
                slow=is_slow(item.image, job.base),
                tag=(self, item, shared),
            )

    def take(self, task: Task, answer: Any) -> None:
        """Note what became of a task's image."""
        _, item, place = task.tag
        if isinstance(answer, ItemError):
            self._keep(item, answer)
        elif self._batches is None:
            met, checksum = answer
            self._keep(item, (met, checksum))
        else:
            met, mode, shape = answer
            self._batches.add((item, met), mode, self._workers.shared.read(place, shape), item.grid)
        if self._batches is not None:
            self._workers.shared.free(place)
            self._not_loaded -= 1
            if not self._not_loaded:
                self._batches.finish()

    def commit(self) -> ShardResult:
        """Close the gaps that failed images left, then commit the shard and its index."""
        job = self._job
        kept = [item for item in self._items if not isinstance(self._results[item.row], ItemError)]
        if self._places is None:
            self._places = self._writer.finish([(item.grid.thw, item.patch_start, item.patch_count) for item in kept])
        placed = dict(zip((item.row for item in kept), self._places, strict=True))
        outcomes: dict[int, Outcome] = {}
        for row, result in self._results.items():
            outcomes[row] = result if isinstance(result, ItemError) else _stored(*placed[row], *result)
        index = index_table(job.rows, outcomes)
        size = job.output.shard(job.name).stat().st_size
        job.output.commit(job.name, index, job.recipe)
        failed = pc.sum(pc.equal(index["status"], "failed")).as_py()
        patches = sum(item.patch_count for item in kept)
        return ShardResult(job.name, index.num_rows - failed, failed, len(kept), patches, size)

    def commit_again(self) -> None:
        """Write the index that did not fit on the disk, where the shard itself is complete."""
        if self._places is not None:
            with suppress(RunError):  # the first one is raised, and the next run fills the shard anew
                self.commit()

    def abandon(self) -> None:
        """Remove the unfinished file, also where a signal came while it was created."""
        if hasattr(self, "_writer"):
            self._writer.abort()
        elif self._begun:
            ShardWriter.temporary_of(self._job.output.shard(self._job.name)).unlink(missing_ok=True)

    def _keep(self, item: PlannedItem, result: tuple[Met, str] | ItemError) -> None:
        self._results[item.row] = result
        pixels = item.width * item.height
        if isinstance(result, ItemError):
            self._control.on_item(pixels, 0, result)
        else:
            self._control.on_item(pixels, item.patch_count * self._job.recipe.patch_bytes, None)

    def _device_batches(self) -> Batches:
        """Where a gpu shard's pixels are computed: batches of one shape, whose patches are stored as they come back."""
        from kimik3_prep.pixels.device import Batches, device_backend
        from kimik3_prep.pixels.tensors import to_array

        recipe = self._job.recipe

        def emit(tag: tuple[PlannedItem, Met], patches: Any) -> None:
            item, met = tag
            if isinstance(patches, ItemError):
                self._keep(item, patches)
                return
            place = self._writer.offset(item.patch_start)
            with disk_errors(self._writer.temporary.with_suffix(""), self._writer.size):
                checksum, _ = write_blocks(self._writer.descriptor, place, iter([to_array(patches.cpu())]))
            self._keep(item, (met, checksum))

        backend = device_backend(self._job.device, recipe.config, recipe.dtype)
        note = functools.partial(self._control.note, "--batch-bytes")
        # Besides what waits in a batch, the one before it is in memory as pixels and as patches.
        batch_bytes = min(self._job.batch_bytes, max(1 << 20, self._workers.memory // 16))
        return Batches(backend, batch_bytes, emit, note)


def _stored(row: int, patch_start: int, met: Met, checksum: str) -> Stored:
    return Stored(row, patch_start, met.mode, met.format, met.exif_orientation, met.content_hash, checksum)


def _most_pixel_bytes(item: PlannedItem) -> int:
    """Bytes that an image's pixels take in shared memory at most: four channels, before or after the resize."""
    return 4 * max(item.width * item.height, item.grid.new_w * item.grid.new_h)
