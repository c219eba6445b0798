"""sources.py: only regular files, data: URLs decoded, and a process without descriptors is nobody's picture's fault."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import resource
from pathlib import Path

import pytest
from conftest import picture

from kimik3_prep.errors import ItemError, RunError
from kimik3_prep.images import source as sources
from kimik3_prep.images.decode import decode, probe
from kimik3_prep.images.source import read_file


def test_folders_pipes_and_sockets_are_errors_not_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ItemError) as caught:
            probe(str(path))
        assert caught.value.code == "not_a_file"


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    os.symlink("loop", tmp_path / "loop")
    for path in (str(tmp_path / "loop"), str(tmp_path / ("x" * 5000)), f"{tmp_path}/a\0b", str(tmp_path / "no" / "a")):
        with pytest.raises(ItemError):
            decode(path)


def test_data_urls() -> None:
    buffer = io.BytesIO()
    picture(30, 20).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert probe(url).width == 30
    decoded = decode(url)
    assert decoded.content_hash == f"sha256:{hashlib.sha256(buffer.getvalue()).hexdigest()}"
    percent = "data:," + "".join(f"%{byte:02x}" for byte in buffer.getvalue())
    assert decode(percent).image.tobytes() == decoded.image.tobytes()
    for bad in ("data:image/png;base64", "data:image/png;base64,@@@", "data:image/png;base64,AAA"):
        with pytest.raises(ItemError, match="bad_data_url"):
            decode(bad)


def test_large_files_are_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    picture(60, 40).save(path)
    whole = decode(str(path))
    monkeypatch.setattr(sources, "_READ_WHOLE", 10)
    pieces = decode(str(path))
    assert pieces.content_hash == whole.content_hash
    assert pieces.image.tobytes() == whole.image.tobytes()


def test_a_whole_file_and_its_hash(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(b"anything")
    assert read_file(str(tmp_path / "a.npy")) == (b"anything", f"sha256:{hashlib.sha256(b'anything').hexdigest()}")
    with pytest.raises(ItemError, match="not_found"):
        read_file(str(tmp_path / "b.npy"))


def test_a_process_without_descriptors_is_no_fault_of_an_image(tmp_path: Path) -> None:
    picture(30, 20).save(tmp_path / "a.png")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for read in (probe, decode, read_file):
            with pytest.raises(RunError, match="ulimit -n"):
                read(str(tmp_path / "a.png"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
