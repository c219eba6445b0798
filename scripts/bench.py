"""Encoding beside its limit and its alternatives, on pictures of three sizes, all in one run.

    speed     decoding alone, two DataLoaders, and the real command in every storage type with 1 and with 2 workers
    headers   headers a second, for the plan
    start     commands that have next to nothing to do
    growth    milliseconds an image as the manifest grows to 100,000 rows
    reading   items a second out of finished folders, as they are stored and normalised
    remote    a training loop over a store at a URL that answers each request 50 ms late, beside one over its folder

Each thing is measured once a round, so that a machine that slows down slows all of them, and the first round does not
count. A figure is the median of the rounds; its lowest and highest stand behind it. The seconds that a command, a pool
or a DataLoader takes to start are left out. `of limit` is the share of the speed of decoding alone on as many processes
as there are workers, which no encoder can exceed.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

STORAGE = ("uint8", "bfloat16", "float16", "float32")
WORKERS = 2
LATENCY = 0.05  # seconds
CONFIG = ("--config", "kimi-k3")


# --- pictures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PictureSet:
    """Pictures of one size."""

    name: str
    width: int
    height: int
    files: int
    """Different pictures."""
    rows: int
    """Manifest rows: every picture several times, so that start-up is small beside the work."""
    subsampling: int
    """Of colour, as Pillow numbers it: 0 is none, as in camera files; 2 is 4:2:0, as on the web."""

    def draw(self, folder: Path) -> list[Path]:
        """Draw the pictures: smooth areas, edges and fine grain, as JPEG of about four bits a pixel."""
        folder.mkdir(parents=True)
        paths = []
        for number in range(self.files):
            image = Image.fromarray(_photograph(self.width, self.height, number))
            path = folder / f"{number:04d}.jpg"
            for quality in range(88, 100):
                image.save(path, quality=quality, subsampling=self.subsampling)
                if path.stat().st_size * 8 >= 4 * self.width * self.height:
                    break
            paths.append(path)
        return paths


SETS = (
    PictureSet("224x168", 224, 168, files=200, rows=8000, subsampling=2),
    PictureSet("640x480", 640, 480, files=60, rows=1200, subsampling=2),
    PictureSet("3.3MP", 2160, 1520, files=12, rows=120, subsampling=0),
)


def _photograph(width: int, height: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    random = np.random.default_rng(seed)
    picture = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((5, 120), (24, 70), (120, 40), (500, 18)):
        cells = min(cells, width)
        noise = random.random((max(2, cells * height // width), cells, 3), dtype=np.float32)
        for channel in range(3):
            layer = Image.fromarray(noise[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
            picture[..., channel] += weight * np.asarray(layer)
    picture += random.normal(0, 3, picture.shape)
    picture += random.normal(0, 5, (height, width, 1))  # most grain is in brightness
    return picture.clip(0, 255).astype(np.uint8)


def bits_a_pixel(images: list[Path]) -> float:
    """Bits of all files by pixels of all pictures."""
    pixels = 0
    for path in images:
        with Image.open(path) as image:
            pixels += image.width * image.height
    return 8 * sum(path.stat().st_size for path in images) / pixels


def write_manifest(path: Path, images: list[Path], rows: int) -> Path:
    """A manifest of `rows` rows that names the images in turn."""
    lines = (json.dumps({"id": str(row), "image": str(images[row % len(images)])}) for row in range(rows))
    path.write_text("".join(line + "\n" for line in lines))
    return path


# --- the limit and the alternatives ---------------------------------------------------------------------------------


def decode_files(paths: list[Path]) -> None:
    """Decode the files and throw the pixels away."""
    for path in paths:
        Image.open(io.BytesIO(path.read_bytes())).load()


def decode_all(pool: Executor, workers: int, paths: list[Path]) -> None:
    """Decode the files on all workers of a pool."""
    parts = 8 * workers
    list(pool.map(decode_files, [paths[part::parts] for part in range(parts)]))


def padded_pixels(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The pixels of a picture that needs no resize, padded to whole tokens."""
    image = Image.open(path).convert("RGB")
    return np.pad(np.asarray(image), ((0, -image.height % 28), (0, -image.width % 28), (0, 0)))


def patchify(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`[h, w, 3]` to `[patches, 3, 14, 14]`, a copy."""
    cut = pixels.reshape(pixels.shape[0] // 14, 14, pixels.shape[1] // 14, 14, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut).reshape(-1, 3, 14, 14)


def plain_steps(path: Path) -> np.ndarray[Any, Any]:
    """The checkpoint's steps as one writes them down first."""
    values = (padded_pixels(path) / 255.0).astype(np.float32)
    values = (values.astype(np.float64) - np.array([0.5, 0.5, 0.5])).astype(np.float32)
    return patchify((values.astype(np.float64) * (1.0 / np.array([0.5, 0.5, 0.5]))).astype(np.float32))


def uint8_steps(path: Path) -> np.ndarray[Any, Any]:
    """What somebody writes who lets the model normalise."""
    return patchify(padded_pixels(path))


class Files:
    """A map-style dataset: `steps` of each file."""

    def __init__(self, paths: list[Path], steps: Callable[[Path], np.ndarray[Any, Any]]) -> None:
        self.paths, self.steps = paths, steps

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(self.steps(self.paths[index]))


def data_loader(paths: list[Path], steps: Callable[[Path], np.ndarray[Any, Any]]) -> Any:
    """A DataLoader whose worker processes stay from round to round."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    return DataLoader(Files(paths, steps), batch_size=None, num_workers=WORKERS, persistent_workers=True)  # type: ignore[arg-type]


def drain(loader: Any) -> None:
    """Take every item of a DataLoader and drop it."""
    for _ in loader:
        pass


# --- the real command -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    seconds: float
    driver: float = 0.0
    """Processor seconds of the command's own process, without those of its workers."""


def timed(function: Callable[[], object]) -> Callable[[], Sample]:
    """A function that measures another."""

    def measure() -> Sample:
        began = time.perf_counter()
        function()
        return Sample(time.perf_counter() - began)

    return measure


def command(*arguments: object) -> Sample:
    """Run the command line as a user does."""
    line = [sys.executable, "-m", "kimik3_prep", *map(str, arguments)]
    began = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stdout, stderr = process.stdout.read(), process.stderr.read()  # type: ignore[union-attr]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until it is collected, its counters can be read
        seconds = time.perf_counter() - began
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    if process.returncode != 0:
        raise SystemExit(f"kimik3-prep {' '.join(map(str, arguments))} failed:\n{stdout}{stderr}")
    return Sample(seconds, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def encode(manifest: Path, output: Path, workers: int, *more: object) -> Sample:
    """One whole run into a fresh folder, every row an image of its own."""
    try:
        return command(
            *("encode", manifest, *CONFIG, "--backend", "cpu", "--dedupe", "off", "-o", output, "-j", workers),
            *("--no-progress", "--format", "json", *more),
        )
    finally:
        shutil.rmtree(output, ignore_errors=True)


# --- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """Median, lowest and highest of one thing, and what it took of the driver."""

    median: float
    low: float
    high: float
    driver: float

    @classmethod
    def of(cls, samples: list[Sample], start: list[Sample] | None, count: int) -> Figure:
        """Milliseconds an image, of `count` images, beyond those of the start in the same round."""
        starts = start or [Sample(0.0)] * len(samples)
        each = [
            (1000 * (sample.seconds - begun.seconds) / count, 1000 * (sample.driver - begun.driver) / count)
            for sample, begun in zip(samples, starts, strict=True)
        ]
        times = [seconds for seconds, _ in each]
        return cls(statistics.median(times), min(times), max(times), statistics.median(driver for _, driver in each))


def rounds(things: dict[str, Callable[[], Sample]], runs: int) -> dict[str, list[Sample]]:
    """Samples of each thing, one a round, without those of a first round."""
    samples: dict[str, list[Sample]] = {name: [] for name in things}
    for number in range(runs + 1):
        for name, thing in things.items():
            sample = thing()
            if number:
                samples[name].append(sample)
    return samples


class Report:
    """Figures, printed as they come and kept for --json."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def title(self, text: str, *columns: str) -> None:
        """Begin a table."""
        print(f"\n{text:<40}" + "".join(f"{column:>15}" for column in columns), flush=True)

    def row(self, table: str, name: str, **figures: float | str | None) -> None:
        """A row of a table."""
        self.rows.append({"table": table, "name": name, **figures})
        print(f"{name:<40}" + "".join(f"{_shown(figure):>15}" for figure in figures.values()), flush=True)


def _shown(figure: float | str | None) -> str:
    if figure is None:
        return ""
    if isinstance(figure, str):
        return figure
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:,.3f}" if abs(figure) < 1 else f"{figure:,.2f}"


# --- the parts ------------------------------------------------------------------------------------------------------


def speed(name: str, images: list[Path], rows: int, folder: Path, runs: int, report: Report) -> None:
    """Encoding beside its limit and its alternatives."""
    paths = [images[row % len(images)] for row in range(rows)]
    manifest = write_manifest(folder / "manifest.jsonl", images, rows)
    start = write_manifest(folder / "start.jsonl", images, 1)
    with ExitStack() as stack:
        pools = {n: stack.enter_context(ProcessPoolExecutor(n, get_context("spawn"))) for n in (1, WORKERS)}
        threads = stack.enter_context(ThreadPoolExecutor(WORKERS))
        loaders = {steps: data_loader(paths, steps) for steps in (plain_steps, uint8_steps)}
        alone = f"decoding alone, {WORKERS} processes"
        plain, patched = (f"DataLoader, {text}" for text in ("plain steps, float32", "patchify, uint8"))
        things = {
            "decoding alone, 1 process": timed(lambda: decode_all(pools[1], 1, paths)),
            f"decoding alone, {WORKERS} threads": timed(lambda: decode_all(threads, WORKERS, paths)),
            alone: timed(lambda: decode_all(pools[WORKERS], WORKERS, paths)),
            plain: timed(lambda: drain(loaders[plain_steps])),
            patched: timed(lambda: drain(loaders[uint8_steps])),
        }
        for workers in (1, WORKERS):
            things[f"start {workers}"] = lambda n=workers: encode(start, folder / "out", n)
            for dtype in STORAGE:
                things[f"encode {dtype} {workers}"] = lambda n=workers, to=dtype: encode(
                    manifest, folder / "out", n, "--dtype", to
                )
        samples = rounds(things, runs)
    figures = {
        thing: Figure.of(taken, samples.get(f"start {thing[-1]}") if thing.startswith("encode") else None, rows)
        for thing, taken in samples.items()
        if not thing.startswith("start")
    }
    columns = ("of limit", "times 1 worker", "times loader", "ms an image", "from - to", "driver ms")
    report.title(f"{name}: {rows:,} of {bits_a_pixel(images):.1f} bits a pixel", *columns)
    for thing, figure in figures.items():
        _, dtype, workers = thing.split() if thing.startswith("encode") else ("", "", "")
        one = figures.get(f"encode {dtype} 1") if workers == str(WORKERS) else None
        loader = {"float32": figures[plain], "uint8": figures[patched]}.get(dtype) if one else None
        report.row(
            f"speed {name}",
            f"encode {dtype}, {workers} worker" + ("s" if workers != "1" else "") if dtype else thing,
            of_limit=figures[alone].median / figure.median,
            times_one=one.median / figure.median if one else None,
            times_loader=loader.median / figure.median if loader else None,
            ms=figure.median,
            spread=f"{figure.low:.2f} - {figure.high:.2f}",
            driver_ms=figure.driver if dtype else None,
        )


def headers(images: list[Path], folder: Path, runs: int, report: Report, count: int = 5000) -> None:
    """Headers of local files, read for a plan that is thrown away."""
    names = []
    for number in range(count):
        names.append(folder / f"header-{number}.jpg")
        os.link(images[number % len(images)], names[-1])
    plan = ("--dry-run",)
    many, one = (write_manifest(folder / f"headers-{n}.jsonl", names, n) for n in (count, 1))
    things = {
        "headers": lambda: encode(many, folder / "out", WORKERS, *plan),
        "start": lambda: encode(one, folder / "out", WORKERS, *plan),
    }
    samples = rounds(things, runs)
    figure = Figure.of(samples["headers"], samples["start"], count)
    report.title("headers", "a second", "ms each", "from - to", "driver ms")
    spread = f"{figure.low:.2f} - {figure.high:.2f}"
    figures = {"a_second": 1000 / figure.median, "ms": figure.median, "spread": spread, "driver_ms": figure.driver}
    report.row("headers", f"headers, {WORKERS} workers", **figures)


def start(images: list[Path], folder: Path, runs: int, report: Report) -> None:
    """Commands that have next to nothing to do."""
    one, out = write_manifest(folder / "one.jsonl", images, 1), folder / "one"
    command("encode", one, *CONFIG, "--backend", "cpu", "-o", out)
    things = {
        "--help": lambda: command("--help"),
        "validate-config": lambda: command("validate-config", "kimi-k3"),
        "encode, one image": lambda: encode(one, folder / "out", WORKERS),
        "verify": lambda: command("verify", out),
        "inspect": lambda: command("inspect", out),
    }
    report.title("start", "seconds", "from - to")
    for name, samples in rounds(things, runs).items():
        seconds = [sample.seconds for sample in samples]
        spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
        report.row("start", name, seconds=statistics.median(seconds), spread=spread)


def growth(images: list[Path], folder: Path, report: Report) -> None:
    """The cost of a small image as the manifest grows; once each, for the last one takes minutes."""
    report.title("growth: encode uint8 of small pictures", "ms an image", "driver ms")
    one = write_manifest(folder / "start.jsonl", images, 1)
    more = (WORKERS, "--dtype", "uint8")
    for count in (1_000, 10_000, 100_000):
        manifest = write_manifest(folder / "growth.jsonl", images, count)
        begun = encode(one, folder / "out", *more)
        figure = Figure.of([encode(manifest, folder / "out", *more)], [begun], count)
        report.row("growth", f"{count:,} images", ms=figure.median, driver_ms=figure.driver)


def read(store: Any, order: list[int]) -> None:
    """Take items and drop them, as a training loop does."""
    for row in order:
        store[row]


def reading(name: str, images: list[Path], folder: Path, runs: int, report: Report, count: int = 120) -> None:
    """Items out of finished folders in random order, beside copying the bytes that they become."""
    from kimik3_prep import FeatureStore

    manifest = write_manifest(folder / "reading.jsonl", images, count)
    order = np.random.default_rng(0).permutation(count).tolist()
    things: dict[str, Callable[[], Sample]] = {}
    for dtype in STORAGE:
        out = folder / f"reading-{dtype}"
        command("encode", manifest, *CONFIG, "--backend", "cpu", "--dedupe", "off", "-o", out, "--dtype", dtype)
        stores = {"as stored": FeatureStore(out)}
        if dtype == "uint8":
            stores = {
                "levels": FeatureStore(out, raw=True),
                "normalised to float32": FeatureStore(out),
                "normalised to bfloat16": FeatureStore(out, dtype="bfloat16"),
            }
        for text, store in stores.items():
            things[f"{dtype}, {text}"] = timed(lambda store=store: read(store, order))
            values = store[0].pixel_values
            block = np.ones(values.numel() * values.element_size(), np.uint8)
            things[f"{dtype}, {text}, copied"] = timed(lambda block=block: [len(block.copy()) for _ in order])
    samples = rounds(things, runs)
    figures = {thing: Figure.of(taken, None, count) for thing, taken in samples.items()}
    report.title(f"reading {name}", "of copying", "items a second", "ms an item", "from - to")
    for thing, figure in figures.items():
        if thing.endswith("copied"):
            continue
        report.row(
            f"reading {name}",
            thing,
            of_copying=figures[f"{thing}, copied"].median / figure.median,
            items_a_second=1000 / figure.median,
            ms=figure.median,
            spread=f"{figure.low:.3f} - {figure.high:.3f}",
        )
    for dtype in STORAGE:
        shutil.rmtree(folder / f"reading-{dtype}")


class _LateServer(SimpleHTTPRequestHandler):
    """A web server that knows ranges and answers late."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(LATENCY)
        path = Path(self.translate_path(self.path))
        size = path.stat().st_size
        begin, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        with path.open("rb") as file:
            file.seek(int(begin))
            part = file.read((min(int(last or size), size - 1) + 1 - int(begin)) if self.command == "GET" else 0)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", str(size))
        self.send_header("Content-Length", str(len(part) if self.command == "GET" else size))
        self.end_headers()
        self.wfile.write(part)

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def _serve(folder: Path, port: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_LateServer, directory=str(folder)))
    port.send(server.server_address[1])
    server.serve_forever()


def remote(name: str, images: list[Path], folder: Path, runs: int, report: Report, count: int = 4000) -> None:
    """Epochs of a shuffled training loop with two DataLoader workers: from the folder, and over a slow network."""
    from torch.utils.data import DataLoader

    from kimik3_prep import FeatureDataset, FeatureStore, TokenBudgetSampler, collate

    manifest, out = write_manifest(folder / "remote.jsonl", images, count), folder / "remote"
    command("encode", manifest, *CONFIG, "--backend", "cpu", "--dedupe", "off", "-o", out, "--dtype", "uint8")
    ours, theirs = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=_serve, args=(out, theirs), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"

    def epoch(open_store: Callable[[], FeatureStore]) -> Sample:
        dataset = FeatureDataset(open_store())
        sampler = TokenBudgetSampler(dataset.num_tokens, 32 * int(dataset.num_tokens.max()), shuffle=True)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=WORKERS, prefetch_factor=4, collate_fn=collate)
        return timed(lambda: [len(batch.ids) for batch in loader])()

    def cold() -> Sample:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return epoch(lambda: FeatureStore(url, raw=True, cache=folder / "cache"))

    things = {
        "folder": lambda: epoch(lambda: FeatureStore(out, raw=True)),
        "URL, nothing in the cache": cold,
        "URL, all in the cache": lambda: epoch(lambda: FeatureStore(url, raw=True, cache=folder / "cache")),
    }
    samples = rounds(things, runs)
    server.kill()
    report.title(f"remote {name}", "of folder", "items a second", "ms an item", "from - to")
    figures = {thing: Figure.of(taken, None, count) for thing, taken in samples.items()}
    for thing, figure in figures.items():
        report.row(
            f"remote {name}",
            thing,
            of_folder=figures["folder"].median / figure.median,
            items_a_second=1000 / figure.median,
            ms=figure.median,
            spread=f"{figure.low:.3f} - {figure.high:.3f}",
        )
    for path in (out, folder / "cache"):
        shutil.rmtree(path)


# --- the command ----------------------------------------------------------------------------------------------------


@contextmanager
def temporary(parent: Path | None) -> Iterator[Path]:
    """A folder that goes when the bench ends."""
    path = Path(tempfile.mkdtemp(prefix="kimik3-prep-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main() -> None:
    """Measure what --only and --sets choose; print the figures, write them to --json."""
    names = [pictures.name for pictures in SETS]
    parts = ("speed", "headers", "start", "growth", "reading", "remote")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=parts, nargs="+", default=("speed", "headers", "start"), help="parts to run")
    parser.add_argument("--sets", choices=names, nargs="+", default=names, help="pictures to draw")
    parser.add_argument("--images", type=Path, help="a folder of JPEG files to use instead")
    parser.add_argument("--runs", type=int, default=3, help="rounds that count")
    parser.add_argument("--scale", type=float, default=1.0, help="a share of the rows of each set")
    memory = Path("/dev/shm")
    parser.add_argument("--folder", type=Path, default=memory if memory.is_dir() else None, help="where to write")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the folder in memory goes
    about = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        "load": f"{os.getloadavg()[0]:.1f} before",
        "python": platform.python_version(),
        "pillow": Image.__version__,
    }
    print("  ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    report = Report()
    with temporary(options.folder) as folder:
        if options.images:
            own = sorted(path for path in options.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
            sets = {str(options.images): (own, max(len(own), round(120 * options.scale)))}
        else:
            chosen = [pictures for pictures in SETS if pictures.name in options.sets]
            sets = {one.name: (one.draw(folder / one.name), round(one.rows * options.scale)) for one in chosen}
        first = next(iter(sets.values()))[0]  # the smallest pictures, so that what is no picture's work shows
        for name, (images, rows) in sets.items() if "speed" in options.only else ():
            speed(name, images, rows, folder, options.runs, report)
        if "headers" in options.only:
            headers(first, folder, options.runs, report)
        if "start" in options.only:
            start(first, folder, options.runs, report)
        if "growth" in options.only:
            growth(first, folder, report)
        for name, (images, _) in sets.items() if "reading" in options.only else ():
            reading(name, images, folder, options.runs, report)
        for name, (images, _) in sets.items() if "remote" in options.only else ():
            remote(name, images, folder, options.runs, report)
    if options.json:
        options.json.write_text(json.dumps({**about, "rows": report.rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
