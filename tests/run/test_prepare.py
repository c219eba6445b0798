"""prepare.py: whole runs through the library's front door, and the promises about bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import reference
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
from conftest import GOLDEN, Silent, encode, golden_cases, local_row, picture, tree, write_manifest
from PIL import Image

from kimik3_prep.checkpoint.config import PreprocessorConfig
from kimik3_prep.checkpoint.levels import DTYPES, level_table
from kimik3_prep.errors import InputError, PlanMismatch, TooManyFailures
from kimik3_prep.output import shard_file
from kimik3_prep.output import tables as store
from kimik3_prep.output.folder import Output
from kimik3_prep.pixels.cpu import write_patches
from kimik3_prep.run import workers as workers_module
from kimik3_prep.run.check import Settings, default_output
from kimik3_prep.run.prepare import dry_run, prepare

CASES = golden_cases("images")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Forty pictures of several modes and sizes, two of them repeats, three that fail."""
    folder = tmp_path / "set"
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for number, mode in enumerate(["RGB", "RGBA", "L", "P", "CMYK", "1", "LA"] * 5):
        kind = {"CMYK": "tif", "LA": "png"}.get(mode, "png")
        name = f"{number:02d}.{kind}"
        picture(20 + 13 * number, 200 - 4 * number, mode, number).save(folder / name)
        rows.append({"id": f"item-{number}", "image": name, "caption": f"no {number}"})
    (folder / "cut.png").write_bytes((folder / "07.png").read_bytes()[:-900])
    (folder / "late.jpg").write_bytes((GOLDEN / "images" / "jpeg_trunc.jpg").read_bytes())
    rows.insert(3, {"id": "gone", "image": "gone.png"})
    rows.insert(9, {"id": "late", "image": "late.jpg"})
    rows.insert(20, {"id": "cut", "image": "cut.png"})
    rows.append({"id": "again", "image": "./05.png", "note": ["x"]})
    rows.append({"id": "once-more", "image": "05.png"})
    return write_manifest(folder / "manifest.jsonl", rows)


def test_golden_set_end_to_end_in_every_dtype(golden: Path, tmp_path: Path) -> None:
    rows = [{"id": case["id"], "image": case["file"]} for case in CASES]
    manifest = write_manifest(golden / "m.jsonl", rows)
    expected = {case["id"]: case for case in CASES}
    config = work_config()
    table = level_table(config.image_mean, config.image_std)[0]
    for dtype in DTYPES:
        out = tmp_path / dtype
        summary = encode(manifest, out, dtype=dtype, workers=2, shard_size=150_000_000)
        assert summary.failed == sum(case["expect"] == "error" for case in CASES)
        index = pq.read_table(out / "index.parquet").to_pylist()
        assert [row["id"] for row in index] == [case["id"] for case in CASES]
        shards = {
            name: safetensors.torch.load_file(out / "shards" / f"{name}.safetensors")
            for name in {row["shard"] for row in index if row["shard"]}
        }
        for row in index:
            case = expected[row["id"]]
            assert row["status"] == {"ok": "ok", "error": "failed"}[case["expect"]]
            if row["status"] == "failed":
                assert row["error_code"]
                assert row["error_message"]
                assert row["shard"] is row["row"] is row["patch_start"] is row["num_tokens"] is None
                continue
            tensors = shards[row["shard"]]
            assert tensors["grid_thws"][row["row"]].tolist() == case["grid_thw"]
            assert [row["grid_t"], row["grid_h"], row["grid_w"]] == case["grid_thw"]
            stored = tensors["pixel_values"][row["patch_start"] : row["patch_start"] + row["patch_count"]]
            raw = stored.contiguous().view(torch.uint8).numpy().tobytes()
            assert row["checksum"] == xxhash.xxh3_128_hexdigest(raw)
            if dtype == "float32":
                assert hashlib.sha256(raw).hexdigest() == case["sha256"]
            elif dtype == "uint8":
                assert hashlib.sha256(table[stored.numpy()].tobytes()).hexdigest() == case["sha256"]
            else:
                # The run's float32 shards hold the golden bytes; a narrower dtype holds those, rounded once.
                assert torch.equal(stored, float32_of(tmp_path, row).to(stored.dtype))


def float32_of(tmp_path: Path, row: dict[str, Any]) -> torch.Tensor:
    index = pq.read_table(tmp_path / "float32" / "index.parquet").to_pylist()[row["item"]]
    with safetensors.safe_open(tmp_path / "float32" / "shards" / f"{index['shard']}.safetensors", "pt") as file:
        part: torch.Tensor = file.get_slice("pixel_values")[
            index["patch_start"] : index["patch_start"] + index["patch_count"]
        ]
        return part


def work_config() -> Any:
    from kimik3_prep.checkpoint.config import load_config, published_path

    return load_config(published_path())[0]


def test_workers_and_folders_change_no_byte(mixed: Path, tmp_path: Path) -> None:
    trees = []
    for number, workers in enumerate([1, 8, 3]):
        moved = tmp_path / f"elsewhere-{number}"
        shutil.copytree(mixed.parent, moved, copy_function=shutil.copy2)
        encode(moved / "manifest.jsonl", tmp_path / f"out-{number}", workers=workers, shard_size=2_000_000)
        trees.append(tree(tmp_path / f"out-{number}"))
    assert trees[0] == trees[1] == trees[2]
    assert sum(name.endswith(".safetensors") for name in trees[0]) > 3


def test_every_row_has_one_index_row_and_repeats_share_a_span(mixed: Path, tmp_path: Path) -> None:
    summary = encode(mixed, tmp_path / "out", workers=2, shard_size=3_000_000)
    assert (summary.rows, summary.ok, summary.failed, summary.images) == (40, 37, 3, 35)
    index = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()
    assert [row["item"] for row in index] == list(range(40))
    codes = {row["id"]: row["error_code"] for row in index if row["status"] == "failed"}
    assert codes == {"gone": "not_found", "late": "truncated", "cut": "truncated"}
    same = [row for row in index if row["id"] in ("item-5", "again", "once-more")]
    assert len({(row["shard"], row["row"], row["patch_start"], row["checksum"]) for row in same}) == 1
    assert [row["extra"] for row in same] == ['{"caption":"no 5"}', '{"note":["x"]}', None]
    total = 0
    for path in sorted((tmp_path / "out" / "shards").glob("*.safetensors")):
        tensors = safetensors.numpy.load_file(path)
        assert tensors["grid_thws"].prod(axis=1).sum() == len(tensors["pixel_values"])
        total += len(tensors["grid_thws"])
    assert total == 35


def test_dedupe_off_stores_every_row(mixed: Path, tmp_path: Path) -> None:
    assert encode(mixed, tmp_path / "out", dedupe="off").images == 37


def test_features_are_the_references(mixed: Path, tmp_path: Path) -> None:
    from PIL import Image

    encode(mixed, tmp_path / "out", workers=2, shard_size=3_000_000)
    for row in pq.read_table(tmp_path / "out" / "index.parquet").to_pylist():
        if row["status"] == "failed":
            continue
        image = Image.open(mixed.parent / row["image"])
        tensors = safetensors.numpy.load_file(tmp_path / "out" / "shards" / f"{row['shard']}.safetensors")
        stored = tensors["pixel_values"][row["patch_start"] : row["patch_start"] + row["patch_count"]]
        assert np.array_equal(stored, reference.features(image, reference.PUBLISHED)), row["id"]


def test_a_second_identical_run_does_nothing(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = encode(mixed, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    monkeypatch.setattr(workers_module.Workers, "run", None)
    second = encode(mixed, tmp_path / "out")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert (second.rows, second.ok, second.failed, second.skipped) == (first.rows, first.ok, first.failed, None)


def test_a_run_goes_on_from_what_is_committed(mixed: Path, tmp_path: Path) -> None:
    encode(mixed, tmp_path / "whole", shard_size=2_000_000)
    encode(mixed, tmp_path / "out", shard_size=2_000_000)
    out = tmp_path / "out"
    (out / "index.parquet").unlink()
    (out / "shards" / "cpu-00001.parquet").unlink()  # a shard without its index: killed between the two
    (out / "shards" / "cpu-00002.parquet").unlink()
    (out / "shards" / "cpu-00002.safetensors").rename(out / "shards" / "cpu-00002.safetensors.tmp")
    kept = (out / "shards" / "cpu-00000.safetensors").stat().st_mtime_ns
    summary = encode(mixed, out, shard_size=2_000_000, workers=2)
    assert summary.skipped == summary.shards - 2
    assert (out / "shards" / "cpu-00000.safetensors").stat().st_mtime_ns == kept
    assert tree(out) == tree(tmp_path / "whole")


def test_a_resume_does_not_probe_again(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode(mixed, tmp_path / "out")
    (tmp_path / "out" / "index.parquet").unlink()
    monkeypatch.setattr("kimik3_prep.run.planning.ProbeImages", None)
    encode(mixed, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "uint8"}, "dtype"),
        ({"shard_size": 1_000_000}, "shard_size"),
        ({"dedupe": "off"}, "dedupe"),
        ({"limit": 3}, "limit"),
        ({"max_pixels": 1000}, "max_pixels"),
    ],
)
def test_other_settings_are_refused_by_name(mixed: Path, tmp_path: Path, change: dict[str, Any], field: str) -> None:
    encode(mixed, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(PlanMismatch) as caught:
        encode(mixed, tmp_path / "out", **change)
    assert any(problem.where.endswith(field) for problem in caught.value.problems)
    assert caught.value.exit_code == 2
    assert tree(tmp_path / "out") == before
    encode(mixed, tmp_path / "out", overwrite=True, **change)


def test_another_manifest_is_refused(mixed: Path, tmp_path: Path) -> None:
    encode(mixed, tmp_path / "out")
    mixed.write_text(mixed.read_text() + '{"id": "new", "image": "01.png"}\n')
    with pytest.raises(PlanMismatch, match="manifest"):
        encode(mixed, tmp_path / "out")


def test_a_file_that_changes_after_planning_fails_alone(mixed: Path, tmp_path: Path) -> None:
    encode(mixed, tmp_path / "out", shard_size=2_000_000)
    (tmp_path / "out" / "index.parquet").unlink()
    (tmp_path / "out" / "shards" / "cpu-00000.parquet").unlink()
    os.utime(mixed.parent / "00.png")
    encode(mixed, tmp_path / "out", shard_size=2_000_000)
    index = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()
    assert index[0]["error_code"] == "source_changed"
    assert index[1]["status"] == "ok"


def test_promises_of_the_manifest_are_kept(tmp_path: Path) -> None:
    picture(50, 40).save(tmp_path / "a.png")
    right = "sha256:" + hashlib.sha256((tmp_path / "a.png").read_bytes()).hexdigest()
    rows = [
        {"id": "right", "image": "a.png", "content_hash": right, "width": 50, "height": 40},
        {"id": "hash", "image": "a.png", "content_hash": "sha256:" + "0" * 64},
        {"id": "size", "image": "a.png", "width": 40, "height": 50},
        {"id": "close", "image": "a.png", "width": 51, "height": 40},  # the same grid, but not the same image
    ]
    encode(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out")
    index = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()
    assert [row["error_code"] for row in index] == [
        None,
        "content_hash_mismatch",
        "size_mismatch",
        "size_mismatch",
    ]
    assert index[0]["content_hash"] == right


def test_on_error_fail_stops_and_keeps_what_is_committed(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(TooManyFailures, match="--on-error fail") as caught:
        encode(mixed, tmp_path / "out", on_error="fail")
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out" / "index.parquet").exists()
    encode(mixed, tmp_path / "out")
    encode(mixed, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_the_last_item_may_be_the_one_too_many(tmp_path: Path) -> None:
    for name in "ab":
        picture(50, 40).save(tmp_path / f"{name}.png")
    os.truncate(tmp_path / "b.png", 200)
    manifest = write_manifest(tmp_path / "m.jsonl", [{"image": "a.png"}, {"image": "b.png"}])
    with pytest.raises(TooManyFailures, match="--on-error fail"):
        encode(manifest, tmp_path / "out", on_error="fail")
    assert not (tmp_path / "out" / "index.parquet").exists()


def test_max_failures(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(TooManyFailures, match="--max-failures 2"):
        encode(mixed, tmp_path / "out", max_failures=2)
    assert encode(mixed, tmp_path / "out", max_failures=3).failed == 3


def test_missing_files_stop_the_planning_before_all_are_asked_for(tmp_path: Path) -> None:
    picture(50, 40).save(tmp_path / "there.png")
    rows = [{"image": "there.png"}, *({"image": f"gone-{number}.png"} for number in range(300))]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    with pytest.raises(TooManyFailures, match=r"stopped at 11 failed items .*--max-failures 10") as caught:
        encode(manifest, tmp_path / "out", max_failures=10, workers=1)
    assert caught.value.failed == 11
    assert not (tmp_path / "out" / "plan.parquet").exists()
    assert encode(manifest, tmp_path / "out").failed == 300  # the same folder, without the option
    settings = Settings(manifest=str(manifest), output=tmp_path / "dry", config="kimi-k3", max_failures=10)
    assert dry_run(settings, Silent()).failed == 300  # it counts all that would fail


def test_files_that_break_their_promise_stop_the_planning_too(tmp_path: Path) -> None:
    rows = []
    for number in range(100):
        picture(20, 20, seed=number).save(tmp_path / f"{number}.png")
        rows.append({"image": f"{number}.png", "content_hash": "sha256:" + "0" * 64})
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    more: dict[str, Any] = {"dedupe": "content", "max_failures": 10}
    reporter = Silent()
    with pytest.raises(TooManyFailures, match=r"stopped at 11 failed items .*content_hash_mismatch") as caught:
        prepare(Settings(str(manifest), tmp_path / "out", "kimi-k3", **more), reporter)
    assert (caught.value.failed, reporter.done, reporter.failed) == (11, 11, 11)
    assert not (tmp_path / "out" / "plan.parquet").exists()


def test_a_run_record_that_is_a_link_to_nothing_is_named(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").symlink_to("nowhere.json")
    with pytest.raises(InputError, match=r"its run.json is a link to nowhere.json, where there is no file"):
        encode(mixed, tmp_path / "out")


@pytest.mark.parametrize("name", ["cpu-00000/../../../x", "../../x", "/x", "", "cpu-00001.safetensors"])
def test_a_plan_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """The plan is sealed: whoever wrote the name has sealed it anew."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    picture(50, 40).save(folder / "a.png")
    manifest = write_manifest(folder / "m.jsonl", [{"image": "a.png"}])
    encode(manifest, folder / "out")
    output = Output(folder / "out")
    (plan,) = output.read_plan()
    output.take_back(["cpu-00000"])
    at = plan.schema.get_field_index("shard")
    output.write_plan(plan.set_column(at, plan.schema.field(at), [[name]]))
    before = tree(tmp_path)
    with pytest.raises(InputError) as caught:
        encode(manifest, folder / "out")
    assert f"out: names the shard {name!r}; expected a name like cpu-00000" in str(caught.value)
    assert tree(tmp_path) == before


def test_a_stop_leaves_no_temporary_file(mixed: Path, tmp_path: Path) -> None:
    class Impatient(Silent):
        def advance(self, images: int, pixels: int, size: int, failed: int) -> None:
            super().advance(images, pixels, size, failed)
            if self.phases[-1][0] == "images" and size:
                raise KeyboardInterrupt

    settings = Settings(str(mixed), tmp_path / "out", "kimi-k3", workers=2, shard_size=2_000_000)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, Impatient())
    assert (tmp_path / "out" / "plan.parquet").exists()
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_signal_while_a_shard_is_created_leaves_no_temporary_file(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = shard_file.create
    seen: list[Path] = []

    def interrupted(path: Path) -> int:
        seen.append(path)
        descriptor = create(path)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return descriptor

    monkeypatch.setattr(shard_file, "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(Settings(str(mixed), tmp_path / "out", "kimi-k3", workers=1, shard_size=2_000_000), Silent())
    assert len(seen) == 2
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_problems_of_config_and_manifest_come_together(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"media_proc_cfg": {"patch_size": "14"}}')
    manifest = write_manifest(tmp_path / "m.jsonl", [{"image": "a.png", "backend": "cuda"}, {"video": "x.mp4"}])
    with pytest.raises(InputError) as caught:
        prepare(Settings(manifest=str(manifest), output=tmp_path / "out"), Silent())
    text = str(caught.value)
    for word in ("missing deferred-preprocessing config", "patch_size", "m.jsonl:1", 'was "gpu" meant', "m.jsonl:2"):
        assert word in text
    assert not (tmp_path / "out").exists()


@pytest.fixture
def three_paths(mixed: Path) -> Path:
    """The mixed set with every path: rows for the cpu, for the gpu, and locally preprocessed ones."""
    import json

    rows = [json.loads(line) for line in mixed.read_text().splitlines()]
    for number, row in enumerate(rows):
        row.update([{}, {"backend": "cpu"}, {"backend": "gpu"}][number % 3])
    rows.insert(5, local_row(mixed.parent, "a.safetensors", picture(100, 70)))
    rows.insert(11, local_row(mixed.parent, "b.npy", picture(30, 170, seed=1), note="made elsewhere"))
    bad = local_row(mixed.parent, "bad.npy", picture(30, 170, seed=1))
    rows.insert(14, {**bad, "grid_thw": [1, 2, 2]})
    rows.append({"id": "b-again", "features": "./b.npy", "grid_thw": rows[11]["grid_thw"]})
    return write_manifest(mixed.parent / "three.jsonl", rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_manifest_that_mixes_all_paths_just_works(three_paths: Path, dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = encode(three_paths, out, device="cpu", workers=2, shard_size=3_000_000, dtype=dtype, batch_bytes=100_000)
    assert (summary.rows, summary.failed) == (44, 4)
    index = pq.read_table(out / "index.parquet").to_pylist()
    assert [row["item"] for row in index] == list(range(44))
    for row in index:
        if row["status"] == "failed":
            continue
        group = row["backend"] or "local"
        assert row["shard"].startswith(f"{group}-")
        assert (row["path"] == "local") == (group == "local")
        tensors = safetensors.torch.load_file(out / "shards" / f"{row['shard']}.safetensors")
        assert tensors["grid_thws"].prod(1).sum() == len(tensors["pixel_values"])
        assert tensors["grid_thws"][row["row"]].tolist() == [row["grid_t"], row["grid_h"], row["grid_w"]]
    assert {row["id"]: row["error_code"] for row in index}["bad.npy"] == "bad_features"
    local = {row["id"]: row for row in index if row["path"] == "local" and row["status"] == "ok"}
    assert set(local) == {"a.safetensors", "b.npy", "b-again"}
    assert local["b.npy"]["patch_start"] == local["b-again"]["patch_start"]
    assert local["b.npy"]["content_hash"].startswith("sha256:")
    # Whatever path an item takes, its bytes are those of the CPU backend.
    pixels = {row["item"]: row["checksum"] for row in index if row["path"] == "deferred" and row["status"] == "ok"}
    one = tmp_path / "one"
    text = three_paths.read_text().replace('"backend": "gpu"', '"backend": "cpu"')
    (three_paths.parent / "one.jsonl").write_text(text)
    encode(three_paths.parent / "one.jsonl", one, dtype=dtype)
    for row in pq.read_table(one / "index.parquet").to_pylist():
        assert pixels.get(row["item"], row["checksum"]) == row["checksum"]


def test_the_gpu_backends_shards_are_the_cpu_backends(mixed: Path, tmp_path: Path) -> None:
    for backend in ("cpu", "gpu"):
        encode(mixed, tmp_path / backend, backend=backend, device="cpu", workers=2, shard_size=3_000_000)
    shards = sorted((tmp_path / "cpu" / "shards").glob("*.safetensors"))
    assert len(shards) > 2
    for path in shards:
        twin = tmp_path / "gpu" / "shards" / path.name.replace("cpu-", "gpu-")
        left, right = (safetensors.numpy.load_file(each) for each in (path, twin))
        assert left["pixel_values"].tobytes() == right["pixel_values"].tobytes()
        assert left["grid_thws"].tobytes() == right["grid_thws"].tobytes()


def test_batches_and_workers_change_no_byte_of_the_gpu_backend(three_paths: Path, tmp_path: Path) -> None:
    trees = []
    for workers, batch_bytes in ((1, 1), (8, 50_000), (2, 1 << 30)):
        out = tmp_path / f"{workers}"
        encode(three_paths, out, backend="gpu", device="cpu", workers=workers, batch_bytes=batch_bytes)
        trees.append(tree(out))
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_missing_device_is_said_before_any_work(three_paths: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--device cpu runs the same kernels") as caught:
        encode(three_paths, tmp_path / "out")
    assert caught.value.problems[0].where == f"{three_paths}:3"
    with pytest.raises(InputError, match="--backend gpu"):
        encode(three_paths, tmp_path / "out", backend="gpu", device="cuda:3")
    assert not (tmp_path / "out").exists()


def test_grids_that_the_merge_does_not_divide_are_named(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "features": "a.npy", "grid_thw": [1, 3, 4]},
        {"id": "b", "features": "b.npy", "grid_thw": [1, 4, 5]},
    ]
    with pytest.raises(InputError, match="that 2 divides") as caught:
        encode(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out", on_missing="record")
    assert [problem.where[-1] for problem in caught.value.problems] == ["1", "2"]


def test_no_config_is_said_with_the_places_looked_at(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.jsonl", [{"image": "a.png"}])
    with pytest.raises(InputError, match="needs an image processor") as caught:
        prepare(Settings(manifest=str(manifest), output=tmp_path / "out"), Silent())
    assert str(tmp_path / "preprocessor_config.json") in str(caught.value)


def test_unknown_url_schemes_are_said_before_any_work(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.jsonl", [{"image": "nope://a.png"}, {"image": "nope://b.png"}])
    with pytest.raises(InputError, match="nope://") as caught:
        encode(manifest, tmp_path / "out")
    assert caught.value.total == 1


def test_a_dry_run_tells_and_writes_nothing(mixed: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    summary = dry_run(Settings(manifest=str(mixed), output=tmp_path / "out", config="kimi-k3"), Silent())
    assert tree(tmp_path) == before
    full = encode(mixed, tmp_path / "out", dedupe="path")
    assert (summary.rows, summary.failed, summary.shards) == (40, 1, {"cpu": 1})
    assert summary.images == full.images + 2  # two that only fail when they are decoded
    assert summary.bytes_by_dtype["float32"] == 4 * summary.bytes_by_dtype["uint8"] == summary.patches * 588 * 4
    assert sum(count for _, count in summary.histogram) == summary.images


def test_a_warning_when_a_dtype_merges_levels(mixed: Path, tmp_path: Path) -> None:
    values = '"image_mean": [-1, -1, -1], "image_std": [1, 1, 1], "fixed_output_tokens": null'
    config = tmp_path / "config.json"
    sizes = '"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 65536, "patch_limit_on_one_side": 512'
    config.write_text(f"{{{sizes}, {values}}}")
    reporter = Silent()
    settings = Settings(str(mixed), tmp_path / "out", str(config), dtype="bfloat16", limit=2)
    prepare(settings, reporter)
    assert any("merges" in str(problem) for problem in reporter.warnings)


@pytest.mark.parametrize(
    ("manifest", "name"),
    [("a/b/train.jsonl", "train-features"), ("x.jsonl.gz", "x-features"), ("-", "manifest-features")],
)
def test_default_output(manifest: str, name: str) -> None:
    assert default_output(manifest) == Path(name)


def test_progress_counts_every_image(mixed: Path, tmp_path: Path) -> None:
    reporter = Silent()
    prepare(Settings(str(mixed), tmp_path / "out", "kimi-k3", workers=4), reporter)
    assert reporter.phases == [("headers", 38), ("images", 37)]
    assert reporter.done == 38 + 37
    assert reporter.failed == 3


# --- orientation, budgets, equal contents -------------------------------------------------------------------------


def turned_pictures(folder: Path) -> list[dict[str, Any]]:
    """A picture in every orientation and container, some with the EXIF behind the pixels."""
    rows = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("jpg", "png", "webp", "tif"):
            name = f"{orientation}.{kind}"
            picture(70, 45, seed=orientation).save(folder / name, exif=exif)
            rows.append({"id": name, "image": name})
        data = (folder / f"{orientation}.png").read_bytes()
        at = data.index(b"eXIf") - 4
        length = int.from_bytes(data[at : at + 4], "big") + 12
        late = data[:at] + data[at + length : -12] + data[at : at + length] + data[-12:]
        (folder / f"{orientation}-late.png").write_bytes(late)
        rows.append({"id": f"{orientation}-late.png", "image": f"{orientation}-late.png"})
    return rows


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_orientations_are_applied_as_pillow_applies_them(backend: Any, tmp_path: Path) -> None:
    from PIL import ImageOps

    rows = turned_pictures(tmp_path)
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    (tmp_path / "upright").mkdir()
    for row in rows:
        with Image.open(tmp_path / row["image"]) as image:
            ImageOps.exif_transpose(image).save(tmp_path / "upright" / f"{row['image']}.png", exif=b"")
    upright = [{"id": row["id"], "image": f"upright/{row['image']}.png"} for row in rows]
    encode(manifest, tmp_path / "applied", exif="apply", backend=backend, device="cpu")
    encode(write_manifest(tmp_path / "u.jsonl", upright), tmp_path / "plain", backend=backend, device="cpu")
    applied, plain = (pq.read_table(tmp_path / name / "index.parquet") for name in ("applied", "plain"))
    for name in ("status", "checksum", "width", "height", "grid_h", "grid_w"):
        assert applied[name].to_pylist() == plain[name].to_pylist()
    assert applied["exif_orientation"].to_pylist() == [int(row["id"][0]) for row in rows]
    ignored = tmp_path / "ignored"
    encode(manifest, ignored, backend=backend, device="cpu")
    same = [
        old == new
        for old, new in zip(
            pq.read_table(ignored / "index.parquet")["checksum"].to_pylist(), plain["checksum"].to_pylist(), strict=True
        )
    ]
    assert same == [row["id"][0] == "1" or row["id"].endswith("tif") for row in rows]


def test_sizes_in_a_manifest_are_those_of_the_image_as_it_is_prepared(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(70, 45).save(tmp_path / "a.jpg", exif=exif)
    rows = [
        {"id": "raw", "image": "a.jpg", "width": 70, "height": 45},
        {"id": "turned", "image": "a.jpg", "width": 45, "height": 70},
    ]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    for exif_option, fine in (("ignore", "raw"), ("apply", "turned")):
        encode(manifest, tmp_path / exif_option, exif=exif_option)
        index = pq.read_table(tmp_path / exif_option / "index.parquet").to_pylist()
        assert [row["id"] for row in index if row["status"] == "ok"] == [fine]
        assert {row["error_code"] for row in index} == {None, "size_mismatch"}
    assert "as its EXIF orientation turns it" in index[0]["error_message"]


@pytest.mark.parametrize(("exif", "words"), [("ignore", "was ignored"), ("apply", "was applied")])
def test_orientations_are_told_of_once(exif: Any, words: str, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.jsonl", turned_pictures(tmp_path))
    reporter = Silent()
    prepare(Settings(str(manifest), tmp_path / "out", "kimi-k3", exif=exif), reporter)
    assert len(reporter.warnings) == 1
    assert f"the EXIF orientation of 28 items {words}" in str(reporter.warnings[0])
    with pytest.raises(PlanMismatch, match="exif"):
        encode(manifest, tmp_path / "out", exif="apply" if exif == "ignore" else "ignore")


def test_a_token_budget_is_what_a_smaller_limit_gives(tmp_path: Path, published: PreprocessorConfig) -> None:
    rows = []
    for number, size in enumerate([(1000, 700), (300, 300), (90, 700)]):
        picture(*size, seed=number).save(tmp_path / f"{number}.png")
        rows.append({"id": str(number), "image": f"{number}.png"})
    encode(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out", max_tokens=121)
    index = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()
    assert [row["in_patch_limit"] is None for row in index] == [False, True, True]
    for row in index:
        assert row["num_tokens"] <= 121
        config = replace(published, in_patch_limit=row["in_patch_limit"] or published.in_patch_limit)
        with Image.open(tmp_path / row["image"]) as image:
            grid = config.grid_rule().grid(*image.size)
            out = np.empty((grid.patches, 3, 14, 14), np.float32)
            write_patches(image, grid, config, out, "float32")
        assert xxhash.xxh3_128_hexdigest(out.tobytes()) == row["checksum"]
    with pytest.raises(PlanMismatch, match="max_tokens"):
        encode(tmp_path / "m.jsonl", tmp_path / "out")


def test_equal_bytes_are_stored_once(tmp_path: Path) -> None:
    rows = []
    for number in range(6):
        picture(60, 50, seed=number % 2).save(tmp_path / f"{number}.png")
        rows.append({"id": str(number), "image": f"{number}.png"})
    rows[4] |= {"width": 60, "height": 50}
    (tmp_path / "cut.png").write_bytes((tmp_path / "0.png").read_bytes()[:-40])
    rows += [{"id": "cut", "image": "cut.png"}, {"id": "liar", "image": "0.png", "content_hash": "sha256:" + "0" * 64}]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    by_path, by_content = encode(manifest, tmp_path / "path"), encode(manifest, tmp_path / "out", dedupe="content")
    assert (by_path.images, by_content.images) == (6, 2)
    one, other = (pq.read_table(tmp_path / name / "index.parquet") for name in ("path", "out"))
    for name in ("id", "status", "error_code", "checksum", "content_hash", "image"):
        assert one[name].to_pylist() == other[name].to_pylist()
    (tmp_path / "cut.png").write_bytes((tmp_path / "0.png").read_bytes())
    retried = encode(manifest, tmp_path / "out", dedupe="content", retry_failed=True)
    assert (retried.images, retried.failed) == (2, 1)
    encode(manifest, tmp_path / "new", dedupe="content")
    assert tree(tmp_path / "out") == tree(tmp_path / "new")


def test_a_retry_rewrites_the_shards_of_the_failed_items_and_no_others(tmp_path: Path) -> None:
    rows = []
    for number in range(6):
        picture(280, 280, seed=number).save(tmp_path / f"{number}.png")
        rows.append({"id": str(number), "image": f"{number}.png"})
    good = (tmp_path / "3.png").read_bytes()
    (tmp_path / "3.png").write_bytes(good[:-50])
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    more = {"dtype": "uint8", "shard_size": 400 * 588 * 2}
    assert encode(manifest, tmp_path / "out", **more).failed == 1
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "shards").iterdir()}
    assert encode(manifest, tmp_path / "out", retry_failed=True, **more).failed == 1  # nothing was mended
    (tmp_path / "3.png").write_bytes(good)
    assert encode(manifest, tmp_path / "out", retry_failed=True, **more).failed == 0
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "shards").iterdir()}
    assert {name for name in before if before[name] == after[name]} == {
        f"cpu-{number:05d}.{suffix}" for number in (0, 2) for suffix in ("safetensors", "parquet")
    }
    encode(manifest, tmp_path / "new", **more)
    assert tree(tmp_path / "out", but=("plan.parquet",)) == tree(tmp_path / "new", but=("plan.parquet",))


# --- the index alone ----------------------------------------------------------------------------------------------


def test_an_index_only_run_tells_what_a_whole_run_would(mixed: Path, tmp_path: Path) -> None:
    (mixed.parent / "late.jpg").unlink()  # it fails when it is decoded, and nothing is decoded here
    (mixed.parent / "cut.png").unlink()
    encode(mixed, tmp_path / "whole", max_tokens=60)
    alone = encode(mixed, tmp_path / "alone", max_tokens=60, index_only=True)
    whole, index = (pq.read_table(tmp_path / name / "index.parquet") for name in ("whole", "alone"))
    told = {"shard", "row", "patch_start", "content_hash", "checksum"}
    assert whole.drop_columns([*told]).equals(
        index.drop_columns([*told]).replace_schema_metadata(whole.schema.metadata)
    )
    assert all(index[name].null_count == index.num_rows for name in told)
    assert (alone.images, alone.shards, alone.size, alone.index_only) == (0, 0, 0, True)
    assert alone.patches == sum(row["patch_count"] or 0 for row in index.to_pylist())
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == ["index.parquet", "plan.parquet", "run.json"]
    assert encode(mixed, tmp_path / "alone", max_tokens=60, index_only=True).skipped is None
    with pytest.raises(PlanMismatch, match="index_only"):
        encode(mixed, tmp_path / "alone", max_tokens=60, dtype="uint8")


def test_an_index_only_run_decodes_nothing_and_can_be_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(60, 50).save(tmp_path / "a.png")
    manifest = write_manifest(tmp_path / "m.jsonl", [{"image": "a.png"}, {"image": "b.png"}])
    monkeypatch.setattr(Image.Image, "load", None)
    assert encode(manifest, tmp_path / "out", index_only=True).failed == 1
    monkeypatch.undo()
    picture(30, 70).save(tmp_path / "b.png")
    assert encode(manifest, tmp_path / "out", index_only=True, retry_failed=True).failed == 0
    encode(manifest, tmp_path / "new", index_only=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "new")


# --- what a review found ------------------------------------------------------------------------------------------

WRONG = "sha256:" + "0" * 64


@pytest.mark.parametrize("dedupe", ["path", "content", "off"])
def test_a_promised_hash_holds_in_a_retry_and_for_features_files(dedupe: Any, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        picture(60, 50, seed=ord(name)).save(tmp_path / f"{name}.png")
    np.save(tmp_path / "f.npy", np.zeros((4, 3, 14, 14), np.uint8))
    right = "sha256:" + hashlib.sha256((tmp_path / "a.png").read_bytes()).hexdigest()
    rows: list[dict[str, Any]] = [
        {"image": "a.png", "content_hash": right},
        {"image": "b.png", "content_hash": WRONG},
        {"image": "c.png"},
        {"id": "f", "features": "f.npy", "grid_thw": [1, 2, 2], "content_hash": WRONG},
    ]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    for retry in (False, True):
        encode(manifest, tmp_path / "out", dedupe=dedupe, retry_failed=retry)
        index = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()
        wrong = "content_hash_mismatch"
        assert [row["error_code"] for row in index] == [None, wrong, None, wrong]


def test_one_features_file_with_several_grids_is_checked_for_each(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.zeros((24, 3, 14, 14), np.uint8))
    grids = [[1, 4, 6], [1, 6, 4], [1, 2, 2]]
    rows = [{"id": str(n), "features": "f.npy", "grid_thw": grid} for n, grid in enumerate(grids)]
    encode(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out")
    index = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()
    assert [(row["grid_h"], row["grid_w"], row["error_code"]) for row in index] == [
        (4, 6, None),
        (6, 4, None),
        (None, None, "bad_features"),
    ]


def test_a_lying_size_is_found_before_the_image_is_decoded(tmp_path: Path) -> None:
    picture(60, 50).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(content[: content.index(b"IDAT") + 40])  # it could not be decoded
    manifest = write_manifest(tmp_path / "m.jsonl", [{"image": "a.png", "width": 10, "height": 10}])
    encode(manifest, tmp_path / "out")
    row = pq.read_table(tmp_path / "out" / "index.parquet").to_pylist()[0]
    assert (row["error_code"], row["error_message"]) == (
        "size_mismatch",
        "the image is 60 x 50 pixels; the manifest says 10 x 10",
    )


def test_fields_of_gigabytes_fit_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of strings holds two gigabytes at most; here the limit is lowered instead."""
    monkeypatch.setattr(store, "_MOST_IN_A_GROUP", 1000)
    monkeypatch.setattr(store, "_AT_ONCE", 48)
    picture(30, 30).save(tmp_path / "a.png")
    rows = [{"id": str(n), "image": "a.png", "caption": "x" * 100} for n in range(100)]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    for more in ({}, {"index_only": True}):
        encode(manifest, tmp_path / "out", overwrite=True, **more)
        index = pq.read_table(tmp_path / "out" / "index.parquet")
        assert index["id"].to_pylist() == [str(n) for n in range(100)]
