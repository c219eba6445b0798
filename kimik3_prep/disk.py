"""Writing files so that they are whole or not there, by one process at a time, and words for a disk that refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kimik3_prep.errors import InputError, Problem, RunError

#: Held, and there, only while a run writes into its folder.
LOCK_NAME = ".lock"


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


# --- one process at a time ----------------------------------------------------------------------------------------


def claim(path: Path) -> int:
    """Open or create a file for this process alone, until the descriptor is closed: a dead process holds nothing.

    Nothing is truncated: until the lock is held the file may be another process's. A symbolic link is not followed:
    what is written belongs into this folder. Raises BlockingIOError where another process holds it.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            _lock(descriptor)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner renamed or removed it in between: this is no longer the file of that name


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks: a run goes on there without, and nothing guards against a second one.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


@contextmanager
def only_run(root: Path) -> Iterator[None]:
    """Hold an output folder for one run. Raises InputError that names the process which holds it, RunError else.

    What locks is the open descriptor, which ends with its process. The file says who that is, for people, and goes
    before the descriptor does; whoever opened it until then notices in `claim` that its name is gone.
    """
    path = root / LOCK_NAME
    with disk_errors(path):
        root.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = claim(path)
        except BlockingIOError:
            raise InputError([_held(root, path)]) from None
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


def _held(root: Path, path: Path) -> Problem:
    try:
        holder = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        holder = ""  # it ended just now
    what = f"another run is writing into it: {holder or 'a process that has not said its name yet'}"
    return Problem(str(root), what, hint="wait until it has ended, or choose another --output")
