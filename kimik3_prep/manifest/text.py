"""Rows in text: JSON Lines, a JSON list, a JSON object with a list inside, cells under a header, a path a line."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from typing import Any

from kimik3_prep import strict_json
from kimik3_prep.manifest.magic import SUFFIXES, base64_image, names_an_image
from kimik3_prep.manifest.report import Report, kind, show
from kimik3_prep.manifest.row import IMAGE_KEYS, Row, is_address_only

_MOST_OF_A_ROW = 256 << 20  # bytes; a row is several times in memory while it is read
_MOST_OF_A_DOCUMENT = 4 << 30
_SAMPLE = 1 << 16  # bytes that are looked at to tell what a text is
_SHORTER = "a path or a URL of the image", "write what a data: URL of this size holds into a file"

_BLANK = re.compile(r"\s*")
_BETWEEN = re.compile(r"\s*(?:,\s*(?=[^\s\]}])|(?=[\]}]))")
_NUMBERS = ("width", "height")  # fields of cells that are read as integers
_DELIMITERS = "\t,;|"
_NAMED_DELIMITER = re.compile(r"sep=(.)\s*$")
#: A path or URL with an image's suffix at the beginning of a line, and what follows it.
_PATH = re.compile(
    rf"([^\t,;|]+?(?:{'|'.join(sorted(map(re.escape, SUFFIXES)))})(?:\?\S*)?)(?:[\s,;|]+(.*))?$", re.IGNORECASE
)


class _Hashed(io.RawIOBase):
    """A file whose bytes go into a digest as they are read."""

    def __init__(self, file: BufferedReader, digest: Any) -> None:
        self._file, self._digest = file, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto1(buffer)
        self._digest.update(memoryview(buffer)[:count])
        return count


def text_rows(file: BufferedReader, name: str, digest: Any, report: Report) -> Iterator[Row]:
    """The rows of a text of any kind. What is wrong with it is reported, also that it is of none."""
    start = file.peek(_SAMPLE)[:_SAMPLE]
    first = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    encoding = _encoding(start)
    if first in (b"{", b"[", b"") or (encoding != "utf-8" and start.decode(encoding, "replace")[:1] in "{["):
        yield from _json_rows(file, name, digest, report)
        return
    decoded = start.decode(encoding, "replace").removeprefix("\ufeff")
    lines = [line for line in decoded.splitlines() if line.strip()]
    if not decoded.isprintable() and any(ord(letter) < 32 and letter not in "\t\r\n\f" for letter in decoded):
        report.add(
            name, "neither text nor a file of a known kind", "JSON Lines, CSV, Parquet, a tar or a folder of images"
        )
        return
    said: list[int] = []
    text = io.TextIOWrapper(io.BufferedReader(_Hashed(file, digest)), encoding, _fallback(said), newline="")
    if lines and _path_and_label(lines[0]):
        yield from _path_rows(text, report, name)
    else:
        yield from _cell_rows(text, decoded, name, report)
    if said:
        report.warn(name, "not UTF-8: read as Windows-1252", "save it as UTF-8 if letters look wrong")


def _encoding(start: bytes) -> str:
    """UTF-16 by its mark or its many zero bytes, else UTF-8, of which Windows-1252 is told apart while it is read."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        zeros = start[first::2]
        if len(zeros) > 3 and zeros.count(0) > 0.7 * len(zeros) and start[1 - first :: 2].count(0) == 0:
            return encoding
    return "utf-8"


def _fallback(said: list[int]) -> str:
    """The name of an error handler that reads bytes which are not UTF-8 as Windows-1252, and notes where."""

    def handler(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeDecodeError):
            raise error
        said.append(error.start)
        return error.object[error.start : error.end].decode("cp1252", "replace"), error.end

    codecs.register_error("kimik3_prep.cp1252", handler)
    return "kimik3_prep.cp1252"


# --- a path a line ------------------------------------------------------------------------------------------------


def _path_rows(text: io.TextIOWrapper, report: Report, name: str) -> Iterator[Row]:
    """A path or URL a line, or the same with a label behind it."""
    for number, line in enumerate(text, 1):
        line = line.removeprefix("\ufeff").rstrip("\r\n")
        if not line.strip():
            continue
        if (found := _path_and_label(line)) is None:
            report.pass_over("lines without an image", f"{name}:{number}")
            continue
        path, label = found
        yield Row(str(number), {"image": path, **({"label": label} if label else {})})


def _path_and_label(line: str) -> tuple[str, str] | None:
    if match := _PATH.match(line):
        return match[1], (match[2] or "").strip().strip('"')
    return (line, "") if names_an_image(line) else None


# --- cells under a header -----------------------------------------------------------------------------------------


def _cell_rows(text: io.TextIOWrapper, sample: str, name: str, report: Report) -> Iterator[Row]:
    """Rows of cells; an empty cell is a field that is not there."""
    csv.field_size_limit(_MOST_OF_A_ROW)
    named = _NAMED_DELIMITER.match(sample.partition("\n")[0])
    if named:
        text.readline()
        sample = sample.partition("\n")[2]
    delimiter, quoting = _dialect(sample, named[1] if named else "")
    spaced = re.search(f"{re.escape(delimiter)} ", sample.partition("\n")[0]) is not None
    quoting = {**quoting, "strict": False}
    reader = csv.reader(text, delimiter=delimiter, skipinitialspace=spaced, **quoting)
    mend = _unquoted if quoting["quoting"] == csv.QUOTE_NONE else str
    header = [cell.removeprefix("\ufeff").strip() for cell in next(reader, [])]
    if len(header) < 2 and not any(map(names_an_image, sample.splitlines()[1:50])):
        what = "neither JSON nor cells under a header nor a path a line"
        report.add(f"{name}:1", f"{what}: it begins with {show(sample[:40])}", "a row of any of these")
        return
    for column in sorted({column for column in header if header.count(column) > 1}):
        report.add(f"{name}:1", f"two columns are named {show(column)}", "names that are unique")
    by_index: dict[str, str] = {}
    for cells in reader:
        if not any(cells):
            continue
        place = str(reader.line_num + bool(named))
        if len(cells) != len(header):
            what = f"{len(cells)} cells under a header of {len(header)}"
            hint = f"quote text that has {show(delimiter)} in it; a first line `sep={delimiter}` names the separator"
            report.add(f"{name}:{place}", what, "as many cells as columns", hint)
            yield Row(place, None)
            continue
        row: dict[str, Any] = {key: cell for key, cell in zip(header, map(mend, cells), strict=True) if cell}
        for key in _NUMBERS:
            if (digits := row.get(key, "")).isascii() and digits.isdecimal() and len(digits) < 10:
                row[key] = int(digits)
        yield Row(place, _with_its_picture(row, by_index))


def _with_its_picture(row: dict[str, Any], by_index: dict[str, str]) -> dict[str, Any]:
    """A row of a VLMEvalKit table: its `image` may be the `index` of the row that has the picture."""
    image = row.get("image", "")
    index = row.get("index")
    if index is None or not image:
        return row
    if image.isdecimal() and image in by_index:
        return {"id": index, **row, "image": by_index[image]}
    if base64_image(image):
        by_index[index] = image
        return {"id": index, **row}
    return row


#: How quotes may be meant, best first: as the format has them, as letters, as whoever wrote them may have meant them.
_QUOTING: tuple[dict[str, Any], ...] = (
    {"quoting": csv.QUOTE_MINIMAL, "strict": True},
    {"quoting": csv.QUOTE_NONE},
    {"quoting": csv.QUOTE_MINIMAL},
)


def _dialect(sample: str, named: str) -> tuple[str, dict[str, Any]]:
    """The separator of the cells, and how quotes are meant: what gives the most rows of one length."""
    lines = sample.splitlines(keepends=True)
    if len(lines) > 1 and len(sample) > _SAMPLE // 5:  # the last one may be cut
        lines.pop()
    best, chosen = (-1.0, 1), (named or ",", _QUOTING[-1])
    for delimiter in named or _DELIMITERS:
        for quoting in _QUOTING:
            try:
                rows = [row for row in csv.reader(lines, delimiter=delimiter, **quoting) if row]
            except csv.Error:
                continue
            width = len(rows[0]) if rows else 0
            score = sum(len(row) == width for row in rows) / len(rows) if width > 1 else -1.0
            if (score, width) > best:
                best, chosen = (score, width), (delimiter, quoting)
    return chosen


def _unquoted(cell: str) -> str:
    """A cell without the quotes around it, whose quotes inside were not doubled."""
    return cell[1:-1].replace('""', '"') if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell


# --- JSON ---------------------------------------------------------------------------------------------------------


def _json_rows(file: BufferedReader, name: str, digest: Any, report: Report) -> Iterator[Row]:
    """A row a line; or all rows in one value, which the first line tells."""
    first = True
    before: list[bytes] = []
    for line, raw in enumerate(iter(partial(file.readline, _MOST_OF_A_ROW + 1), b""), 1):
        digest.update(raw)
        where = f"{name}:{line}"
        if len(raw) > _MOST_OF_A_ROW and not first:
            report.add(where, f"a row of more than {_MOST_OF_A_ROW >> 20} MiB", *_SHORTER)
            while raw and not raw.endswith(b"\n"):
                digest.update(raw := file.readline(_MOST_OF_A_ROW))
            continue
        text = raw.strip()
        if first:
            before.append(raw)
            text = text.removeprefix(codecs.BOM_UTF8).strip()
        if not text:
            continue
        if first and _is_document(text, not file.peek(_SAMPLE)[:_SAMPLE].strip()):
            digest.update(rest := file.read(_MOST_OF_A_DOCUMENT))
            if len(rest) == _MOST_OF_A_DOCUMENT:
                report.add(
                    where, f"one JSON value of more than {_MOST_OF_A_DOCUMENT >> 30} GiB", "a JSON object a line"
                )
                return
            yield from _document_rows(b"".join([*before, rest]), name, report)
            return
        if not first and line > 1:
            text = text.removeprefix(codecs.BOM_UTF8)
        first = False
        value = _value(text, where, report)
        if value is not _WRONG and not isinstance(value, dict):
            report.add(where, f"a row that is {kind(value)}", "a JSON object on one line", _of_a_list(text))
        if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return  # every line that follows would be the same problem
        yield Row(str(line), value if isinstance(value, dict) else None)


def _of_a_list(text: bytes) -> str:
    return "a file that begins with [ is read as one list" if text[:1] == b"[" else ""


def _is_document(text: bytes, alone: bool) -> bool:
    """Whether a first line begins a value that holds all rows."""
    if text[:1] not in (b"{", b"["):
        return False
    try:
        value, end = json.JSONDecoder().raw_decode(text.decode())
    except json.JSONDecodeError as error:
        return text[:1] == b"[" or error.pos >= len(error.doc) or error.msg.startswith("Unterminated")
    except (UnicodeDecodeError, RecursionError, ValueError):
        return text[:1] == b"["
    whole = end == len(text.decode())
    if isinstance(value, list):
        return alone or not whole
    parts = value.values()
    return whole and alone and (any(map(_holds_rows, parts)) or all(_holds_rows([part]) for part in parts))


def _holds_rows(value: Any) -> bool:
    """Whether a list inside an object is one of rows: objects that name an image and say something of it."""
    first = value[0] if isinstance(value, list) and value else None
    return (
        isinstance(first, dict)
        and any(isinstance(first.get(key), str) for key in IMAGE_KEYS)
        and not is_address_only(first)
    )


class _Wrong:
    """A value that is a problem, reported already."""


_WRONG = _Wrong()


def _value(content: bytes, where: str, report: Report) -> Any:
    """The value of a row. NaN, numbers too large and halves of characters are replaced, and a warning says so."""
    try:
        return strict_json.parse_line(content, where)
    except strict_json.JsonProblem as problem:
        try:
            mended = json.dumps(_lenient.decode(content.decode()), ensure_ascii=False, allow_nan=False)
            value = strict_json.parse_line(mended.encode("utf-8", "replace"), where)
        except (ValueError, RecursionError, strict_json.JsonProblem):
            report.add_problem(problem.problem)
            return _WRONG
        report.warn(where, problem.problem.what, "it is null in `extra`, or a question mark")
        return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key twice")
    return value


def _finite(text: str) -> float | None:
    value = float(text)
    return value if abs(value) < float("inf") else None


_lenient = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=lambda _: None, parse_float=_finite)


def side_value(content: bytes, where: str, report: Report) -> Any:
    """The value of a description beside an image; None, with a warning, where it holds none."""
    warned = Report()
    value = _value(content, where, warned)
    for problem in (*warned.problems, *warned.warnings):
        report.warn(problem.where, problem.what, "the image is encoded all the same")
    return None if value is _WRONG else value


def side_text(content: bytes, where: str, report: Report) -> str:
    """The text beside an image; Windows-1252, with a warning, where it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        report.warn(where, "not UTF-8: read as Windows-1252")
        return content.decode("cp1252", "replace")


class _Cursor:
    """A place in a text that only moves on, with its line and column."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self._name = text, name
        self.at = 0
        self._line, self._start, self._counted = 1, -1, 0

    @property
    def place(self) -> str:
        """`line:column`: many a document is one long line."""
        self._line += self.text.count("\n", self._counted, self.at)
        self._start = max(self._start, self.text.rfind("\n", self._counted, self.at))
        self._counted = self.at
        return f"{self._line}:{self.at - self._start}"

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Move over the pattern; returns the letter behind it, empty at the end. Raises ValueError."""
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError("something else is expected here")
        self.at = match.end()
        return self.text[self.at : self.at + 1]

    def value(self) -> Any:
        """Move over a JSON value and return it. Raises ValueError."""
        value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        return value


_OPEN = re.compile(r"[\[{]\s*")
_COLON = re.compile(r"\s*:\s*")
_CLOSE = re.compile(r"\s*[\]}]\s*")


def _document_rows(content: bytes, name: str, report: Report) -> Iterator[Row]:
    """The rows of one JSON list, or of a list inside an object; one at a time, for all take ten times the text."""
    try:
        cursor = _Cursor(content.decode().removeprefix("\ufeff"), name)
        if cursor.skip(_BLANK) == "[":
            yield from _elements(cursor, name, report)
        else:
            yield from _object_rows(cursor, name, report)
        if cursor.skip(_BLANK):
            raise ValueError("there is more than one value")
    except (ValueError, RecursionError):
        try:  # the whole file says better what is wrong, and where
            strict_json.parse(content, name)
        except strict_json.JsonProblem as problem:
            report.add_problem(problem.problem)


def _elements(cursor: _Cursor, name: str, report: Report) -> Iterator[Row]:
    letter = cursor.skip(_OPEN)
    while letter != "]":
        begin, place = cursor.at, cursor.place
        cursor.value()
        value = _value(cursor.text[begin : cursor.at].encode(), f"{name}:{place}", report)
        if isinstance(value, str):
            value = {"image": value}
        if not isinstance(value, dict):
            if value is not _WRONG:
                report.add(f"{name}:{place}", f"a row that is {kind(value)}", "a JSON object")
            value = None
        yield Row(place, value)
        letter = cursor.skip(_BETWEEN)
    cursor.skip(_CLOSE)


def _object_rows(cursor: _Cursor, name: str, report: Report) -> Iterator[Row]:
    """The rows of the first list in an object that is one of images; the object itself where it has none."""
    start, chosen = cursor.at, False
    others: list[tuple[str, int]] = []
    letter = cursor.skip(_OPEN)
    while letter != "}":
        key = cursor.value()
        begins_a_list = cursor.skip(_COLON) == "["
        if begins_a_list and not chosen:
            begin = cursor.at
            cursor.skip(_OPEN)
            chosen = cursor.text[cursor.at] == "{" and _holds_rows([cursor.value()])
            cursor.at = begin
            if chosen:
                yield from _elements(cursor, name, report)
                letter = cursor.skip(_BETWEEN)
                continue
        value = cursor.value()
        if isinstance(value, list) and value:
            others.append((str(key), len(value)))
        letter = cursor.skip(_BETWEEN)
    cursor.skip(_CLOSE)
    if chosen:
        for key, count in others:
            report.pass_over(f"entries of {show(key)}", name, count)
        return
    whole = _value(cursor.text[start : cursor.at].encode(), name, report)
    if isinstance(whole, dict) and whole and all(isinstance(part, dict) for part in whole.values()):
        for key, part in whole.items():
            yield Row("1", {"key": key, **part})
    elif isinstance(whole, dict):
        yield Row("1", whole)
