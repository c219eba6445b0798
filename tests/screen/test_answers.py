"""answers.py: every document as JSON and in words, and that nobody's words can do more than be read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from conftest import HOSTILE, recipe
from rich.console import Console

from kimik3_prep.checkpoint.config import Diagnosis, Mended, Setting
from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import InputError, Problem, RunError, TooManyFailures
from kimik3_prep.manifest.report import PassedOver
from kimik3_prep.manifest.write import Gathered
from kimik3_prep.output.totals import Bin, Failure, PlanSummary, RunSummary
from kimik3_prep.reading.inspection import (
    Description,
    FailedRow,
    IndexDescription,
    LargeImage,
    OutputDescription,
    Planned,
    ShardDescription,
    ShardSize,
    StoredImage,
    TensorDescription,
)
from kimik3_prep.screen import answers, terminal
from kimik3_prep.screen.terminal import harmless

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow place that is no terminal: no line may be cut or folded to fit it."""
    monkeypatch.setenv("COLUMNS", "40")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def plan(**more: Any) -> PlanSummary:
    values: dict[str, Any] = {
        **{"rows": 14, "failed": 0, "failures": (), "images": 13, "pixels": 4_550_000, "patches": 24_536},
        **{
            "tokens": 7059,
            "dtype": "float32",
            "bytes_by_dtype": {name: 24_536 * 588 * dtype.itemsize for name, dtype in DTYPES.items()},
        },
        **{"shards": {"cpu": 2, "local": 1}, "histogram": ((16, 0), (32, 1), (64, 12))},
    }
    return PlanSummary(**values | more)


def run(**more: Any) -> RunSummary:
    values: dict[str, Any] = {
        **{"output": "out", "rows": 14, "ok": 13, "failed": 1, "failures": (Failure(13, "cut", "truncated", "ends"),)},
        **{"images": 12, "patches": 23_472, "tokens": 6793, "size": 55_206_144, "shards": 3, "skipped": 0},
    }
    return RunSummary(**values | more)


# --- errors -------------------------------------------------------------------------------------------------------


def test_problems_say_where_what_expected_and_hint(capsys: Capture) -> None:
    problems = [
        Problem("m.jsonl:3", 'backend "cuda"', '"gpu" or "cpu"', 'was "gpu" meant?'),
        Problem("m.jsonl:9", "no image"),
    ]
    answers.print_error(answers.report_error(InputError(problems)))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        'error: m.jsonl:3: backend "cuda"',
        '    expected "gpu" or "cpu"',
        '    hint: was "gpu" meant?',
        "error: m.jsonl:9: no image",
        "2 problems found, nothing was done.",
    ]


def test_one_problem_is_one(capsys: Capture) -> None:
    answers.print_error(answers.report_error(InputError([Problem("a", "b")])))
    assert capsys.readouterr().err == "error: a: b\n1 problem found, nothing was done.\n"


def test_the_first_fifty_problems_are_shown_and_all_counted(capsys: Capture) -> None:
    error = InputError([Problem(f"m:{i}", "no") for i in range(60)], total=123_456)
    answers.print_error(answers.report_error(error))
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines), lines[49]) == (51, "error: m:49: no")
    assert lines[50] == (
        "123,456 problems found, nothing was done (123,406 of them not shown; --format json lists up to 1,000)."
    )


@pytest.mark.parametrize("error", [RunError("disk full"), TooManyFailures(3, 2)])
def test_other_errors_are_a_sentence(error: RunError, capsys: Capture) -> None:
    answers.print_error(answers.report_error(error))
    assert " ".join(capsys.readouterr().err.split()) == f"error: {error}"


def test_a_fault_says_where_and_shows_its_traceback_when_asked(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shown in (False, True):
        monkeypatch.setenv("KIMIK3_PREP_TRACEBACK", "1" if shown else "")
        try:
            raise ZeroDivisionError("[red]\x1b[2J")
        except ZeroDivisionError as error:
            answers.print_error(answers.report_error(error))
            answers.print_traceback(error)
        said = capsys.readouterr().err
        assert said.startswith("internal error: ZeroDivisionError: [red]\\x1b[2J (at test_answers.py:")
        assert "Please report this." in said
        assert ("Traceback (most recent call last):" in said) is shown
        assert ("KIMIK3_PREP_TRACEBACK=1" in said) is not shown
        assert "\x1b" not in said


# --- texts of others ----------------------------------------------------------------------------------------------


def index_row(**more: Any) -> dict[str, Any]:
    row = dict.fromkeys(("item", "id", "status", "shard", "row", "patch_count", "num_tokens", "width", "mode"))
    return row | {"item": 0, "id": "a", "status": "failed", "height": None} | more


def large(**more: Any) -> LargeImage:
    values = {"item": 0, "line": 1, "id": "a", "num_tokens": 2, "width": 50, "height": 20, "shard": "cpu-00000"}
    return LargeImage(**values | {"grid_thw": (1, 2, 4), "rows": 1} | more)


def totals(text: str, **more: Any) -> dict[str, Any]:
    """What an index adds up to, with `text` wherever a text of others can stand."""
    return {
        **{"rows": 1, "num_tokens": 1, "by_status": {"failed": 1}, "by_group": {}, "by_mode": {text: 1}},
        **{"by_format": {}, "by_error_code": {}, "failures": (FailedRow(3, text, "corrupt", text),)},
        **{"failures_not_shown": 1, "images": 2, "histogram": (Bin(16, 1),), "largest": (large(id=text),)},
        **more,
    }


def shard(text: str, **more: Any) -> ShardDescription:
    values = {
        **{"path": text, "size": 1, "tensors": {}, "metadata": {"dtype": text}, "value_range": None, "not_finite": 1},
        "rows": (StoredImage(0, (1, 2, 2), 0, (text,)),),
    }
    return ShardDescription(**values | more)


def index(text: str, **more: Any) -> IndexDescription:
    first = (index_row(id=text),)
    return IndexDescription(**{"path": text, "columns": {"item": "int64"}, "first": first, **totals(text), **more})


def output(text: str, **more: Any) -> OutputDescription:
    values = {
        **{"path": text, "finished": True, "planned": None, "shards": {}, "size": 0, "dtype": text},
        **{"settings": recipe(), "versions": {}, "fingerprint": ""},
    }
    return OutputDescription(**values | totals(text) | more)


def give(document: Description) -> None:
    answers.give(document, "text")


PRINTERS = {
    "problem": lambda text: terminal.print_problem(Problem(text, text, text, text)),
    "error": lambda text: answers.print_error(answers.report_error(RunError(text))),
    "failures": lambda text: answers.print_failures([(1, text, "corrupt", text)], 1),
    "run": lambda text: answers.print_run(run(output=text)),
    "plan": lambda text: answers.print_plan(plan(failed=1, failures=((1, text, "corrupt", text),))),
    "diagnosis": lambda text: answers.print_config(
        Diagnosis(Path(text), None, (Problem(text, text),), (Setting(text, text, text, "file"),)).report()
    ),
    "shard": lambda text: give(shard(text)),
    "index": lambda text: give(index(text)),
    "output": lambda text: give(output(text)),
    "gathered": lambda text: answers.print_gathered(Gathered(output=text, of="rows", warnings=(Problem(text, text),))),
}


@pytest.mark.parametrize("name", PRINTERS)
def test_texts_of_others_are_printed_letter_by_letter(name: str, capsys: Capture) -> None:
    PRINTERS[name]("plain")
    lines = len("".join(capsys.readouterr()).splitlines())
    PRINTERS[name](HOSTILE)
    said = "".join(capsys.readouterr())
    assert "[red]a[/red] :cat: \\x1b[2J" in said
    assert harmless(said.replace("\n", "")) == said.replace("\n", "")
    assert len(said.splitlines()) == lines  # none forged
    said.encode()


@pytest.mark.parametrize("name", PRINTERS)
def test_markup_does_no_more_on_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for console in ("out", "err"):
        given = getattr(terminal, console)
        markup, emoji = given._markup, given._emoji
        new = Console(
            file=io.StringIO(), force_terminal=True, width=40, markup=markup, emoji=emoji, soft_wrap=True, record=True
        )
        for module in (terminal, answers):
            monkeypatch.setattr(module, console, new)
    PRINTERS[name](HOSTILE)
    said = terminal.out.export_text() + terminal.err.export_text()
    assert "[red]a[/red] :cat: \\x1b[2J" in said


@pytest.mark.parametrize("name", ["failures", "shard", "index", "output"])
def test_a_very_long_id_fills_no_screen(name: str, capsys: Capture) -> None:
    PRINTERS[name]("猫" * 1_000_000)
    lines = "".join(capsys.readouterr()).splitlines()
    of_ids = [line for line in lines if line.startswith(("failed: ", "0  "))]
    assert of_ids
    assert all(60 <= len(line) < 1000 for line in of_ids)


@pytest.mark.parametrize("name", PRINTERS)
def test_a_place_without_unicode_gets_escapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", ascii_only)
    monkeypatch.setattr("sys.stderr", ascii_only)
    PRINTERS[name]("猫" * 1000)
    ascii_only.flush()
    assert b"\\u732b" in ascii_only.buffer.getvalue()  # type: ignore[attr-defined]


# --- results ------------------------------------------------------------------------------------------------------


def test_a_run(capsys: Capture) -> None:
    answers.give(run(), "text")
    said = capsys.readouterr()
    assert said.err == "failed: line 13, cut: truncated: ends\n"
    assert said.out.splitlines() == [
        "13 of 14 items ok, 1 failed; 12 images stored, 23,472 patches, 6,793 tokens",
        "3 shards, 52.6 MiB, in out",
    ]


def test_a_run_of_one(capsys: Capture) -> None:
    one = run(rows=1, ok=1, failed=0, failures=(), images=1, patches=4, tokens=1, shards=1, skipped=1)
    answers.give(one, "text")
    assert capsys.readouterr().out.splitlines() == [
        "Resumed: 1 shard was committed before.",
        "1 of 1 item ok, 0 failed; 1 image stored, 4 patches, 1 token",
        "1 shard, 52.6 MiB, in out",
    ]


@pytest.mark.parametrize(
    ("skipped", "line"),
    [
        (None, "This run was finished before; nothing to do."),
        (2, "Resumed: 2 shards were committed before."),
        (0, "13 of 14 items ok"),
    ],
)
def test_what_was_there_before_is_said(skipped: int | None, line: str, capsys: Capture) -> None:
    answers.print_run(run(skipped=skipped))
    assert capsys.readouterr().out.startswith(line)


def test_failures_that_are_not_shown_are_counted(capsys: Capture) -> None:
    answers.print_run(run(failed=21))
    assert capsys.readouterr().err.splitlines()[1] == "… and 20 more failed items, all in the index"
    answers.print_plan(plan(failed=2, failures=((1, "a", "not_found", "gone"),)))
    assert capsys.readouterr().err.splitlines()[1] == "… and 1 more failed item"  # a dry run writes no index


def test_a_plan(capsys: Capture) -> None:
    answers.give(plan(dtype="bfloat16"), "text")
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines() == [
        "14 items: 13 images to store (4.5 megapixels)",
        "24,536 patches, 7,059 tokens",
        "size of pixel_values",
        "dtype              bytes",
        "float32            57,708,672  55.0 MiB",
        "bfloat16 (chosen)  28,854,336  27.5 MiB",
        "float16            28,854,336  27.5 MiB",
        "uint8              14,427,168  13.8 MiB",
        "shards: 2 cpu, 1 local",
        "tokens per image",
        "       1 to     16  0",
        "      17 to     32  ███ 1",
        "      33 to     64  ████████████████████████████████████████ 12",
    ]


def test_a_plan_of_failures(capsys: Capture) -> None:
    nothing = plan(rows=1, failed=1, images=0, pixels=0, patches=0, tokens=0, shards={}, histogram=())
    answers.print_plan(nothing)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 item: 0 images to store (0.0 megapixels), 1 cannot be read"
    assert lines[-1] == "shards: none"


def test_a_diagnosis(capsys: Capture) -> None:
    settings = (Setting("patch_size", 14, 14, "file"), Setting("image_mean", [0.4, 0.5, 0.5], [0.5, 0.5, 0.5], "file"))
    answers.print_config(Diagnosis(Path("c.json"), None, (Problem("c.json: x", "no"),), settings).report())
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "c.json",
        "setting     value            published        from",
        "patch_size  14               14               file",
        "image_mean  [0.4, 0.5, 0.5]  [0.5, 0.5, 0.5]  file",
        "1 setting differs from the published ones: image_mean",
    ]
    assert said.err == "error: c.json: x: no\n"


def test_what_was_mended_is_said(capsys: Capture) -> None:
    diagnosis = Diagnosis(Path("c.json"), None, (), ())
    for mended, line in (
        (Mended(("patch_size",), {"in_patch_limt": "in_patch_limit"}), "renamed in_patch_limt to in_patch_limit\n"),
        (Mended(("patch_size",)), "restored patch_size\n"),
        (Mended(), "no key is missing: no copy was written\n"),
    ):
        answers.print_config(diagnosis.report(mended))
        assert line in capsys.readouterr().out


def test_a_value_that_is_not_the_published_one_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200, soft_wrap=True)
    monkeypatch.setattr(terminal, "out", console)
    settings = (Setting("a", 1, 1, "file"), Setting("b", 2, 1, "file"))
    answers.print_config(Diagnosis(Path("c.json"), None, (), settings).report())
    yellow = [line for line in console.file.getvalue().splitlines() if "\x1b[33m" in line]  # type: ignore[attr-defined]
    assert len(yellow) == 1
    assert "b" in yellow[0]


def test_wide_letters_keep_the_columns_aligned(capsys: Capture) -> None:
    give(index("x", first=(index_row(id="猫"), index_row(id="cat"))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "0     猫   failed  -      -    -        -       -     -",
        "0     cat  failed  -      -    -        -       -     -",
    ]


def test_an_inspected_shard(capsys: Capture) -> None:
    give(
        ShardDescription(
            path="s.safetensors",
            size=2048,
            metadata={"dtype": "float32", "format": 1},
            value_range=(-1.0, 0.00392156885936856),
            not_finite=0,
            tensors={"pixel_values": TensorDescription("F32", (1200, 3, 14, 14), 2_822_400)},
            rows=(
                StoredImage(0, (1, 2, 2), 0, ("a", "b", "c", "d", "e")),
                StoredImage(1, (1, 20, 20), 1000, ()),
            ),
        )
    )
    assert capsys.readouterr().out.splitlines() == [
        "s.safetensors: a shard of 2.0 KiB",
        "tensor        dtype  shape              bytes",
        "pixel_values  F32    [1200, 3, 14, 14]  2,822,400",
        "dtype: float32",
        "format: 1",
        "values from -1 to 0.00392156886",
        "first stored images",
        "row  grid_thw     patch_start  ids",
        "0    [1, 2, 2]    0            a, b, c and 2 more",
        "1    [1, 20, 20]  1,000",
    ]


def test_an_inspected_shard_of_nothing(capsys: Capture) -> None:
    give(shard("s", rows=(), not_finite=2))
    assert capsys.readouterr().out.splitlines()[-2:] == ["2 values NaN or infinite", "no image is stored in it"]


def test_an_inspected_index(capsys: Capture) -> None:
    first = index_row(id="a", status="ok", shard="cpu-00000", row=0, patch_count=4, num_tokens=1, width=28, height=9)
    give(
        IndexDescription(
            path="index.parquet",
            columns={"item": "int64", "id": "string"},
            rows=12,
            num_tokens=1,
            by_status={"ok": 11, "failed": 1},
            by_group={"cpu": 12},
            by_format={},
            by_mode={"RGB": 8, "P": 2, "1": 1},
            by_error_code={"truncated": 1},
            failures=(FailedRow(1300, "cut", "truncated", "ends early"),),
            failures_not_shown=0,
            images=11,
            histogram=(Bin(16, 10), Bin(32, 1)),
            largest=(
                large(num_tokens=1792, width=7600, height=180, grid_thw=(1, 14, 512), rows=3),
                large(id="made elsewhere", line=1200, width=None, height=None),
            ),
            first=(first | {"mode": "1"},),
        )
    )
    assert capsys.readouterr().out.splitlines() == [
        "index.parquet: an index of 12 rows, 2 columns",
        "12 items, 1 token",
        "by          items",
        "status      ok: 11, failed: 1",
        "group       cpu: 12",
        "mode        RGB: 8, P: 2, 1: 1",
        "error code  truncated: 1",
        "tokens per image",
        f"       1 to     16  {'█' * 40} 10",
        "      17 to     32  ████ 1",
        "largest images",
        "tokens  size         patches   line   id",
        "1,792   7,600 x 180  512 x 14  1      a and 2 more",
        "2       -            4 x 2     1,200  made elsewhere",
        "failed: line 1,300, cut: truncated: ends early",
        "first rows",
        "item  id  status  shard      row  patches  tokens  size    mode",
        "0     a   ok      cpu-00000  0    4        1       28 x 9  1",
    ]


def test_where_no_image_is_stored_there_is_no_largest(capsys: Capture) -> None:
    give(output("x", images=0, histogram=(), largest=()))
    assert "largest images" not in capsys.readouterr().out


def test_what_a_manifest_was_made_of(capsys: Capture) -> None:
    heic, row = PassedOver(".heic files", 3, ("a.heic", "b.heic")), PassedOver("rows without an image", 1, ("m:7",))
    answers.print_gathered(Gathered(output=None, of="files", items=1, rows=1))
    answers.print_gathered(Gathered(output="m.jsonl", of="files", items=2000, rows=2000, passed_over=(heic,)))
    answers.print_gathered(Gathered(output=None, of="rows", items=4, rows=3, passed_over=(row,), sizes_unknown=1))
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()) == (
        "",
        [
            "1 item",
            "passed over: .heic files (3): a.heic, b.heic, …",
            "2,000 items, in m.jsonl",
            "passed over: rows without an image (1): m:7",
            "4 items of 3 rows; 1 header could not be read",
        ],
    )


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ({"shards": {"a": ShardSize(0, 0)}}, ["out: finished", "1 shard, 0 B, dtype uint8"]),
        (
            {"finished": False, "shards": {"a": ShardSize(0, 0)}, "planned": Planned(40, 12)},
            [
                "out: not finished: run the same encode command to continue",
                "1 of 12 shards, 0 B, dtype uint8; so far 1 of 40 items",
            ],
        ),
        (
            {"finished": False},
            ["out: not finished: run the same encode command to continue", "0 shards, 0 B, dtype uint8"],
        ),
    ],
)
def test_an_inspected_output(more: dict[str, Any], lines: list[str], capsys: Capture) -> None:
    give(output("x", **{"path": "out", "dtype": "uint8"} | more))
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == lines
    assert said[-2:] == ["failed: line 3, x: corrupt: x", "… and 1 more failed item"]
