"""The process around a command: locale, streams, signals, and exit codes.

0 done; 1 finished, some items failed; 2 bad input, config or usage; 3 run-time failure; 130 interrupted, 143 told to
end (SIGTERM).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING

import typer

from kimik3_prep.errors import InputError, PrepError, Problem

if TYPE_CHECKING:
    from kimik3_prep.output.totals import PlanSummary, RangeSummary, RunSummary

    Summary = PlanSummary | RangeSummary | RunSummary


def run_command(app: Callable[[], object]) -> None:
    """Run the command line in a process that is fit for it."""
    _speak_utf8()
    _occupy_standard_streams()
    signal.signal(signal.SIGTERM, _terminate)
    code: object = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
    except OSError as error:  # only of --help and --version: what a command meets ends in `exit_codes`
        from kimik3_prep.screen import terminal

        terminal.out.on_broken_pipe()
        terminal.print_error(terminal.CannotPrint(f"cannot write to standard output: {error.strerror or error}"))
        code = 3
    sys.exit(code)  # type: ignore[arg-type]


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as batch systems send it: the run ends as with Ctrl-C."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _speak_utf8() -> None:
    """Start again in UTF-8 mode where the locale has fewer letters than file names: Python sets that at its start."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _occupy_standard_streams() -> None:
    """A closed stdin, stdout or stderr must not become the number of a shard that a library's message goes into."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextmanager
def exit_codes(format: str) -> Iterator[None]:
    """Errors that this package raises on purpose end as a sentence and an exit code."""
    from kimik3_prep.screen import terminal

    try:
        try:
            yield
        except PrepError as error:
            if format == "json" and not isinstance(error, terminal.CannotPrint):
                problems = [problem.as_dict() for problem in error.problems] if isinstance(error, InputError) else []
                terminal.print_json({"status": "error", "message": str(error), "problems": problems})
            else:
                terminal.print_error(error)
            raise typer.Exit(error.exit_code) from None
    except terminal.CannotPrint as error:  # there was something to say, and no room for it on standard output
        terminal.print_error(error)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        terminal.err.print("interrupted; committed shards stay valid, run the same command to continue")
        raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001  a fault of ours; nobody's answer should be a traceback
        terminal.print_fault(error)
        raise typer.Exit(3) from None


def tell(summary: Summary, warnings: list[Problem], dtype: str, format: str) -> None:
    """What a command came to, as JSON with its warnings or in words."""
    from kimik3_prep.screen import terminal

    if format == "json":
        terminal.print_json({"status": "ok", **asdict(summary), "warnings": [each.as_dict() for each in warnings]})
    else:
        terminal.print_summary(summary, dtype)
