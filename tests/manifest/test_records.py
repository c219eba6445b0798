"""records.py: rows as people have them, each with its place."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kimik3_prep.manifest.records import read_records

from kimik3_prep.manifest.row import Report

ROWS = [{"a": 1, "b": [{"c": "é, [x] \n"}]}, {"a": None}, {}]


def read(path: Path) -> tuple[list[tuple[str, Any]], Report, list[str]]:
    """Rows with their place behind the file's name, the report, and the columns that were left out."""
    report, left_out = Report(), []
    rows = list(read_records(str(path), str(path), report, left_out))
    return [(where.removeprefix(f"{path}:"), row) for where, row in rows], report, left_out


def problems(report: Report, path: Path) -> list[str]:
    return [f"{problem.where.removeprefix(f'{path}:')}: {problem.what}" for problem in report.problems]


@pytest.mark.parametrize("zipped", [False, True])
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
def test_json_lines_and_lists(tmp_path: Path, text: str, zipped: bool) -> None:
    """Of a list, the place is where the row's bracket stands."""
    path = tmp_path / "rows.json"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    rows, report, _ = read(path)
    assert ([row for _, row in rows], report.total) == (ROWS, 0)
    if text.startswith("{"):
        assert [place for place, _ in rows] == ["1", "2", "3"]
        return
    lines = text.removeprefix("\ufeff").split("\n")
    for place, row in rows:
        line, column = map(int, place.split(":"))
        rest = "\n".join([lines[line - 1][column - 1 :], *lines[line:]])
        assert json.JSONDecoder().raw_decode(rest)[0] == row
    assert len({place for place, _ in rows}) == len(ROWS)


@pytest.mark.parametrize("text", ["[]", " [ ] ", "[\n]"])
def test_a_list_of_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    assert read(tmp_path / "rows.json")[0] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"a": 1},\n 2, {"a": 3},\n [4]]', ["2:2: a row that is a number", "3:2: a row that is a list"]),
        ('[{"a": 1},]', ["1:1"]),  # where, and in which words, is Python's
        ('[{"a": 1}\n', ["2:1: not JSON: "]),
        ('[{"a": 1, "a": 2}]', ["1:11: "]),
        ('[{"a": NaN}]', ["1:8: NaN "]),
        ('[,{"a": 1}]', ["1:2: "]),
        ('[{"a": 1} {"a": 3}]', ["1:11: "]),
        ('[{"a": 1}] []', ["1:12: "]),
        ("[", ["1:2: "]),
        ("[\ufeff]", ["1:2: "]),
        ('[{"a": "\udce9"}]', ["1:9: the byte 0xe9 is not UTF-8"]),
        (f"[{'[' * 9000}", ["0"]),
    ],
)
def test_what_is_wrong_with_a_list(tmp_path: Path, text: str, found: list[str]) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    rows, report, _ = read(path)
    if found == ["0"]:  # too deep for Python itself
        assert "deep in one another" in problems(report, path)[0]
        return
    assert len(found) == report.total
    for told, start in zip(problems(report, path), found, strict=True):
        assert told.startswith(start)
    assert [row for _, row in rows if row is not None] in ([{"a": 1}, {"a": 3}][:n] for n in range(3))


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.csv.gz", "ROWS.CSV"])
def test_csv(tmp_path: Path, name: str) -> None:
    rows = [
        ["file_name", "width", "text"],
        ["a.jpg", "640", 'with "quotes",\nlines'],
        ["b.jpg", "x", ""],
        ["c", "", "é"],
    ]
    path = tmp_path / name
    opener = gzip.open if name.endswith("gz") else open
    with opener(path, "wt", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter="\t" if "tsv" in name else ",").writerows(rows)
    found, report, _ = read(path)
    assert report.total == 0
    assert found == [
        ("3", {"file_name": "a.jpg", "width": 640, "text": 'with "quotes",\nlines'}),
        ("4", {"file_name": "b.jpg", "width": "x"}),
        ("5", {"file_name": "c", "text": "é"}),
    ]


def test_what_is_wrong_with_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b,a\n1,2,3\n1,2\n\n1,2,3,4\n")
    rows, report, _ = read(path)
    assert problems(report, path) == [
        '1: two columns are named "a"',
        *("3: 2 cells under a header of 3", "5: 4 cells under a header of 3"),
    ]
    assert [place for place, _ in rows] == ["2", "3", "5"]


def test_parquet_without_what_json_cannot_hold(tmp_path: Path) -> None:
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "id": pa.array(["x", "y"]).dictionary_encode(),
            "images": pa.array([[{"bytes": b"\x00", "path": "p.jpg"}], []], pa.list_(picture)),
            "when": pa.array([datetime.datetime(2026, 1, 1)] * 2),
            "raw": pa.array([b"a", b"b"]),
            "n": pa.array([1, None]),
            "dotted.name": pa.array([True, False]),
            "none": pa.nulls(2),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    rows, report, left_out = read(tmp_path / "rows.parquet")
    assert (report.total, left_out) == (0, ["images.list.element.bytes", "when", "raw"])
    assert rows == [
        ("1", {"id": "x", "images": [{"path": "p.jpg"}], "n": 1, "dotted.name": True}),
        ("2", {"id": "y", "images": [], "dotted.name": False}),
    ]
