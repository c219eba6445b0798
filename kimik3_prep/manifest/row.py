"""One row of a source: which of its fields are images, what they are called, and what the row promises of them."""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from kimik3_prep.images.address import is_data_url
from kimik3_prep.manifest.items import short_image
from kimik3_prep.manifest.magic import base64_image, names_an_image, suffix_of
from kimik3_prep.manifest.report import Report, show
from kimik3_prep.remote import scheme

#: Fields that name an image whatever they hold, in the order they are looked for.
IMAGE_KEYS = ("image", "image_path", "path", "file_name", "url")
ID_KEYS = ("id", "key", "__key__")
BACKENDS = ("cpu", "gpu")

#: Fields that hold images where none of `IMAGE_KEYS` does.
_MORE_KEYS = ("images", "image_paths", "image_url", "image_urls", "image_list")
_KNOWN_KEYS = (*IMAGE_KEYS, *_MORE_KEYS)
#: Where an object names its image: in bytes, then by a path, then by an address.
_ADDRESS_KEYS = (
    *("bytes", "path", "image_path", "file_name", "image_name", "image", "filename"),
    *("image_url", "url", "raw_url", "data"),
)
#: Texts that may talk of a picture without being one.
_PROSE = ("text", "value", "content", "caption", "question", "answer", "prompt", "response")
_NOT_IMAGES = ("video", "audio", "videos", "audios")
_OTHER_TYPES = (*_NOT_IMAGES, "text", "image_url")
_NOT_IMAGE_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp"),
    *(".mp3", ".m4a", ".aac", ".wav", ".flac", ".ogg", ".opus"),
)
_FEATURES = (".safetensors", ".npy")
#: Fields of an item: where a row of several images has them, they speak of the row.
_OF_AN_ITEM = ("id", "image", "type", "modality", "backend", "content_hash", "width", "height", "features", "grid_thw")
#: A path that needs no second look: neither a URL nor of another medium.
_PLAIN = re.compile(r"[^:]{1,1000}\.(?:jpe?g|png|webp|gif|bmp|tiff?)", re.IGNORECASE)
_NOTHING: dict[str, Any] = {}
_FILE_URL = re.compile(r"file://(localhost)?/", re.IGNORECASE)
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_STEP = re.compile(r"([^.\[\]]+)|\[(\*|\d+)\]")
_NUMBER = re.compile(r"[_\- ]?\d+$")
_OF_PICTURES = re.compile("image|img|photo|picture", re.IGNORECASE)
_DEEPEST = 12  # objects and lists inside one another that are looked through for images
_EMPTY: tuple[Any, ...] = (None, "", [], {})
#: SGLang's own sentence, so that a person who has met it there knows it again here.
_IMAGES_ONLY = "Kimi-K3 encoder mode supports image input only"

_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Selection:
    """What a person says about the rows of a source. Without a word, the rows themselves decide."""

    image_fields: tuple[str, ...] = ()
    """Fields of the images: `image`, `meta.path`, `messages[*].content[*].image`."""
    id_fields: tuple[str, ...] = ()
    """Fields whose values make the id, joined by `/`."""
    number_rows: bool = False
    """Call each row by its number, from 0."""
    formats: tuple[str, ...] = ()
    """Formats that packages of their own read: their files are images of a folder or a tar as well."""

    @property
    def is_said(self) -> bool:
        """Whether a person chose fields or ids."""
        return bool(self.image_fields or self.id_fields or self.number_rows)


#: A person who says nothing.
NO_SELECTION = Selection()


class Row(NamedTuple):
    """A row as its source has it."""

    place: str
    """Where it stands: the line, and the column where a line holds several."""
    fields: dict[str, Any] | None
    """None for a row whose syntax is a problem that was reported already."""
    cells: tuple[str, ...] = ()
    """Fields that hold `Cell`s, also those that are empty in this row."""


class Cell(str):
    """The address of an image that lies in the source itself: in a table, or in a tar."""

    path: str | None = None
    """What the picture was called before it got there."""


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


class _Picture(NamedTuple):
    """An image that a row names."""

    image: str
    role: str
    """Where it stands in the row: `image_2`, `messages[0].content[1].image`."""
    said: dict[str, Any]
    """Fields that come to the row's own: what an object says beside the address, the path that bytes once had."""


class _Pictures(NamedTuple):
    """The images of a row."""

    found: list[_Picture | None]
    """By position; None where a position is empty."""
    several: bool = False
    """Whether the row may hold more than one: then positions stand behind its id."""
    fields: tuple[str, ...] = ()
    """Fields that hold nothing else."""
    roles: bool = False
    """Whether items say where in the row they stand."""


def read_row(row: Row, number: int, where: str, report: Report, select: Selection = NO_SELECTION) -> list[Item]:
    """Return the row's items, its problems reported; none for a row that names no image, which is passed over.

    number: of the row in its source, from 0. A row with problems gives items too, because their ids may be another
    row's. Nobody may use items once `report` holds a problem. `item` is 0 in all of them.
    """
    if row.fields is None:
        return []
    before = report.total
    line = int(row.place.partition(":")[0])
    rest = dict(row.fields)
    local = _is_local(rest)
    _check_type(rest, where, report)
    if local:
        file = _picture(rest["features"], "features", "features", where, report)
        pictures = _Pictures([file], False, ("features",))
    else:
        pictures = _find(rest, row.cells, select, where, report)
    images = [picture for picture in pictures.found if picture]
    if not images and report.total == before:  # nothing said yet explains why there is none
        _pass_over(rest, where, report)
        return []
    kept = rest
    for field in pictures.fields:
        kept.pop(field, None)
    if any(picture.image[:5].lower() == "data:" for picture in images) and any(map(_holds_more, kept.values())):
        kept = {
            key: _without_pictures(value) if isinstance(value, (dict, list)) else value for key, value in kept.items()
        }
    if pictures.several:
        id = _take_id(kept, None, number, where, report, select)
        items = []
        for place, picture in enumerate(pictures.found):
            if picture is not None and id:
                extra = _extra(_of_several(kept, picture, pictures.roles), where, report)
                items.append(
                    Item(0, line, f"{id}#{place}", picture.image, "deferred", None, None, None, None, None, extra)
                )
        return items
    backend = _take_backend(kept, where, report)
    content_hash = _take_hash(kept, where, report)
    width, height = _take_size(kept, where, report)
    grid_thw = _take_grid(kept, where, report) if local else None
    id = _take_id(kept, images[0].image if images else None, number, where, report, select)
    if not images or not id:
        return []
    if select.is_said:
        kept = _renamed(kept, ("id", "image"))
    extra = _extra({**kept, **images[0].said} if images[0].said else kept, where, report)
    path: Literal["deferred", "local"] = "local" if local else "deferred"
    return [Item(0, line, id, images[0].image, path, backend, content_hash, width, height, grid_thw, extra)]


def _of_several(fields: dict[str, Any], picture: _Picture, roles: bool) -> dict[str, Any]:
    """The row's other fields, as one of its images has them."""
    return {**_renamed(fields, _OF_AN_ITEM), **picture.said, **({"role": picture.role} if roles else {})}


def _renamed(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Put `row_` before names that would be read as an item's own."""
    for key in [key for key in fields if key in names]:
        new = f"row_{key}"
        while new in fields:
            new = f"row_{new}"
        fields = {**{name: value for name, value in fields.items() if name != key}, new: fields[key]}
    return fields


def _pass_over(rest: dict[str, Any], where: str, report: Report) -> None:
    """Count a row without an image; one that has something else to encode is a problem."""
    if other := next((key for key in _NOT_IMAGES if rest.get(key) not in _EMPTY), None):
        report.add(where, f"a row with {other!r} and no image: {_IMAGES_ONLY}", '"image"', "remove the row")
        return
    near = ""
    for key, value in rest.items():
        if value in _EMPTY or key in _KNOWN_KEYS:
            continue
        if names := difflib.get_close_matches(key.lower(), IMAGE_KEYS, 1, 0.6):
            near = f' (was "{names[0]}" meant by "{key[:80]}"?)'
    report.pass_over("rows without an image", where + near)


# --- which fields are images --------------------------------------------------------------------------------------


def _is_local(rest: dict[str, Any]) -> bool:
    """Whether the image is a features file. Beside an image a field of that name may be anything."""
    features = rest.get("features")
    if features is None:
        return False
    is_file = isinstance(features, str) and features.lower().endswith(_FEATURES)
    return is_file or rest.get("grid_thw") is not None or all(rest.get(key) is None for key in IMAGE_KEYS)


def _find(rest: dict[str, Any], cells: tuple[str, ...], select: Selection, where: str, report: Report) -> _Pictures:
    """The row's images: where a person says, else in its cells, its well-known fields, or whatever looks like one."""
    if select.image_fields:
        return _chosen(rest, select.image_fields, where, report)
    in_cells = [(key, rest.get(key)) for key in cells]
    if any(value not in _EMPTY for _, value in in_cells):
        return _of_fields(in_cells, where, report)
    page = ""
    for key in _KNOWN_KEYS:
        value = rest.get(key)
        if not value and value in _EMPTY:
            continue
        if key == "url" and _is_page(value):
            page = key
            continue
        before = report.total
        pictures = _of_fields([(key, value)], where, report)
        if any(pictures.found) or report.total > before:
            return pictures
    if cells:  # a row of a table of images, without one
        return _Pictures([])
    looked = _by_looks({key: value for key, value in rest.items() if key != page})
    return looked if looked.found or not page else _of_fields([(page, rest[page])], where, report)


def _is_page(value: Any) -> bool:
    """Whether an address may be that of a page, so that something better is looked for first."""
    return isinstance(value, str) and scheme(value) in ("http", "https") and not names_an_image(value)


def _of_fields(fields: list[tuple[str, Any]], where: str, report: Report) -> _Pictures:
    """The images of fields that are known to hold some."""
    if len(fields) == 1 and isinstance(fields[0][1], str):  # nearly every row of nearly every source
        key, value = fields[0]
        return _Pictures([_picture(value, key, key, where, report)], False, (key,))
    found: list[_Picture | None] = []
    for key, value in fields:
        parts = [(f"{key}[{n}]", part) for n, part in enumerate(value)] if isinstance(value, list) else [(key, value)]
        found += [None if part in _EMPTY else _picture(part, key, role, where, report) for role, part in parts]
    several = len(fields) > 1 or isinstance(fields[0][1], list)
    return _Pictures(found, several, tuple(key for key, _ in fields), len(fields) > 1)


def _picture(value: Any, key: str, role: str, where: str, report: Report) -> _Picture | None:
    """The image that a string or an object names; a problem where it names none."""
    if type(value) is str and _PLAIN.fullmatch(value):
        return _Picture(value, role, _NOTHING)
    if isinstance(value, Cell):
        return _Picture(str(value), role, {} if value.path is None else {"image_path": value.path})
    if isinstance(value, dict):
        if (picture := _of_object(value, key, role)) is not None:
            return picture
        # An object whose address is null is an empty cell, as data set libraries write it.
        if not value or any(name not in _ADDRESS_KEYS or part is not None for name, part in value.items()):
            report.add(where, f"{key} is {show(value)}", "a path or URL, or an object with one as path or url")
        return None
    problem, expected, hint = f"{key} is {show(value)}", "a path or URL, as a non-empty string", ""
    if isinstance(value, str) and value:
        if not _is_no_image(value) and (value[:7].lower() != "file://" or _FILE_URL.match(value)):
            return _Picture(base64_image(value) or value, role, {})
        problem, expected, hint = f"{key} {show(value)}: {_IMAGES_ONLY}", "an image", "remove the row"
        if not _is_no_image(value):
            problem, expected = f"{key} {show(value)} has no absolute path", "file:///folder/picture.jpg"
            hint = "a relative path is written without file://"
    report.add(where, problem, expected, hint)
    return None


def _is_no_image(source: str) -> bool:
    if is_data_url(source):
        return source[5:14].partition("/")[0].lower() in ("video", "audio")
    return suffix_of(source) in _NOT_IMAGE_SUFFIXES


def _of_object(value: dict[str, Any], key: str, role: str) -> _Picture | None:
    """The image that an object names, and what else it says."""
    for name in _ADDRESS_KEYS:
        inner = value.get(name)
        if isinstance(inner, dict):
            if (picture := _of_object(inner, key, role)) is not None:
                return picture
        elif isinstance(inner, str) and inner:
            others = {k: v for k, v in value.items() if k not in (name, "type") and v is not None}
            return _Picture(base64_image(inner) or inner, role, {f"{key}_said": others} if others else {})
    return None


def is_address_only(value: dict[str, Any]) -> bool:
    """Whether an object does nothing but name an image."""
    return all(key in _ADDRESS_KEYS or key == "type" for key in value)


def _by_looks(rest: dict[str, Any]) -> _Pictures:
    """Whatever looks like an image: bytes before paths, and paths before addresses.

    An empty field keeps its position where its name tells that it is one of them: `image_2` beside `image_1`.
    """
    seen = {key: _seen(value, key, 0) for key, value in rest.items()}
    best = max((_rank(one) for ones in seen.values() for one in ones if one), default=0)
    seen = {key: [one for one in ones if one is None or _rank(one) == best] for key, ones in seen.items()}
    holding = {key for key, ones in seen.items() if any(ones)}
    stems = {stem for key in holding if (stem := _NUMBER.sub("", key)) != key}
    fields = [
        key for key, value in rest.items() if key in holding or (value in _EMPTY and _NUMBER.sub("", key) in stems)
    ]
    found = [one for key in fields for one in seen[key] or [None]]
    flat = tuple(key for key in fields if not _holds_more(rest[key]))
    several = len(found) > 1 or any(isinstance(rest[key], list) for key in fields)
    return _Pictures(found, several, flat, several and (len(fields) > 1 or len(flat) < len(fields)))


def _seen(value: Any, role: str, depth: int) -> list[_Picture | None]:
    """What looks like an image in a value, inside lists and objects as well. Lists of texts keep empty positions."""
    if isinstance(value, str):
        looks = names_an_image(value) or value[:11].lower() == "data:image/"
        image = value if looks else base64_image(value)
        if image is None and scheme(value) is not None and _OF_PICTURES.search(role):
            image = value
        return (
            [] if image is None or (" " in value.partition("://")[0] and scheme(value)) else [_Picture(image, role, {})]
        )
    if depth == _DEEPEST or not isinstance(value, (list, dict)):
        return []
    if isinstance(value, list):
        parts = [_seen(part, f"{role}[{n}]", depth + 1) for n, part in enumerate(value)]
        if _holds_more(value):
            return [one for ones in parts for one in ones]
        return [one for ones in parts for one in ones or [None]] if any(parts) else []
    if "image" in str(value.get("type", "")):  # a part of a chat message
        if (picture := _of_object({k: v for k, v in value.items() if k != "type"}, "part", role)) is not None:
            return [picture._replace(said={})]
        source = value.get("source")
        return _seen(source, f"{role}.source", depth + 1) if isinstance(source, dict) else []
    fields = [(key, part) for key, part in value.items() if not (isinstance(part, str) and key in _PROSE)]
    texts = [one for key, part in fields if isinstance(part, str) for one in _seen(part, f"{role}.{key}", depth + 1)]
    best = max((_rank(one) for one in texts if one), default=0)  # one picture may be named by its path and its address
    inner = [
        one for key, part in fields if not isinstance(part, str) for one in _seen(part, f"{role}.{key}", depth + 1)
    ]
    return [one for one in texts if one and _rank(one) == best] + inner


def _rank(picture: _Picture) -> int:
    return 3 if is_data_url(picture.image) else 2 if scheme(picture.image) is None else 1


def _holds_more(value: Any) -> bool:
    """Whether a field with images in it says more than these."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(p, (dict, list)) for p in value))


def _without_pictures(value: Any) -> Any:
    """The value with short names where images stand in it."""
    if isinstance(value, dict):
        return {key: _without_pictures(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_pictures(part) for part in value]
    return short_image(base64_image(value) or value) if isinstance(value, str) else value


def _chosen(rest: dict[str, Any], paths: tuple[str, ...], where: str, report: Report) -> _Pictures:
    """The images at the places that a person chose."""
    found: list[_Picture | None] = []
    several = len(paths) > 1
    for path in paths:
        reached = [(path, rest[path])] if path in rest else reach(rest, path)
        for role, value in reached:
            pictures = _of_fields([(role, value)], where, report)
            found += pictures.found
            several |= pictures.several or "[" in role
    fields = tuple(path for path in paths if path in rest)
    return _Pictures(found, several, fields, several and (len(paths) > 1 or not fields))


def reach(row: Any, path: str) -> list[tuple[str, Any]]:
    """The values at a path of names, `[n]` and `[*]`, each with the way to it. A name goes into each part of a list."""
    ends = [("", row)]
    for name, number in _STEP.findall(path):
        parts = [
            (f"{way}[{n}]", part)
            for way, value in ends
            if isinstance(value, list)
            for n, part in enumerate(value)
            if number in ("", "*", str(n))
        ]
        if name:
            parts += [(way, value) for way, value in ends if not isinstance(value, list)]
            parts = [(f"{w}.{name}".lstrip("."), v[name]) for w, v in parts if isinstance(v, dict) and name in v]
        ends = parts
    return ends


# --- what the row says of its image -------------------------------------------------------------------------------


def _check_type(rest: dict[str, Any], where: str, report: Report) -> None:
    """Report a row that says it is no image. A `type` with other words is a field like any."""
    if "type" not in rest and "modality" not in rest:
        return
    for key in ("type", "modality"):
        value = rest.get(key)
        word = value.lower() if isinstance(value, str) else ""
        if key == "type" and value not in (None, "image") and word != "image" and word not in _OTHER_TYPES:
            continue
        rest.pop(key, None)
        if value not in (None, "image"):
            hint = 'remove the row, or write "image" if it is one'
            if word == "image":
                hint = "write it in lower case"
            elif word == "image_url":
                hint = 'write "image", and the address as "url"'
            elif word in _NOT_IMAGES:
                hint = "remove the row"
            report.add(where, f"{key} {show(value)}: {_IMAGES_ONLY}", '"image"', hint)
            rest.pop("modality", None)
            return


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
            problem = f"{key} is missing" if value is None else f"{key} is {show(value)}"
            report.add(where, problem, "both width and height as whole pixels above zero, or neither")
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
    problem = "a features row without grid_thw" if value is None else f"grid_thw is {show(value)}"
    report.add(where, problem, "[1, rows, columns] in patches")
    return None


def _take_id(
    rest: dict[str, Any], image: str | None, number: int, where: str, report: Report, select: Selection
) -> str:
    """What the row is called; empty, with a problem, where that cannot be. image: None for a row of several."""
    if select.number_rows:
        return str(number)
    if select.id_fields:
        parts = [_id_part(rest, field, where, report) for field in select.id_fields]
        return "/".join(parts) if all(parts) else ""
    for key in ID_KEYS:
        if rest.get(key) is not None:
            part = _id_part(rest, key, where, report)
            if image is not None:
                del rest[key]
            return part
    if image is None:
        return str(number)
    return short_image(image)


def _id_part(rest: dict[str, Any], field: str, where: str, report: Report) -> str:
    value = rest[field] if field in rest else next((value for _, value in reach(rest, field)), None)
    if isinstance(value, float) and value.is_integer() and field not in ID_KEYS:
        value = int(value)  # pandas turns whole numbers into floats where a row lacks one
    if type(value) is int or (isinstance(value, str) and value):
        return str(value)
    problem = f"{field} is missing" if value is None else f"{field} is {show(value)}"
    report.add(where, problem, "a non-empty string or an integer")
    return ""


def _extra(fields: dict[str, Any], where: str, report: Report) -> str | None:
    """The other fields as JSON. What JSON cannot hold is changed or left out, and a warning names it."""
    if not fields:
        return None
    try:
        return _to_json(fields)
    except (TypeError, ValueError):  # a Parquet column of NaN inside lists, or of bytes
        fine: dict[str, Any] = {}
        for key, value in fields.items():
            try:
                _to_json(value)
                fine[key] = value
            except (TypeError, ValueError) as error:
                fine[key] = _as_json(value)
                report.warn(where, f"{show(key)} holds what JSON cannot: {error}", "it is null in `extra`, or text")
        return _to_json(fine)


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(part) for part in value]
    if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value if isinstance(value, (str, int, float)) or value is None else str(value)
