"""What people see: tables, progress, sentences. Everything here only prints.

Ids, paths and error messages come from files that anybody may have written. They are printed letter by letter: no
markup, no emoji codes, and what would move the cursor or turn the text around is shown as an escape (`harmless`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from kimik3_prep.checkpoint.config import Diagnosis
from kimik3_prep.errors import InputError, PrepError, Problem, RunError

if TYPE_CHECKING:  # it brings pyarrow, which takes longer to import than a config to check
    from kimik3_prep.output.totals import PlanSummary, RangeSummary, RunSummary

_MOST_PROBLEMS = 50
LINE = 300  # most characters of a foreign text in a sentence

# Control characters, line separators, marks that reverse the reading order, and halves of characters (from file names).
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN = str.maketrans({"…": "...", "█": "#"})


class CannotPrint(RunError):
    """Standard output takes nothing any more: what was to be said is lost, and only stderr can tell."""


class _Stream(Console):
    """A console whose reader may go away: `head` has seen enough, and the exit code stays that of the work."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print, or raise CannotPrint where standard output is full; a full stderr is nobody's loss."""
        try:
            super().print(*objects, **how)
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """After an error of the stream: be quiet from here on. Raises CannotPrint for standard output."""
        self.on_broken_pipe()
        if not self.stderr and not isinstance(error, BrokenPipeError):
            raise CannotPrint(f"cannot write to standard output: {error.strerror or error}") from error

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
    text = json.dumps(value, indent=2, ensure_ascii=not out.encoding.startswith("utf"), default=str)
    try:
        sys.stdout.write(_harmless_json(text) + "\n")
        sys.stdout.flush()
    except OSError as error:
        out.give_up(error)


def print_lines(lines: Iterable[bytes]) -> None:
    """JSON Lines on stdout, in UTF-8 whatever the terminal has: they are read by programs."""
    if sys.stdout is None:
        return
    try:
        for line in lines:
            sys.stdout.buffer.write(_harmless_json(line.decode()).encode())
        sys.stdout.flush()
    except OSError as error:
        out.give_up(error)


def _harmless_json(text: str) -> str:
    """What may stand in JSON may harm a terminal. Outside of strings there is none of it but newlines."""
    return _HARMFUL.sub(lambda found: "\n" if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def harmless(text: str, most: int | None = None) -> str:
    """The text with control characters as escapes like \\x1b, shortened in its middle to about `most` characters."""
    text = _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    if most is None or len(text) <= most:
        return text
    return f"{text[: most - most // 4 - 1]}…{text[-(most // 4) :]}"


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(console: Console, text: str, label: str = "", style: str = "bold red", bold: str = "") -> None:
    """Print one line: a coloured label, something bold, and the text."""
    parts = (_fitting(console, label), style), (_fitting(console, bold), "bold"), _fitting(console, text)
    console.print(Text.assemble(*parts))


def _fitting(console: Console, text: str) -> str:
    """The text, harmless, in letters that the console's encoding has."""
    text = harmless(text)
    if console.encoding.startswith("utf"):
        return text
    return text.translate(_PLAIN).encode(console.encoding, "backslashreplace").decode(console.encoding)


def print_error(error: PrepError) -> None:
    """An error in its own words, on stderr."""
    if isinstance(error, InputError):
        for problem in error.problems[:_MOST_PROBLEMS]:
            print_problem(problem)
        hidden = error.total - min(len(error.problems), _MOST_PROBLEMS)
        more = f" ({hidden:,} of them not shown; --format json lists up to 1,000)" if hidden else ""
        say(err, f"{counted(error.total, 'problem')} found, nothing was done{more}.")
    else:
        say(err, str(error), "error: ")


def print_fault(error: Exception) -> None:
    """An error this package did not foresee: what a report needs, and the traceback when it was asked for."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    say(err, f"{type(error).__name__}: {error}", "internal error: ")
    say(err, f"    at {Path(last.filename).name}:{last.lineno}; committed shards stay valid. Please report this.")
    lines = traceback.format_exception(error) if os.environ.get("KIMIK3_PREP_TRACEBACK") else []
    for line in "".join(lines or "    KIMIK3_PREP_TRACEBACK=1 shows where it comes from").splitlines():
        say(err, line)


def print_problem(problem: Problem) -> None:
    """A problem on stderr: where, what, what was expected, what to do."""
    colour = "bold yellow" if problem.severity == "warning" else "bold red"
    say(err, f": {problem.what}", f"{problem.severity}: ", colour, problem.where)
    if problem.expected:
        say(err, f"    expected {problem.expected}")
    if problem.hint:
        say(err, f"    hint: {problem.hint}")


def size_text(size: float) -> str:
    """Bytes for people: 1.5 GiB."""
    if size < 1024:
        return f"{size:,.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if round(size, 1) < 1024:
            return f"{size:,.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


# --- results ------------------------------------------------------------------------------------------------------


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """The config as a table of what it means, then what is wrong with it."""
    if diagnosis.settings:
        rows = [(s.key, json.dumps(s.value), json.dumps(s.published), s.source) for s in diagnosis.settings]
        changed = [number for number, (_, value, published, _) in enumerate(rows) if value != published]
        print_table(("setting", "value", "published", "from"), rows, str(diagnosis.path), changed)
    for problem in diagnosis.problems:
        print_problem(problem)


def print_summary(summary: PlanSummary | RangeSummary | RunSummary, dtype: str) -> None:
    """What a run or a range of one came to, or what a run would come to."""
    from kimik3_prep.output.totals import PlanSummary, RangeSummary

    if isinstance(summary, PlanSummary):
        print_plan(summary, dtype)
    elif isinstance(summary, RangeSummary):
        print_range(summary)
    else:
        print_run(summary)


def print_run(summary: RunSummary) -> None:
    """What a run came to."""
    if summary.skipped is None:
        say(out, "This run was finished before; nothing to do.")
    elif summary.skipped:
        was = "was" if summary.skipped == 1 else "were"
        say(out, f"Resumed: {counted(summary.skipped, 'shard')} {was} committed before.")
    print_failures(summary.failures, summary.failed, ", all in the index")
    items = f"{summary.ok:,} of {counted(summary.rows, 'item')} ok, {summary.failed:,} failed"
    images = "" if summary.index_only else f"{counted(summary.images, 'image')} stored, "
    say(out, f"{items}; {images}{summary.patches:,} patches, {counted(summary.tokens, 'token')}")
    if summary.index_only:
        return say(out, f"the index of it, without features, in {summary.output}")
    say(out, f"{counted(summary.shards, 'shard')}, {size_text(summary.size)}, in {summary.output}")


def print_range(summary: RangeSummary) -> None:
    """What a range of a run came to, and how far the run is."""
    if summary.skipped:
        was = "was" if summary.skipped == 1 else "were"
        say(out, f"Resumed: {counted(summary.skipped, 'shard')} {was} committed before.")
    print_failures(summary.failures, summary.failed, ", all in the indexes of the shards")
    items = f"{summary.ok:,} of {counted(summary.rows, 'item')} ok, {summary.failed:,} failed"
    say(out, f"range {summary.shard_range}: {counted(summary.shards, 'shard')}, {size_text(summary.size)}; {items}")
    say(out, f"{summary.committed:,} of the run's {counted(summary.planned, 'shard')} are in {summary.output}")
    if summary.committed == summary.planned:
        say(out, f"All shards are there: `kimik3-prep finish {summary.output}` writes the index.")


def print_plan(summary: PlanSummary, dtype: str) -> None:
    """What a run would make."""
    print_failures(summary.failures, summary.failed)
    unreadable = f", {summary.failed:,} cannot be read" if summary.failed else ""
    images = f"{counted(summary.images, 'image')} to store ({summary.pixels / 1e6:,.1f} megapixels)"
    say(out, f"{counted(summary.rows, 'item')}: {images}{unreadable}")
    say(out, f"{summary.patches:,} patches, {counted(summary.tokens, 'token')}")
    sizes = summary.bytes_by_dtype.items()
    rows = [(f"{name}{' (chosen)' * (name == dtype)}", f"{size:,}", size_text(size)) for name, size in sizes]
    print_table(("dtype", "bytes", ""), rows, "size of pixel_values")
    say(out, "shards: " + (", ".join(f"{count:,} {group}" for group, count in summary.shards.items()) or "none"))
    print_histogram(summary.histogram)


def print_histogram(bins: Sequence[tuple[int, int]]) -> None:
    """Tokens per image, a line per power of two."""
    if not (most := max((count for _, count in bins), default=0)):
        return
    say(out, "", bold="tokens per image")
    low = 0
    for high, count in bins:
        length = max(1, round(40 * count / most)) if count else 0
        say(out, f"  {low + 1:>6,} to {high:>6,}  {'█' * length}{' ' if length else ''}{count:,}")
        low = high


def print_failures(failures: Iterable[tuple[int, str, str, str]], total: int, where: str = "") -> None:
    """The first failed items, on stderr; `where` says where the others are found."""
    shown = 0
    for line, name, code, message in failures:
        say(err, failure(line, name, code, message), "failed: ")
        shown += 1
    if total > shown:
        say(err, f"… and {counted(total - shown, 'more failed item')}{where}")


def failure(line: int, name: str, code: str, message: str) -> str:
    """One failed item in words."""
    return f"line {line:,}, {harmless(name, LINE)}: {code}: {harmless(message, 2 * LINE)}"


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", marked: Collection[int] = ()
) -> None:
    """Aligned columns; `marked` rows in yellow. Lines are never cut or folded: they may go through a pipe to grep."""
    if title:
        say(out, "", bold=title)
    if not rows:
        return
    table = [[_fitting(out, cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for number, row in enumerate(table, -1):
        line = "  ".join(set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip()
        out.print(Text(line, "bold" if number < 0 else "yellow" if number in marked else ""))
