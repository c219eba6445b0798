"""One planned image becomes patches: the only body, which workers, verify and FeatureStore call.

    resolve -> read -> hash -> decode -> resize, background, pad, cut -> blocks of patches
    resolve -> read -> hash -> the features in the file -> one block of patches       (made elsewhere)

A worker imports this module and what it needs: Pillow and numpy, and neither Arrow nor torch.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kimik3_prep import remote
from kimik3_prep.checkpoint.grid import Grid
from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.disk import disk_errors
from kimik3_prep.errors import FileReplaced, ItemError, PatchesMissing
from kimik3_prep.images.address import resolve, split
from kimik3_prep.images.decode import Decoded, Exif, decode, probe
from kimik3_prep.images.source import Encoded, Stamp, foreign_errors, read_head, read_whole
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.pixels.cpu import PatchMaker, pixels_for_device, rgb_pixels
from kimik3_prep.pixels.ready import cast_features, read_features
from kimik3_prep.run import spool
from kimik3_prep.run.spool import Kept

if TYPE_CHECKING:
    import pyarrow as pa

#: Columns of a plan that a `PlannedItem` is made of, in the order of its fields; the last ones make its `Grid`.
ITEM_COLUMNS = (
    *("image", "content_hash", "mode", "format", "width", "height", "source_size", "source_mtime_ns"),
    *("in_patch_limit", "row", "patch_start"),
    *("new_width", "new_height", "pad_width", "pad_height", "grid_h", "grid_w", "num_tokens"),
)
_GRID_FIELDS = 7


@dataclass(frozen=True, slots=True)
class PlannedItem:
    """One stored image and its place: `pixel_values[patch_start : patch_start + patch_count]` of its shard."""

    image: str
    """As the manifest names it."""

    content_hash: str | None
    """What the manifest promises, or what was read while planning."""

    mode: str | None
    format: str | None
    """Of the header; None where the manifest gave the size and no header was read."""

    width: int
    height: int
    """Pixels, of the header or of the manifest; 0 for features made elsewhere whose row gives none."""

    source_size: int | None
    source_mtime_ns: int | None
    """Of the file whose header was read."""

    in_patch_limit: int | None
    """What the config's limit was lowered to for this image; None where it was not."""

    row: int
    patch_start: int
    grid: Grid

    @classmethod
    def of(cls, values: Sequence[Any]) -> PlannedItem:
        """Return the item of one plan row, its values in the order of `ITEM_COLUMNS`."""
        own = list(values[:-_GRID_FIELDS])
        own[4:6] = (own[4] or 0, own[5] or 0)  # width and height
        fields = (*own, Grid(*(value or 0 for value in values[-_GRID_FIELDS:])))
        return cls(*fields)

    @property
    def patch_count(self) -> int:
        """Number of patches."""
        return self.grid.patches

    @property
    def made_elsewhere(self) -> bool:
        """Whether `image` names a file of features. Only images have a size after the resize."""
        return not self.grid.new_w

    @property
    def stamp(self) -> Stamp | None:
        """The version of the file whose header was read; None where none was."""
        if self.source_size is None or self.source_mtime_ns is None:
            return None
        return Stamp(self.source_size, self.source_mtime_ns)


def planned_values(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Return what `PlannedItem.of` takes, for every row of a plan."""
    return list(zip(*(rows[name].to_pylist() for name in ITEM_COLUMNS), strict=True))


def planned_items(rows: pa.Table) -> list[PlannedItem]:
    """Return the items of all rows of a plan; rows that share an image give equal ones."""
    return [PlannedItem.of(values) for values in planned_values(rows)]


class Met(NamedTuple):
    """What the body met on its way to the patches; the index tells it. A tuple, because millions travel."""

    mode: str | None
    format: str | None
    exif_orientation: int | None
    content_hash: str


Blocks = Iterator[npt.NDArray[Any]]


def prepare_item(
    item: PlannedItem, base: str, recipe: Recipe, encoded: Encoded | None = None, *, same_file: bool = True
) -> tuple[Met, Blocks]:
    """Return what was met, and the patches in order: contiguous blocks `[n, 3, p, p]` of the recipe's dtype.

    A block is valid until the next is asked for. base: where relative image paths start. encoded: the image's bytes,
    where somebody has read them already. same_file: refuse a file that was written again after it was planned.

    Raises ItemError where the image cannot be prepared or is not the one that was planned; RunError where the process
    may open no more files.
    """
    if item.made_elsewhere:
        encoded = encoded or read_whole(resolve(item.image, base))
        _check_hash(item, encoded.content_hash)
        features = read_features(encoded.content, item.grid.thw, recipe.config)
        values = cast_features(features, recipe.config, recipe.dtype)
        return Met(None, None, None, encoded.content_hash), iter([np.ascontiguousarray(values)])
    decoded = decode_item(item, base, recipe, encoded, same_file=same_file)
    with foreign_errors():
        pixels = rgb_pixels(decoded.image, item.grid, recipe.config)
    return met_in(decoded), _patch_maker(recipe).blocks(pixels, item.grid)


def item_patches(
    item: PlannedItem, base: str, recipe: Recipe, *, same_file: bool = True
) -> tuple[Met, npt.NDArray[Any]]:
    """Return what was met, and all patches of an item `[patch_count, 3, p, p]`. Raises as `prepare_item` does."""
    met, blocks = prepare_item(item, base, recipe, same_file=same_file)
    patch = recipe.config.patch_size
    patches = np.empty((item.patch_count, 3, patch, patch), DTYPES[recipe.dtype].numpy)
    begin = 0
    for block in blocks:
        patches[begin : begin + len(block)] = block
        begin += len(block)
    return met, patches


def decode_item(
    item: PlannedItem, base: str, recipe: Recipe, encoded: Encoded | None = None, *, same_file: bool = True
) -> Decoded:
    """Return the decoded image, which is the one that was planned. Raises as `prepare_item` does."""
    size = (item.width, item.height)
    source = encoded or resolve(item.image, base)
    try:
        stamp = item.stamp if same_file else None
        decoded = decode(source, recipe.max_pixels, stamp, recipe.exif, size, recipe.formats)
    except ItemError as error:
        if error.code != "size_mismatch":
            raise
        if item.format is not None:
            planned = f"{error.message}; its header said {item.width} x {item.height}"
            raise ItemError("source_changed", planned) from error
        raise ItemError(error.code, f"{error.message}; the manifest says {item.width} x {item.height}") from error
    _check_hash(item, decoded.content_hash)
    if decoded.image.size != size or recipe.rule(item.in_patch_limit).grid(*size) != item.grid:
        now = f"{decoded.image.width} x {decoded.image.height} pixels once decoded"
        raise ItemError("corrupt", f"the image is {now}, {size[0]} x {size[1]} before")
    return decoded


def met_in(decoded: Decoded) -> Met:
    """Return what the index tells of a decoded image."""
    return Met(decoded.mode, decoded.format, decoded.exif_orientation, decoded.content_hash)


def memory_of(item: PlannedItem, recipe: Recipe) -> int:
    """Return about the most bytes that an item takes while it is prepared: its file, its pixels, and copies of them."""
    if item.made_elsewhere:  # as they are, and in the dtype of the run
        return item.patch_count * 3 * recipe.config.patch_size**2 * 8
    a_pixel = 8 if item.mode in ("RGB", "L", "YCbCr") else 20  # alpha takes copies for the background
    return a_pixel * item.width * item.height + (item.source_size or 0)


def _check_hash(item: PlannedItem, content_hash: str) -> None:
    if item.content_hash is not None and content_hash != item.content_hash:
        raise ItemError("content_hash_mismatch", f"the file's is {content_hash}")


def _patch_maker(recipe: Recipe) -> PatchMaker:
    """The thread's own maker for this recipe, with its buffers."""
    makers: dict[Any, PatchMaker] = _thread.__dict__.setdefault("makers", {})
    key = (recipe.config, recipe.dtype)
    if key not in makers:
        makers[key] = PatchMaker(*key)
    return makers[key]


_thread = threading.local()


# --- what workers are asked to do -----------------------------------------------------------------------------------


def is_slow(image: str, base: str) -> bool:
    """Whether an image lies in a slow place: a store or a web server. A table's cells come with their neighbours."""
    if "://" not in image and remote.scheme(base) is None:
        return False
    source = resolve(image, base)
    return remote.scheme(split(source)[0]) is not None and "!parquet:" not in source


def _fetch(image: str, base: str, kept: Kept | None = None) -> Callable[[], Encoded] | None:
    """Return a function that reads an image from a slow place, or from the spool; None where reading it is quick."""
    if kept is not None and spool.mine is not None:
        return functools.partial(spool.mine.read, kept)
    return functools.partial(read_whole, resolve(image, base)) if is_slow(image, base) else None


class Header(NamedTuple):
    """What planning needs of a `Probe`. A tuple, because millions travel."""

    width: int
    height: int
    """Pixels."""

    mode: str
    format: str
    stamp: tuple[int, int] | None
    """The fields of a `Stamp`."""

    content_hash: str | None
    kept: Kept | None
    """Where the file lies in the spool."""


@dataclass(frozen=True, slots=True)
class ProbeImages:
    """Read image headers. Payload: the image, as the manifest names it. Answer: a `Header`."""

    base: str
    max_pixels: int
    exif: Exif

    hash: bool
    """Read the whole file for its hash."""

    formats: tuple[str, ...] = ()
    """Extra formats that may be read."""

    def __call__(self, payload: str, encoded: Encoded | None) -> Header:
        """Probe one image. Raises ItemError."""
        source = resolve(payload, self.base)
        complete = encoded is not None and (encoded.stamp is None or len(encoded.content) == encoded.stamp.size)
        try:
            keep = spool.MOST if complete else 0
            probed = probe(encoded or source, self.max_pixels, self.exif, self.hash, keep, self.formats)
        except ItemError:
            if encoded is None or complete:
                raise
            # The header goes on behind the first bytes.
            probed = probe(source, self.max_pixels, self.exif, formats=self.formats)
        stamp = None if probed.stamp is None else (probed.stamp.size, probed.stamp.mtime_ns)
        kept = spool.mine.keep(probed.encoded) if probed.encoded is not None and spool.mine is not None else None
        return Header(probed.width, probed.height, probed.mode, probed.format, stamp, probed.content_hash, kept)

    def fetch(self, payload: str) -> Callable[[], Encoded] | None:
        """Return how the file, or its first bytes, are fetched from a slow place."""
        if self.hash or not is_slow(payload, self.base):
            return _fetch(payload, self.base)
        if self.exif == "apply":  # a PNG's orientation may stand behind its pixels
            return None
        return functools.partial(read_head, resolve(payload, self.base))


@dataclass(frozen=True, slots=True)
class StoreItems:
    """Write patches to their places. Payload: the values of a `PlannedItem`, and where its file is kept.

    Answer: `(Met, checksum)`.
    """

    base: str
    recipe: Recipe

    file: str
    """The unfinished shard, which the driver made at its full size."""

    size: int
    """Its bytes."""

    inode: int
    """What tells that file from one that somebody put in its place."""

    patches_at: int
    """Where the first patch begins in it."""

    def __call__(self, payload: tuple[tuple[Any, ...], Kept | None], encoded: Encoded | None) -> tuple[Met, str]:
        """Store one item. Raises ItemError; RunError where the disk refuses."""
        item = PlannedItem.of(payload[0])
        met, blocks = prepare_item(item, self.base, self.recipe, encoded)
        with disk_errors(Path(self.file).with_suffix(""), self.size):
            descriptor = _files.descriptor(self.file, self.inode)
            place = self.patches_at + item.patch_start * self.recipe.patch_bytes
            checksum, size = write_blocks(descriptor, place, blocks)
        if size != item.patch_count * self.recipe.patch_bytes:
            raise PatchesMissing(item.image, size // self.recipe.patch_bytes, item.patch_count)
        return met, checksum

    def fetch(self, payload: tuple[tuple[Any, ...], Kept | None]) -> Callable[[], Encoded] | None:
        """Return how the image is fetched from a slow place."""
        return _fetch(payload[0][0], self.base, payload[1])


def write_blocks(descriptor: int, place: int, blocks: Blocks) -> tuple[str, int]:
    """Write blocks one after the other from byte `place` on; return their xxh3-128 and their bytes."""
    checksum = xxhash.xxh3_128()
    size = 0
    for block in blocks:
        content = block.reshape(-1).view(np.uint8).data
        checksum.update(content)
        while content:
            written = os.pwrite(descriptor, content, place + size)  # may take less than it is given
            content, size = content[written:], size + written
    return checksum.hexdigest(), size


class _OpenFiles:
    """The files that a worker writes into. They stay open, because the next items go into them as well."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._descriptors: dict[tuple[str, int], int] = {}

    def descriptor(self, file: str, inode: int) -> int:
        """Return the open file. Raises FileReplaced where another one has its name, OSError."""
        if (file, inode) not in self._descriptors:
            descriptor = os.open(file, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
            if os.fstat(descriptor).st_ino != inode:
                os.close(descriptor)
                raise FileReplaced(file)
            if len(self._descriptors) == self._most:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[file, inode] = descriptor
        return self._descriptors[file, inode]


_files = _OpenFiles(16)


@dataclass(frozen=True, slots=True)
class LoadItems:
    """Decode images for a device. Payload: as for `StoreItems`, and a byte of the shared memory.

    Answer: `(Met, mode, shape)` of the uint8 pixels `[h, w, c]` that lie there.
    """

    base: str
    recipe: Recipe

    memory: int
    """An inherited descriptor of the memory that workers and driver share."""

    def __call__(
        self, payload: tuple[tuple[Any, ...], Kept | None, int], encoded: Encoded | None
    ) -> tuple[Met, str, tuple[int, ...]]:
        """Load one image. Raises ItemError."""
        values, _, place = payload
        item = PlannedItem.of(values)
        decoded = decode_item(item, self.base, self.recipe, encoded)
        with foreign_errors():
            mode, pixels = pixels_for_device(decoded.image, item.grid, self.recipe.config)
        write_blocks(self.memory, place, iter([pixels]))
        return met_in(decoded), mode, pixels.shape

    def fetch(self, payload: tuple[tuple[Any, ...], Kept | None, int]) -> Callable[[], Encoded] | None:
        """Return how the image is fetched from a slow place."""
        return _fetch(payload[0][0], self.base, payload[1])
