"""What people see: tables, progress, sentences. Everything here only prints."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kimik3_prep.config import Diagnosis
from kimik3_prep.errors import InputError, PrepError, Problem
from kimik3_prep.summary import PlanSummary, RunSummary

_EVERY = 5.0  # seconds between progress lines where there is no terminal
_MOST_PROBLEMS = 50

out = Console(highlight=False, soft_wrap=True, markup=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def print_error(error: PrepError) -> None:
    """An error in its own words, on stderr."""
    if isinstance(error, InputError):
        for problem in error.problems[:_MOST_PROBLEMS]:
            print_problem(problem)
        hidden = error.total - min(len(error.problems), _MOST_PROBLEMS)
        more = f" ({hidden:,} of them not shown; --format json lists up to 1,000)" if hidden else ""
        err.print(f"{error.total:,} problem{'s' if error.total != 1 else ''} found, nothing was done{more}.")
    else:
        err.print(Text.assemble(("error: ", "bold red"), str(error)))


def print_fault(error: Exception) -> None:
    """An error this package did not foresee: what a report needs, and the traceback when it was asked for."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    err.print(Text.assemble(("internal error: ", "bold red"), f"{type(error).__name__}: {error}"))
    err.print(f"    at {Path(last.filename).name}:{last.lineno}; committed shards stay valid. Please report this.")
    if os.environ.get("KIMIK3_PREP_TRACEBACK"):
        err.print("".join(traceback.format_exception(error)))
    else:
        err.print("    KIMIK3_PREP_TRACEBACK=1 shows where it comes from")


def print_problem(problem: Problem) -> None:
    """A problem on stderr: where, what, what was expected, what to do."""
    colour = "bold yellow" if problem.severity == "warning" else "bold red"
    err.print(Text.assemble((f"{problem.severity}: ", colour), (problem.where, "bold"), f": {problem.what}"))
    if problem.expected:
        err.print(f"    expected {problem.expected}")
    if problem.hint:
        err.print(f"    hint: {problem.hint}")


def size_text(size: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise ValueError(size)


# --- progress -----------------------------------------------------------------------------------------------------


class ProgressReporter:
    """Shows a run's progress: a bar on a terminal, a line every few seconds elsewhere, nothing when told so."""

    def __init__(self, show: bool) -> None:
        self.warnings: list[Problem] = []
        self._show = show
        self._lock = threading.Lock()
        self._bar = _bar() if show and err.is_terminal else None
        self._name, self._total, self._began, self._spoke = "", 0, 0.0, 0.0
        self._images = self._pixels = self._size = self._failed = 0

    def __enter__(self) -> ProgressReporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close_phase()
        if self._bar is not None:
            self._bar.stop()

    def warn(self, problem: Problem) -> None:
        """Print a warning, and keep it for the JSON output."""
        self.warnings.append(problem)
        print_problem(problem)

    def phase(self, name: str, total: int) -> None:
        """A stage of `total` images begins."""
        self._close_phase()
        self._name, self._total = name, total
        self._began = self._spoke = time.monotonic()
        self._images = self._pixels = self._size = self._failed = 0
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=total, note="")

    def advance(self, images: int, pixels: int, size: int, failed: int) -> None:
        """So many images more are done."""
        with self._lock:
            self._images += images
            self._pixels += pixels
            self._size += size
            self._failed += failed
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, advance=images, note=self._note(now))
            elif self._show and now - self._spoke >= _EVERY:
                self._spoke = now
                err.print(self._line(now))

    def _close_phase(self) -> None:
        if self._name and self._bar is None and self._show and self._images:
            err.print(self._line(time.monotonic()))
        self._name = ""

    def _note(self, now: float) -> str:
        rate = self._pixels / 1e6 / max(now - self._began, 1e-9)
        written = f", {size_text(self._size)}" if self._size else ""
        failed = f", {self._failed:,} failed" if self._failed else ""
        return f"{rate:,.1f} megapixels/s{written}{failed}"

    def _line(self, now: float) -> str:
        left = ""
        if 0 < self._images < self._total:
            seconds = (self._total - self._images) * (now - self._began) / self._images
            left = f", about {int(seconds // 60)}:{int(seconds % 60):02d} left"
        share = 100 * self._images // max(1, self._total)
        return f"{self._name}: {self._images:,} of {self._total:,} ({share} %), {self._note(now)}{left}"


def _bar() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=err,
    )


# --- results ------------------------------------------------------------------------------------------------------


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """The config as a table of what it means, then what is wrong with it."""
    table = _table(f"{diagnosis.path}", "setting", "value", "published", "from")
    for setting in diagnosis.settings:
        value, published = json.dumps(setting.value), json.dumps(setting.published)
        style = "" if value == published else "yellow"
        table.add_row(setting.key, Text(value, style), published, setting.source)
    if diagnosis.settings:
        out.print(table)
    for problem in diagnosis.problems:
        print_problem(problem)


def print_summary(summary: PlanSummary | RunSummary, dtype: str) -> None:
    """What a run came to, or what it would come to."""
    if isinstance(summary, PlanSummary):
        print_plan(summary, dtype)
    else:
        print_run(summary)


def print_run(summary: RunSummary) -> None:
    """What a run came to."""
    if summary.skipped < 0:
        out.print("This run was finished before; nothing to do.")
    elif summary.skipped:
        out.print(f"Resumed: {summary.skipped:,} shards were committed before.")
    print_failures(summary.failures, summary.failed)
    out.print(
        f"{summary.ok:,} of {summary.rows:,} items ok, {summary.failed:,} failed; {summary.images:,} images stored, "
        f"{summary.patches:,} patches, {summary.tokens:,} tokens"
    )
    out.print(f"{summary.shards:,} shards, {size_text(summary.size)}, in {summary.output}")


def print_plan(summary: PlanSummary, dtype: str) -> None:
    """What a run would make."""
    print_failures(summary.failures, summary.failed)
    out.print(
        f"{summary.rows:,} items: {summary.images:,} images to store ({summary.pixels / 1e6:,.1f} megapixels), "
        f"{summary.failed:,} cannot be read"
    )
    out.print(f"{summary.patches:,} patches, {summary.tokens:,} tokens")
    table = _table("size of pixel_values", "dtype", "bytes", "")
    for name, size in summary.bytes_by_dtype.items():
        table.add_row(f"{name} (chosen)" if name == dtype else name, f"{size:,}", size_text(size))
    out.print(table)
    shards = ", ".join(f"{count:,} {group}" for group, count in summary.shards.items()) or "none"
    out.print(f"shards: {shards}")
    print_histogram(summary.histogram)


def print_histogram(bins: Iterable[tuple[int, int]]) -> None:
    """Tokens per image, a line per power of two."""
    bins = list(bins)
    most = max((count for _, count in bins), default=0)
    if not most:
        return
    out.print("tokens per image")
    low = 0
    for high, count in bins:
        length = max(1, round(40 * count / most)) if count else 0
        out.print(f"  {low + 1:>6,} to {high:>6,}  {'█' * length}{' ' if length else ''}{count:,}")
        low = high


def print_failures(failures: Iterable[tuple[int, str, str, str]], total: int) -> None:
    """The first failed items, on stderr."""
    shown = 0
    for line, name, code, message in failures:
        err.print(Text.assemble(("failed: ", "bold red"), f"line {line}, {name}: {code}: {message}"))
        shown += 1
    if total > shown:
        err.print(f"… and {total - shown:,} more failed items, all in the index")


def print_inspection(found: dict[str, Any]) -> None:
    """A description from `inspection.inspect`."""
    {"shard": _print_shard, "index": _print_index, "output": _print_output}[found["kind"]](found)


def _print_shard(found: dict[str, Any]) -> None:
    table = _table(f"{found['path']} ({size_text(found['size'])})", "tensor", "dtype", "shape", "bytes")
    for name, tensor in found["tensors"].items():
        table.add_row(name, tensor["dtype"], str(tensor["shape"]), f"{tensor['bytes']:,}")
    out.print(table)
    for key, value in found["metadata"].items():
        out.print(f"{key}: {value}")
    if found["value_range"]:
        low, high = found["value_range"]
        out.print(f"values from {low:.9g} to {high:.9g}")
    rows = _table("first stored images", "row", "grid_thw", "patch_start", "ids")
    for row in found["rows"]:
        ids = ", ".join(row["ids"][:3]) + (f" and {len(row['ids']) - 3} more" if len(row["ids"]) > 3 else "")
        rows.add_row(str(row["row"]), str(row["grid_thw"]), f"{row['patch_start']:,}", ids)
    out.print(rows)


def _print_index(found: dict[str, Any]) -> None:
    out.print(f"{found['path']}: an index of {found['rows']:,} rows, {len(found['columns'])} columns")
    _print_totals(found)
    rows = _table("first rows", "item", "id", "status", "shard", "row", "patches", "tokens", "size", "mode")
    for row in found["first"]:
        cells = ("item", "id", "status", "shard", "row", "patch_count", "num_tokens")
        size = f"{row['width']} x {row['height']}" if row["width"] else "-"
        rows.add_row(*("-" if row[c] is None else str(row[c]) for c in cells), size, row["mode"] or "-")
    out.print(rows)


def _print_output(found: dict[str, Any]) -> None:
    state = "finished" if found["finished"] else "not finished: run the same encode command to continue"
    out.print(f"{found['path']}: {state}")
    out.print(f"{len(found['shards']):,} shards, {size_text(found['size'])}, dtype {found['dtype']}")
    _print_totals(found)


def _print_totals(found: dict[str, Any]) -> None:
    table = _table(f"{found['rows']:,} items, {found['num_tokens']:,} tokens", "by", "items")
    for name in ("status", "group", "mode", "format", "error_code"):
        counts = ", ".join(f"{key} {count:,}" for key, count in found[f"by_{name}"].items())
        if counts:
            table.add_row(name.replace("_", " "), counts)
    out.print(table)
    for row in found["failures"]:
        out.print(f"failed: line {row['line']}, {row['id']}: {row['error_code']}: {row['error_message']}")
    if found["failures_not_shown"]:
        out.print(f"… and {found['failures_not_shown']:,} more failed items")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
