"""store.py: what lies on disk column by column, when it counts as done, and whose files are whose."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import VERSIONS, commit, item, planned, recipe, shard_format, stored, tree

from kimik3_prep import disk
from kimik3_prep.errors import InputError, ItemError, RunError
from kimik3_prep.output import tables as store
from kimik3_prep.output.folder import Output, RunRecord
from kimik3_prep.output.recipe import METADATA_KEY
from kimik3_prep.output.shard_file import ShardWriter
from kimik3_prep.output.tables import INDEX_SCHEMA, PLAN_SCHEMA, index_table, read_index, split_shards


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """An output folder that is not there yet."""
    return Output(tmp_path / "out")


# --- schemas ------------------------------------------------------------------------------------------------------


def test_the_columns_of_an_index() -> None:
    """A public interface: people read these by name, and by position. Change README and FORMAT with them."""
    text, number = "string", "int64"
    assert {field.name: str(field.type) for field in INDEX_SCHEMA} == {
        **{"item": number, "line": number, "id": text, "image": text, "path": text, "backend": text},
        **{"status": text, "error_code": text, "error_message": text},
        **{"shard": text, "row": number, "patch_start": number, "patch_count": number},
        **{"grid_t": number, "grid_h": number, "grid_w": number, "num_tokens": number},
        **{"width": number, "height": number, "new_width": number, "new_height": number},
        **{"pad_width": number, "pad_height": number, "in_patch_limit": number},
        **{"mode": text, "format": text, "exif_orientation": number, "content_hash": text, "checksum": text},
        "extra": text,
    }
    assert " ".join(INDEX_SCHEMA.names) == (
        "item line id image path backend status error_code error_message shard row patch_start patch_count "
        "grid_t grid_h grid_w num_tokens width height new_width new_height pad_width pad_height in_patch_limit "
        "mode format exif_orientation content_hash checksum extra"
    )


def test_the_columns_of_a_plan() -> None:
    text, large, number = "string", "large_string", "int64"
    assert [(field.name, str(field.type)) for field in PLAN_SCHEMA] == [
        *[("item", number), ("line", number), ("id", large), ("image", large), ("path", text), ("backend", text)],
        *[("content_hash", text), ("width", number), ("height", number), ("extra", large), ("group", text)],
        *[("mode", text), ("format", text), ("source_size", number), ("source_mtime_ns", number)],
        *[("new_width", number), ("new_height", number), ("pad_width", number), ("pad_height", number)],
        *[("grid_h", number), ("grid_w", number), ("num_tokens", number), ("in_patch_limit", number)],
        *[("shard", text), ("row", number), ("patch_start", number), ("patch_count", number)],
        *[("error_code", text), ("error_message", text)],
    ]


def test_files_have_the_schemas_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    rows = [item(f"{i % 7}.png", 28 * (1 + i % 7), id=str(i), note=i) for i in range(40)] + [{"image": "gone"}]
    trees = []
    for name in ("one", "two"):
        output = Output(tmp_path / name / "out")
        plan = planned(tmp_path / name, rows, 50, fail=[40])
        output.root.mkdir()
        output.begin(recipe(), VERSIONS)
        output.write_plan(plan)
        # In another order and cut into other pieces: neither may be seen in the bytes.
        names, failed = commit(output, plan if name == "one" else pa.concat_tables([plan.slice(0, 9), plan.slice(9)]))
        output.finish(names, failed, recipe())
        trees.append(tree(output.root))
    assert trees[0] == trees[1]
    assert pq.read_schema(output.plan).equals(PLAN_SCHEMA, check_metadata=False)
    for path in (output.index, output.shard_index(names[0])):
        assert pq.read_schema(path).equals(INDEX_SCHEMA, check_metadata=False)
    assert json.loads(pq.read_schema(output.index).metadata[METADATA_KEY.encode()])["dtype"] == "float32"
    assert json.loads(pq.read_schema(output.shard_index(names[0])).metadata[METADATA_KEY.encode()])["shard"] == names[0]


# --- the run record -----------------------------------------------------------------------------------------------


RECORD = RunRecord(recipe(), VERSIONS).document()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not a run record: "),
        ('{"format": 1, "fac', "not a run record: not JSON"),
        ('{"format": NaN}', "NaN is not JSON"),
        ("\xff\xfe", "not a run record"),
        ("[" * 100_000, "not a run record"),
        ("[1]", "not a run record of kimik3-prep"),
        ('{"name": "my project"}', "not a run record of kimik3-prep"),
        ('{"format": 1}', "not a run record of kimik3-prep"),
        (json.dumps({**RECORD, "facts": []}), "not a run record of kimik3-prep"),
        (json.dumps({**RECORD, "format": 2}), r"format 2; expected format 1 \(use the version of kimik3-prep"),
        (json.dumps({**RECORD, "facts": {**RECORD["facts"], "dtype": "uint8"}}), "changed by hand"),
    ],
)
def test_a_record_that_is_not_one_is_said_and_kept(output: Output, content: str, words: str) -> None:
    output.root.mkdir()
    output.run.write_bytes(content.encode("latin-1"))
    for overwrite in (False, True):
        with pytest.raises(InputError, match=words):
            output.begin(recipe(), VERSIONS, overwrite=overwrite)
    assert output.run.read_bytes() == content.encode("latin-1")


def test_a_folder_named_run_json_is_said(output: Output) -> None:
    output.run.mkdir(parents=True)
    with pytest.raises(InputError, match="cannot be read: it is no regular file"):
        output.record()


def test_two_runs_never_write_one_shard(tmp_path: Path) -> None:
    path, form = tmp_path / "cpu-00000.safetensors", shard_format("uint8", 2, {"format": 1})
    first = ShardWriter(path, form, 1, 4)
    with pytest.raises(RunError, match=r"another run is writing .*cpu-00000"):
        ShardWriter(path, form, 1, 4)
    os.pwrite(first.descriptor, bytes(range(48)), first.offset(0))
    first.finish([((1, 2, 2), 0, 4)])
    before = path.read_bytes()
    second = ShardWriter(path, form, 1, 4)  # the name is free again, and what was committed stays until the rename
    assert path.read_bytes() == before
    second.abort()
    assert os.listdir(tmp_path) == [path.name]


def test_a_shard_that_was_committed_while_it_was_opened_is_not_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, form = tmp_path / "cpu-00000.safetensors", shard_format("uint8", 2, {"format": 1})
    first = ShardWriter(path, form, 1, 4)
    lock, began = disk.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not began:  # the first run commits between our open and our lock
            began.append(1)
            first.finish([((1, 2, 2), 0, 4)])
        lock(descriptor, how)

    monkeypatch.setattr(disk.fcntl, "flock", late)
    second = ShardWriter(path, form, 1, 4)
    second.abort()
    assert path.read_bytes().startswith(form.header(1, 4))


def test_a_file_system_without_locks_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    ShardWriter(tmp_path / "cpu-00000.safetensors", shard_format("uint8", 2, {}), 0, 0).finish([])
    assert os.listdir(tmp_path) == ["cpu-00000.safetensors"]


# --- plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_comes_back_in_pieces_of_bounded_size(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_ROW_GROUP", 16)
    plan = planned(tmp_path / "set", [item(f"{i % 30}.png", id=str(i), tag="é") for i in range(50)])
    output.root.mkdir()
    output.begin(recipe(), VERSIONS)
    output.write_plan(plan)
    parts = list(output.read_plan())
    assert [part.num_rows for part in parts] == [16, 16, 16, 2]
    assert all(part.schema == PLAN_SCHEMA for part in parts)
    assert pa.concat_tables(parts).equals(plan)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all"])
def test_a_plan_that_cannot_be_read_is_said(output: Output, content: bytes) -> None:
    output.root.mkdir()
    output.plan.write_bytes(content)
    with pytest.raises(InputError, match=r"plan\.parquet: not a plan of kimik3-prep: .*--overwrite"):
        list(output.read_plan())


def test_a_plan_with_other_columns_is_said(output: Output) -> None:
    output.root.mkdir()
    pq.write_table(pa.table({"caption": ["a"]}), output.plan)
    with pytest.raises(InputError, match="not a plan of kimik3-prep"):
        list(output.read_plan())


# --- indexes ------------------------------------------------------------------------------------------------------


def test_index_rows_of_stored_and_failed_images(tmp_path: Path) -> None:
    rows = [item("a.png", 56, caption="x"), item("b.png"), item("gone.png", 28), item("a.png", 56, id="again")]
    plan = planned(tmp_path, rows, fail=[2])
    (name, shard), (none, lost) = split_shards(iter([plan]))
    assert (name, none) == ("cpu-00000", None)
    table = index_table(shard, {0: ItemError("truncated", "ends early"), 1: stored(0, 0)})
    assert table.schema == INDEX_SCHEMA
    a, again, b = table.to_pylist()
    promised = {"item": 0, "line": 1, "id": "a.png", "image": "a.png", "path": "deferred", "backend": "cpu"}
    failure = {"status": "failed", "error_code": "truncated", "error_message": "ends early"}
    known = {"width": 56, "height": 56, "extra": '{"caption":"x"}'}
    assert a == {**dict.fromkeys(INDEX_SCHEMA.names), **promised, **failure, **known}
    assert (again["id"], again["line"], again["error_code"]) == ("again", 4, "truncated")  # a repeat fails with it
    assert b == {
        **{"item": 1, "line": 2, "id": "b.png", "image": "b.png", "path": "deferred", "backend": "cpu"},
        **{"status": "ok", "error_code": None, "error_message": None},
        # The place is the outcome's, not the plan's: the failed image before it was closed up.
        **{"shard": "cpu-00000", "row": 0, "patch_start": 0, "patch_count": 4},
        **{"grid_t": 1, "grid_h": 2, "grid_w": 2, "num_tokens": 1, "width": 28, "height": 28},
        **{"new_width": 28, "new_height": 28, "pad_width": 0, "pad_height": 0, "in_patch_limit": None},
        **{"mode": "RGB", "format": "PNG", "exif_orientation": 6},
        **{"content_hash": "sha256:" + "0" * 64, "checksum": "ab" * 16, "extra": None},
    }
    (gone,) = index_table(lost, {}).to_pylist()
    assert (gone["status"], gone["error_code"], gone["error_message"]) == ("failed", "not_found", "gone")
    assert gone["shard"] is gone["row"] is gone["patch_count"] is gone["grid_t"] is gone["num_tokens"] is None


def test_repeats_of_one_image_share_its_place_and_keep_their_own_words(tmp_path: Path) -> None:
    rows = [item("a.png", id="1", q="what?"), item("b.png", id="2"), item("./a.png", id="3", q="who?")]
    ((_, shard),) = split_shards(iter([planned(tmp_path, rows)]))
    found = index_table(shard, {0: stored(0), 1: stored(1, 4)}).to_pylist()
    places = {row["id"]: (row["row"], row["patch_start"], row["image"], row["extra"]) for row in found}
    assert places == {
        "1": (0, 0, "a.png", '{"q":"what?"}'),
        "2": (1, 4, "b.png", None),
        "3": (0, 0, "./a.png", '{"q":"who?"}'),
    }


def test_data_urls_are_shortened_and_alike_ones_stay_apart(tmp_path: Path) -> None:
    urls = ["data:image/png;base64," + letter * 100_000 for letter in "AB"]
    ((_, shard),) = split_shards(iter([planned(tmp_path, [item(url, id=url[-1]) for url in urls])]))
    images = index_table(shard, {0: stored(0), 1: stored(1)})["image"].to_pylist()
    digests = [hashlib.sha256(url.encode()).hexdigest()[:32] for url in urls]
    assert images == [f"data:image/png;base64,sha256-{digest}" for digest in digests]


def test_any_id_is_only_text(output: Output, tmp_path: Path) -> None:
    ids = ["__metadata__", "pixel_values", "../../etc/passwd", "a/b", "\x00\x1b[2J", "🐈\n", "x" * 100_000, "NULL"]
    plan = planned(tmp_path / "set", [item(f"{i}.png", id=name) for i, name in enumerate(ids)])
    names, failed = commit(output, plan)
    output.finish(names, failed, recipe())
    assert output.read_index()["id"].to_pylist() == ids
    assert sorted(tree(output.root)) == ["index.parquet", "shards/cpu-00000.parquet"]


def test_the_index_commits_a_shard_and_only_beside_it(output: Output, tmp_path: Path) -> None:
    plan = planned(tmp_path / "set", [item("a.png")])
    assert not output.committed("cpu-00000")
    assert output.committed_shards() == []
    output.shards.mkdir(parents=True)
    output.shard("cpu-00000").touch()
    assert not output.committed("cpu-00000")
    commit(output, plan)
    assert output.committed("cpu-00000")
    (output.shards / "model.safetensors").touch()
    (output.shards / "model.parquet").touch()
    assert output.committed_shards() == ["cpu-00000"]
    output.shard("cpu-00000").unlink()  # an index alone does not make a shard
    assert not output.committed("cpu-00000")


def test_an_index_that_could_not_be_written_commits_nothing(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    output.shards.mkdir(parents=True)
    output.shard("cpu-00000").touch()
    monkeypatch.setattr(disk, "sync", fail)
    with pytest.raises(RunError, match="No space left on device"):
        commit(output, planned(tmp_path / "set", [item("a.png")]))
    assert not output.committed("cpu-00000")
    assert os.listdir(output.shards) == ["cpu-00000.safetensors"]


def test_the_index_is_in_manifest_order_over_groups_shards_and_failures(output: Output, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for i in range(200):
        kind = random.integers(4)
        if kind == 0:
            rows.append({"id": str(i), "features": f"{i}.npy", "grid_thw": [1, 2, 2]})
        else:
            rows.append(item(f"{i % 90}.png", id=str(i), backend=["cpu", "gpu"][kind % 2]))
    plan = planned(tmp_path / "set", rows, 40, fail=range(0, 200, 7))
    names, failed = commit(output, plan)
    assert {name.partition("-")[0] for name in names} == {"cpu", "gpu", "local"}
    output.finish(reversed(names), failed, recipe())
    index = output.read_index()
    assert index["item"].to_pylist() == list(range(200))
    assert index["line"].to_pylist() == list(range(1, 201))
    assert index["id"].to_pylist() == [row["id"] for row in rows]
    assert {row["backend"] for row in index.to_pylist() if row["path"] == "local"} == {None}


def test_an_index_of_failures_alone_and_of_nothing(output: Output, tmp_path: Path) -> None:
    plan = planned(tmp_path / "set", [item("a.png"), item("b.png")], fail=[0, 1])
    names, failed = commit(output, plan)
    assert names == []
    output.finish(names, failed, recipe())
    assert output.read_index()["status"].to_pylist() == ["failed", "failed"]
    output.finish([], [], recipe())
    assert output.read_index().num_rows == 0


def test_merging_many_shards_takes_memory_for_their_rows_only(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_ROW_GROUP", 1000)
    monkeypatch.setattr(disk, "sync", lambda path: None)
    rows = [item(f"{i}.png", id=str(i), backend=["cpu", "gpu"][i % 2], text="x" * 500) for i in range(6000)]
    names, failed = commit(output, planned(tmp_path / "set", rows, 80))
    assert len(names) == 300
    size = sum(output.read_shard_index(name).nbytes for name in names)
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        output.finish(names, failed, recipe())
    finally:
        pa.set_memory_pool(default)
    assert 0 < pool.max_memory() < 4 * size
    with pq.ParquetFile(output.index) as file:
        assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [1000] * 6
        assert file.read(["item"])["item"].to_pylist() == list(range(6000))


def test_columns_of_an_index(output: Output, tmp_path: Path) -> None:
    names, failed = commit(output, planned(tmp_path / "set", [item("a.png")]))
    output.finish(names, failed, recipe())
    assert output.read_index(["status", "id"]).column_names == ["status", "id"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table({"id": ["a"], "label": [1]}), "it has no column 'row'"),
        (pa.table({"id": ["a"], "row": ["1"]}), "its column 'row' is string, not int64"),
        (pa.table({"id": ["a"], "row": [1]}).replace_schema_metadata({"kimik3_prep": '{"format":2}'}), "format is 2"),
        (pa.table({"id": ["a"], "row": [1]}).replace_schema_metadata({"kimik3_prep": "[1"}), "not an index"),
    ],
)
def test_a_parquet_file_of_somebody_elses_is_no_index(tmp_path: Path, table: pa.Table, words: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    with pytest.raises(InputError, match=words):
        read_index(path, ["id", "row"])


@pytest.mark.parametrize("content", [b"", b"PAR1PAR1", b"x" * 1000])
def test_what_is_no_parquet_file_is_no_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet: not an index of kimik3-prep"):
        read_index(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="No such file"):
        read_index(tmp_path / "b.parquet")
