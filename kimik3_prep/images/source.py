"""Where encoded bytes come from, and the one seam for what goes wrong with them.

Only regular files are opened, `data:` URLs decoded, and other URLs read through `remote.py`. Whatever the file system,
a protocol or a decoder raises becomes one `ItemError`.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import io
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, unquote_to_bytes

from PIL import Image, UnidentifiedImageError

from kimik3_prep import remote
from kimik3_prep.errors import ItemError, ItemErrorCode, NoMoreFiles, PrepError
from kimik3_prep.images.address import TableCell, TarMember, is_data_url, split
from kimik3_prep.images.cell import read_cell
from kimik3_prep.images.packed import looks_packed, packing_of, read_part

_READ_WHOLE = 256 << 20  # bytes; a larger file is hashed in pieces and decoded from disk

_HEAD = 128 << 10  # bytes of an object that hold nearly every image's header
_PIECE_OF_A_TABLE = 4 << 20
_PIECES = 3  # of `_HEAD` bytes; an image whose header lies in more of them is read whole


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one version of a source from another."""

    size: int
    """Bytes of the file; of the whole archive, where the image lies in one on this machine."""

    mtime_ns: int
    """Nanoseconds since the epoch. For an object in a store: a number made from its first bytes, since stores differ
    in what they say of its time."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """All encoded bytes of one image, in memory."""

    content: bytes
    stamp: Stamp | None
    """The stamp of the source they came from; None for `data:` URLs."""

    @property
    def content_hash(self) -> str:
        """The hash of the bytes, `sha256:<64 hex>`."""
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"


def read_whole(source: str) -> Encoded:
    """Read all bytes of a resolved `source`. Raises ItemError; RunError where the process may open no more files."""
    with foreign_errors(), opened(source, whole=True) as (file, stamp):
        return Encoded(file.read(), stamp)


def read_head(source: str) -> Encoded:
    """Read as much of a source as holds nearly every image's header. Raises as `read_whole` does.

    The source ends there when its stamp says so: `len(encoded.content) == encoded.stamp.size`.
    """
    with foreign_errors(), opened(source, whole=False) as (file, stamp):
        return Encoded(file.read(_HEAD), stamp)


@contextmanager
def opened(source: str | Encoded, whole: bool) -> Iterator[tuple[BinaryIO, Stamp | None]]:
    """Open a resolved source, or bytes that were read before, as a seekable file, and close it on the way out.

    whole: the caller will read everything, so an object comes in one request. Otherwise its header comes first, and
    the rest as it is read. A file in memory is a BytesIO.
    """
    if isinstance(source, Encoded):
        yield io.BytesIO(source.content), source.stamp
        return
    source, inside = split(source)
    if is_data_url(source):
        yield io.BytesIO(_data_url(source)), None
    elif remote.scheme(source):
        with _opened_object(source, inside, whole) as opened_object:
            yield opened_object
    else:
        with _regular_file(source) as file:
            status = os.fstat(file.fileno())
            stamp = Stamp(status.st_size, status.st_mtime_ns)  # of the file around it, where the image is a member
            if isinstance(inside, TarMember) and packing_of(os.pread(file.fileno(), 8, 0)) is not None:
                yield io.BytesIO(_unpacked(lambda: _regular_file(source), (source, stamp), inside)), stamp
            elif isinstance(inside, TarMember):
                if inside.begin + inside.size > status.st_size:
                    raise ItemError("truncated", "the archive ends before the member does")
                part = _part_of(file.fileno(), inside)
                in_memory = whole and inside.size <= _READ_WHOLE
                yield (io.BytesIO(part.readall()) if in_memory else io.BufferedReader(part)), stamp
            elif inside is not None:
                yield io.BytesIO(read_cell(file, (source, stamp), inside)), stamp
            else:
                yield file, stamp


@contextmanager
def _opened_object(
    url: str, inside: TarMember | TableCell | None, whole: bool
) -> Iterator[tuple[BinaryIO, Stamp | None]]:
    if isinstance(inside, TableCell):
        facts = remote.info(url)
        version = (url, *(str(facts.get(name)) for name in ("size", "ETag", "etag", "mtime", "updated", "created")))
        with _buffered(url) as table:
            content = read_cell(table, version, inside)
    elif inside is not None and looks_packed(url):
        content = _unpacked(lambda: _buffered(url), url, inside)
    elif whole:
        content = remote.read(url) if inside is None else remote.opened(url, inside.begin, inside.size).readall()
    else:
        begin, size = (inside.begin, inside.size) if inside is not None else (0, None)
        raw = remote.opened(url, begin, size, _PIECES)
        with io.BufferedReader(raw, _HEAD) as pieces:
            head = pieces.peek(_HEAD)[:_HEAD]
            in_memory = len(head) == raw.size()
            yield (io.BytesIO(head) if in_memory else cast("BinaryIO", pieces)), _stamp(raw.size(), head)
        return
    yield io.BytesIO(content), _stamp(len(content), content[:_HEAD])


def _buffered(url: str) -> BinaryIO:
    return cast("BinaryIO", io.BufferedReader(remote.opened(url), _PIECE_OF_A_TABLE))


def _unpacked(open_file: Callable[[], BinaryIO], version: Any, member: TarMember) -> bytes:
    """A member of a compressed tar."""
    content = read_part(open_file, version, member.begin, member.size)
    if len(content) < member.size:
        raise ItemError("truncated", "the archive ends before the member does")
    return content


def _part_of(descriptor: int, member: TarMember) -> remote.OffsetFile:
    """A member of an open local tar as a file. It reads by offset, so several may share a descriptor."""

    def read(place: int, count: int) -> bytes:
        return os.pread(descriptor, max(0, min(count, member.size - place)), member.begin + place)

    return remote.OffsetFile(read, lambda: member.size)


def _stamp(size: int, head: bytes) -> Stamp:
    return Stamp(size, int.from_bytes(hashlib.sha256(head).digest()[:8]) >> 1)


def _regular_file(path: str) -> BinaryIO:
    try:
        # A named pipe without a writer would block here for ever; O_NONBLOCK means nothing to a regular file.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except ValueError as error:  # a NUL byte in the path
        raise ItemError("not_found", f"not a path: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ItemError("not_a_file", "not a regular file (a folder, a named pipe, a socket or a device)")
    return os.fdopen(descriptor, "rb")


def _data_url(url: str) -> bytes:
    """The bytes in a `data:` URL, as the checkpoint reads them: base64, with or without the word, white space ignored.

    Percent signs without the word base64 are what RFC 2397 makes of them.
    """
    header, comma, data = url[len("data:") :].partition(",")
    if not comma:
        raise ItemError("bad_data_url", "a data: URL needs a comma between its media type and its data")
    names_base64 = "".join(header.split()).lower().endswith(";base64")
    if "%" in data and not names_base64:
        return unquote_to_bytes(data)
    data = "".join(unquote(data).split())
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        url_safe = " (it uses - and _, where the checkpoint reads + and /)" if re.search("[-_]", data) else ""
        raise ItemError("bad_data_url", f"the data is not base64: {error}{url_safe}") from error


def hashed(file: BinaryIO, stamp: Stamp | None) -> tuple[BinaryIO, str]:
    """The file to decode from, and the hash of its bytes. Read once where it fits in memory."""
    digest = hashlib.sha256()
    if stamp is not None and stamp.size > _READ_WHOLE:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        file.seek(0)
    else:
        content = file.read()
        digest.update(content)
        file = io.BytesIO(content)
    return file, f"sha256:{digest.hexdigest()}"


# --- what went wrong ----------------------------------------------------------------------------------------------


@contextmanager
def foreign_errors() -> Iterator[None]:
    """The seam: whatever Pillow, the file system or a protocol raises leaves as an ItemError.

    One is no fault of the item: a process that may open no more files raises NoMoreFiles.
    """
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise NoMoreFiles(error.strerror) from error
        raise translate(error) from error


#: First match wins. A test raises every one of these through the seam.
_CODES: tuple[tuple[type[Exception], ItemErrorCode], ...] = (
    (FileNotFoundError, "not_found"),
    (NotADirectoryError, "not_found"),
    (PermissionError, "permission_denied"),
    (IsADirectoryError, "not_a_file"),
    (remote.RemoteError, "unreadable"),
    (Image.DecompressionBombError, "too_many_pixels"),
    (MemoryError, "out_of_memory"),
    (UnidentifiedImageError, "unidentified"),
    (EOFError, "truncated"),
)


def translate(error: Exception) -> ItemError:
    """The ItemError for an exception that a decoder, the file system or a protocol raised."""
    text = _sentence(error)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return ItemError(code, text)
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # what opening a socket or an absent device gives
            return ItemError("not_a_file", text)
        return ItemError("unreadable", text)
    if "truncated" in text.lower():
        return ItemError("truncated", text)
    if isinstance(error, struct.error):
        return ItemError("corrupt", f"the data does not have the shape its header announces: {text}")
    return ItemError("corrupt", text if isinstance(error, OSError) else f"{type(error).__name__}: {text}")


def _sentence(error: BaseException) -> str:
    """The exception's text without paths (the index has the image) and memory addresses (bytes must repeat)."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return error.strerror
    text = re.sub(r" at 0x[0-9a-f]+", "", str(error)).strip()
    return (text or type(error).__name__)[:500]
