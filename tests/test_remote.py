"""remote.py: a store is asked again where that helps, and only there; what it says becomes an OSError."""

from __future__ import annotations

import contextlib
import io
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import fsspec
import pytest
from conftest import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Store

from kimik3_prep import remote
from kimik3_prep.errors import ItemError
from kimik3_prep.images import source as sources
from kimik3_prep.images.decode import decode, probe
from kimik3_prep.images.source import read_whole
from kimik3_prep.remote import (
    ATTEMPTS,
    ATTEMPTS_OF_S3,
    OffsetFile,
    RemoteError,
    beneath,
    parent,
    protocol_problem,
    read,
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which take no time here."""
    pauses: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    return pauses


def png(width: int = 30, height: int = 20, seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    picture(width, height, seed=seed).save(buffer, "PNG")
    return buffer.getvalue()


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "path", "url"),
    [
        ("s3://bucket/dir", "a.jpg", "s3://bucket/dir/a.jpg"),
        ("s3://bucket/dir", "./b//a.jpg", "s3://bucket/dir/b/a.jpg"),
        ("s3://bucket/dir", "../../../a.jpg", "s3://bucket/a.jpg"),
        ("s3://bucket", "a ?#.jpg", "s3://bucket/a ?#.jpg"),
        ("https://host:1/x/", "a ?#.jpg", "https://host:1/x/a %3F%23.jpg"),
        ("zip://d::file:///x/pics.zip", "../../a.jpg", "zip://a.jpg::file:///x/pics.zip"),
        ("zip://::s3://bucket/pics.zip", "d/a.jpg", "zip://d/a.jpg::s3://bucket/pics.zip"),
    ],
)
def test_relative_paths_start_in_the_folder(folder: str, path: str, url: str) -> None:
    assert beneath(folder, path) == url


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("s3://bucket/dir/m.jsonl", "s3://bucket/dir"),
        ("s3://bucket/m.jsonl", "s3://bucket"),
        ("https://host/dir/m.jsonl?key=a/b", "https://host/dir"),
        ("https://host", "https://host"),
        ("s3://bucket/a::b/m.jsonl", "s3://bucket/a::b"),
        ("zip://d/m.jsonl::s3://bucket/x/pics.zip", "zip://d::s3://bucket/x/pics.zip"),
        ("zip://m.jsonl::file:///x/pics.zip", "zip://::file:///x/pics.zip"),
    ],
)
def test_the_folder_of_a_url(url: str, folder: str) -> None:
    assert parent(url) == folder


def test_what_a_protocol_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert protocol_problem("s3", "m.jsonl") is None
    assert "no protocol fsspec knows" in str(protocol_problem("s9", "m.jsonl"))

    def missing(protocol: str) -> None:
        raise ImportError("Install it")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    assert str(protocol_problem("s3", "m:1")) == (
        "m:1: s3:// needs a package that is not installed (pip install 'kimik3-prep[s3]')"
    )
    assert "(Install it)" in str(protocol_problem("abfs", "m:1"))


# --- a store that fails -------------------------------------------------------------------------------------------


def first(times: int, fault: int | str) -> Callable[[str, str], int | str | None]:
    """Spoils the first requests for each object."""
    seen: dict[str, int] = {}

    def spoil(method: str, key: str) -> int | str | None:
        seen[key] = seen.get(key, 0) + 1
        return fault if seen[key] <= times else None

    return spoil


@pytest.mark.parametrize("fault", [500, 503, 429, "break"])
def test_faults_that_pass(s3: Store, fault: int | str) -> None:
    s3.put("a.bin", b"anything" * 1000)
    s3.fault = first(2, fault)
    assert read("s3://bucket/a.bin") == b"anything" * 1000
    assert len(s3.of("a.bin")) == 3


@pytest.mark.parametrize(
    ("fault", "kind", "code", "asked"),
    [
        (404, FileNotFoundError, "not_found", 1),
        (403, PermissionError, "permission_denied", 1),
        (400, RemoteError, "unreadable", 1),
        (500, RemoteError, "unreadable", ATTEMPTS_OF_S3 * 2),
    ],
)
def test_faults_that_stay(
    s3: Store, fault: int, kind: type[OSError], code: str, asked: int, patient: list[float]
) -> None:
    s3.put("a.png", png())
    s3.fault = lambda method, key: fault
    s3.asked.clear()
    with pytest.raises(kind):
        read("s3://bucket/a.png")
    assert len(patient) == (0 if asked == 1 else ATTEMPTS_OF_S3 - 1)
    assert len(s3.asked) == asked
    for look in (probe, decode):
        with pytest.raises(ItemError) as caught:
            look("s3://bucket/a.png")
        assert caught.value.code == code
        assert "a.png" not in caught.value.message


def test_pauses_grow(patient: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*arguments: object, **more: object) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", busy)
    with pytest.raises(RemoteError, match=f"Connection reset by peer .asked {ATTEMPTS} times"):
        read("memory://a.png")
    assert len(patient) == ATTEMPTS - 1
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(patient))


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, s3: Store, patient: list[float]) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.1:9"})
    monkeypatch.setattr(remote, "_shared", {})
    with pytest.raises(RemoteError, match=f"asked {ATTEMPTS_OF_S3} times"):
        read("s3://bucket/a.png")
    assert len(patient) == ATTEMPTS_OF_S3 - 1


def test_a_store_that_does_not_answer(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"endpoint_url": s3.endpoint, "config_kwargs": {"read_timeout": 0.2, "retries": {"max_attempts": 0}}}
    monkeypatch.setitem(fsspec.config.conf, "s3", quick)
    monkeypatch.setattr(remote, "_shared", {})
    s3.put("a.bin", b"late")
    s3.fault = first(1, "hang")
    assert read("s3://bucket/a.bin") == b"late"


def test_many_threads_share_connections(s3: Store) -> None:
    for number in range(40):
        s3.put(f"{number}.bin", b"x" * number)
    before = s3.connections
    found: dict[int, bytes] = {}

    def some(start: int) -> None:
        for number in range(start, 40, 8):
            found[number] = read(f"s3://bucket/{number}.bin")

    threads = [threading.Thread(target=some, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: b"x" * number for number in range(40)}
    assert s3.connections - before <= 10


# --- reading in pieces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "size"), [(0, None), (0, 100), (37, 100), (37, 963), (1000, 0)])
@pytest.mark.parametrize("most", [None, 0, 1, 2])
def test_pieces_are_what_a_file_gives(begin: int, size: int | None, most: int | None) -> None:
    content = bytes(range(250)) * 4
    fsspec.filesystem("memory").pipe_file("/pieces.bin", content)
    part = content[begin:] if size is None else content[begin : begin + size]
    for buffer in (1, 7, 64, 5000):
        plain = io.BytesIO(part)
        pieces = io.BufferedReader(remote.opened("memory://pieces.bin", begin, size, most), buffer)
        for place, count in ((0, 3), (90, 20), (5, 1), (95, -1), (2000, 4), (0, 0), (0, -1)):
            assert pieces.seek(place) == plain.seek(place)
            assert pieces.read(count) == plain.read(count), (place, count)
        assert pieces.seek(-1, 2) == plain.seek(-1, 2) if part else True
        assert pieces.read() == plain.read()


DATA = bytes(range(50))
STEP = st.tuples(st.just("read"), st.integers(-1, 60)) | st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 60))


def offset_file() -> OffsetFile:
    return OffsetFile(lambda place, count: DATA[place : place + count], lambda: len(DATA))


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=12))
def test_an_offset_file_moves_and_reads_as_a_file_in_memory_does(steps: list[tuple[object, int]]) -> None:
    file, other = offset_file(), io.BytesIO(DATA)
    assert file.readable()
    assert file.seekable()
    for step, number in steps:
        if step == "read":
            assert file.read(number) == other.read(number)
        else:
            assert file.seek(number, int(str(step))) == other.seek(number, int(str(step)))
        assert file.tell() == other.tell()


def test_an_offset_file_never_moves_before_its_start() -> None:
    assert offset_file().seek(-3, io.SEEK_CUR) == 0


def test_a_part_that_is_not_there() -> None:
    fsspec.filesystem("memory").pipe_file("/short.bin", b"12345")
    for most in (None, 0):
        with pytest.raises(RemoteError, match="ends before the 9 bytes"):
            remote.opened("memory://short.bin", 3, 6, most).read(6)


def test_an_empty_object(s3: Store) -> None:
    s3.put("empty.png", b"")
    assert read("s3://bucket/empty.png") == b""
    assert io.BufferedReader(remote.opened("s3://bucket/empty.png")).read() == b""
    with pytest.raises(ItemError, match="the file is empty"):
        probe("s3://bucket/empty.png")


def test_a_header_is_read_without_its_image(s3: Store) -> None:
    buffer = io.BytesIO()
    picture(900, 900).effect_spread(400).save(buffer, "PNG")
    assert len(buffer.getvalue()) > 4 * sources._HEAD
    s3.put("large.png", buffer.getvalue())
    s3.put("small.png", png())
    s3.asked.clear()
    assert probe("s3://bucket/small.png").width == 30
    assert [verb for verb, _, _ in s3.asked] == ["GET"]
    large = probe("s3://bucket/large.png")
    assert (large.width, large.stamp.size) == (900, len(buffer.getvalue()))  # type: ignore[union-attr]
    assert s3.of("large.png") == [f"bytes=0-{sources._HEAD - 1}"]
    s3.asked.clear()
    decoded = decode("s3://bucket/large.png", planned=large.stamp)
    assert [verb for verb, _, _ in s3.asked] == ["GET"], "the whole object in one request"
    assert decoded.image.tobytes() == decode_bytes(buffer.getvalue())


def decode_bytes(content: bytes) -> bytes:
    from PIL import Image

    return Image.open(io.BytesIO(content)).tobytes()


def test_every_golden_header_is_the_same_from_a_store(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of 512 bytes, so that each of them is read in some."""
    monkeypatch.setattr(sources, "_HEAD", 512)
    files = fsspec.filesystem("memory")

    def outcome(source: str, exif: Literal["ignore", "apply"], hash: bool) -> tuple[Any, ...]:
        try:
            found = probe(source, exif=exif, hash=hash)
        except ItemError as error:
            return error.code, error.message
        return found.width, found.height, found.mode, found.format, found.content_hash

    for path in sorted((golden / "images").iterdir()):
        if path.is_file():
            files.pipe_file(f"/golden/{path.name}", path.read_bytes())
            for exif, hash in (("ignore", False), ("apply", False), ("ignore", True)):
                stored = outcome(f"memory://golden/{path.name}", exif, hash)
                assert stored == outcome(str(path), exif, hash), path.name


def test_an_object_that_changes_is_noticed(s3: Store) -> None:
    s3.put("a.png", png(seed=1))
    planned = probe("s3://bucket/a.png").stamp
    assert decode("s3://bucket/a.png", planned=planned).image.size == (30, 20)
    other = bytearray(png(seed=1))
    other[-20] ^= 1  # as long, and elsewhere the same
    s3.put("a.png", bytes(other))
    with pytest.raises(ItemError, match="source_changed"):
        decode("s3://bucket/a.png", planned=planned)


def test_a_large_object_comes_in_two_requests_once_its_size_is_known(
    s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_FIRST", 1000)
    s3.put("large.bin", bytes(range(250)) * 40)
    s3.asked.clear()
    assert read("s3://bucket/large.bin") == bytes(range(250)) * 40
    assert s3.of("large.bin") == ["bytes=0-1000", "bytes=1001-9999"]
    s3.asked.clear()
    with pytest.raises(RemoteError, match="the object has 10,000 bytes, and at most 9,999 are read"):
        read("s3://bucket/large.bin", most=9999)
    assert s3.of("large.bin") == ["bytes=0-1000"]


def test_a_body_that_breaks_off_is_named(s3: Store) -> None:
    s3.put("a.png", png())
    s3.fault = lambda method, key: "break"
    with pytest.raises(RemoteError, match="the connection ended before all bytes had come"):
        read("s3://bucket/a.png")


# --- archives -----------------------------------------------------------------------------------------------------


def test_an_archive_is_opened_once_for_all_that_a_thread_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, made = tmp_path / "pics.zip", []
    pack(archive, {"d/a.txt": b"first", "b.txt": b"second"})
    make = fsspec.core.url_to_fs
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **more: made.append(url) or make(url, **more))
    assert read(f"zip://d/a.txt::file://{archive}") == b"first"
    assert read(f"zip://b.txt::file://{archive}") == b"second"
    assert len(made) == 1
    pack(archive, {"d/a.txt": b"another archive by that name"})
    assert read(f"zip://d/a.txt::file://{archive}") == b"another archive by that name"


def pack(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_what_an_archive_lacks_is_said(tmp_path: Path) -> None:
    pack(tmp_path / "pics.zip", {"a.txt": b"a"})
    (tmp_path / "no.zip").write_bytes(b"not an archive")
    for url, kind in (
        (f"zip://b.txt::file://{tmp_path}/pics.zip", FileNotFoundError),
        (f"zip://b.txt::file://{tmp_path}/gone.zip", FileNotFoundError),
        (f"zip://b.txt::file://{tmp_path}/no.zip", RemoteError),
    ):
        with pytest.raises(kind) as caught:
            read(url)
        assert str(tmp_path) not in str(caught.value)


# --- web servers --------------------------------------------------------------------------------------------------


class Web:
    """A web server whose every answer is written by hand. `asked` holds the targets of all requests as they came."""

    def __init__(self, answers: dict[str, Callable[[BaseHTTPRequestHandler], None]]) -> None:
        self.asked: list[str] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                answers.get(self.path, answers.get("*", status(404)))(self)

            def do_HEAD(self) -> None:
                status(403)(self)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.host = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def web() -> Iterator[Callable[..., Web]]:
    made: list[Web] = []

    def start(**answers: Callable[[BaseHTTPRequestHandler], None]) -> Web:
        made.append(Web({name if name == "*" else f"/{name}": answer for name, answer in answers.items()}))
        return made[-1]

    yield start
    for server in made:
        server.server.shutdown()


def status(number: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(number)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()

    return answer


def body(
    content: bytes, announced: int | None = None, sent: int | None = None
) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers with the content; with another Content-Length than it has, or with less of it than that."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        status(200, **({} if announced is None else {"Content_Length": str(announced)}))(request)
        request.wfile.write(content[:sent])

    return answer


SIGNED = (
    "/a%2Fb/p%7Eq+r.png?X-Amz-Credential=AK%2F2026%2Fs3&X-Amz-Signature=a%2Bb%3D%3D&e=%e2%82%ac&arn=arn:aws:s3:::bucket",
    "/a.png?sig=AbC%2bd%2Fe%3D&se=2026-12-03T00%3A00%3A00Z&sp=r&x=a|b&y={c}&z='d'",
    "/100%.png",
)


@pytest.mark.parametrize("target", SIGNED)
def test_a_signed_address_reaches_the_server_byte_for_byte(target: str, web: Callable[..., Web]) -> None:
    server = web(**{"*": body(png())})
    assert read_whole(server.host + target).content == png()
    assert probe(server.host + target).width == 30
    assert server.asked == [target, target]


@pytest.mark.parametrize("target", SIGNED[:2])
def test_a_redirect_to_a_signed_address_too(target: str, web: Callable[..., Web]) -> None:
    server = web(a=status(302, Location=target), **{"*": body(png())})
    assert read(f"{server.host}/a") == png()
    assert server.asked == ["/a", target]


def test_an_address_that_cannot_be_sent_as_it_stands_is_quoted(web: Callable[..., Web]) -> None:
    server = web(**{"*": body(png())})
    assert read(f"{server.host}/a b/ü.png?q=é") == png()
    assert server.asked == ["/a%20b/%C3%BC.png?q=%C3%A9"]


@pytest.mark.parametrize(
    ("announced", "words"), [(5000, "the connection ended after 70 of 5,000 bytes .asked 4 times")]
)
def test_a_web_servers_body_that_breaks_off_is_named(announced: int, words: str, web: Callable[..., Web]) -> None:
    server = web(**{"a.png": body(png(), announced, sent=70)})
    for look in (read_whole, probe, decode):
        with pytest.raises(ItemError, match=f"unreadable: {words}"):
            look(f"{server.host}/a.png")  # type: ignore[operator]
    assert len(server.asked) == 3 * ATTEMPTS


def test_an_object_too_large_for_memory_costs_a_sentence(web: Callable[..., Web]) -> None:
    tracemalloc.start()
    sent = 0

    def endless(request: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        status(200)(request)
        with contextlib.suppress(OSError):
            while sent < 3 << 30:
                request.wfile.write(bytes(1 << 20))
                sent += 1 << 20

    server = web(**{"large.png": body(b"", announced=3 << 30), "endless.png": endless})
    with pytest.raises(ItemError, match="the object has 3,221,225,472 bytes, and at most 536,870,912 are read"):
        decode(f"{server.host}/large.png")
    with pytest.raises(RemoteError, match="more than 50,000,000 bytes"):
        read(f"{server.host}/endless.png", most=50_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150_000_000
    assert sent < 1 << 30
    assert server.asked == ["/large.png", "/endless.png"], "nobody asks again for what is too large"


def test_a_web_server_that_knows_no_ranges(monkeypatch: pytest.MonkeyPatch, web: Callable[..., Web]) -> None:
    monkeypatch.setattr(sources, "_HEAD", 200)
    content = png(300, 200)
    server = web(**{"a.png": body(content), "busy": status(503)})
    stamp = probe(f"{server.host}/a.png").stamp
    decoded = decode(f"{server.host}/a.png", planned=stamp)
    assert decoded.image.size == (300, 200)
    pieces = remote.opened(f"{server.host}/a.png")
    pieces.seek(100)
    assert pieces.read(len(content)) == content[100:]
    for path, code in (("/gone.png", "not_found"), ("/busy", "unreadable")):
        with pytest.raises(ItemError) as caught:
            probe(server.host + path)
        assert caught.value.code == code
