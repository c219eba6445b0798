"""What lies at a URL: the one seam to object stores, web servers and archives, by fsspec.

A fault that may pass (a time-out, a broken connection, 5xx, "slow down") is met with a few more attempts, after longer
and longer pauses. An object that is missing or forbidden is reported at once. Whatever a protocol raises leaves as an
OSError: FileNotFoundError, PermissionError, or RemoteError. fsspec and its packages read credentials and endpoints from
their usual places; this module knows none.

A URL may be a chain, `zip://dir/a.jpg::https://host/pictures.zip`: an object inside of the object behind `::`.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, TypeVar

from kimik3_prep.errors import Problem

#: The most bytes that one object may bring into memory: an uncompressed picture of `DEFAULT_MAX_PIXELS`.
MOST_BYTES = 512 << 20

#: How often anything is asked for. S3's own library asks up to five times each time it is asked (AWS_MAX_ATTEMPTS).
ATTEMPTS = 4
ATTEMPTS_OF_S3 = 2
_PAUSE = 0.5  # seconds before the second attempt; each later pause is twice as long, less up to a half by chance
#: Requests that one process may have under way; S3's own library would allow ten.
MOST_REQUESTS = 48
_FIRST = 16 << 20  # bytes of an object that come without asking the store for its size
_PIECE = 8 << 20  # bytes of an object that is copied into a file, at a time

_S3 = ("s3", "s3a")
_WEB = ("http", "https")
#: Protocols that read inside of what stands behind `::`.
_WRAPPERS = ("zip", "tar", "libarchive", "dir", "simplecache", "filecache", "blockcache", "cached", "reference")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_READY = re.compile(r"[!-~]+")  # an address that can be sent as it stands
#: Packages by protocol, where fsspec's own words do not name what to install.
_INSTALL = {
    **dict.fromkeys(_S3, "pip install 'kimik3-prep[s3]'"),
    **dict.fromkeys(_WEB, "pip install aiohttp"),
    **dict.fromkeys(("gs", "gcs"), "pip install gcsfs"),
    "hf": "pip install huggingface_hub",
}
#: Exceptions of HTTP libraries, by their names and those of their bases: none of these packages is imported here.
_BODY_ENDED = {"ClientPayloadError", "IncompleteReadError", "IncompleteRead", "ChunkedEncodingError"}
_BROKEN = {*_BODY_ENDED, "ClientConnectionError", "HTTPClientError", "TransportError", "ConnectionError", "Timeout"}

_T = TypeVar("_T")


class RemoteError(OSError):
    """A store gave no answer, or none that can be used, at any attempt."""


class _BodyEnded(ConnectionError):
    """A connection that ended in the middle of an object, in a sentence."""


# --- names --------------------------------------------------------------------------------------------------------


def scheme(source: str) -> str | None:
    """The fsspec protocol of a URL that needs a network or an archive, None for local paths and `data:` URLs."""
    if source[:5].lower() == "data:" or not (match := _SCHEME.match(source)):
        return None
    protocol = match.group()[:-3].lower()
    return None if protocol == "file" else protocol


def links(url: str) -> tuple[str, str]:
    """The first link of a chain, and the rest with its `::`; the rest is empty where the URL is no chain."""
    if scheme(url) not in _WRAPPERS:
        return url, ""
    first, colons, rest = url.partition("::")
    return first, colons + rest


def protocol_problem(protocol: str, where: str) -> Problem | None:
    """Why URLs of this protocol cannot be read here: fsspec does not know it, or its package is not installed."""
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        return Problem(where, f"{protocol}:// is no protocol fsspec knows", "a path, a data: URL, s3://, https://, …")
    except ImportError as error:
        hint = _INSTALL.get(protocol, str(error))
        return Problem(where, f"{protocol}:// needs a package that is not installed", hint=hint)
    return None


def as_url(place: str | os.PathLike[str]) -> str | None:
    """The URL that is meant, also where it went through a `Path`, which keeps one slash; None for local paths."""
    text = os.fspath(place)
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", text)
    if match is None or os.path.exists(text):
        return None
    return f"{match[1]}://{text[match.end() :]}"


def parent(url: str) -> str:
    """The URL of the folder that holds what `url` names; a query behind `?` is no part of it."""
    first, rest = links(url)
    if rest:  # an archive has no host: all behind the scheme is a path
        start, path = first.split("://", 1)
        return f"{start}://{path.rpartition('/')[0]}{rest}"
    head = url.partition("?")[0] if url.lower().startswith("http") else url
    return head.rpartition("/")[0] if head.count("/") > 2 else head


def beneath(folder: str, path: str) -> str:
    """The URL of a relative `path` in the folder at a URL; `..` does not lead out of the bucket, host or archive."""
    folder, rest = links(folder)
    start, _, inside = folder.partition("://")
    host = ""
    if not rest:
        host, _, inside = inside.partition("/")
        host += "/"
    parts: list[str] = []
    for part in (*inside.split("/"), *path.split("/")):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    if start.lower() in _WEB:  # a path is a path: these two would end it
        parts = [part.replace("?", "%3F").replace("#", "%23") for part in parts]
    return f"{start}://{host}{'/'.join(parts)}{rest}"


# --- reading ------------------------------------------------------------------------------------------------------


def read(url: str, most: int = MOST_BYTES) -> bytes:
    """All bytes of an object. One of more than `most` bytes is a RemoteError, before it fills the memory."""
    if scheme(url) in _WEB:
        return _fetch(url, 0, None, most).data
    first = min(_FIRST, most)
    data = _fetch(url, 0, first + 1, most).data
    if len(data) <= first:
        return data
    size = info(url).get("size")
    if size is None or size > most:
        raise _too_large(size, most)
    data += _fetch(url, len(data), size - len(data), most).data
    if len(data) != size:
        raise RemoteError(f"the object ends after {len(data):,} of {size:,} bytes")
    return data


def read_range(url: str, begin: int, count: int) -> bytes:
    """`count` bytes of an object from `begin` on, in one request. Fewer are a RemoteError."""
    data = _fetch(url, begin, count).data
    if len(data) != count:
        raise RemoteError(f"the object ends before the {begin + count:,} bytes it should have")
    return data


def read_start(url: str, count: int) -> bytes:
    """The first bytes of an object, `count` of them or as many as there are."""
    return _fetch(url, 0, count).data


def download(url: str, file: BinaryIO) -> None:
    """Copy an object of any size into a file. Raises OSError."""
    shutil.copyfileobj(io.BufferedReader(opened(url), _PIECE), file, _PIECE)


def exists(url: str) -> bool:
    """Whether there is an object of that name. Raises OSError where the store gives no answer."""
    try:
        _fetch(url, 0, 1)
    except FileNotFoundError:
        return False
    return True


def glob(pattern: str) -> list[str]:
    """The URLs of all objects that a pattern matches."""

    def question(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        return [fs.unstrip_protocol(name) for name in fs.glob(path)]

    return asked(pattern, question)


def is_folder(url: str) -> bool:
    """Whether a URL stands for all objects below it: `s3://bucket/set/`, or the same without the slash."""
    if scheme(url) in ("http", "https"):
        return False
    return bool(asked(url, lambda fs, path: fs.isdir(path)))


def files(folder: str) -> list[str]:
    """The URLs of all objects below a folder at a URL."""

    def question(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        return [fs.unstrip_protocol(found) for found in fs.find(path)]

    return asked(folder, question)


def listing(folder: str) -> dict[str, dict[str, Any]]:
    """What the store says of each object below a folder, by its name from there on; nothing where there is none."""

    def question(fs: Any, root: str) -> dict[str, Any]:
        fs.invalidate_cache()
        below = root.rstrip("/") + "/"
        objects = fs.find(root, detail=True)
        return {name.removeprefix(below): said for name, said in objects.items() if name.startswith(below)}

    try:
        objects = asked(folder, question)
    except FileNotFoundError:  # stores that know folders have none of that name
        return {}
    return {name: said for name, said in objects.items() if name and not name.endswith("/")}


def info(url: str) -> dict[str, Any]:
    """What the store says of an object: its `size`, and more under names that each store chooses."""

    def question(fs: Any, path: str) -> dict[str, Any]:
        fs.invalidate_cache(path)  # what a listing said some time ago
        facts: dict[str, Any] = fs.info(path)
        return facts

    return asked(url, question)


class OffsetFile(io.RawIOBase):
    """A file made of two functions: `read(place, count)` gives its bytes, `size()` how many there are.

    Wrap it in a `BufferedReader`, whose buffer is the least that is read at a time.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: Callable[[], int]) -> None:
        self._bytes, self.size, self._place = read, size, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; nothing is read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place}.get(whence)
        self._place = max(0, offset + (self.size() if start is None else start))
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there are bytes."""
        data = self._bytes(self._place, len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def readall(self) -> bytes:
        """The bytes from here to the end."""
        parts = []
        while (count := self.size() - self._place) > 0 and (data := self._bytes(self._place, count)):
            parts.append(data)
            self._place += len(data)
        return b"".join(parts)


def opened(url: str, begin: int = 0, size: int | None = None, most_pieces: int | None = None) -> OffsetFile:
    """Part of an object as a file that is read in pieces: one request for each read.

    begin, size: the part; without them all of it. most_pieces: after so many pieces, the rest comes in one.
    """
    pieces = _Pieces(url, begin, size, most_pieces)
    return OffsetFile(pieces.read, pieces.size)


class _Pieces:
    """Part of an object, and how far it is known."""

    def __init__(self, url: str, begin: int, size: int | None, most_pieces: int | None) -> None:
        self._url, self._begin, self._size, self._most_pieces = url, begin, size, most_pieces
        self._is_part = size is not None
        self._pieces = 0
        self._whole: bytes | None = None

    def size(self) -> int:
        """Bytes of the part. The store is asked for them only where no piece has shown the end yet."""
        if self._size is None:
            try:
                self._size = info(self._url).get("size")
            except OSError:  # a web server may refuse to say: then the object itself shows its size
                self._size = None
            if self._size is None:
                return len(self._take_whole())
        return self._size

    def read(self, place: int, count: int) -> bytes:
        """The bytes at a place of the part, `count` of them or as many as there are."""
        if self._whole is None and self._pieces == self._most_pieces:
            self._take_whole()
        if self._whole is not None:
            return self._whole[place : place + count]
        if self._size is not None:
            count = min(count, self._size - place)
        if count <= 0:
            return b""
        reply = _fetch(self._url, self._begin + place, count)
        self._pieces += 1
        if reply.whole is not None:
            end = None if self._size is None else self._begin + self._size
            self._keep(reply.whole[self._begin : end])
        elif len(reply.data) < count and (self._is_part or self._size is not None):
            raise self._ends_early()
        elif len(reply.data) < count and (reply.data or not place):
            self._size = place + len(reply.data)
        return reply.data

    def _take_whole(self) -> bytes:
        if self._whole is None:
            part = self._is_part and self._size is not None
            self._keep(_fetch(self._url, self._begin, self._size or 0).data if part else read(self._url))
        return self._whole or b""

    def _keep(self, data: bytes) -> None:
        if self._is_part and len(data) != self._size:
            raise self._ends_early()
        self._whole, self._size = data, len(data)

    def _ends_early(self) -> RemoteError:
        return RemoteError(f"the object ends before the {self._begin + (self._size or 0):,} bytes it should have")


class _Reply(NamedTuple):
    """What a store sent for a range: its bytes, and the whole object where a server that knows no ranges sent it."""

    data: bytes
    whole: bytes | None = None


def _fetch(url: str, begin: int, count: int | None, most: int = MOST_BYTES) -> _Reply:
    """`count` bytes of an object from `begin` on, fewer where it ends. count: None for all, from a web server only."""
    if count is not None and count > most:
        raise _too_large(count, most)
    if count == 0:
        return _Reply(b"")
    end = None if count is None else begin + count

    def question(fs: Any, path: str) -> _Reply:
        if scheme(url) in _WEB:
            from fsspec.asyn import sync

            reply: _Reply = sync(fs.loop, _fetch_from_web, fs, path, begin, end, most)
            return reply
        return _Reply(bytes(fs.cat_file(path, start=begin, end=end)))

    return asked(url, question, empty=_Reply(b""))


async def _fetch_from_web(fs: Any, url: str, begin: int, end: int | None, most: int) -> _Reply:
    """Ask a web server, and read its answer in pieces, so that no more than `most` bytes are ever taken."""
    from aiohttp import ClientError

    session = await fs.set_session()
    headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    if end is not None:
        headers["Range"] = f"bytes={begin}-{end - 1}"
    async with session.get(fs.encode_url(url), **{**fs.kwargs, "headers": headers}) as response:
        fs._raise_not_found_for_status(response, url)
        announced = response.content_length
        if announced is not None and announced > most:
            raise _too_large(announced, most)
        data = bytearray()
        try:
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > most:
                    raise _too_large(None, most)
        except (ClientError, ConnectionError) as error:
            of_all = "" if announced is None else f" of {announced:,}"
            raise _BodyEnded(f"the connection ended after {len(data):,}{of_all} bytes") from error
        if response.status == 206 or end is None:
            return _Reply(bytes(data))
        whole = bytes(data)
        return _Reply(whole[begin:end], whole)


def _too_large(size: int | None, most: int) -> RemoteError:
    sent = f"more than {most:,} bytes" if size is None else f"{size:,} bytes"
    return RemoteError(
        f"the object has {sent}, and at most {most:,} are read into memory: download it, and name the file"
    )


# --- asking -------------------------------------------------------------------------------------------------------

_shared: dict[Any, Any] = {}
_lock = threading.Lock()
_own = threading.local()
_MOST_ARCHIVES = 8  # that a thread keeps open


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL and its path there.

    All threads share one where fsspec answers many at once, and so its connections. Elsewhere each thread has its own.
    """
    import fsspec

    first, rest = links(url)
    if rest:
        return _archive(first, rest)
    protocol = scheme(url) or "file"
    kind = fsspec.get_filesystem_class(protocol)
    options = {**kind._get_kwargs_from_urls(url), **_as_sent(url)}
    if protocol in _S3 and "config_kwargs" not in fsspec.config.conf.get(protocol, {}):
        options["config_kwargs"] = {"max_pool_connections": MOST_REQUESTS}
    path = kind._strip_protocol(url)
    if not kind.async_impl:
        return fsspec.filesystem(protocol, **options), path
    key = (os.getpid(), protocol, repr(sorted(options.items())))
    with _lock:
        if key not in _shared:
            _shared[key] = fsspec.filesystem(protocol, **options)
        return _shared[key], path


def _as_sent(url: str) -> dict[str, Any]:
    """Options with which a web server gets an address byte for byte, redirected or not: its signature depends on that.

    fsspec's library quotes an address that cannot be sent as it stands.
    """
    if scheme(url) not in _WEB or not _READY.fullmatch(url):
        return {}
    return {"encoded": True, "client_kwargs": {"requote_redirect_url": False}}


def _archive(first: str, rest: str) -> tuple[Any, str]:
    """The file system inside of an archive, and the path there. A thread keeps those that it read last."""
    import fsspec

    outer = rest.rpartition("::")[2]
    options = {str(scheme(outer)): _as_sent(outer)} if _as_sent(outer) else {}
    status = os.stat(outer[len("file://") :]) if outer.startswith("file://") else None
    version = None if status is None else (status.st_size, status.st_mtime_ns)
    key = (os.getpid(), scheme(first), rest, version)
    kept: OrderedDict[Any, Any] = _own.__dict__.setdefault("archives", OrderedDict())
    if key not in kept:
        kept[key] = fsspec.core.url_to_fs(f"{first}{rest}", **options)[0]
    kept.move_to_end(key)
    while len(kept) > _MOST_ARCHIVES:
        kept.popitem(last=False)
    return kept[key], kept[key]._strip_protocol(first)


def asked(url: str, question: Callable[[Any, str], _T], empty: _T | None = None) -> _T:
    """The answer of a URL's file system to a `question`, which gets the file system and the path there.

    empty: the answer for a range that begins where the object ends. Raises OSError.
    """
    attempt, most = 1, ATTEMPTS_OF_S3 if scheme(url) in _S3 else ATTEMPTS
    while True:
        try:
            return question(*_file_system(url))
        except RemoteError:
            raise
        except Exception as error:
            if empty is not None and _status(error) == 416:
                return empty
            if attempt == most or not _may_pass(error):
                raise _translated(error, attempt) from error
        time.sleep(_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1))
        attempt += 1


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 10:
        yield error
        error, seen = error.__cause__, seen + 1


def _status(error: BaseException) -> int | None:
    """The HTTP status of an exception, or of its cause, wherever its library keeps that."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            answered = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        else:
            answered = getattr(response, "status_code", None)
        name = "status" if hasattr(cause, "status") else "code"
        for status in (answered, getattr(cause, name, None)):
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt may do better."""
    status = _status(error)
    if status is not None and (status in (408, 425, 429) or (status >= 500 and status not in (501, 505))):
        return True
    return any(
        isinstance(cause, (TimeoutError, ConnectionError)) or _BROKEN & _names(cause) for cause in _causes(error)
    )


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _translated(error: Exception, attempts: int) -> OSError:
    """The exception in words that are the same on every machine and name no path, because they go into an index."""
    status = _status(error)
    if _may_pass(error):
        return RemoteError(f"{_sentence(error)} (asked {attempts} times)")
    if status in (404, 410) or (status is None and isinstance(error, (FileNotFoundError, NotADirectoryError))):
        return FileNotFoundError(errno.ENOENT, "there is no such object")
    if status in (401, 403) or isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, "the store does not allow it")
    if isinstance(error, IsADirectoryError):
        return IsADirectoryError(errno.EISDIR, "it is a folder")
    return RemoteError(_sentence(error))


def _sentence(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, _BodyEnded):
        return text
    if any(_BODY_ENDED & _names(cause) for cause in _causes(error)):
        return "the connection ended before all bytes had come"
    status = _status(error)
    if status is not None:
        return f"the store answers {status}"
    text = re.sub(r"( at 0x[0-9a-f]+|[A-Za-z][A-Za-z0-9+.-]*://\S+)", "", " ".join(text.split()))
    return f"{type(error).__name__}: {text[:300]}".rstrip(": ")
