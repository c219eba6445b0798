"""An output at a URL: made in a staging folder, and sent from there in the order that commits it.

    run.json, plan.parquet, run.json    before anything is filled, the second time with the plan's seal
    shards/cpu-00000.safetensors        compared with what was sent, by size and checksum, before
    shards/cpu-00000.parquet            its index follows, whose presence in the store commits the shard
    index.parquet                       last

The store decides what is true. A staging folder holds what is on its way there, and the indexes of what has arrived;
everything else in it is dropped when a run begins. So a run goes on from its own staging folder or from none.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from kimik3_prep import remote
from kimik3_prep.disk import LOCK_NAME, disk_errors, write_whole
from kimik3_prep.errors import InputError, Problem, StoreRefuses, UploadDamaged
from kimik3_prep.output.folder import (
    OURS,
    OURS_IN_ROOT,
    STAGED_NAME,
    Output,
    RunRecord,
    committed_among,
    is_ours,
)
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.remote import RemoteError, asked, info, protocol_problem, scheme

_ATTEMPTS = 3  # uploads of a file that arrives changed
_PART = 50 << 20  # bytes of a part of what s3fs uploads in several
_PARTS_AT_ONCE = 4  # each of them is in memory
_PIECE = 8 << 20

#: What a store says of each object of an output, by relative name.
_Listing = Mapping[str, Mapping[str, Any]]


def open_output(place: Path | str, staging: Path | None = None) -> Output:
    """Return the output in a folder or at a URL. Nothing is made yet.

    staging: the folder where an output for a URL is made, else one in the temporary folder. Raises InputError for
    places that cannot be written to.
    """
    protocol = scheme(str(place)) if isinstance(place, str) else None
    if protocol is None:
        if staging is not None:
            hint = "give --output a URL, or leave it out"
            raise InputError([Problem("--staging", "is for an output in an object store", hint=hint)])
        return Output(Path(place))
    if problem := protocol_problem(protocol, str(place)):
        raise InputError([problem])
    if protocol in ("http", "https"):
        hint = "s3://, gs://, or the protocol of another store"
        raise InputError([Problem(str(place), "a web server takes no files", "a folder or an object store", hint)])
    url = str(place).rstrip("/")
    return MirroredOutput(staging or staging_folder(url), url)


def staging_folder(url: str) -> Path:
    """Return the folder where the output for a URL is staged by default: the same for each run of this user."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"kimik3-prep-{os.getuid()}-{digest}"


@dataclass(frozen=True, slots=True)
class MirroredOutput(Output):
    """An output at a URL. `root` is its staging folder: a committed shard leaves its index there and nothing else."""

    url: str

    @property
    def name(self) -> str:
        """Where the output is, for people."""
        return self.url

    @property
    def is_mirrored(self) -> bool:
        """Whether shards leave this disk once they are committed."""
        return True

    def committed(self, name: str) -> bool:
        """Return whether a shard and its index have arrived in the store."""
        return self.shard_index(name).is_file()

    def shard_sizes(self) -> dict[str, int]:
        """Return the bytes of each committed shard, by its name."""
        there = self._listing()
        return {name: int(there[f"shards/{name}.safetensors"]["size"]) for name in committed_among(there)}

    # --- the life of a run ---

    def is_done(self, recipe: Recipe) -> bool:
        """Return False: only the store knows, and `begin` asks it."""
        return False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the staging folder for one run: a new one, or that of an earlier run for the same URL."""
        self._open_staging()
        with super(MirroredOutput, self).alone():
            yield
        with suppress(OSError):  # not empty
            self.root.rmdir()

    def begin(
        self,
        recipe: Recipe,
        versions: Mapping[str, str],
        *,
        overwrite: bool = False,
        retry: bool = False,
        base: str | None = None,
        others_fill: bool = False,
    ) -> None:
        """Make store and staging folder ready for a run, and bring what the store holds of it.

        Plan and final index are brought; the indexes of shards too, where there is no final index or where failed items
        are to be tried again. A complete shard that waits in the staging folder is sent.
        """
        self._join(overwrite)
        super(MirroredOutput, self).begin(recipe, versions, base=base)
        self._send(self.run)  # where the store had it already, nothing is sent
        self._fetch(retry)

    def commit(self, name: str, index: pa.Table, recipe: Recipe) -> None:
        """Write a shard's index, send the shard, then the index; afterwards only the index stays here."""
        super(MirroredOutput, self).commit(name, index, recipe)
        self._send_shard(name)

    def take_back(self, names: Sequence[str]) -> None:
        """Take back, here and in the store, the final index and the commits of these shards."""
        super(MirroredOutput, self).take_back(names)
        indexes = [f"shards/{self.shard_index(name).name}" for name in names]
        self._remove([self.index.name, *indexes, *(f"shards/{self.shard(name).name}" for name in names)])

    def leave(self) -> None:
        """Clear the staging folder of a finished run."""
        self.clear()
        with disk_errors(self.root):
            (self.root / STAGED_NAME).unlink(missing_ok=True)

    def _clear_remains(self, record: RunRecord) -> None:
        self.clear()  # the store has what counts

    def _way(self, base: str) -> str:
        return base

    def _place(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        super(MirroredOutput, self)._place(path, write)
        self._send(path)

    # --- the staging folder ---

    def _open_staging(self) -> None:
        mark, root = self.root / STAGED_NAME, self.root
        expected, hint = "a new or empty folder", "choose another --staging"
        with disk_errors(root):
            root.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                root.mkdir(0o700)  # its name can be guessed, and others may write beside it
            if root.parent == Path(tempfile.gettempdir()) and (root.is_symlink() or root.stat().st_uid != os.getuid()):
                raise InputError([Problem(str(root), "belongs to somebody else", expected, hint)])
            names = {path.name for path in root.iterdir()} - {LOCK_NAME, f"{STAGED_NAME}.tmp"}
            if STAGED_NAME in names and mark.read_text(encoding="utf-8", errors="replace") == self.url:
                return
        if names:
            what = f"holds {min(names)!r}: it does not stage the output for {self.url}"
            raise InputError([Problem(str(root), what, expected, hint)])
        write_whole(mark, lambda file: file.write(self.url.encode()))

    def _join(self, overwrite: bool) -> None:
        """Begin in the store, or go on there: afterwards the staging folder has the store's run record, if any.

        Raises InputError where something of others lies in the store; only files of ours are ever removed from it.
        """
        there = self._listing()
        if self.run.name not in there:
            if there:
                what = f"holds {min(there)!r} and no run.json, so it is not an output that kimik3-prep wrote"
                raise InputError([Problem(self.url, what, "a place without objects", "choose another --output")])
            self.clear()
        elif overwrite:
            self._remove(sorted(filter(is_ours, there), key=_last_first))
            self.clear()
        elif not all(_same(path, self._url(path), there.get(path.name)) for path in (self.run, self.plan)):
            self.clear()  # of another run, or of this one before it had a plan
            self._get(self.run)

    def _fetch(self, retry: bool) -> None:
        """Bring what the store holds of the run, and send the complete shards that wait here."""
        there = self._listing()
        if self.plan.name in there and not self.plan.is_file():
            self._get(self.plan)
        self.index.unlink(missing_ok=True)
        if self.index.name in there:
            self._get(self.index)
            if not retry:
                return
        committed = committed_among(there)
        with disk_errors(self.shards):
            self.shards.mkdir(exist_ok=True)
        for path in sorted(self.shards.glob("*.parquet")):
            if not OURS.fullmatch(path.name):
                continue
            if path.stem in committed:
                self.shard(path.stem).unlink(missing_ok=True)
            elif self.shard(path.stem).is_file():
                self._send_shard(path.stem)
            else:
                path.unlink()
        for name in committed:
            index = self.shard_index(name)
            if not _same(index, self._url(index), there[f"shards/{index.name}"]):
                self._get(index)

    # --- the store ---

    def _url(self, path: Path) -> str:
        return f"{self.url}/{path.relative_to(self.root).as_posix()}"

    def _send(self, path: Path) -> None:
        """Send a file of the staging folder, and compare what has arrived. Raises RunError."""
        send(path, self._url(path))

    def _send_shard(self, name: str) -> None:
        self._send(self.shard(name))
        self._send(self.shard_index(name))
        self.shard(name).unlink()

    def _get(self, path: Path) -> None:
        url = self._url(path)

        def write(file: BinaryIO) -> None:
            with _store_errors("read", url):
                remote.download(url, file)

        write_whole(path, write)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            url = f"{self.url}/{name}"
            with _store_errors("remove", url), suppress(FileNotFoundError):
                asked(url, lambda fs, there: fs.rm_file(there))

    def _listing(self) -> _Listing:
        with _store_errors("list", self.url):
            return remote.listing(self.url)


@contextmanager
def _store_errors(verb: str, url: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise StoreRefuses(verb, url, "there is no such bucket") from error
    except OSError as error:
        raise StoreRefuses(verb, url, error.strerror or str(error)) from error


def _last_first(name: str) -> tuple[int, str]:
    """Order names for removal: what vouches for others goes before these, and the run record last."""
    if name in OURS_IN_ROOT:
        return 3 * OURS_IN_ROOT.index(name), name
    return 1 if name.endswith(".parquet") else 2, name


# --- sending, and whether both are the same -------------------------------------------------------------------------


def send(path: Path, url: str) -> None:
    """Send a file, and compare what has arrived. Raises RunError."""
    # Each part of a large file is in memory while it is sent.
    more: dict[str, Any] = {"max_concurrency": _PARTS_AT_ONCE} if scheme(url) in ("s3", "s3a") else {}
    with _store_errors("write", url):
        for _ in range(_ATTEMPTS):
            if _same(path, url):
                return
            asked(url, lambda fs, there: fs.put_file(os.fspath(path), there, **more))
        if not _same(path, url):
            raise UploadDamaged(url, _ATTEMPTS)


def _same(path: Path, url: str, said: Mapping[str, Any] | None = None) -> bool:
    """Whether the store holds this file: its size, and the checksum that the store tells or, without, its bytes.

    said: what the store says of the object; else it is asked.
    """
    with _store_errors("compare", url):
        try:
            size = path.stat().st_size
            said = info(url) if said is None else said
        except FileNotFoundError:
            return False
        if said.get("size") != size:
            return False
        checksum = _checksum_of_store(said)
        return bool(checksum and checksum == _checksum(path, like=checksum)) or _equal(path, url)


def _checksum_of_store(said: Mapping[str, Any]) -> str:
    """Return an MD5 in hexadecimal, for S3 with the number of its parts; empty where the store has none."""
    if said.get("md5Hash"):
        return base64.b64decode(said["md5Hash"]).hex()
    return str(said.get("ETag") or "").strip('"')


def _checksum(path: Path, like: str) -> str:
    """Return the file's checksum, made in the way of another one."""
    whole, parts = hashlib.md5(usedforsecurity=False), hashlib.md5(usedforsecurity=False)
    count = 0
    with open(path, "rb") as file:
        while part := file.read(_PART):
            whole.update(part)
            parts.update(hashlib.md5(part, usedforsecurity=False).digest())
            count += 1
    return f"{parts.hexdigest()}-{count}" if "-" in like else whole.hexdigest()


def _equal(path: Path, url: str) -> bool:
    """Whether the same bytes come back. An object that does not come back at all is sent again, too."""
    with open(path, "rb") as here, io.BufferedReader(remote.opened(url), _PIECE) as there:
        while True:
            part = here.read(_PIECE)
            try:
                if part != there.read(_PIECE):
                    return False
            except RemoteError:
                return False
            if not part:
                return True
