"""JSON as the standard defines it. What Python's reader accepts beyond that is an error here, with its place."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any, NoReturn

from kimik3_prep.errors import Problem

#: Levels of brackets. No config and no row comes near, and many programs cannot write deeper values out again.
_DEEPEST = 200

_STRING = r'"(?:[^"\\]++|\\.)*+"'
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"  # not a character more than Python's reader takes
_TOKENS = re.compile(
    rf"(?P<string>{_STRING})(?P<colon>\s*:)?|(?P<word>NaN|-?Infinity)|(?P<number>{_NUMBER})|[\[\]{{}}]", re.DOTALL
)
_HALF = re.compile(r"[\ud800-\udfff]")


class JsonProblem(Exception):
    """What is wrong with a text, as a Problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class _Refused(ValueError):
    """A value that Python's reader accepts and the standard does not. `_refusal` looks for its place."""


def parse(content: bytes, where: str) -> Any:
    """The value of a whole file. Problems are placed at `where:line:column`. Raises JsonProblem."""
    return _parse(content, where, True)


def parse_line(content: bytes, where: str) -> Any:
    """The value of one line. `where` names the line, and a problem adds the column. Raises JsonProblem."""
    return _parse(content, where, False)


def show(value: Any) -> str:
    """A JSON value, cut to a line."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:90]}…"


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values; true is not 1 and 14.0 is not 14."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def is_number(value: Any) -> bool:
    """A finite JSON number; true is none."""
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def as_integer(value: Any) -> int | None:
    """The integer that a string or a float was meant to be."""
    if isinstance(value, str):
        digits = value.strip()
        return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e18 else None


def _parse(content: bytes, where: str, whole_file: bool) -> Any:
    try:
        text = content.decode().removeprefix("\ufeff")
        value = _decode(text)
        if "\\u" in text:  # only so can half a character get in, and writing the value out finds it
            json.dumps(value, ensure_ascii=False).encode()
        if content.count(b"[") + content.count(b"{") > _DEEPEST and _is_too_deep(value):
            raise RecursionError
        return value
    except (ValueError, RecursionError) as error:
        raise JsonProblem(_problem(content, error, where, whole_file)) from None


# --- what Python's reader calls -----------------------------------------------------------------------------------


def _constant(name: str) -> NoReturn:
    raise _Refused


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Refused
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused
    return value


_decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float).decode


def _is_too_deep(value: Any) -> bool:
    """Whether a value has more than `_DEEPEST` levels. Python's own reader gives up at a depth that varies."""
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [part for part in level if type(part) in (list, dict)]
        if not level:
            return False
        level = [part for parts in level for part in (parts.values() if type(parts) is dict else parts)]
    return True


#: Hints by Python's own words, for what `_syntax_hint` does not recognise at the place.
_HINTS = {
    "Extra data": "one value is all there may be",
    "Expecting ',' delimiter": "is a comma missing before it?",
    "Expecting ':' delimiter": "a key and its value stand on either side of a colon",
    "Unterminated string starting at": "its closing quote is missing",
    "Invalid \\escape": 'write a backslash as "\\\\"',
    "Invalid control character at": 'write a line break as "\\n" and a tab as "\\t"',
}


# --- saying what is wrong: only ever run for a text that was refused ----------------------------------------------


def _problem(content: bytes, error: Exception, where: str, whole_file: bool) -> Problem:
    if isinstance(error, RecursionError):
        return Problem(where, f"brackets stand more than {_DEEPEST} deep in one another", "values nested a few deep")
    if isinstance(error, UnicodeDecodeError):
        text = content[: error.start].decode().removeprefix("\ufeff")
        utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "it looks like UTF-16; save it as UTF-8" if utf16 else "save it as UTF-8"
        return _placed(text, len(text), f"the byte 0x{content[error.start]:02x} is not UTF-8", hint, where, whole_file)
    text = content.decode().removeprefix("\ufeff")
    if isinstance(error, json.JSONDecodeError):
        if not text.strip():
            return Problem(where, "there is nothing in it", "a JSON value")
        cause = error.msg.removesuffix(" at").removesuffix(" starting")
        what = f"not JSON: {cause[:1].lower()}{cause[1:]}"
        return _placed(text, error.pos, what, _syntax_hint(text, error), where, whole_file)
    at, what, hint = _refusal(text)
    return _placed(text, at, what, hint, where, whole_file)


def _placed(text: str, at: int, what: str, hint: str, where: str, whole_file: bool) -> Problem:
    column = at - text.rfind("\n", 0, at)
    if not whole_file:
        return Problem(where, f"{what}, at column {column}", hint=hint)
    line = text.count("\n", 0, at) + 1
    return Problem(f"{where}:{line}:{column}", what, hint=hint)


def _syntax_hint(text: str, error: json.JSONDecodeError) -> str:
    before, rest = text[: error.pos].rstrip(), text[error.pos :]
    if rest.startswith(("//", "/*", "#")):
        return "JSON has no comments"
    if (before.endswith(",") and rest[:1] in ("]", "}")) or re.match(r",\s*[\]}]", rest):
        return "remove the comma after the last entry"
    if rest[:1] == "'":
        return "JSON strings stand in double quotes"
    if re.match(r"(?:None|True|False)\b", rest):
        return "JSON writes null, true and false"
    if not rest.strip():
        return "the text ends too early: was it cut off?"
    return _HINTS.get(error.msg, "")


def _refusal(text: str) -> tuple[int, str, str]:
    """Position, what and hint of the first thing refused.

    Python's reader calls its hooks without a place, so the text is read a second time. It is well-formed up to there.
    """
    keys: list[set[str]] = []  # a set for every open bracket; a list's stays empty
    for match in _TOKENS.finditer(text):
        token, at = match.group(), match.start()
        if token in ("[", "{"):
            keys.append(set())
        elif token in ("]", "}"):
            keys.pop()
        elif match["word"]:
            return at, f"{token} is not JSON", "write a finite number"
        elif match["number"]:
            if what := _number_refusal(token):
                return at, what, "write an ordinary number"
        else:
            string = json.loads(match["string"])
            if half := _HALF.search(string):
                what = f"\\u{ord(half.group()):04x} in this string is half of a character (a lone surrogate)"
                return at, what, "write the character itself, or both of its halves"
            if match["colon"]:
                if string in keys[-1]:
                    return at, f"the key {show(string)} stands twice in one object", "keep one of them"
                keys[-1].add(string)
    return 0, "something in it is not strict JSON", ""


def _number_refusal(token: str) -> str:
    if not token.lstrip("-").isdigit():
        return f"{_cut(token)} is too large for a number" if math.isinf(float(token)) else ""
    digits, most = len(token.lstrip("-")), sys.get_int_max_str_digits()
    return f"an integer of {digits:,} digits" if 0 < most < digits else ""


def _cut(token: str) -> str:
    return token if len(token) <= 40 else f"{token[:30]}…"
