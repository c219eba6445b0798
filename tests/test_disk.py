"""disk.py: whole files or none, and words for a disk that refuses."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, NoReturn

import pytest

from kimik3_prep import disk
from kimik3_prep.disk import disk_errors, write_whole
from kimik3_prep.errors import RunError


def test_a_file_appears_whole_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with pytest.raises(RunError, match="No such file or directory"):
        write_whole(path, lambda file: file.write(b"hello"))
    write_whole(path, lambda file: file.write(b"hello"), parents=True)
    assert path.read_text() == "hello"
    assert os.listdir(path.parent) == ["a.txt"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(file: BinaryIO) -> NoReturn:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match="No space left on device"):
        write_whole(path, write)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_contents_are_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, replace = disk.sync, os.replace
    monkeypatch.setattr(disk, "sync", lambda path: (steps.append(f"sync {path.name}"), sync(path))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(f"rename {Path(b).name}"), replace(a, b))[1])
    write_whole(tmp_path / "a.txt", lambda file: file.write(b"hello"))
    assert steps == ["sync a.txt.tmp", "rename a.txt", f"sync {tmp_path.name}"]


def test_the_sentence_names_path_need_and_what_is_free(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught, disk_errors(tmp_path / "a", 1_000_000):
        raise OSError(errno.ENOSPC, "No space left on device")
    text = str(caught.value)
    assert str(tmp_path / "a") in text
    assert "1,000,000 bytes needed" in text
    assert "bytes free" in text
    assert "run the same command" in text
    assert caught.value.exit_code == 3


def test_a_folder_that_is_gone_too_is_said() -> None:
    with pytest.raises(RunError, match="its folder cannot be read"), disk_errors(Path("/nowhere/at/all")):
        raise OSError(errno.EIO, "Input/output error")


def test_a_pipe_is_written_to_and_keeps_its_name(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, lambda file: file.write(b"lines"))
    assert os.read(reader, 100) == b"lines"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_to_a_pipe_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run.json").symlink_to("pipe")
    write_whole(tmp_path / "run.json", lambda file: file.write(b"{}"))
    assert (tmp_path / "run.json").read_bytes() == b"{}"
    assert not (tmp_path / "run.json").is_symlink()


def test_a_planted_link_is_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("dear")
    for name in ("run.json", "run.json.tmp"):
        (tmp_path / name).symlink_to("victim")
    write_whole(tmp_path / "run.json", lambda file: file.write(b"{}"))
    assert (tmp_path / "victim").read_text() == "dear"
    assert (tmp_path / "run.json").read_bytes() == b"{}"
