"""A manifest from what people have: a folder of images, or a list of rows that name some. Needs no torch.

Every row that is written was read as `encode` reads it, so a manifest made here has no problems there.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

import pyarrow as pa
from PIL import Image

from kimik3_prep.disk import disk_errors, write_whole
from kimik3_prep.errors import InputError, ItemError, Problem
from kimik3_prep.images.address import resolve
from kimik3_prep.images.decode import FORMATS, probe
from kimik3_prep.manifest.read import base_of
from kimik3_prep.manifest.records import read_records
from kimik3_prep.manifest.row import ID_KEYS, IMAGE_KEYS, Report, read_item, show
from kimik3_prep.remote import scheme

#: Fields of a row that may hold its images, in the order they are looked for.
FIELDS = ("images", *IMAGE_KEYS)
#: What file names of images end in: the suffixes Pillow gives the formats that are decoded.
SUFFIXES = frozenset(suffix for suffix, name in Image.EXTENSION.items() if name in (*FORMATS, "MPO"))

#: What encode would read as the image's own, and a row of another kind of list means otherwise.
_OF_AN_ITEM = ("type", "modality", "backend", "content_hash", "width", "height")
_NEVER = ("features", "grid_thw")
_NONE: tuple[Any, ...] = (None, "", [])

_IN_MEMORY = 64 << 20  # bytes of the manifest; the rest waits in a temporary file until all rows are known to be good
_LOOKED_AT = 100  # images whose files are looked for


@dataclass(frozen=True, slots=True)
class Wishes:
    """What `manifest` was asked for. `_row` and `_Lines.name_of` say what the fields come to."""

    source: str
    output: Path | None = None
    image_dir: Path | None = None
    image_field: str | None = None
    id_field: str | None = None
    number_rows: bool = False
    absolute: bool = False
    size: bool = False
    overwrite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What a manifest was made of."""

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
    passed_over: int = 0
    """Files that are no images, or rows that name none."""
    links: int = 0
    """Links to folders that were not followed."""
    sizes_unknown: int = 0
    """Images without width and height in the manifest although `--size` asked for them."""
    warnings: tuple[Problem, ...] = ()
    """What the reader should know, and nothing stops at."""


def gather(wishes: Wishes) -> tuple[Gathered, IO[bytes]]:
    """The manifest of `wishes.source` as JSON Lines, written to `wishes.output` where there is one.

    Raises InputError with everything that is wrong with the source, before anything is written; RunError.
    """
    if wishes.output is not None and wishes.output.exists() and not wishes.overwrite:
        raise InputError([Problem(str(wishes.output), "exists already", hint="choose another, or --overwrite")])
    is_folder = os.path.isdir(wishes.source)
    report = Report()
    with disk_errors(Path(tempfile.gettempdir(), "manifest")):
        lines = _Lines(wishes, report)
        _gather_folder(lines) if is_folder else _gather_rows(lines)
        if report.total:
            raise InputError(report.problems, report.total)
        lines.file.seek(0)
    if wishes.output is not None:
        write_whole(wishes.output, lambda file: _copy(lines.file, file, str(wishes.output).endswith(".gz")))
        lines.file.seek(0)
    return lines.gathered("files" if is_folder else "rows"), lines.file


def _copy(lines: IO[bytes], file: BinaryIO, compress: bool) -> None:
    if not compress:
        shutil.copyfileobj(lines, file)
        return
    with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:  # no name and no time: equal input, equal bytes
        shutil.copyfileobj(lines, packed)


class _Lines:
    """The manifest while it is made: a file of lines, and the ids that are taken."""

    def __init__(self, wishes: Wishes, report: Report) -> None:
        self.wishes, self.report = wishes, report
        self.items = self.rows = self.passed_over = self.links = self.sizes_unknown = 0
        self.warnings: list[Problem] = []
        self.name = "<stdin>" if wishes.source == "-" else wishes.source
        self.base = base_of(str(wishes.output)) if wishes.output else os.getcwd()
        self.file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  closed with the process
        self._ids: dict[str, str] = {}  # and where each stands
        self._size = lru_cache(4096)(self._read_size)
        self._looked, self._missing = 0, list[str]()

    def add(self, row: dict[str, Any], where: str) -> None:
        """One manifest row, whose `image` is written as it shall be."""
        item = read_item(0, 0, row, where, self.report)
        if item is None:
            return
        if (before := self._ids.get(item.id)) is not None:
            hint = "--id-field names another field, --number-rows numbers the rows"
            self.report.add(where, f"id {show(item.id)} is that of {before} already", "ids that are unique", hint)
        self._ids.setdefault(item.id, where)
        if self.report.total:
            return
        if self._looked < _LOOKED_AT and self.is_file(item.image):
            self._looked += 1
            self._missing += [] if os.path.lexists(self.path(item.image)) else [self.path(item.image)]
        if self.wishes.size and item.width is None and self.is_file(item.image):
            row = {"id": row["id"], "image": row["image"], **self._size(self.path(item.image)), **row}
        self.file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self.items += 1

    def gathered(self, of: Literal["files", "rows"]) -> Gathered:
        """Return what was counted."""
        return Gathered(
            output=str(self.wishes.output) if self.wishes.output else None,
            of=of,
            items=self.items,
            rows=self.rows,
            passed_over=self.passed_over,
            links=self.links,
            sizes_unknown=self.sizes_unknown,
            warnings=tuple(self.warnings),
        )

    def path(self, image: str) -> str:
        """Where encode will look for an image."""
        return resolve(image, self.base)

    def is_file(self, image: str) -> bool:
        """Whether it is neither a URL nor inside the manifest."""
        return not image.startswith("data:") and scheme(image) is None

    def name_of(self, path: str) -> str:
        """How the manifest names a file: relative to its own folder, for encode to find it there."""
        if self.wishes.absolute:
            return path
        relative = os.path.relpath(path, self.base)
        return f"./{relative}" if relative.startswith("data:") else relative

    def warn_of_missing(self) -> None:
        """Where none of the first files is there, relative paths probably start elsewhere."""
        if self._missing and len(self._missing) == self._looked:
            what = f"of the first {self._looked} files none is there, such as {show(self._missing[0])}"
            hint = "--image-dir says where relative paths start"
            self.warnings.append(Problem(self.name, what, hint=hint, severity="warning"))

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


# --- a folder -----------------------------------------------------------------------------------------------------


def _gather_folder(lines: _Lines) -> None:
    """Every image below the folder, by name; its id is its path from there."""
    root = os.path.abspath(lines.wishes.source)
    for name in ("image_dir", "image_field", "id_field"):
        if getattr(lines.wishes, name) is not None:
            lines.report.add(f"--{name.replace('_', '-')}", "is about rows, and a folder has none", hint="leave it out")
    for number, relative in enumerate(_walk(root, lines)):
        try:
            relative.encode()
        except UnicodeEncodeError:
            lines.report.add(os.path.join(lines.name, relative), "its name is not UTF-8", hint="rename it")
            continue
        lines.rows += 1
        id = str(number) if lines.wishes.number_rows else relative
        row = {"id": id, "image": lines.name_of(os.path.join(root, relative))}
        lines.add(row, os.path.join(lines.name, relative))
    if not lines.items and not lines.report.total:
        lines.report.add(lines.name, "no image is in it", f"files that end in {', '.join(sorted(SUFFIXES))}")


def _walk(root: str, lines: _Lines) -> Iterator[str]:
    """Images below `root` as paths from there. Hidden files and folders are not looked at.

    A link to a folder is followed once, and not where it leads into `root` or above it: what is there comes anyway, or
    was not meant.
    """
    real, seen = os.path.realpath(root), set()
    stack = [("", True)]
    while stack:
        relative, is_folder = stack.pop()
        if not is_folder:
            yield relative
            continue
        path = os.path.join(root, relative)
        try:
            status = os.stat(path)
            entries = sorted(os.scandir(path), key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            lines.report.add(path, f"cannot be read: {error.strerror}")
            continue
        if (status.st_dev, status.st_ino) in seen:
            lines.links += 1
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            if entry.name.startswith("."):
                continue
            kind = _kind(entry, real)
            if kind in ("folder", "image"):
                stack.append((os.path.join(relative, entry.name), kind == "folder"))
            lines.links += kind == "link"
            lines.passed_over += kind == "other"


def _kind(entry: os.DirEntry[str], root: str) -> Literal["folder", "image", "link", "other"]:
    try:
        if entry.is_dir():
            if not entry.is_symlink():
                return "folder"
            target = os.path.realpath(entry.path)
            related = os.path.commonpath([target, root]) in (target, root)
            return "link" if related else "folder"
        is_image = os.path.splitext(entry.name)[1].lower() in SUFFIXES and entry.is_file()
    except OSError:  # a link that leads round in a circle
        return "other"
    return "image" if is_image else "other"


# --- a list of rows -----------------------------------------------------------------------------------------------


def _gather_rows(lines: _Lines) -> None:
    """The images of every row, in its order."""
    source, report = lines.wishes.source, lines.report
    folder = os.path.abspath(lines.wishes.image_dir or base_of(source))
    left_out: list[str] = []
    fields: dict[str, None] = {}  # a set in the order of the file
    where = ""
    try:
        for number, (where, row) in enumerate(read_records(source, lines.name, report, left_out)):
            lines.rows += 1
            if row is not None:
                fields |= dict.fromkeys(list(row)[:20]) if len(fields) < 20 else {}
                _gather_row(lines, number, where, row, folder)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        what = "cannot read on after this row" if where else "cannot be read"
        report.add(where or lines.name, f"{what}: {reason}")
    if not lines.items and not report.total:
        expected = lines.wishes.image_field or f"one of {', '.join(FIELDS)}"
        hint = f"--image-field NAME chooses another; the rows have {', '.join(map(show, fields)) or 'no field'}"
        report.add(lines.name, "no row names an image", expected, hint)
    if left_out:
        what = f"left out what JSON cannot hold: {', '.join(left_out)}"
        lines.warnings.append(Problem(lines.name, what, severity="warning"))
    lines.warn_of_missing()


def _gather_row(lines: _Lines, number: int, where: str, row: dict[str, Any], folder: str) -> None:
    wishes = lines.wishes
    name = wishes.image_field or next((key for key in FIELDS if row.get(key) not in _NONE), "")
    value = _lookup(row, name)
    if value in _NONE:
        lines.passed_over += 1
        return
    several = isinstance(value, list)
    images = [_address(part, name, where, lines.report) for part in (value if several else [value])]
    id_name = "" if wishes.number_rows else wishes.id_field or next((k for k in ID_KEYS if row.get(k) is not None), "")
    id = _id(row, id_name, where, lines.report) if id_name else str(number)
    rest = _rest(row, name, id_name == "id" and not several, several)
    for place, image in enumerate(images):
        if image is None or id is None:
            continue
        if lines.is_file(image) and image[:7].lower() != "file://" and not os.path.isabs(image):
            image = lines.name_of(os.path.normpath(os.path.join(folder, image)))
        lines.add({"id": f"{id}#{place}" if several else id, "image": image, **rest}, where)


def _lookup(row: dict[str, Any], name: str) -> Any:
    """A field, or with dots one inside others; None where there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _address(value: Any, name: str, where: str, report: Report) -> str | None:
    """The path or URL of an image, which may stand in an object as its `path` or `url`."""
    found = value
    if isinstance(value, dict):
        found = next((value[key] for key in ("path", "url") if value.get(key)), None)
    if isinstance(found, str) and found:
        return found
    hint = "pictures inside a row are not read: write them into files" if isinstance(value, dict) else ""
    report.add(where, f"{name} holds {show(value)}", "a path or URL, or an object with one as path or url", hint)
    return None


def _id(row: dict[str, Any], name: str, where: str, report: Report) -> str | None:
    value = _lookup(row, name)
    if isinstance(value, float) and value.is_integer():  # pandas turns whole numbers into floats where a row lacks one
        value = int(value)
    if type(value) is int or (isinstance(value, str) and value):
        return str(value)
    what = f"{name} is missing" if value is None else f"{name} is {show(value)}"
    report.add(where, what, "a non-empty string or an integer")
    return None


def _rest(row: dict[str, Any], name: str, id_is_used: bool, several: bool) -> dict[str, Any]:
    """The other fields. Those that encode would refuse, or read as the image's own, get `row_` before their names."""
    rest = {key: value for key, value in row.items() if key != name and not (key == "id" and id_is_used)}
    own = {key: rest[key] for key in _OF_AN_ITEM if key in rest}
    refused = Report()
    if own and not several:
        read_item(0, 0, {"image": "a", **own}, "", refused)
    renamed = {"id", "image", *_NEVER, *(own if several or refused.total else ())}
    for key in [key for key in rest if key in renamed]:
        new = f"row_{key}"
        while new in rest:
            new = f"row_{new}"
        rest[new] = rest.pop(key)
    return rest
