"""The process around a command: locale, streams, signals, and exit codes.

0 done; 1 finished, some items failed; 2 bad input, config or usage; 3 run-time failure; 130 interrupted, 143 told to
end (SIGTERM).
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeGuard

import typer
from typer.core import TyperGroup

from kimik3_prep.errors import CannotPrint, Interrupted
from kimik3_prep.screen import answers

#: What Typer raises for a command line that it cannot read. Where the class lies depends on Typer's version.
_UsageError: Any = typer.BadParameter.__base__


class Commands(TyperGroup):
    """The commands. A signal ends one of them with an error like any other."""

    def invoke(self, context: Any) -> Any:
        """Run the command that the arguments name."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt as stop:
            raise Interrupted(143 if isinstance(stop, _Terminated) else 130) from None


def run_command(app: Callable[..., object]) -> None:
    """Run the command line in a process that is fit for it. Every way it ends is told here."""
    _speak_utf8()
    # Arrow's own allocator keeps what tables leave: a third of the memory that planning two million rows takes.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    _occupy_standard_streams()
    signal.signal(signal.SIGTERM, _terminate)
    format = asked_format(sys.argv[1:])
    try:
        code = app(standalone_mode=format != "json")  # alone, Typer prints usage errors and help in its own way
    except SystemExit as end:
        code = end.code
    except _UsageError as error:
        report = answers.report_usage(error.format_message())
        answers.give_error(report, format)
        code = report.exit_code
    except Exception as raised:  # noqa: BLE001  nobody's answer should be a traceback
        reason = CannotPrint(raised.strerror) if _is_of_a_full_stdout(raised) else raised
        report = answers.report_error(reason)
        answers.give_error(report, "text" if isinstance(reason, CannotPrint) else format)
        if report.kind == "internal":
            answers.print_traceback(reason)
        code = report.exit_code
    sys.exit(code)  # type: ignore[arg-type]


def _is_of_a_full_stdout(error: Exception) -> TypeGuard[OSError]:
    """Typer prints its help without our console. Files of ours have a name, or fail as DiskRefuses."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None


def asked_format(arguments: Sequence[str]) -> answers.Format:
    """Return the format that a command line asks for, read before Typer does: it may find the line wrong."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    values = [after for word, after in itertools.pairwise(words) if word == "--format"]
    values += [word.removeprefix("--format=") for word in words if word.startswith("--format=")]
    return "json" if values[-1:] == ["json"] else "text"


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
