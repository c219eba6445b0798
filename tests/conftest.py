"""What the tests share: golden inputs, small pictures, and the real command."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import reference
from PIL import Image
from stores import Store, serving

from kimik3_prep.checkpoint.config import (
    Background,
    Diagnosis,
    PreprocessorConfig,
    diagnose,
    load_config,
    published_path,
)
from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.errors import Problem
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.manifest.report import PassedOver
from kimik3_prep.output.folder import Output
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.shard_file import ShardFormat
from kimik3_prep.output.tables import Outcome, Stored, index_table, split_shards
from kimik3_prep.run.check import Settings
from kimik3_prep.run.planning import Headers, find_spans, make_plan
from kimik3_prep.run.prepare import prepare

GOLDEN = Path(__file__).parent / "golden"
BINARY = Path(sys.executable).with_name("kimik3-prep")


#: What an id may hold: markup, an emoji code, a cleared screen, a renamed window, a forged line, a reversed reading
#: order, the one-byte form of an escape sequence, and a file name that is not UTF-8.
HOSTILE = "[red]a[/red] :cat: \x1b[2J\x1b]0;owned\x07\r\nerror: forged \u202egpj.exe \x9b31m\udcff"
#: The same, letter by letter.
SHOWN = "[red]a[/red] :cat: \\x1b[2J\\x1b]0;owned\\x07\\r\\nerror: forged \\u202egpj.exe \\x9b31m\\udcff"


def golden_cases(name: str) -> list[dict[str, Any]]:
    """The rows of a golden list, `images` or `configs`."""
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def published() -> PreprocessorConfig:
    """The published Kimi-K3 config."""
    return load_config(published_path())[0]


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A folder with the golden images, and the two paths that cannot be kept in a repository."""
    folder = tmp_path / "golden"
    folder.mkdir()
    os.symlink(GOLDEN / "images", folder / "stored")
    images = folder / "images"
    images.mkdir()
    for path in (GOLDEN / "images").iterdir():
        os.symlink(path, images / path.name)
    os.symlink("loop.png", images / "loop.png")
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the real `kimik3-prep` in an empty folder; `env` adds variables, `input` feeds stdin."""

    def call(*args: object, env: dict[str, str] | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
        more.setdefault("cwd", tmp_path)
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **(env or {})}
        command = [str(BINARY), *map(str, args)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, **more)

    return call


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth random picture of any mode Pillow converts RGBA to; alpha has holes, edges and soft parts."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (max(2, height // 16), max(2, width // 16), 4), dtype=np.uint8)
    small[..., 3] = random.choice([0, 255, 128, 7], small.shape[:2])
    image = Image.fromarray(small, "RGBA").resize((width, height), Image.Resampling.BICUBIC)
    return image if mode == "RGBA" else image.convert(mode)


def png_bytes(width: int, height: int, seed: int = 0) -> bytes:
    """A picture as an encoded file."""
    buffer = io.BytesIO()
    picture(width, height, seed=seed).save(buffer, "PNG")
    return buffer.getvalue()


def write_manifest(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A JSON Lines manifest."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def on_full_output(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the real `kimik3-prep` with a standard output that takes nothing."""
    with open("/dev/full", "w") as full:
        return subprocess.run(
            [str(BINARY), *command],
            cwd=folder,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )


def slow_jpeg(side: int, scans: int) -> bytes:
    """A small progressive JPEG whose last scan comes again and again, each time over the whole picture."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), 90).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans + data[-2:]


class Silent:
    """A reporter that only remembers."""

    def __init__(self) -> None:
        self.warnings: list[Problem] = []
        self.passed_over: tuple[PassedOver, ...] = ()
        self.phases: list[tuple[str, int]] = []
        self.done = self.failed = 0
        self._lock = threading.Lock()

    def warn(self, problem: Problem) -> None:
        self.warnings.append(problem)

    def pass_over(self, kinds: tuple[PassedOver, ...]) -> None:
        self.passed_over += kinds

    def phase(self, name: str, total: int) -> None:
        self.phases.append((name, total))

    def advance(self, images: int, pixels: int, size: int, failed: int) -> None:
        with self._lock:
            self.done += images
            self.failed += failed


def encode(manifest: Path, output: Path, **more: Any) -> Any:
    """Encode in this process, with the published config."""
    settings = Settings(manifest=str(manifest), output=output, config="kimi-k3", **more)
    return prepare(settings, Silent())


def until(condition: Callable[[], Any]) -> Any:
    """Wait for a state, up to a limit that a busy machine meets."""
    end = time.monotonic() + 240
    while not (answer := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    assert answer
    return answer


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def tree(root: Path, *, but: Collection[str] = ()) -> dict[str, str]:
    """The digest of every file below a folder; files of the names in `but` are left out."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name not in but)
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def local_row(folder: Path, name: str, image: Any, **more: Any) -> dict[str, Any]:
    """A row of features made beforehand, and its file."""
    from safetensors.numpy import save_file

    values = reference.features(image, reference.PUBLISHED)
    size = reference.grid(*image.size, reference.PUBLISHED)
    thw = [1, size["rows"], size["cols"]]
    if name.endswith(".npy"):
        np.save(folder / name, values)
    else:
        save_file({"pixel_values": values, "grid_thws": np.array([thw])}, folder / name)
    return {"id": name, "features": name, "grid_thw": thw, **more}


def cfg_and_config(**changes: Any) -> tuple[dict[str, Any], PreprocessorConfig]:
    """The same config for the reference and for the package."""
    cfg = {**reference.PUBLISHED, **changes}
    background = cfg["transparent_bg_config"]
    if background is not None:
        defaults = {"pattern": "black", "chessboard_square_size": 16, "chessboard_square_on_top_left": True}
        full = {**defaults, "chessboard_white_value": 255, "chessboard_gray_value": 200, **background}
        background = Background(*full.values())
    config = PreprocessorConfig(
        patch_size=cfg["patch_size"],
        merge_size=cfg["merge_kernel_size"],
        in_patch_limit=cfg["in_patch_limit"],
        patch_limit_on_one_side=cfg["patch_limit_on_one_side"],
        image_mean=tuple(cfg["image_mean"]),
        image_std=tuple(cfg["image_std"]),
        fixed_output_tokens=None,
        background=background,
        fill_stage=cfg["transparent_bg_fill_stage"],
    )
    return cfg, config


def in_mode(mode: str, width: int, height: int, seed: int) -> Image.Image:
    if mode == "PA":
        image = picture(width, height, "LA", seed).convert("PA")
        palette = np.random.default_rng(seed).integers(0, 256, 768, dtype=np.uint8)
        image.putpalette(palette.tobytes())
        return image
    if mode == "I;16":
        return picture(width, height, "I", seed).point(lambda value: value * 3).convert("I;16")
    if mode == "RGBa":
        return picture(width, height, mode.upper(), seed).convert(mode)
    if mode in ("LAB", "HSV", "YCbCr", "CMYK", "RGBX"):
        return picture(width, height, "RGB", seed).convert(mode) if mode != "LAB" else lab(width, height, seed)
    return picture(width, height, mode, seed)


def lab(width: int, height: int, seed: int) -> Image.Image:
    bands = picture(width, height, "RGB", seed).tobytes()
    return Image.frombytes("LAB", (width, height), bands)


def recipe(**changes: Any) -> Recipe:
    """A recipe with the published config, in which some facts are other ones."""
    facts: dict[str, Any] = {
        "config": cfg_and_config()[1],
        "manifest": "sha256:" + "0" * 64,
        "limit": None,
        "backend": "cpu",
        "dtype": "float32",
        "index_only": False,
        "shard_size": 512 << 20,
        "dedupe": "path",
        "max_pixels": 178_956_970,
        "max_tokens": None,
        "exif": "ignore",
        "decoders": {"pillow": "13.0.0", "webp": "1.6.0"},
    }
    return Recipe(**{**facts, **changes})


class _TellingRecipe(Recipe):
    """A recipe whose metadata are made up."""

    told: dict[str, Any]

    def metadata(self, group: str | None = None, shard: str | None = None) -> dict[str, Any]:
        return self.told


def shard_format(dtype: str, patch: int, metadata: dict[str, Any]) -> ShardFormat:
    """The format of shards of any patch size that carry any metadata."""
    plain = recipe(dtype=dtype, config=replace(cfg_and_config()[1], patch_size=patch))
    telling = _TellingRecipe(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    object.__setattr__(telling, "told", metadata)
    return ShardFormat(telling, "cpu")


VERSIONS = {"torch": "2.13.0"}


def planned(
    folder: Path, rows: list[dict[str, Any]], shard_patches: int = 1000, fail: Collection[int] = ()
) -> pa.Table:
    """The plan of a manifest whose rows give their sizes; the rows in `fail` failed while planning."""
    folder.mkdir(exist_ok=True)
    manifest = read_manifest(str(write_manifest(folder / "m.jsonl", rows)))
    spans = find_spans(manifest.items, manifest.base, "cpu", True)
    headers = Headers(len(spans.first_row))
    for span, row in enumerate(spans.first_row):
        headers.width[span] = headers.height[span] = rows[row].get("width", 0)
        if row in fail:
            headers.error_code[span], headers.error_message[span] = "not_found", "gone"
    return make_plan(manifest.items, spans, headers, GridRule(14, 2, 65536, 512), shard_patches)


def item(image: str, size: int = 28, **more: Any) -> dict[str, Any]:
    return {"id": more.pop("id", image), "image": image, "width": size, "height": size, **more}


def stored(row: int, patch_start: int = 0) -> Stored:
    return Stored(row, patch_start, "RGB", "PNG", 6, "sha256:" + "0" * 64, "ab" * 16)


def commit(output: Output, plan: pa.Table) -> tuple[list[str], list[pa.Table]]:
    """Commit every shard of a plan, with every image stored; gives what `finish` takes."""
    output.shards.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    failed: list[pa.Table] = []
    for name, rows in split_shards(iter([plan])):
        if name is None:
            failed.append(index_table(rows, {}))
            continue
        outcomes: dict[int, Outcome] = {row: stored(row) for row in rows["row"].to_pylist()}
        output.commit(name, index_table(rows, outcomes), recipe())
        names.append(name)
    return names, failed


PUBLISHED: dict[str, Any] = json.loads(published_path().read_text())["media_proc_cfg"]


BOARD = PUBLISHED["transparent_bg_config"]


ABSENT = object()


def nested(**changes: Any) -> dict[str, Any]:
    """The published config with other values; ABSENT takes a key away."""
    values = {**copy.deepcopy(PUBLISHED), **changes}
    return {"media_proc_cfg": {key: value for key, value in values.items() if value is not ABSENT}}


#: Configs of relatives of Kimi-K3, which share some of its keys.
RELATIVES: list[dict[str, Any]] = [
    {
        "auto_map": {"AutoImageProcessor": "image_processing_kimi_vl.KimiVLImageProcessor"},
        **{"in_token_limit": 4096, "patch_size": 14, "num_pooled_tokens": 1024, "pad_input": True},
        **{"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "merge_kernel_size": [2, 2]},
    },
    {"processor_class": "KimiVLProcessor", **PUBLISHED},
    {"processor_class": "KimiAudioProcessor", **nested()},
    {"model_type": "kimi_vl", "image_processor": {"in_patch_limit": 4096}},
]


class Bench:
    """Writes documents to one file and asks for the diagnosis."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "x.json"

    def __call__(self, document: Any) -> Diagnosis:
        self.path.write_text(document if isinstance(document, str) else json.dumps(document))
        return diagnose(self.path)

    def only(self, document: Any, severity: str = "error") -> Problem:
        """The one problem of that severity; its place without the folder."""
        found = [problem for problem in self(document).problems if problem.severity == severity]
        assert len(found) == 1, found
        problem = found[0]
        where = problem.where.removeprefix(f"{self.path}: ")
        return Problem(where, problem.what, problem.expected, problem.hint, problem.severity)


@pytest.fixture(scope="session")
def _s3() -> Iterator[Store]:
    with serving() as store:
        yield store


@pytest.fixture
def s3(_s3: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An S3 store with an empty bucket; this process and the commands it runs find it."""
    import fsspec.config

    for name, value in _s3.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": _s3.endpoint})  # read when fsspec was imported
    _s3.fault = lambda method, key: None
    _s3.empty()
    yield _s3
    _s3.fault = lambda method, key: None
