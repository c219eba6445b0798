"""text.py: rows in JSON, in cells under a header, and a path a line, each with its place."""

from __future__ import annotations

import base64
import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import png_bytes

from kimik3_prep.errors import InputError
from kimik3_prep.manifest.read import Manifest, read_manifest
from kimik3_prep.manifest.row import Selection

ROWS = [
    {"image": "a", "n": 1, "b": [{"c": "é, [x] \n"}]},
    {"image": "b"},
    {"image": "c", "n": None},
]


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd,
}


def read(folder: Path, content: bytes | str, **select: Any) -> Manifest:
    path = folder / "source"  # no suffix: the bytes say what it is
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_manifest(str(path), select=Selection(**select))


def rows(manifest: Manifest) -> list[dict[str, Any]]:
    """The rows as their source had them."""
    return [{"image": item["image"], **json.loads(item["extra"] or "{}")} for item in manifest.items.to_pylist()]


def problems(folder: Path, content: bytes | str) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(folder, content)
    return [f"{p.where.removeprefix(f'{folder}/source:')}: {p.what}" for p in caught.value.problems]


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize(
    "text",
    [
        "\n".join(map(json.dumps, ROWS)),
        json.dumps(ROWS),
        "\ufeff \n" + json.dumps(ROWS, indent=1),
        json.dumps(ROWS, ensure_ascii=False, separators=(",", ":")),
        "\n[" + ",\n\n ".join(map(json.dumps, ROWS)) + "]\n",
    ],
)
def test_json_lines_and_lists(tmp_path: Path, text: str, packing: str) -> None:
    manifest = read(tmp_path, PACKED[packing](text.encode()))
    assert rows(manifest) == ROWS
    lines = [line.lstrip("[ \ufeff").startswith("{") for line in text.split("\n")]
    assert all(lines[item["line"] - 1] for item in manifest.items.to_pylist())


@pytest.mark.parametrize("text", ["[]", " [ ] ", "[\n]"])
def test_a_list_of_nothing(tmp_path: Path, text: str) -> None:
    assert problems(tmp_path, text) == [f"{tmp_path}/source: the manifest has no items"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            '[{"image": 1},\n 2, {"image": "a"},\n [4]]',
            ["1:2: image is 1", "2:2: a row that is a num", "3:2: a row"],
        ),
        ('[{"image": "a"},]', ["1"]),  # where, and in which words, is Python's
        ('[{"image": "a"}\n', ["2:1: not JSON: "]),
        ('[{"image": "a", "a": 1, "a": 2}]', ["1:2: the key"]),
        ('[,{"image": 1}]', ["1:2: "]),
        ('[{"image": "a"} {"image": "b"}]', ["1:17: "]),
        ('[{"image": "a"}] []', ["1:18: "]),
        ("[", ["1:2: "]),
        ("[\ufeff]", ["1:2: "]),
        ('[{"a": "\udce9"}]', ["1:9: the byte 0xe9 is not UTF-8"]),
    ],
)
def test_what_is_wrong_with_a_list(tmp_path: Path, text: str, found: list[str]) -> None:
    told = problems(tmp_path, text.encode("utf-8", "surrogateescape"))
    assert len(told) == len(found)
    for problem, start in zip(told, found, strict=True):
        assert problem.startswith(start)


def test_a_list_too_deep_for_python(tmp_path: Path) -> None:
    assert "deep in one another" in problems(tmp_path, f"[{'[' * 9000}")[0]


# --- cells ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("packing", ["plain", "gzip"])
def test_cells_under_a_header(tmp_path: Path, delimiter: str, encoding: str, packing: str) -> None:
    """Any separator and encoding, quotes, line breaks in a cell, and a cell longer than Python's own limit."""
    cells = [
        ["file_name", "width", "height", "text"],
        ["a.jpg", "640", "480", 'with "quotes",\r\nlines'],
        ["b.jpg", "", "", ""],
        ["c", "", "", "é" + "x" * 200_000],
    ]
    with open(tmp_path / "cells", "w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(cells)
    manifest = read(tmp_path, PACKED[packing]((tmp_path / "cells").read_bytes()))
    assert manifest.items["width"].to_pylist() == [640, None, None]
    assert rows(manifest) == [
        {"image": "a.jpg", "text": 'with "quotes",\r\nlines'},
        {"image": "b.jpg"},
        {"image": "c", "text": cells[3][3]},
    ]


@pytest.mark.parametrize(
    ("content", "expected", "warned"),
    [
        (b"sep=,\r\nfile_name,caption\r\nimg/0.jpg,a\r\n", [{"image": "img/0.jpg", "caption": "a"}], ""),
        (b"sep=|\nfile_name|caption\nimg/0.jpg|a,b\n", [{"image": "img/0.jpg", "caption": "a,b"}], ""),
        (b'file_name, caption\nimg/0.jpg, "a, b"\n', [{"image": "img/0.jpg", "caption": "a, b"}], ""),
        (b"image_name| comment\na.jpg| Two guys\n", [{"image": "a.jpg", "comment": "Two guys"}], ""),
        (b'file_name,caption\na.jpg,a 12" pizza\n', [{"image": "a.jpg", "caption": 'a 12" pizza'}], ""),
        (
            b'file_name\tcaption\na.jpg\t"quoted\nb.jpg\tb\n',
            [{"image": "a.jpg", "caption": '"quoted'}, {"image": "b.jpg", "caption": "b"}],
            "",
        ),
        (b'image,text\na.jpg,"she said "hi" to me"\n', [{"image": "a.jpg", "text": 'she said "hi" to me'}], ""),
        (b"file_name,caption\na.jpg,caf\xe9\n", [{"image": "a.jpg", "caption": "café"}], "Windows-1252"),
        (b"photo\na.jpg\nb.jpg\n", [{"image": "a.jpg"}, {"image": "b.jpg"}], ""),
    ],
)
def test_dialects(tmp_path: Path, content: bytes, expected: list[Any], warned: str) -> None:
    manifest = read(tmp_path, content)
    assert rows(manifest) == expected
    assert [warned in warning.what for warning in manifest.warnings] == ([True] if warned else [])


def test_what_is_wrong_with_cells(tmp_path: Path) -> None:
    assert problems(tmp_path, "image,b,b\n1,2,3\n1,2\n\n1,2,3,4\n") == [
        '1: two columns are named "b"',
        *("3: 2 cells under a header of 3", "5: 4 cells under a header of 3"),
    ]
    assert problems(tmp_path, "just some words\nand more of them\n")[0].startswith("1: neither JSON nor cells")
    assert problems(tmp_path, b"\x00\x01\x02" * 99)[0].endswith("neither text nor a file of a known kind")


def test_a_table_of_vlmevalkit(tmp_path: Path) -> None:
    """Pictures in base64; a row may name the one whose picture it shares."""
    text = base64.b64encode(png_bytes(60, 50)).decode()
    manifest = read(tmp_path, f"index\timage\tquestion\n7\t{text}\tq\n9\t7\tr\n")
    assert manifest.items["id"].to_pylist() == ["7", "9"]
    assert set(manifest.items["image"].to_pylist()) == {f"data:image;base64,{text}"}


# --- a path a line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "image", "label"),
    [
        ("img/0.jpg", "img/0.jpg", None),
        ("img/0.jpg 7", "img/0.jpg", "7"),
        ("img/0.JPG\tn01440764", "img/0.JPG", "n01440764"),
        ("img/0.jpg,a cat, sitting", "img/0.jpg", "a cat, sitting"),
        ("my photo 1.jpeg", "my photo 1.jpeg", None),
        ("https://host/a.png?w=3 x", "https://host/a.png?w=3", "x"),
        ("/abs/dir.d/a.webp 1 2", "/abs/dir.d/a.webp", "1 2"),
    ],
)
def test_a_path_a_line(tmp_path: Path, line: str, image: str, label: str | None) -> None:
    manifest = read(tmp_path, f"{line}\r\n\nother.png\n# a remark\n")
    assert rows(manifest) == [{"image": image, **({"label": label} if label else {})}, {"image": "other.png"}]
    assert [(each.kind, each.count) for each in manifest.passed_over] == [("lines without an image", 1)]
    assert manifest.items["line"].to_pylist() == [1, 3]
