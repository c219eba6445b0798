"""A folder, or a prefix at a URL, as a source: tars, tables, images with what is said of them, or lists."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kimik3_prep import remote
from kimik3_prep.manifest.magic import suffix_of
from kimik3_prep.manifest.report import Report
from kimik3_prep.manifest.row import Row
from kimik3_prep.remote import scheme

_TARS = (".tar",)
_TABLES = (".parquet", ".pq", ".arrow", ".feather")
_LISTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_PACKED = (".gz", ".bz2", ".xz", ".zst")
#: Files that describe the images of their folder, as the `datasets` library reads them.
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_OF_DATASETS = ("dataset_dict.json", "state.json")

_NAMES_A_FILE = ("file_name", "image", "path")


@dataclass(slots=True)
class Folder:
    """What a folder holds, as paths from there, sorted as people sort them."""

    tars: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, names: Iterator[str], image_suffixes: frozenset[str]) -> Folder:
        """The files sorted by what their names say they are."""
        folder = cls()
        for name in names:
            plain = next((name.removesuffix(packed) for packed in _PACKED if name.endswith(packed)), name)
            suffix = suffix_of(plain)
            if os.path.basename(name) in _METADATA:
                folder.metadata.append(name)
            elif suffix in image_suffixes:
                folder.images.append(name)
            else:
                kinds = (
                    (_TARS, folder.tars),
                    (_TABLES, folder.tables),
                    (_LISTS, folder.lists),
                    ((suffix,), folder.others),
                )
                next(files for suffixes, files in kinds if suffix in suffixes).append(name)
        return folder

    def pass_over(self, report: Report, *kinds: list[str]) -> None:
        """Count files that are not read, by their suffix."""
        for name in sorted(name for files in (*kinds, self.others) for name in files):
            suffix = suffix_of(name)
            report.pass_over(f"{suffix} files" if suffix else "files without a suffix", name)


def files_of(root: str, report: Report) -> list[str]:
    """The files below a folder or a prefix at a URL, as paths from there. Hidden ones are left out.

    A link to a folder is followed once, and not where it leads into `root` or above it: what is there comes anyway, or
    was not meant.
    """
    if scheme(root):
        start = root.rstrip("/") + "/"
        return sorted(url.removeprefix(start) for url in remote.files(root))
    return list(_walk(root, report))


def _walk(root: str, report: Report) -> Iterator[str]:
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
            report.add(path, f"cannot be read: {error.strerror}")
            continue
        if (status.st_dev, status.st_ino) in seen:
            report.pass_over("folder links", relative)
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            name = os.path.join(relative, entry.name)
            if entry.name.startswith("."):
                continue
            if not name.isprintable() and any("\udc80" <= letter <= "\udcff" for letter in name):
                report.pass_over("files whose names are not UTF-8", name.encode("utf-8", "replace").decode())
                continue
            match _kind(entry, real):
                case "folder" | "file" as kind:
                    stack.append((name, kind == "folder"))
                case "link":
                    report.pass_over("folder links", name)
                case kind:
                    report.pass_over(kind, name)


def _kind(entry: os.DirEntry[str], root: str) -> str:
    try:
        if entry.is_dir():
            if not entry.is_symlink():
                return "folder"
            target = os.path.realpath(entry.path)
            return "link" if os.path.commonpath([target, root]) in (target, root) else "folder"
        return "file" if stat.S_ISREG(entry.stat().st_mode) else "pipes, sockets and devices"
    except OSError:
        return "links that lead nowhere"


def saved_dataset(root: str) -> list[str] | None:
    """The Arrow files of a folder that `save_to_disk` wrote, in order; None for another folder."""
    for name in _OF_DATASETS:
        path = os.path.join(root, name)
        if scheme(root) or not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8") as file:
                state = json.load(file)
            if name == "state.json":
                return [str(part["filename"]) for part in state["_data_files"]]
            splits = [str(split) for split in state["splits"]]
        except (ValueError, KeyError, TypeError):
            return None
        parts = [(split, saved_dataset(os.path.join(root, split))) for split in splits]
        return [os.path.join(split, file) for split, files in parts for file in files or ()]
    return None


def image_rows(
    images: list[str], said: Iterator[tuple[str, Row]], name_of: Callable[[str], str], report: Report
) -> Iterator[Row]:
    """A row for each image, by name, with what a metadata file says of it; its id is its path.

    said: the rows of metadata files, each with the path of its file.
    """
    fields: dict[str, dict[str, Any]] = {}
    for path, row in said:
        values = row.fields or {}
        key = next((key for key in _NAMES_A_FILE if isinstance(values.get(key), str)), None)
        if key is None:
            report.pass_over("descriptions without a file_name", f"{path}:{row.place}")
            continue
        others = {f"row_{k}" if k in ("id", "image") else k: value for k, value in values.items() if k != key}
        fields[os.path.normpath(os.path.join(os.path.dirname(path), values[key]))] = others
    for number, image in enumerate(images, 1):
        yield Row(str(number), {"id": image, "image": name_of(image), **fields.pop(image, {})})
    for path in fields:
        report.pass_over("descriptions without an image", path)
