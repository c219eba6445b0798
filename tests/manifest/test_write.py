"""write.py and `manifest`: what people have becomes a manifest that encode reads to the same items."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Run, picture, png_bytes, write_manifest

from kimik3_prep.errors import InputError
from kimik3_prep.images.address import resolve
from kimik3_prep.images.decode import FORMATS
from kimik3_prep.images.source import read_whole
from kimik3_prep.manifest import magic
from kimik3_prep.manifest.magic import SUFFIXES
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.manifest.row import Selection
from kimik3_prep.manifest.write import Gathered, Wishes, gather

JPEG = b"\xff\xd8\xff"  # as much of an image as is looked at without --size


def wishes(source: object, **more: Any) -> Wishes:
    chosen = {name: more.pop(name) for name in ("image_fields", "id_fields", "number_rows") if name in more}
    return Wishes(str(source), select=Selection(**chosen), **more)


def made(source: object, **more: Any) -> tuple[list[dict[str, Any]], Gathered]:
    """The rows of a manifest, and what is said of it."""
    gathered, lines = gather(wishes(source, **more))
    return [json.loads(line) for line in lines], gathered


def problems(source: object, **more: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        gather(wishes(source, **more))
    return [str(problem).removeprefix(f"{source}:") for problem in caught.value.problems]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(JPEG)


def counts(gathered: Gathered) -> dict[str, int]:
    return {each.kind: each.count for each in gathered.passed_over}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- folders ------------------------------------------------------------------------------------------------------


def test_a_folder(folder: Path) -> None:
    touch(folder / "in", "b.JPG", "a/z.png", "a.webp", "a/ü x.tif", "data:1.gif", "c.txt", "a/video.mp4", "noext")
    touch(folder / "in", ".hidden.png", ".git/x.png", "a/.cache/y.png")
    rows, found = made("in")
    ids = ["a/z.png", "a/ü x.tif", "a.webp", "b.JPG", "data:1.gif"]
    assert rows == [{"id": id, "image": f"in/{id}"} for id in ids]
    assert (found.of, found.items, found.rows) == ("files", 5, 5)
    assert counts(found) == {".txt files": 1, ".mp4 files": 1, "files without a suffix": 1}
    inside, _ = made("in", output=folder / "in" / "m.jsonl")
    assert [row["image"] for row in inside] == [*ids[:4], "./data:1.gif"]
    absolute, _ = made("in", absolute=True, number_rows=True)
    paths = [str(folder / "in" / id) for id in ids]
    assert absolute == [{"id": str(n), "image": paths[n], "row_id": id} for n, id in enumerate(ids)]


def test_the_manifest_names_files_from_where_it_lies(folder: Path) -> None:
    touch(folder / "in", "a.png", "b/data:.png")
    os.makedirs(folder / "other" / "place")
    for output in ("m.jsonl", "in/m.jsonl", "in/b/m.jsonl", "other/place/m.jsonl", "other/place/m.jsonl.gz"):
        found, _ = gather(Wishes("in", Path(output)))
        assert found.output == output
        manifest = read_manifest(output)
        assert manifest.items["id"].to_pylist() == ["a.png", "b/data:.png"]
        for image, name in zip(manifest.items["image"].to_pylist(), ("a.png", "b/data:.png"), strict=True):
            assert resolve(image, manifest.base) == str(folder / "in" / name)
    packed = (folder / "other/place/m.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == (folder / "other/place/m.jsonl").read_bytes()
    gather(Wishes("in", Path("other/place/m.jsonl.gz"), overwrite=True))
    assert (folder / "other/place/m.jsonl.gz").read_bytes() == packed


def test_links_to_folders(folder: Path) -> None:
    """Followed once where they lead elsewhere; not into the folder, not above it, not round in a circle."""
    touch(folder / "in", "real/a.png")
    touch(folder / "elsewhere", "b.png", "sub/c.png")
    os.symlink("../in/real", folder / "in" / "inside")
    os.symlink("..", folder / "in" / "above")
    os.symlink(".", folder / "in" / "self")
    os.symlink(folder / "elsewhere", folder / "in" / "link")
    os.symlink(folder / "elsewhere", folder / "in" / "link2")
    os.symlink("..", folder / "elsewhere" / "sub" / "round")
    os.symlink("../in", folder / "elsewhere" / "back")
    os.symlink("loop.png", folder / "in" / "loop.png")
    os.symlink("nothing.png", folder / "in" / "broken.png")
    os.symlink("real/a.png", folder / "in" / "file.png")
    os.mkfifo(folder / "in" / "pipe.png")
    rows, found = made("in")
    assert [row["id"] for row in rows] == ["file.png", "link/b.png", "link/sub/c.png", "real/a.png"]
    others = {"links that lead nowhere": 2, "pipes, sockets and devices": 1}
    assert counts(found) == {"folder links": 6, **others}


def test_suffixes_are_those_of_the_decoders() -> None:
    assert {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jp2", ".ppm"} <= SUFFIXES
    assert SUFFIXES.isdisjoint({".eps", ".pdf", ".svg", ".mp4", ".psd", ".txt", ".heic"})
    assert set(FORMATS) <= {magic.Image.EXTENSION[suffix] for suffix in SUFFIXES}


def test_what_a_folder_does_not_hold(folder: Path) -> None:
    (folder / "in").mkdir()
    assert problems("in")[0].startswith(" the manifest has no items")
    touch(folder / "in", "a.png", "b.heic")
    os.close(os.open(os.fsencode(folder / "in") + b"/\xff.png", os.O_CREAT))
    rows, found = made("in")
    assert ([row["id"] for row in rows], counts(found)) == (
        ["a.png"],
        {"files whose names are not UTF-8": 1, ".heic files": 1},
    )
    assert problems("nothing") == [" cannot read the manifest: No such file or directory"]


def test_sizes_are_read_from_headers(folder: Path) -> None:
    picture(50, 40).save(folder / "a.png")
    touch(folder, "b.png")
    rows, found = made(".", size=True)
    assert rows == [{"id": "a.png", "image": "a.png", "width": 50, "height": 40}, {"id": "b.png", "image": "b.png"}]
    assert found.sizes_unknown == 1
    own = write_manifest(folder / "m.jsonl", [{"url": "https://x/a.png"}, {"url": "a.png", "width": 1, "height": 2}])
    assert [row.get("width") for row in made(own, size=True)[0]] == [None, 1]


# --- rows ---------------------------------------------------------------------------------------------------------


def test_a_metadata_file(folder: Path) -> None:
    """Hugging Face's image folders; the other fields stay."""
    touch(folder / "data", "a.jpg", "b/c.jpg")
    rows = [{"file_name": "a.jpg", "text": "A"}, {"file_name": "b/c.jpg", "text": "C", "objects": {"bbox": [1]}}]
    write_manifest(folder / "data" / "metadata.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows[:1]), folder / "data" / "metadata.parquet")
    (folder / "data" / "metadata.csv").write_text("file_name,text\na.jpg,A\n")
    wanted = [
        {"id": "a.jpg", "image": "data/a.jpg", "text": "A"},
        {"id": "b/c.jpg", "image": "data/b/c.jpg", "text": "C", "objects": {"bbox": [1]}},
    ]
    assert made("data/metadata.jsonl") == (wanted, Gathered(output=None, of="rows", items=2, rows=2))
    assert made("data/metadata.parquet")[0] == made("data/metadata.csv")[0] == wanted[:1]
    numbered, _ = made("data/metadata.jsonl", number_rows=True)
    assert [row["id"] for row in numbered] == ["0", "1"]
    assert made("data")[0] == wanted[:1] + wanted[1:]


def test_rows_with_several_images(folder: Path) -> None:
    """LLaMA-Factory, ms-swift, ShareGPT: one list of a file, `images` in its rows."""
    rows = [
        {"id": 7, "images": ["a.jpg", {"path": "b.jpg", "bytes": None}, {"url": "https://x/c"}], "messages": [1]},
        {"id": "no", "images": []},
        {"messages": [2]},
        {"images": ["a.jpg", "a.jpg"], "width": [1, 2], "type": "chat", "row_type": 1},
        {"id": "one", "images": {"path": "/d.jpg"}, "type": "chat"},
        {"id": "two", "image": "e.jpg", "features": "x", "modality": "image"},
        {"key": "three", "image": "e.jpg", "width": 640, "height": 480, "images": []},
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    found, told = made("rows.json")
    assert found == [
        {"id": "7#0", "image": "a.jpg", "messages": [1], "row_id": 7},
        {"id": "7#1", "image": "b.jpg", "messages": [1], "row_id": 7},
        {"id": "7#2", "image": "https://x/c", "messages": [1], "row_id": 7},
        {"id": "3#0", "image": "a.jpg", "row_type": 1, "row_width": [1, 2], "row_row_type": "chat"},
        {"id": "3#1", "image": "a.jpg", "row_type": 1, "row_width": [1, 2], "row_row_type": "chat"},
        {"id": "one", "image": "/d.jpg", "type": "chat"},
        {"id": "two", "image": "e.jpg", "features": "x"},
        {"id": "three", "image": "e.jpg", "width": 640, "height": 480, "images": []},
    ]
    assert (told.items, told.rows, counts(told)) == (8, 7, {"rows without an image": 2})
    (warning,) = told.warnings
    assert warning.what.startswith(f'of the first 7 files none is there, such as "{folder}/a.jpg"')
    direct = read_manifest("rows.json").items.drop_columns(["line"])
    again = read_manifest(str(write_manifest(folder / "m.jsonl", found))).items.drop_columns(["line"])
    assert again.equals(direct), "encode reads what was written to the same items as the source"


def test_fields_are_chosen_and_may_be_nested(folder: Path) -> None:
    rows = [{"a": {"b": "x.jpg"}, "m": {"n": 5.0}, "a.b": None}, {"a": {"b": ["y.jpg"]}, "m": {"n": "q"}, "id": "own"}]
    write_manifest(folder / "m.jsonl", [{"a": rows[0]["a"], "m": rows[0]["m"]}, rows[1]])
    found, _ = made("m.jsonl", image_fields=("a.b",), id_fields=("m.n",))
    assert [(row["id"], row["image"]) for row in found] == [("5", "x.jpg"), ("q#0", "y.jpg")]
    assert (found[0]["a"], found[1]["row_id"]) == ({"b": "x.jpg"}, "own")
    numbered, _ = made("m.jsonl", image_fields=("a.b",), number_rows=True)
    assert [row["id"] for row in numbered] == ["0", "1#0"]


def test_relative_paths_start_where_one_says(folder: Path) -> None:
    touch(folder / "pictures", "a.jpg")
    (folder / "lists").mkdir()
    write_manifest(folder / "lists" / "m.jsonl", [{"image": "a.jpg"}])
    found, told = made("lists/m.jsonl", image_dir="pictures", output=Path("lists/out.jsonl"))
    assert (found, told.warnings) == ([{"id": "a.jpg", "image": "../pictures/a.jpg"}], ())
    _, told = made("lists/m.jsonl")
    (warning,) = told.warnings
    assert warning.what.startswith(f'of the first 1 files none is there, such as "{str(folder)[:20]}')
    assert (warning.severity, "--image-dir" in warning.hint) == ("warning", True)


def test_everything_wrong_with_the_rows_is_said_at_once(folder: Path) -> None:
    rows = [
        '{"id": "a", "image": "a.jpg"}',
        '{"id": "a", "image": "b.jpg"}',
        '{"id": {}, "image": "b.jpg"}',
        '{"id": "c", "image": 5}',
        '{"id": "d", "images": ["x.jpg", {"bytes": "AA"}, null]}',
        '{"id": "e", "image": "clip.mp4"}',
        '{"id": "f", "image": "f.jpg",}',
        '{"id": "d#0", "image": "b.jpg"}',
    ]
    (folder / "m.jsonl").write_text("\n".join(rows))
    told = problems("m.jsonl", output=folder / "out.jsonl")
    assert [text.split("; ")[0] for text in told][:3] == [
        "3: id is {}",
        "4: image is 5",
        '6: image "clip.mp4": Kimi-K3 encoder mode supports image input only',
    ]
    assert told[3].startswith("7: not JSON: ")
    assert told[4].startswith('2: id "a" stands on line 1 already')
    assert told[5].startswith('8: id "d#0" stands on line 5 already')
    assert not (folder / "out.jsonl").exists()
    (folder / "one-line.json").write_text(f"[{rows[0]},{rows[1]}]")
    assert problems("one-line.json")[0].startswith('1: id "a" stands on line 1 already')


@pytest.mark.parametrize(
    ("content", "wishes", "told"),
    [
        (b"", {}, "the manifest has no items"),
        (b'{"img": "a", "q": 1}', {}, 'which field it is; the rows have "img", "q"'),
        (b'{"image": "a.jpg"}', {"image_fields": ("img",)}, "no row names an image; expected img"),
        (b'{"image": "a.jpg"}', {"id_fields": ("uid",)}, "1: uid is missing"),
        (b"PAR1 and no more", {}, "cannot read the manifest: "),
        (b"\x1f\x8b\x08 cut", {}, "cannot read the manifest: "),
    ],
)
def test_what_is_wrong_with_a_file(folder: Path, content: bytes, wishes: dict[str, Any], told: str) -> None:
    (folder / "m").write_bytes(content)
    (problem,) = problems("m", **wishes)
    assert told in problem


def test_what_lies_in_a_table_or_a_tar_is_written_as_an_address(folder: Path) -> None:
    """No byte is lost: the address leads to the picture, from wherever the manifest lies."""
    (folder / "in").mkdir()
    (folder / "out").mkdir()
    content = png_bytes(40, 30)
    (folder / "in" / "a.png").write_bytes(content)
    with tarfile.open(folder / "in" / "x.tar", "w") as archive:
        archive.add(folder / "in" / "a.png", "a.png")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = {"image": pa.array([{"bytes": content, "path": "b.png"}], kind), "t": pa.array([0], pa.timestamp("s"))}
    pq.write_table(pa.table(table), folder / "in" / "x.parquet")
    for name, place in (("x.tar", "!tar:"), ("x.parquet", "!parquet:0!image.bytes")):
        (row,), _ = made(f"in/{name}", output=folder / "out" / f"{name}.jsonl")
        assert row["image"].startswith(f"../in/{name}{place}")
        manifest = read_manifest(f"out/{name}.jsonl")
        assert read_whole(resolve(manifest.items["image"][0].as_py(), manifest.base)).content == content
    assert (row["t"], row["image_path"]) == ("1970-01-01 00:00:00", "b.png")


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_and_then_encode(run: Run, tmp_path: Path) -> None:
    for number in range(3):
        picture(60, 50, seed=number).save(tmp_path / f"{number}.png")
    rows = [{"images": ["0.png", "1.png"], "q": "\u202ewhat?\x9b"}, {"q": "no image"}, {"images": ["0.png"]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows, ensure_ascii=False))
    done = run("manifest", "rows.json")
    assert (done.returncode, done.stderr) == (
        0,
        "passed over: rows without an image (1): rows.json:1:50\n3 items of 3 rows\n",
    )
    lines = done.stdout.splitlines()
    assert lines[0] == '{"id": "0#0", "image": "0.png", "q": "\\u202ewhat?\\u009b"}'
    assert run("manifest", "-", input=(tmp_path / "rows.json").read_text()).stdout == done.stdout
    saved = run("manifest", "rows.json", "-o", "m.jsonl", "--format", "json")
    assert (json.loads(saved.stdout)["items"], saved.stderr) == (3, "")
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").open()] == [json.loads(line) for line in lines]
    again = run("manifest", "rows.json", "-o", "m.jsonl")
    assert (again.returncode, "m.jsonl: exists already" in again.stderr) == (2, True)
    assert (
        run("manifest", ".", "-o", "m.jsonl", "--overwrite").stderr
        == "passed over: .jsonl files (1): m.jsonl\npassed over: .json files (1): rows.json\n3 items, in m.jsonl\n"
    )
    assert run("manifest", "rows.json", "-o", "m.jsonl", "--overwrite").returncode == 0
    encoded = run("encode", "m.jsonl", "--config", "kimi-k3", "-o", "out")
    assert (encoded.returncode, "3 of 3 items ok, 0 failed; 2 images stored" in encoded.stdout) == (0, True)
    extra = pq.read_table(tmp_path / "out" / "index.parquet")["extra"].to_pylist()
    assert (json.loads(extra[1]), extra[2]) == ({"q": rows[0]["q"]}, None)


def test_the_command_refuses_in_words(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('[{"image": "a.jpg", "id": "x"}, 5]')
    refused = run("manifest", "rows.json", "-o", "m.jsonl", "--format", "json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["problems"][0]["where"] == "rows.json:1:33"
    both = run("manifest", "rows.json", "--format", "json")
    assert (both.returncode, "add --output FILE" in both.stdout) == (2, True)
    assert not (tmp_path / "m.jsonl").exists()
