"""Everything this package raises on purpose.

    PrepError                     base; `exit_code` is what the command line returns
    ├── InputError                bad manifest, config or option: all its `Problem`s at once (exit 2)
    │   └── PlanMismatch          the output folder holds a run with other settings (exit 2)
    ├── RunError                  the machine failed us: disk full, worker died (exit 3)
    │   ├── TooManyFailures       `--on-error fail` or `--max-failures` stopped the run (exit 3)
    │   ├── RunStopped            the run was stopped before its end (exit 3)
    │   ├── WorkersDoNotStart     worker processes end before they do anything (exit 3)
    │   ├── PatchesMissing        an item's patches do not fill its place (exit 3)
    │   ├── FileReplaced          somebody put another file in the place of one being written (exit 3)
    │   ├── NoMoreFiles           the process may open no more files (exit 3)
    │   ├── LibraryRefuses        a library that Pillow decodes with cannot be loaded (exit 3)
    │   └── CannotPrint           standard output takes no more text (exit 3)
    ├── Interrupted               Ctrl-C (exit 130) or SIGTERM (exit 143) stopped the command
    ├── StoreError                stored features cannot be read: a shard is gone, damaged or of another run (exit 3)
    └── ItemError                 one item failed; recorded in the index, the run goes on
        └── FailedItem            the features of an item were asked for that failed when they were made

A class writes its own sentence; the command line only prints it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: Why one item failed. The word goes into the index column `error_code`; treat it as a public interface.
ItemErrorCode = Literal[
    "not_found",  # the path does not exist
    "permission_denied",  # the path may not be read
    "not_a_file",  # a folder, named pipe, socket or device
    "unreadable",  # the operating system or the network failed while reading
    "bad_data_url",  # a data: URL that does not decode
    "timed_out",  # not read or decoded within --item-timeout
    "unidentified",  # no allowed decoder recognises the bytes
    "truncated",  # the encoded data ends early
    "corrupt",  # the decoder refused the data
    "too_many_pixels",  # above --max-pixels
    "too_many_tokens",  # no scale brings it under --max-tokens
    "out_of_memory",  # the decoder could not allocate, or the system killed its process
    "decoder_crashed",  # the process that decoded it died, twice
    "size_mismatch",  # decoded size differs from the manifest's width and height
    "source_changed",  # the file is not the one that was planned
    "content_hash_mismatch",  # sha256 of the bytes differs from the manifest's content_hash
    "bad_features",  # a locally preprocessed tensor that breaks the contract
]

#: What to do where Ray is missing.
INSTALL_RAY = "pip install 'kimik3-prep[ray]'"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the input, in words that help to mend it."""

    where: str
    """`file:line`, `file: JSON path`, or an option."""
    what: str
    """What stands there."""
    expected: str = ""
    """What should stand there; may be empty."""
    hint: str = ""
    """What to do; may be empty."""
    severity: Literal["error", "warning"] = "error"
    """A warning is shown and the command goes on."""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}"
        if self.expected:
            text += f"; expected {self.expected}"
        return f"{text} ({self.hint})" if self.hint else text


class PrepError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code = 3


class InputError(PrepError):
    """The manifest, the config or an option is wrong. Carries every problem found, not only the first.

    `total` counts the problems where only the first ones were kept.
    """

    exit_code = 2

    def __init__(self, problems: Iterable[Problem], total: int | None = None) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.total = len(self.problems) if total is None else total
        count = "1 problem" if self.total == 1 else f"{self.total:,} problems"
        lines = [f"{count} found before any work:", *(f"  {problem}" for problem in self.problems)]
        if self.total > len(self.problems):
            lines.append(f"  … and {self.total - len(self.problems):,} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...], int]]:
        return type(self), (self.problems, self.total)


class PlanMismatch(InputError):
    """The output folder holds a run that was started with other settings."""


class RunError(PrepError):
    """The run could not go on, through no fault of an item. Committed shards stay valid."""

    exit_code = 3


class RunStopped(RunError):
    """The run was stopped before its end."""

    def __str__(self) -> str:
        return "the run was stopped. What is committed stays valid: run the same command to continue."


class TooManyFailures(RunError):
    """More items failed than `--on-error fail` or `--max-failures` allows."""

    def __init__(self, failed: int, allowed: int, first: ItemError | None) -> None:
        super().__init__(failed, allowed, first)
        self.failed, self.allowed, self.first = failed, allowed, first

    def __str__(self) -> str:
        option = "--on-error fail" if self.allowed == 0 else f"--max-failures {self.allowed}"
        first = f" ({self.first})" if self.first else ""
        return (
            f"stopped at {self.failed:,} failed items{first}, as {option} asks. Committed shards stay valid: mend the "
            "items or record failures (--on-error record), and run again to continue."
        )


class PatchesMissing(RunError):
    """An item's patches do not fill its place: a fault of this package."""

    def __init__(self, image: str, made: int, planned: int) -> None:
        super().__init__(image, made, planned)
        self.image, self.made, self.planned = image, made, planned

    def __str__(self) -> str:
        return f"{self.made:,} patches were made for {self.image}, {self.planned:,} were planned"


class FileReplaced(RunError):
    """Somebody put another file in the place of one that the run is writing."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} is not the file that this run made: something else writes into the output folder"


class WorkersDoNotStart(RunError):
    """Worker processes end before they do anything."""

    def __init__(self, how: str, message: str) -> None:
        super().__init__(how, message)
        self.how, self.message = how, message

    def __str__(self) -> str:
        return f"the worker processes do not start: {self.how}{': ' if self.message else ''}{self.message}"


class CannotPrint(RunError):
    """Standard output takes no more text. Facts: the reason."""

    def __str__(self) -> str:
        return f"cannot write to standard output: {self.args[0]}"


class NoMoreFiles(RunError):
    """The process may open no more files, which is no fault of an image. Facts: the system's reason."""

    def __str__(self) -> str:
        return (
            f"cannot open an image: {self.args[0]}. Raise the limit (`ulimit -n`) or lower --workers, and run the same "
            "command to continue."
        )


class LibraryRefuses(RunError):
    """A library that Pillow decodes with is installed and cannot be loaded. Facts: the module, the reason."""

    def __str__(self) -> str:
        module, reason = self.args
        return f"{module} cannot be loaded, and without it images may decode differently: {reason}"


class Interrupted(PrepError):
    """A signal stopped the command. Facts: the exit code, 130 for Ctrl-C and 143 for SIGTERM."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return "interrupted; committed shards stay valid, run the same command to continue"


class ItemError(PrepError):
    """One item cannot be prepared. `code` is one of `ItemErrorCode`, `message` a sentence without the path."""

    def __init__(self, code: ItemErrorCode, message: str) -> None:
        self.code: ItemErrorCode = code
        self.message = message
        super().__init__(f"{code}: {message}")

    def __reduce__(self) -> tuple[type[ItemError], tuple[ItemErrorCode, str]]:
        return type(self), (self.code, self.message)


class StoreError(PrepError):
    """Stored features cannot be read: a shard is gone, damaged, or not of the run that the index describes."""


class FailedItem(ItemError):
    """The features of an item were asked for that has none. `id` and `line` say which item of the manifest."""

    def __init__(self, code: ItemErrorCode, message: str, id: str, line: int) -> None:
        super().__init__(code, message)
        self.id = id
        self.line = line

    def __str__(self) -> str:
        return f"line {self.line}, {self.id} has no features: {self.code}: {self.message}"

    def __reduce__(self) -> tuple[type[FailedItem], tuple[ItemErrorCode, str, str, int]]:  # type: ignore[override]
        return type(self), (self.code, self.message, self.id, self.line)
