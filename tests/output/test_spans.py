"""spans.py: rows that share an image, by name and by content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from conftest import write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_prep.errors import ItemError
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.output.spans import Headers, Spans, find_spans, join_equal


def spans_of(tmp_path: Path, rows: list[dict[str, Any]], dedupe: bool = True) -> Spans:
    manifest = read_manifest(str(write_manifest(tmp_path / "m.jsonl", rows)))
    return find_spans(manifest.items, manifest.base, "cpu", dedupe)


def test_a_span_is_a_path_a_group_and_what_rows_promise(tmp_path: Path) -> None:
    rows = [
        {"id": "0", "image": "a.png"},
        {"id": "1", "image": "x/../a.png"},
        {"id": "2", "image": "a.png", "backend": "gpu"},
        {"id": "3", "image": "a.png", "width": 3, "height": 4},
        {"id": "4", "features": "a.png", "grid_thw": [1, 2, 2]},
        {"id": "5", "image": "a.png", "content_hash": "sha256:" + "0" * 64},
    ]
    spans = spans_of(tmp_path, rows)
    assert [spans.of_row.tolist()[row] == spans.of_row[0] for row in range(6)] == [True, True, *[False] * 4]
    assert len(set(spans.of_row.tolist())) == 5
    assert spans_of(tmp_path, rows, dedupe=False).of_row.tolist() == list(range(6))


def test_equal_bytes_become_one_span_that_of_the_first_row(tmp_path: Path) -> None:
    rows = [{"id": name, "image": name} for name in ("b.png", "a.png", "c.png", "d.png")]
    spans = spans_of(tmp_path, rows)
    headers = Headers(4)
    headers.width[:], headers.height[:] = 20, 10
    headers.format[:] = ["PNG", "GIF", "PNG", "PNG"]
    headers.content_hash[:] = ["x", "y", "x", None]
    joined, kept = join_equal(spans, headers)
    of_row = joined.of_row.tolist()
    assert of_row[0] == of_row[2]
    assert len(set(of_row)) == 3
    assert joined.first_row[of_row].tolist() == [0, 1, 0, 3]
    assert [kept.format[span] for span in of_row] == ["PNG", "GIF", "PNG", "PNG"]


def test_a_wrong_promise_of_a_size_stays_apart(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, [{"id": name, "image": name} for name in ("a.png", "b.png")])
    headers = Headers(2)
    headers.width[:], headers.height[:], headers.content_hash[:] = [20, 21], 10, ["x", "x"]
    assert join_equal(spans, headers)[0].of_row.tolist() == [0, 1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("xyz"), st.integers(0, 1)), min_size=1, max_size=12))
def test_rows_share_a_span_exactly_where_all_is_equal(rows: list[tuple[int, str, int]]) -> None:
    """Rows of (file, its content, its group); a file's content and group are those of its first row."""
    truth = {}
    for file, content, group in rows:
        truth.setdefault(file, (content, group))
    files = sorted({file for file, _, _ in rows})
    of_row = np.array([files.index(file) for file, _, _ in rows])
    first = np.array([of_row.tolist().index(span) for span in range(len(files))])
    headers = Headers(len(files))
    headers.content_hash[:] = [truth[file][0] for file in files]
    joined, kept = join_equal(Spans(of_row, first, np.array([truth[file][1] for file in files])), headers)
    for one in range(len(rows)):
        for other in range(len(rows)):
            equal = truth[rows[one][0]] == truth[rows[other][0]]
            assert (joined.of_row[one] == joined.of_row[other]) == equal
        span = joined.of_row[one]
        assert (kept.content_hash[span], joined.groups[span]) == truth[rows[one][0]]
        assert joined.first_row[span] == min(row for row in range(len(rows)) if joined.of_row[row] == span)


def test_headers_taken_and_failed() -> None:
    headers = Headers(3)
    headers.width[:], headers.format[:] = [1, 2, 3], ["A", "B", "C"]
    headers.fail(1, ItemError("not_found", "gone"))
    taken = headers.take(np.array([2, 1]))
    assert taken.width.tolist() == [3, 2]
    assert (taken.format, taken.error_code, taken.error_message) == (["C", "B"], [None, "not_found"], [None, "gone"])
