"""source.py: only regular files, data: URLs decoded, and a process without descriptors is nobody's picture's fault."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import picture

from kimik3_prep.errors import ItemError, RunError
from kimik3_prep.images import source as sources
from kimik3_prep.images.address import resolve
from kimik3_prep.images.decode import decode, probe
from kimik3_prep.images.source import Stamp, read_whole
from kimik3_prep.manifest.items import short_image


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


def data_urls() -> Iterator[tuple[str, str, bytes]]:
    """Ways to write a picture into a `data:` URL that the checkpoint's own reader takes."""
    buffer = io.BytesIO()
    picture(40, 30).save(buffer, "PNG")
    content = buffer.getvalue()
    text = base64.b64encode(content).decode()
    yield "plain", f"data:image/png;base64,{text}", content
    yield "MIME lines", f"data:image/png;base64,{base64.encodebytes(content).decode()}", content
    yield "a space", f"data:image/png;base64, {text}", content
    yield "CRLF at the end", f"data:image/png;base64,{text}\r\n", content
    yield "charset", f"data:image/png;charset=utf-8;base64,{text}", content
    yield "a space before base64", f"data:image/png; base64,{text}", content
    yield "upper case", f"data:image/png;BASE64,{text}", content
    yield "upper-case scheme", f"DATA:image/png;base64,{text}", content
    yield "no media type", f"data:;base64,{text}", content
    yield "no word base64", f"data:image/png,{text}", content
    yield "percent signs in base64", f"data:image/png;base64,{text.replace('+', '%2B').replace('=', '%3D')}", content
    yield "percent signs alone", "data:image/png," + "".join(f"%{byte:02x}" for byte in content), content


@pytest.mark.parametrize(("url", "content"), [pytest.param(*case[1:], id=case[0]) for case in data_urls()])
def test_data_urls_are_read_as_the_checkpoint_reads_them(url: str, content: bytes) -> None:
    assert read_whole(resolve(url, "/anywhere")).content == content
    assert short_image(url).count(",sha256-") == 1, "an index shows a digest instead of the picture"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64", "needs a comma"),
        ("data:image/png;base64,@@@", "not base64"),
        ("data:image/png;base64,AAA", "Incorrect padding"),
        ("data:image/png;base64,AA-_", r"uses - and _, where the checkpoint reads \+ and /"),
        ("data:,hello", "not base64"),
    ],
)
def test_data_urls_that_nothing_reads(url: str, words: str) -> None:
    with pytest.raises(ItemError, match=f"bad_data_url: .*{words}"):
        decode(url)


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
    encoded = read_whole(str(tmp_path / "a.npy"))
    assert (encoded.content, encoded.stamp) == (b"anything", Stamp(8, (tmp_path / "a.npy").stat().st_mtime_ns))
    assert encoded.content_hash == f"sha256:{hashlib.sha256(b'anything').hexdigest()}"
    with pytest.raises(ItemError, match="not_found"):
        read_whole(str(tmp_path / "b.npy"))


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
        for read in (probe, decode, read_whole):
            with pytest.raises(RunError, match="ulimit -n"):
                read(str(tmp_path / "a.png"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
