"""How each command's result appears: every document as JSON, and in words."""

from __future__ import annotations

import errno
import json
import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kimik3_prep.errors import CannotPrint, InputError, Interrupted, PrepError, Problem
from kimik3_prep.screen.terminal import (
    CELL,
    LINE,
    counted,
    err,
    harmless,
    out,
    print_histogram,
    print_json,
    print_passed_over,
    print_problem,
    print_table,
    say,
    size_text,
)

if TYPE_CHECKING:  # a command imports the room that makes its document; the others would only take time
    from kimik3_prep.checkpoint.config import ConfigReport, ConfigReports
    from kimik3_prep.manifest.write import Gathered
    from kimik3_prep.output.totals import PlanSummary, RangeSummary, RunSummary
    from kimik3_prep.reading.inspection import IndexDescription, LargeImage, OutputDescription, ShardDescription, Totals
    from kimik3_prep.reading.verify import Verification

_MOST_PROBLEMS = 50
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)  # even a look whether the path is there fails

Format = Literal["text", "json"]


def give(document: Any, format: Format) -> None:
    """Print a command's document, a dataclass: as JSON or in words."""
    if format == "json":
        print_json(asdict(document))
    else:
        _PRINTERS[type(document).__name__](document)


# --- the end of a command that failed -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """Why a command did not do its work."""

    status: Literal["error"] = "error"
    """The command did not do its work."""
    kind: Literal["usage", "input", "run", "internal", "interrupted"]
    """Wrong arguments; bad input; the run could not go on; a fault of this package; Ctrl-C or SIGTERM."""
    message: str
    """The reason in words."""
    problems: tuple[Problem, ...]
    """Everything that is wrong with the input, up to 1,000 problems; empty for other kinds."""
    problems_in_all: int
    """How many problems there are, with those that are not listed."""
    exit_code: int
    """The exit code of the command."""


def report_error(error: Exception) -> ErrorReport:
    """Return what there is to say about an exception that ended a command."""
    problems: tuple[Problem, ...] = ()
    if isinstance(error, InputError):
        problems, total = error.problems, error.total
        return ErrorReport(
            kind="input", message=str(error), problems=problems, problems_in_all=total, exit_code=error.exit_code
        )
    if isinstance(error, PrepError):
        kind: Literal["run", "interrupted"] = "interrupted" if isinstance(error, Interrupted) else "run"
        return ErrorReport(kind=kind, message=str(error), problems=(), problems_in_all=0, exit_code=error.exit_code)
    if isinstance(error, OSError) and error.errno in _NO_PATH:
        problem = Problem(str(error.filename), f"the system takes no such path: {error.strerror}")
        return report_error(InputError([problem]))
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {error} (at {Path(last.filename).name}:{last.lineno})"
    return ErrorReport(kind="internal", message=what, problems=(), problems_in_all=0, exit_code=3)


def report_usage(message: str) -> ErrorReport:
    """Return what there is to say about a command line that cannot be read."""
    return ErrorReport(kind="usage", message=message, problems=(), problems_in_all=0, exit_code=2)


def give_error(report: ErrorReport, format: Format) -> None:
    """Print why a command ended, as JSON on stdout or in words on stderr. A full stdout leaves the words."""
    if format == "json":
        try:
            return print_json(asdict(report))
        except CannotPrint:
            pass
    print_error(report)


def print_error(report: ErrorReport) -> None:
    """Print why a command ended, in words on stderr."""
    for problem in report.problems[:_MOST_PROBLEMS]:
        print_problem(problem)
    if report.problems:
        hidden = report.problems_in_all - min(len(report.problems), _MOST_PROBLEMS)
        more = f" ({hidden:,} of them not shown; --format json lists up to 1,000)" if hidden else ""
        say(err, f"{counted(report.problems_in_all, 'problem')} found, nothing was done{more}.")
    elif report.kind == "internal":
        say(err, report.message, "internal error: ")
        say(err, "    committed shards stay valid. Please report this.")
    else:
        say(err, report.message, "" if report.kind == "interrupted" else "error: ")


def print_traceback(error: Exception) -> None:
    """Print on stderr where an unforeseen error comes from, if KIMIK3_PREP_TRACEBACK asks for it."""
    lines = traceback.format_exception(error) if os.environ.get("KIMIK3_PREP_TRACEBACK") else []
    for line in "".join(lines or "    KIMIK3_PREP_TRACEBACK=1 shows where it comes from").splitlines():
        say(err, line)


# --- validate-config, manifest --------------------------------------------------------------------------------------


def print_config(report: ConfigReport) -> None:
    """Print a config as a table of what it means, then what is wrong with it."""
    if report.settings:
        rows = [(s.key, json.dumps(s.value), json.dumps(s.published), s.source) for s in report.settings]
        changed = [number for number, (_, value, published, _) in enumerate(rows) if value != published]
        print_table(("setting", "value", "published", "from"), rows, report.path, changed)
    for problem in report.problems:
        print_problem(problem)
    if report.differing:
        differ = "setting differs" if len(report.differing) == 1 else "settings differ"
        say(out, f"{len(report.differing)} {differ} from the published ones: {', '.join(report.differing)}")
    for stood, meant in (report.renamed or {}).items():
        say(out, f"renamed {stood} to {meant}")
    if report.restored:
        say(out, f"restored {', '.join(report.restored)}")
    if report.restored == () and not report.renamed:
        say(out, "no key is missing: no copy was written")


def print_configs(reports: ConfigReports) -> None:
    """Print several configs, one after the other."""
    for report in reports.configs:
        print_config(report)


def print_gathered(gathered: Gathered) -> None:
    """Print what a manifest was made of, on stderr: standard output may be the manifest's."""
    for problem in gathered.warnings:
        print_problem(problem)
    text = counted(gathered.items, "item")
    if gathered.of == "rows":
        text += f" of {counted(gathered.rows, 'row')}"
    print_passed_over(gathered.passed_over)
    if gathered.sizes_unknown:
        text += f"; {counted(gathered.sizes_unknown, 'header')} could not be read"
    say(err, text + (f", in {gathered.output}" if gathered.output else ""))


# --- encode, finish -------------------------------------------------------------------------------------------------


def print_run(summary: RunSummary) -> None:
    """Print what a run holds."""
    if summary.skipped is None:
        say(out, "This run was finished before; nothing to do.")
    _print_resumed(summary.skipped or 0)
    print_failures(summary.failures, summary.failed, ", all in the index")
    items = f"{summary.ok:,} of {counted(summary.rows, 'item')} ok, {summary.failed:,} failed"
    images = "" if summary.index_only else f"{counted(summary.images, 'image')} stored, "
    say(out, f"{items}; {images}{summary.patches:,} patches, {counted(summary.tokens, 'token')}")
    if summary.index_only:
        return say(out, f"the index of it, without features, in {summary.output}")
    say(out, f"{counted(summary.shards, 'shard')}, {size_text(summary.size)}, in {summary.output}")


def print_range(summary: RangeSummary) -> None:
    """Print what a range of a run holds, and how far the run is."""
    _print_resumed(summary.skipped)
    print_failures(summary.failures, summary.failed, ", all in the indexes of the shards")
    items = f"{summary.ok:,} of {counted(summary.rows, 'item')} ok, {summary.failed:,} failed"
    say(out, f"range {summary.shard_range}: {counted(summary.shards, 'shard')}, {size_text(summary.size)}; {items}")
    say(out, f"{summary.committed:,} of the run's {counted(summary.planned, 'shard')} are in {summary.output}")
    if summary.committed == summary.planned:
        say(out, f"All shards are there: `kimik3-prep finish {summary.output}` writes the index.")


def _print_resumed(skipped: int) -> None:
    if skipped:
        say(out, f"Resumed: {counted(skipped, 'shard')} {'was' if skipped == 1 else 'were'} committed before.")


def print_plan(summary: PlanSummary) -> None:
    """Print what a run would make."""
    print_failures(summary.failures, summary.failed)
    unreadable = f", {summary.failed:,} cannot be read" if summary.failed else ""
    images = f"{counted(summary.images, 'image')} to store ({summary.pixels / 1e6:,.1f} megapixels)"
    say(out, f"{counted(summary.rows, 'item')}: {images}{unreadable}")
    say(out, f"{summary.patches:,} patches, {counted(summary.tokens, 'token')}")
    rows = [
        (f"{name} (chosen)" if name == summary.dtype else name, f"{size:,}", size_text(size))
        for name, size in summary.bytes_by_dtype.items()
    ]
    print_table(("dtype", "bytes", ""), rows, "size of pixel_values")
    say(out, "shards: " + (", ".join(f"{count:,} {group}" for group, count in summary.shards.items()) or "none"))
    print_histogram(summary.histogram)


def print_failures(failures: Iterable[tuple[int, str, str, str]], total: int, where: str = "") -> None:
    """Print the first failed items on stderr; `where` says which file has the others."""
    shown = 0
    for line, name, code, message in failures:
        say(err, _failure(line, name, code, message), "failed: ")
        shown += 1
    if total > shown:
        say(err, f"… and {counted(total - shown, 'more failed item')}{where}")


def _failure(line: int, name: str, code: str, message: str) -> str:
    return f"line {line:,}, {harmless(name, LINE)}: {code}: {harmless(message, 2 * LINE)}"


# --- inspect --------------------------------------------------------------------------------------------------------


def print_shard(shard: ShardDescription) -> None:
    """Print what a shard holds."""
    say(out, f": a shard of {size_text(shard.size)}", bold=shard.path)
    tensors = shard.tensors.items()
    rows = [(name, tensor.dtype, str(list(tensor.shape)), f"{tensor.bytes:,}") for name, tensor in tensors]
    print_table(("tensor", "dtype", "shape", "bytes"), rows)
    for key, value in shard.metadata.items():
        say(out, f"{harmless(key, CELL)}: {harmless(str(value), LINE)}")
    if shard.value_range:
        low, high = shard.value_range
        say(out, f"values from {low:.9g} to {high:.9g}")
    if shard.not_finite:
        say(out, f"{counted(shard.not_finite, 'value')} NaN or infinite")
    if not shard.rows:
        say(out, "no image is stored in it")
    images = []
    for row in shard.rows:
        ids = ", ".join(harmless(name, CELL) for name in row.ids[:3])
        more = f" and {len(row.ids) - 3:,} more" if len(row.ids) > 3 else ""
        images.append((str(row.row), str(list(row.grid_thw)), f"{row.patch_start:,}", ids + more))
    print_table(("row", "grid_thw", "patch_start", "ids"), images, "first stored images" if images else "")
    _print_pictures(shard.pictures)


def print_index(index: IndexDescription) -> None:
    """Print what an index holds."""
    size = f"{counted(index.rows, 'row')}, {counted(len(index.columns), 'column')}"
    say(out, f": an index of {size}", bold=index.path)
    _print_totals(index)
    shown = ("item", "id", "status", "shard", "row", "patch_count", "num_tokens")
    rows = []
    for row in index.first:
        cells = ("-" if row[name] is None else harmless(str(row[name]), CELL) for name in shown)
        rows.append((*cells, f"{row['width']} x {row['height']}" if row["width"] else "-", row["mode"] or "-"))
    columns = ("item", "id", "status", "shard", "row", "patches", "tokens", "size", "mode")
    print_table(columns, rows, "first rows")


def print_output(output: OutputDescription) -> None:
    """Print what an output folder holds."""
    state = "finished" if output.finished else "not finished: run the same encode command to continue"
    say(out, f": {state}", bold=output.path)
    shards, so_far = counted(len(output.shards), "shard"), ""
    if planned := output.planned:
        shards = f"{len(output.shards):,} of {counted(planned.shards, 'shard')}"
        so_far = f"; so far {output.rows:,} of {counted(planned.rows, 'item')}"
    if output.settings.index_only:
        say(out, "an index only: grids and tokens, no features")
    else:
        say(out, f"{shards}, {size_text(output.size)}, dtype {output.dtype}{so_far}")
    _print_totals(output)
    _print_pictures(output.pictures)
    if output.report is not None:
        say(out, str(output.report))


def _print_totals(totals: Totals) -> None:
    counts = {
        "status": totals.by_status,
        "group": totals.by_group,
        "mode": totals.by_mode,
        "format": totals.by_format,
        "error code": totals.by_error_code,
    }
    rows = [(name, ", ".join(f"{key}: {n:,}" for key, n in count.items())) for name, count in counts.items() if count]
    print_table(("by", "items"), rows, f"{counted(totals.rows, 'item')}, {counted(totals.num_tokens, 'token')}")
    print_histogram(totals.histogram)
    _print_largest(totals.largest)
    for row in totals.failures:
        say(out, _failure(row.line, row.id, row.error_code, row.error_message), "failed: ")
    if totals.failures_not_shown:
        say(out, f"… and {counted(totals.failures_not_shown, 'more failed item')}")


def _print_largest(images: Iterable[LargeImage]) -> None:
    """Print the images with the most tokens."""
    rows = []
    for image in images:
        size = f"{image.width:,} x {image.height:,}" if image.width else "-"  # null for features made elsewhere
        more = f" and {image.rows - 1:,} more" if image.rows > 1 else ""
        grid = " x ".join(f"{side:,}" for side in image.grid_thw[:0:-1])
        rows.append((f"{image.num_tokens:,}", size, grid, f"{image.line:,}", harmless(image.id, CELL) + more))
    print_table(("tokens", "size", "patches", "line", "id"), rows, "largest images" if rows else "")


def _print_pictures(pictures: Iterable[object] | None) -> None:
    for picture in pictures or ():
        say(out, str(picture))


# --- verify ---------------------------------------------------------------------------------------------------------


def print_verification(report: Verification) -> None:
    """Print what `verify` checked, and what is wrong."""
    for finding in report.problems:
        item = f", {harmless(finding.item, LINE)}" if finding.item is not None else ""
        say(out, f"{item}: {harmless(finding.what, 2 * LINE)}", "problem: ", bold=finding.file)
        say(out, f"    {finding.todo}")
    size = f"{counted(report.rows, 'row')}, {counted(report.images, 'image')}, {size_text(report.bytes)}"
    if report.compared is not None:
        size += f"; {counted(report.compared, 'image')} computed again"
    state = counted(len(report.problems), "problem") if report.problems else "all as it was written"
    say(out, f": {state} in {counted(report.shards, 'shard')} ({size})", bold=report.path)


#: How each document appears in words, by the name of its class: the classes lie in rooms that take time to import.
_PRINTERS: dict[str, Callable[[Any], None]] = {
    "ConfigReport": print_config,
    "ConfigReports": print_configs,
    "Gathered": print_gathered,
    "PlanSummary": print_plan,
    "RunSummary": print_run,
    "RangeSummary": print_range,
    "ShardDescription": print_shard,
    "IndexDescription": print_index,
    "OutputDescription": print_output,
    "Verification": print_verification,
}
