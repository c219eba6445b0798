"""What was read from a source, written as JSON Lines that `encode` reads to the same items."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from kimik3_prep.disk import disk_errors, write_whole
from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.images.address import is_data_url, resolve, split
from kimik3_prep.images.decode import probe
from kimik3_prep.manifest.missing import missing_files
from kimik3_prep.manifest.read import Manifest, base_of, name_from, read_manifest
from kimik3_prep.manifest.report import PassedOver
from kimik3_prep.manifest.row import NO_SELECTION, Selection
from kimik3_prep.remote import scheme

_IN_MEMORY = 64 << 20  # bytes of the manifest; the rest waits in a temporary file until it is whole
_FIELDS = ("id", "image", "backend", "content_hash", "width", "height", "grid_thw")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `manifest` was asked for."""

    source: str
    output: Path | None = None
    image_dir: str | None = None
    select: Selection = NO_SELECTION
    absolute: bool = False
    size: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What a manifest was made of (`manifest`)."""

    status: Literal["ok"] = "ok"
    """The command did its work."""
    output: str | None
    """The manifest, as it was given; null for standard output."""
    of: Literal["files", "rows"]
    """What the source is made of."""
    items: int = 0
    """Rows of the manifest."""
    rows: int = 0
    """Images of a folder, or rows of a list."""
    passed_over: tuple[PassedOver, ...] = ()
    """What the source holds that became no item, by kind."""
    sizes_unknown: int = 0
    """Images without width and height in the manifest although `--size` asked for them."""
    warnings: tuple[Problem, ...] = ()
    """What the reader should know, and nothing stops at."""


def gather(wishes: Wishes) -> tuple[Gathered, IO[bytes]]:
    """Write the manifest of `wishes.source` to `wishes.output` where there is one; return it as JSON Lines.

    Raises InputError with everything that is wrong with the source, before anything is written; RunError.
    """
    if wishes.output is not None and wishes.output.exists() and not wishes.overwrite:
        raise InputError([Problem(str(wishes.output), "exists already", hint="choose another, or --overwrite")])
    manifest = read_manifest(wishes.source, None, wishes.select, wishes.image_dir)
    lines = _Lines(manifest, wishes)
    with disk_errors(Path(tempfile.gettempdir(), "manifest")):
        file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  closed with the process
        file.writelines(lines)
        file.seek(0)
    if wishes.output is not None:
        write_whole(wishes.output, lambda target: _copy(file, target, str(wishes.output).endswith(".gz")), True)
        file.seek(0)
    missing = missing_files(manifest)
    gathered = Gathered(
        output=str(wishes.output) if wishes.output else None,
        of="files" if os.path.isdir(wishes.source) else "rows",
        items=manifest.items.num_rows,
        rows=manifest.rows,
        passed_over=manifest.passed_over,
        sizes_unknown=lines.sizes_unknown,
        warnings=(*manifest.warnings, *([missing] if missing else [])),
    )
    return gathered, file


def _copy(lines: IO[bytes], file: BinaryIO, compress: bool) -> None:
    if not compress:
        shutil.copyfileobj(lines, file)
        return
    with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:  # no name and no time: equal input, equal bytes
        shutil.copyfileobj(lines, packed)


class _Lines:
    """The rows of a manifest as lines."""

    def __init__(self, manifest: Manifest, wishes: Wishes) -> None:
        self._manifest, self._wishes = manifest, wishes
        self._base = base_of(str(wishes.output)) if wishes.output else os.getcwd()
        self._size = lru_cache(4096)(self._read_size)
        self.sizes_unknown = 0

    def __iter__(self) -> Iterator[bytes]:
        for batch in self._manifest.items.to_batches(max_chunksize=4096):
            for item in batch.to_pylist():
                yield json.dumps(self._row(item), ensure_ascii=False, allow_nan=False).encode() + b"\n"

    def _row(self, item: dict[str, Any]) -> dict[str, Any]:
        image, local = item["image"], item["path"] == "local"
        row = {name: item[name] for name in _FIELDS if item[name] is not None}
        row["image"] = self._from_here(image)
        if local:
            row = {"features" if name == "image" else name: value for name, value in row.items()}
        elif self._wishes.size and item["width"] is None and not is_data_url(image) and scheme(image) is None:
            row |= self._size(resolve(image, self._manifest.base))
        return {**row, **json.loads(item["extra"] or "{}")}

    def _from_here(self, image: str) -> str:
        """How the written manifest names an image: relative to its own folder, for `encode` to find it there."""
        resolved = resolve(image, self._manifest.base)
        if is_data_url(image) or image[:7].lower() == "file://" or os.path.isabs(image):
            return image
        file = split(resolved)[0]
        stays = self._wishes.absolute or scheme(resolved) is not None
        return resolved if stays else name_from(self._base, file) + resolved[len(file) :]

    def _read_size(self, path: str) -> dict[str, int]:
        try:
            header, turned = probe(path), probe(path, exif="apply")
        except ItemError:
            self.sizes_unknown += 1
            return {}
        if header.width != turned.width:  # whether the image is turned is for `encode` to say: it reads this one again
            self.sizes_unknown += 1
            return {}
        return {"width": header.width, "height": header.height}
