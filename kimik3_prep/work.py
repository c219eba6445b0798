"""The one task body that every engine runs: a shard job in, a committed shard out."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from kimik3_prep.config import PreprocessorConfig
from kimik3_prep.errors import ItemError, RunError
from kimik3_prep.grid import GridRule
from kimik3_prep.images import Decoded, decode
from kimik3_prep.local import cast_features, read_features
from kimik3_prep.manifest import resolve
from kimik3_prep.memory import Room, available_memory
from kimik3_prep.mirror import commit_shard
from kimik3_prep.pixels_cpu import TORCH_DTYPES, PatchMaker, rgb_pixels
from kimik3_prep.pixels_device import Batches, DeviceBackend, Upload, upload
from kimik3_prep.plan import PlannedItem, ShardPlan
from kimik3_prep.shards import ShardFormat, ShardWriter
from kimik3_prep.sources import Stamp, foreign_errors, read_file
from kimik3_prep.store import Layout, Outcome, Stored, index_table, write_shard_index
from kimik3_prep.threads import DEFAULT_ITEM_TIMEOUT, limited

#: Decoded images that may wait for a device, beyond those in its batches.
_DECODED_AHEAD = 16


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Everything one shard needs, picklable.

    store: URL that the shard is sent to once it is complete in `root`; None where it stays. base: folder that relative
    paths start from. turn: apply EXIF orientations. device and batch_bytes (source pixels of a batch): gpu shards only.
    """

    root: Path
    base: str
    shard: ShardPlan
    form: ShardFormat
    config: PreprocessorConfig
    max_pixels: int
    turn: bool
    device: str
    batch_bytes: int
    store: str | None = None

    def rule(self, item: PlannedItem) -> GridRule:
        """The grid rule of an item: the config's, unless its limit was lowered."""
        rule = self.config.grid_rule()
        return rule if item.in_patch_limit is None else replace(rule, in_patch_limit=item.in_patch_limit)

    @property
    def dtype(self) -> torch.dtype:
        """The storage dtype."""
        return TORCH_DTYPES[self.form.dtype]


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What one committed shard came to. Rows are manifest rows, `images` the stored ones, `size` bytes of the file."""

    name: str
    ok_rows: int
    failed_rows: int
    images: int
    patches: int
    size: int


class Stopped(Exception):
    """Raised inside a job that was asked to stop; its shard stays uncommitted."""


@dataclass(slots=True)
class Control:
    """How a run watches its jobs and stops them: lives in the driver, shared by the threads of a local engine.

    on_item: called from worker threads after each stored image: source pixels, stored bytes, its error or None.
    note: called with an option and a sentence about it that a person should see.
    item_timeout: seconds for reading and decoding one image. room: memory for decoded images.
    most_failures: for an engine whose jobs run elsewhere, where `on_item` is called late: a job that has more failed
    items than this stops by itself; None: no limit.
    """

    on_item: Callable[[int, int, ItemError | None], None] = lambda pixels, size, error: None
    note: Callable[[str, str], None] = lambda where, text: None
    stop: threading.Event = field(default_factory=threading.Event)
    item_timeout: float = DEFAULT_ITEM_TIMEOUT
    room: Room = field(default_factory=lambda: Room(available_memory() // 2))
    most_failures: int | None = None


@dataclass(frozen=True, slots=True)
class _Filled:
    """An image whose patches are in the buffer, before its final place is known."""

    mode: str | None
    format: str | None
    exif_orientation: int | None
    content_hash: str
    checksum: str

    def stored(self, row: int, patch_start: int) -> Stored:
        return Stored(row, patch_start, self.mode, self.format, self.exif_orientation, self.content_hash, self.checksum)


_Result = _Filled | ItemError


def start_worker() -> None:
    """Set up an image thread: torch's own threads would only fight over the processors that images keep busy."""
    torch.set_num_threads(1)


def materialize_shard(job: ShardJob, images: Executor, control: Control) -> ShardResult:
    """Fill, write and commit one shard; `images` runs its image tasks.

    A failed image is recorded and leaves no gap. Raises RunError when the disk fails and Stopped when asked to stop;
    then nothing of the shard stays behind.
    """
    layout = Layout(job.root, job.store)
    items = job.shard.items
    fill = {"cpu": _fill_on_cpu, "gpu": _fill_on_device, "local": _fill_from_files}[job.shard.group]
    writer = ShardWriter(layout.shard(job.shard.name), job.form, len(items), job.shard.patches)
    try:
        results = fill(job, writer, images, control)
    except BaseException:
        writer.abort()
        raise
    kept = [item for item in items if isinstance(results[item.row], _Filled)]
    places = writer.finish([(item.grid.thw, item.patch_start, item.patch_count) for item in kept])
    placed = dict(zip((item.row for item in kept), places, strict=True))
    outcomes: dict[int, Outcome] = {
        row: result if isinstance(result, ItemError) else result.stored(*placed[row]) for row, result in results.items()
    }
    table = index_table(job.shard.rows, outcomes)
    write_shard_index(layout, job.shard.name, table, job.form.metadata)
    failed = table["error_code"].length() - table["error_code"].null_count
    patches = sum(item.patch_count for item in kept)
    size = layout.shard(job.shard.name).stat().st_size
    commit_shard(layout, job.shard.name)
    return ShardResult(job.shard.name, table.num_rows - failed, failed, len(kept), patches, size)


# --- three ways to fill a shard; each gives a result for every row ------------------------------------------------


def _fill_on_cpu(job: ShardJob, writer: ShardWriter, images: Executor, control: Control) -> dict[int, _Result]:
    """Decode, preprocess and normalise on the image threads."""

    def prepare(item: PlannedItem) -> tuple[Decoded, Iterable[torch.Tensor]]:
        decoded = _decode(item, job)
        with foreign_errors():
            pixels = rgb_pixels(decoded.image, item.grid, job.config)
        return decoded, _patch_maker(job.config, job.dtype).blocks(pixels, item.grid)

    return _fill_each(job, writer, images, control, prepare)


def _fill_from_files(job: ShardJob, writer: ShardWriter, images: Executor, control: Control) -> dict[int, _Result]:
    """Copy what was preprocessed elsewhere, checked and in the run's dtype."""

    def prepare(item: PlannedItem) -> tuple[str, Iterable[torch.Tensor]]:
        content, content_hash = read_file(resolve(item.image, job.base))
        _check_hash(item, content_hash)
        values = read_features(content, item.grid.thw, job.config)
        return content_hash, [cast_features(values, job.config, job.dtype)]

    return _fill_each(job, writer, images, control, prepare)


def _fill_each(
    job: ShardJob,
    writer: ShardWriter,
    images: Executor,
    control: Control,
    prepare: Callable[[PlannedItem], tuple[Decoded | str, Iterable[torch.Tensor]]],
) -> dict[int, _Result]:
    """Run `prepare` for every item and store its patches, on the image threads, in any order."""

    def fill(item: PlannedItem) -> _Result:
        if control.stop.is_set():
            raise Stopped
        with control.room.held(_memory_of(item)):
            try:
                with limited():
                    source, blocks = prepare(item)
            except ItemError as error:
                return _failed(item, error, control)
            return _store(item, source, blocks, writer, control)

    futures = {item.row: images.submit(fill, item) for item in job.shard.items}
    try:
        return {item.row: _outcome(item, futures[item.row], control) for item in job.shard.items}
    except BaseException:
        control.stop.set()
        for future in futures.values():
            future.cancel()
        wait(futures.values())  # the file is about to be closed: nobody may still be writing to it
        raise


def _outcome(item: PlannedItem, future: Future[_Result], control: Control) -> _Result:
    try:
        return future.result()
    except ItemError as error:  # its thread was given up
        return _failed(item, error, control)


def _fill_on_device(job: ShardJob, writer: ShardWriter, images: Executor, control: Control) -> dict[int, _Result]:
    """Decode on the image threads, batch by shape, compute on the device, store as the batches come back."""
    results: dict[int, _Result] = {}

    def load(item: PlannedItem) -> tuple[Decoded, Upload]:
        if control.stop.is_set():
            raise Stopped
        with control.room.held(_memory_of(item)), limited():
            decoded = _decode(item, job)
            with foreign_errors():
                return decoded, upload(decoded.image, item.grid, job.config)

    def emit(tag: tuple[PlannedItem, Decoded], patches: torch.Tensor | ItemError) -> None:
        item, decoded = tag
        if isinstance(patches, ItemError):
            results[item.row] = _failed(item, patches, control)
        else:
            results[item.row] = _store(item, decoded, [patches.cpu()], writer, control)

    note = functools.partial(control.note, "--batch-bytes")
    batches = Batches(_backend(job.device, job.config, job.dtype), job.batch_bytes, emit, note)
    for item, future in _ahead(images, load, job.shard.items):
        try:
            decoded, loaded = future.result()
        except ItemError as error:
            results[item.row] = _failed(item, error, control)
            continue
        decoded.image.close()  # its pixels were copied; only what the index says of it is still needed
        batches.add((item, decoded), loaded)
    batches.finish()
    return results


def _ahead(
    images: Executor, load: Callable[[PlannedItem], tuple[Decoded, Upload]], items: Iterable[PlannedItem]
) -> Iterable[tuple[PlannedItem, Future[tuple[Decoded, Upload]]]]:
    """Items with their loads in flight, in order, never more than `_DECODED_AHEAD` of them."""
    pending: deque[tuple[PlannedItem, Future[tuple[Decoded, Upload]]]] = deque()
    for item in items:
        pending.append((item, images.submit(load, item)))
        if len(pending) > _DECODED_AHEAD:
            yield pending.popleft()
    yield from pending


@functools.lru_cache(maxsize=16)
def _backend(device: str, config: PreprocessorConfig, dtype: torch.dtype) -> DeviceBackend:
    return DeviceBackend(torch.device(device), config, dtype)


# --- what they share ----------------------------------------------------------------------------------------------


def _patch_maker(config: PreprocessorConfig, dtype: torch.dtype) -> PatchMaker:
    """This thread's own, with its buffers."""
    made: dict[Any, PatchMaker] = _thread.__dict__.setdefault("makers", {})
    if (config, dtype) not in made:
        made[config, dtype] = PatchMaker(config, dtype)
    return made[config, dtype]


_thread = threading.local()


def _memory_of(item: PlannedItem) -> int:
    """Bytes that an image in work takes: four a pixel in Pillow, and a copy for the resize or the background."""
    return 8 * item.width * item.height + (item.source_size or 0)


def _store(
    item: PlannedItem, source: Decoded | str, blocks: Iterable[torch.Tensor], writer: ShardWriter, control: Control
) -> _Filled:
    """Write an item's patches to their place. A grid that the blocks do not fill is a fault of ours."""
    checksum, start, size = xxhash.xxh3_128(), item.patch_start, 0
    for block in blocks:
        content = block.contiguous().view(torch.uint8).numpy().data.cast("B")
        checksum.update(content)
        writer.write(start, content)
        start += len(block)
        size += len(content)
    if start != item.patch_start + item.patch_count:
        raise RunError(f"{start - item.patch_start} patches were made for {item.image}, {item.patch_count} planned")
    control.on_item(item.width * item.height, size, None)
    if isinstance(source, str):
        return _Filled(None, None, None, source, checksum.hexdigest())
    return _Filled(source.mode, source.format, source.exif_orientation, source.content_hash, checksum.hexdigest())


def _failed(item: PlannedItem, error: ItemError, control: Control) -> ItemError:
    control.on_item(item.width * item.height, 0, error)
    return error


def _check_hash(item: PlannedItem, content_hash: str) -> None:
    if item.content_hash is not None and content_hash != item.content_hash:
        raise ItemError("content_hash_mismatch", f"the file's is {content_hash}")


def _decode(item: PlannedItem, job: ShardJob) -> Decoded:
    """The decoded image, which must be what the manifest promised and what the plan made room for."""
    planned = None
    if item.source_size is not None and item.source_mtime_ns is not None:
        planned = Stamp(item.source_size, item.source_mtime_ns)
    decoded = decode(resolve(item.image, job.base), job.max_pixels, planned, job.turn)
    _check_hash(item, decoded.content_hash)
    width, height = decoded.image.size
    if (width, height) != (item.width, item.height) or job.rule(item).grid(width, height) != item.grid:
        found = f"the image is {width} x {height} pixels"
        if job.turn and decoded.exif_orientation not in (None, 1):
            found += " as its EXIF orientation turns it"
        if item.probed:
            raise ItemError("source_changed", f"{found}; its header said {item.width} x {item.height}")
        raise ItemError("size_mismatch", f"{found}; the manifest says {item.width} x {item.height}")
    return decoded
