"""JSON as the standard has it: what Python's reader lets through silently is an error with a place here."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from kimik3_prep.errors import Problem


class JsonProblem(Exception):
    """What is wrong with a text, as a Problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class _Refused(ValueError):
    """A value Python's reader would accept; `what` and `hint` say why it is not."""

    def __init__(self, what: str, hint: str = "") -> None:
        self.what, self.hint = what, hint
        super().__init__(what)


def parse(content: bytes, where: str) -> Any:
    """The value of a whole file. Problems are placed at `where:line:column`. Raises JsonProblem."""
    return _parse(content, where, lambda line, column: f"{where}:{line}:{column}")


def parse_line(content: bytes, where: str) -> Any:
    """The value of one line; `where` names it already. Raises JsonProblem."""
    return _parse(content, where, lambda line, column: where)


def _parse(content: bytes, where: str, place: Any) -> Any:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1} is not UTF-8"
        raise JsonProblem(Problem(where, what, "UTF-8 text", "save the file as UTF-8")) from None
    try:
        value = _decode(text)
        if "\\u" in text:  # the only way a lone surrogate can get in; looking for one costs a second pass
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        what = f"not JSON: {error.msg} at column {error.colno}"
        raise JsonProblem(Problem(place(error.lineno, error.colno), what, hint=_syntax_hint(text, error))) from None
    except _Refused as error:
        place_found = _found_at(text, error, where, place)
        raise JsonProblem(Problem(place_found, error.what, "strict JSON", error.hint)) from None
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        at = text.lower().find(escape)
        what = f"{escape} is half of a character (a lone surrogate)"
        raise JsonProblem(Problem(_place_of(text, at, where, place), what, "text that UTF-8 can hold")) from None
    except RecursionError:
        raise JsonProblem(Problem(where, "nested too deeply to be read", "a flat object")) from None
    except ValueError as error:  # Python refuses integers of more than 4,300 digits
        raise JsonProblem(Problem(where, f"a number that cannot be read: {error}", "an ordinary number")) from None


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not JSON", "use a finite number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _Refused(f"{text} is too large for a number", "use a finite number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {json.dumps(key)[:80]} stands twice in one object", "keep one of them")
            seen.add(key)
    return value


_decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float).decode


def _syntax_hint(text: str, error: json.JSONDecodeError) -> str:
    if not text.strip():
        return "the file is empty"
    rest = text[error.pos : error.pos + 2]
    before = text[: error.pos].rstrip()
    if rest.startswith(("//", "/*", "#")) or before.endswith(("//", "/*")):
        return "JSON has no comments"
    if before.endswith(",") or (rest[:1] == "," and text[error.pos + 1 :].lstrip()[:1] in ("]", "}")):
        return "remove the comma after the last entry"
    if rest[:1] == "'":
        return "JSON strings stand in double quotes"
    return ""


def _found_at(text: str, error: _Refused, where: str, place: Any) -> str:
    """Where the refused word stands; Python's hooks are not told, so it is looked for."""
    word = error.what.split(" ")[0]
    if word == "the":  # a repeated key: its last appearance
        key = error.what[len("the key ") :].rpartition(" stands twice")[0]
        return _place_of(text, text.rfind(key), where, place)
    return _place_of(text, text.find(word), where, place)


def _place_of(text: str, at: int, where: str, place: Any) -> str:
    if at < 0:
        return where
    line = text.count("\n", 0, at) + 1
    found: str = place(line, at - text.rfind("\n", 0, at))
    return found
