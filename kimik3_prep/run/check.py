"""Everything that can be wrong before any work: settings, config, manifest and device, all problems together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

import pyarrow.compute as pc

from kimik3_prep.checkpoint.config import Place, PreprocessorConfig, find_config, load_config
from kimik3_prep.errors import INSTALL_RAY, InputError, Problem
from kimik3_prep.images.address import is_data_url, resolve, split
from kimik3_prep.images.decode import DEFAULT_MAX_PIXELS, codec_versions
from kimik3_prep.images.formats import missing
from kimik3_prep.manifest.items import ITEM_SCHEMA
from kimik3_prep.manifest.missing import missing_files
from kimik3_prep.manifest.read import Manifest, base_of, is_pattern, read_manifest
from kimik3_prep.manifest.report import PassedOver, show
from kimik3_prep.manifest.row import NO_SELECTION, Selection
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.remote import protocol_problem, scheme
from kimik3_prep.run.since import without_held

#: Seconds; far above what the largest allowed image takes to decode.
DEFAULT_ITEM_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What `encode` was asked to do. Those that decide output bytes are in the `Recipe`; the others never do."""

    manifest: str
    output: Path | str
    """A folder, or the URL of one in an object store."""

    config: str | None = None
    backend: Literal["auto", "cpu", "gpu"] = "auto"
    dtype: str = "float32"
    device: str | None = None
    batch_bytes: int = 256 << 20
    shard_size: int = 512 << 20
    workers: int = 1
    dedupe: Literal["path", "content", "off"] = "path"
    select: Selection = NO_SELECTION  # which fields of the rows are images and ids
    image_dir: str | None = None  # where relative paths start; None: where the source lies
    on_missing: Literal["stop", "record"] = "stop"  # where none of the first files is there
    since: Path | None = None
    """A finished output: its items are left out."""

    limit: int | None = None
    max_pixels: int = DEFAULT_MAX_PIXELS
    max_tokens: int | None = None
    exif: Literal["ignore", "apply"] = "ignore"
    memory: int | None = None
    item_timeout: float = DEFAULT_ITEM_TIMEOUT
    on_error: Literal["record", "fail"] = "record"
    max_failures: int | None = None
    overwrite: bool = False
    retry_failed: bool = False
    image_root: Path | None = None
    staging: Path | None = None
    """Where the files for a URL are made; None: in the temporary folder."""

    index_only: bool = False
    engine: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    shard_range: tuple[int, int] | None = None
    formats: tuple[str, ...] = ()
    """Formats that packages of their own read, by the names in `EXTRAS`."""

    @property
    def most_failures(self) -> int | None:
        """How many items may fail before the run stops; None: all."""
        return 0 if self.on_error == "fail" else self.max_failures

    @property
    def ray(self) -> str:
        """Which Ray to use; `local` starts one on this machine. RAY_ADDRESS is how a Ray job is told its cluster's."""
        return self.ray_address or os.environ.get("RAY_ADDRESS") or "local"


class Reporter(Protocol):
    """Who watches a run. `advance` is called from several threads."""

    def warn(self, problem: Problem) -> None:
        """Something to know that stops nothing."""

    def pass_over(self, kinds: tuple[PassedOver, ...]) -> None:
        """What the source holds that became no item."""

    def phase(self, name: str, total: int) -> None:
        """A stage of `total` images begins."""

    def advance(self, images: int, pixels: int, size: int, failed: int) -> None:
        """So many images more are done: their source pixels, their stored bytes, how many failed."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Input without problems."""

    recipe: Recipe
    manifest: Manifest

    devices: tuple[str, ...]
    """torch devices for gpu shards, a shard each; empty where no row asks for one."""

    def without_items(self) -> Checked:
        """The same without the manifest's rows, which may take up much memory."""
        return replace(self, manifest=replace(self.manifest, items=ITEM_SCHEMA.empty_table()))


def default_output(manifest: str) -> Path:
    """`<manifest stem>-features` in the working directory; for a pattern the name of its folder."""
    if is_pattern(manifest):
        return Path(f"{Path(base_of(manifest)).name or 'manifest'}-features")
    name = manifest.partition("?")[0] if scheme(manifest) else manifest
    name = "manifest" if manifest == "-" else Path(name).name.removesuffix(".gz")
    return Path(f"{Path(name).stem}-features")


def check(settings: Settings, reporter: Reporter) -> Checked:
    """Read config and manifest. Raises InputError with the problems of both; warnings go to the reporter."""
    _check_protocols(settings)
    problems = list(_odd_settings(settings))
    total = len(problems)
    config = manifest = None
    backend = auto_backend() if settings.backend == "auto" else settings.backend
    devices: tuple[str, ...] = ()
    try:
        config, warnings = load_config(find_config(settings.config, _beside(settings.manifest)))
        for warning in warnings:
            reporter.warn(warning)
        if settings.max_tokens is not None and config.fixed_output_tokens is not None:
            what = f"the config gives every image {config.fixed_output_tokens:,} tokens (fixed_output_tokens)"
            problems.append(Problem("--max-tokens", what, hint="leave it out"))
            total += 1
    except InputError as error:
        problems += error.problems
        total += error.total
    try:
        manifest = read_manifest(settings.manifest, settings.limit, settings.select, settings.image_dir)
        if settings.on_missing == "stop" and not _was_planned(settings) and (problem := missing_files(manifest)):
            problems.append(replace(problem, hint=f"{problem.hint}; --on-missing record goes on", severity="error"))
            total += 1
        for warning in manifest.warnings:
            reporter.warn(warning)
        found = [*_unknown_protocols(manifest), *(_odd_grids(manifest, config) if config else [])]
        if settings.image_root is not None:
            found += _outside(manifest, settings.image_root)
        problems += found
        total += len(found)
        if not settings.index_only and (asks := _who_asks_for_a_device(settings, manifest, backend)):
            devices = find_devices(settings.device, asks, settings.engine == "ray" and settings.ray != "local")
    except InputError as error:
        problems += error.problems
        total += error.total
    if config is None or manifest is None or problems:
        raise InputError(problems, total)
    recipe = _recipe(settings, config, manifest, backend)
    if settings.since is not None:
        manifest, recipe = without_held(manifest, recipe, settings.since, settings.workers)
    reporter.pass_over(manifest.passed_over)
    return Checked(recipe, manifest, devices)


def _recipe(
    settings: Settings, config: PreprocessorConfig, manifest: Manifest, backend: Literal["cpu", "gpu"]
) -> Recipe:
    """What the options say under a field's own name goes in as it is; the rest is worked out."""
    names = {field.name for field in fields(Recipe)} & {field.name for field in fields(Settings)}
    worked_out = {
        "config": config,
        "manifest": manifest.digest,
        "backend": backend,
        "dtype": "uint8" if settings.index_only else settings.dtype,
        "decoders": codec_versions(settings.formats),
    }
    return Recipe(**{**{name: getattr(settings, name) for name in names}, **worked_out})


def _was_planned(settings: Settings) -> bool:
    """Whether a run began before: then its images were there, and some of its work may be done."""
    return scheme(str(settings.output)) is not None or (Path(settings.output) / "plan.parquet").is_file()


def _odd_settings(settings: Settings) -> Iterator[Problem]:
    """Options that cannot be, or not together."""
    yield from missing(settings.formats)
    if settings.engine == "ray" and find_spec("ray") is None:
        yield Problem("--engine ray", "Ray is not installed", hint=INSTALL_RAY)
    if settings.engine != "ray" and settings.ray_address is not None:
        yield Problem("--ray-address", "says which Ray to use", hint="add --engine ray")
    if settings.shard_range is not None:
        hint = "leave one of the two out"
        whole = (settings.overwrite, settings.retry_failed, settings.index_only)
        for option, used in zip(("--overwrite", "--retry-failed", "--index-only"), whole, strict=True):
            if used:
                yield Problem(option, "concerns the whole folder, and --shard-range a part of it", hint=hint)
    elsewhere = settings.engine == "ray" and settings.ray != "local"
    if scheme(str(settings.output)) and (settings.shard_range is not None or elsewhere):
        option = "--shard-range" if settings.shard_range is not None else "--ray-address"
        hint = "write to a folder that all machines share, and copy it there"
        yield Problem(option, "has no staging folder that all its machines see for an output at a URL", hint=hint)


def parse_size(text: str, option: str = "size") -> int:
    """Bytes from "200MB", "2GiB", "512 mib" or "1000000". Raises InputError for anything else, and for zero."""
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    units |= {f"{u}b": 1000**n for n, u in enumerate("kmgt", 1)} | {f"{u}ib": 1024**n for n, u in enumerate("kmgt", 1)}
    digits = text.strip().lower()
    unit = digits.lstrip("0123456789.").strip()
    number = digits[: len(digits) - len(digits.lstrip("0123456789."))]
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise InputError([Problem(option, f"{text!r} is not a size", "a number with a unit: 200MB, 512MiB, 2GiB")])
    return size


def parse_range(text: str) -> tuple[int, int]:
    """Return `(i, n)` from "i/n": the i-th of n ranges, counted from 1. Raises InputError for anything else."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*(?:/|of)\s*(\d{1,9})\s*", text, re.ASCII)
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if match and 1 <= number <= count:
        return number, count
    hint = f"ranges are counted from 1: the first is 1/{count}, the last {count}/{count}" if count else ""
    expected = "i/n, the i-th of n ranges, as 1/8 to 8/8"
    raise InputError([Problem("--shard-range", f"{text!r} is no range", expected, hint)])


def _who_asks_for_a_device(settings: Settings, manifest: Manifest, backend: str) -> str | None:
    """Where the first wish for the gpu backend stands; None when no item will use it."""
    items = manifest.items
    deferred = pc.equal(items["path"], "deferred")
    rows = items.filter(pc.and_(deferred, pc.equal(pc.fill_null(items["backend"], backend), "gpu")))
    if not rows.num_rows:
        return None
    first = rows["line"][0].as_py() if rows["backend"][0].is_valid else None
    return f"--backend {settings.backend}" if first is None else f"{manifest.name}:{first}"


def _odd_grids(manifest: Manifest, config: PreprocessorConfig) -> Iterator[Problem]:
    """Grids of locally preprocessed rows that the merge does not divide."""
    items = manifest.items.select(["path", "line", "grid_thw"])
    merge = config.merge_size
    for row in items.filter(pc.equal(items["path"], "local")).to_pylist():
        if any(side % merge for side in row["grid_thw"][1:]):
            what = f"grid_thw is {row['grid_thw']}"
            yield Problem(f"{manifest.name}:{row['line']}", what, f"rows and columns that {merge} divides")


def _outside(manifest: Manifest, image_root: Path) -> Iterator[Problem]:
    """Rows whose file does not lie below `image_root` once every symbolic link is followed.

    URLs are refused with them: some of fsspec's protocols read local files (`local://`, `zip://`).
    """
    root = os.path.realpath(image_root)
    inside = os.path.join(root, "")
    for batch in manifest.items.select(["image", "line"]).to_batches():
        for image, line in zip(batch["image"].to_pylist(), batch["line"].to_pylist(), strict=True):
            try:
                source, _ = split(resolve(image, manifest.base))
                if is_data_url(source):
                    continue
                if not scheme(source) and os.path.realpath(source).startswith(inside):
                    continue
            except ValueError:  # a NUL byte: nothing can be opened by that name, so nothing outside either
                continue
            what = f"{show(image)} does not lie below it"
            yield Problem(f"{manifest.name}:{line}", what, f"a file below {root} (--image-root)")


def _unknown_protocols(manifest: Manifest) -> Iterator[Problem]:
    """URL schemes that nothing here can read, each named once."""
    seen: set[str] = set()
    for batch in manifest.items.select(["image", "line"]).to_batches():
        for image, line in zip(batch["image"].to_pylist(), batch["line"].to_pylist(), strict=True):
            protocol = scheme(image) and scheme(resolve(image, manifest.base))
            if protocol is not None and protocol not in seen:
                seen.add(protocol)
                if problem := protocol_problem(protocol, f"{manifest.name}:{line}"):
                    yield problem


def _check_protocols(settings: Settings) -> None:
    """Raises InputError for a manifest or config at a URL that nothing here can read."""
    given = (settings.manifest, settings.config)
    found = [protocol_problem(protocol, url) for url in given if url and (protocol := scheme(url))]
    if problems := [problem for problem in found if problem]:
        raise InputError(problems)


def _beside(manifest: str) -> Place | None:
    """The folder of the manifest, where its config may lie."""
    if manifest == "-":
        return None
    if scheme(manifest):
        return base_of(manifest)
    return Path(base_of(manifest)) if is_pattern(manifest) else Path(manifest).resolve().parent


# --- devices --------------------------------------------------------------------------------------------------------

_ANYWHERE = "--device cpu runs the same kernels on the CPU, with the same bytes; --backend cpu does without them"


def auto_backend() -> Literal["cpu", "gpu"]:
    """`gpu` where a CUDA device can be used, else `cpu`. Both give the same bytes."""
    if not os.path.exists("/dev/nvidiactl"):  # importing torch to hear "no" costs seconds
        return "cpu"
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def find_devices(device: str | None, where: str, elsewhere: bool = False) -> tuple[str, ...]:
    """The torch devices that `--device` names: `cuda` is every visible one, a shard each.

    device: cuda, cuda:N, mps, cpu, or None for cuda. where: what asks for a device, for the problem's place.
    elsewhere: the work is done on other machines, and a CUDA device need not be here.
    Raises InputError when there is no such device, or when this Pillow resizes in another way than the kernels.
    """
    asked = device or "cuda"
    match = re.fullmatch(r"(cpu|mps|cuda)(?::(\d+))?", asked)
    if match is None or (match[2] and match[1] != "cuda"):
        hint = 'was "cuda" meant?' if asked.lower().startswith(("gpu", "cuda", "nvidia")) else ""
        raise InputError([Problem("--device", f"{asked!r} is no device", "cuda, cuda:N, mps or cpu", hint)])
    _check_pillow()
    import torch

    if match[1] == "cuda" and elsewhere:
        return ("cuda",)
    if match[1] == "cpu":
        return ("cpu",)
    if match[1] == "mps":
        if not torch.backends.mps.is_available():
            raise InputError([Problem(where, "no MPS device is available here", hint=_ANYWHERE)])
        return ("mps",)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        why = "this torch was built without CUDA" if torch.version.cuda is None else "CUDA finds no device"
        hint = f"install a CUDA build of torch and its driver; {_ANYWHERE}"
        raise InputError([Problem(where, f"the gpu backend is asked for, and {why}", hint=hint)])
    if match[2] is None:
        return tuple(f"cuda:{index}" for index in range(count))
    if int(match[2]) >= count:
        raise InputError([Problem("--device", f"{asked} does not exist", f"cuda:0 to cuda:{count - 1}")])
    return (asked,)


def _check_pillow() -> None:
    from PIL import __version__

    from kimik3_prep.pixels.device import resizes_like_pillow

    if not resizes_like_pillow():
        what = f"Pillow {__version__} resizes in another order of passes than the device kernels"
        raise InputError([Problem("--backend", what, "Pillow 13", "install pillow>=13, or use --backend cpu")])
