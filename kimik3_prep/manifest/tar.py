"""A tar of images: its headers are read once, each image later by its offset.

Archives come from anywhere, so nothing is believed: a name is never a path, a header must have its checksum, a size
must fit into the file, and whatever is no regular file is no image. Damage is a problem, because behind it images would
be missing without a word. Python's own reader stops at it silently.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from kimik3_prep.images.address import name_in_tar
from kimik3_prep.manifest.magic import SUFFIXES, suffix_of
from kimik3_prep.manifest.report import Report, show
from kimik3_prep.manifest.row import Cell, Row
from kimik3_prep.manifest.text import side_text, side_value

_BLOCK = 512
_MOST_OF_A_NAME = 1 << 20  # bytes of a header's extension
_MOST_BESIDE = 16 << 20  # bytes of a description
_KEPT = 64 << 20  # bytes of descriptions that are not read a second time
_JSON = (".json", ".jsn")
_TEXTS = (*_JSON, ".txt", ".text", ".transcript", ".caption", ".cls", ".cls2", ".class", ".count", ".index", ".id")
_EXTENSIONS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE)
_KINDS = {
    **{tarfile.LNKTYPE: "a hard link", tarfile.SYMTYPE: "a symbolic link", tarfile.FIFOTYPE: "a named pipe"},
    **{tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device"},
}


class DamagedTar(OSError):
    """The archive cannot be read on."""


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    kind: str
    """Empty for a regular file, else what it is."""
    begin: int
    size: int
    is_image: bool

    @property
    def key(self) -> str:
        """What files of one sample share: the name up to the first dot of its last part."""
        folder, slash, name = self.name.rpartition("/")
        return folder + slash + name.partition(".")[0]

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return self.name.rpartition(".")[0]

    @property
    def is_of_a_mac(self) -> bool:
        """Whether macOS put it there to remember the attributes of another file."""
        return self.name.rpartition("/")[2].startswith("._")


def tar_rows(
    file: BinaryIO, tar: str, name: str, digest: Any, report: Report, image_suffixes: frozenset[str] = SUFFIXES
) -> Iterator[Row]:
    """A row for each image, with what stands beside it: members of one key are a sample, as in WebDataset.

    `tar` is what image strings call the archive, `name` what people do. `digest` gets the headers and the `.json` and
    `.txt` that follow their images. Raises DamagedTar.
    """
    contents: dict[str, bytes] = {}
    samples: dict[str, list[_Member]] = {}
    run: list[_Member] = []  # members of one key that follow each other
    for member in _members(file, digest, image_suffixes):
        if run and member.key != run[0].key:
            _digest_descriptions(run, file, digest, contents)
            run = []
        run.append(member)
        if member.is_of_a_mac:
            report.pass_over("members that macOS adds (._…)", f"{name}: {member.name}")
        else:
            samples.setdefault(member.key, []).append(member)
    _digest_descriptions(run, file, digest, contents)
    number = 0
    for key, sample in samples.items():
        images = [member for member in sample if member.is_image]
        for image in images:
            if image.kind:
                hint = "make the archive with `tar --dereference --hard-dereference`" if "link" in image.kind else ""
                report.add(name, f"member {show(image.name)} is {image.kind}", "images that are regular files", hint)
        beside = _beside(sample, images, name, file, contents, report)
        stems = [image.stem for image in images]
        for image in images:
            number += 1
            id = key if len(images) == 1 else image.stem if stems.count(image.stem) == 1 else image.name
            cell = Cell(name_in_tar(tar, image.begin, image.size, image.name))
            fields = {**beside.get(key, {}), **beside.get(image.name, {})}
            yield Row(str(number), {"id": id, "image": cell, **fields}, ("image",))


def _digest_descriptions(run: list[_Member], file: BinaryIO, digest: Any, contents: dict[str, bytes]) -> None:
    """Let descriptions that follow their image be part of what the archive is."""
    if not any(member.is_image and not member.is_of_a_mac for member in run):
        return
    for member in run:
        if (
            member.name in (f"{member.key}.json", f"{member.key}.txt")
            and not member.kind
            and member.size <= _MOST_BESIDE
        ):
            content = _content(member, file)
            digest.update(content)
            if sum(map(len, contents.values())) < _KEPT:
                contents[member.name] = content


def _content(member: _Member, file: BinaryIO) -> bytes:
    file.seek(member.begin)
    return file.read(member.size)


def _beside(
    sample: list[_Member],
    images: list[_Member],
    name: str,
    file: BinaryIO,
    contents: dict[str, bytes],
    report: Report,
) -> dict[str, dict[str, Any]]:
    """What stands beside images: by the name of the image it belongs to, or by the key of all."""
    found: dict[str, dict[str, Any]] = {}
    for member in sample:
        suffix = suffix_of(member.name)
        if member.is_image:
            continue
        if not images or suffix not in _TEXTS or member.kind:
            kind = "descriptions without an image" if suffix in _TEXTS else f"{suffix or 'suffixless'} members"
            report.pass_over(kind, f"{name}: {member.name}")
            continue
        owners = [image for image in images if image.stem == member.stem != member.key]
        field = member.name.removeprefix(f"{member.key}.") if not owners else suffix[1:]
        where = f"{name}: {member.name}"
        if member.size > _MOST_BESIDE:
            report.warn(where, f"more than {_MOST_BESIDE >> 20} MiB beside an image: left out")
            continue
        content = contents.pop(member.name, None)
        content = _content(member, file) if content is None else content
        value = side_value(content, where, report) if suffix in _JSON else side_text(content, where, report)
        if value is not None:
            for owner in [image.name for image in owners] or [member.key]:
                found.setdefault(owner, {})[field] = value
    return found


# --- headers ------------------------------------------------------------------------------------------------------


def _members(file: BinaryIO, digest: Any, image_suffixes: frozenset[str]) -> Iterator[_Member]:
    """All members but folders, in order, also those of archives that follow. The file may be moved between two."""
    total = file.seek(0, 2)
    place = 0
    extended: dict[str, Any] = {}
    while True:
        block = _read(file, place, _BLOCK, digest)
        if not block.strip(b"\0"):
            if extended or not block:
                raise DamagedTar("the archive ends without its end mark, as one that was cut off")
            if (place := _next_archive(file, place, total)) == total:
                return
            continue
        header = _header(block, place)
        kind, name, size = header.type, header.name, header.size
        place += _BLOCK
        if kind == tarfile.GNUTYPE_SPARSE:
            more = block[482]
            while more:
                more = _read(file, place, _BLOCK, digest).ljust(_BLOCK, b"\0")[504]
                place += _BLOCK
        size = extended.get("size", size)
        held = 0 if kind in _KINDS or kind == tarfile.DIRTYPE else size
        if place + held > total or size < 0:
            raise DamagedTar(f"the archive ends in the middle of {show(extended.get('name', name))}")
        if kind in _EXTENSIONS:
            if size > _MOST_OF_A_NAME:
                raise DamagedTar(f"the header at byte {place - _BLOCK:,} announces a name of {size:,} bytes")
            _extend(extended, kind, _read(file, place, size, digest))
        else:
            if kind != tarfile.DIRTYPE:
                odd = "" if kind in tarfile.REGULAR_TYPES and not extended.get("sparse") else "a sparse file"
                odd = "a sparse file" if kind == tarfile.GNUTYPE_SPARSE else _KINDS.get(kind, odd)
                name = extended.get("name", name)
                yield _Member(name, odd, place, size, suffix_of(name) in image_suffixes)
            extended = {}
        place += -(-held // _BLOCK) * _BLOCK


def _next_archive(file: BinaryIO, place: int, total: int) -> int:
    """Where an archive begins behind an end mark, as `cat a.tar b.tar` leaves it; the end of the file without one."""
    file.seek(place)
    while chunk := file.read(1 << 20):
        if rest := chunk.lstrip(b"\0"):
            return (place + len(chunk) - len(rest)) // _BLOCK * _BLOCK
        place += len(chunk)
    return total


def _read(file: BinaryIO, place: int, size: int, digest: Any) -> bytes:
    file.seek(place)
    digest.update(content := file.read(size))
    return content


def _header(block: bytes, place: int) -> tarfile.TarInfo:
    """What a header says, without what headers before it said. Raises DamagedTar."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError:
        raise DamagedTar(f"the header at byte {place:,} is damaged") from None
    if block[257:263] != b"ustar\0" and header.type not in tarfile.GNU_TYPES:  # GNU keeps times where POSIX has names
        header.name = block[:100].partition(b"\0")[0].decode("utf-8", "replace")
    return header


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _extend(extended: dict[str, Any], kind: bytes, content: bytes) -> None:
    """Take over what an extension says of the next member. Raises DamagedTar."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        extended["name"] = _text(content)
    while kind == tarfile.XHDTYPE and content:
        length = content.partition(b" ")[0]
        end = int(length) if length.isdigit() and len(length) < 9 else 0
        record, content = content[len(length) + 1 : end], content[end:]
        key, equals, value = record.partition(b"=")
        if end <= len(length) or not equals or not value.endswith(b"\n"):
            raise DamagedTar("an extended header is damaged")
        value = value[:-1]
        if key == b"path":
            extended["name"] = value.decode("utf-8", "replace")
        elif key == b"size":
            extended["size"] = int(value) if value.isdigit() and len(value) < 19 else 1 << 62
        elif key.startswith(b"GNU.sparse"):
            extended["sparse"] = True
