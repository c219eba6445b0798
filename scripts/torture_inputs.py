"""Hostile inputs: good files changed by chance, and what must hold of each.

Whatever a file holds, the package refuses it with an error of its own, or records a failed item, or reads it. Any other
exception, a crash, a hang, much memory, a file outside the folder, and an escape sequence in the output are faults.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from safetensors.numpy import save_file
from torture_pool import Attack, Fault

import kimik3_prep
from kimik3_prep.checkpoint.config import diagnose, find_config, load_config, published_path
from kimik3_prep.errors import ItemError, PrepError
from kimik3_prep.images.decode import decode, probe
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.pixels.ready import read_features
from kimik3_prep.reading.inspection import inspect
from kimik3_prep.reading.verify import verify
from kimik3_prep.run.check import Settings
from kimik3_prep.run.prepare import prepare

MOST_PIXELS = 4_000_000
_COMMAND_EVERY = 40  # attacks on a manifest, a config or a run between two that go through the whole command

#: What must never reach a terminal: control characters but for the end of a line, and turned writing.
_ESCAPES = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

_MARK = "[red]marked[/red]"
_TEXTS = (
    *(
        "",
        "a",
        "\x00",
        "\x1b[2J\x1b]0;x\x07",
        _MARK,
        ":smile:",
        "[link=x]y[/link]",
        "\u202egnp.a",
        "é" * 300,
        "x" * 100_000,
    ),
    *(
        "../../outside",
        "/etc/passwd",
        "/dev/zero",
        "/dev/stdin",
        "file:///etc/passwd",
        "http://",
        "s3://",
        "__metadata__",
    ),
    *(
        "data:,",
        "data:image/png;base64,AAAA",
        "data:;base64,!",
        "a.png#x",
        "a.tar?x",
        "%00",
        "con",
        ".",
        "..",
        "a/" * 2000,
    ),
    *(
        "cpu-00000",
        "cpu-00000/../../../outside",
        "gpu-99999",
        "sha256:",
        "sha256:" + "0" * 64,
        "ok",
        "failed",
        "\ud800",
    ),
)
_NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 48, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1),
    *(-(2**31), -(2**63), 2**63, 2**64, 10**23, 10**400, 0.5, -0.0, 1e308, 1e-320),
)
_VALUES: tuple[Any, ...] = (
    *_TEXTS,
    *_NUMBERS,
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, 2, 3],
    [0.5] * 3,
)
_WORDS = [
    n.to_bytes(size, order, signed=True)
    for n in (0, 1, -1, 2**7, 2**15 - 1)
    for size in (2, 4, 8)
    for order in ("little", "big")
]
_WORDS += [(2**31 - 1).to_bytes(size, order) for size in (4, 8) for order in ("little", "big")]


# --- changes by chance --------------------------------------------------------------------------------------------


def changed_bytes(chance: Random, data: bytes, others: list[bytes]) -> bytes:
    """A file with one to four changes: bits, words, pieces cut, doubled, moved or taken from another file."""
    content = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        size = len(content)
        # Headers are small, and decide the most: every second change goes there.
        at = chance.randrange(min(size, 128) if chance.random() < 0.5 else size) if size else 0
        length = min(size - at, int(2 ** chance.uniform(0, 10)))
        match chance.randrange(9):
            case 0 | 1 if size:
                content[at] ^= 1 << chance.randrange(8)
            case 2 if size:
                content[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 3:
                word = chance.choice(_WORDS)
                content[at : at + len(word)] = word
            case 4:
                del content[at : at + length]
            case 5:
                content[at:at] = content[at : at + length] * chance.choice((1, 1, 1, 8))
            case 6:
                other = chance.choice(others)
                start = chance.randrange(len(other)) if other else 0
                content[at : at + length] = other[start : start + length]
            case 7:
                del content[at:]
            case _:
                content[at:at] = chance.randbytes(min(length, 64))
    return bytes(content)


def changed_value(chance: Random, value: Any, depth: int = 0) -> Any:
    """A JSON value in which something, somewhere, is something else, twice, or gone."""
    if isinstance(value, dict) and value and (depth == 0 or chance.random() < 0.8):
        key = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {name: part for name, part in value.items() if name != key}
            case 1:
                return {
                    **value,
                    chance.choice(("", "id", "x", _MARK, "\x1b[31m", key.upper(), key + "s")): copy.copy(value[key]),
                }
            case _:
                return {**value, key: changed_value(chance, value[key], depth + 1)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        match chance.randrange(6):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value + value[at:]
            case _:
                return [*value[:at], changed_value(chance, value[at], depth + 1), *value[at + 1 :]]
    if isinstance(value, str) and value and chance.random() < 0.3:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(("", "x", "/", "\x00", "\x1b", "é", "9")) + value[at + 1 :]
    return copy.deepcopy(chance.choice(_VALUES))


def as_json(chance: Random, value: Any) -> bytes:
    """JSON text; now and then not quite JSON."""
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    if chance.random() < 0.1:
        text = text.replace(b"1", chance.choice((b"NaN", b"-Infinity", b"1" * 5000, b"1e999", b"[" * 300)), 1)
    return changed_bytes(chance, text, [text]) if chance.random() < 0.2 else text


def changed_table(chance: Random, table: pa.Table) -> pa.Table:
    """A table with another cell, column, row, name, type or metadata."""
    column = chance.randrange(table.num_columns)
    name, field = table.column_names[column], table.schema.field(column)
    match chance.randrange(10):
        case 0:
            return table.drop_columns([name])
        case 1:
            return table.rename_columns(
                [chance.choice(("x", _MARK, name.upper())) if n == name else n for n in table.column_names]
            )
        case 2:
            return table.take(
                pa.array(
                    [chance.randrange(table.num_rows) for _ in range(chance.randrange(2 * table.num_rows))], pa.int64()
                )
            )
        case 3:
            metadata = {key: changed_metadata(chance, text) for key, text in (table.schema.metadata or {}).items()}
            return table.replace_schema_metadata(metadata)
    values = table[name].to_pylist()
    for _ in range(chance.choice((1, 1, 2))):
        values[chance.randrange(len(values))] = chance.choice(_VALUES)
    for kind in (field.type, None):
        with contextlib.suppress(pa.ArrowException, OverflowError, TypeError, UnicodeError, ValueError):
            return table.set_column(column, name, pa.array(values, kind))
    return table.set_column(column, name, pa.nulls(len(values), field.type))


def changed_metadata(chance: Random, text: bytes) -> bytes:
    """The JSON in an index or a shard, changed."""
    with contextlib.suppress(ValueError):
        return as_json(chance, changed_value(chance, json.loads(text)))
    return changed_bytes(chance, text, [text])


def changed_shard(chance: Random, data: bytes) -> bytes:
    """A safetensors file with another header of the right length, or other bytes."""
    if chance.random() < 0.4 or len(data) < 8:
        return changed_bytes(chance, data, [data])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    if metadata and chance.random() < 0.4:
        key = chance.choice(list(metadata))
        metadata[key] = changed_metadata(chance, metadata[key].encode()).decode("utf-8", "replace")
        text = json.dumps(header).encode("utf-8", "surrogatepass")
    else:
        text = as_json(chance, changed_value(chance, header))
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def changed_parquet(chance: Random, data: bytes) -> bytes:
    """A Parquet file with another table in it, or other bytes."""
    if chance.random() < 0.5:
        return changed_bytes(chance, data, [data])
    buffer = io.BytesIO()
    with contextlib.suppress(pa.ArrowException, UnicodeError):
        pq.write_table(changed_table(chance, pq.read_table(io.BytesIO(data))), buffer, compression="zstd")
        return buffer.getvalue()
    return data


# --- the whole command --------------------------------------------------------------------------------------------


def command(folder: Path, *arguments: object) -> str:
    """Run the command in a fork of this process; returns its output. Its end and its output must be clean."""
    said = folder.parent / f"{folder.name}.said"
    with open(said, "wb") as file:
        pid = os.fork()
        if pid == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            _be_the_command(folder, [str(argument) for argument in arguments])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output = said.read_bytes().decode("utf-8", "replace")
    if code not in (0, 1, 2, 3):
        raise Fault(f"{arguments[0]} ended with {code}: {output[-300:]!r}")
    if "Traceback" in output or "internal error" in output or "a fault of" in output:
        raise Fault(f"{arguments[0]}: {output[-400:]!r}")
    if escape := _ESCAPES.search(output):
        raise Fault(
            f"{arguments[0]} printed {escape[0]!r}: {output[max(0, escape.start() - 80) : escape.end() + 20]!r}"
        )
    if "marked" in output and _MARK not in output and "\\" not in output:
        raise Fault(f"{arguments[0]} took a text for markup: {output[:300]!r}")
    return output


def _be_the_command(folder: Path, arguments: list[str]) -> None:
    code: object = 99
    try:
        os.chdir(folder)
        os.environ.update(NO_COLOR="1", COLUMNS="200")
        sys.argv = ["kimik3-prep", *arguments]
        from kimik3_prep.cli import main

        main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 99)


def _nothing_beside(folder: Path, names: set[str]) -> None:
    """Raises Fault where something has appeared beside what was there."""
    if more := sorted({path.name for path in folder.iterdir()} - names):
        raise Fault(f"made {more[0]!r} outside of the output folder")


# --- images -------------------------------------------------------------------------------------------------------


def small_images() -> dict[str, bytes]:
    """A small image in every format and many modes."""
    chance = np.random.default_rng(7)
    rgba = Image.fromarray(chance.integers(0, 256, (23, 31, 4), dtype=np.uint8), "RGBA").resize((61, 47))
    wanted: list[tuple[str, str, dict[str, Any]]] = [
        *(("PNG", mode, {}) for mode in ("RGB", "RGBA", "P", "1", "L", "LA", "I;16")),
        *(("JPEG", mode, {}) for mode in ("RGB", "L", "CMYK")),
        ("JPEG", "RGB", {"progressive": True, "quality": 40}),
        *(("WEBP", mode, {"lossless": lossless}) for mode in ("RGB", "RGBA") for lossless in (False, True)),
        *(
            ("TIFF", mode, {"compression": how})
            for mode in ("RGB", "L")
            for how in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")
        ),
        ("TIFF", "1", {"compression": "group4"}),
        *((name, "RGB", {}) for name in ("BMP", "AVIF", "JPEG2000", "PPM", "TGA", "ICO", "GIF")),
        ("AVIF", "RGBA", {}),
        ("JPEG2000", "RGBA", {}),
        ("TGA", "RGB", {"compression": "tga_rle"}),
        ("XBM", "1", {}),
        ("GIF", "P", {"save_all": True, "append_images": [rgba.convert("P").rotate(90)]}),
        ("MPO", "RGB", {"save_all": True, "append_images": [rgba.convert("RGB").rotate(90)]}),
    ]
    images = {}
    for number, (name, mode, how) in enumerate(wanted):
        buffer = io.BytesIO()
        image = rgba.convert("I").convert("I;16") if mode == "I;16" else rgba.convert(mode)
        image.save(buffer, name, **how)
        images[f"{number:02d}-{name}-{mode}"] = buffer.getvalue()
    return images


def attack_images(images: dict[str, bytes]) -> Callable[[int, Path], str]:
    """Changed images, through the header and the decoder."""
    contents = list(images.values())

    def run(seed: int, folder: Path) -> str:
        chance = Random(f"image {seed}")
        path = folder / "image"
        path.write_bytes(changed_bytes(chance, chance.choice(contents), contents))
        try:
            header = probe(str(path), MOST_PIXELS)
            decode(str(path), MOST_PIXELS, None, "ignore", (header.width, header.height))
        except ItemError as error:
            return error.code
        return "decoded"

    return run


def attack_worker(images: dict[str, bytes]) -> Callable[[int, Path], str]:
    """A whole run over a hundred changed images: every row is stored or has failed, and verify finds nothing wrong."""
    contents = list(images.values())

    def run(seed: int, folder: Path) -> str:
        shutil.rmtree(folder / "set", ignore_errors=True)
        images, out = folder / "set" / "images", folder / "set" / "out"
        images.mkdir(parents=True)
        for number in range(100):
            chance = Random(f"worker {seed} {number}")
            (images / f"{number:03d}").write_bytes(changed_bytes(chance, chance.choice(contents), contents))
        rows = "".join(json.dumps({"id": str(number), "image": f"images/{number:03d}"}) + "\n" for number in range(100))
        (folder / "set" / "m.jsonl").write_text(rows)
        settings = Settings(
            str(folder / "set" / "m.jsonl"),
            out,
            "kimi-k3",
            "cpu",
            "uint8",
            workers=1,
            max_pixels=MOST_PIXELS,
            item_timeout=10,
        )
        summary = prepare(settings, Quiet())
        if summary.ok + summary.failed != 100:
            raise Fault(f"{summary.ok} rows are ok and {summary.failed} failed, of 100")
        if findings := verify(out).problems:
            raise Fault(str(findings[0]))
        _nothing_beside(folder / "set", {"images", "out", "m.jsonl"})
        return "run"

    return run


class Quiet:
    """A reporter that says nothing."""

    def warn(self, problem: object) -> None: ...
    def pass_over(self, rows: object) -> None: ...
    def phase(self, name: str, total: int) -> None: ...
    def advance(self, images: int, pixels: int, size: int, failed: int) -> None: ...


# --- features made elsewhere --------------------------------------------------------------------------------------


def attack_features() -> Callable[[int, Path], str]:
    """Changed files of features made elsewhere."""
    config = load_config(published_path())[0]
    values = np.random.default_rng(1).standard_normal((4, 3, 14, 14), dtype=np.float32)
    npy = io.BytesIO()
    np.save(npy, values)
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        save_file({"pixel_values": values, "grid_thws": np.array([[1, 2, 2]])}, file.name)
        tensors = Path(file.name).read_bytes()

    def run(seed: int, folder: Path) -> str:
        chance = Random(f"features {seed}")
        if chance.random() < 0.5:
            content = changed_shard(chance, tensors)
        else:
            content = changed_bytes(chance, npy.getvalue(), [npy.getvalue(), tensors])
        grid = chance.choice(((1, 2, 2), (1, 2, 2), (1, 2, 2), (1, 2**31, 2), (1, 4, 1), (0, 0, 0)))
        try:
            read_features(content, grid, config)
        except ItemError as error:
            return error.code
        return "read"

    return run


# --- configs ------------------------------------------------------------------------------------------------------


def attack_configs() -> Callable[[int, Path], str]:
    """Changed configs: every problem is said, and what passes the diagnosis can be loaded."""
    good = json.loads(published_path().read_text())

    def run(seed: int, folder: Path) -> str:
        chance = Random(f"config {seed}")
        value = copy.deepcopy(good if chance.random() < 0.7 else good["media_proc_cfg"])
        for _ in range(chance.choice((1, 1, 2, 3))):
            value = changed_value(chance, value)
        path = folder / "preprocessor_config.json"
        path.write_bytes(as_json(chance, value))
        diagnosis = diagnose(find_config(str(path)))
        if diagnosis.config is not None:
            grid = diagnosis.config.grid_rule().grid(chance.choice((1, 100, 20_000)), chance.choice((1, 77, 20_000)))
            if grid.patches < 1:
                raise Fault(f"a grid of {grid.patches} patches")
        elif not any(problem.severity == "error" for problem in diagnosis.problems):
            raise Fault("no config, and no error")
        if seed % _COMMAND_EVERY == 0:
            command(
                folder,
                "validate-config",
                path,
                *chance.choice(((), ("--format", "json"), ("--write-fixed", folder / "fixed.json"))),
            )
        return "good" if diagnosis.config is not None else "refused"

    return run


# --- manifests ----------------------------------------------------------------------------------------------------


def manifests(image: bytes) -> dict[str, bytes]:
    """A manifest of every kind, whose rows name `a.png`."""
    rows: list[dict[str, Any]] = [
        {"id": "one", "image": "a.png", "caption": _MARK, "width": 61, "height": 47},
        {
            "id": "two",
            "image": "a.png",
            "backend": "cpu",
            "content_hash": "sha256:" + hashlib.sha256(image).hexdigest(),
        },
        {"id": "three", "features": "f.npy", "grid_thw": [1, 2, 2]},
        {
            "id": "four",
            "image": "data:image/png;base64,iVBORw0KGgo=",
            "messages": [{"role": "user", "content": "<image>"}],
        },
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pa.table({"id": ["x", "y"], "image": ["a.png", "a.png"], "n": [1, 2]})
    cells = pa.table({"id": ["x", "y"], "image": [{"bytes": image, "path": "x.png"}] * 2})
    parquet, pictures, archive = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    pq.write_table(cells, pictures)
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in (("a.png", image), ("a.json", b'{"caption": "c"}'), ("b.png", image)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    arrow = io.BytesIO()
    with pa.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table)
    return {
        "m.jsonl": lines,
        "m.json": json.dumps(rows).encode(),
        "m.jsonl.gz": gzip.compress(lines, mtime=0),
        "m.csv": b'id,image,caption\none,a.png,x\ntwo,a.png,"y"\n',
        "m.tsv": b"id\timage\none\ta.png\n",
        "m.txt": b"a.png\na.png\n",
        "m.parquet": parquet.getvalue(),
        "p.parquet": pictures.getvalue(),
        "m.arrow": arrow.getvalue(),
        "m.tar": archive.getvalue(),
        "m.tar.gz": gzip.compress(archive.getvalue(), mtime=0),
    }


def attack_manifests(image: bytes) -> Callable[[int, Path], str]:
    """Changed manifests of every kind, through the reader; now and then through `encode --dry-run` and `manifest`."""
    good = manifests(image)
    contents = list(good.values())

    def changed(chance: Random, name: str, content: bytes) -> bytes:
        how = chance.random()
        if name.endswith(".parquet") and how < 0.6:
            return changed_parquet(chance, content)
        if name in ("m.jsonl", "m.jsonl.gz") and how < 0.7:
            lines = good["m.jsonl"].splitlines()
            at = chance.randrange(len(lines))
            lines[at] = as_json(chance, changed_value(chance, json.loads(lines[at])))
            text = b"\n".join(lines)
            return gzip.compress(text, 1, mtime=0) if name.endswith(".gz") else text
        if name == "m.json" and how < 0.7:
            return as_json(chance, changed_value(chance, json.loads(content)))
        if name.endswith(".gz") and how < 0.7:
            return gzip.compress(changed_bytes(chance, gzip.decompress(content), contents), 1, mtime=0)
        return changed_bytes(chance, content, contents)

    def run(seed: int, folder: Path) -> str:
        chance = Random(f"manifest {seed}")
        name = chance.choice(list(good))
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (folder / "a.png").write_bytes(image)
        (folder / name).write_bytes(changed(chance, name, good[name]))
        try:
            items = read_manifest(str(folder / name)).items
            outcome = "read" if items.num_rows else "empty"
        except PrepError as error:
            str(error)
            outcome = "refused"
        if seed % _COMMAND_EVERY == 0:
            options = (
                "--config",
                "kimi-k3",
                "--backend",
                "cpu",
                "--max-pixels",
                MOST_PIXELS,
                "--no-progress",
                "--item-timeout",
                10,
            )
            form = ("--format", chance.choice(("text", "json")))
            match chance.randrange(3):
                case 0:
                    command(folder, "manifest", name, "-o", "made.jsonl", *form)
                    _nothing_beside(folder, {"a.png", name, "made.jsonl"})
                case 1:
                    command(folder, "encode", name, *options, "--dry-run", *form)
                    _nothing_beside(folder, {"a.png", name})
                case _:
                    command(folder, "encode", name, *options, "-o", "out", "--dtype", "uint8", "-j", 1, *form)
                    _nothing_beside(folder, {"a.png", name, "out"})
        return outcome

    return run


# --- runs ---------------------------------------------------------------------------------------------------------


class StoredRunFiles:
    """A small finished run, kept in memory: every attack begins with the whole of it."""

    def __init__(self, folder: Path, index_only: bool = False) -> None:
        images = folder / "images"
        images.mkdir(parents=True, exist_ok=True)
        for number, size in enumerate(((20, 20), (30, 20))):
            seeded = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(seeded).save(images / f"{number}.png")
        self.rows = [{"id": "a", "image": "0.png"}, {"id": "b", "image": "1.png", "caption": _MARK}]
        self.rows += [{"id": "gone", "image": "gone.png"}, {"id": "again", "image": "0.png"}]
        self.manifest = images / "m.jsonl"
        self.manifest.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        out = folder.parent / "work" / folder.name / "out"  # as deep as the copies: the way to the images is the same
        shutil.rmtree(out, ignore_errors=True)
        settings = Settings(
            str(self.manifest), out, "kimi-k3", "cpu", "uint8", shard_size=5000, workers=1, index_only=index_only
        )
        prepare(settings, Quiet())
        self.files = {
            str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()
        }
        self.good = everything(out)
        self.pixels = {item[0] for item in self.good[0]} | {b""}

    def write(self, root: Path) -> None:
        """Put the run there, whole, and nothing else."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        (root / "shards").mkdir()
        for name, content in self.files.items():
            (root / name).write_bytes(content)


def everything(root: Path) -> tuple[list[tuple[Any, ...]], list[str], list[int]]:
    """All that FeatureStore gives of a run."""
    store = kimik3_prep.FeatureStore(root)
    items = [(item.pixel_values.numpy().tobytes(), item.grid_thw, item.num_tokens, item.row) for item in store]
    return items, [str(failure) for failure in store.failures], store.num_tokens.tolist()


def judge(run: StoredRunFiles, root: Path, damaged: str) -> str:
    """What verify and the readers make of a run with one damaged file.

    What verify passes reads as before; a pixel that comes out of a damaged index or plan is one of the run's.
    """
    try:
        findings = verify(root).problems
        named = {f.file for f in findings if f.file == damaged or "one of the two files is damaged" not in f.what}
    except PrepError as error:
        findings, named = (), {damaged if damaged in str(error) else f"{error}"}
    try:
        read = everything(root)
    except PrepError:
        read = None
    if not named and read != run.good:
        raise Fault(f"{damaged}: verify says that all is well, and FeatureStore gives something else")
    if named - {damaged}:
        raise Fault(f"{damaged} is damaged, and verify names {sorted(named - {damaged})[0]}")
    if read is not None and not damaged.endswith(".safetensors") and not {item[0] for item in read[0]} <= run.pixels:
        raise Fault(f"{damaged}: FeatureStore gives pixels that are no item's")
    return "named" if named else "no effect"


def attack_flips(run: StoredRunFiles) -> Callable[[int, Path], str]:
    """One bit of one file: seed by seed through every byte, a bit of each; then the next bits."""
    places = [(name, at) for name, content in run.files.items() for at in range(len(content))]

    def flip(seed: int, folder: Path) -> str:
        name, at = places[seed % len(places)]
        bit = (hash((name, at)) + seed // len(places)) % 8 if seed < 8 * len(places) else seed % 8
        root = folder / "out"
        if not root.exists():
            run.write(root)
        content = bytearray(run.files[name])
        content[at] ^= 1 << bit
        (root / name).write_bytes(content)
        try:
            return judge(run, root, name)
        finally:
            (root / name).write_bytes(run.files[name])

    return flip


def attack_runs(run: StoredRunFiles) -> Callable[[int, Path], str]:
    """One file of a run changed in any way, or something else in its place: verify, the readers, inspect, a resume."""
    names = list(run.files)

    def change(chance: Random, name: str) -> bytes:
        content = run.files[name]
        if name.endswith(".json"):
            value = changed_value(chance, json.loads(content))
            if isinstance(value, dict) and chance.random() < 0.5 and isinstance(value.get("facts"), dict):
                from kimik3_prep.output.recipe import fingerprint

                with contextlib.suppress(ValueError):
                    value["fingerprint"] = fingerprint(value["facts"])
            return as_json(chance, value)
        return changed_parquet(chance, content) if name.endswith(".parquet") else changed_shard(chance, content)

    def replace(chance: Random, path: Path, outside: Path) -> None:
        path.unlink()
        match chance.randrange(6):
            case 0:
                path.mkdir()
            case 1:
                path.symlink_to(outside)
            case 2:
                path.symlink_to("nowhere")
            case 3:
                path.symlink_to(path.name)
            case 4:
                os.mkfifo(path)
            case _:
                path.with_name(path.name + ".tmp").symlink_to(outside)

    def attack(seed: int, folder: Path) -> str:
        chance = Random(f"run {seed}")
        root, outside = folder / "out", folder / "outside"
        run.write(root)
        outside.write_bytes(b"outside")
        name = chance.choice(names)
        if chance.random() < 0.1:
            replace(chance, root / name, outside)
            exact = False
        else:
            (root / name).write_bytes(change(chance, name))
            exact = name != "run.json"
        outcome = _judge_loosely(run, root, name, exact)
        for path in (root, root / name):
            with contextlib.suppress(PrepError):
                inspect(path)
        if seed % _COMMAND_EVERY == 0:
            form = ("--format", chance.choice(("text", "json")))
            again = (
                "encode",
                run.manifest,
                "--config",
                "kimi-k3",
                "--backend",
                "cpu",
                "--dtype",
                "uint8",
                "--shard-size",
                5000,
            )
            again += ("-o", "out", "-j", 1, "--no-progress", *form)
            words: tuple[object, ...] = chance.choice(
                (
                    ("inspect", "out", *form),
                    ("inspect", root / name, *form),
                    ("inspect", "out", "--render", "pictures"),
                    ("inspect", f"out/{name}", "--render", "pictures"),
                    ("verify", "out", *form),
                    ("verify", "out", "--against-source", "--manifest", run.manifest, *form),
                    again,
                    (*again, "--retry-failed"),
                    (*again, "--overwrite"),
                    ("finish", "out", *form),
                )
            )
            if words[0] in ("encode", "finish") and chance.random() < 0.7:
                with contextlib.suppress(OSError):
                    (root / "index.parquet").unlink()
            command(folder, *words)
        _nothing_beside(folder, {"out", "outside", "pictures"})
        if outside.read_bytes() != b"outside":
            raise Fault(f"wrote through a link at {name}")
        return outcome

    return attack


def _judge_loosely(run: StoredRunFiles, root: Path, name: str, exact: bool) -> str:
    """As `judge`, where what verify names is not held against it: a changed file may contradict several others."""
    try:
        named = bool(verify(root).problems)
    except PrepError:
        named = True
    try:
        read = everything(root)
    except PrepError:
        read = None
    if not named and exact and read != run.good:
        raise Fault(f"{name}: verify says that all is well, and FeatureStore gives something else")
    if read is not None and not name.endswith(".safetensors") and not {item[0] for item in read[0]} <= run.pixels:
        raise Fault(f"{name}: FeatureStore gives pixels that are no item's")
    return "named" if named else "no effect"


def attacks(folder: Path) -> list[Attack]:
    """Every attack with inputs, ready to begin."""
    images = small_images()
    image = images["00-PNG-RGB"]
    run, index_only = StoredRunFiles(folder / "run"), StoredRunFiles(folder / "index-only", index_only=True)
    return [
        Attack("image", attack_images(images)),
        Attack("worker", attack_worker(images), seconds=120),
        Attack("features", attack_features()),
        Attack("config", attack_configs()),
        Attack("manifest", attack_manifests(image), seconds=60),
        Attack("flip", attack_flips(run)),
        Attack("flip-index-only", attack_flips(index_only)),
        Attack("run", attack_runs(run), seconds=60),
        Attack("run-index-only", attack_runs(index_only), seconds=60),
    ]
