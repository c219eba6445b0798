"""inspection.py: what is on disk, told in plain values."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
from conftest import Silent, picture, shard_format, write_manifest

from kimik3_prep.errors import InputError
from kimik3_prep.output.recipe import METADATA_KEY, canonical_json
from kimik3_prep.output.shard_file import ShardWriter
from kimik3_prep.reading import inspection
from kimik3_prep.reading.inspection import inspect
from kimik3_prep.run.prepare import Settings, prepare


def look(path: Path) -> dict[str, Any]:
    """Return the JSON document of `inspect`."""
    document: dict[str, Any] = json.loads(json.dumps(asdict(inspect(path)), allow_nan=False))
    return document


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: five images in four shards, one named twice; two failures, one alone in a fifth shard."""
    folder = tmp_path_factory.mktemp("run")
    rows: list[dict[str, Any]] = []
    for number, mode in enumerate(["RGB", "P", "RGB", "1", "L"]):
        picture(40 + 30 * number, 56, mode, number).save(folder / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png"})
    (folder / "cut.png").write_bytes((folder / "4.png").read_bytes()[:-200])
    rows.insert(2, {"id": "cut", "image": "cut.png"})
    rows += [{"id": "gone", "image": "gone.png"}, {"id": "again", "image": "0.png", "q": 1}]
    manifest = write_manifest(folder / "m.jsonl", rows)
    prepare(Settings(str(manifest), folder / "out", "kimi-k3", shard_size=40 * 588 * 4), Silent())
    return folder / "out"


@pytest.fixture
def copy(output: Path, tmp_path: Path) -> Path:
    """A copy of the run, to break."""
    for path in output.rglob("*.*"):
        target = tmp_path / "out" / path.relative_to(output)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return tmp_path / "out"


def write_shard(path: Path, dtype: str, values: np.ndarray[Any, Any], grids: list[tuple[int, int, int]]) -> Path:
    """A shard of 1 x 1 pixel patches that holds `values`, three a patch, as the dtype's bit patterns."""
    writer = ShardWriter(path, shard_format(dtype, 1, {"format": 1, "dtype": dtype}), len(grids), len(values) // 3)
    os.pwrite(writer.descriptor, values.tobytes(), writer.offset(0))
    starts = np.cumsum([0, *(t * h * w for t, h, w in grids)])
    writer.finish([(grid, int(start), int(np.prod(grid))) for grid, start in zip(grids, starts, strict=False)])
    return path


# --- a shard ------------------------------------------------------------------------------------------------------


def test_a_shard(output: Path) -> None:
    path = output / "shards" / "cpu-00000.safetensors"
    found = look(path)
    metadata = found.pop("metadata")
    low, high = found.pop("value_range")
    assert -1 <= low < high <= 1
    tensors = safetensors.numpy.load_file(path)
    assert (low, high) == (tensors["pixel_values"].min(), tensors["pixel_values"].max())
    assert found == {
        "kind": "shard",
        "path": str(path),
        "size": path.stat().st_size,
        "tensors": {
            "grid_thws": {"dtype": "I64", "shape": [2, 3], "bytes": 48},
            "pixel_values": {"dtype": "F32", "shape": [40, 3, 14, 14], "bytes": 40 * 588 * 4},
        },
        "not_finite": 0,
        "pictures": None,
        "rows": [
            {"row": 0, "grid_thw": [1, 4, 4], "patch_start": 0, "ids": ["n0", "again"]},
            {"row": 1, "grid_thw": [1, 4, 6], "patch_start": 16, "ids": ["n1"]},
        ],
    }
    fingerprint = json.loads((output / "run.json").read_text())["fingerprint"]
    assert metadata == {
        **{"format": 1, "fingerprint": fingerprint, "dtype": "float32", "group": "cpu"},
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "patch_size": 14, "merge_size": 2},
    }


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("float32", np.array([-1, 0.25, 1], "<f4"), [-1, 1]),
        ("float16", np.array([-2.5, 0, 0.5], "<f2"), [-2.5, 0.5]),
        ("bfloat16", np.array([0xBF80, 0x0000, 0x3F00], "<u2"), [-1, 0.5]),
        ("uint8", np.array([3, 255, 7], "u1"), [3, 255]),  # levels, before normalisation
    ],
)
def test_the_value_range_of_each_dtype(
    tmp_path: Path, dtype: str, values: np.ndarray[Any, Any], expected: list[float]
) -> None:
    found = look(write_shard(tmp_path / "cpu-00000.safetensors", dtype, values, [(1, 1, 1)]))
    assert (found["value_range"], found["not_finite"]) == (expected, 0)


def test_the_value_range_is_of_all_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_CHUNK", 2)
    values = np.zeros(21, "<f4")
    values[4], values[20] = -3, 5
    found = look(write_shard(tmp_path / "cpu-00000.safetensors", "float32", values, [(1, 1, 7)]))
    assert found["value_range"] == [-3, 5]


def test_what_is_no_number_is_counted(tmp_path: Path) -> None:
    """Features made elsewhere may hold anything; JSON has no word for NaN."""
    values = np.array([np.nan, -1, np.inf, 0.5, -np.inf, 0], "<f4")
    found = look(write_shard(tmp_path / "local-00000.safetensors", "float32", values, [(1, 1, 2)]))
    assert (found["value_range"], found["not_finite"]) == ([-1, 0.5], 3)
    found = look(write_shard(tmp_path / "local-00001.safetensors", "float32", values[[0, 2, 4]], [(1, 1, 1)]))
    assert (found["value_range"], found["not_finite"]) == (None, 3)


def test_an_empty_shard(tmp_path: Path) -> None:
    found = look(write_shard(tmp_path / "cpu-00000.safetensors", "float16", np.zeros(0, "<f2"), []))
    assert (found["value_range"], found["rows"]) == (None, [])
    assert found["tensors"]["pixel_values"]["shape"] == [0, 3, 1, 1]


def test_a_shard_without_its_index_has_no_ids(copy: Path) -> None:
    (copy / "shards" / "cpu-00000.parquet").unlink()
    found = look(copy / "shards" / "cpu-00000.safetensors")
    assert [(row["grid_thw"], row["ids"]) for row in found["rows"]] == [([1, 4, 4], []), ([1, 4, 6], [])]


def test_only_the_first_images_are_listed(tmp_path: Path) -> None:
    found = look(write_shard(tmp_path / "cpu-00000.safetensors", "uint8", np.zeros(150, "u1"), [(1, 1, 1)] * 50))
    assert [row["row"] for row in found["rows"]] == list(range(10))


def test_a_foreign_table_beside_a_shard_is_said(copy: Path) -> None:
    pq.write_table(pa.table({"id": ["a"]}), copy / "shards" / "cpu-00000.parquet")
    with pytest.raises(InputError, match=r"cpu-00000\.parquet: not an index of kimik3-prep: it has no column 'row'"):
        inspect(copy / "shards" / "cpu-00000.safetensors")


GRIDS = np.array([[1, 1, 1]])
PIXELS = np.zeros((1, 3, 1, 1), np.float32)
OURS = canonical_json({"format": 1})


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ({"weight": PIXELS}, None, "its tensors are weight, not pixel_values and grid_thws"),
        ({"pixel_values": PIXELS}, OURS, "its tensors are pixel_values, not"),
        ({"pixel_values": PIXELS, "grid_thws": GRIDS}, None, "its metadata has no kimik3_prep"),
        ({"pixel_values": PIXELS, "grid_thws": GRIDS}, "[]", "its metadata has no kimik3_prep"),
        ({"pixel_values": PIXELS, "grid_thws": GRIDS}, "{", "not a shard of kimik3-prep"),
        ({"pixel_values": PIXELS, "grid_thws": GRIDS}, '{"format":2}', "its format is 2, this version reads format 1"),
        ({"pixel_values": PIXELS[0], "grid_thws": GRIDS}, OURS, r"pixel_values is F32 \[3, 1, 1\]"),
        ({"pixel_values": PIXELS.astype(np.int32), "grid_thws": GRIDS}, OURS, "pixel_values is I32"),
        ({"pixel_values": PIXELS, "grid_thws": GRIDS[0]}, OURS, r"grid_thws is I64 \[3\]"),
        ({"pixel_values": PIXELS, "grid_thws": GRIDS.astype(np.int32)}, OURS, r"grid_thws is I32 \[1, 3\]"),
    ],
)
def test_a_safetensors_file_of_somebody_elses(
    tmp_path: Path, tensors: dict[str, Any], metadata: str | None, words: str
) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path, None if metadata is None else {METADATA_KEY: metadata})
    with pytest.raises(InputError, match=words) as caught:
        inspect(path)
    assert caught.value.exit_code == 2


# --- an index -----------------------------------------------------------------------------------------------------


def test_an_index(output: Path) -> None:
    found = look(output / "index.parquet")
    first, columns, largest = found.pop("first"), found.pop("columns"), found.pop("largest")
    assert list(columns.items())[:3] == [("item", "int64"), ("line", "int64"), ("id", "string")]
    assert [row["id"] for row in first] == ["n0", "n1", "cut", "n2", "n3", "n4", "gone", "again"]
    assert (first[7]["extra"], first[6]["width"]) == ('{"q":1}', None)
    failures = found.pop("failures")
    assert [(row["line"], row["id"], row["error_code"]) for row in failures] == [
        (3, "cut", "truncated"),
        (7, "gone", "not_found"),
    ]
    assert all(row["error_message"] for row in failures)
    assert [(row["id"], row["num_tokens"], row["rows"]) for row in largest] == [
        *(("n4", 12, 1), ("n3", 10, 1), ("n2", 8, 1), ("n1", 6, 1), ("n0", 4, 2)),
    ]
    assert largest[4] == {
        **{"item": 0, "line": 1, "id": "n0", "num_tokens": 4, "width": 40, "height": 56, "shard": "cpu-00000"},
        **{"grid_thw": [1, 4, 4], "rows": 2},
    }
    assert found == {
        "kind": "index",
        "path": str(output / "index.parquet"),
        "rows": 8,
        "num_tokens": 4 + 6 + 8 + 10 + 12 + 4,
        "images": 5,
        "histogram": [[16, 5]],
        "by_status": {"ok": 6, "failed": 2},
        "by_group": {"cpu": 8},
        "by_mode": {"RGB": 3, "L": 2, "1": 1, "P": 1, "unknown": 1},
        "by_format": {"PNG": 7, "unknown": 1},
        "by_error_code": {"not_found": 1, "truncated": 1},
        "failures_not_shown": 0,
    }


def test_the_largest_are_five_stored_images_in_the_order_of_the_manifest(output: Path, tmp_path: Path) -> None:
    """One image that every row names would else fill the list; equal ones come as the manifest has them."""
    table = pq.read_table(output / "index.parquet")
    ok = table.filter(pa.array([status == "ok" for status in table["status"].to_pylist()]))
    many = pa.concat_tables([ok] * 4)
    columns = {"shard": ["cpu-00000"] * 24, "row": [*range(18), *[18] * 6], "item": [*range(23, -1, -1)]}
    for name, values in (columns | {"num_tokens": [70] * 24}).items():
        many = many.set_column(many.column_names.index(name), name, pa.array(values))
    pq.write_table(many, tmp_path / "index.parquet")
    found = look(tmp_path / "index.parquet")
    assert [(row["item"], row["rows"]) for row in found["largest"]] == [(0, 6), (6, 1), (7, 1), (8, 1), (9, 1)]
    assert found["histogram"] == [[16, 0], [32, 0], [64, 0], [128, 19]]


def test_a_shards_own_index(output: Path) -> None:
    found = look(output / "shards" / "cpu-00001.parquet")
    assert (found["kind"], found["rows"], found["by_status"]) == ("index", 1, {"failed": 1})


def test_many_failures_are_counted_and_the_first_shown(output: Path, tmp_path: Path) -> None:
    failed = pq.read_table(output / "index.parquet").slice(6, 1)
    pq.write_table(pa.concat_tables([failed] * 70), tmp_path / "index.parquet")
    found = look(tmp_path / "index.parquet")
    assert (len(found["failures"]), found["failures_not_shown"], found["num_tokens"]) == (50, 20, 0)
    assert len(found["first"]) == 10


def test_locally_preprocessed_items_are_a_group_of_their_own(output: Path, tmp_path: Path) -> None:
    table = pq.read_table(output / "index.parquet")
    for name, value in (("path", "local"), ("backend", None)):
        column = [value, *table[name].to_pylist()[1:]]
        table = table.set_column(table.column_names.index(name), name, pa.array(column, pa.string()))
    pq.write_table(table, tmp_path / "index.parquet")
    assert look(tmp_path / "index.parquet")["by_group"] == {"cpu": 7, "local": 1}


def test_a_plan_is_no_index(output: Path) -> None:
    with pytest.raises(InputError, match="not an index of kimik3-prep: it has no column 'status'"):
        inspect(output / "plan.parquet")


def test_a_parquet_file_of_somebody_elses(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "train.parquet")
    with pytest.raises(InputError, match="it has no column 'item'"):
        inspect(tmp_path / "train.parquet")


# --- an output folder ---------------------------------------------------------------------------------------------


def test_a_finished_output(output: Path) -> None:
    found = look(output)
    record = json.loads((output / "run.json").read_text())
    assert (found["kind"], found["path"], found["finished"], found["planned"]) == ("output", str(output), True, None)
    assert found["dtype"] == "float32"
    assert found["settings"].items() >= record["facts"].items()
    assert (found["fingerprint"], found["versions"]) == (record["fingerprint"], record["versions"])
    assert {name: shard["patches"] for name, shard in found["shards"].items()} == {
        **{"cpu-00000": 40, "cpu-00001": 0, "cpu-00002": 32, "cpu-00003": 40, "cpu-00004": 48}
    }
    assert found["size"] == sum(shard["bytes"] for shard in found["shards"].values())
    assert found["size"] == sum(path.stat().st_size for path in output.rglob("*.safetensors"))
    assert (found["rows"], found["by_status"]) == (8, {"ok": 6, "failed": 2})


def test_an_unfinished_output_says_how_far_it_came(copy: Path) -> None:
    (copy / "index.parquet").unlink()
    (copy / "shards" / "cpu-00001.parquet").unlink()
    (copy / "shards" / "cpu-00002.safetensors").unlink()
    (copy / "shards" / "model.safetensors").write_bytes(b"not ours")
    found = look(copy)
    assert (found["finished"], found["planned"]) == (False, {"rows": 8, "shards": 5})
    assert sorted(found["shards"]) == ["cpu-00000", "cpu-00003", "cpu-00004"]
    assert (found["rows"], found["by_status"]) == (5, {"ok": 5})


def test_an_output_that_was_only_begun(copy: Path) -> None:
    for path in copy.rglob("*.*"):
        if path.name not in ("run.json", "plan.parquet"):
            path.unlink()
    found = look(copy)
    assert (found["rows"], found["shards"], found["size"]) == (0, {}, 0)
    assert found["planned"] == {"rows": 8, "shards": 5}
    (copy / "plan.parquet").unlink()
    assert look(copy)["planned"] is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"])
def test_an_output_with_a_damaged_shard_says_which(copy: Path, content: bytes) -> None:
    (copy / "shards" / "cpu-00001.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"cpu-00001\.safetensors: not a shard"):
        inspect(copy)


# --- neither ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "nothing.safetensors", "nothing.parquet", "nothing/index.parquet"])
def test_a_path_that_does_not_exist(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="does not exist; expected a shard"):
        inspect(tmp_path / name)


def test_other_files_and_folders(output: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is none of these"):
        inspect(output / "run.json")
    with pytest.raises(InputError, match=r"no run\.json in it; expected a folder that"):
        inspect(output / "shards")
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(InputError, match=r"no run\.json"):
        inspect(tmp_path / "folder.parquet")


@pytest.mark.parametrize("name", ["pipe.safetensors", "pipe.parquet"])
def test_a_named_pipe_does_not_hang(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="is no regular file"):
        inspect(tmp_path / name)


def test_an_index_without_features_tells_its_sizes(tmp_path: Path) -> None:
    for name, size in (("a", 280), ("b", 56)):
        picture(size, size).save(tmp_path / f"{name}.png")
    rows = [{"id": "0", "image": "a.png"}, {"id": "1", "image": "b.png"}, {"id": "2", "image": "a.png"}]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    prepare(Settings(str(manifest), tmp_path / "out", "kimi-k3", index_only=True), Silent())
    found = look(tmp_path / "out")
    assert (found["images"], found["num_tokens"], found["shards"]) == (2, 204, {})
    assert [(large["id"], large["num_tokens"], large["rows"], large["shard"]) for large in found["largest"]] == [
        ("0", 100, 2, None),
        ("1", 4, 1, None),
    ]
