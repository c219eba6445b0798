"""tars.py and members.py: a tar as a manifest, its images read where they lie, and archives that lie."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Silent, picture, write_manifest
from pyarrow import parquet
from stores import Store

from kimik3_prep.errors import InputError, ItemError
from kimik3_prep.images import source as sources
from kimik3_prep.images.address import resolve, split
from kimik3_prep.images.decode import decode, probe
from kimik3_prep.manifest.read import Manifest, read_manifest
from kimik3_prep.output.folder import Output
from kimik3_prep.reading.verify import Comparison, verify
from kimik3_prep.run.check import Settings, check, default_output
from kimik3_prep.run.prepare import prepare


def png(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    picture(100 + seed, 90, seed=seed).save(buffer, "PNG")
    return buffer.getvalue()


def tar(path: Path, files: dict[str, bytes | tarfile.TarInfo], form: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def odd(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "a.png"
    return info


def rows(manifest: Manifest) -> list[tuple[str, Any]]:
    items = manifest.items.to_pylist()
    return [(item["id"], json.loads(item["extra"]) if item["extra"] else None) for item in items]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_where_python_finds_them(tmp_path: Path, form: int) -> None:
    long = "folder/" * 12 + "ü" * 30 + ".jpg"  # more than the field of a name holds
    names = ["a.png", "b/c.JPEG", long, "b/e.webp"]
    files = {name: os.urandom(100 * number) for number, name in enumerate(names, 3)}
    path = tar(tmp_path / "x.tar", {"b": odd("b", tarfile.DIRTYPE), **files, "notes.md": b"no image"}, form)
    found = read_manifest(str(path)).items.to_pylist()
    with tarfile.open(path) as archive:
        expected = [(m.offset_data, m.size, m.name) for m in archive if m.name in files]
    assert [item["image"] for item in found] == [f"x.tar!tar:{b}+{s}!{n}" for b, s, n in expected]
    assert [item["id"] for item in found] == [name.partition(".")[0] for name in names]
    for item in found:
        assert sources.read_whole(resolve(item["image"], str(tmp_path))).content in files.values()


def test_what_stands_beside_an_image(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "x.tar",
        {
            "1.jpg": b"i",
            "1.json": b'{"id": "no", "width": 3}',
            "1.txt": b"ein Wort",
            "1.cls": b"7",
            "2.txt": b"first",
            "2.left.png": b"i",
            "2.right.png": b"i",
            "3.png": b"i",
            "3.jpg": b"i",
            "._4.jpg": b"of a Mac",
        },
    )
    assert rows(read_manifest(str(path))) == [
        ("1", {"json": {"id": "no", "width": 3}, "txt": "ein Wort", "cls": "7"}),
        ("2.left", {"txt": "first"}),
        ("2.right", {"txt": "first"}),
        ("3.png", None),
        ("3.jpg", None),
    ]


def test_a_run_from_a_tar_is_the_run_from_a_folder(tmp_path: Path, s3: Store, run: Run) -> None:
    files: dict[str, Any] = {f"{n}.png": png(n) for n in range(5)}
    files["cut.png"] = png(6)[:2000]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    listed = [{"id": name.removesuffix(".png"), "image": name} for name in files]
    write_manifest(tmp_path / "m.jsonl", listed)
    (tmp_path / "tars").mkdir()
    for number, names in enumerate((list(files)[:3], list(files)[3:])):
        tar(tmp_path / "tars" / f"{number}.tar", {name: files[name] for name in names})
        s3.put(f"tars/{number}.tar", (tmp_path / "tars" / f"{number}.tar").read_bytes())

    def outcome(manifest: str, name: str) -> Any:
        more: dict[str, Any] = {"config": "kimi-k3", "backend": "cpu", "dtype": "uint8", "shard_size": 80_000}
        prepare(Settings(manifest, tmp_path / name, **more), Silent())
        index = Output(tmp_path / name).read_index().drop_columns(["image"])
        shards = [path.read_bytes() for path in sorted((tmp_path / name / "shards").glob("*.safetensors"))]
        # Behind the header, which names the run.
        return index.to_pylist(), [shard[8 + int.from_bytes(shard[:8], "little") :] for shard in shards]

    expected = outcome(str(tmp_path / "m.jsonl"), "files")
    assert [row["error_code"] for row in expected[0]] == [None] * 5 + ["truncated"]
    pattern = str(tmp_path / "tars" / "*.tar")
    assert outcome(pattern, "tarred") == expected
    assert outcome("s3://bucket/tars/*.tar", "stored") == expected
    images = parquet.read_table(tmp_path / "tarred" / "index.parquet")["image"].to_pylist()
    assert [split(image)[0] for image in images] == ["0.tar"] * 3 + ["1.tar"] * 3
    assert images == parquet.read_table(tmp_path / "stored" / "index.parquet")["image"].to_pylist()
    report = verify(tmp_path / "tarred", Comparison(pattern))
    assert (report.compared, report.problems) == (5, ())
    done = run("encode", pattern, "--config", "kimi-k3", "--backend", "cpu", "--dry-run", "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["images"]) == (0, 6), done.stderr
    assert default_output(pattern).name == "tars-features"


def test_a_header_is_read_without_its_image(tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_HEAD", 1024)
    content = png(3)
    assert len(content) > 8000
    s3.put("x.tar", tar(tmp_path / "x.tar", {"0.png": png(1), "1.png": content}).read_bytes())
    image = read_manifest("s3://bucket/x.tar").items["image"].to_pylist()[1]
    begin = int(image.split(":")[1].partition("+")[0])
    s3.asked.clear()
    found = probe(resolve(image, "s3://bucket"))
    assert (found.width, found.stamp.size) == (103, len(content))  # type: ignore[union-attr]
    assert s3.of("x.tar") == [f"bytes={begin}-{begin + 1023}"]
    s3.asked.clear()
    decode(resolve(image, "s3://bucket"), planned=found.stamp)
    assert s3.of("x.tar") == [f"bytes={begin}-{begin + len(content) - 1}"]


def test_an_archive_that_changes_is_noticed(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", {"a.png": png()})
    source = resolve(read_manifest(str(path)).items["image"][0].as_py(), str(tmp_path))
    planned = probe(source).stamp
    os.utime(path, ns=(1, 1))
    with pytest.raises(ItemError, match="source_changed"):
        decode(source, planned=planned)
    for wrong in ("!tar:512+99999999!a.png", "!tar:999999999999+1!a.png"):
        with pytest.raises(ItemError, match="truncated: the archive ends before the member does"):
            decode(f"{path}{wrong}")


def test_members_do_not_lead_out_of_a_root(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    tar(tmp_path / "out.tar", {"a.png": png()})
    tar(tmp_path / "in" / "in.tar", {"../../../etc/passwd.png": png()})
    inside = str(tmp_path / "in" / "in.tar")
    assert resolve("in.tar!tar:0+1!../../a", str(tmp_path)) == f"{tmp_path}/in.tar!tar:0+1!../../a"
    settings = Settings(inside, tmp_path / "o", "kimi-k3", "cpu", image_root=tmp_path / "in")
    assert check(settings, Silent()).manifest.items["id"].to_pylist() == ["../../../etc/passwd"]
    image = f"{tmp_path}/out.tar!tar:512+9!/../..{tmp_path}/in/a.png"
    manifest = str(write_manifest(tmp_path / "in" / "m.jsonl", [{"image": image}]))
    with pytest.raises(InputError, match="does not lie below it"):
        check(Settings(manifest, tmp_path / "o", "kimi-k3", "cpu", image_root=tmp_path / "in"), Silent())


# --- archives that lie --------------------------------------------------------------------------------------------


def problems(path: Path) -> list[str]:
    with pytest.raises(InputError) as caught:
        read_manifest(str(path))
    return [problem.what for problem in caught.value.problems]


def test_every_member_that_is_no_file_is_a_problem(tmp_path: Path) -> None:
    kinds = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link", tarfile.FIFOTYPE: "a named pipe"}
    files: dict[str, Any] = {"a.png": png(), "link.txt": odd("link.txt", tarfile.SYMTYPE)}
    for number, kind in enumerate(kinds):
        files[str(number)] = odd(f"{number}.png", kind)
    files["dup.png"] = png()
    path = tar(tmp_path / "x.tar", files)
    assert problems(path) == [f'member "{n}.png" is {what}' for n, what in enumerate(kinds.values())]


def test_sparse_members_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.png")
    info.size, info.pax_headers = 3, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(b"abc"))
    assert problems(tmp_path / "x.tar") == ['member "a.png" is a sparse file']


def test_damage_is_a_problem_wherever_it_is(tmp_path: Path) -> None:
    """Python's reader would end in silence at most of these."""
    whole = tar(tmp_path / "x.tar", {f"{n}.png": bytes([n]) * 700 for n in range(4)}, tarfile.PAX_FORMAT).read_bytes()
    path = tmp_path / "broken.tar"
    ended = 4 * (512 + 1024)
    for cut in range(512, ended + 1, 256):
        path.write_bytes(whole[:cut])
        assert "ends" in problems(path)[0] or "damaged" in problems(path)[0], cut
    for place in range(512 + 1024, 512 + 1024 + 500, 29):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        assert problems(path)[0].endswith("the header at byte 1,536 is damaged")


def test_sums_of_signed_bytes(tmp_path: Path) -> None:
    block = bytearray(tar(tmp_path / "x.tar", {"\u00fc.png": b"i"}, tarfile.USTAR_FORMAT).read_bytes())
    signed = sum(block[:148]) + 256 + sum(block[156:512]) - 256 * sum(byte > 127 for byte in block[:512])
    block[148:156] = f"{signed:06o}\0 ".encode()
    (tmp_path / "x.tar").write_bytes(block)
    assert read_manifest(str(tmp_path / "x.tar")).items["id"].to_pylist() == ["\u00fc"]


@pytest.mark.parametrize(
    "size", [b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"-0000000001\0", b"99999999999\0"]
)
def test_sizes_that_lie(tmp_path: Path, size: bytes) -> None:
    block = bytearray(tar(tmp_path / "x.tar", {"a.png": png()}).read_bytes())
    for kind in (b"0", b"L", b"x"):
        block[124:136], block[156:157] = size, kind
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block[:512]):06o}\0 ".encode()
        (tmp_path / "x.tar").write_bytes(block)
        assert problems(tmp_path / "x.tar")[0].startswith("cannot read the manifest: the ")


def test_extended_headers_that_lie(tmp_path: Path) -> None:
    for record in (b"9999 path=a\n", b"0 path=a\n", b"x path=a\n", b"11 path=abc", b"30 size=99999999999999999999\n"):
        info = tarfile.TarInfo("pax")
        info.type, info.size = b"x", len(record)
        with tarfile.open(tmp_path / "x.tar", "w") as archive:
            archive.addfile(info, io.BytesIO(record))
            archive.addfile(tarfile.TarInfo("a.png"))
        assert len(problems(tmp_path / "x.tar")) >= 1


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_tar_is_read_where_it_lies(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    """Offsets are those in the archive; who looks back begins anew, and more readers than are kept change nothing."""
    files = {f"{n}.png": os.urandom(2000 + n) for n in range(5)}
    plain = tar(tmp_path / "x.tar", {**files, "0.json": b'{"a": 1}'})
    expected = read_manifest(str(plain)).items.to_pylist()
    names = [tmp_path / f"{n}.tgz" for n in range(3)]
    for path in names:
        path.write_bytes(pack(plain.read_bytes()))
        found = read_manifest(str(path)).items.to_pylist()
        assert [item["image"].partition("!")[2] for item in found] == [i["image"].partition("!")[2] for i in expected]
        assert [item["extra"] for item in found] == [item["extra"] for item in expected]
    for item in [*expected, *reversed(expected)]:
        for path in names:
            source = f"{path}!{item['image'].partition('!')[2]}"
            assert sources.read_whole(source).content == files[f"{item['id']}.png"]
    names[0].write_bytes(pack(plain.read_bytes()[:5000]))
    with pytest.raises(ItemError, match="truncated"):
        sources.read_whole(f"{names[0]}!tar:6000+9!x")


def test_the_digest_tells_archives_apart(tmp_path: Path) -> None:
    def digest(**files: bytes) -> str:
        return read_manifest(str(tar(tmp_path / "x.tar", {f"a.{k}": v for k, v in files.items()}))).digest

    digests = [digest(png=b"1"), digest(png=b"12"), digest(png=b"1", txt=b"x"), digest(png=b"1", txt=b"y")]
    assert len(set(digests)) == 4
    assert digest(png=b"1") == digests[0]


def test_what_cannot_be_read_as_a_tar(tmp_path: Path) -> None:
    tar(tmp_path / "x.tar", {"1.png": b"i"})
    (tmp_path / "m.jsonl").write_text('{"image": "a.png"}\n')
    assert read_manifest(str(tmp_path / "*.json?")).items["id"].to_pylist() == ["a.png"]
    assert problems(tmp_path / "*.none") == ["cannot read the manifest: no file matches"]
    tar(tmp_path / "y.tar", {"1.png": b"i"})
    assert len(problems(tmp_path / "[xy].tar")) == 1, "an id that is in both"
