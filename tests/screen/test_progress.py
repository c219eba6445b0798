"""progress.py: lines and bars that mean something, and nothing where nobody asked."""

from __future__ import annotations

import io
import re

import pytest

from kimik3_prep.errors import Problem
from kimik3_prep.screen.progress import ProgressReporter
from kimik3_prep.screen.terminal import err

Capture = pytest.CaptureFixture[str]


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes when the test says so."""
    now = [1000.0]
    monkeypatch.setattr("kimik3_prep.screen.progress.time.monotonic", lambda: now[0])
    return now


def test_lines_where_there_is_no_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    with ProgressReporter(show=True) as reporter:
        reporter.phase("headers", 2)
        now[0] += 1
        reporter.advance(2, 3_000_000, 0, 1)
        reporter.phase("images", 4000)
        for _ in range(4):
            now[0] += 2.5
            reporter.advance(100, 1_000_000, 3 << 20, 1)
    assert capsys.readouterr().err.splitlines() == [
        "headers: 2 of 2 (100 %), 2 images/s, 1 failed",
        "images: 200 of 4,000 (5 %), 0.4 megapixels/s, 6.0 MiB, 3 failed, about 0:01:35 left",
        "images: 400 of 4,000 (10 %), 0.4 megapixels/s, 12.0 MiB, 5 failed, about 0:01:30 left",
        "images: 400 of 4,000 (10 %), 0.4 megapixels/s, 12.0 MiB, 5 failed, about 0:01:30 left",
    ]


def test_long_waits_are_told_in_hours(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    with ProgressReporter(show=True) as reporter:
        reporter.phase("images", 1000)
        now[0] += 60
        reporter.advance(1, 1_000_000, 0, 0)
        assert "about 16:39:00 left" in capsys.readouterr().err


def test_nothing_is_said_when_told_so_or_of_a_phase_without_images(capsys: Capture) -> None:
    with ProgressReporter(show=False) as reporter:
        reporter.phase("images", 2)
        reporter.advance(2, 2, 2, 0)
    with ProgressReporter(show=True) as reporter:
        reporter.phase("headers", 0)
        reporter.phase("images", 0)
    assert capsys.readouterr().err == ""


def test_warnings_are_printed_at_once_and_kept(capsys: Capture) -> None:
    reporter = ProgressReporter(show=False)
    problem = Problem("--dtype", "merges levels", severity="warning")
    reporter.warn(problem)
    assert reporter.warnings == [problem]
    assert capsys.readouterr().err == "warning: --dtype: merges levels\n"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_and_only_there(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(err, "_width", 120)  # COLUMNS is read once, when the module is imported
    monkeypatch.setenv("FORCE_COLOR", "1")  # asks for colours: a log of a build server must not be filled with bars
    with ProgressReporter(show=True) as reporter:
        reporter.phase("images", 2)
        reporter.advance(2, 2_000_000, 10, 0)
    said = capsys.readouterr().err
    assert (said.count("images"), "━" in said) == (1, False)
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressReporter(show=True) as reporter:
        reporter.phase("images", 2)
        reporter.advance(2, 2_000_000, 10, 1)
    assert "━" in stream.getvalue()
    assert "2/2" in stream.getvalue()
    assert "1 failed" in stream.getvalue()


@pytest.mark.parametrize(("columns", "bar", "note"), [(40, False, False), (80, True, False), (120, True, True)])
def test_count_share_and_time_left_fit_everywhere(
    columns: int, bar: bool, note: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(err, "_width", columns)
    with ProgressReporter(show=True) as reporter:
        reporter.phase("images", 1_000_000)
        for _ in range(5):
            reporter.advance(50_000, 50_000_000, 1 << 30, 1)
    shown = stream.getvalue()
    assert "250000/1000000" in shown
    assert "25 %" in shown
    assert re.search(r"\d\d:\d\d|--:--", shown)
    assert ("━" in shown, "megapixels/s" in shown) == (bar, note)
    assert "…" not in shown
