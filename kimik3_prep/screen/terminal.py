"""The ways to say something: a line, a table, a histogram, a JSON document.

Ids, paths and error messages come from files that anybody may have written. They are printed letter by letter: no
markup and no emoji codes. What would move the cursor or turn the text around appears as an escape (`harmless`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from kimik3_prep.errors import CannotPrint, Problem
from kimik3_prep.manifest.report import PassedOver

LINE = 300  # most characters of a foreign text in a sentence
CELL = 60  # most characters of a foreign text in a table

# Control characters, line separators, marks that reverse the reading order, and halves of characters (from file names).
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN = str.maketrans({"…": "...", "█": "#"})


class _Stream(Console):
    """A console whose reader may go away: `head` has seen enough, and the exit code stays that of the work."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print. A full stdout raises CannotPrint; a full stderr is nobody's loss."""
        with self.writing():
            super().print(*objects, **how)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be quiet from the first error of the stream on. Raises CannotPrint for a stdout that is full."""
        try:
            yield
        except OSError as error:
            self.on_broken_pipe()
            if not self.stderr and not isinstance(error, BrokenPipeError):
                raise CannotPrint(error.strerror or str(error)) from error

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # or the interpreter complains when it closes the stream
        os.close(nowhere)


out = _Stream(highlight=False, soft_wrap=True, markup=False, emoji=False)
err = _Stream(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    if sys.stdout is None:  # it was closed
        return
    text = json.dumps(value, indent=2, ensure_ascii=not out.encoding.startswith("utf"))
    with out.writing():
        sys.stdout.write(_harmless_json(text) + "\n")
        sys.stdout.flush()


def print_lines(lines: Iterable[bytes]) -> None:
    """JSON Lines on stdout, in UTF-8 whatever the terminal has: they are read by programs."""
    if sys.stdout is None:
        return
    with out.writing():
        for line in lines:
            sys.stdout.buffer.write(_harmless_json(line.decode()).encode())
        sys.stdout.flush()


def _harmless_json(text: str) -> str:
    """Escape what may stand in JSON and may harm a terminal. It all stands in strings; only newlines do not."""
    return _HARMFUL.sub(lambda found: "\n" if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def harmless(text: str, most: int | None = None) -> str:
    """Return the text with control characters as escapes like \\x1b, cut in its middle to `most` characters."""
    text = _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    if most is None or len(text) <= most:
        return text
    return f"{text[: most - most // 4 - 1]}…{text[-(most // 4) :]}"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: `1 shard`, `2,000 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(console: Console, text: str, label: str = "", style: str = "bold red", bold: str = "") -> None:
    """Print one line: a coloured label, something bold, and the text."""
    parts = (_fitting(console, label), style), (_fitting(console, bold), "bold"), _fitting(console, text)
    console.print(Text.assemble(*parts))


def print_passed_over(kinds: Iterable[PassedOver]) -> None:
    """What a source holds that became no item, a line for each kind, on stderr."""
    for kind in kinds:
        names = ", ".join(harmless(name, CELL) for name in kind.names)
        more = ", …" if kind.count > len(kind.names) else ""
        say(err, f"{harmless(kind.kind, CELL)} ({kind.count:,}): {names}{more}", "passed over: ")


def _fitting(console: Console, text: str) -> str:
    """Return the text, harmless, in letters that the console's encoding has."""
    text = harmless(text)
    if console.encoding.startswith("utf"):
        return text
    return text.translate(_PLAIN).encode(console.encoding, "backslashreplace").decode(console.encoding)


def print_problem(problem: Problem) -> None:
    """Print a problem on stderr: where, what, what is expected, what to do."""
    colour = "bold yellow" if problem.severity == "warning" else "bold red"
    say(err, f": {problem.what}", f"{problem.severity}: ", colour, problem.where)
    if problem.expected:
        say(err, f"    expected {problem.expected}")
    if problem.hint:
        say(err, f"    hint: {problem.hint}")


def size_text(size: float) -> str:
    """Return bytes for people: `1.5 GiB`."""
    if size < 1024:
        return f"{size:,.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if round(size, 1) < 1024:
            return f"{size:,.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def print_histogram(bins: Sequence[tuple[int, int]]) -> None:
    """Print the images by their tokens, a line for each bin `(most tokens, images)`."""
    if not (most := max((count for _, count in bins), default=0)):
        return
    say(out, "", bold="tokens per image")
    low = 0
    for high, count in bins:
        length = max(1, round(40 * count / most)) if count else 0
        say(out, f"  {low + 1:>6,} to {high:>6,}  {'█' * length}{' ' if length else ''}{count:,}")
        low = high


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", marked: Collection[int] = ()
) -> None:
    """Print aligned columns, `marked` rows in yellow. Lines are never cut or folded: a pipe may take them to grep."""
    if title:
        say(out, "", bold=title)
    if not rows:
        return
    table = [[_fitting(out, cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for number, row in enumerate(table, -1):
        line = "  ".join(set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        out.print(Text(line, "bold" if number < 0 else "yellow" if number in marked else ""))
