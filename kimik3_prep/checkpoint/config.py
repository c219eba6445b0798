"""The `preprocessor_config.json` of a Kimi-K3 checkpoint: what it means, and everything that is wrong with it.

The keys are those of `media_proc_cfg` in the published file; which are required, and what an absent one reads as, is
the checkpoint's own loader's and SGLang's deferred path's rule. Nothing falls back to a default without being said.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from kimik3_prep import remote, strict_json
from kimik3_prep.checkpoint import rules
from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.errors import InputError, Problem

#: The name that stands for the published config wherever a path to one is asked for.
PUBLISHED = "kimi-k3"

FILE_NAME = "preprocessor_config.json"

#: Where a checkpoint keeps its settings; transformers 5 writes the second, with the settings one level down.
FILE_NAMES = (FILE_NAME, "processor_config.json")

#: Where a config is; a string only for a URL, which no Path can hold.
Place = Path | str

_MOST_BYTES = 1 << 20  # a real one has about one thousand
_NEEDED = "Kimi-K3 encoder preprocessing needs an image processor"


@dataclass(frozen=True, slots=True)
class Background:
    """What transparent pixels show."""

    pattern: Literal["white", "black", "gray", "chessboard"]
    """One gray level, or a chessboard of two."""
    square_size: int
    """Side of a chessboard's square in pixels."""
    square_on_top_left: bool
    """The square at the top left is a white one."""
    white_value: int
    """Level of the white squares, 0 to 255."""
    gray_value: int
    """Level of the gray squares, 0 to 255."""


@dataclass(frozen=True, slots=True)
class PreprocessorConfig:
    """The values of a preprocessor config that decide features."""

    patch_size: int
    """Side of a patch in pixels."""
    merge_size: int
    """Side of a token in patches."""
    in_patch_limit: int
    """A larger image is scaled down to about so many patches."""
    patch_limit_on_one_side: int
    """No side of an image has more patches."""
    image_mean: tuple[float, float, float]
    """What normalisation takes from a value between 0 and 1, by channel."""
    image_std: tuple[float, float, float]
    """What normalisation then divides by, by channel."""
    fixed_output_tokens: int | None
    """Every image counts so many tokens; null: as its grid says."""
    background: Background | None
    """What shows through transparent pixels; null drops the alpha channel."""
    fill_stage: Literal["before_resize", "after_resize"]
    """When the background is filled in."""

    def grid_rule(self) -> GridRule:
        """The part that decides grids."""
        return GridRule(
            self.patch_size,
            self.merge_size,
            self.in_patch_limit,
            self.patch_limit_on_one_side,
            self.fixed_output_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; equal dicts mean equal features."""
        return {**asdict(self), "image_mean": list(self.image_mean), "image_std": list(self.image_std)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PreprocessorConfig:
        """The config that `to_dict` described."""
        background = values["background"]
        changed = {
            "image_mean": tuple(values["image_mean"]),
            "image_std": tuple(values["image_std"]),
            "background": None if background is None else Background(**background),
        }
        return cls(**{**values, **changed})


Source = Literal["file", "default", "missing"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a config as it is read."""

    key: str
    """Its name; `transparent_bg_config.` comes before the keys inside that one."""
    value: Any
    """What it reads as."""
    published: Any
    """What the published config says."""
    source: Source
    """Where the value comes from. missing: the key is required and absent; default: it is absent, and may be."""


@dataclass(frozen=True, slots=True)
class Mended:
    """What the copy has that the file has not; nothing, where no copy was written."""

    restored: tuple[str, ...] = ()
    """Keys that were missing."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Right names of keys, by the names under which they stood."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All there is to say about a config file. `config` is None when a problem is an error."""

    path: Place
    config: PreprocessorConfig | None
    problems: tuple[Problem, ...]
    settings: tuple[Setting, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems that make the config unusable."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems one should know of."""
        return tuple(problem for problem in self.problems if problem.severity == "warning")

    @property
    def differing(self) -> tuple[str, ...]:
        """The settings that are not as published."""
        return tuple(setting.key for setting in self.settings if not strict_json.same(setting.value, setting.published))

    def strictly(self) -> Diagnosis:
        """Return the same diagnosis, with an error for each setting that is not as published."""
        settings = {setting.key: setting for setting in self.settings}
        found = [
            Problem(
                f"{self.path}: {key}",
                f"it is {strict_json.show(settings[key].value)}, and --strict asks for the published settings",
                strict_json.show(settings[key].published),
            )
            for key in self.differing
        ]
        return replace(self, config=None, problems=(*self.problems, *found)) if found else self

    def report(self, mended: Mended | None = None) -> ConfigReport:
        """Return the document that `validate-config` prints. mended: what `--write-fixed` did."""
        return ConfigReport(
            path=str(self.path),
            valid=self.config is not None,
            settings=self.settings,
            problems=self.problems,
            differing=self.differing,
            restored=None if mended is None else mended.restored,
            renamed=None if mended is None else mended.renamed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReport:
    """What a config means and what is wrong with it."""

    path: str
    """The file."""
    valid: bool
    """No problem is an error."""
    settings: tuple[Setting, ...]
    """Every key that the checkpoint's processor reads."""
    problems: tuple[Problem, ...]
    """All errors and warnings."""
    differing: tuple[str, ...]
    """The settings that are not as published."""
    restored: tuple[str, ...] | None
    """The keys that `--write-fixed` added to its copy; null without that option."""
    renamed: Mapping[str, str] | None
    """Right names of keys that `--write-fixed` renamed, by the names they had; null without that option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReports:
    """What several configs mean and what is wrong with them."""

    valid: bool
    """No problem of any file is an error."""
    configs: tuple[ConfigReport, ...]
    """One for each file, in order."""


# --- finding ------------------------------------------------------------------------------------------------------


def published_path() -> Path:
    """The published config shipped with the package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parent.parent
    for root in (package, package.parent):
        path = root / "configs" / PUBLISHED / FILE_NAME
        if path.is_file():
            return path
    raise InputError([Problem(PUBLISHED, "the published config is missing from this installation", hint="reinstall")])


@cache
def published_values() -> Mapping[str, Any]:
    """The `media_proc_cfg` of the published config."""
    return cast("Mapping[str, Any]", json.loads(published_path().read_text(encoding="utf-8"))["media_proc_cfg"])


def find_config(argument: str | None, beside: Place | None = None) -> Place:
    """The file that `--config` names: a file, a checkpoint folder, a URL of either, or `kimi-k3` for the published one.

    Without an argument: a file of one of the `FILE_NAMES` in the folder `beside`, then in the working directory.
    Raises InputError that lists the places looked at.
    """
    if argument == PUBLISHED:
        return published_path()
    if argument == "":
        raise InputError([Problem("--config", "it is empty", "a path", "is a shell variable unset?")])
    places: list[Place]
    if argument is not None and remote.scheme(argument):
        is_file = argument.partition("?")[0].endswith(".json")
        places = [argument] if is_file else _in(argument.rstrip("/"))
    elif argument is not None:
        places = _in(Path(argument)) if os.path.isdir(argument) else [Path(argument)]
    else:
        folders = [folder for folder in (beside, Path()) if folder is not None]
        places = list(dict.fromkeys(place for folder in folders for place in _in(folder)))
    for place in places:
        if _is_there(place):
            return place
    looked = ", ".join(str(place) for place in places)
    hint = f"--config takes a {FILE_NAME}, a checkpoint folder, or {PUBLISHED} for the published values"
    raise InputError([Problem(argument or FILE_NAME, f"{_NEEDED}, and there is none; looked at {looked}", hint=hint)])


def _in(folder: Place) -> list[Place]:
    return [folder / name if isinstance(folder, Path) else f"{folder}/{name}" for name in FILE_NAMES]


def _is_there(place: Place) -> bool:
    """Whether there is anything by that name, a dangling link too: passing over it would pick another config silently.

    Raises InputError where nobody can tell.
    """
    try:
        if isinstance(place, str):
            return remote.exists(place)
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except remote.RemoteError as error:
        raise InputError([_unreachable(place, error)]) from error
    except (OSError, ValueError) as error:
        raise InputError([Problem(str(place), f"cannot be looked at: {_reason(error)}", f"a {FILE_NAME}")]) from error
    return True


def _unreachable(place: Place, error: OSError) -> Problem:
    hint = "check the address and the network; the file may well be there"
    return Problem(str(place), f"its server cannot be reached: {_reason(error)}", hint=hint)


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


# --- reading ------------------------------------------------------------------------------------------------------


def load_config(path: Place) -> tuple[PreprocessorConfig, list[Problem]]:
    """The config and its warnings. Raises InputError with every error in the file."""
    diagnosis = diagnose(path)
    if diagnosis.config is None:
        raise InputError(diagnosis.errors)
    return diagnosis.config, list(diagnosis.warnings)


def diagnose_all(arguments: Sequence[str | None], strict: bool = False) -> list[Diagnosis]:
    """Diagnose every config that `validate-config` is asked about. One that is not found is a problem of its own.

    strict: a setting that is not as published is an error.
    """
    diagnoses = []
    for argument in arguments:
        try:
            diagnosis = diagnose(find_config(argument))
        except InputError as error:
            if len(arguments) == 1:
                raise
            diagnosis = Diagnosis(str(argument), None, error.problems, ())
        diagnoses.append(diagnosis.strictly() if strict else diagnosis)
    return diagnoses


def report_all(diagnoses: Sequence[Diagnosis], mended: Mended | None = None) -> ConfigReport | ConfigReports:
    """Return the document for one config, or for several."""
    if len(diagnoses) == 1:
        return diagnoses[0].report(mended)
    reports = tuple(diagnosis.report() for diagnosis in diagnoses)
    return ConfigReports(valid=all(report.valid for report in reports), configs=reports)


def diagnose(path: Place) -> Diagnosis:
    """Read a config and say everything about it. Never raises for what is in the file."""
    try:
        content = read_config(path)
        document = strict_json.parse(content, str(path))
    except strict_json.JsonProblem as error:
        return Diagnosis(path, None, (error.problem,), ())
    except InputError as error:
        return Diagnosis(path, None, error.problems, ())
    checker = rules.Checker(str(path), published_values())
    values = checker.check(document)
    cfg = rules.inner(document)
    if values is None or cfg is None:
        return Diagnosis(path, None, tuple(checker.problems), ())
    wrong = any(problem.severity == "error" for problem in checker.problems)
    config = None if wrong else PreprocessorConfig.from_dict(values)
    return Diagnosis(path, config, tuple(checker.problems), tuple(_settings(cfg, values)))


def _settings(cfg: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Setting]:
    """Every key the checkpoint's processor reads, as it is read; one with a wrong value as it stands in the file."""
    published, background = published_values(), "transparent_bg_config"
    read = {**dict.fromkeys(rules.RESTORED), "transparent_bg_fill_stage": values["fill_stage"], **cfg}
    if values["merge_size"] is not None:
        read["merge_kernel_size"] = values["merge_size"]
    for key in rules.RESTORED:
        if key == background and isinstance(read[key], dict):
            for name, default in rules.BACKGROUND_DEFAULTS.items():
                source: Source = "file" if name in cfg[key] else "default"
                yield Setting(f"{key}.{name}", cfg[key].get(name, default), published[key][name], source)
        else:
            absent: Source = "missing" if key in rules.REQUIRED else "default"
            yield Setting(key, read[key], published[key], "file" if key in cfg else absent)


def read_config(path: Place) -> bytes:
    """The bytes of a regular file, or an object, of sensible size. Raises InputError."""

    def refuse(what: str) -> InputError:
        return InputError([Problem(str(path), what, f"a {FILE_NAME}")])

    try:
        if isinstance(path, str):
            with remote.opened(path) as part:
                content = part.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise refuse(f"more than {_MOST_BYTES:,} bytes long")
            return content
        # O_NONBLOCK: a named pipe must not hang us.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refuse("not a regular file")
            content = file.read(_MOST_BYTES + 1)
            if len(content) > _MOST_BYTES:
                raise refuse(f"more than {_MOST_BYTES:,} bytes long")
            return content
    except remote.RemoteError as error:
        raise InputError([_unreachable(path, error)]) from error
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read: {_reason(error)}") from error
