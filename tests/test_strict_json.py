"""strict_json.py: what is refused, and that the place named is the place meant."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_prep.strict_json import JsonProblem, parse, parse_line, show

MAX_DEPTH = 200
TOO_DEEP = f"more than {MAX_DEPTH} deep"
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def refused(content: bytes) -> tuple[str, str, str]:
    """Place, what and hint of the problem with a file."""
    with pytest.raises(JsonProblem) as caught:
        parse(content, "f.json")
    problem = caught.value.problem
    assert problem.severity == "error"
    return problem.where, problem.what, problem.hint


@given(VALUES, st.booleans(), st.sampled_from([None, 2]), st.booleans())
def test_good_json_is_read_as_python_reads_it(value: Any, ascii_only: bool, indent: int | None, mark: bool) -> None:
    content = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert parse(b"\xef\xbb\xbf" * mark + content, "f.json") == value
    assert parse_line(content, "m:1") == value


def standard(content: bytes) -> tuple[Any] | None:
    """What Python's reader gives for a text that is also fine for the standard, in a tuple; None for any other."""
    repeated = False

    def watch(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        repeated = repeated or len(dict(pairs)) < len(pairs)
        return dict(pairs)

    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=watch)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return None
    return None if repeated else (value,)


PIECES = st.sampled_from(
    [
        *['{"a":', '"b":', '{"', "[", "]", "}", ",", ":", '"', '"a"', "\\ud83d", "\\ude00", "\\", "NaN", "-Infinity"],
        *["1e999", "-0", "1.5", "7", "true", "null", " ", "\n", "\t", "é", "\ufeff", "//", "'"],
    ]
)


@settings(max_examples=1000)
@given(
    st.binary(max_size=40)
    | TEXT.map(str.encode)
    | st.lists(PIECES, max_size=14).map(lambda pieces: "".join(pieces).encode())
    | st.tuples(VALUES.map(json.dumps), st.integers(0, 60), PIECES).map(lambda t: (t[0][: t[1]] + t[2]).encode())
)
def test_any_bytes_are_pythons_value_or_a_problem(content: bytes) -> None:
    expected = standard(content)
    for read in (parse, parse_line):
        try:
            found = (read(content, "f.json"),)
        except JsonProblem as error:
            found, problem = None, error.problem
        assert repr(found) == repr(expected)
        if found is None:
            assert problem.where.startswith("f.json")
            assert str(problem).isprintable()


@pytest.mark.parametrize(
    ("content", "where", "what", "hint"),
    [
        (b'{"a": "NaN",\n "b": NaN}', "2:7", "NaN is not JSON", "finite"),
        (b"[-Infinity]", "1:2", "-Infinity is not", "finite"),
        (b"[Infinity]", "1:2", "Infinity is not", "finite"),
        (b'{"s": "1e999", "x": -1e999}', "1:21", "-1e999 is too large", "ordinary"),
        (b'{"a": 1,\n "a": 2, "b": "a"}', "2:2", 'the key "a" stands twice', "keep one"),
        (b'{"a": "b", "c": {"b": 1, "\\u0062": 2}}', "1:26", 'the key "b" stands twice', "keep one"),
        (b'[{"a": 1}, {"a": [1, "a"], "c": {"a": 1}}, NaN]', "1:44", "NaN", "finite"),
        (b'{"a": "\\\\ud800 \\ud800"}', "1:7", "\\ud800 in this string is half", "both"),
        (b'{"a": ["\\uD83D\\uDE00", {"\\uDE00": 1}]}', "1:25", "\\ude00 in this string is half", "both"),
        (b'["\\ud83d\\ud83d\\ude00"]', "1:2", "\\ud83d in this string is half", "both"),
        (b"[" + b"7" * 5000 + b"]", "1:2", "an integer of 5,000 digits", "ordinary"),
        (b'{"a": 1 // one\n}', "1:9", "not JSON", "no comments"),
        (b'{\n  /* one */ "a": 1}', "2:3", "not JSON", "no comments"),
        (b"# one\n{}", "1:1", "not JSON", "no comments"),
        (b"{'a': 1}", "1:2", "not JSON", "double quotes"),
        (b'{"a": True}', "1:7", "not JSON", "null, true and false"),
        (b'{"a": None}', "1:7", "not JSON", "null, true and false"),
        (b'{"a": 1', "1:8", "not JSON", "ends too early"),
        (b'{"a": "x', "1:7", "not JSON: unterminated string", "closing quote"),
        (b'["a\tb"]', "1:4", "not JSON: invalid control character", "\\t"),
        (b"{} {}", "1:4", "not JSON: extra data", "one value"),
        (b'{"a": 1 "b": 2}', "1:9", "not JSON: expecting ',' delimiter", "comma"),
        (b'{"a" 1}', "1:6", "not JSON: expecting ':' delimiter", "colon"),
        (b'["C:\\data"]', "1:5", "not JSON: invalid \\escape", "backslash"),
        (b'{"a": {"b": 1}, "b": "a", "c": ["b", "b"],\n "d": "b", "e": NaN}', "2:17", "NaN", "finite"),
        (b'{"' + b"k" * 500 + b'": 1, "' + b"k" * 500 + b'": 2}', "1:509", 'the key "kkk', "keep one"),
        (b"[" + b"9" * 400 + b".5]", "1:2", "99… is too large", "ordinary"),
        (b"1e310+", "1:1", "1e310 is too large", "ordinary"),
        (b"[01]", "1:3", "not JSON", ""),
        (b'\xef\xbb\xbf["\xc3\xa9", NaN]', "1:7", "NaN", "finite"),
        (b'{"a":\n "\xc3\xa9\xff"}', "2:4", "byte 0xff is not UTF-8", "save it as UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "1:1", "is not UTF-8", "UTF-16"),
        (b'["\xed\xa0\x80"]', "1:3", "byte 0xed is not UTF-8", "UTF-8"),
    ],
)
def test_refused_with_its_place(content: bytes, where: str, what: str, hint: str) -> None:
    found = refused(content)
    assert found[0] == f"f.json:{where}"
    assert what in found[1]
    assert hint in found[2]
    assert len(found[1]) < 130


@pytest.mark.parametrize(("content", "line"), [(b'{"a": 1,}', 1), (b"[1,\n2 , ]", 2)])
def test_a_trailing_comma(content: bytes, line: int) -> None:
    where, _, hint = refused(content)  # the column is that of the comma or of the bracket, by Python version
    assert where.startswith(f"f.json:{line}:")
    assert hint == "remove the comma after the last entry"


@pytest.mark.parametrize("content", [b"", b" \n\t ", b"\xef\xbb\xbf"])
def test_empty(content: bytes) -> None:
    assert refused(content)[:2] == ("f.json", "there is nothing in it")


@pytest.mark.parametrize(
    "content", [b'["\\\\ud800"]', b'["\\ud83d\\ude00"]', b'["\\uD83D\\uDE00 \\n \\\\"]', b"[1e308, -0.0, 1E-999]"]
)
def test_looks_bad_and_is_good(content: bytes) -> None:
    assert parse(content, "f.json") == json.loads(content)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_limited_at_a_fixed_number(opening: bytes, closing: bytes) -> None:
    def nested(depth: int) -> bytes:
        return opening * depth + (b"1" if closing == b"}" else b"") + closing * depth

    parse(nested(MAX_DEPTH), "f.json")
    parse(b"[{}, " + nested(MAX_DEPTH - 1) + b"]", "f.json")
    assert TOO_DEEP in refused(b"[{}, " + nested(MAX_DEPTH) + b"]")[1]
    assert TOO_DEEP in refused(nested(MAX_DEPTH + 1))[1]
    assert TOO_DEEP in refused(opening * 100_000)[1]


def test_many_brackets_side_by_side_are_not_deep() -> None:
    rows = [[1, "]", "[[["], {"a": [{}]}] * 1000
    assert parse(json.dumps(rows).encode(), "f.json") == rows


def test_brackets_in_texts_hide_no_depth() -> None:
    assert TOO_DEEP in refused(b'["]",' * (MAX_DEPTH + 1) + b"1" + b"]" * (MAX_DEPTH + 1))[1]


def test_one_line_gives_the_column_in_the_sentence() -> None:
    with pytest.raises(JsonProblem) as caught:
        parse_line(b'{"a": NaN}', "manifest.jsonl:12")
    assert caught.value.problem.where == "manifest.jsonl:12"
    assert caught.value.problem.what == "NaN is not JSON, at column 7"


def test_a_problem_in_a_line_is_told_without_line_breaks() -> None:
    for content in (b'{"a": 1 "b"}', b'{"a\\n": 1, "a\\n": 2}', b'"\xff"', b'"\\ud800"', b"[" * 500 + b"]" * 500, b""):
        with pytest.raises(JsonProblem) as caught:
            parse_line(content, "m.jsonl:1")
        assert caught.value.problem.where == "m.jsonl:1"
        assert str(caught.value).isprintable()


def test_a_value_is_shown_on_one_line_and_cut() -> None:
    assert show({"a": ["é\n", None]}) == '{"a": ["\\u00e9\\n", null]}'
    assert show("x" * 98) == '"' + "x" * 98 + '"'
    assert show("x" * 99) == '"' + "x" * 89 + "…"


def test_floats_keep_their_bits() -> None:
    value = parse(b"[0.1, -0.0, 5e-324]", "f.json")
    assert value == [0.1, 0.0, 5e-324]
    assert math.copysign(1, value[1]) == -1
