"""The one task body that every engine runs: a shard job in, a committed shard out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from kimik3_prep.config import PreprocessorConfig
from kimik3_prep.errors import ItemError
from kimik3_prep.grid import GridRule
from kimik3_prep.images import Decoded, Stamp, decode, foreign_errors
from kimik3_prep.manifest import resolve
from kimik3_prep.pixels_cpu import TORCH_DTYPES, patchify, rgb_pixels
from kimik3_prep.plan import PlannedItem, ShardPlan
from kimik3_prep.shards import ShardFormat, ShardWriter
from kimik3_prep.store import Layout, Outcome, Stored, index_table, write_shard_index


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Everything one shard needs, picklable. `base`: folder that relative image paths start from."""

    root: Path
    base: str
    shard: ShardPlan
    form: ShardFormat
    config: PreprocessorConfig
    max_pixels: int

    @property
    def rule(self) -> GridRule:
        """The grid rule of the config."""
        return self.config.grid_rule()


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

    on_item: called from worker threads after each stored image: decoded pixels, stored bytes, its error or None.
    """

    on_item: Callable[[int, int, ItemError | None], None] = lambda pixels, size, error: None
    stop: threading.Event = field(default_factory=threading.Event)


def start_worker() -> None:
    """Set up an image thread: torch's own threads would only fight over the processors that images keep busy."""
    torch.set_num_threads(1)


def materialize_shard(job: ShardJob, images: Executor, control: Control) -> ShardResult:
    """Fill, write and commit one shard; `images` runs its image tasks.

    A failed image is recorded and leaves no gap. Raises RunError when the disk fails and Stopped when asked to stop;
    then nothing of the shard stays behind.
    """
    layout = Layout(job.root)
    items = job.shard.items
    writer = ShardWriter(layout.shard(job.shard.name), job.form, len(items), job.shard.patches)
    try:
        filled = list(images.map(lambda item: _fill(item, job, writer, control), items))
    except BaseException:
        writer.abort()
        raise
    kept = [item for item, result in zip(items, filled, strict=True) if not isinstance(result, ItemError)]
    places = writer.finish([(item.grid.thw, item.patch_start, item.patch_count) for item in kept])
    placed = dict(zip((item.row for item in kept), places, strict=True))
    outcomes: dict[int, Outcome] = {
        item.row: result if isinstance(result, ItemError) else result.stored(*placed[item.row])
        for item, result in zip(items, filled, strict=True)
    }
    table = index_table(job.shard.rows, outcomes)
    write_shard_index(layout, job.shard.name, table, job.form.metadata)
    failed = table["error_code"].length() - table["error_code"].null_count
    patches = sum(item.patch_count for item in kept)
    size = layout.shard(job.shard.name).stat().st_size
    return ShardResult(job.shard.name, table.num_rows - failed, failed, len(kept), patches, size)


@dataclass(frozen=True, slots=True)
class _Filled:
    """An image whose patches are in the buffer, before its final place is known."""

    mode: str
    format: str
    exif_orientation: int | None
    content_hash: str
    checksum: str

    def stored(self, row: int, patch_start: int) -> Stored:
        return Stored(row, patch_start, self.mode, self.format, self.exif_orientation, self.content_hash, self.checksum)


def _fill(item: PlannedItem, job: ShardJob, writer: ShardWriter, control: Control) -> _Filled | ItemError:
    """Prepare one image into its slice of the shard."""
    if control.stop.is_set():
        raise Stopped
    pixels, size = item.width * item.height, item.patch_count * job.form.patch_bytes
    try:
        decoded = _decode(item, job)
        with writer.patches(item.patch_start, item.patch_count) as view:
            out = torch.frombuffer(view, dtype=TORCH_DTYPES[job.form.dtype])
            patch = job.config.patch_size
            out = out.view(item.patch_count, 3, patch, patch)
            with foreign_errors():
                rgb = rgb_pixels(decoded.image, item.grid, job.config)
            patchify(rgb, item.grid, job.config, out)
            checksum = xxhash.xxh3_128_hexdigest(view)
            del out, rgb
    except ItemError as error:
        control.on_item(pixels, 0, error)
        return error
    control.on_item(pixels, size, None)
    return _Filled(decoded.mode, decoded.format, decoded.exif_orientation, decoded.content_hash, checksum)


def _decode(item: PlannedItem, job: ShardJob) -> Decoded:
    """The decoded image, which must be what the manifest promised and what the plan made room for."""
    planned = None
    if item.source_size is not None and item.source_mtime_ns is not None:
        planned = Stamp(item.source_size, item.source_mtime_ns)
    decoded = decode(resolve(item.image, job.base), job.max_pixels, planned)
    if item.content_hash is not None and decoded.content_hash != item.content_hash:
        raise ItemError("content_hash_mismatch", f"the file's is {decoded.content_hash}")
    width, height = decoded.image.size
    if (width, height) != (item.width, item.height) or job.rule.grid(width, height) != item.grid:
        found = f"the image is {width} x {height} pixels"
        if item.probed:
            raise ItemError("source_changed", f"{found}; its header said {item.width} x {item.height}")
        raise ItemError("size_mismatch", f"{found}; the manifest says {item.width} x {item.height}")
    return decoded
