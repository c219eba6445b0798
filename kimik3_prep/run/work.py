"""The one task body that every engine runs: a shard job in, a committed shard out."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.errors import ItemError, RunError
from kimik3_prep.images.address import resolve
from kimik3_prep.images.decode import Decoded
from kimik3_prep.images.source import foreign_errors, read_file
from kimik3_prep.output.shard_file import ShardFormat, ShardWriter
from kimik3_prep.output.tables import Outcome, PlannedItem, Stored, index_table
from kimik3_prep.pixels.cpu import PatchMaker, rgb_pixels
from kimik3_prep.pixels.ready import cast_features, read_features
from kimik3_prep.run.jobs import Control, ShardJob, ShardResult, check_hash, decode_item, memory_of
from kimik3_prep.run.threads import Stopped, limited

if TYPE_CHECKING:
    from kimik3_prep.pixels.device import DeviceBackend, Upload

#: Decoded images that may wait for a device, beyond those in its batches.
_DECODED_AHEAD = 16


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


def materialize_shard(job: ShardJob, images: Executor, control: Control) -> ShardResult:
    """Fill, write and commit one shard; `images` runs its image tasks.

    A failed image is recorded and leaves no gap. Raises RunError when the disk fails and Stopped when asked to stop;
    then nothing of the shard stays behind.
    """
    output, items = job.output, job.shard.items
    fill = {"cpu": _fill_on_cpu, "gpu": _fill_on_device, "local": _fill_from_files}[job.shard.group]
    form = ShardFormat(job.recipe, job.shard.group)
    writer = ShardWriter(output.shard(job.shard.name), form, len(items), job.shard.patches)
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
    failed = table["error_code"].length() - table["error_code"].null_count
    patches = sum(item.patch_count for item in kept)
    size = output.shard(job.shard.name).stat().st_size
    output.commit(job.shard.name, table, job.recipe)
    return ShardResult(job.shard.name, table.num_rows - failed, failed, len(kept), patches, size)


# --- three ways to fill a shard; each gives a result for every row ------------------------------------------------


def _fill_on_cpu(job: ShardJob, writer: ShardWriter, images: Executor, control: Control) -> dict[int, _Result]:
    """Decode, preprocess and normalise on the image threads."""

    def prepare(item: PlannedItem) -> tuple[Decoded, Iterable[npt.NDArray[Any]]]:
        decoded = decode_item(item, job)
        with foreign_errors():
            pixels = rgb_pixels(decoded.image, item.grid, job.config)
        return decoded, _patch_maker(job.config, job.dtype).blocks(pixels, item.grid)

    return _fill_each(job, writer, images, control, prepare)


def _fill_from_files(job: ShardJob, writer: ShardWriter, images: Executor, control: Control) -> dict[int, _Result]:
    """Copy what was preprocessed elsewhere, checked and in the run's dtype."""

    def prepare(item: PlannedItem) -> tuple[str, Iterable[npt.NDArray[Any]]]:
        content, content_hash = read_file(resolve(item.image, job.base))
        check_hash(item, content_hash)
        values = read_features(content, item.grid.thw, job.config)
        return content_hash, [cast_features(values, job.config, job.dtype)]

    return _fill_each(job, writer, images, control, prepare)


def _fill_each(
    job: ShardJob,
    writer: ShardWriter,
    images: Executor,
    control: Control,
    prepare: Callable[[PlannedItem], tuple[Decoded | str, Iterable[npt.NDArray[Any]]]],
) -> dict[int, _Result]:
    """Run `prepare` for every item and store its patches, on the image threads, in any order."""

    def fill(item: PlannedItem) -> _Result:
        if control.stop.is_set():
            raise Stopped
        with control.room.held(memory_of(item, job.config), control.stop) as give_back:
            try:
                with limited(give_back):
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
    import torch

    from kimik3_prep.pixels.device import Batches, upload
    from kimik3_prep.pixels.tensors import to_array

    torch.set_num_threads(1)  # more would fight over the processors that images keep busy
    results: dict[int, _Result] = {}

    def load(item: PlannedItem) -> tuple[Decoded, Upload]:
        if control.stop.is_set():
            raise Stopped
        with control.room.held(memory_of(item, job.config), control.stop) as give_back, limited(give_back):
            decoded = decode_item(item, job)
            with foreign_errors():
                return decoded, upload(decoded.image, item.grid, job.config)

    def emit(tag: tuple[PlannedItem, Decoded], patches: Any) -> None:
        item, decoded = tag
        if isinstance(patches, ItemError):
            results[item.row] = _failed(item, patches, control)
        else:
            results[item.row] = _store(item, decoded, [to_array(patches.cpu())], writer, control)

    note = functools.partial(control.note, "--batch-bytes")
    # Beside what waits, a batch is in memory as pixels and as patches, and the next one is being filled.
    batch_bytes = min(job.batch_bytes, max(1 << 20, control.room.size // 16))
    batches = Batches(_backend(job.device, job.config, job.dtype), batch_bytes, emit, note)
    for item, future in _ahead(images, load, job, control.room.size // 4):
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
    images: Executor, load: Callable[[PlannedItem], tuple[Decoded, Upload]], job: ShardJob, most: int
) -> Iterable[tuple[PlannedItem, Future[tuple[Decoded, Upload]]]]:
    """Items with their loads in flight, in order: never more than `_DECODED_AHEAD`, nor than fit into `most` bytes."""
    pending: deque[tuple[PlannedItem, Future[tuple[Decoded, Upload]]]] = deque()
    taken = 0
    for item in job.shard.items:
        need = memory_of(item, job.config)
        while pending and (len(pending) > _DECODED_AHEAD or taken + need > most):
            taken -= memory_of(pending[0][0], job.config)
            yield pending.popleft()
        pending.append((item, images.submit(load, item)))
        taken += need
    yield from pending


@functools.lru_cache(maxsize=16)
def _backend(device: str, config: PreprocessorConfig, dtype: str) -> DeviceBackend:
    import torch

    from kimik3_prep.pixels.device import DeviceBackend

    return DeviceBackend(torch.device(device), config, dtype)


# --- what they share ----------------------------------------------------------------------------------------------


def _patch_maker(config: PreprocessorConfig, dtype: str) -> PatchMaker:
    """This thread's own, with its buffers."""
    made: dict[Any, PatchMaker] = _thread.__dict__.setdefault("makers", {})
    if (config, dtype) not in made:
        made[config, dtype] = PatchMaker(config, dtype)
    return made[config, dtype]


_thread = threading.local()


def _store(
    item: PlannedItem, source: Decoded | str, blocks: Iterable[npt.NDArray[Any]], writer: ShardWriter, control: Control
) -> _Filled:
    """Write an item's patches to their place. A grid that the blocks do not fill is a fault of ours."""
    checksum, start, size = xxhash.xxh3_128(), item.patch_start, 0
    for block in blocks:
        content = block.view(np.uint8).data.cast("B")
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
