"""Writing files so that they are whole or not there, who may write where, and words for a disk that refuses.

Locks in an output folder, each a file that is there and held only while its process lives and works:

    .lock              a run that has the folder to itself; a range only while it plans
    .lock-plan         a range that is about to take `.lock`; the others wait in line for it
    .lock-2-of-8       a range that fills its shards
    .lock-cpu-00003    one shard that is filled in a process of its own, somewhere else (Ray)

Whoever adds a lock for a part of the work holds `.lock` at that moment or works for a process that does; so a run that
takes `.lock` and then finds no other lock held is alone, and stays it.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kimik3_prep.errors import DiskRefuses, InputError, Problem

#: Held, and there, only while a run writes into its folder.
LOCK_NAME = ".lock"
PLAN_LOCK_NAME = ".lock-plan"

#: Every name a lock of ours may have.
LOCKS = re.compile(r"\.lock(-plan|-\d+-of-\d+|-(cpu|gpu|local)-\d{5,})?")
_RANGE_LOCK = re.compile(r"\.lock-(\d+)-of-(\d+)")
_SHARD_LOCK = re.compile(r"\.lock-[a-z]+-\d+")

_ASK_AGAIN = 0.2  # seconds between two tries for a lock that somebody holds
_WORKER_PATIENCE = 60.0  # seconds; a worker whose driver was killed is ended by Ray within some of them


@contextmanager
def disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Turn an OSError that writing `path` raises into DiskRefuses. needed: bytes that were to be written."""
    try:
        yield
    except OSError as error:
        try:
            free = shutil.disk_usage(path.parent).free
        except OSError:
            free = None
        raise DiskRefuses(str(path), error.strerror or str(error), needed, free) from error


def write_whole(path: Path, write: Callable[[BinaryIO], object], parents: bool = False) -> None:
    """Create or replace a file so that a crash or a loss of power leaves the old one or the new one, whole.

    `write` gets a temporary file beside it. Then contents, name and folder are made durable, in this order. A link at
    either name is replaced and never followed. A device or a pipe is written to, and keeps its name. parents: make the
    folder, too. Raises DiskRefuses.
    """
    if _is_stream(path):
        with disk_errors(path), open(path, "wb") as stream:
            write(stream)
        return
    temporary = path.with_name(f"{path.name}.tmp")
    with disk_errors(path):
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # of a run that was killed
        try:
            with open(temporary, "xb", opener=_exclusively) as file:
                write(file)
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def _is_stream(path: Path) -> bool:
    """Whether a name is that of a device or a pipe, such as /dev/full or /dev/stdout. A planted link to one is not."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    of_the_system = os.path.realpath(path.parent).startswith("/proc/") or str(path.parent) in ("/dev", "/dev/fd")
    return of_the_system or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _exclusively(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)  # "x" is O_EXCL already


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def regular(path: Path) -> Path:
    """Return the path of a regular file. Raises OSError for anything else: who opens a named pipe waits for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return path


# --- one process at a time ----------------------------------------------------------------------------------------


def claim(path: Path, must: bool = False) -> int:
    """Open or create a file for this process alone, until the descriptor is closed: a dead process holds nothing.

    Nothing is truncated, because the file may be another process's until the lock is held. Symbolic links are not
    followed, because what is written belongs into this folder. must: refuse a file system without locks, with an
    OSError. Raises BlockingIOError where another process holds the file.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            _lock(descriptor, must)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner renamed or removed it in between: this is no longer the file of that name


def _lock(descriptor: int, must: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks: a run goes on there without, and nothing guards against a second one.
        if must or error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def create(path: Path) -> int:
    """Create a file for this process alone, as `claim` does, in the place of one that no process holds any more.

    It is a new file in any case: what a link or another name leads to is never written into. Raises BlockingIOError
    where another process holds the file, OSError.
    """
    remove_unheld(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except FileExistsError:
        raise BlockingIOError(errno.EWOULDBLOCK, "another process created it just now") from None
    try:
        _lock(descriptor, must=False)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_unheld(path: Path) -> None:
    """Remove a file, if it is there, that no process holds. Raises BlockingIOError where one does, OSError."""
    if path.is_symlink():  # no file of ours is a link
        path.unlink(missing_ok=True)
    if not path.exists():
        return
    descriptor = claim(path)
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextmanager
def hold(
    path: Path, patience: float = 0.0, waiting: Callable[[str], object] = lambda holder: None, must: bool = False
) -> Iterator[None]:
    """Hold a lock file of an output folder. Raises InputError that names the process which holds it, RunError else.

    patience: seconds to wait for another holder; `waiting` is then called once with its name. must: as in `claim`.
    What locks is the open descriptor, which ends with its process. The file says who that is, for people, and goes
    before the descriptor does; whoever opened it until then notices in `claim` that its name is gone.
    """
    with disk_errors(path):
        descriptor = _wait_for(path, patience, waiting, must)
    try:
        with disk_errors(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _wait_for(path: Path, patience: float, waiting: Callable[[str], object], must: bool) -> int:
    began, told = time.monotonic(), False
    while True:
        try:
            return claim(path, must)
        except BlockingIOError:
            if time.monotonic() - began >= patience:
                raise InputError([_held(path)]) from None
        if not told and (holder := _holder(path)):
            told = True
            waiting(holder)
        time.sleep(_ASK_AGAIN)


@contextmanager
def only_run(root: Path) -> Iterator[None]:
    """Hold an output folder for one run alone. Raises InputError where another run, or a part of one, is writing."""
    with hold(root / LOCK_NAME):
        clear_locks(root)
        yield


@contextmanager
def only_range(root: Path, count: int, waiting: Callable[[str], object]) -> Iterator[None]:
    """Hold an output folder while one of `count` ranges plans; wait for those that plan before it.

    waiting: called with the name of a process that this one waits for. Raises InputError where a run, or a range of
    another count, is writing.
    """

    def neighbour(name: str) -> bool:
        return not re.fullmatch(rf"{re.escape(LOCK_NAME)}-\d+-of-(?!{count}$)\d+", name)

    with hold(root / PLAN_LOCK_NAME, math.inf, waiting, must=True), hold(root / LOCK_NAME, must=True):
        clear_locks(root, neighbour)
        yield


def locks(root: Path) -> list[Path]:
    """The lock files that lie in a folder, held or left by processes that were killed."""
    return sorted(path for path in root.glob(".lock*") if LOCKS.fullmatch(path.name))


def clear_locks(root: Path, allowed: Callable[[str], object] = lambda name: False) -> None:
    """Remove the locks that nobody holds; for the holder of `.lock`. Raises InputError for one that is held.

    allowed: says of a lock's name that it may be held. A worker of a killed run is given a while to end.
    """
    for path in locks(root):
        if path.name == LOCK_NAME or allowed(path.name):
            continue
        try:
            with hold(path, _WORKER_PATIENCE if _SHARD_LOCK.fullmatch(path.name) else 0.0):
                pass
        except InputError:
            if path.name != PLAN_LOCK_NAME:  # whoever holds that comes for `.lock` next, and is refused there
                raise


def _held(path: Path) -> Problem:
    part = _RANGE_LOCK.fullmatch(path.name)
    told = f" (--shard-range {part[1]}/{part[2]})" if part else ""
    what = f"another run is writing into it{told}: {_holder(path) or 'a process that has not said its name yet'}"
    return Problem(str(path.parent), what, hint="wait until it has ended, or choose another --output")


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""  # it ended just now
