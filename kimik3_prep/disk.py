"""Writing files so that they are whole or not there, and saying what to do when the disk refuses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kimik3_prep.errors import RunError


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
