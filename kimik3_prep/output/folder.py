"""The output folder: where its files are, what they say of the run, and every change that a run makes to it.

    OUT/run.json                        recipe and versions; written first, and again with the seal of the plan
    OUT/plan.parquet                    the plan, so that a resumed run reads no header again
    OUT/shards/cpu-00000.safetensors    pixel_values [L, 3, p, p] and grid_thws int64 [n, 3]
    OUT/shards/cpu-00000.parquet        that shard's index; its presence commits the shard
    OUT/index.parquet                   all rows in manifest order; written last

A file gets its name only when it is whole and on the disk. A shard's index follows its shard, so a kill at any moment
costs shards that are not committed, and nothing else. Only files that this package wrote are ever removed, what vouches
for others before these, and the run record last: a kill between two removals leaves a run to resume, never a lie.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from kimik3_prep import strict_json
from kimik3_prep.disk import (
    LOCK_NAME,
    LOCKS,
    disk_errors,
    hold,
    locks,
    only_range,
    only_run,
    regular,
    remove_unheld,
    sync,
    write_whole,
)
from kimik3_prep.errors import DiskRefuses, FolderRemoved, InputError, PlanMismatch, PrepError, Problem
from kimik3_prep.output import tables
from kimik3_prep.output.recipe import FORMAT, Recipe, differences, fingerprint
from kimik3_prep.remote import scheme

_PIECE = 8 << 20  # bytes of a file that are read at a time

#: Files of ours in `shards`. No other name becomes a path there, and no other file is ever removed.
OURS = re.compile(r"(cpu|gpu|local)-\d{5,}\.(safetensors|parquet)(\.tmp)?", re.ASCII)

#: Files of ours beside it, in the order of their removal.
OURS_IN_ROOT = ("index.parquet", "plan.parquet", "run.json")

#: In a folder that stages an output for an object store: the URL of that output.
STAGED_NAME = ".staged"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What `run.json` says of a run."""

    recipe: Recipe

    versions: Mapping[str, str]
    """Of the packages that made the files."""

    base: str | None = None
    """Index-only runs: the way from the output folder to the folder that image paths start from, or its URL."""

    plan: str | None = None
    """xxh3-128 of plan.parquet, 32 hex digits: the seal of the plan. None until the plan is there."""

    def document(self) -> dict[str, Any]:
        """Return the record as JSON values, sealed: a digest of everything else in it shows a damaged letter."""
        document = {
            "format": self.recipe.format,
            "fingerprint": self.recipe.fingerprint,
            "facts": self.recipe.facts(),
            "versions": dict(self.versions),
            **({} if self.base is None else {"base": self.base}),
            **({} if self.plan is None else {"plan": self.plan}),
        }
        return {**document, "seal": fingerprint(document)}


@dataclass(frozen=True, slots=True)
class Output:
    """An output in a folder. `mirror.MirroredOutput` has the same verbs for an output at a URL.

    Paths and questions are for everybody. What changes files is for the process that holds the folder, by `alone` or
    `planning_range`, and for the workers that fill its shards.
    """

    root: Path

    # --- where its files are ---

    @property
    def name(self) -> str:
        """Where the output is, for people."""
        return str(self.root)

    @property
    def is_mirrored(self) -> bool:
        """Whether shards leave this disk once they are committed."""
        return False

    @property
    def run(self) -> Path:
        """The run record."""
        return self.root / "run.json"

    @property
    def plan(self) -> Path:
        """The plan."""
        return self.root / "plan.parquet"

    @property
    def index(self) -> Path:
        """The final index; its presence says that the run is finished."""
        return self.root / "index.parquet"

    @property
    def shards(self) -> Path:
        """The folder of shards and their indexes."""
        return self.root / "shards"

    def shard(self, name: str) -> Path:
        """Return a shard's safetensors file. Raises InputError for a name that no shard has."""
        return self._in_shards(f"{name}.safetensors")

    def shard_index(self, name: str) -> Path:
        """Return a shard's index; its presence commits the shard. Raises InputError for a name that no shard has."""
        return self._in_shards(f"{name}.parquet")

    def _in_shards(self, name: str) -> Path:
        """Return the path of a name that may come from a file: anything but a shard's leads out of the folder."""
        if not OURS.fullmatch(name):
            what = f"names the shard {name.rpartition('.')[0]!r}"
            raise InputError([Problem(self.name, what, "a name like cpu-00000", "a file in it was changed")])
        return self.shards / name

    def place_of(self, path: Path) -> str:
        """Return where a file of the output is, for people."""
        return str(path)

    def index_stamp(self) -> object:
        """Return what changes when the final index is replaced; None where there is none."""
        try:
            status = self.index.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def absolute(self) -> Output:
        """Return the same output for a process that stands in another folder."""
        return replace(self, root=self.root.absolute())

    # --- what they say ---

    def record(self) -> RunRecord | None:
        """Return the run record, or None where there is none. Raises InputError for one that is not ours."""
        return read_record(self.run)

    @property
    def finished(self) -> bool:
        """Whether the final index is there."""
        return self.index.is_file()

    def committed(self, name: str) -> bool:
        """Return whether a shard and its index are there."""
        return self.shard_index(name).is_file() and self.shard(name).is_file()

    def files(self) -> list[str]:
        """Return the names of all files of ours, from the root on, with unfinished ones and locks."""
        names = [path.name for path in locks(self.root)]
        names += [f"{name}{end}" for name in OURS_IN_ROOT for end in ("", ".tmp")]
        names += sorted(f"shards/{path.name}" for path in self.shards.glob("*") if OURS.fullmatch(path.name))
        return [name for name in names if (self.root / name).exists()]

    def committed_shards(self) -> list[str]:
        """Return the names of all committed shards."""
        return committed_among(self.files())

    def shard_sizes(self) -> dict[str, int]:
        """Return the bytes of each committed shard, by its name."""
        return {name: self.shard(name).stat().st_size for name in self.committed_shards()}

    def read_plan(self) -> Iterator[pa.Table]:
        """Yield the plan, a piece at a time. Raises InputError for a file that is no plan, or not the sealed one."""
        record = self.record()
        if record is not None and record.plan is not None and self.plan.is_file() and _digest(self.plan) != record.plan:
            what = f"was changed or damaged: it is not the plan that {self.run.name} seals"
            hint = "move it out of the folder and run the same encode command again: it goes on if it can plan the same"
            raise InputError([Problem(str(self.plan), what, hint=hint)])
        yield from tables.read_plan(self.plan)

    def read_index(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the final index, whole or some columns of it. Raises InputError for a file that is no index."""
        return tables.read_index(self.index, columns)

    def read_shard_index(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return a shard's index, whole or some columns of it. Raises InputError for a file that is no index."""
        return tables.read_index(self.shard_index(name), columns)

    def image_base(self, record: RunRecord) -> str | None:
        """Return the folder that image paths start from, or its URL; None where the run record does not say."""
        if record.base is None or scheme(record.base):
            return record.base
        return os.path.normpath(os.path.join(os.path.realpath(self.root), record.base))

    # --- the life of a run ---

    def is_done(self, recipe: Recipe) -> bool:
        """Return whether a run with this recipe is finished here and nobody is at work. Writes nothing.

        Raises InputError where something else lies in the folder, PlanMismatch where a run with another recipe does.
        """
        record = self._checked_record()
        if record is None or not self.finished or not self.plan.is_file() or locks(self.root):
            return False
        self._compare(record.recipe, recipe)
        return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make the folder and hold it for one run. Raises InputError where another run, or part of one, is at work."""
        self._make()
        with _unless_removed(self.root), only_run(self.root):
            yield

    @contextmanager
    def planning_range(self, count: int, waiting: Callable[[str], object]) -> Iterator[None]:
        """Make the folder and hold it while one of `count` ranges plans, once the ranges before it have planned.

        waiting: called with the name of a process that this one waits for. Raises InputError where another run, or a
        range of another count, is at work.
        """
        self._make()
        with _unless_removed(self.root), only_range(self.root, count, waiting):
            yield

    @contextmanager
    def holding_range(self, number: int, count: int) -> Iterator[None]:
        """Hold one range's share of the shards. Raises InputError where another process fills it."""
        with hold(self.root / f"{LOCK_NAME}-{number}-of-{count}", must=True):
            yield

    @contextmanager
    def holding_shard(self, name: str, patience: float) -> Iterator[None]:
        """Hold one shard for a worker; wait so many seconds for another one to end. Raises InputError."""
        with hold(self.root / f"{LOCK_NAME}-{name}", patience):
            yield

    def begin(
        self,
        recipe: Recipe,
        versions: Mapping[str, str],
        *,
        overwrite: bool = False,
        retry: bool = False,
        base: str | None = None,
        others_fill: bool = False,
    ) -> None:
        """Make the folder ready for a run: a new one, an earlier one with the same recipe, or one that is overwritten.

        retry: the failed items of the run are to be tried again. base: the folder that image paths start from, or its
        URL, for readers that need the images. others_fill: other ranges are filling their shards, so their unfinished
        files stay.

        Raises InputError where something else lies in the folder, PlanMismatch that names each differing fact.
        """
        record = self._checked_record()
        if record is not None and overwrite:
            self.clear()
            record = None
        way = None if base is None else self._way(base)
        if record is None:
            self._write_record(RunRecord(recipe, versions, way))
        else:
            self._compare(record.recipe, recipe)
            if way is not None and way != record.base:
                self._write_record(replace(record, base=way))
        self.sweep(others_fill)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Make `shards/` for a run that fills it. Raises FolderRemoved at the end if the folder is not whole any more.

        Nothing makes a folder again that somebody removed meanwhile: a new run would take it for a stranger's.
        """
        record = self._record_at_work()
        with disk_errors(self.shards):
            self.shards.mkdir(exist_ok=True)
        try:
            with _unless_removed(self.root, self.run, self.shards):
                yield
        except FolderRemoved:
            self._clear_remains(record)
            raise

    def write_plan(self, table: pa.Table) -> None:
        """Write the plan, a table of `PLAN_SCHEMA`, in place of any other, and seal it. Raises RunError.

        A sealed plan that is gone comes back as it was: raises InputError where this table is another one.
        """
        record = self._record_at_work()
        sealed = None if self.plan.is_file() else record.plan

        def write(file: BinaryIO) -> None:
            tables.write_plan(table, file)
            file.flush()
            if sealed is not None and _digest(Path(file.name)) != sealed:
                what = "is gone, and another plan comes of the images today: some were changed, moved or removed"
                hint = "restore it or the images, or choose another --output; the stored features stay as they are"
                raise InputError([Problem(str(self.plan), what, hint=hint)])

        if record.plan is not None and sealed is None:
            # A kill before the new plan has its seal leaves a plan without one, and never one with a wrong one.
            self._write_record(replace(record, plan=None))
        self._place(self.plan, write)
        self.seal_plan()

    def seal_plan(self) -> None:
        """Put the plan's digest into the run record, where a kill has kept it out."""
        record = self._record_at_work()
        if record.plan is None:
            self._write_record(replace(record, plan=_digest(self.plan)))

    def commit(self, name: str, index: pa.Table, recipe: Recipe) -> None:
        """Commit a shard whose file is complete: write its index, a table of `INDEX_SCHEMA`. Raises RunError."""
        metadata = recipe.metadata(name.rpartition("-")[0], name)
        write_whole(self.shard_index(name), lambda file: tables.write_index(index, metadata, file))

    def take_back(self, names: Sequence[str]) -> None:
        """Take back the final index and the commits of these shards, so that the run fills them again."""
        with disk_errors(self.root):
            self.index.unlink(missing_ok=True)
            for name in names:  # a shard without its index is not committed; an index without its shard would be a lie
                self.shard_index(name).unlink(missing_ok=True)
            if names and self.shards.is_dir():
                sync(self.shards)
            for name in names:
                self.shard(name).unlink(missing_ok=True)
            sync(self.root)

    def finish(self, names: Iterable[str], others: Sequence[pa.Table], recipe: Recipe) -> None:
        """Write the final index: the rows of these shards' indexes, and the others. Raises RunError."""
        indexes = [self.shard_index(name) for name in names]
        metadata = recipe.metadata()
        self._place(self.index, lambda file: tables.merge_indexes(indexes, others, metadata, file))

    def leave(self) -> None:
        """Clear up after a finished run: nothing is left over in a folder."""

    # --- clearing up ---

    def clear(self) -> None:
        """Remove every file of ours; the run record goes last."""
        with disk_errors(self.root):
            self.index.unlink(missing_ok=True)
            if self.shards.is_dir():
                # Indexes first: a shard without its index is not committed, an index without its shard would be a lie.
                for path in sorted(self.shards.iterdir(), key=lambda path: path.suffix != ".parquet"):
                    if OURS.fullmatch(path.name):
                        path.unlink()
                sync(self.shards)  # else a loss of power could bring old shards back under a new run record
                if not any(self.shards.iterdir()) and not self.shards.is_symlink():
                    self.shards.rmdir()
            for name in OURS_IN_ROOT:
                (self.root / f"{name}.tmp").unlink(missing_ok=True)
                (self.root / name).unlink(missing_ok=True)

    def sweep(self, others_fill: bool = False) -> None:
        """Remove the unfinished files of a run that was killed; what a living process writes stays.

        others_fill: leave all unfinished shards alone.
        """
        with disk_errors(self.root):
            for name in OURS_IN_ROOT:
                (self.root / f"{name}.tmp").unlink(missing_ok=True)
            for path in () if others_fill or not self.shards.is_dir() else self.shards.glob("*.tmp"):
                if OURS.fullmatch(path.name):
                    with suppress(BlockingIOError):
                        remove_unheld(path)

    def clear_shard(self, name: str, patience: float) -> None:
        """Remove the unfinished files of a worker that was ended; wait so many seconds for its end."""
        if not (self.root / f"{LOCK_NAME}-{name}").exists():
            return
        try:
            with self.holding_shard(name, patience), disk_errors(self.root):
                for path in (self.shard(name), self.shard_index(name)):
                    path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        except InputError:
            return  # the worker lives: the next run waits for it

    def _clear_remains(self, record: RunRecord) -> None:
        """Leave no files without a run record: whoever removed the folder may have missed what was written then."""
        with suppress(OSError):
            self.shards.rmdir()
        with suppress(DiskRefuses):  # it is just being removed
            if not self.run.exists() and self._foreign_names():
                self._write_record(record)

    # --- the run record ---

    def _checked_record(self) -> RunRecord | None:
        """Return the record, or None for a new folder. Raises InputError where something of somebody else lies."""
        for folder in (self.root, *self.root.parents):
            if folder.exists() and not folder.is_dir():
                raise InputError(
                    [Problem(str(folder), "is a file", "a folder for the output", "choose another --output")]
                )
        record = self.record()
        if record is None and (foreign := self._foreign_names()):
            what = f"holds {foreign[0]!r} and no run.json, so it is not a folder that kimik3-prep filled"
            if self.run.is_symlink():
                what = f"its run.json is a link to {os.readlink(self.run)}, where there is no file"
            raise InputError([Problem(str(self.root), what, "a new or empty folder", "choose another --output")])
        return record

    def _record_at_work(self) -> RunRecord:
        """Return the record of the run that is at work. Raises FolderRemoved where somebody has removed it."""
        record = self.record()
        if record is None:
            raise FolderRemoved(str(self.run))
        return record

    def _foreign_names(self) -> list[str]:
        """Return the names in a folder without a run record, except those that a run killed at its start leaves."""
        if not self.root.is_dir():
            return []
        names = {entry.name for entry in self.root.iterdir()} - {f"{self.run.name}.tmp", STAGED_NAME}
        return sorted(name for name in names if not LOCKS.fullmatch(name))

    def _compare(self, started_with: Recipe, recipe: Recipe) -> None:
        """Raise PlanMismatch that names each differing fact."""
        hint = "use the same settings, another --output, or --overwrite to start anew"
        changed = [
            Problem(
                f"{self.name}/{self.run.name}: {fact}",
                f"this run was started with {old!r}, now it is {new!r}",
                hint=hint,
            )
            for fact, old, new in differences(started_with.facts(), recipe.facts())
        ]
        if changed:
            raise PlanMismatch(changed)

    def _make(self) -> None:
        """Make the folder, which happens once in a run."""
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def _write_record(self, record: RunRecord) -> None:
        text = json.dumps(record.document(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        self._place(self.run, lambda file: file.write(text.encode()))

    def _place(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Write a file of the folder so that it is whole where it belongs."""
        write_whole(path, write)

    def _way(self, base: str) -> str:
        """Return the way from the folder to the images, so that both can move together; a URL as it is."""
        return base if scheme(base) else os.path.relpath(os.path.realpath(base), os.path.realpath(self.root))


@contextmanager
def _unless_removed(*paths: Path) -> Iterator[None]:
    """Raise FolderRemoved where one of these paths is gone at the end, whatever else has gone wrong by then."""
    reason: Exception | None = None
    try:
        yield
    except (OSError, PrepError) as error:
        reason = error
    for path in paths:
        if not path.exists():
            raise FolderRemoved(str(path)) from reason
    if reason is not None:
        raise reason


def _digest(path: Path) -> str:
    """Return the xxh3-128 of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def read_record(path: Path) -> RunRecord | None:
    """Return the run record in a file, or None where there is none. Raises InputError for one that is not ours."""
    where, expected, hint = str(path), "the run.json that `kimik3-prep encode` wrote", "choose another --output"
    try:
        document = strict_json.parse(regular(path).read_bytes(), where)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError([Problem(where, f"cannot be read: {error.strerror or error}")]) from error
    except strict_json.JsonProblem as error:
        what = f"not a run record: {error.problem.what}"
        raise InputError([Problem(error.problem.where, what, expected, hint)]) from None
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is int and version != FORMAT:
        other = "use the version of kimik3-prep that wrote it, or another --output"
        raise InputError([Problem(where, f"format {version}", f"format {FORMAT}", other)])
    if version is None or not all(isinstance(document.get(key), dict) for key in ("facts", "versions")):
        raise InputError([Problem(where, "not a run record of kimik3-prep", expected, hint)])
    if document.get("fingerprint") != fingerprint(document["facts"]):
        what = "was changed by hand: the settings are not those of its fingerprint"
        raise InputError([Problem(where, what, expected, hint)])
    try:
        recipe = Recipe.from_facts(document["facts"], f"{where}: facts")
    except InputError as error:
        raise InputError([replace(problem, hint=hint) for problem in error.problems]) from None
    texts = {f"versions.{name}": value for name, value in document["versions"].items()}
    texts |= {name: document[name] for name in ("base", "plan", "seal") if name in document}
    if odd := [name for name, value in texts.items() if type(value) is not str]:
        raise InputError([Problem(f"{where}: {odd[0]}", "is no text", "a text", hint)])
    record = RunRecord(recipe, document["versions"], document.get("base"), document.get("plan"))
    sealed = record.document()
    if ("seal" in document and document != sealed) or document.keys() - sealed.keys():
        raise InputError([Problem(where, "was changed by hand or damaged: its seal does not fit", expected, hint)])
    return record


def is_ours(name: str) -> bool:
    """Whether a file has a name of ours, from the root on."""
    folder, _, file = name.rpartition("/")
    return bool(folder == "shards" and OURS.fullmatch(file)) or name in OURS_IN_ROOT


def committed_among(names: Iterable[str]) -> list[str]:
    """Return the shards that are there with their indexes, of names from the root on."""
    there = set(filter(is_ours, names))
    shards = sorted(Path(name).stem for name in there if name.startswith("shards/") and name.endswith(".parquet"))
    return [name for name in shards if f"shards/{name}.safetensors" in there]
