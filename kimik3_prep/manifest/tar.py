"""A tar of images as a manifest: its headers are read once, each image later by its offset.

Archives come from anywhere, so nothing is believed: a name is never a path, a header must have its checksum, a size
must fit into the file, and whatever is no regular file is no image. Damage is a problem, because behind it images would
be missing without a word. Python's own reader stops at it silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from kimik3_prep import strict_json
from kimik3_prep.errors import Problem
from kimik3_prep.images.address import name_in_tar
from kimik3_prep.manifest.row import Report, show

_BLOCK = 512
_MOST_OF_A_NAME = 1 << 20  # bytes of a header's extension
_MOST_BESIDE = 16 << 20  # bytes of a .json or .txt
_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"),
    *(".avif", ".avifs", ".jp2", ".j2k", ".jpx", ".jpf", ".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".ico", ".xbm"),
)
_REGULAR = b"0\0007"
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a named pipe"}
_WITHOUT_DATA = b"123456"


class DamagedTar(OSError):
    """The archive cannot be read on."""


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    kind: str  # empty for a regular file, else what it is
    begin: int
    size: int

    @property
    def key(self) -> str:
        """What files of one sample share: the name up to the first dot of its last part."""
        folder, slash, name = self.name.rpartition("/")
        return folder + slash + name.partition(".")[0]

    @property
    def is_image(self) -> bool:
        return self.name.lower().endswith(_SUFFIXES) and not self.name.rpartition("/")[2].startswith("._")


def looks_like_a_tar(start: bytes) -> bool:
    """Whether a file that begins so, with 512 bytes or more, is a tar."""
    return start[257:262] == b"ustar"


def tar_rows(file: BinaryIO, tar: str, name: str, digest: Any, report: Report) -> Iterator[dict[str, Any]]:
    """A manifest row for each image; members that follow each other with one key are a sample, as in WebDataset.

    `tar` is what image strings call the archive, `name` what people do. `digest` gets the headers and what stands
    beside the images. Raises DamagedTar.
    """
    sample: list[_Member] = []
    for found in _members(file, digest):
        if sample and found.key != sample[0].key:
            yield from _rows_of(sample, file, tar, name, digest, report)
            sample = []
        sample.append(found)
    yield from _rows_of(sample, file, tar, name, digest, report)


def _rows_of(
    sample: list[_Member], file: BinaryIO, tar: str, name: str, digest: Any, report: Report
) -> Iterator[dict[str, Any]]:
    images = [found for found in sample if found.is_image]
    for found in images:
        if found.kind:
            hint = "make the archive with `tar --dereference --hard-dereference`" if "link" in found.kind else ""
            report.add(name, f"member {show(found.name)} is {found.kind}", "images that are regular files", hint)
    if not images:
        return
    beside: dict[str, Any] = {}
    for found in sample:
        if found.name in (f"{found.key}.json", f"{found.key}.txt") and not found.kind:
            _read_beside(found, file, name, digest, report, beside)
    stems = [found.name.rpartition(".")[0] for found in images]
    for found, stem in zip(images, stems, strict=True):
        id = found.key if len(images) == 1 else stem if stems.count(stem) == 1 else found.name
        yield {"id": id, "image": name_in_tar(tar, found.begin, found.size, found.name), **beside}


def _read_beside(found: _Member, file: BinaryIO, tar: str, digest: Any, report: Report, beside: dict[str, Any]) -> None:
    where = f"{tar}: {found.name}"
    if found.size > _MOST_BESIDE:
        report.add(where, f"more than {_MOST_BESIDE >> 20} MiB beside an image", "a description")
        return
    file.seek(found.begin)
    digest.update(content := file.read(found.size))
    try:
        if found.name.endswith(".json"):
            beside["json"] = strict_json.parse(content, where)
        else:
            beside["txt"] = content.decode("utf-8")
    except strict_json.JsonProblem as problem:
        report.add_problem(problem.problem)
    except UnicodeDecodeError:
        report.add_problem(Problem(where, "not UTF-8", "text in UTF-8"))


# --- headers ------------------------------------------------------------------------------------------------------


def _members(file: BinaryIO, digest: Any) -> Iterator[_Member]:
    """All members but folders, in order. The file may be moved between two of them."""
    total = file.seek(0, 2)
    place = 0
    extended: dict[str, Any] = {}
    while True:
        block = _read(file, place, _BLOCK, digest)
        if not block.strip(b"\0"):
            if extended or not block:
                raise DamagedTar("the archive ends without its end mark, as one that was cut off")
            return
        kind, found = _header(block, place)
        place += _BLOCK
        if kind == b"S":
            more = block[482]
            while more:
                more = _read(file, place, _BLOCK, digest).ljust(_BLOCK, b"\0")[504]
                place += _BLOCK
        size = extended.get("size", found.size)
        held = 0 if kind in _WITHOUT_DATA and kind else size
        if place + held > total:
            raise DamagedTar(f"the archive ends in the middle of {show(extended.get('name', found.name))}")
        if kind in (b"L", b"K", b"x", b"g"):
            if size > _MOST_OF_A_NAME:
                raise DamagedTar(f"the header at byte {place - _BLOCK:,} announces a name of {size:,} bytes")
            _extend(extended, kind, _read(file, place, size, digest))
        elif kind != b"5" and not found.name.endswith("/"):
            odd = "" if kind in _REGULAR and not extended.get("sparse") else _KINDS.get(kind, "a sparse file")
            yield replace(found, name=extended.get("name", found.name), kind=odd, begin=place, size=size)
        if kind not in (b"L", b"K", b"x", b"g"):
            extended = {}
        place += -(-held // _BLOCK) * _BLOCK


def _read(file: BinaryIO, place: int, size: int, digest: Any) -> bytes:
    file.seek(place)
    digest.update(content := file.read(size))
    return content


def _header(block: bytes, place: int) -> tuple[bytes, _Member]:
    """The type and what a header says, without what headers before it said. Raises DamagedTar."""
    plain = block[:148] + b" " * 8 + block[156:]
    wrong = sum(plain) - _number(block[148:156])
    # Old writers took bytes for signed numbers.
    if len(block) < _BLOCK or (wrong and wrong != 256 * sum(byte > 127 for byte in plain)):
        raise DamagedTar(f"the header at byte {place:,} is damaged")
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500])):
        name = f"{prefix}/{name}"
    size = _number(block[124:136])
    if size < 0:
        raise DamagedTar(f"the header at byte {place:,} announces {size} bytes")
    return block[156:157], _Member(name, "", 0, size)


def _number(field: bytes) -> int:
    """Octal digits, or GNU's binary form for what they cannot hold; -1 for neither."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], signed=field[:1] == b"\xff")
    digits = field.partition(b"\0")[0].strip() or b"0"
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else -1


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "replace")


def _extend(extended: dict[str, Any], kind: bytes, content: bytes) -> None:
    """Take over what an extension says of the next member. Raises DamagedTar."""
    if kind == b"L":
        extended["name"] = _text(content)
    while kind == b"x" and content:
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
