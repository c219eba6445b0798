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
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kimik3_prep.errors import InputError, Problem, RunError

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
    """An OSError while writing `path` (`needed` bytes) leaves as a RunError that says what a person can do."""
    try:
        yield
    except OSError as error:
        text = f"cannot write {path}: {error.strerror or error}"
        if needed is not None:
            text += f"; {needed:,} bytes needed"
        try:
            text += f", {shutil.disk_usage(path.parent).free:,} bytes free"
        except OSError:
            text += f"; the folder {path.parent} cannot be read either"
        raise RunError(f"{text}. What is committed stays valid: run the same command to continue.") from error


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """`write` a temporary file beside `path`, make it durable, give it its name, make the name durable.

    The order is what survives a loss of power: contents, rename, folder. Raises RunError where the disk refuses.
    """
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


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

    Nothing is truncated: until the lock is held the file may be another process's. A symbolic link is not followed:
    what is written belongs into this folder. Raises BlockingIOError where another process holds it, and, if it `must`
    be a lock, OSError where the file system has none.
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
        path.parent.mkdir(parents=True, exist_ok=True)
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
