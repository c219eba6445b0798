"""address.py: what an image string names, and that it names the same thing wherever the process runs."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import encode, picture, write_manifest
from pyarrow import parquet

from kimik3_prep.images.address import TableCell, TarMember, name_in_table, name_in_tar, resolve, split
from kimik3_prep.images.decode import decode


def content(seed: int) -> bytes:
    buffer = io.BytesIO()
    picture(30, 20, seed=seed).save(buffer, "PNG")
    return buffer.getvalue()


def pack(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


@pytest.mark.parametrize(
    ("image", "base", "resolved"),
    [
        ("zip://d/a.jpg::pics.zip", "/m", "zip://d/a.jpg::file:///m/pics.zip"),
        ("zip://d/a.jpg::../x/pics.zip", "/m", "zip://d/a.jpg::file:///x/pics.zip"),
        ("zip://d/a.jpg::/abs/pics.zip", "/m", "zip://d/a.jpg::file:///abs/pics.zip"),
        ("zip://d/a.jpg::file:///abs/a b.zip", "/m", "zip://d/a.jpg::file:///abs/a b.zip"),
        ("zip://d/a.jpg::file://pics.zip", "/m", "zip://d/a.jpg::file:///m/pics.zip"),
        ("zip://a.jpg::zip://in.zip::out.zip", "/m", "zip://a.jpg::zip://in.zip::file:///m/out.zip"),
        ("zip://a.jpg::https://h/x.zip?s=%2F", "/m", "zip://a.jpg::https://h/x.zip?s=%2F"),
        ("zip://a.jpg::simplecache::s3://b/x.zip", "/m", "zip://a.jpg::simplecache::s3://b/x.zip"),
        ("zip://a.jpg::pics.zip", "s3://b/m", "zip://a.jpg::s3://b/m/pics.zip"),
        ("a.jpg", "zip://d::file:///m/pics.zip", "zip://d/a.jpg::file:///m/pics.zip"),
        ("s3://bucket/a::b.jpg", "/m", "s3://bucket/a::b.jpg"),
        ("https://h/a?arn=arn:aws:s3:::bucket", "/m", "https://h/a?arn=arn:aws:s3:::bucket"),
        ("zip://a.tar::x.zip!tar:0+9!a.jpg", "/m", "zip://a.tar::file:///m/x.zip!tar:0+9!a.jpg"),
    ],
)
def test_every_link_of_a_chain_starts_at_the_manifest(image: str, base: str, resolved: str) -> None:
    assert resolve(image, base) == resolved
    assert resolve(resolved, "/elsewhere") == resolved


def test_the_archive_beside_the_manifest_is_read_wherever_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    pack(tmp_path / "pics.zip", {"d/a.png": content(1)})
    pack(tmp_path / "elsewhere" / "pics.zip", {"d/a.png": content(2)})
    monkeypatch.chdir(tmp_path / "elsewhere")
    expected = picture(30, 20, seed=1).tobytes()
    for image in ("zip://d/a.png::pics.zip", f"zip://d/a.png::{tmp_path}/pics.zip"):
        assert decode(resolve(image, str(tmp_path))).image.tobytes() == expected


def test_a_run_elsewhere_takes_the_archive_beside_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    pack(tmp_path / "pics.zip", {"d/a.png": content(1)})
    pack(tmp_path / "elsewhere" / "pics.zip", {"d/a.png": content(2)})
    images = ["zip://d/a.png::pics.zip", f"zip://d/a.png::{tmp_path}/pics.zip", "zip://d/a.png::elsewhere/pics.zip"]
    manifest = write_manifest(tmp_path / "m.jsonl", [{"id": image, "image": image} for image in images])
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert encode(manifest, tmp_path / "out").failed == 0
    hashes = parquet.read_table(tmp_path / "out" / "index.parquet")["content_hash"].to_pylist()
    first, other = (f"sha256:{hashlib.sha256(content(seed)).hexdigest()}" for seed in (1, 2))
    assert hashes == [first, first, other]


def test_an_image_in_a_tar_in_a_zip(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("a.png")
        member.size = len(content(3))
        tar.addfile(member, io.BytesIO(content(3)))
    pack(tmp_path / "x.zip", {"a.tar": buffer.getvalue()})
    image = name_in_tar("zip://a.tar::x.zip", 512, len(content(3)), "a.png")
    assert decode(resolve(image, str(tmp_path))).image.tobytes() == picture(30, 20, seed=3).tobytes()


LOOK_ALIKES = [
    "a!tar:1+2!x",
    "a.parquet!parquet:0!image",
    "s3:/bucket/a.png",
    "s3://bucket/a.png",
    "https:/host/a.png",
    "zip://d/a.png::pics.zip",
    "data:1.png",
    "data:image/png,AAAA",
    "file:/a.png",
]


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_file_comes_before_an_address_that_looks_like_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content(4))
    source = resolve(name, str(tmp_path))
    assert source == str(path)
    assert split(source) == (str(path), None)
    assert decode(source).image.tobytes() == picture(30, 20, seed=4).tobytes()


@pytest.mark.parametrize("name", [name for name in LOOK_ALIKES if ":/" not in name or "://" in name])
def test_an_address_without_such_a_file_is_an_address(name: str, tmp_path: Path) -> None:
    source = resolve(name, str(tmp_path))
    assert split(source) != (str(tmp_path / name), None)


def test_what_is_meant_in_a_file() -> None:
    assert split("/a.tar!tar:5+6!x!y") == ("/a.tar", TarMember(5, 6))
    assert split("/a.parquet!parquet:7!image.bytes") == ("/a.parquet", TableCell(7, "image.bytes"))
    assert split("s3://b/a.tar!tar:5+6!x") == ("s3://b/a.tar", TarMember(5, 6))
    assert split("/a.tar!tar:x+6!y") == ("/a.tar!tar:x+6!y", None)
    assert split("data:,a!tar:5+6!x") == ("data:,a!tar:5+6!x", None)
    assert split(name_in_table("t.parquet", 3, "a!b")) == ("t.parquet", TableCell(3, "a!b"))
