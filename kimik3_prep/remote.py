"""What lies at a URL: the one seam to object stores and web servers, by fsspec.

Faults that pass (a time-out, a broken connection, 5xx, "slow down") are met with a few more attempts, after longer and
longer pauses; what is not there or not allowed is said at once. Whatever a protocol raises leaves as an OSError:
FileNotFoundError, PermissionError, or RemoteError. Credentials and endpoints are read by fsspec and its packages, from
where they always look; nothing here knows of them.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kimik3_prep.errors import InputError, Problem
from kimik3_prep.offsets import OffsetFile

#: How often anything is asked for. S3's own library asks up to five times each time it is asked (AWS_MAX_ATTEMPTS).
ATTEMPTS = 4
ATTEMPTS_OF_S3 = 2
_PAUSE = 0.5  # seconds before the second attempt; each later pause is twice as long, less up to a half by chance

_S3 = ("s3", "s3a")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CHAIN = re.compile(r"::[A-Za-z][A-Za-z0-9+.-]*(://|$)")
#: Packages by protocol, where fsspec's own words do not name what to install.
_INSTALL = {
    **dict.fromkeys(_S3, "pip install 'kimik3-prep[s3]'"),
    **dict.fromkeys(("http", "https"), "pip install aiohttp"),
    **dict.fromkeys(("gs", "gcs"), "pip install gcsfs"),
    "hf": "pip install huggingface_hub",
}
#: Exceptions of HTTP libraries, by their names and those of their bases: none of these packages is imported here.
_BROKEN = {
    *("ClientConnectionError", "ClientPayloadError", "HTTPClientError", "IncompleteReadError", "TransportError"),
    *("ConnectionError", "Timeout", "ChunkedEncodingError", "IncompleteRead"),
}

_T = TypeVar("_T")


class RemoteError(OSError):
    """A store that gave no answer, or one that helps nobody, to all attempts."""


def scheme(source: str) -> str | None:
    """The fsspec protocol of a URL that needs a network or an archive, None for local paths and `data:` URLs."""
    if source.startswith("data:") or not (match := _SCHEME.match(source)):
        return None
    protocol = match.group()[:-3].lower()
    return None if protocol == "file" else protocol


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


def refuse(path: str | os.PathLike[str]) -> None:
    """Raises InputError for what lies at a URL, where only a folder on this machine will do."""
    text = os.fspath(path)
    if (match := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+", text)) and not os.path.exists(text):
        url = f"{match[1]}://{text[match.end() :]}"
        hint = f"`aws s3 cp --recursive {url} FOLDER`" if match[1] in _S3 else "with the store's own tools"
        raise InputError([Problem(url, "lies in a store", "a folder on this machine", f"download it first: {hint}")])


def parent(url: str) -> str:
    """The URL of the folder that holds what `url` names; what follows a `?` is no part of it."""
    head = url.partition("?")[0] if url.lower().startswith("http") else url
    return head.rpartition("/")[0] if head.count("/") > 2 else head


def beneath(folder: str, path: str) -> str:
    """The URL of a relative `path` in the folder at a URL; `..` does not lead out of the bucket or host."""
    start = _SCHEME.match(folder)
    begin = start.end() if start else 0
    host, _, inside = folder[begin:].partition("/")
    parts: list[str] = []
    for part in (*inside.split("/"), *path.split("/")):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    if folder[:begin].lower().startswith("http"):  # a path is a path: these two would end it
        parts = [part.replace("?", "%3F").replace("#", "%23") for part in parts]
    return f"{folder[:begin]}{host}/{'/'.join(parts)}"


# --- reading ------------------------------------------------------------------------------------------------------


def read(url: str) -> bytes:
    """All bytes of an object, in one request."""

    def question(fs: Any, path: str) -> Any:
        # Asked for a whole object, s3fs asks for its size first, in a request of its own.
        return fs.cat_file(path, start=0) if scheme(url) in _S3 else fs.cat_file(path)

    return bytes(asked(url, question, empty=b""))


def exists(url: str) -> bool:
    """Whether there is an object of that name."""
    return bool(asked(url, lambda fs, path: fs.exists(path)))


def glob(pattern: str) -> list[str]:
    """The URLs of all objects that a pattern matches."""

    def question(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        return [fs.unstrip_protocol(found) for found in fs.glob(path)]

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


def info(url: str) -> dict[str, Any]:
    """What the store says of an object: its `size`, and more under names that each store chooses."""

    def question(fs: Any, path: str) -> dict[str, Any]:
        fs.invalidate_cache(path)  # what a listing said some time ago
        found: dict[str, Any] = fs.info(path)
        return found

    return asked(url, question)


class RemoteFile(OffsetFile):
    """Part of an object as a file that is read in pieces: one request each time somebody reads.

    begin, size: the part; without them all of it. most: after so many pieces the rest comes in one. Wrap it in a
    `BufferedReader`, whose buffer is what a piece holds at least.
    """

    def __init__(self, url: str, begin: int = 0, size: int | None = None, most: int | None = None) -> None:
        self._url, self._begin, self._size, self._most = url, begin, size, most
        super().__init__()
        self._part = size is not None
        self._pieces = 0
        self._whole: bytes | None = None

    def readall(self) -> bytes:
        """What is left, in one request."""
        if self._place == 0:
            self._take_whole()
        data = self._read(self._place, max(0, self.size() - self._place))
        self._place += len(data)
        return data

    def size(self) -> int:
        """Bytes of the part, asked for only where no piece has told yet."""
        if self._size is None:
            try:
                self._size = info(self._url).get("size")
            except OSError:  # a web server may refuse to tell: then what it gives tells
                self._size = None
            if self._size is None:
                return len(self._take_whole())
        return self._size

    def _take_whole(self) -> bytes:
        if self._whole is None:
            self._keep(_read_range(self._url, self._begin, self._size or 0) if self._part else read(self._url))
        return self._whole or b""

    def _keep(self, data: bytes) -> None:
        """All of the part is known. `data` is it, or the whole object from a server that knows no ranges."""
        size = self._size if self._part else None
        if size is not None and len(data) > size:
            data = data[self._begin : self._begin + size]
        if size is not None and len(data) < size:
            raise RemoteError(f"the object ends before the {self._begin + size:,} bytes it should have")
        self._whole, self._size = data, len(data)

    def _read(self, place: int, count: int) -> bytes:
        if self._whole is None and self._pieces == self._most:
            self._take_whole()
        if self._whole is not None:
            return self._whole[place : place + count]
        if self._size is not None:
            count = min(count, self._size - place)
        if count <= 0:
            return b""
        data = _read_range(self._url, self._begin + place, count)
        self._pieces += 1
        if len(data) > count:  # a server that knows no ranges: this is all of it
            self._keep(data)
            return self._take_whole()[place : place + count]
        if len(data) < count:
            if self._size is not None:
                raise RemoteError(f"the object ends before the {self._begin + self._size:,} bytes it should have")
            if data or not place:
                self._size = place + len(data)
        return data


def _read_range(url: str, begin: int, count: int) -> bytes:
    if not count:
        return b""
    return bytes(asked(url, lambda fs, path: fs.cat_file(path, start=begin, end=begin + count), empty=b""))


# --- asking -------------------------------------------------------------------------------------------------------

_shared: dict[Any, Any] = {}
_lock = threading.Lock()


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL and its path there.

    One for all threads where fsspec answers many at once, so that they share its connections; where it does not, each
    thread has its own.
    """
    import fsspec

    if _CHAIN.search(url):
        fs, path = fsspec.core.url_to_fs(url)
        return fs, path
    protocol = scheme(url) or "file"
    kind = fsspec.get_filesystem_class(protocol)
    options = kind._get_kwargs_from_urls(url)
    path = kind._strip_protocol(url)
    if not kind.async_impl:
        return fsspec.filesystem(protocol, **options), path
    key = (os.getpid(), protocol, repr(sorted(options.items())))
    with _lock:
        if key not in _shared:
            _shared[key] = fsspec.filesystem(protocol, **options)
        return _shared[key], path


def asked(url: str, question: Callable[[Any, str], _T], empty: _T | None = None) -> _T:
    """The answer of a URL's file system to a `question` about it and the path there.

    empty: what to answer for a range that begins where the object ends. Raises OSError.
    """
    attempt, most = 1, ATTEMPTS_OF_S3 if scheme(url) in _S3 else ATTEMPTS
    while True:
        try:
            return question(*_file_system(url))
        except Exception as error:
            if empty is not None and _status(error) == 416:
                return empty
            if attempt == most or not _passes(error):
                raise _told(error, attempt) from error
        time.sleep(_PAUSE * 2 ** (attempt - 1) * random.uniform(0.5, 1))
        attempt += 1


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 10:
        yield error
        error, seen = error.__cause__, seen + 1


def _status(error: BaseException) -> int | None:
    """The HTTP status of an exception, or of what caused it, wherever its library keeps that."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            found = (response.get("ResponseMetadata") or {}).get("HTTPStatusCode")
        else:
            found = getattr(response, "status_code", None)
        name = "status" if hasattr(cause, "status") else "code"
        for status in (found, getattr(cause, name, None)):
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def _passes(error: BaseException) -> bool:
    """Whether another attempt may do better."""
    status = _status(error)
    if status is not None and (status in (408, 425, 429) or (status >= 500 and status not in (501, 505))):
        return True
    return any(
        isinstance(cause, (TimeoutError, ConnectionError)) or _BROKEN & {kind.__name__ for kind in type(cause).__mro__}
        for cause in _causes(error)
    )


def _told(error: Exception, attempts: int) -> OSError:
    """The exception in words that are the same on every machine and name no path: they go into an index."""
    status = _status(error)
    if _passes(error):
        return RemoteError(f"{_sentence(error)} (asked {attempts} times)")
    if status in (404, 410) or (status is None and isinstance(error, (FileNotFoundError, NotADirectoryError))):
        return FileNotFoundError(errno.ENOENT, "there is no such object")
    if status in (401, 403) or isinstance(error, PermissionError):
        return PermissionError(errno.EACCES, "the store does not allow it")
    if isinstance(error, IsADirectoryError):
        return IsADirectoryError(errno.EISDIR, "it is a folder")
    return RemoteError(_sentence(error))


def _sentence(error: BaseException) -> str:
    status = _status(error)
    if status is not None:
        return f"the store answers {status}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = re.sub(r"( at 0x[0-9a-f]+|[A-Za-z][A-Za-z0-9+.-]*://\S+)", "", " ".join(text.split()))
    return f"{type(error).__name__}: {text[:300]}".rstrip(": ")
