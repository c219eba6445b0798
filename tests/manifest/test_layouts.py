"""The layouts that data sets come in, each read without any option: which images are found, under which names."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import png_bytes, write_manifest

from kimik3_prep.manifest.read import Manifest, read_manifest
from kimik3_prep.manifest.row import Selection

PNG = png_bytes(40, 30)
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"


def read(folder: Path, *rows: dict[str, Any], **select: Any) -> Manifest:
    return read_manifest(str(write_manifest(folder / "m.jsonl", list(rows))), select=Selection(**select))


def items(manifest: Manifest) -> list[tuple[str, str]]:
    """Ids and images."""
    return [(item["id"], item["image"]) for item in manifest.items.to_pylist()]


def extras(manifest: Manifest) -> list[dict[str, Any]]:
    return [json.loads(extra or "{}") for extra in manifest.items["extra"].to_pylist()]


def roles(manifest: Manifest) -> list[Any]:
    return [extra.get("role") for extra in extras(manifest)]


def test_llava(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "<image>\nsee b.jpg"}, {"from": "gpt", "value": "a cat"}]
    rows = [{"id": "1", "image": "coco/a.jpg", "conversations": talk}, {"id": "2", "conversations": talk[1:]}]
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    manifest = read_manifest(str(tmp_path / "llava.json"))
    assert items(manifest) == [("1", "coco/a.jpg")]
    assert extras(manifest) == [{"conversations": talk}]
    assert [(each.kind, each.count) for each in manifest.passed_over] == [("rows without an image", 1)]


def test_llava_with_several_images(tmp_path: Path) -> None:
    assert items(read(tmp_path, {"id": "1", "image": ["a.jpg", "b"], "conversations": []})) == [
        *(("1#0", "a.jpg"), ("1#1", "b"))
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a"},
        {"type": "image", "path": "a"},
        {"type": "image_url", "image_url": {"url": "a"}},
        {"type": "image_url", "image_url": "a"},
        {"type": "input_image", "image_url": "a"},
        {"type": "image", "url": "a"},
    ],
)
def test_chat_messages(tmp_path: Path, part: dict[str, Any]) -> None:
    """OpenAI, Hugging Face and Qwen: parts of a message that say they are images."""
    parts = [{"type": "text", "text": "b.jpg"}, part, {"type": "text", "text": "and c.jpg"}, part]
    row = {"messages": [{"role": "system", "content": "d.jpg"}, {"role": "user", "content": parts}]}
    manifest = read(tmp_path, {"messages": []}, row)
    assert items(manifest) == [("1#0", "a"), ("1#1", "a")]
    assert roles(manifest) == ["messages[1].content[1]", "messages[1].content[3]"]
    assert extras(manifest)[0]["messages"] == row["messages"], "the conversation stays whole"


def test_pictures_inside_chat_messages_are_stored_once(tmp_path: Path) -> None:
    """Anthropic's base64 sources and OpenAI's data: URLs; the conversation keeps a short name of each."""
    source = {"type": "base64", "media_type": "image/png", "data": TEXT}
    for part in ({"type": "image", "source": source}, {"type": "image_url", "image_url": {"url": URL}}):
        manifest = read(tmp_path, {"messages": [{"role": "user", "content": [part]}]})
        ((id, image),) = items(manifest)
        assert (id, image.rpartition(",")[2]) == ("0#0", TEXT)
        assert TEXT[:80] not in manifest.items["extra"][0].as_py()


def test_sharegpt_and_llama_factory(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "<image>"}], "images": ["a", "b.png"], "videos": []}
    assert items(read(tmp_path, row)) == [("0#0", "a"), ("0#1", "b.png")]


def test_obelics(tmp_path: Path) -> None:
    rows = [
        {"images": ["https://x/a", None, "https://x/b"], "texts": [None, "text", None], "url": "https://page"},
        {"images": [None], "texts": ["text"], "url": None},
    ]
    for manifest in (read(tmp_path, *rows), _parquet(tmp_path, {key: [r[key] for r in rows] for key in rows[0]})):
        assert items(manifest) == [("0#0", "https://x/a"), ("0#2", "https://x/b")]
        assert [each.count for each in manifest.passed_over] == [1]


def test_mmc4(tmp_path: Path) -> None:
    """The address of the page is no picture; a picture's file comes before its address."""
    info = [{"image_name": f"{n}.jpg", "raw_url": f"https://x/{n}.jpg", "matched_sim": 0.3} for n in "ab"]
    row = {"url": "https://page/of/text", "text_list": ["a.jpg"], "image_info": info}
    manifest = read(tmp_path, {**row, "text_list": ["one", "two"]})
    assert items(manifest) == [("0#0", "a.jpg"), ("0#1", "b.jpg")]
    assert roles(manifest) == ["image_info[0].image_name", "image_info[1].image_name"]
    assert extras(manifest)[0]["url"] == "https://page/of/text"
    chosen = read(tmp_path, row, image_fields=("image_info[*].raw_url",))
    assert items(chosen) == [("0#0", "https://x/a.jpg"), ("0#1", "https://x/b.jpg")]


def test_coco(tmp_path: Path) -> None:
    images = [{"id": n, "file_name": f"{n}.jpg", "width": 4, "height": 3, "coco_url": "http://x/0"} for n in (5, 6)]
    document = {"info": {}, "annotations": [{"image_id": 5, "id": 1, "caption": "x"}], "images": images}
    (tmp_path / "instances.json").write_text(json.dumps(document))
    manifest = read_manifest(str(tmp_path / "instances.json"))
    assert items(manifest) == [("5", "5.jpg"), ("6", "6.jpg")]
    assert manifest.items["width"].to_pylist() == [4, 4]
    assert [(each.kind, each.count) for each in manifest.passed_over] == [('entries of "annotations"', 1)]


def _parquet(folder: Path, columns: dict[str, Any], **select: Any) -> Manifest:
    pq.write_table(pa.table(columns), folder / "m.parquet")
    return read_manifest(str(folder / "m.parquet"), select=Selection(**select))


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(path: str | None = None) -> dict[str, Any]:
    return {"bytes": PNG, "path": path}


def test_mmmu(tmp_path: Path) -> None:
    """Columns of pictures, most of them empty: each is an item that names its column."""
    columns = {"id": ["a", "b"], "image_1": pa.array([picture("p"), picture()], IMAGE)}
    columns |= {"image_2": pa.array([None, picture()], IMAGE), "image_3": pa.nulls(2, IMAGE)}
    manifest = _parquet(tmp_path, columns)
    assert items(manifest) == [
        ("a#0", "m.parquet!parquet:0!image_1.bytes"),
        ("b#0", "m.parquet!parquet:1!image_1.bytes"),
        ("b#1", "m.parquet!parquet:1!image_2.bytes"),
    ]
    assert roles(manifest) == ["image_1", "image_1", "image_2"]
    chosen = _parquet(tmp_path, columns, image_fields=("image_2",))
    assert items(chosen) == [("b", "m.parquet!parquet:1!image_2.bytes")]


@pytest.mark.parametrize(
    ("values", "images"),
    [
        (pa.array([PNG, None]), ["0!pixels"]),
        (pa.array([PNG, b"\x00hash"]), ["0!pixels", "1!pixels"]),
        (pa.array([picture(), None], IMAGE), ["0!pixels.bytes"]),
        (pa.array([[PNG, None, PNG], []]), ["0!pixels[0]", "0!pixels[2]"]),
        (pa.array([[picture(), picture()], None], pa.list_(IMAGE)), ["0!pixels[0].bytes", "0!pixels[1].bytes"]),
        (pa.array([TEXT, None]), ["0!pixels"]),
    ],
)
@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_columns_are_images_by_what_they_hold(tmp_path: Path, values: pa.Array, images: list[str], form: str) -> None:
    """Whatever the column is called. A binary column of something else is left out, and a warning names it."""
    from kimik3_prep.images.address import resolve
    from kimik3_prep.images.source import read_whole

    table = pa.table({"pixels": values, "digest": [b"\x01\x02", b"\x03\x04"], "word": ["a.jpg", "b.jpg"]})
    path = tmp_path / "t"
    if form == "parquet":
        pq.write_table(table, path)
    else:
        with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table)
    manifest = read_manifest(str(path))
    assert [image.removeprefix("t!parquet:") for image in manifest.items["image"].to_pylist()] == images
    assert ["digest" in warning.what for warning in manifest.warnings] == [True]
    assert extras(manifest)[0]["word"] == "a.jpg"
    if "1!pixels" not in images:
        for image in manifest.items["image"].to_pylist():
            assert read_whole(resolve(image, manifest.base)).content == PNG


def test_webdataset_and_img2dataset(tmp_path: Path) -> None:
    """Tars of pictures, captions and metadata, beside tables of what was downloaded."""
    for shard in range(2):
        with tarfile.open(tmp_path / f"0000{shard}.tar", "w") as archive:
            for number in range(2):
                key = f"0000{shard}000{number}"
                meta = json.dumps({"url": "https://x/a.jpg", "width": 40}).encode()
                for suffix, content in (("jpg", PNG), ("json", meta), ("txt", b"a cat")):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
        pq.write_table(pa.table({"url": ["https://x/a.jpg"], "key": ["0"]}), tmp_path / f"0000{shard}.parquet")
        (tmp_path / f"0000{shard}_stats.json").write_text("{}")
    manifests = [read_manifest(str(tmp_path / name)) for name in ("", "0000{0..1}.tar", "*.tar")]
    for manifest in manifests:
        assert [id for id, _ in items(manifest)] == ["000000000", "000000001", "000010000", "000010001"]
        assert extras(manifest)[3] == {"json": {"url": "https://x/a.jpg", "width": 40}, "txt": "a cat"}
    assert {each.kind: each.count for each in manifests[0].passed_over} == {".parquet files": 2, ".json files": 2}


def test_names_in_several_columns(tmp_path: Path) -> None:
    row = {"id": "x", "before": "a.png", "after": "b.png", "page": "https://host/page", "note": "see c.png, or not"}
    manifest = read(tmp_path, row)
    assert (items(manifest), roles(manifest)) == ([("x#0", "a.png"), ("x#1", "b.png")], ["before", "after"])
    numbered = [{"image_1": "a.png", "image_2": None, "image_3": "c.png"}, {"image_1": "d.png", "image_2": ""}]
    assert items(read(tmp_path, *numbered)) == [("0#0", "a.png"), ("0#2", "c.png"), ("1#0", "d.png")]


def test_a_page_is_a_picture_only_where_nothing_else_is(tmp_path: Path) -> None:
    page = "https://host/article"
    assert items(read(tmp_path, {"url": page})) == [(page, page)]
    assert items(read(tmp_path, {"url": page, "photo": "a.jpg"})) == [("a.jpg", "a.jpg")]
    assert items(read(tmp_path, {"url": page, "image_url": "https://cdn/1"})) == [("https://cdn/1", "https://cdn/1")]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (("messages[*].content[*].image",), [("7#0", "a"), ("7#1", "b")]),
        (("messages[1].content[0].image",), [("7#0", "b")]),
        (("messages.content.image",), [("7#0", "a"), ("7#1", "b")]),
        (("meta.thumb", "list"), [("7#0", "t"), ("7#1", "x"), ("7#3", "y")]),
        (("list",), [("7#0", "x"), ("7#2", "y")]),
        (("meta.thumb",), [("7", "t")]),
        (("a.b",), [("7", "dotted")]),
    ],
)
def test_fields_that_a_person_chooses(tmp_path: Path, fields: tuple[str, ...], found: list[tuple[str, str]]) -> None:
    row = {
        **{"id": 7, "image": "no.jpg", "meta": {"thumb": "t"}, "list": ["x", None, "y"], "a.b": "dotted"},
        "messages": [{"content": [{"image": "a"}, {"text": "q"}]}, {"content": [{"image": "b"}]}],
    }
    manifest = read(tmp_path, row, image_fields=fields)
    assert items(manifest) == found
    assert extras(manifest)[0]["row_image"] == "no.jpg"


def test_ids_from_several_fields(tmp_path: Path) -> None:
    rows = [{"set": "a", "n": 1.0, "image": "x"}, {"set": "a", "n": 2.0, "image": "x"}]
    assert [id for id, _ in items(read(tmp_path, *rows, id_fields=("set", "n")))] == ["a/1", "a/2"]
    assert [id for id, _ in items(read(tmp_path, *rows, number_rows=True))] == ["0", "1"]
