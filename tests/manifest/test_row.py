"""fields.py: what one row means, what is wrong with it, and that no field of it gets lost."""

from __future__ import annotations

import datetime
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_prep.errors import Problem
from kimik3_prep.manifest.items import short_image
from kimik3_prep.manifest.report import MAX_PROBLEMS, Report, kind, show
from kimik3_prep.manifest.row import ID_KEYS, IMAGE_KEYS, Item, Row, Selection, read_row

IMAGES_ONLY = "Kimi-K3 encoder mode supports image input only"
HASH = "sha256:" + "0123456789abcdef" * 4


def items_of(row: dict[str, Any], **select: Any) -> list[Item]:
    report = Report()
    items = read_row(Row("7", row), 4, "m.jsonl:7", report, Selection(**select))
    assert report.problems == []
    return items


def item_of(row: dict[str, Any], **select: Any) -> Item:
    (item,) = items_of(row, **select)
    return item


def passed_over(row: dict[str, Any]) -> str:
    """How a row without an image is counted."""
    report = Report()
    assert (read_row(Row("7", row), 4, "m:7", report), report.total) == ([], 0)
    (found,) = report.passed_over
    assert (found.kind, found.count) == ("rows without an image", 1)
    return found.names[0]


def problems_of(row: dict[str, Any]) -> list[Problem]:
    report = Report()
    read_row(Row("7", row), 4, "m.jsonl:7", report)
    assert report.total == len(report.problems)
    assert {problem.where for problem in report.problems} <= {"m.jsonl:7"}
    return report.problems


def problem_of(row: dict[str, Any]) -> Problem:
    (problem,) = problems_of(row)
    return problem


def test_the_smallest_row() -> None:
    assert item_of({"image": "a.jpg"}) == Item(
        *(0, 7, "a.jpg", "a.jpg", "deferred", None, None, None, None, None, None)
    )


def test_a_full_row() -> None:
    row = {
        **{"id": "x", "image": "a.jpg", "type": "image", "modality": "image", "backend": "gpu"},
        **{"content_hash": HASH, "width": 640, "height": 480, "caption": "a cat"},
    }
    before = dict(row)
    assert item_of(row) == Item(0, 7, "x", "a.jpg", "deferred", "gpu", HASH, 640, 480, None, '{"caption":"a cat"}')
    assert row == before


# --- image ---------------------------------------------------------------------------------------------------------


def test_image_aliases_in_their_order() -> None:
    assert IMAGE_KEYS == ("image", "image_path", "path", "file_name", "url")
    for number, key in enumerate(IMAGE_KEYS):
        later = {name: f"{name}.png" for name in reversed(IMAGE_KEYS[number:])}
        item = item_of(later)
        assert item.image == item.id == f"{key}.png"
        assert json.loads(item.extra or "{}") == {name: value for name, value in later.items() if name != key}


def test_a_null_alias_does_not_hide_the_next() -> None:
    assert item_of({"image": None, "image_path": None, "url": "https://host/a.png"}).image == "https://host/a.png"


@pytest.mark.parametrize("value", [7, 1.5, True])
@pytest.mark.parametrize("key", [*IMAGE_KEYS, "features"])
def test_an_image_is_a_string(key: str, value: Any) -> None:
    problem = problems_of({key: value, "grid_thw": [1, 2, 2], "id": "x"})[0]
    assert (problem.what, problem.expected) == (f"{key} is {json.dumps(value)}", "a path or URL, as a non-empty string")


@pytest.mark.parametrize("value", ["", None, [], {}, [None], {"bytes": None, "path": None}])
@pytest.mark.parametrize("key", [*IMAGE_KEYS, "images"])
def test_an_empty_field_names_no_image(key: str, value: Any) -> None:
    assert passed_over({key: value, "id": "x"}) == "m:7"


def test_an_object_that_names_nothing_is_a_problem() -> None:
    assert problem_of({"image": {"colour": "red"}}).what == 'image is {"colour": "red"}'


@pytest.mark.parametrize(
    ("value", "image", "extra"),
    [
        ({"url": "https://host/a.png", "detail": "low"}, "https://host/a.png", '{"image_said":{"detail":"low"}}'),
        ({"bytes": None, "path": "a.png"}, "a.png", None),
        ({"image_url": {"url": "https://host/x"}}, "https://host/x", None),
    ],
)
def test_an_address_nested_as_chat_messages_and_data_sets_nest_it(value: Any, image: str, extra: str | None) -> None:
    item = item_of({"image": value})
    assert (item.image, item.extra) == (image, extra)


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"id": "x"}, ""),
        ({"id": "x", "image": None}, ""),
        ({"imag": "a/b"}, ' (was "image" meant by "imag"?)'),
        ({"Image": "a"}, ' (was "image" meant by "Image"?)'),
        ({"filename": "a"}, ' (was "file_name" meant by "filename"?)'),
        ({"caption": "see a.jpg,\nand b.jpg"}, ""),
        ({"zzz": "a"}, ""),
    ],
)
def test_a_row_without_an_image(row: dict[str, Any], hint: str) -> None:
    assert passed_over(row) == f"m:7{hint}"


@pytest.mark.parametrize("url", ["file://images/a.jpg", "file://", "FILE://host", "file://localhost"])
def test_a_file_url_without_an_absolute_path(url: str) -> None:
    problem = problem_of({"image": url})
    assert (url in problem.what, problem.expected) == (True, "file:///folder/picture.jpg")


@pytest.mark.parametrize("url", ["file:///a.jpg", "FILE:///a.jpg", "file://localhost/a.jpg", "file.jpg", "file:/a"])
def test_file_urls_that_are_fine(url: str) -> None:
    assert item_of({"image": url}).image == url


# --- not an image --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["type", "modality"])
@pytest.mark.parametrize(
    ("value", "hint"),
    [
        *[("video", "remove the row"), ("audio", "remove the row")],
        *[("Image", "write it in lower case"), ("IMAGE", "write it in lower case")],
        ("image_url", 'write "image", and the address as "url"'),
        ("text", 'remove the row, or write "image" if it is one'),
    ],
)
def test_only_images(key: str, value: Any, hint: str) -> None:
    problem = problem_of({"image": "a.jpg", key: value})
    assert problem.what == f"{key} {json.dumps(value)}: {IMAGES_ONLY}"
    assert (problem.expected, problem.hint) == ('"image"', hint)


@pytest.mark.parametrize("key", ["video", "audio", "videos", "audios"])
def test_a_row_that_has_a_video_and_no_image(key: str) -> None:
    problem = problem_of({"id": "x", key: "a.bin"})
    assert problem.what == f"a row with '{key}' and no image: {IMAGES_ONLY}"
    assert item_of({key: "a.bin", "image": "thumbnail.jpg"}).extra == f'{{"{key}":"a.bin"}}'
    assert passed_over({key: None}) == "m:7"


def test_a_row_that_is_no_image_is_one_problem() -> None:
    assert f"type {json.dumps('video')}" in problem_of({"type": "video", "video": "a.mp4", "modality": "video"}).what
    assert "type" in problem_of({"type": "text", "text": "hello"}).what


@pytest.mark.parametrize(
    "source",
    [
        *[
            "a.mp4",
            "A.MOV",
            "https://host/clip.webm",
            "https://host/clip.mp4?token=a.png",
            "s3://bucket/a.wav",
            "a.mpeg",
        ],
        *["data:video/mp4;base64,AAAA", "data:Audio/wav,x"],
    ],
)
@pytest.mark.parametrize("key", ["image", "url"])
def test_media_that_is_no_image(key: str, source: str) -> None:
    problem = problem_of({key: source})
    assert (problem.what, problem.expected) == (f'{key} "{source}": {IMAGES_ONLY}', "an image")


@pytest.mark.parametrize(
    "source", ["mp4", "a.mp4.jpg", "clip.mp4?.png", "https://host/a?from=x.mp4", "data:image/x,.mp4"]
)
def test_names_that_only_look_like_a_video(source: str) -> None:
    assert item_of({"image": source}).image == source


# --- backend, hash, size -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "gpu", None])
def test_backends(backend: str | None) -> None:
    assert item_of({"image": "a", "backend": backend}).backend == backend


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        *[("cuda", "gpu"), ("cuda:0", "gpu"), ("CUDA", "gpu"), ("GPU", "gpu"), ("mps", "gpu"), ("rocm", "gpu")],
        *[("CPU", "cpu"), ("host", "cpu"), ("tpu", ""), ("", ""), (0, ""), (True, ""), (["gpu"], ""), ({}, "")],
    ],
)
def test_a_backend_of_another_name(value: Any, meant: str) -> None:
    problem = problem_of({"image": "a", "backend": value})
    assert problem.what == f"Unsupported Kimi-K3 deferred preprocessing backend: {json.dumps(value)}"
    assert (problem.expected, problem.hint) == ('"gpu" or "cpu"', f'was "{meant}" meant?' if meant else "")


def test_content_hash() -> None:
    assert item_of({"image": "a", "content_hash": HASH}).content_hash == HASH
    assert item_of({"image": "a", "content_hash": None}).content_hash is None


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        *[(HASH[7:], f"write {HASH}"), (HASH.upper(), f"write {HASH}"), (f"SHA256:{HASH[7:]}", f"write {HASH}")],
        *[(HASH[:-1], ""), (HASH + "0", ""), (HASH + "\n", ""), (HASH.replace("a", "g"), ""), ("md5:" + "0" * 32, "")],
        *[("", ""), (7, ""), ([HASH], ""), (False, "")],
    ],
)
def test_a_content_hash_that_is_none(value: Any, hint: str) -> None:
    problem = problem_of({"image": "a", "content_hash": value})
    assert problem.what.startswith("content_hash is ")
    assert (problem.expected, problem.hint) == ('"sha256:" and 64 lower-case hex digits', hint)


@pytest.mark.parametrize("wrong", ["640", 640.0, 640.5, 0, -1, True, 2**31, 10**30, [640], {}])
@pytest.mark.parametrize("key", ["width", "height"])
def test_sizes_are_whole_pixels(key: str, wrong: Any) -> None:
    problem = problem_of({"image": "a", "width": 640, "height": 480, key: wrong})
    assert (problem.what, "whole pixels" in problem.expected) == (f"{key} is {json.dumps(wrong)}", True)


def test_a_size_is_whole_or_absent() -> None:
    assert problem_of({"image": "a", "width": 640}).what == "height is missing"
    assert problem_of({"image": "a", "height": 640, "width": None}).what == "width is missing"
    assert len(problems_of({"image": "a", "width": 0, "height": 0})) == 2
    item = item_of({"image": "a", "width": None, "height": None})
    assert (item.width, item.height, item.extra) == (None, None, None)
    item = item_of({"image": "a", "width": 1, "height": 2**31 - 1})
    assert (item.width, item.height) == (1, 2**31 - 1)


# --- locally preprocessed items --------------------------------------------------------------------------------------


def test_a_features_row() -> None:
    item = item_of({"features": "f.npy", "grid_thw": [1, 4, 6], "image": "a.jpg", "width": 84, "height": 56})
    assert (item.path, item.image, item.id, item.grid_thw) == ("local", "f.npy", "f.npy", (1, 4, 6))
    assert (item.width, item.height, item.extra) == (84, 56, '{"image":"a.jpg"}')


@pytest.mark.parametrize(
    "grid",
    [None, 4, "1,4,6", [4, 6], [1, 4, 6, 1], [2, 4, 6], [1, 0, 6], [1, 4, -6], [1, 4.0, 6], [True, 4, 6], [[1, 4, 6]]],
)
def test_a_features_row_needs_its_grid(grid: Any) -> None:
    problem = problem_of({"features": "f.npy", "grid_thw": grid})
    what = "a features row without grid_thw" if grid is None else f"grid_thw is {json.dumps(grid)}"
    assert (problem.what, problem.expected) == (what, "[1, rows, columns] in patches")


def test_a_grid_without_features_is_an_ordinary_field() -> None:
    item = item_of({"image": "a", "features": None, "grid_thw": "any"})
    assert (item.path, item.grid_thw, item.extra) == ("deferred", None, '{"features":null,"grid_thw":"any"}')


# --- id --------------------------------------------------------------------------------------------------------------


def test_id_aliases_in_their_order() -> None:
    assert ID_KEYS == ("id", "key", "__key__")
    assert item_of({"image": "a", "__key__": "3", "key": "2", "id": "1"}).id == "1"
    assert item_of({"image": "a", "__key__": "3", "key": "2", "id": None}).id == "2"
    item = item_of({"image": "a", "__key__": "3"})
    assert (item.id, item.extra) == ("3", None)


@pytest.mark.parametrize(
    "name", ["__metadata__", "../../x", "/etc/passwd", "a\nb", "\x00", " ", "ü\U0001f600", "x" * 70_000]
)
def test_any_text_is_an_id(name: str) -> None:
    assert item_of({"image": "a", "id": name}).id == name


@pytest.mark.parametrize(("number", "text"), [(7, "7"), (0, "0"), (-1, "-1"), (10**40, "1" + "0" * 40)])
def test_integers_become_strings(number: int, text: str) -> None:
    assert item_of({"image": "a", "id": number}).id == text


@pytest.mark.parametrize("value", ["", True, False, 1.0, 1.5, [], ["x"], {}])
@pytest.mark.parametrize("key", ID_KEYS)
def test_other_ids(key: str, value: Any) -> None:
    problem = problem_of({"image": "a", key: value})
    assert (problem.what, problem.expected) == (f"{key} is {json.dumps(value)}", "a non-empty string or an integer")


def test_the_id_of_a_data_url_is_short_and_its_own() -> None:
    one, two = ("data:image/png;base64," + letter * 100_000 for letter in "AB")
    first, second = item_of({"image": one}), item_of({"image": two})
    assert first.image == one
    digest = hashlib.sha256(one.encode()).hexdigest()
    assert first.id == short_image(one) == f"data:image/png;base64,sha256-{digest[:32]}"
    assert first.id != second.id
    assert len(short_image("data:" + "x" * 100_000)) < 200
    for source in ("a.png", "https://host/data:x", "x" * 10_000):
        assert short_image(source) == source


# --- extra -----------------------------------------------------------------------------------------------------------


def test_extra_keeps_order_nesting_and_unicode() -> None:
    more = {"z": {"b": [1, {"c": None}], "a": True}, "ä": "\U0001f600 \u2028", "a": 0.1, "m": 10**30, "": ""}
    extra = item_of({"z": more["z"], "image": "a", **more}).extra
    assert extra is not None
    assert (json.loads(extra), list(json.loads(extra))) == (more, list(more))
    assert "\U0001f600" in extra  # as written, not as escapes


def test_what_json_cannot_hold_is_named_by_field() -> None:
    row = {
        "image": "a",
        "fine": 1,
        "at": datetime.date(2026, 1, 1),
        "boxes": [1.0, float("nan")],
        "raw": b"\xff" * 10**6,
    }
    report = Report()
    (item,) = read_row(Row("7", row), 0, "m:7", report)
    assert json.loads(item.extra or "") == {"fine": 1, "at": "2026-01-01", "boxes": [1.0, None], "raw": None}
    assert [warning.what.split(" ")[0] for warning in report.warnings] == ['"at"', '"boxes"', '"raw"']
    assert (report.total, all(len(str(warning)) < 300 for warning in report.warnings)) == (0, True)


# --- reports ---------------------------------------------------------------------------------------------------------


def test_every_problem_of_a_row_is_reported() -> None:
    row = {"image": 5, "id": [], "backend": "cuda", "content_hash": "x", "width": 0, "height": 1, "type": "video"}
    words = [problem.what.split(" ")[0] for problem in problems_of(row)]
    assert words == ["type", "image", "Unsupported", "content_hash", "width", "id"]


def test_a_row_with_a_problem_still_tells_its_id() -> None:
    report = Report()
    (item,) = read_row(Row("1", {"image": "a", "id": "x", "backend": "cuda"}), 0, "m:1", report)
    assert (item.id, report.total) == ("x", 1)


def test_a_report_keeps_the_first_problems_and_counts_all() -> None:
    report = Report()
    for number in range(MAX_PROBLEMS + 5):
        assert report.full == (number >= MAX_PROBLEMS)
        report.add(f"m:{number}", "wrong")
    assert (report.total, len(report.problems)) == (MAX_PROBLEMS + 5, MAX_PROBLEMS)
    assert report.problems[-1].where == f"m:{MAX_PROBLEMS - 1}"
    report.add_first(Problem("m", "why"))
    assert (report.total, len(report.problems)) == (MAX_PROBLEMS + 6, MAX_PROBLEMS)
    assert (report.problems[0].where, report.problems[-1].where) == ("m", f"m:{MAX_PROBLEMS - 2}")


def test_values_in_messages_are_short_and_printable() -> None:
    assert show("é\n\x1b[31m") == '"\\u00e9\\n\\u001b[31m"'
    assert len(show(["x" * 100_000])) <= 80
    assert show(b"x") == "\"b'x'\""
    names = [kind(value) for value in ([], "", True, 1, 1.5, None)]
    assert names == ["a list", "a string", "true or false", "a number", "a number", "null"]


# --- any row ---------------------------------------------------------------------------------------------------------

SINGLE = ("type", "modality", "backend", "content_hash", "width", "height")
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KNOWN = {
    **dict.fromkeys(IMAGE_KEYS, TEXT),
    **dict.fromkeys(ID_KEYS, TEXT | st.integers()),
    **{"features": TEXT, "grid_thw": st.just([1, 2, 4]), "content_hash": st.just(HASH)},
    **{"type": st.just("image"), "modality": st.just("image"), "backend": st.sampled_from(["cpu", "gpu"])},
    **{"width": st.integers(1, 99), "height": st.integers(1, 99), "video": TEXT},
}
SANE_ROWS = st.fixed_dictionaries({}, optional={key: st.none() | values for key, values in KNOWN.items()})
WILD_ROWS = st.dictionaries(st.sampled_from(list(KNOWN)) | TEXT, VALUES, max_size=6)


@settings(max_examples=600, deadline=None)
@given(SANE_ROWS, WILD_ROWS, st.booleans())
def test_no_field_gets_lost(sane: dict[str, Any], wild: dict[str, Any], mostly_sane: bool) -> None:
    row = {**wild, **sane} if mostly_sane else {**sane, **wild}
    report = Report()
    items = read_row(Row("7", row), 4, "m.jsonl:7", report)
    assert all(problem.where == "m.jsonl:7" and problem.what for problem in report.problems)
    if not items or report.total:
        assert report.total or report.passed_over[0].names[0].startswith("m.jsonl:7")
        return
    extra = [json.loads(item.extra or "{}") for item in items]
    assert len({item.id for item in items}) == len(items)
    if len(items) > 1 or "#" in items[0].id:  # several images: the row's own fields may have been renamed
        return
    (item,), (rest,) = items, extra
    assert rest == {key: value for key, value in row.items() if key in rest}
    used = {key: row[key] for key in row if key not in rest}
    image_key = "features" if item.path == "local" else next(key for key in IMAGE_KEYS if used.get(key))
    assert used.pop(image_key) == item.image
    for key in ID_KEYS:
        assert key not in used or str(used.pop(key)) == item.id
    assert used.pop("type", None) in (None, "image")
    assert used.pop("modality", None) in (None, "image")
    if item.path == "local":
        assert tuple(used.pop("grid_thw")) == item.grid_thw
    assert all(getattr(item, key) == used.pop(key, None) for key in ("backend", "content_hash", "width", "height"))
    assert used == {}
