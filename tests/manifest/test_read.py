"""manifest.py: a file of rows to items, and every problem of the file at once."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from kimik3_prep.errors import InputError, Problem
from kimik3_prep.images.address import resolve
from kimik3_prep.manifest import read
from kimik3_prep.manifest.items import ITEM_SCHEMA
from kimik3_prep.manifest.read import Manifest, read_manifest
from kimik3_prep.remote import scheme

A, B = b'{"image": "a.jpg"}\n', b'{"image": "b.jpg"}\n'


def saved(folder: Path, content: bytes, name: str = "m.jsonl") -> str:
    path = folder / name
    path.write_bytes(content)
    return str(path)


def saved_parquet(folder: Path, columns: dict[str, Any], **options: Any) -> str:
    path = folder / "m.parquet"
    parquet.write_table(pa.table(columns), path, **options)
    return str(path)


def places(path: str, problems: Sequence[Problem]) -> list[str]:
    """What follows the file's name in each problem's place: the line, or nothing."""
    assert all(problem.where == path or problem.where.startswith(f"{path}:") for problem in problems)
    return [problem.where[len(path) + 1 :] for problem in problems]


def problems_of(path: str, limit: int | None = None) -> tuple[Problem, ...]:
    with pytest.raises(InputError) as caught:
        read_manifest(path, limit)
    return caught.value.problems


def problem_of(path: str) -> Problem:
    (problem,) = problems_of(path)
    return problem


def images(manifest: Manifest) -> list[str]:
    found: list[str] = manifest.items["image"].to_pylist()
    return found


# --- JSON Lines -----------------------------------------------------------------------------------------------------


def test_rows_become_a_table(tmp_path: Path) -> None:
    rows = [
        {"id": 7, "image": "a.jpg", "width": 4, "height": 3, "backend": "gpu", "caption": "é"},
        {"features": "f.npy", "grid_thw": [1, 2, 4], "content_hash": "sha256:" + "0" * 64},
    ]
    manifest = read_manifest(str(write_manifest(tmp_path / "m.jsonl", rows)))
    assert manifest.items.schema == ITEM_SCHEMA
    empty = dict.fromkeys(ITEM_SCHEMA.names)
    assert manifest.items.to_pylist() == [
        {
            **{**empty, "item": 0, "line": 1, "id": "7", "image": "a.jpg", "path": "deferred", "backend": "gpu"},
            **{"width": 4, "height": 3, "extra": '{"caption":"é"}'},
        },
        {
            **{**empty, "item": 1, "line": 2, "id": "f.npy", "image": "f.npy", "path": "local"},
            **{"grid_thw": [1, 2, 4], "content_hash": "sha256:" + "0" * 64},
        },
    ]
    assert (manifest.name, manifest.base) == (str(tmp_path / "m.jsonl"), str(tmp_path))


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (A + B, [1, 2]),
        (A + B[:-1], [1, 2]),
        (b"\xef\xbb\xbf" + A + B, [1, 2]),
        (b"\xef\xbb\xbf\n" + A + b"\n\xef\xbb\xbf" + B, [2, 4]),  # two files with a BOM each, joined
        (b"\n \t\n" + A + b"\r\n\n" + B + b"\n\n", [3, 6]),
        (A.replace(b"\n", b"\r\n") + B.replace(b"\n", b"\r\n"), [1, 2]),
        (b"  " + A + b"\t" + B, [1, 2]),
    ],
)
def test_line_numbers_count_what_an_editor_counts(tmp_path: Path, content: bytes, lines: list[int]) -> None:
    items = read_manifest(saved(tmp_path, content)).items
    assert (items["image"].to_pylist(), items["line"].to_pylist()) == (["a.jpg", "b.jpg"], lines)
    assert items["item"].to_pylist() == [0, 1]


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    odd = "\u2028\u2029\x85\x7f"
    path = saved(tmp_path, f'{{"image": "{odd}"}}\n'.encode() + A)
    items = read_manifest(path).items
    assert (items["image"].to_pylist(), items["line"].to_pylist()) == ([odd, "a.jpg"], [1, 2])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (b'{"image": "b.jpg", "score": 1e999e1}', ["1e999"]),
        (b'{"image": "b.jpg", "image": "c.jpg"}', ['"image"', "one object"]),
        (b'{"image": "b.jpg", "more": {"k": 1, "k": 1}}', ['"k"', "one object"]),
        (b'{"image": "b\xff.jpg"}', ["UTF-8"]),
        (b'{"image": "b.jpg",}', ["comma"]),
        (b'{"image": "b.jpg"},', ["column"]),
        (b'{"image": "b.jpg"} {"image": "c.jpg"}', ["column"]),
        (b'{"image": "b.jpg"', ["column"]),
        (b"{'image': 'b.jpg'}", ["column"]),
        (b"b.jpg,a cat", ["column"]),
        (b'{"image": "b.jpg"} // the second', ["column"]),
        (b"\x00" * 100, ["column"]),
        (b'{"image": "b.jpg", "n": ' + b"9" * 5000 + b"}", ["number"]),
        (b'{"image": "b.jpg", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ["deep"]),
    ],
)
def test_strict_json_names_the_line(tmp_path: Path, broken: bytes, words: list[str]) -> None:
    path = saved(tmp_path, A + b"\n" + broken + b"\n" + b'{"image": 7}\n')
    problems = problems_of(path)
    assert places(path, problems) == ["3", "4"]
    assert all(word in str(problems[0]) for word in words)
    assert len(str(problems[0])) < 400


@pytest.mark.parametrize("depth", [*range(100, 200, 20), *range(250, 1100, 25)])
def test_no_depth_of_nesting_is_a_crash(tmp_path: Path, depth: int) -> None:
    path = saved(tmp_path, b'{"image": "a", "x": ' + b'{"y":' * depth + b"1" + b"}" * depth + b"}\n")
    if depth < 200:
        assert read_manifest(path).items["extra"][0].as_py().count("{") == depth + 1
    else:
        assert (problem_of(path).where, "deep" in problem_of(path).what) == (f"{path}:1", True)


@pytest.mark.parametrize(
    ("row", "name"),
    [(b'["a.jpg"]', "a list"), (b'"a.jpg"', "a string"), (b"7", "a number"), (b"null", "null"), (b"true", "true or")],
)
def test_a_row_that_is_no_object(tmp_path: Path, row: bytes, name: str) -> None:
    path = saved(tmp_path, A + row + b"\n" + row)
    problems = problems_of(path)
    assert places(path, problems) == ["2", "3"]
    assert f"a row that is {name}" in problems[0].what


def test_what_json_does_not_allow_vetoes_no_image(tmp_path: Path) -> None:
    """Numbers that are none and halves of characters become null, and a warning names the line."""
    odd = [b"NaN", b"-Infinity", b"1e999", b'"\\ud83d"']
    path = saved(tmp_path, b"".join(b'{"id": %d, "image": "a", "x": [%s]}\n' % row for row in enumerate(odd)))
    manifest = read_manifest(path)
    assert [json.loads(extra)["x"] for extra in manifest.items["extra"].to_pylist()] == [[None], [None], [None], ["?"]]
    assert places(path, manifest.warnings) == ["1", "2", "3", "4"]
    assert [
        word in warning.what for word, warning in zip(["NaN", "Inf", "1e999", "d83d"], manifest.warnings, strict=True)
    ]


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("before", [b"", b"\n", b"\xef\xbb\xbf"])
def test_all_rows_in_one_json_value(tmp_path: Path, before: bytes, indent: int | None) -> None:
    rows = [{"image": "a.jpg", "n": 1}, {"image": "b.jpg", "n": [{"image": "no"}]}]
    documents: list[Any] = [
        *(rows, {"info": {}, "data": rows, "more": [1, 2]}, {"tags": ["x"], "data": rows}),
        {"1": rows[0], "2": rows[1]},
    ]
    for document in documents:
        manifest = read_manifest(saved(tmp_path, before + json.dumps(document, indent=indent).encode()))
        assert images(manifest) == ["a.jpg", "b.jpg"]
        assert [json.loads(extra)["n"] for extra in manifest.items["extra"].to_pylist()] == [row["n"] for row in rows]
        lists = [f'entries of "{key}"' for key in ("more", "tags") if key in document]
        assert [each.kind for each in manifest.passed_over] == lists
    path = saved(tmp_path, before + json.dumps(["a.jpg", "b.jpg"], indent=indent).encode())
    assert images(read_manifest(path)) == ["a.jpg", "b.jpg"]


def test_a_json_list_with_a_row_a_line(tmp_path: Path) -> None:
    for start in (b"[\n", b"["):
        path = saved(tmp_path, start + A.strip() + b",\n" + B.strip() + b"\n]\n")
        assert images(read_manifest(path)) == ["a.jpg", "b.jpg"]


def test_a_bracket_further_down_does_not_hide_what_follows(tmp_path: Path) -> None:
    path = saved(tmp_path, A + b"{\n[\n" + b'{"image": 1}\n')
    assert places(path, problems_of(path)) == ["2", "3", "4"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_refused(tmp_path: Path, encoding: str) -> None:
    path = saved(tmp_path, (A + B).decode().encode(encoding))
    problems = problems_of(path)
    assert places(path, problems)[0] == "1"
    if encoding == "utf-16":  # with the byte order mark that Windows shells write
        assert (len(problems), "UTF-8" in str(problems[0])) == (1, True)


# --- files ----------------------------------------------------------------------------------------------------------


# A gzip header holds the time, and a case named after it would have another name in every test process.
@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b" \r\n\t\n", gzip.compress(b"", mtime=0)])
def test_a_manifest_without_rows(tmp_path: Path, content: bytes) -> None:
    path = saved(tmp_path, content)
    problem = problem_of(path)
    assert (problem.where, problem.what, '{"image": "a.jpg"}' in problem.expected) == (
        *(path, "the manifest has no items"),
        True,
    )


def test_a_manifest_that_cannot_be_opened(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "gone.jsonl", "No such file"),
        (tmp_path / ("x" * 300), "long"),
    ):
        problem = problem_of(str(path))
        assert problem.where == str(path)
        assert problem.what.startswith("cannot read the manifest: ")
        assert reason in problem.what
    os.symlink("loop", tmp_path / "loop")
    assert "cannot read the manifest" in problem_of(str(tmp_path / "loop")).what


def test_gzip_is_recognised_by_its_bytes(tmp_path: Path) -> None:
    plain = read_manifest(saved(tmp_path, A + B))
    for content in (gzip.compress(A + B), gzip.compress(A) + gzip.compress(B)):
        packed = read_manifest(saved(tmp_path, content, "packed"))
        assert packed.items.equals(plain.items)
        assert packed.digest == plain.digest


def test_broken_gzip_names_the_last_line_read(tmp_path: Path) -> None:
    random_rows = [json.dumps({"image": random.Random(i).randbytes(40).hex()}) for i in range(20_000)]
    whole = gzip.compress("\n".join(random_rows).encode())
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for content in (whole[: len(whole) // 2], whole[:-4], bytes(damaged), whole + b"x"):
        path = saved(tmp_path, content)
        problem = problems_of(path)[0]  # before what the damage made of the rows
        assert int(places(path, [problem])[0]) > 1000
        assert problem.what.startswith("cannot read on after this line: ")
    for content in (b"\x1f\x8bnot gzip", whole[:10] + b"\xff" * 20, whole[:10]):
        problem = problem_of(saved(tmp_path, content))
        assert (problem.where, "cannot read the manifest" in problem.what) == (path, True)


def test_a_flood_of_rows_without_an_image_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "_MOST_WITHOUT", 1000)
    path = saved(tmp_path, gzip.compress(b'{"a": 1}\n' * 5000 + A))
    problem = problem_of(path)
    assert (problem.what, '"a"' in problem.hint) == ("none of the first 1,000 rows names an image", True)
    assert images(read_manifest(saved(tmp_path, A + b"{}\n" * 5000))) == ["a.jpg"]


def test_many_rows_keep_their_order(tmp_path: Path) -> None:
    count = 40_000
    path = saved(tmp_path, b"".join(b'{"image": "%d.jpg", "id": "%d"}\n' % (i, i * 7) for i in range(count)))
    items = read_manifest(path).items
    assert items["item"].to_pylist() == list(range(count))
    assert items["line"].to_pylist() == list(range(1, count + 1))
    assert items["id"].to_pylist() == [str(i * 7) for i in range(count)]


def test_a_pipe_is_read_and_relative_paths_start_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (A + B, gzip.compress(A + B)):
        reader, writer = os.pipe()  # what a shell makes of `<(zcat m.jsonl.gz)`
        os.write(writer, content)
        os.close(writer)
        manifest = read_manifest(f"/dev/fd/{reader}")
        os.close(reader)
        assert (images(manifest), manifest.base) == (["a.jpg", "b.jpg"], str(tmp_path))


def test_a_named_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=pipe.write_bytes, args=(A * 5000 + b"{",))
    thread.start()
    problems = problems_of(str(pipe))
    thread.join()
    assert places(str(pipe), problems)[0] == "5001"


def test_parquet_from_a_pipe_is_refused(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, Path(saved_parquet(tmp_path, {"image": ["a.jpg"]})).read_bytes())
    os.close(writer)
    problem = problem_of(f"/dev/fd/{reader}")
    os.close(reader)
    assert "it is Parquet" in problem.what


# --- standard input -------------------------------------------------------------------------------------------------


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = read_manifest(saved(tmp_path, A + B))
    for content in (A + B, gzip.compress(A + B)):
        feed(monkeypatch, content)
        manifest = read_manifest("-")
        assert manifest.items.equals(plain.items)
        assert (manifest.name, manifest.base, manifest.digest) == ("<stdin>", str(tmp_path), plain.digest)


def test_problems_of_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, A + b"[]")
    assert problem_of("-").where == "<stdin>:2"
    feed(monkeypatch, b"")
    assert problem_of("-").what == "the manifest has no items"
    feed(monkeypatch, Path(saved_parquet(tmp_path, {"image": ["a.jpg"]})).read_bytes())
    assert "Parquet" in problem_of("-").what
    monkeypatch.setattr(sys, "stdin", None)
    assert problem_of("-") == Problem("<stdin>", "cannot read the manifest: standard input is closed")


def test_standard_input_of_a_real_process(tmp_path: Path) -> None:
    code = (
        "from kimik3_prep.manifest.read import read_manifest; m = read_manifest('-'); print(m.items['image'], m.base)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=gzip.compress(A), capture_output=True, cwd=tmp_path, timeout=60)
    assert (b"a.jpg" in done.stdout, str(tmp_path).encode() in done.stdout, done.stderr) == (True, True, b"")


# --- problems -------------------------------------------------------------------------------------------------------


def test_problems_of_every_kind_are_reported_together(tmp_path: Path) -> None:
    rows = [
        '{"image": "a.jpg", "id": "x"}',
        '{"image": "a.jpg",}',
        '{"image": "b.mp4"}',
        '{"video": "c.mp4"}',
        '{"image": "d.jpg", "type": "audio"}',
        '{"image": "e.jpg", "backend": "cuda"}',
        "",
        '{"image": 7}',
        '{"image": "g.jpg", "id": "x", "width": 3}',
        "[]",
        '{"image": "h.jpg", "score": }',
        '{"image": "i.jpg", "id": "x"}',
    ]
    path = saved(tmp_path, "\n".join(rows).encode())
    problems = problems_of(path)
    # The repeated ids come last: they are known when all rows are, also of a row that has another problem.
    assert places(path, problems) == ["2", "3", "4", "5", "6", "8", "9", "10", "11", "9", "12"]
    assert all("Kimi-K3 encoder mode supports image input only" in problem.what for problem in problems[1:4])
    assert "Unsupported Kimi-K3 deferred preprocessing backend" in problems[4].what
    assert problems[4].hint == 'was "gpu" meant?'


def test_the_first_thousand_problems_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    path = saved(tmp_path, A + b'{"image": 1}\n' * 1500 + b"{\n" + A)
    with pytest.raises(InputError) as caught:
        read_manifest(path)
    assert (len(caught.value.problems), caught.value.total) == (1000, 1502)
    assert "… and 502 more" in str(caught.value)
    assert places(path, caught.value.problems) == [str(line) for line in range(2, 1002)]


def test_ids_are_unique(tmp_path: Path) -> None:
    rows = [
        {"image": "a", "id": 1},
        {"image": "b"},
        {"image": "a", "id": "1"},
        {"image": "b"},
        {"image": "c", "id": "b"},
    ]
    path = str(write_manifest(tmp_path / "m.jsonl", rows))
    problems = problems_of(path)
    assert [str(problem).partition(";")[0][len(path) :] for problem in problems] == [
        ':3: id "1" stands on line 1 already',
        ':4: id "b" stands on line 2 already',
        ':5: id "b" stands on line 2 already',
    ]
    assert all('"id"' in problem.hint for problem in problems)


def test_repeated_ids_are_counted_too(tmp_path: Path) -> None:
    path = saved(tmp_path, A * 3000)
    with pytest.raises(InputError) as caught:
        read_manifest(path)
    assert (len(caught.value.problems), caught.value.total) == (1000, 2999)
    assert places(path, caught.value.problems) == [str(line) for line in range(2, 1002)]


def test_long_and_strange_ids(tmp_path: Path) -> None:
    ids = ["__metadata__", "../../x", "\u0000", "x" * 70_000, "x" * 69_999 + "y", " "]
    rows = [{"image": "a.jpg", "id": name} for name in ids]
    assert read_manifest(str(write_manifest(tmp_path / "m.jsonl", rows))).items["id"].to_pylist() == ids
    path = str(write_manifest(tmp_path / "m.jsonl", [*rows, rows[3]]))
    problem = problem_of(path)
    assert (places(path, [problem]), "line 4" in problem.what, len(str(problem)) < 400) == (["7"], True, True)


# --- limit and digest -----------------------------------------------------------------------------------------------


def test_limit_stops_before_the_next_row(tmp_path: Path) -> None:
    path = saved(tmp_path, A + b"\n" + B + b"{broken\n" + A)
    assert images(read_manifest(path, 1)) == ["a.jpg"]
    assert images(read_manifest(path, 2)) == ["a.jpg", "b.jpg"]
    assert places(path, problems_of(path, 3)) == ["4"]
    assert places(path, problems_of(path)) == ["4", "5"]
    assert images(read_manifest(saved(tmp_path, A + B), 99)) == ["a.jpg", "b.jpg"]
    columns = {"image": [f"{i}.jpg" for i in range(9000)] + ["0.jpg"]}
    assert len(images(read_manifest(saved_parquet(tmp_path, columns), 8999))) == 8999


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    def digest(content: bytes, limit: int | None = None) -> str:
        return read_manifest(saved(tmp_path, content), limit).digest

    one = digest(A + B)
    assert len(one) == 64
    assert digest(gzip.compress(A + B, 1)) == digest(gzip.compress(A + B, 9)) == one
    assert len({one, digest(B + A), digest(A), digest(A + b"\n" + B), digest(A + B.replace(b"b", b"c"))}) == 5
    assert digest(A + B, 1) == digest(A, 1)  # rows that were not read cannot make it another run
    first = read_manifest(saved_parquet(tmp_path, {"image": ["a"]})).digest
    assert first != read_manifest(saved_parquet(tmp_path, {"image": ["b"]})).digest


# --- Parquet --------------------------------------------------------------------------------------------------------


def test_parquet_rows_are_like_json_rows(tmp_path: Path) -> None:
    rows = [
        {"id": 5, "image": "a.jpg", "width": 640, "height": 480, "backend": "gpu", "caption": "é"},
        {"id": 6, "image": "b.jpg", "tags": ["x", "y"], "box": {"x": 1.5, "y": 2}},
        {"id": 7, "features": "f.npy", "grid_thw": [1, 2, 4], "score": 1.0},
    ]
    names = list({name: None for row in rows for name in row})
    columns = {name: [row.get(name) for row in rows] for name in names}
    from_parquet = read_manifest(saved_parquet(tmp_path, columns)).items
    assert from_parquet.equals(read_manifest(str(write_manifest(tmp_path / "m.jsonl", rows))).items)


def test_parquet_as_pandas_writes_it(tmp_path: Path) -> None:
    """Whole numbers beside an empty cell are floats, and the empty cell is NaN."""
    nan = float("nan")
    columns = {
        "id": [1.0, 2.0],
        "image": ["a", "b"],
        "width": [640.0, nan],
        "height": [480.0, nan],
        "score": [2.0, nan],
    }
    path = saved_parquet(tmp_path, {name: pa.array(values, from_pandas=False) for name, values in columns.items()})
    one, two = read_manifest(path).items.to_pylist()
    assert (one["id"], one["width"], one["height"], one["extra"]) == ("1", 640, 480, '{"score":2.0}')
    assert (two["id"], two["width"], two["height"], two["extra"]) == ("2", None, None, None)


@pytest.mark.parametrize(
    ("values", "found"),
    [([640.5, 1.0], "width is 640.5"), ([float("inf"), 1.0], "width is Infinity"), (["640", "1"], 'width is "640"')],
)
def test_parquet_sizes_are_checked_by_row(tmp_path: Path, values: list[Any], found: str) -> None:
    path = saved_parquet(tmp_path, {"image": ["a", "b"], "width": values, "height": [1, 1]})
    problems = problems_of(path)
    assert (problems[0].where, problems[0].what) == (f"{path}:1", found)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([datetime.datetime(2026, 1, 1)] * 2, "timestamp"),
        ([datetime.date(2026, 1, 1)] * 2, "date32"),
        ([datetime.timedelta(1)] * 2, "duration"),
        ([decimal.Decimal("1.5")] * 2, "decimal128"),
        ([b"\xff", None], "binary"),
        ([[b"x"], []], "binary"),
        ([{"k": {"raw": b"x"}}, None], "binary"),
        (pa.array([b"x", b"y"]).dictionary_encode(), "binary"),
    ],
)
def test_a_column_that_json_cannot_hold_is_one_warning(tmp_path: Path, values: Any, kind: str) -> None:
    path = saved_parquet(tmp_path, {"image": ["a.jpg", "b.jpg"], "more": values})
    manifest = read_manifest(path)
    (warning,) = manifest.warnings
    assert (warning.where, warning.what.startswith('the column "more'), kind in warning.what) == (path, True, True)
    assert images(manifest) == ["a.jpg", "b.jpg"]


def test_pictures_inside_parquet_are_named_by_their_cells(tmp_path: Path) -> None:
    for picture, column in ((b"\xff\xd8" * 1000, "image"), ({"bytes": b"\xff\xd8", "path": "a.jpg"}, "image.bytes")):
        path = saved_parquet(tmp_path, {"image": [picture] * 3, "id": [1, 2, 3]})
        assert images(read_manifest(path)) == [f"m.parquet!parquet:{row}!{column}" for row in range(3)]


@pytest.mark.parametrize(
    ("values", "extra"),
    [
        (pa.array(["x"]).dictionary_encode(), '"x"'),
        (pa.array(["x"], pa.large_string()), '"x"'),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), '[["k",1]]'),
        (pa.array([2**64 - 1], pa.uint64()), str(2**64 - 1)),
        (pa.array([[{"a": [1.5, None]}]]), '[{"a":[1.5,null]}]'),
        (pa.array([True]), "true"),
    ],
)
def test_columns_that_json_can_hold(tmp_path: Path, values: pa.Array, extra: str) -> None:
    items = read_manifest(saved_parquet(tmp_path, {"image": ["a"], "more": values})).items
    assert items["extra"].to_pylist() == [f'{{"more":{extra}}}']


def test_nan_inside_a_list_names_row_and_column(tmp_path: Path) -> None:
    path = saved_parquet(tmp_path, {"image": ["a", "b"], "boxes": [[1.0], [float("nan")]]})
    (warning,) = read_manifest(path).warnings
    assert (warning.where, warning.what.startswith('"boxes" holds what JSON cannot')) == (f"{path}:2", True)


def test_parquet_text_that_is_not_utf_8(tmp_path: Path) -> None:
    names = [b"%d.jpg" % i for i in range(5000)]
    names[4500] = b"\xff.jpg"
    broken = pa.array(names, pa.binary()).view(pa.string())
    problem = problem_of(saved_parquet(tmp_path, {"image": broken}))
    assert "a text in rows 4097 to 5000 is not UTF-8" in problem.what


def test_parquet_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    parquet.write_table(pa.table([["a"], ["b"]], names=["image", "image"]), path)
    assert problem_of(str(path)).what == 'two columns are named "image"'


def test_many_parquet_rows_keep_their_order(tmp_path: Path) -> None:
    count = 40_000
    columns = {"image": [f"{i}.jpg" for i in range(count)], "n": list(range(count))}
    items = read_manifest(saved_parquet(tmp_path, columns, row_group_size=7000)).items
    assert items["line"].to_pylist() == list(range(1, count + 1))
    assert items["image"].to_pylist() == columns["image"]
    assert items["extra"].to_pylist() == [f'{{"n":{i}}}' for i in range(count)]
    columns["image"][39_999] = columns["image"][3]
    problem = problem_of(saved_parquet(tmp_path, columns, row_group_size=7000))
    assert (problem.where[-6:], "line 4" in problem.what) == (":40000", True)


def test_parquet_without_rows_or_columns(tmp_path: Path) -> None:
    assert problem_of(saved_parquet(tmp_path, {"image": pa.array([], pa.string())})).what == "the manifest has no items"
    assert problem_of(saved_parquet(tmp_path, {})).what == "the manifest has no items"
    assert problem_of(saved_parquet(tmp_path, {"caption": ["x"]})).what == "no row names an image"


def test_damaged_parquet(tmp_path: Path) -> None:
    whole = Path(saved_parquet(tmp_path, {"image": [f"{i}.jpg" for i in range(1000)]})).read_bytes()
    for content in (
        whole[:-1],
        whole[: len(whole) // 2],
        b"PAR1",
        b"PAR1" + A,
        whole[:200] + b"\xff" * 50 + whole[250:],
    ):
        assert "cannot read the manifest" in problem_of(saved(tmp_path, content)).what


# --- any bytes ------------------------------------------------------------------------------------------------------


FRAGMENTS = st.sampled_from(
    [
        *[
            b"{",
            b"}",
            b"[",
            b"]",
            b",",
            b":",
            b'"',
            b"\n",
            b"\r\n",
            b" ",
            b"\xff",
            b"\xef\xbb\xbf",
            b"\\ud800",
            b"null",
        ],
        *[A, B, A[:-1], b'"image"', b'"id": ', b"NaN", b"1e400", b'"x"', b"0", b"\x1f\x8b", b"PAR1", b"\xff\xfe"],
    ]
)
SOUP = st.lists(FRAGMENTS | st.binary(max_size=6), max_size=12).map(b"".join)


def read_or_refuse(path: str) -> None:
    """Anything but a manifest or an InputError with places is an error of ours."""
    problems: tuple[Problem, ...] | None = None
    try:
        rows = read_manifest(path).items.num_rows
    except InputError as error:
        problems = error.problems
    if problems is None:
        assert rows > 0
    else:
        assert problems
        places(path, problems)


@settings(max_examples=400, deadline=None)
@given(SOUP, st.sampled_from(["plain", "gzip", "cut gzip", "rows"]))
def test_any_bytes_are_a_manifest_or_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, soup: bytes, form: str
) -> None:
    content = {"plain": soup, "gzip": gzip.compress(soup), "cut gzip": gzip.compress(soup)[:-5], "rows": A + soup}[form]
    read_or_refuse(saved(tmp_path_factory.getbasetemp(), content, "soup"))


@settings(max_examples=250, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_damage_to_parquet_is_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    columns = {"image": ["a", "b"], "caption": ["é", "x"], "box": [[1.5], []], "o": [{"x": 1}, None]}
    content = bytearray(Path(saved_parquet(folder, columns, compression="none")).read_bytes())
    for at, value in damage:
        content[4 + at % (len(content) - 4)] = value
    read_or_refuse(saved(folder, bytes(content), "damaged"))


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(TEXT, st.tuples(TEXT, st.integers(1, 9) | st.none(), st.none() | TEXT), min_size=1, max_size=6),
    st.booleans(),
)
def test_rows_that_were_written_come_back(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, tuple[str, int | None, str | None]], escaped: bool
) -> None:
    folder = tmp_path_factory.getbasetemp()
    rows = [
        {"id": key, "image": f"{image}.png", "width": size, "height": size, "caption": caption}
        for key, (image, size, caption) in content.items()
    ]
    lines = "".join(json.dumps(row, ensure_ascii=escaped) + "\n" for row in rows).encode()
    for manifest in (
        read_manifest(saved(folder, lines, "back.jsonl")),
        read_manifest(saved(folder, gzip.compress(lines), "back.jsonl")),
        read_manifest(saved_parquet(folder, {name: [row[name] for row in rows] for name in rows[0]})),
    ):
        back = manifest.items.to_pylist()
        captions = [json.loads(row["extra"] or "{}").get("caption") for row in back]
        assert [{**{name: row[name] for name in ("id", "image", "width", "height")}} for row in back] == [
            {name: row[name] for name in ("id", "image", "width", "height")} for row in rows
        ]
        assert captions == [row["caption"] for row in rows]
        assert [row["line"] for row in back] == list(range(1, len(rows) + 1))


# --- sources --------------------------------------------------------------------------------------------------------


def test_relative_paths_start_from_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    saved(tmp_path / "deep", A)
    monkeypatch.chdir(tmp_path)
    for path in ("deep/m.jsonl", "./deep/../deep/m.jsonl", str(tmp_path / "deep" / "m.jsonl")):
        assert read_manifest(path).base == str(tmp_path / "deep")


@pytest.mark.parametrize(
    ("image", "path", "protocol"),
    [
        *[("a.jpg", "/base/a.jpg", None), ("./x/../a.jpg", "/base/a.jpg", None), ("../../../a", "/a", None)],
        *[("/abs/a.jpg", "/abs/a.jpg", None), (" a.jpg", "/base/ a.jpg", None), ("a%20b.jpg", "/base/a%20b.jpg", None)],
        *[("C:\\pictures\\a.jpg", "/base/C:\\pictures\\a.jpg", None), ("~/a.jpg", "/base/~/a.jpg", None)],
        *[("a:b", "/base/a:b", None), ("1://x", "/base/1:/x", None), ("://x", "/base/:/x", None)],
        *[("file:///d/a%20b%C3%A9.jpg", "/d/a bé.jpg", None), ("FILE:///d/a.jpg", "/d/a.jpg", None)],
        *[("file://localhost/d/a.jpg", "/d/a.jpg", None), ("file:///d/a#1?.jpg", "/d/a#1?.jpg", None)],
        *[("file:///d/../e/a%2Fb", "/e/a/b", None), ("file://[x", "/", None), ("file:///a\n", "/a\n", None)],
        ("data:image/png;base64,AA/../A=", "data:image/png;base64,AA/../A=", None),
        ("data:,x://y", "data:,x://y", None),
        *[("s3://bucket/a/../b.jpg", "s3://bucket/a/../b.jpg", "s3"), ("S3://b/a", "S3://b/a", "s3")],
        ("https://host/a.jpg?x=1#y", "https://host/a.jpg?x=1#y", "https"),
        ("zip://a.png::s3://b/c.zip", "zip://a.png::s3://b/c.zip", "zip"),
        ("git+ssh.x-1://y", "git+ssh.x-1://y", "git+ssh.x-1"),
    ],
)
def test_resolve_and_scheme(image: str, path: str, protocol: str | None) -> None:
    assert (resolve(image, "/base"), scheme(image)) == (path, protocol)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8")) | st.text("file:/data%.[]@?#", min_size=1).map("file://".__add__))
def test_every_string_resolves_to_a_path_or_a_url(image: str) -> None:
    resolved = resolve(image, "/base")
    assert scheme(image) or image.startswith("data:") or resolved.startswith("/")
    pa.array([resolved], pa.large_string())  # the plan keeps them in a column


def test_data_urls_are_kept_whole_and_get_a_short_id(tmp_path: Path) -> None:
    url = "data:image/png;base64," + "A" * 100_000
    (row,) = read_manifest(str(write_manifest(tmp_path / "m.jsonl", [{"image": url}]))).items.to_pylist()
    assert (row["image"], len(row["id"]) < 100, row["id"].startswith("data:image/png;base64,sha256-")) == (
        url,
        True,
        True,
    )
    problem = problem_of(str(write_manifest(tmp_path / "m.jsonl", [{"image": url}] * 2)))
    assert ("line 1" in problem.what, len(str(problem)) < 400) == (True, True)
