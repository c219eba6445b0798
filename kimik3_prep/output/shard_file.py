"""One shard file: `pixel_values` `[L, 3, p, p]` and `grid_thws` int64 `[n, 3]`, images one after the other.

The layout is safetensors', written piece by piece as the patches are made. A test compares the bytes with what the
safetensors library writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kimik3_prep import strict_json
from kimik3_prep.checkpoint.levels import DTYPES, DType
from kimik3_prep.disk import create, disk_errors, regular, sync
from kimik3_prep.errors import InputError, Problem, ShardInUse
from kimik3_prep.output.recipe import FORMAT, METADATA_KEY, Recipe, canonical_json, odd_metadata

_MOVED_AT_ONCE = 8 << 20

_BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class ShardFormat:
    """What the shards of a run and a group share: everything in a header that is not a number of images or patches."""

    recipe: Recipe
    group: str

    @property
    def patch_bytes(self) -> int:
        """Bytes of one stored patch, 3 * p * p levels."""
        return self.recipe.patch_bytes

    def header(self, images: int, patches: int) -> bytes:
        """Return the safetensors header, byte for byte as the library writes it for these two tensors."""
        grids, patch = images * 3 * 8, self.recipe.config.patch_size
        tensors = {
            "__metadata__": {METADATA_KEY: canonical_json(self.recipe.metadata(self.group))},
            "grid_thws": {"dtype": "I64", "shape": [images, 3], "data_offsets": [0, grids]},
            "pixel_values": {
                "dtype": DTYPES[self.recipe.dtype].safetensors,
                "shape": [patches, 3, patch, patch],
                "data_offsets": [grids, grids + patches * self.patch_bytes],
            },
        }
        text = json.dumps(tensors, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


class ShardWriter:
    """One shard file while it is filled, in any order, by several threads or processes.

    Patches go straight into the file, each image's to its planned place. No buffer of the shard's size ever exists, and
    a full disk is an error of the write that met it. Another process writes into `temporary` from `offset` on, and
    compares `inode` before. The process that made the writer ends it by `finish` or `abort`.
    """

    def __init__(self, path: Path, form: ShardFormat, images: int, patches: int) -> None:
        """Create the file at its planned size. Raises ShardInUse, DiskRefuses."""
        self._path = path
        self.temporary = self.temporary_of(path)
        self._form = form
        self._data = len(form.header(images, patches)) + images * 24  # where patches start
        self.size = self._data + patches * form.patch_bytes
        with disk_errors(path, self.size):
            try:
                self._file = create(self.temporary)
            except BlockingIOError:
                raise ShardInUse(str(path)) from None
            try:
                os.ftruncate(self._file, self.size)
            except BaseException:
                self.abort()
                raise

    @staticmethod
    def temporary_of(path: Path) -> Path:
        """Return the name that a shard has until it is finished."""
        return path.with_name(path.name + ".tmp")

    @property
    def descriptor(self) -> int:
        """The open file."""
        return self._file

    @property
    def inode(self) -> int:
        """What tells the file from another one of its name."""
        return os.fstat(self._file).st_ino

    def offset(self, patch: int) -> int:
        """Return the byte where a patch begins in the unfinished file."""
        return self._data + patch * self._form.patch_bytes

    def finish(self, kept: Sequence[tuple[tuple[int, int, int], int, int]]) -> list[tuple[int, int]]:
        """Close the gaps that failed images left, write header and grids, make the file durable under its name.

        kept: `(grid_thw, patch_start, patch_count)` of the stored images in row order, as they were planned.
        Returns their final `(row, patch_start)`.
        """
        total = sum(count for _, _, count in kept)
        header = self._form.header(len(kept), total)
        data = len(header) + len(kept) * 24
        size = self._form.patch_bytes
        placed: list[tuple[int, int]] = []
        next_patch = 0
        with disk_errors(self._path):
            try:
                for row, (_, start, count) in enumerate(kept):
                    self._move(self._data + start * size, data + next_patch * size, count * size)
                    placed.append((row, next_patch))
                    next_patch += count
                grids = np.array([thw for thw, _, _ in kept], dtype="<i8").reshape(-1, 3)
                self._write(0, memoryview(header + grids.tobytes()))
                os.ftruncate(self._file, data + total * size)
                os.fsync(self._file)
                os.replace(self.temporary, self._path)
            except BaseException:
                self.abort()
                raise
            self._close()
            sync(self._path.parent)
        return placed

    def abort(self) -> None:
        """Remove the unfinished file. What a worker still writes is lost with it."""
        self._close()
        self.temporary.unlink(missing_ok=True)

    def _write(self, offset: int, content: memoryview) -> None:
        content = content.cast("B")
        while content:
            written = os.pwrite(self._file, content, offset)  # may take less than it is given
            content, offset = content[written:], offset + written

    def _move(self, source: int, target: int, count: int) -> None:
        """Move bytes of the file; only ever towards the front, so nothing unread is overwritten."""
        if source == target:
            return
        for done in range(0, count, _MOVED_AT_ONCE):
            part = os.pread(self._file, min(_MOVED_AT_ONCE, count - done), source + done)
            self._write(target + done, memoryview(part))

    def _close(self) -> None:
        if "_file" in self.__dict__:
            os.close(self.__dict__.pop("_file"))


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a shard: safetensors dtype name, shape, and its byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """An opened shard. Reads through a memory map; needs numpy only."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def dtype(self) -> DType:
        """The dtype of `pixel_values`."""
        return _BY_SAFETENSORS[self.tensors["pixel_values"].dtype]

    def raw(self, name: str) -> np.ndarray[Any, Any]:
        """A tensor as mapped numpy array; bfloat16 comes as uint16 bit patterns."""
        tensor = self.tensors[name]
        kind = self.dtype.numpy if name == "pixel_values" else np.dtype("<i8")
        if tensor.begin == tensor.end:
            return np.zeros(tensor.shape, kind)
        return np.memmap(self.path, kind, "r", tensor.begin, tensor.shape)

    def floats(self, name: str, begin: int, end: int) -> np.ndarray[Any, Any]:
        """Rows `begin:end` of a tensor as stored values in float32 (uint8 levels stay levels)."""
        rows = self.raw(name)[begin:end]
        return self.dtype.widen(rows) if name == "pixel_values" else rows.astype(np.float32)


def open_shard(path: Path) -> Shard:
    """Open a shard and check that it is one of ours. Raises InputError."""
    import safetensors

    try:
        with safetensors.safe_open(regular(path), framework="numpy") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
        with open(path, "rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
        metadata: Any = None if text is None else strict_json.parse(text.encode(), "its metadata")
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError, strict_json.JsonProblem) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _no_shard(path, reason) from error
    tensors = {
        name: Tensor(info["dtype"], tuple(info["shape"]), *(8 + length + at for at in info["data_offsets"]))
        for name, info in header.items()
        if name != "__metadata__"
    }
    if reason := _unlike_ours(metadata, tensors):
        raise _no_shard(path, reason)
    return Shard(path, metadata, tensors)


def _unlike_ours(metadata: Any, tensors: Mapping[str, Tensor]) -> str:
    """What tells a well-formed safetensors file from a shard; empty for a shard."""
    if set(tensors) != {"pixel_values", "grid_thws"}:
        return f"its tensors are {', '.join(sorted(tensors)) or 'none'}, not pixel_values and grid_thws"
    if not isinstance(metadata, dict):
        return f"its metadata has no {METADATA_KEY}"
    if (version := metadata.get("format", FORMAT)) != FORMAT:
        return f"its format is {version!r}, this version reads format {FORMAT}"
    if reason := odd_metadata(metadata):
        return reason
    pixels, grids = tensors["pixel_values"], tensors["grid_thws"]
    square = len(pixels.shape) == 4 and pixels.shape[2] == pixels.shape[3]
    if pixels.dtype not in _BY_SAFETENSORS or not square or pixels.shape[1] != 3:
        return f"pixel_values is {pixels.dtype} {list(pixels.shape)}, not [patches, 3, p, p]"
    if metadata.get("patch_size", pixels.shape[2]) != pixels.shape[2]:
        return f"pixel_values is {list(pixels.shape)}, its metadata says patches of {metadata['patch_size']} pixels"
    if grids.dtype != "I64" or grids.shape[1:] != (3,):
        return f"grid_thws is {grids.dtype} {list(grids.shape)}, not I64 [images, 3]"
    return ""


def _no_shard(path: Path, reason: str) -> InputError:
    what = f"not a shard of kimik3-prep: {reason}"
    return InputError([Problem(str(path), what, "a .safetensors file that `kimik3-prep encode` wrote")])
