"""Print the README's section about JSON output, made from the documents' classes.

With --write, put it into README.md between its two markers.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kimik3_prep.checkpoint.config import ConfigReport, ConfigReports
from kimik3_prep.manifest.write import Gathered
from kimik3_prep.output.totals import PlanSummary, RangeSummary, RunSummary
from kimik3_prep.reading.inspection import IndexDescription, OutputDescription, ShardDescription
from kimik3_prep.reading.verify import Verification
from kimik3_prep.screen.answers import ErrorReport

#: What each command prints, in the order of a person's way through them.
DOCUMENTS: dict[str, Any] = {
    "validate-config": ConfigReport,
    "validate-config A B": ConfigReports,
    "manifest": Gathered,
    "encode, finish": RunSummary,
    "encode --dry-run": PlanSummary,
    "encode --shard-range": RangeSummary,
    "inspect SHARD": ShardDescription,
    "inspect INDEX": IndexDescription,
    "inspect OUT": OutputDescription,
    "verify": Verification,
    "any command that fails": ErrorReport,
}

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- scripts/describe_json.py -->\n", "<!-- end of scripts/describe_json.py -->\n"
_WORDS = {str: "string", int: "int", float: "number", bool: "bool", type(None): "null", Any: "any"}


def section() -> str:
    """Return the section in Markdown: a table for each document, then one for each class inside them."""
    parts: list[Any] = []
    for kind in DOCUMENTS.values():
        parts += [part for part in inside(kind) if part not in parts]
    lines = [f"**`{name}`** {table(kind)}" for name, kind in DOCUMENTS.items()]
    lines += [f"**{part.__name__}** {table(part)}" for part in parts]
    return "\n".join(lines)


def table(kind: Any) -> str:
    """Return what a class is and a table of its keys."""
    described = descriptions(kind)
    rows = [f"| `{key}` | {shape(hint)} | {described[key]} |" for key, hint in get_type_hints(kind).items()]
    what = (inspect.getdoc(kind) or "").partition("\n")[0]
    listed = "" if is_dataclass(kind) else " A list of these values, in this order."
    return "\n".join([f"{what}{listed}", "", "| key | value | meaning |", "|---|---|---|", *rows, ""])


def descriptions(kind: Any) -> dict[str, str]:
    """Return the string under each field of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base) and not hasattr(base, "_fields"):
            continue
        body = ast.parse(inspect.getsource(base)).body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = str(text.value.value)
    return found


def inside(kind: Any) -> Iterator[Any]:
    """Give the classes that the fields of a class hold, and those inside them."""
    for hint in get_type_hints(kind).values():
        for part in named(hint):
            yield part
            yield from inside(part)


def named(hint: Any) -> Iterator[Any]:
    """Give the classes of documents that a type names."""
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        yield hint
    elif get_origin(hint) is not Literal:
        for part in get_args(hint):
            yield from named(part)


def shape(hint: Any) -> str:
    """Return a type as its JSON: `[T]` is a list, `{T}` an object with any keys."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Literal:
        return " \\| ".join(f'`"{value}"`' for value in arguments)
    if origin in (Union, types.UnionType):
        return " \\| ".join(shape(part) for part in arguments)
    if origin is tuple:
        parts = arguments[:1] if arguments[-1] is Ellipsis else arguments
        return f"[{', '.join(shape(part) for part in parts)}]"
    if origin in (dict, Mapping):
        return f"{{{shape(arguments[1])}}}"
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return str(hint.__name__)
    raise TypeError(f"no word for {hint}")


def written() -> str:
    """Return README.md with the section as it is now."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{section()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(written(), encoding="utf-8")
    else:
        print(section())
