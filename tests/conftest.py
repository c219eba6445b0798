"""What the tests share: golden inputs, small pictures, and the real command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from stores import Store, serving

from kimik3_prep.config import PreprocessorConfig, load_config, published_path

GOLDEN = Path(__file__).parent / "golden"
BINARY = Path(sys.executable).with_name("kimik3-prep")


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
    """A reporter that says nothing."""

    def warn(self, problem: object) -> None: ...

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, images: int, pixels: int, size: int, failed: int) -> None: ...


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
