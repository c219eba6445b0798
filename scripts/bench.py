"""Encoding speed beside its limit and its alternatives, measured in one run. Every figure is a median of --runs.

    decode alone        Pillow decodes the files on as many threads and throws the pixels away: nothing can be quicker
    plain loop          the checkpoint's own steps, one image after the other, result thrown away
    DataLoader          the same steps in a torch DataLoader with as many worker processes
    encode              the real command, from manifest to committed shards, start-up subtracted

Output goes to a folder in memory, then (float32 and uint8) to one on disk, beside what the disk takes by itself.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

BINARY = Path(sys.executable).with_name("kimik3-prep")
DTYPES = ("uint8", "bfloat16", "float16", "float32")


# --- pictures -----------------------------------------------------------------------------------------------------


def draw(folder: Path, count: int, quality: int = 95) -> list[Path]:
    """Photo-like JPEGs of a few megapixels: smooth areas, edges, and fine grain.

    At quality 95 and above with full colour resolution, about four bits a pixel, as camera files have; below with half
    of it, as on the web, which decodes half as fast again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        random = np.random.default_rng(number)
        width, height = [(2048, 1536), (1920, 1280), (2600, 1730), (1536, 2048)][number % 4]
        picture = np.zeros((height, width, 3), np.float32)
        for cells, weight in ((5, 120), (24, 70), (120, 40), (500, 18)):
            noise = random.random((max(2, cells * height // width), cells, 3), dtype=np.float32)
            layer = [Image.fromarray(noise[..., c]).resize((width, height), Image.Resampling.BICUBIC) for c in range(3)]
            picture += weight * np.stack([np.asarray(band) for band in layer], -1)
        picture += random.normal(0, 3, picture.shape).astype(np.float32)
        picture += random.normal(0, 5, (height, width, 1)).astype(np.float32)  # grain, mostly in brightness
        path = folder / f"{number:04d}.jpg"
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(
            path, quality=quality, subsampling=0 if quality >= 95 else 2
        )
        paths.append(path)
    return paths


def megapixels(paths: list[Path]) -> float:
    """Pixels of all files, in millions."""
    total = 0
    for path in paths:
        with Image.open(path) as image:
            total += image.width * image.height
    return total / 1e6


# --- what is compared ---------------------------------------------------------------------------------------------


def decode_alone(paths: list[Path], workers: int) -> None:
    """The limit."""

    def decode(path: Path) -> None:
        Image.open(io.BytesIO(path.read_bytes())).load()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(decode, paths))


def plain_steps(path: Path) -> torch.Tensor:
    """The checkpoint's steps as one writes them down first, for an RGB picture that needs no resize."""
    image = Image.open(path).convert("RGB")
    pixels = np.pad(np.asarray(image), ((0, -image.height % 28), (0, -image.width % 28), (0, 0)))
    values = (pixels / 255.0).astype(np.float32)
    values = (values.astype(np.float64) - np.array([0.5, 0.5, 0.5])).astype(np.float32)
    values = (values.astype(np.float64) * (1.0 / np.array([0.5, 0.5, 0.5]))).astype(np.float32)
    rows, cols = values.shape[0] // 14, values.shape[1] // 14
    patches = values.reshape(rows, 14, cols, 14, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 14, 14)
    return torch.from_numpy(np.ascontiguousarray(patches))


class Files(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The plain steps as a map-style dataset."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return plain_steps(self.paths[index])


def data_loader(paths: list[Path], workers: int) -> None:
    """What one would write instead."""
    for _ in torch.utils.data.DataLoader(Files(paths), batch_size=None, num_workers=workers):
        pass


def command(*arguments: object) -> tuple[float, int]:
    """Run the real command; `(seconds, peak memory in MiB)`."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [str(BINARY), *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, peak_memory(process.pid))
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    if process.returncode != 0:
        stderr = process.stderr.read() if process.stderr else ""
        raise SystemExit(f"kimik3-prep {' '.join(map(str, arguments))} failed:\n{stderr}")
    return seconds, peak


def peak_memory(pid: int) -> int:
    """A running process's own peak in MiB; what wait() reports would count this process's from before the exec."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def encode(manifest: Path, output: Path, workers: int, *more: object) -> tuple[float, int]:
    """One whole run into a fresh folder."""
    shutil.rmtree(output, ignore_errors=True)
    try:
        return command("encode", manifest, "--config", "kimi-k3", "-o", output, "-j", workers, "--no-progress", *more)
    finally:
        shutil.rmtree(output, ignore_errors=True)


# --- measuring ----------------------------------------------------------------------------------------------------


class Bench:
    """Rows of figures, printed as they come."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.rows: list[dict[str, Any]] = []

    def seconds(self, function: Callable[..., Any], *arguments: Any) -> float:
        """Median time of a call, after one that is not counted."""
        function(*arguments)
        times = []
        for _ in range(self.runs):
            began = time.perf_counter()
            function(*arguments)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def command(self, function: Callable[..., tuple[float, int]], *arguments: Any) -> tuple[float, int]:
        """Median time and largest memory of a command, after one run that is not counted."""
        function(*arguments)
        results = [function(*arguments) for _ in range(self.runs)]
        return statistics.median(seconds for seconds, _ in results), max(memory for _, memory in results)

    def beyond(self, arguments: tuple[Any, ...], start: tuple[Any, ...]) -> tuple[float, int]:
        """Median time of an encode beyond that of one tiny image, run in turns, because start-up varies by itself."""
        encode(*arguments)
        pairs = [(encode(*start)[0], *encode(*arguments)) for _ in range(self.runs)]
        starts, seconds, memory = zip(*pairs, strict=True)
        return max(statistics.median(seconds) - statistics.median(starts), 1e-9), max(memory)

    def row(self, name: str, **figures: Any) -> None:
        """Print and keep a row."""
        self.rows.append({"name": name, **figures})
        shown = "  ".join(
            f"{key} {value:,.2f}" if isinstance(value, float) else f"{key} {value:,}" for key, value in figures.items()
        )
        print(f"{name:<38} {shown}", flush=True)


def write_manifest(path: Path, images: list[Path], repeat: int = 1) -> Path:
    """A manifest in which nothing is stored twice unless asked for."""
    rows = [{"id": f"{n}-{image.name}", "image": str(image)} for n in range(repeat) for image in images]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextmanager
def folder(parent: str | None) -> Iterator[Path]:
    """A temporary folder in `parent`."""
    path = Path(tempfile.mkdtemp(prefix="kimik3-prep-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def disk_rate(target: Path) -> float:
    """MB/s of writing and syncing 512 MB of zeros that no file system can skip."""
    block = os.urandom(1 << 20)
    began = time.perf_counter()
    with open(target / "rate", "wb") as file:
        for _ in range(512):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    (target / "rate").unlink()
    return 512 * 1.048576 / seconds


def speed(bench: Bench, images: list[Path], memory: Path, disk: Path, workers: int) -> None:
    """Encoding beside its limit and its alternatives."""
    total = megapixels(images)
    manifest = write_manifest(memory / "manifest.jsonl", images)
    tiny = memory / "tiny.png"
    Image.new("RGB", (28, 28)).save(tiny)
    start = (write_manifest(memory / "tiny.jsonl", [tiny]), memory / "out", workers)
    limit = bench.seconds(decode_alone, images, workers)
    bench.row("decode alone", megapixels_s=total / limit)
    plain = bench.seconds(lambda: [plain_steps(path) for path in images])
    bench.row("plain loop", megapixels_s=total / plain, of_decode=limit / plain)
    loader = bench.seconds(data_loader, images, workers)
    bench.row(f"DataLoader, {workers} workers", megapixels_s=total / loader, of_decode=limit / loader)

    def measure(name: str, target: Path, *more: object) -> None:
        net, peak = bench.beyond((manifest, target / "out", workers, *more), (*start, *more))
        bench.row(
            name,
            megapixels_s=total / net,
            of_decode=limit / net,
            times_plain=plain / net,
            times_loader=loader / net,
            peak_mib=peak,
        )

    for dtype in DTYPES:
        measure(f"encode {dtype}", memory, "--dtype", dtype)
    measure("encode uint8, gpu kernels on cpu", memory, "--dtype", "uint8", "--backend", "gpu", "--device", "cpu")
    if torch.cuda.is_available():
        for dtype in DTYPES:
            measure(f"encode {dtype}, cuda", memory, "--dtype", dtype, "--backend", "gpu")
    bench.row("the disk by itself", mb_s=disk_rate(disk))
    for dtype in ("uint8", "float32"):
        measure(f"encode {dtype} to disk", disk, "--dtype", dtype)


def growth(bench: Bench, images: list[Path], memory: Path, workers: int) -> None:
    """The cost of an image as the manifest grows; small pictures, so that bookkeeping shows."""
    small = []
    for number in range(100):
        path = memory / f"small-{number}.jpg"
        with Image.open(images[number % len(images)]) as image:
            image.resize((224, 168)).save(path)
        small.append(path)
    more = ("--dtype", "uint8", "--dedupe", "off")
    start = (write_manifest(memory / "one.jsonl", small[:1]), memory / "out", workers, *more)
    for repeat in (4, 16, 64, 1000):
        manifest = write_manifest(memory / "growth.jsonl", small, repeat)
        arguments = (manifest, memory / "out", workers, *more)
        if repeat < 1000:
            seconds, peak = bench.beyond(arguments, start)
        else:  # minutes, so that once is enough
            seconds, peak = encode(*arguments)
            seconds -= encode(*start)[0]
        count = repeat * len(small)
        bench.row(f"encode {count:,} small images", ms_an_image=1000 * seconds / count, peak_mib=peak)


def planning(bench: Bench, memory: Path, workers: int) -> None:
    """Start-up, and a manifest of 100,000 rows that carry their sizes."""
    for arguments in (("--help",), ("validate-config", "kimi-k3")):
        seconds, peak = bench.command(command, *arguments)
        bench.row(" ".join(arguments), seconds=seconds, peak_mib=peak)
    manifest = memory / "plan.jsonl"
    with open(manifest, "w") as file:
        for n in range(100_000):
            row = {"id": f"row-{n}", "image": f"{n:07d}.jpg", "width": 300 + n % 3000, "height": 200 + n % 2300}
            file.write(json.dumps({**row, "caption": f"picture number {n}"}) + "\n")
    seconds, peak = bench.command(command, "encode", manifest, "--config", "kimi-k3", "--dry-run")
    bench.row("plan 100,000 rows with sizes", seconds=seconds, peak_mib=peak)


def headers(bench: Bench, images: list[Path], workers: int) -> None:
    """Header probes of local files."""
    from kimik3_prep.images.decode import probe

    names = [str(path) for path in images] * max(1, 2000 // len(images))

    def all_headers() -> None:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(probe, names))

    bench.row("headers", headers_s=len(names) / bench.seconds(all_headers))


def main() -> None:
    """Run everything; print rows as they come, write them to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of JPEG files; default: drawn ones")
    parser.add_argument("--count", type=int, default=40, help="how many to draw")
    parser.add_argument("--quality", type=int, default=95, help="JPEG quality of the drawn ones")
    parser.add_argument("--runs", type=int, default=3, help="measured runs of each row")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--memory", default="/dev/shm" if os.path.isdir("/dev/shm") else None, help="a folder in memory"
    )
    parser.add_argument("--disk", help="a folder on disk; default: the system's temporary folder")
    parser.add_argument("--only", choices=("speed", "growth", "planning", "headers"), help="one part")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.runs)
    about = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {options.workers} workers on {os.cpu_count()} processors",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pillow": Image.__version__,
    }
    print("  ".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    with folder(options.memory) as memory, folder(options.disk) as disk:
        if options.images:
            images = sorted(p for p in options.images.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
        else:
            images = draw(memory / "images", options.count, options.quality)
        bits = 8 * sum(path.stat().st_size for path in images) / megapixels(images) / 1e6
        print(f"{len(images)} images, {megapixels(images):,.1f} megapixels, {bits:.1f} bits a pixel", flush=True)
        parts = {
            "speed": lambda: speed(bench, images, memory, disk, options.workers),
            "growth": lambda: growth(bench, images, memory, options.workers),
            "planning": lambda: planning(bench, memory, options.workers),
            "headers": lambda: headers(bench, images, options.workers),
        }
        for name, part in parts.items():
            if options.only in (None, name):
                part()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if options.json:
        report = {**about, "images": len(images), "rows": bench.rows, "bench_peak_mib": own}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
