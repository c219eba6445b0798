"""An output that lies in an object store: made in a staging folder, and sent there in the order that commits it.

    run.json, plan.parquet              before anything is filled; another machine goes on from them
    shards/cpu-00000.safetensors        compared with what was sent, by size and checksum, before
    shards/cpu-00000.parquet            its index follows, whose presence in the store commits the shard
    index.parquet                       last

The store decides what is true. A staging folder holds what is on its way there, and the indexes of what has arrived;
whatever else lies in it is dropped when a run begins. So a run goes on from its own staging folder or from none.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kimik3_prep import remote
from kimik3_prep.disk import LOCK_NAME, disk_errors, write_whole
from kimik3_prep.errors import InputError, Problem, RunError
from kimik3_prep.output.folder import STAGED_NAME, clear_output
from kimik3_prep.output.tables import OURS, Layout
from kimik3_prep.remote import RemoteError, asked, info, scheme

_ATTEMPTS = 3  # uploads of a file that arrives changed
_PART = 50 << 20  # bytes of a part of what s3fs uploads in several
_PARTS_AT_ONCE = 4  # each of them is in memory
_PIECE = 8 << 20


def staging_folder(url: str) -> Path:
    """Where the output for a URL is staged when nobody chooses: the same folder for each run of this user."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"kimik3-prep-{os.getuid()}-{digest}"


@contextmanager
def staging(layout: Layout) -> Iterator[None]:
    """Make the staging folder, or find it as an earlier run for the same URL left it; remove it if it is empty then.

    Raises InputError, RunError.
    """
    if layout.store is not None:
        _open_staging(layout)
    yield
    if layout.store is not None:
        with suppress(OSError):  # not empty
            layout.root.rmdir()


def _open_staging(layout: Layout) -> None:
    mark, root = layout.root / STAGED_NAME, layout.root
    expected, hint = "a new or empty folder", "choose another --staging"
    with disk_errors(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            root.mkdir(0o700)  # its name can be guessed, and others may write beside it
        if root.parent == Path(tempfile.gettempdir()) and (root.is_symlink() or root.stat().st_uid != os.getuid()):
            raise InputError([Problem(str(root), "belongs to somebody else", expected, hint)])
        names = {path.name for path in root.iterdir()} - {LOCK_NAME, f"{STAGED_NAME}.tmp"}
        if STAGED_NAME in names and mark.read_text(encoding="utf-8", errors="replace") == layout.store:
            return
    if names:
        what = f"holds {min(names)!r}: it does not stage the output for {layout.store}"
        raise InputError([Problem(str(root), what, expected, hint)])
    write_whole(mark, lambda path: path.write_text(layout.store or "", encoding="utf-8"))


def join(layout: Layout, overwrite: bool) -> None:
    """Begin in the store, or go on there: afterwards the staging folder has the run record of the store, if any.

    Raises InputError where something of others lies in the store; only what is ours is ever removed from it.
    """
    if layout.store is None:
        return
    there = _listing(layout)
    if layout.run.name not in there:
        if there:
            what = f"holds {min(there)!r} and no run.json, so it is not an output that kimik3-prep wrote"
            raise InputError([Problem(layout.store, what, "a place without objects", "choose another --output")])
        clear_output(layout)
    elif overwrite:
        _remove(layout, sorted(filter(_ours, there), key=_last_first))
        clear_output(layout)
    elif not all(_same(path, _url(layout, path), there.get(path.name)) for path in (layout.run, layout.plan)):
        clear_output(layout)  # of another run, or of this one before it had a plan
        _get(layout, layout.run)


def fetch(layout: Layout, again: bool) -> None:
    """Bring what the store holds of the run: plan, final index, and, where there is none, the indexes of its shards.

    again: the shards' too, because failed items are to be tried again. Shards that wait in the staging folder are sent.
    """
    if layout.store is None:
        return
    there = _listing(layout)
    if layout.plan.name in there and not layout.plan.is_file():
        _get(layout, layout.plan)
    layout.index.unlink(missing_ok=True)
    if layout.index.name in there:
        _get(layout, layout.index)
        if not again:
            return
    committed = _committed(there)
    for path in sorted(layout.shards.glob("*.parquet")) if layout.shards.is_dir() else ():
        if path.stem in committed:
            layout.shard(path.stem).unlink(missing_ok=True)
        elif layout.shard(path.stem).is_file():
            commit_shard(layout, path.stem)
        else:
            path.unlink()
    for name in committed:
        index = layout.shard_index(name)
        if not _same(index, _url(layout, index), there[f"shards/{index.name}"]):
            _get(layout, index)


def publish(layout: Layout, path: Path) -> None:
    """Send a file of the staging folder, and compare what has arrived. Raises RunError."""
    if layout.store is None:
        return
    url = _url(layout, path)
    # Each part of a large file is in memory while it is sent.
    more: dict[str, Any] = {"max_concurrency": _PARTS_AT_ONCE} if scheme(url) in ("s3", "s3a") else {}
    with _store_errors("write", url):
        for _ in range(_ATTEMPTS):
            if _same(path, url):
                return
            asked(url, lambda fs, there: fs.put_file(os.fspath(path), there, **more))
        if not _same(path, url):
            raise RunError(f"{url} is not what was sent, {_ATTEMPTS} times. Run the same command to continue.")


def commit_shard(layout: Layout, name: str) -> None:
    """Send a shard that is complete in the staging folder, then its index; afterwards only that index stays here."""
    if layout.store is None:
        return
    publish(layout, layout.shard(name))
    publish(layout, layout.shard_index(name))
    layout.shard(name).unlink()


def take_back(layout: Layout, names: Iterable[str]) -> None:
    """Take back, in the store, the final index and the commits of these shards; as `uncommit` does in the folder."""
    if layout.store is None:
        return
    names = list(names)
    indexes = [f"shards/{layout.shard_index(name).name}" for name in names]
    _remove(layout, [layout.index.name, *indexes, *(f"shards/{layout.shard(name).name}" for name in names)])


def sizes(layout: Layout) -> list[int] | None:
    """Bytes of all committed shards in the store; None for an output that lies in its folder."""
    if layout.store is None:
        return None
    there = _listing(layout)
    return [int(there[f"shards/{name}.safetensors"]["size"]) for name in _committed(there)]


def leave(layout: Layout) -> None:
    """Clear the staging folder of a finished run."""
    if layout.store is None:
        return
    clear_output(layout)
    with disk_errors(layout.root):
        (layout.root / STAGED_NAME).unlink(missing_ok=True)


# --- the store ----------------------------------------------------------------------------------------------------


@contextmanager
def _store_errors(what: str, url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            text = "there is no such bucket"
        again = "What is committed stays valid: run the same command to continue."
        raise RunError(f"cannot {what} {url}: {text}. {again}") from error


def _url(layout: Layout, path: Path) -> str:
    return f"{layout.store}/{path.relative_to(layout.root).as_posix()}"


def _listing(layout: Layout) -> dict[str, dict[str, Any]]:
    """What the store says of each object of the output, by relative name."""

    def question(fs: Any, root: str) -> dict[str, dict[str, Any]]:
        fs.invalidate_cache()
        below = root.rstrip("/") + "/"
        found = fs.find(root, detail=True)
        return {name.removeprefix(below): about for name, about in found.items() if name.startswith(below)}

    url = layout.store or ""
    with _store_errors("list", url):
        try:
            found = asked(url, question)
        except FileNotFoundError:
            return {}  # stores that know folders have none of that name yet
    return {name: about for name, about in found.items() if name and not name.endswith("/")}


def _committed(there: Iterable[str]) -> list[str]:
    names = {name.removeprefix("shards/") for name in there if name.startswith("shards/")}
    ours = sorted(name.removesuffix(".parquet") for name in names if OURS.fullmatch(name) and name.endswith(".parquet"))
    return [name for name in ours if f"{name}.safetensors" in names]


def _ours(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return bool(folder == "shards" and OURS.fullmatch(file)) or name in _IN_ORDER


_IN_ORDER = ("index.parquet", "plan.parquet", "run.json")


def _last_first(name: str) -> tuple[int, str]:
    """In the order of removal: what says that something is complete goes before it, and the run record last."""
    if name in _IN_ORDER:
        return 3 * _IN_ORDER.index(name), name
    return 1 if name.endswith(".parquet") else 2, name


def _remove(layout: Layout, names: Iterable[str]) -> None:
    for name in names:
        url = f"{layout.store}/{name}"
        with _store_errors("remove", url), suppress(FileNotFoundError):
            asked(url, lambda fs, there: fs.rm_file(there))


def _get(layout: Layout, path: Path) -> None:
    url = _url(layout, path)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as target, _store_errors("read", url):
            shutil.copyfileobj(io.BufferedReader(remote.opened(url), _PIECE), target, _PIECE)

    write_whole(path, write)


# --- whether both are the same ------------------------------------------------------------------------------------


def _same(path: Path, url: str, about: dict[str, Any] | None = None) -> bool:
    """Whether the store holds this file: its size, and the checksum that the store tells or, without, its bytes."""
    with _store_errors("compare", url):
        try:
            size = path.stat().st_size
            about = info(url) if about is None else about
        except FileNotFoundError:
            return False
        if about.get("size") != size:
            return False
        told = _told(about)
        return bool(told and told == _checksum(path, told)) or _equal(path, url)


def _told(about: dict[str, Any]) -> str:
    """An MD5 in hexadecimal, for S3 with the number of parts it was made from; empty where the store tells none."""
    if about.get("md5Hash"):
        return base64.b64decode(about["md5Hash"]).hex()
    return str(about.get("ETag") or "").strip('"')


def _checksum(path: Path, told: str) -> str:
    """The file's own checksum, made as the one that was `told`."""
    whole, parts = hashlib.md5(usedforsecurity=False), hashlib.md5(usedforsecurity=False)
    count = 0
    with open(path, "rb") as file:
        while part := file.read(_PART):
            whole.update(part)
            parts.update(hashlib.md5(part, usedforsecurity=False).digest())
            count += 1
    return f"{parts.hexdigest()}-{count}" if "-" in told else whole.hexdigest()


def _equal(path: Path, url: str) -> bool:
    """Whether the same bytes come back; what does not come back at all is to be sent again, too."""
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
