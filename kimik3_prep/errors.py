"""Everything this package raises on purpose.

    PrepError                     base; `exit_code` is what the command line returns
    ├── InputError                bad manifest, config or option: all its `Problem`s at once (exit 2)
    │   └── PlanMismatch          the output folder holds a run with other settings (exit 2)
    ├── RunError                  the machine failed us: disk full, worker died (exit 3)
    │   ├── DiskRefuses           a file cannot be written
    │   ├── FolderRemoved         somebody removed the output folder under a run
    │   ├── StoreRefuses          an object store does not do what it is asked for
    │   ├── UploadDamaged         what arrives in an object store is not what was sent
    │   ├── ShardInUse            another run is writing the same shard
    │   ├── PlanMissing           `finish` in a folder without a plan
    │   ├── ShardsMissing         `finish` before all shards are there
    │   ├── RunStopped            the run was asked to stop
    │   ├── TooManyFailures       `--on-error fail` or `--max-failures` stopped the run
    │   ├── WorkersDoNotStart     worker processes end before they do anything
    │   ├── PatchesMissing        an item's patches do not fill its place
    │   ├── FileReplaced          somebody put another file in the place of one being written
    │   ├── NoMoreFiles           the process may open no more files
    │   ├── LibraryRefuses        a library that Pillow decodes with cannot be used
    │   └── CannotPrint           standard output takes no more text
    ├── Interrupted               Ctrl-C (exit 130) or SIGTERM (exit 143) stopped the command
    ├── StoreError                stored features cannot be read: a shard is gone, damaged or of another run (exit 3)
    │   ├── SpanDiffers           the index gives an item another place than its shard does
    │   └── ChecksumDiffers       the stored bytes of an item are not those that were written
    └── ItemError                 one item failed; recorded in the index, the run goes on
        └── FailedItem            a caller asked for the features of an item that failed

A class writes its own sentence; the command line only prints it.
"""

from __future__ import annotations

import re
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


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """Problems that differ in their values only."""

    what: str
    """What is wrong, with … where the problems differ."""
    places: int
    """In how many places: a row counts once."""
    examples: tuple[Problem, ...]
    """The first ones."""


#: The parts of a problem in which others of its kind differ: quoted texts, numbers, lists and objects.
_VALUES = re.compile(r'"(?:[^"\\]|\\.)*"|\{.*\}|\[.*\]|(?<![\w-])-?\d[\w,.]*…?')


def kinds_of(problems: Iterable[Problem], examples: int) -> tuple[ProblemKind, ...]:
    """Return the problems by kind, the most frequent first, each with its first `examples`."""
    kinds: dict[str, list[Problem]] = {}
    for problem in problems:
        kinds.setdefault(_VALUES.sub("…", problem.what), []).append(problem)
    found = [
        ProblemKind(what, len({problem.where for problem in same}), tuple(same[:examples]))
        for what, same in kinds.items()
    ]
    return tuple(sorted(found, key=lambda kind: -kind.places))


class PrepError(Exception):
    """Base of all errors this package raises on purpose."""

    exit_code = 3


class InputError(PrepError):
    """The manifest, the config or an option is wrong. Carries every problem found, not only the first.

    `total` counts all problems, also those beyond the first ones that `problems` keeps.
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


_CONTINUE = "What is committed stays valid: run the same command to continue."


class DiskRefuses(RunError):
    """A file cannot be written."""

    def __init__(self, path: str, reason: str, needed: int | None, free: int | None) -> None:
        """needed: bytes that were to be written, None where unknown. free: None where its folder cannot be asked."""
        super().__init__(path, reason, needed, free)
        self.path, self.reason, self.needed, self.free = path, reason, needed, free

    def __str__(self) -> str:
        text = f"cannot write {self.path}: {self.reason}"
        if self.needed is not None:
            text += f"; {self.needed:,} bytes needed"
        free = "and its folder cannot be read" if self.free is None else f"{self.free:,} bytes free"
        return f"{text}, {free}. {_CONTINUE}"


class FolderRemoved(RunError):
    """Somebody removed the output folder, or a part of it, under a run."""

    def __init__(self, path: str) -> None:
        """path: what is gone."""
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return (
            f"the output folder was removed while the run was writing into it: {self.path} is gone. "
            "The same command fills it again."
        )


class StoreRefuses(RunError):
    """An object store does not do what it is asked for: write, read, list, compare or remove."""

    def __init__(self, verb: str, url: str, reason: str) -> None:
        super().__init__(verb, url, reason)
        self.verb, self.url, self.reason = verb, url, reason

    def __str__(self) -> str:
        return f"cannot {self.verb} {self.url}: {self.reason}. {_CONTINUE}"


class UploadDamaged(RunError):
    """What arrives in an object store is not what was sent."""

    def __init__(self, url: str, attempts: int) -> None:
        super().__init__(url, attempts)
        self.url, self.attempts = url, attempts

    def __str__(self) -> str:
        return f"{self.url} is not what was sent, {self.attempts} times. {_CONTINUE}"


class ShardInUse(RunError):
    """Another run is writing the same shard."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"another run is writing {self.path}: wait until it has ended, or choose another --output"


class PlanMissing(RunError):
    """`finish` was called for a folder without a plan."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.folder = folder

    def __str__(self) -> str:
        return f"{self.folder} has no plan yet: run `kimik3-prep encode --shard-range` first"


class ShardsMissing(RunError):
    """`finish` was called before all shards are there."""

    def __init__(self, missing: tuple[str, ...], planned: int) -> None:
        super().__init__(missing, planned)
        self.missing, self.planned = missing, planned

    def __str__(self) -> str:
        named = ", ".join(self.missing[:10])
        more = f" and {len(self.missing) - 10:,} more" if len(self.missing) > 10 else ""
        return (
            f"{len(self.missing):,} of {self.planned:,} shards are not there yet: {named}{more}. Run their ranges "
            "again, or `kimik3-prep encode` without a range, which fills all that are missing."
        )


class RunStopped(RunError):
    """The run was asked to stop before it was done."""

    def __str__(self) -> str:
        return f"the run was asked to stop. {_CONTINUE}"


class TooManyFailures(RunError):
    """More items failed than the run allows."""

    def __init__(self, failed: int, most: int, first: ItemError | None = None) -> None:
        """most: how many may fail. first: an error among those that stopped the run; None: they failed before."""
        super().__init__(failed, most, first)
        self.failed, self.most, self.first = failed, most, first

    def __str__(self) -> str:
        items = "1 failed item" if self.failed == 1 else f"{self.failed:,} failed items"
        example = f" ({self.first})" if self.first else ""
        allowed = f"--max-failures {self.most} allows no more"
        if not self.most:
            allowed = "--on-error fail, or --max-failures 0, allows none"
        return (
            f"stopped at {items}{example}: {allowed}. What is committed stays valid. Mend the items, or run the same "
            "command without these options to record failures and go on."
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
    """A library that Pillow decodes with is installed and cannot be used. Facts: the module, the reason."""

    def __str__(self) -> str:
        module, reason = self.args
        return f"{module} cannot be used, and without it images may decode differently: {reason}"


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


class SpanDiffers(StoreError):
    """The index gives an item another place, count or grid than its shard does, or than the item's own patches."""

    def __init__(self, item: str, path: str) -> None:
        super().__init__(item, path)
        self.item, self.path = item, path

    def __str__(self) -> str:
        return f"{self.item}: {self.path} does not hold what the index says of it"


class ChecksumDiffers(StoreError):
    """The stored bytes of an item are not those that were written."""

    def __init__(self, item: str, path: str) -> None:
        super().__init__(item, path)
        self.item, self.path = item, path

    def __str__(self) -> str:
        return f"{self.item}: its bytes in {self.path} are not those that were written; `kimik3-prep verify` says more"


class FailedItem(ItemError):
    """A caller asked for the features of an item that failed. `id` and `line` say which item of the manifest."""

    def __init__(self, code: ItemErrorCode, message: str, id: str, line: int) -> None:
        super().__init__(code, message)
        self.id = id
        self.line = line

    def __str__(self) -> str:
        return f"line {self.line}, {self.id} has no features: {self.code}: {self.message}"

    def __reduce__(self) -> tuple[type[FailedItem], tuple[ItemErrorCode, str, str, int]]:  # type: ignore[override]
        return type(self), (self.code, self.message, self.id, self.line)
