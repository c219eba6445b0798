"""What `inspect`, `verify` and `manifest` found, printed. Foreign texts are made harmless as in `terminal.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kimik3_prep.screen.terminal import (
    LINE,
    counted,
    err,
    failure,
    harmless,
    out,
    print_histogram,
    print_problem,
    print_table,
    say,
    size_text,
)

if TYPE_CHECKING:  # the others need no decoders
    from kimik3_prep.manifest.write import Gathered
    from kimik3_prep.reading.verify import Verification

_CELL = 60  # most characters of a foreign text in a table


def print_inspection(found: dict[str, Any]) -> None:
    """A description from `inspection.inspect`."""
    {"shard": _print_shard, "index": _print_index, "output": _print_output}[found["kind"]](found)


def _print_shard(found: dict[str, Any]) -> None:
    say(out, f": a shard of {size_text(found['size'])}", bold=found["path"])
    tensors = found["tensors"].items()
    rows = [(name, tensor["dtype"], str(tensor["shape"]), f"{tensor['bytes']:,}") for name, tensor in tensors]
    print_table(("tensor", "dtype", "shape", "bytes"), rows)
    for key, value in found["metadata"].items():
        say(out, f"{key}: {harmless(str(value), LINE)}")
    if found["value_range"]:
        low, high = found["value_range"]
        say(out, f"values from {low:.9g} to {high:.9g}")
    if found["not_finite"]:
        say(out, f"{counted(found['not_finite'], 'value')} NaN or infinite")
    if not found["rows"]:
        say(out, "no image is stored in it")
        return
    rows = []
    for row in found["rows"]:
        ids = ", ".join(harmless(name, _CELL) for name in row["ids"][:3])
        more = f" and {len(row['ids']) - 3:,} more" if len(row["ids"]) > 3 else ""
        rows.append((str(row["row"]), str(row["grid_thw"]), f"{row['patch_start']:,}", ids + more))
    print_table(("row", "grid_thw", "patch_start", "ids"), rows, "first stored images")


def _print_index(found: dict[str, Any]) -> None:
    size = f"{counted(found['rows'], 'row')}, {counted(len(found['columns']), 'column')}"
    say(out, f": an index of {size}", bold=found["path"])
    _print_totals(found)
    shown = ("item", "id", "status", "shard", "row", "patch_count", "num_tokens")
    rows = []
    for row in found["first"]:
        cells = ("-" if row[name] is None else harmless(str(row[name]), _CELL) for name in shown)
        rows.append((*cells, f"{row['width']} x {row['height']}" if row["width"] else "-", row["mode"] or "-"))
    columns = ("item", "id", "status", "shard", "row", "patches", "tokens", "size", "mode")
    print_table(columns, rows, "first rows")


def _print_output(found: dict[str, Any]) -> None:
    state = "finished" if found["finished"] else "not finished: run the same encode command to continue"
    say(out, f": {state}", bold=found["path"])
    shards, so_far = counted(len(found["shards"]), "shard"), ""
    if planned := found["planned"]:
        shards = f"{len(found['shards']):,} of {counted(planned['shards'], 'shard')}"
        so_far = f"; so far {found['rows']:,} of {counted(planned['rows'], 'item')}"
    if found.get("settings", {}).get("index_only"):
        say(out, "an index only: grids and tokens, no features")
        return _print_totals(found)
    say(out, f"{shards}, {size_text(found['size'])}, dtype {found['dtype']}{so_far}")
    _print_totals(found)


def _print_totals(found: dict[str, Any]) -> None:
    names = [name for name in ("status", "group", "mode", "format", "error_code") if found[f"by_{name}"]]
    counts = [", ".join(f"{key}: {count:,}" for key, count in found[f"by_{name}"].items()) for name in names]
    rows = [(name.replace("_", " "), count) for name, count in zip(names, counts, strict=True)]
    print_table(("by", "items"), rows, f"{counted(found['rows'], 'item')}, {counted(found['num_tokens'], 'token')}")
    print_histogram(found["histogram"])
    _print_largest(found)
    for row in found["failures"]:
        say(out, failure(row["line"], row["id"], row["error_code"], row["error_message"]), "failed: ")
    if found["failures_not_shown"]:
        say(out, f"… and {counted(found['failures_not_shown'], 'more failed item')}")


def _print_largest(found: dict[str, Any]) -> None:
    """The images with the most tokens."""
    rows = []
    for row in found["largest"]:
        size = f"{row['width']:,} x {row['height']:,}" if row["width"] else "-"  # null for features made elsewhere
        more = f" and {row['rows'] - 1:,} more" if row["rows"] > 1 else ""
        grid = " x ".join(f"{side:,}" for side in row["grid_thw"][:0:-1])
        rows.append((f"{row['num_tokens']:,}", size, grid, f"{row['line']:,}", harmless(row["id"], _CELL) + more))
    print_table(("tokens", "size", "patches", "line", "id"), rows, "largest images" if rows else "")


def print_verification(report: Verification) -> None:
    """The result of `verify`."""
    for finding in report.findings:
        item = f", {harmless(finding.item, LINE)}" if finding.item is not None else ""
        say(out, f"{item}: {harmless(finding.what, 2 * LINE)}", "problem: ", bold=finding.file)
        say(out, f"    {finding.todo}")
    size = f"{counted(report.rows, 'row')}, {counted(report.images, 'image')}, {size_text(report.bytes)}"
    if report.compared is not None:
        size += f"; {counted(report.compared, 'image')} computed again"
    problems = counted(len(report.findings), "problem") if report.findings else "all as it was written"
    say(out, f": {problems} in {counted(report.shards, 'shard')} ({size})", bold=report.path)


def print_gathered(found: Gathered) -> None:
    """What a manifest was made of, on stderr: standard output may be the manifest's."""
    for problem in found.warnings:
        print_problem(problem)
    text = counted(found.items, "item")
    if found.of == "rows":
        text += f" of {counted(found.rows, 'row')}"
    for kind in found.passed_over:
        names = ", ".join(harmless(name, _CELL) for name in kind.names)
        more = ", …" if kind.count > len(kind.names) else ""
        say(err, f"passed over: {kind.count:,} {harmless(kind.kind, _CELL)}: {names}{more}")
    if found.sizes_unknown:
        text += f"; {counted(found.sizes_unknown, 'header')} could not be read"
    say(err, text + (f", in {found.output}" if found.output else ""))
