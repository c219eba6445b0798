"""A shard job as it travels to a worker, what watches it, what it came to; and one item of it, decoded and checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.errors import ItemError
from kimik3_prep.images.address import resolve
from kimik3_prep.images.decode import Decoded, decode
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.tables import PlannedItem, ShardPlan
from kimik3_prep.run.memory import Room, available_memory
from kimik3_prep.run.threads import DEFAULT_ITEM_TIMEOUT


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Everything one shard needs, picklable.

    base: folder that relative
    paths start from. device and batch_bytes (source pixels of a batch): gpu shards only.
    """

    output: Output
    base: str
    shard: ShardPlan
    recipe: Recipe
    device: str
    batch_bytes: int

    @property
    def config(self) -> PreprocessorConfig:
        """The recipe's."""
        return self.recipe.config

    @property
    def dtype(self) -> str:
        """The storage dtype."""
        return self.recipe.dtype


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What one committed shard came to. Rows are manifest rows, `images` the stored ones, `size` bytes of the file."""

    name: str
    ok_rows: int
    failed_rows: int
    images: int
    patches: int
    size: int


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


def memory_of(item: PlannedItem, config: PreprocessorConfig) -> int:
    """About the most bytes that an image in work takes: its file, its pixels, and what they become on the way."""
    if not item.grid.new_w:  # features made elsewhere: as they are, and in the dtype of the run
        return item.patch_count * 3 * config.patch_size**2 * 8
    a_pixel = 8 if item.mode in ("RGB", "L", "YCbCr") else 20  # with alpha there are copies for the background
    return a_pixel * item.width * item.height + (item.source_size or 0)


def check_hash(item: PlannedItem, content_hash: str) -> None:
    """Raises ItemError where the bytes are not those that the manifest promises, or that were read before."""
    if item.content_hash is not None and content_hash != item.content_hash:
        raise ItemError("content_hash_mismatch", f"the file's is {content_hash}")


def decode_item(item: PlannedItem, job: ShardJob) -> Decoded:
    """The decoded image, which must be what the manifest promised and what the plan made room for."""
    size = (item.width, item.height)
    try:
        decoded = decode(resolve(item.image, job.base), job.recipe.max_pixels, item.stamp, job.recipe.exif, size)
    except ItemError as error:
        if error.code != "size_mismatch":
            raise
        if item.probed:
            told = f"{error.message}; its header said {item.width} x {item.height}"
            raise ItemError("source_changed", told) from error
        raise ItemError(error.code, f"{error.message}; the manifest says {item.width} x {item.height}") from error
    check_hash(item, decoded.content_hash)
    if decoded.image.size != size or job.recipe.rule(item.in_patch_limit).grid(*size) != item.grid:
        found = f"{decoded.image.width} x {decoded.image.height} pixels once decoded, {size[0]} x {size[1]} before"
        raise ItemError("corrupt", f"the image is {found}")
    return decoded
