"""Outputs at a URL, read from here: files are brought to a folder on this machine as they are asked for.

`inspect` and `verify` bring whole files, one shard at a time. Training brings items: a shard in the cache is a sparse
file of the shard's size, which has its header and grids from the start and the patches of an item once somebody has
asked for them. The item's checksum in the index tells whether they are there, so nothing keeps a record: processes that
share a cache may be killed, bring an item twice, or find it half written by another one.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy.typing as npt
import xxhash

from kimik3_prep import remote
from kimik3_prep.disk import disk_errors
from kimik3_prep.errors import ChecksumDiffers, InputError, Problem, StoreError
from kimik3_prep.output.folder import Output, RunRecord, is_ours
from kimik3_prep.output.recipe import canonical_json
from kimik3_prep.reading.stored import Ints, OpenShard, StoredRun, StoredRuns

#: Bytes that the shards in a cache take at most, as far as nobody has them open.
CACHE_SIZE = 50 << 30

_REQUESTS = remote.MOST_REQUESTS  # under way at a time, of one process
_TOGETHER = 16  # items that iterating asks for at a time
_GAP = 64 << 10  # bytes between two items that are brought along with them, instead of asking twice
_MOST = 32 << 20  # bytes of one request
_HEAD = 64 << 10  # bytes of a shard that come first: the header, and the grids of 2,000 images
_LARGEST = 1 << 50  # bytes of a shard; what says that it has more is damaged
_TRIM_EVERY = 256 << 20  # bytes that are brought between two looks at what the cache takes
_WRITTEN_WITHIN = 3600.0  # seconds after which an unfinished file in a cache is one that a killed process left
_SAYS_VERSION = ("size", "ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime", "created")


@dataclass(frozen=True, slots=True)
class FetchedOutput(Output):
    """An output at a URL, to read. `root` is a folder on this machine, and asking for a file's path brings the file.

    Of the shards only the one that was asked for last stays.
    """

    url: str
    sizes: Mapping[str, int] | None
    """Bytes of each file, by its name from the root on; None where nobody has asked the store for a list."""

    @property
    def name(self) -> str:
        """Where the output is, for people."""
        return self.url

    @property
    def run(self) -> Path:
        """The run record."""
        return self._brought("run.json")

    @property
    def plan(self) -> Path:
        """The plan."""
        return self._brought("plan.parquet")

    @property
    def index(self) -> Path:
        """The final index."""
        return self._brought("index.parquet")

    def place_of(self, path: Path) -> str:
        """Return where a file of the output is, for people."""
        return f"{self.url}/{path.relative_to(self.root).as_posix()}"

    def index_stamp(self) -> None:
        """Return None: what was brought stays as it is."""
        return

    def files(self) -> list[str]:
        """Return the names of all files of ours, from the root on."""
        return sorted(filter(is_ours, self.sizes or ()))

    def committed(self, name: str) -> bool:
        """Return whether a shard and its index are there."""
        return name in self.committed_shards()

    def shard_sizes(self) -> dict[str, int]:
        """Return the bytes of each committed shard, by its name."""
        sizes = self.sizes or {}
        return {name: sizes[f"shards/{name}.safetensors"] for name in self.committed_shards()}

    def image_base(self, record: RunRecord) -> str | None:
        """Return the folder that image paths start from, or its URL; None where the run record does not say."""
        if record.base is None or remote.scheme(record.base) or os.path.isabs(record.base):
            return record.base
        return remote.beneath(self.url, record.base)

    def _in_shards(self, name: str) -> Path:
        path = super(FetchedOutput, self)._in_shards(name)
        if path.suffix == ".safetensors" and not path.exists():
            for other in self.shards.glob("*.safetensors"):
                other.unlink()
        return self._brought(f"shards/{name}")

    def _brought(self, name: str) -> Path:
        path = self.root / name
        if not path.exists() and (self.sizes is None or name in self.sizes):
            with suppress(_NoSuchFile):
                bring(f"{self.url}/{name}", path)
        return path


class CachedOutput(FetchedOutput):
    """An output at a URL whose files stay in a cache. Of a shard only header and grids are brought."""

    def has(self, name: str) -> bool:
        """Whether a shard has a file in the cache."""
        return (self.shards / f"{name}.safetensors").exists()

    def _in_shards(self, name: str) -> Path:
        path = super(FetchedOutput, self)._in_shards(name)
        if not path.exists():
            _write(path, lambda file: _begin_shard(f"{self.url}/shards/{name}", file))
        return path


@contextmanager
def fetched_output(url: str) -> Iterator[FetchedOutput]:
    """The output at a URL, in a temporary folder. Raises InputError where there is none."""
    _refuse_protocol(url)
    if remote.scheme(url) in ("http", "https"):
        hint = "open a FeatureStore, or copy the output to a folder first"
        raise InputError([Problem(url, "a web server does not say which files there are", "an object store", hint)])
    with _as_input(url):
        there = remote.listing(url)
    with tempfile.TemporaryDirectory(prefix="kimik3-prep-") as folder:
        yield FetchedOutput(Path(folder), url.rstrip("/"), {name: int(said["size"]) for name, said in there.items()})


@contextmanager
def fetched_file(url: str) -> Iterator[Path]:
    """A shard or an index at a URL, in a temporary folder; a shard with its index, where there is one."""
    _refuse_protocol(url)
    with tempfile.TemporaryDirectory(prefix="kimik3-prep-") as folder:
        path = Path(folder, url.rpartition("/")[2])
        bring(url, path)
        if path.suffix == ".safetensors":
            with suppress(_NoSuchFile):
                bring(f"{url.removesuffix(path.suffix)}.parquet", path.with_suffix(".parquet"))
        yield path


class _NoSuchFile(InputError):
    """A store has no object of that name."""


def bring(url: str, path: Path) -> None:
    """Copy an object into a file, which gets its name when it is whole. Raises InputError."""

    def write(file: BinaryIO) -> None:
        with _as_input(url):
            remote.download(url, file)

    _write(path, write)


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file whole. Processes that write the same one do not disturb each other."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _begin_shard(url: str, file: BinaryIO) -> None:
    """Write a shard's header and grids, and give the file the shard's size. Raises StoreError."""
    with store_errors(url):
        head = remote.read_start(url, _HEAD)
        try:
            length = 8 + int.from_bytes(head[:8], "little")
            tensors = json.loads(head[8:length])
            data = length + tensors["pixel_values"]["data_offsets"][0]
            size = length + tensors["pixel_values"]["data_offsets"][1]
            if not length <= data <= size <= _LARGEST:
                raise ValueError("its offsets do not fit")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise StoreError(f"{url} is no shard of kimik3-prep: {error}") from error
        file.write(head[:data])
        if data > len(head):
            file.write(remote.read_range(url, len(head), data - len(head)))
    file.truncate(size)


@contextmanager
def store_errors(url: str) -> Iterator[None]:
    """Turn what a store raises into StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot read {url}: {error.strerror or error}") from error


def _refuse_protocol(url: str) -> None:
    if problem := remote.protocol_problem(str(remote.scheme(url)), url):
        raise InputError([problem])


@contextmanager
def _as_input(url: str) -> Iterator[None]:
    """Turn what a store raises into InputError."""
    try:
        yield
    except FileNotFoundError as error:
        raise _NoSuchFile([Problem(url, "does not exist")]) from error
    except OSError as error:
        raise InputError([Problem(url, error.strerror or str(error))]) from error


# --- items --------------------------------------------------------------------------------------------------------


class FetchedRun(StoredRun):
    """A finished run at a URL, whose items are brought to a cache as they are asked for.

    Every item is compared with its checksum, when it is brought and when it is found in the cache.
    """

    layout: CachedOutput

    def __init__(self, url: str, cache: Path, cache_size: int, images: Path | None = None) -> None:
        _refuse_protocol(url)
        url = url.rstrip("/")
        super().__init__(CachedOutput(cache / _version(url), url, None), images)
        self._cache, self._cache_size = cache, cache_size
        self._since_trim = 0

    def spans(self, rows: Sequence[int]) -> list[npt.NDArray[Any]]:
        """The patches of some rows; what is not in the cache is asked for at the same time. Raises StoreError."""
        if self.index_only:
            return super().spans(rows)
        with ThreadPoolExecutor(_REQUESTS, "fetch") as threads:
            names = sorted({self._names[self._shard[row]] for row in rows})
            list(threads.map(self.layout.shard, [name for name in names if not self.layout.has(name)]))
            spans = {row: self._mapped(row) for row in rows}
            missing = self._not_whole(spans)
            for _ in range(2):
                if not missing:
                    break
                self._since_trim += sum(threads.map(self._bring, self._requests(missing)))
                missing = self._not_whole({row: spans[row] for row in missing})
                if missing:  # another process has cleared a shard away, which this one has open under no name
                    self._open.cache_clear()
                    spans |= {row: self._mapped(row) for row in missing}
                    missing = self._not_whole({row: spans[row] for row in missing})
        if missing:
            raise ChecksumDiffers(self.label(missing[0]), self.layout.name)
        if self._since_trim > min(_TRIM_EVERY, self._cache_size // 8):
            self._since_trim = 0
            trim(self._cache, self._cache_size)
        return [spans[row] for row in rows]

    def portions(self, rows: Ints) -> Iterator[list[int]]:
        """Rows that are worth asking for together, in order."""
        portion: list[int] = []
        size = 0
        for row in rows.tolist():
            size += self._bytes_of(row)
            if portion and (size > _MOST or len(portion) == _TOGETHER):
                yield portion
                portion, size = [], self._bytes_of(row)
            portion.append(row)
        if portion:
            yield portion

    def _bytes_of(self, row: int) -> int:
        return int(self._count[row]) * self.patch_bytes

    def _not_whole(self, spans: Mapping[int, npt.NDArray[Any]]) -> list[int]:
        """The rows whose patches are not all in the cache."""
        checksums = self.table["checksum"]
        return [row for row, span in spans.items() if xxhash.xxh3_128_hexdigest(span.data) != checksums[row].as_py()]

    def _requests(self, rows: Iterable[int]) -> Iterator[tuple[str, int, int]]:
        """Shard, first byte and end of what holds these rows; what lies near to each other comes at once."""
        spans = sorted({(int(self._shard[row]), int(self._start[row]), int(self._count[row])) for row in rows})
        for shard, group in groupby(spans, key=lambda span: span[0]):
            name = self._names[shard]
            first = self._open(name).begin
            begin = end = -1
            for _, start, count in group:
                place = first + start * self.patch_bytes
                if end >= 0 and (place - end > _GAP or place + count * self.patch_bytes - begin > _MOST):
                    yield name, begin, end
                    begin = -1
                begin = place if begin < 0 else begin
                end = max(end, place + count * self.patch_bytes)
            yield name, begin, end

    def _bring(self, request: tuple[str, int, int]) -> int:
        """Bring bytes of a shard into the cache; return how many. Raises StoreError."""
        name, begin, end = request
        path = self.layout.shard(name)
        url = self.layout.place_of(path)
        with store_errors(url):
            data = remote.read_range(url, begin, end - begin)
        try:
            with suppress(FileNotFoundError), open(path, "r+b") as file:  # cleared away just now: the next try makes it
                file.seek(begin)
                file.write(data)
        except OSError as error:
            raise StoreError(f"cannot keep {url} in {path}: {error.strerror}") from error
        return len(data)

    def _open_shard(self, name: str) -> OpenShard:
        shard = super()._open_shard(name)
        with suppress(FileNotFoundError):
            os.utime(self.layout.shard(name))  # what was opened last is cleared away last
        return shard


def _version(url: str) -> str:
    """The folder in a cache for what lies at a URL now: a run that was changed there gets another one."""
    try:
        said = remote.info(f"{url}/index.parquet")
    except FileNotFoundError:
        said = {}
    except OSError as error:
        raise InputError([Problem(url, error.strerror or str(error))]) from error
    version = {name: str(said[name]) for name in _SAYS_VERSION if said.get(name) is not None}
    if len(version) < 2:  # nothing but a size: nobody can tell whether what was brought before is still the same
        version["opened"] = f"{time.time_ns()} {os.getpid()}"
    return f"store-{hashlib.sha256(canonical_json([url, version]).encode()).hexdigest()[:16]}"


def trim(cache: Path, most: int) -> None:
    """Remove what was used least lately from a cache until its files take at most so many bytes of the disk.

    What a process has open stays readable to it, and takes room until it closes it.
    """
    found = []
    for path in cache.glob("store-" + "[0-9a-f]" * 16 + "/**/*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            being_written = path.name.startswith(".") and time.time() - status.st_mtime < _WRITTEN_WITHIN
            if stat.S_ISREG(status.st_mode) and not being_written:
                found.append((status.st_mtime, status.st_blocks * 512, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        path.unlink(missing_ok=True)
        total -= size


@lru_cache
def _temporary_cache(process: int) -> Path:
    """A folder that this process removes when it ends; processes that it forks share it, and leave it."""
    folder = tempfile.mkdtemp(prefix="kimik3-prep-")

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)


def temporary_cache() -> Path:
    """A cache that goes when this process ends."""
    return _temporary_cache(os.getpid())


def open_runs(
    places: Sequence[Path | str],
    images: Path | None = None,
    check: bool = False,
    cache: Path | None = None,
    cache_size: int = CACHE_SIZE,
) -> StoredRun:
    """Open one finished run, in a folder or at a URL, or several as one. Raises InputError."""

    def open_run(place: Path | str) -> StoredRun:
        if (url := remote.as_url(place)) is not None:
            return FetchedRun(url, cache or temporary_cache(), cache_size, images)
        return StoredRun(Output(Path(place)), images, check)

    runs = [open_run(place) for place in places]
    return runs[0] if len(runs) == 1 else StoredRuns(runs)
