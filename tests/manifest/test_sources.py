"""Every kind of source through the real command: as many items as there are pictures, and the bytes of each."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import io
import json
import lzma
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Run, png_bytes
from stores import Store

from kimik3_prep.images.address import resolve
from kimik3_prep.images.source import read_whole
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.manifest.write import Wishes, gather

PICTURES = {f"{n}.png": png_bytes(40 + n, 30, seed=n) for n in range(3)}
NAMES = list(PICTURES)
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
ROWS = [{"image": f"img/{name}", "caption": f"c{n}"} for n, name in enumerate(NAMES)]
TABLE = pa.table({"image": pa.array([{"bytes": PICTURES[name], "path": name} for name in NAMES], IMAGE)})


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def tar(path: Path, names: list[str]) -> bytes:
    with tarfile.open(path, "w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(PICTURES[name])
            archive.addfile(info, io.BytesIO(PICTURES[name]))
    return path.read_bytes()


def cells(separator: str) -> bytes:
    lines = ["file_name" + separator + "caption", *(row["image"] + separator + row["caption"] for row in ROWS)]
    return "\r\n".join(lines).encode()


def arrow(path: Path, new: Callable[..., Any]) -> None:
    with new(path, TABLE.schema) as writer:
        writer.write_table(TABLE)


def save_to_disk(folder: Path) -> None:
    for split in ("test", "train"):
        (folder / split).mkdir(parents=True)
    arrow(folder / "test" / "data-00000-of-00001.arrow", pa.ipc.new_stream)
    (folder / "test" / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (folder / "train" / "state.json").write_text('{"_data_files": []}')
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def image_folder(folder: Path, metadata: str) -> None:
    shutil.copytree(folder.parent / "img", folder / "train")
    rows = [{"file_name": name, "caption": f"c{n}"} for n, name in enumerate(NAMES)]
    path = folder / "train" / f"metadata.{metadata}"
    if metadata == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif metadata == "csv":
        path.write_text("file_name,caption\n" + "".join(f"{r['file_name']},{r['caption']}\n" for r in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PRETTY = json.dumps({"info": {"year": 1}, "images": [{"id": n, "file_name": r["image"]} for n, r in enumerate(ROWS)]})
BASE64 = ["index\timage", *(f"{n}\t{base64.b64encode(PICTURES[name]).decode()}" for n, name in enumerate(NAMES))]

#: What is written where, and what is then given to the command.
SOURCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "JSON Lines": (lambda f: (f / "x").write_bytes(LINES), "x"),
    "a JSON list": (lambda f: (f / "x").write_text(json.dumps(ROWS, indent=1)), "x"),
    "COCO": (lambda f: (f / "x").write_text(json.dumps(json.loads(PRETTY), indent=1)), "x"),
    "CSV": (lambda f: (f / "x").write_bytes(cells(",")), "x"),
    "TSV": (lambda f: (f / "x").write_bytes(cells("\t")), "x"),
    "semicolons": (lambda f: (f / "x").write_bytes(b"sep=;\r\n" + cells(";")), "x"),
    "UTF-16": (lambda f: (f / "x").write_bytes(cells(",").decode().encode("utf-16")), "x"),
    "base64 in TSV": (lambda f: (f / "x").write_text("\n".join(BASE64)), "x"),
    "a path a line": (lambda f: (f / "x").write_text("".join(f"{row['image']} 7\n" for row in ROWS)), "x"),
    "gzip": (lambda f: (f / "x").write_bytes(gzip.compress(LINES)), "x"),
    "bz2": (lambda f: (f / "x").write_bytes(bz2.compress(LINES)), "x"),
    "xz": (lambda f: (f / "x").write_bytes(lzma.compress(LINES)), "x"),
    "zstd": (lambda f: (f / "x").write_bytes(zstd(LINES)), "x"),
    "Parquet": (lambda f: pq.write_table(TABLE, f / "x"), "x"),
    "an Arrow stream": (lambda f: arrow(f / "x", pa.ipc.new_stream), "x"),
    "an Arrow file": (lambda f: arrow(f / "x", pa.ipc.new_file), "x"),
    "save_to_disk": (lambda f: save_to_disk(f / "x"), "x"),
    "a tar": (lambda f: tar(f / "x", NAMES), "x"),
    "a tar in gzip": (lambda f: (f / "x").write_bytes(gzip.compress(tar(f / "y", NAMES))), "x"),
    "a tar in zstd": (lambda f: (f / "x").write_bytes(zstd(tar(f / "y", NAMES))), "x"),
    "tars one behind the other": (
        lambda f: (f / "x").write_bytes(tar(f / "y", NAMES[:2]) + tar(f / "y", NAMES[2:])),
        "x",
    ),
    "braces": (lambda f: [tar(f / f"x-{n}.tar", [name]) for n, name in enumerate(NAMES)], "x-{0..2}.tar"),
    "a pattern": (lambda f: [tar(f / f"x-{n}.tar", [name]) for n, name in enumerate(NAMES)], "x-*.tar"),
    "a pattern of pictures": (lambda f: None, "img/*.png"),
    "a folder of tars": (lambda f: [(f / "x").mkdir(), *(tar(f / "x" / f"{n[0]}.tar", [n]) for n in NAMES)], "x"),
    "a folder of tables": (lambda f: [(f / "x").mkdir(), pq.write_table(TABLE, f / "x" / "a.parquet")], "x"),
    "a folder of pictures": (lambda f: None, "img"),
    "an image folder": (lambda f: image_folder(f / "x", "jsonl"), "x"),
    "an image folder with CSV": (lambda f: image_folder(f / "x", "csv"), "x"),
    "an image folder with Parquet": (lambda f: image_folder(f / "x", "parquet"), "x"),
    "a zip archive": (lambda f: archived(f), "x"),
    "one picture": (lambda f: None, "img/0.png"),
}


def archived(folder: Path) -> None:
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        for name, content in PICTURES.items():
            archive.writestr(name, content)
    (folder / "x").write_text("".join(json.dumps({"image": f"zip://{name}::x.zip"}) + "\n" for name in NAMES))


@pytest.mark.parametrize("name", SOURCES)
def test_every_source(name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`encode SOURCE` stores every picture, and what `manifest SOURCE` writes elsewhere names the same ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "img").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for file, content in PICTURES.items():
        (tmp_path / "img" / file).write_bytes(content)
    write, source = SOURCES[name]
    write(tmp_path)
    options = ["--config", "kimi-k3", "--backend", "cpu", "--dtype", "uint8", "--format", "json"]
    done = run("encode", source, *options, "-o", "out", "-j", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    names = NAMES[:1] if name == "one picture" else NAMES
    index = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()
    hashes = [f"sha256:{hashlib.sha256(PICTURES[file]).hexdigest()}" for file in names]
    assert [row["content_hash"] for row in index] == hashes
    gather(Wishes(source, Path("elsewhere/m.jsonl")))
    manifest = read_manifest("elsewhere/m.jsonl")
    assert manifest.items["id"].to_pylist() == [row["id"] for row in index]
    found = [read_whole(resolve(image, manifest.base)).content_hash for image in manifest.items["image"].to_pylist()]
    assert found == hashes


#: What lies below a prefix of a store.
PREFIXES: dict[str, Callable[[Path], Any]] = {
    "tars": lambda f: [tar(f / f"{n[0]}.tar", [n]) for n in NAMES],
    "tables": lambda f: pq.write_table(TABLE, f / "a.parquet"),
    "pictures": lambda f: [(f / name).write_bytes(content) for name, content in PICTURES.items()],
    "pictures and captions": lambda f: image_folder(f, "jsonl"),
    "a list": lambda f: [shutil.copytree(f.parent / "img", f / "img"), (f / "rows.jsonl").write_bytes(LINES)],
    "save_to_disk": save_to_disk,
}


@pytest.mark.parametrize(("name", "end"), list(zip(PREFIXES, ("", "/") * 3, strict=True)))
def test_every_prefix_of_a_store(
    name: str, end: str, tmp_path: Path, run: Run, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`encode s3://bucket/sets/x` stores the pictures below it, and none of what merely begins with that name."""
    monkeypatch.chdir(tmp_path)
    for folder in ("img", "x"):
        (tmp_path / folder).mkdir()
    for file, content in PICTURES.items():
        (tmp_path / "img" / file).write_bytes(content)
    PREFIXES[name](tmp_path / "x")
    for path in filter(Path.is_file, (tmp_path / "x").rglob("*")):
        s3.put(f"sets/{path.relative_to(tmp_path).as_posix()}", path.read_bytes())
    s3.put("sets/xylophone/other.png", png_bytes(50, 50, seed=9))
    options = ["--config", "kimi-k3", "--backend", "cpu", "--dtype", "uint8", "--format", "json"]
    done = run("encode", f"s3://bucket/sets/x{end}", *options, "-o", "out", "-j", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    index = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()
    assert [row["content_hash"] for row in index] == [
        f"sha256:{hashlib.sha256(content).hexdigest()}" for content in PICTURES.values()
    ]
    if "captions" in name:
        assert [json.loads(row["extra"])["caption"] for row in index] == ["c0", "c1", "c2"]
    gather(Wishes(f"s3://bucket/sets/x{end}", Path("m.jsonl")))
    assert read_manifest("m.jsonl").items["id"].to_pylist() == [row["id"] for row in index]
