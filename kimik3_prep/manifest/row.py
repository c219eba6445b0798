"""One manifest row, field by field: what is there, what it means, what is wrong with it."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from typing import Any, Literal, NamedTuple, cast

from kimik3_prep.errors import Problem
from kimik3_prep.images.address import is_data_url

IMAGE_KEYS = ("image", "image_path", "path", "file_name", "url")
ID_KEYS = ("id", "key", "__key__")
BACKENDS = ("cpu", "gpu")

JSON_VALUES = "strings, finite numbers, booleans, lists, objects"

#: Problems kept for the report; the rest are only counted.
MAX_PROBLEMS = 1000

_NOT_IMAGES = ("video", "audio", "videos", "audios")
_NOT_IMAGE_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp"),
    *(".mp3", ".m4a", ".aac", ".wav", ".flac", ".ogg", ".opus"),
)
_FILE_URL = re.compile(r"file://(localhost)?/", re.IGNORECASE)
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
#: SGLang's own sentence, so that a person who has met it there knows it again here.
_IMAGES_ONLY = "Kimi-K3 encoder mode supports image input only"

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Report:
    """Problems, the first `MAX_PROBLEMS` of them kept."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.total = 0

    @property
    def full(self) -> bool:
        """Whether further problems are only counted."""
        return len(self.problems) == MAX_PROBLEMS

    def add(self, where: str, what: str, expected: str = "", hint: str = "") -> None:
        """Note a problem in the words of `Problem`'s fields."""
        self.add_problem(Problem(where, what, expected, hint))

    def add_problem(self, problem: Problem) -> None:
        """Note a problem; past the first `MAX_PROBLEMS` it is only counted."""
        self.total += 1
        if not self.full:
            self.problems.append(problem)

    def add_first(self, problem: Problem) -> None:
        """For what explains the others: it is kept however many there are."""
        self.total += 1
        self.problems = [problem, *self.problems[: MAX_PROBLEMS - 1]]


class Item(NamedTuple):
    """One manifest row. See `ITEM_SCHEMA` for the fields, which have the same order."""

    item: int
    line: int
    id: str
    image: str
    path: Literal["deferred", "local"]
    backend: Literal["cpu", "gpu"] | None
    content_hash: str | None
    width: int | None
    height: int | None
    grid_thw: tuple[int, int, int] | None
    extra: str | None


def read_item(number: int, line: int, row: dict[str, Any], where: str, report: Report) -> Item | None:
    """The row as an Item, its problems reported; None where no image or no id can be told.

    A row with other problems still gives an Item, because its id may be another row's too. Nobody may use the Items
    once `report` holds a problem.
    """
    before = report.total
    rest = dict(row)
    local = rest.get("features") is not None
    _check_kind(rest, where, report)
    image = _take_image(rest, local, where, report)
    if image is None and report.total == before:  # nothing said yet explains why there is none
        # Nobody reads the hint of a problem that is only counted, and a million of them take minutes.
        hint = "" if report.full else _near(rest, IMAGE_KEYS)
        report.add(where, "the row names no image", f"one of {', '.join(IMAGE_KEYS)}", hint)
    backend = _take_backend(rest, where, report)
    content_hash = _take_hash(rest, where, report)
    width, height = _take_size(rest, where, report)
    grid_thw = _take_grid(rest, where, report) if local else None
    identity = _take_id(rest, image, where, report)
    extra = _extra(rest, where, report)
    if image is None or not identity:
        return None
    path: Literal["deferred", "local"] = "local" if local else "deferred"
    return Item(number, line, identity, image, path, backend, content_hash, width, height, grid_thw, extra)


def _check_kind(rest: dict[str, Any], where: str, report: Report) -> None:
    """One problem for a row that says it is no image."""
    what = hint = ""
    for key in ("modality", "type"):
        kind = rest.pop(key, None)
        if kind is not None and kind != "image":
            what, hint = f"{key} {show(kind)}", _kind_hint(kind)
    if not what and not rest.keys().isdisjoint(_NOT_IMAGES):
        given = {key for key, value in rest.items() if value is not None}
        if given.isdisjoint((*IMAGE_KEYS, "features")):
            what = next((f"a row with {key!r} and no image" for key in _NOT_IMAGES if key in given), "")
            hint = "remove the row"
    if what:
        report.add(where, f"{what}: {_IMAGES_ONLY}", '"image"', hint)


def _kind_hint(kind: Any) -> str:
    word = kind.lower() if isinstance(kind, str) else ""
    if word == "image":
        return "write it in lower case"
    if word == "image_url":
        return 'write "image", and the address as "url"'
    return "remove the row" if word in _NOT_IMAGES else 'remove the row, or write "image" if it is one'


def _take_image(rest: dict[str, Any], local: bool, where: str, report: Report) -> str | None:
    """The first image key that is there; later aliases stay in `extra`. For a local item: its features file."""
    keys = ("features",) if local else IMAGE_KEYS
    for key in keys:
        value = rest.get(key)
        if value is None:
            continue
        del rest[key]
        if not isinstance(value, str) or not value:
            hint = _object_hint(value) if isinstance(value, dict) else ""
            report.add(where, f"{key} is {show(value)}", "a path or URL, as a non-empty string", hint)
            return None
        if _is_no_image(value):
            report.add(where, f"{key} {show(value)}: {_IMAGES_ONLY}", "an image", "remove the row")
            return None
        if value[:7].lower() == "file://" and not _FILE_URL.match(value):
            hint = "a relative path is written without file://"
            report.add(where, f"{key} {show(value)} has no absolute path", "file:///folder/picture.jpg", hint)
            return None
        return value
    return None


def _is_no_image(source: str) -> bool:
    if is_data_url(source):
        return source[5:14].partition("/")[0].lower() in ("video", "audio")
    path = source.partition("?")[0] if "?" in source and "://" in source else source
    return path.lower().endswith(_NOT_IMAGE_SUFFIXES)


def _object_hint(value: dict[str, Any]) -> str:
    """For the ways in which chat messages and data set libraries nest an address."""
    for key in ("path", "url"):
        if isinstance(value.get(key), str):
            return f"write its {key} alone: {show(value[key])}"
    return ""


def _take_backend(rest: dict[str, Any], where: str, report: Report) -> Literal["cpu", "gpu"] | None:
    backend = rest.pop("backend", None)
    if backend is None or backend in BACKENDS:
        return cast("Literal['cpu', 'gpu'] | None", backend)
    meant = {"cuda": "gpu", "gpu": "gpu", "mps": "gpu", "rocm": "gpu", "device": "gpu", "cpu": "cpu", "host": "cpu"}
    word = str(backend).lower().partition(":")[0]
    hint = f'was "{meant[word]}" meant?' if word in meant else ""
    report.add(where, f"Unsupported Kimi-K3 deferred preprocessing backend: {show(backend)}", '"gpu" or "cpu"', hint)
    return None


def _take_hash(rest: dict[str, Any], where: str, report: Report) -> str | None:
    value = rest.pop("content_hash", None)
    if value is None or (isinstance(value, str) and _HASH.fullmatch(value)):
        return value
    hint = ""
    if isinstance(value, str) and _HASH.fullmatch(f"sha256:{value.lower().removeprefix('sha256:')}"):
        hint = f"write sha256:{value.lower().removeprefix('sha256:')}"
    report.add(where, f"content_hash is {show(value)}", '"sha256:" and 64 lower-case hex digits', hint)
    return None


def _take_size(rest: dict[str, Any], where: str, report: Report) -> tuple[int | None, int | None]:
    width, height = rest.pop("width", None), rest.pop("height", None)
    if width is None and height is None:
        return None, None
    fine = True
    for key, value in (("width", width), ("height", height)):
        if type(value) is not int or not 0 < value < 2**31:
            fine = False
            found = f"{key} is missing" if value is None else f"{key} is {show(value)}"
            report.add(where, found, "both width and height as whole pixels above zero, or neither")
    return (width, height) if fine else (None, None)


def _take_grid(rest: dict[str, Any], where: str, report: Report) -> tuple[int, int, int] | None:
    value = rest.pop("grid_thw", None)
    if (
        isinstance(value, list)
        and len(value) == 3
        and all(type(n) is int and 0 < n < 2**31 for n in value)
        and value[0] == 1
    ):
        return (value[0], value[1], value[2])
    found = "a features row without grid_thw" if value is None else f"grid_thw is {show(value)}"
    report.add(where, found, "[1, rows, columns] in patches")
    return None


def _take_id(rest: dict[str, Any], image: str | None, where: str, report: Report) -> str:
    for key in ID_KEYS:
        value = rest.get(key)
        if value is None:
            continue
        del rest[key]
        if type(value) is int:
            return str(value)
        if isinstance(value, str) and value:
            return value
        report.add(where, f"{key} is {show(value)}", "a non-empty string or an integer")
        return ""
    return short_image(image or "")


def _extra(rest: dict[str, Any], where: str, report: Report) -> str | None:
    if not rest:
        return None
    try:
        return _to_json(rest)
    except (TypeError, ValueError):  # a Parquet column of NaN inside lists, or of a type that is read as no JSON value
        for key, value in rest.items():
            try:
                _to_json(value)
            except (TypeError, ValueError) as error:
                report.add(where, f"{show(key)} holds what JSON cannot: {error}", JSON_VALUES)
        return None


def short_image(image: str) -> str:
    """The image string as an index shows it: a `data:` URL by its media type and a digest, all else unchanged."""
    if not is_data_url(image):
        return image
    digest = hashlib.sha256(image.encode("utf-8")).hexdigest()
    return f"{image.partition(',')[0][:100]},sha256-{digest[:32]}"


def show(value: Any) -> str:
    """A value as JSON on one line, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else f"{text[:70]}…"


def kind(value: Any) -> str:
    """What a JSON value that is no object is called."""
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _near(row: dict[str, Any], keys: tuple[str, ...]) -> str:
    for key, value in row.items():
        if value is not None and (near := difflib.get_close_matches(key.lower(), keys, 1, 0.6)):
            return f'was "{near[0]}" meant by "{key[:80]}"?'
    return ""
