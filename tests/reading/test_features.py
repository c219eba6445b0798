"""features.py and reading.py: what consumers get is what is stored, and what the reference computes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference
import safetensors.torch
import torch
from conftest import Silent, picture, write_manifest
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import kimik3_prep
from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import FailedItem, InputError, StoreError
from kimik3_prep.pixels.tensors import torch_dtype
from kimik3_prep.reading import stored as reading
from kimik3_prep.reading.features import Features, FeatureStore
from kimik3_prep.run.prepare import Settings, prepare

OK = ["n3", "n1", "n4", "elsewhere", "n0", "unsized", "again", "n2"]  # manifest order, failed ones left out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one manifest in every dtype, several shards each: five pictures, one named twice, two local, two failed.

    The ids are not in sorted order, and the shards not in manifest order: one row chooses the gpu backend's group.
    """
    folder = tmp_path_factory.mktemp("features")
    rows: list[dict[str, Any]] = []
    for number, mode in enumerate(["RGB", "RGBA", "L", "P", "1"]):
        picture(30 + 25 * number, 70 - 9 * number, mode, number).save(folder / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png", "caption": f"no {number}"})
    levels = np.random.default_rng(5).integers(0, 256, (8, 3, 14, 14), np.uint8)
    np.save(folder / "local.npy", levels)
    local = {"features": "local.npy", "grid_thw": [1, 2, 4]}
    (folder / "cut.png").write_bytes((folder / "4.png").read_bytes()[:-60])
    rows = [
        {**rows[3], "backend": "gpu"},
        {"id": "gone", "image": "gone.png"},
        *(rows[1], rows[4]),
        {"id": "elsewhere", **local, "width": 50, "height": 20},
        *(rows[0], {"id": "unsized", **local}, {"id": "cut", "image": "cut.png"}),
        {"id": "again", "image": "1.png", "question": "é?"},
        rows[2],
    ]
    manifest = write_manifest(folder / "m.jsonl", rows)
    for dtype in DTYPES:
        size = 40 * 588 * {"float32": 4, "uint8": 1}.get(dtype, 2)
        settings = Settings(str(manifest), folder / dtype, "kimi-k3", "cpu", dtype, "cpu", shard_size=size)
        prepare(settings, Silent())
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of the float32 run, to break."""
    return Path(shutil.copytree(made / "float32", tmp_path / "out"))


def expected(made: Path, dtype: str, name: str) -> torch.Tensor:
    """The item's stored tensor, read by the safetensors library."""
    row = next(row for row in pq.read_table(made / dtype / "index.parquet").to_pylist() if row["id"] == name)
    stored = safetensors.torch.load_file(made / dtype / "shards" / f"{row['shard']}.safetensors")["pixel_values"]
    return stored[row["patch_start"] : row["patch_start"] + row["patch_count"]]


def true_values(made: Path, name: str) -> torch.Tensor:
    """What the reference computes from the picture."""
    number = {"again": "1"}.get(name, name[-1])
    return torch.from_numpy(reference.features(Image.open(made / f"{number}.png"), reference.PUBLISHED))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_items_are_what_the_shards_hold(made: Path, dtype: str) -> None:
    store = FeatureStore(made / dtype, raw=dtype == "uint8")
    assert store.stored_dtype == dtype
    for name in OK:
        assert same(store[name].pixel_values, expected(made, dtype, name)), name


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_float32_and_uint8_give_the_references_float32(made: Path, dtype: str) -> None:
    store = FeatureStore(made / dtype)
    for name in ["n0", "n1", "n2", "n3", "n4", "again"]:
        assert same(store[name].pixel_values, true_values(made, name)), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtype_is_one_plain_cast(made: Path, dtype: str, wanted: str) -> None:
    kind = torch_dtype(wanted)
    plain = FeatureStore(made / dtype)["n1"].pixel_values
    assert plain.dtype == (torch.float32 if dtype == "uint8" else torch_dtype(dtype))
    for choice in (kind, wanted):
        store = FeatureStore(made / dtype, dtype=choice)
        assert same(store["n1"].pixel_values, plain.to(kind))
        assert same(store.batch(["n1"]).pixel_values, plain.to(kind))
    if dtype in ("float32", "uint8"):
        assert same(store["n1"].pixel_values, true_values(made, "n1").to(kind))


def test_other_constants_have_their_own_table(made: Path, tmp_path: Path) -> None:
    cfg = {**reference.PUBLISHED, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    config = tmp_path / "preprocessor_config.json"
    config.write_text(json.dumps({"media_proc_cfg": {**cfg, "fixed_output_tokens": None}}))
    prepare(Settings(str(made / "m.jsonl"), tmp_path / "out", str(config), "cpu", "uint8", "cpu"), Silent())
    values = FeatureStore(tmp_path / "out")["n1"].pixel_values.numpy()
    assert np.array_equal(values, reference.features(Image.open(made / "1.png"), cfg))


def test_an_item_says_what_it_is(made: Path) -> None:
    item = FeatureStore(made / "float32")["n1"]
    index = pq.read_table(made / "float32" / "index.parquet").to_pylist()
    assert item.row == index[2]
    assert (item.id, item.extra, item.original_size) == ("n1", {"caption": "no 1"}, (55, 61))
    assert (item.grid_thw, item.num_tokens, len(item.pixel_values)) == ((1, 6, 4), 6, 24)
    store = FeatureStore(made / "float32")
    assert (store["elsewhere"].original_size, store["unsized"].original_size) == ((50, 20), None)
    assert (store["elsewhere"].extra, store["again"].extra) == ({}, {"question": "é?"})


def test_repeats_share_a_span(made: Path) -> None:
    store = FeatureStore(made / "bfloat16")
    one, other = store["n1"], store["again"]
    assert [one.row[key] for key in ("shard", "row", "patch_start")] == [
        other.row[key] for key in ("shard", "row", "patch_start")
    ]
    assert same(one.pixel_values, other.pixel_values)


def test_writing_into_an_item_changes_nobody_elses(made: Path) -> None:
    store = FeatureStore(made / "float32")
    before = hashlib.sha256((made / "float32" / "shards" / "cpu-00000.safetensors").read_bytes()).digest()
    store["n1"].pixel_values.zero_()
    assert same(store["again"].pixel_values, true_values(made, "n1"))
    assert hashlib.sha256((made / "float32" / "shards" / "cpu-00000.safetensors").read_bytes()).digest() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_device_is_where_everything_ends_up(made: Path, dtype: str) -> None:
    """The meta device has shapes and dtypes only, so a tensor that stayed behind is seen on any machine."""
    store = FeatureStore(made / dtype, device="meta", dtype="float16")
    assert store["n0"].pixel_values.device.type == "meta"
    batch = store.batch(["n0", "n1"])
    assert {tensor.device.type for tensor in (batch.pixel_values, batch.grid_thws, batch.num_tokens)} == {"meta"}
    assert batch.pixel_values.dtype == torch.float16
    moved = FeatureStore(made / dtype).batch(["n0"]).to("meta")
    assert {tensor.device.type for tensor in (moved.pixel_values, moved.grid_thws, moved.num_tokens)} == {"meta"}
    assert moved.ids == ("n0",)


# --- finding ------------------------------------------------------------------------------------------------------


def test_by_id_by_row_and_from_the_end(made: Path) -> None:
    store = FeatureStore(made / "float32")
    assert len(store) == 10
    assert [store[i].id for i in (0, np.int64(2), torch.tensor(3), -1, -2)] == ["n3", "n1", "n4", "n2", "again"]
    assert [name in store for name in ("n0", "gone", "n", "zz", "", 0)] == [True, True, False, False, False, False]
    for name in ("n", "zz", "", "n00"):
        with pytest.raises(KeyError, match="no item '"):
            store[name]
    for row in (10, -11):
        with pytest.raises(IndexError, match="which has 10"):
            store[row]
    with pytest.raises(TypeError):
        store[1.0]  # type: ignore[index]


def test_every_id_is_found_whatever_its_letters(copy: Path) -> None:
    names = ["b", "a", "é", "Z", "aa", "\U0001f600", "\uffff", "0", "ab", "a b"]
    table = pq.read_table(copy / "index.parquet")
    place = table.schema.get_field_index("id")
    pq.write_table(table.set_column(place, "id", [names]).cast(table.schema), copy / "index.parquet")
    store = FeatureStore(copy)
    assert [store.table["item"][store._run.find(name)].as_py() for name in names] == list(range(10))
    assert not {"", "A", "c", "é ", "\U0001f601"} & {name for name in names if name in store}


def test_iteration_passes_over_the_failed(made: Path) -> None:
    store = FeatureStore(made / "float32")
    assert [item.id for item in store] == OK
    assert [store[row].id for row in store.ok] == OK
    assert store.num_tokens[store.ok].tolist() == [item.num_tokens for item in store]
    assert store.num_tokens[[1, 7]].tolist() == [-1, -1]


def test_shard_order_reads_each_shard_once_through(made: Path) -> None:
    items = list(FeatureStore(made / "float32").iterate("shard"))
    places = [(item.row["shard"], item.row["patch_start"], item.row["item"]) for item in items]
    assert places == sorted(places)
    assert sorted(item.id for item in items) == sorted(OK)
    assert [item.id for item in items] != OK
    assert len({shard for shard, _, _ in places}) > 3
    with pytest.raises(InputError, match='"manifest" or "shard"'):
        FeatureStore(made / "float32").iterate("random")  # type: ignore[arg-type]


# --- batches and exports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_is_its_items_in_the_given_order(made: Path, dtype: str) -> None:
    store = FeatureStore(made / dtype)
    batch = store.batch(["n2", 0, "again", "n2", -1])
    items = [store[name] for name in ("n2", "n3", "again", "n2", "n2")]
    assert same(batch.pixel_values, torch.cat([item.pixel_values for item in items]))
    assert same(batch.grid_thws, torch.tensor([item.grid_thw for item in items]))
    assert same(batch.num_tokens, torch.tensor([item.num_tokens for item in items]))
    assert batch.ids == ("n2", "n3", "again", "n2", "n2")
    assert len(batch.pixel_values) == int(batch.grid_thws.prod(1).sum())
    empty = store.batch([])
    assert (list(empty.pixel_values.shape), list(empty.grid_thws.shape), empty.ids) == ([0, 3, 14, 14], [0, 3], ())


def test_one_string_is_not_a_list_of_ids(made: Path) -> None:
    store = FeatureStore(made / "float32")
    with pytest.raises(TypeError, match="'n1'"):
        store.batch("n1")


def test_the_prompt_names_the_original_size(made: Path) -> None:
    store = FeatureStore(made / "bfloat16")
    pad = "<|media_pad|>"
    text = "<|media_begin|>image 55x61<|media_content|>" + pad * 6 + "<|media_end|>"
    assert store.prompt("n1") == store.prompt(2) == store.prompt("again") == text
    assert store.prompt("elsewhere") == f"<|media_begin|>image 50x20<|media_content|>{pad}{pad}<|media_end|>"
    with pytest.raises(InputError, match="line 7, unsized: its original size is unknown"):
        store.prompt("unsized")


# --- what cannot be had -------------------------------------------------------------------------------------------


def test_failed_items_say_which_and_why(made: Path) -> None:
    store = FeatureStore(made / "float32")
    index = pq.read_table(made / "float32" / "index.parquet").to_pylist()
    for call in (store.__getitem__, store.prompt, lambda key: store.batch(["n1", key])):
        for key in ("cut", 7, -3):
            with pytest.raises(FailedItem) as caught:
                call(key)
            error = caught.value
            assert (error.id, error.line, error.code) == ("cut", 8, "truncated")
            assert error.message == index[7]["error_message"]
            assert str(error) == f"line 8, cut has no features: truncated: {error.message}"
    listed = [(failure.line, failure.id, failure.code) for failure in store.failures]
    assert listed == [(2, "gone", "not_found"), (8, "cut", "truncated")]
    again = pickle.loads(pickle.dumps(store.failures[0]))
    assert (str(again), vars(again)) == (str(store.failures[0]), vars(store.failures[0]))


def test_a_folder_of_something_else_is_refused(made: Path, tmp_path: Path) -> None:
    for path, what in [
        (tmp_path / "nothing", "does not exist"),
        (made / "m.jsonl", "is a file"),
        (made, "no index.parquet and no run.json in it"),
        (made / "float32" / "shards", "no index.parquet and no run.json in it"),
    ]:
        with pytest.raises(InputError, match=what):
            FeatureStore(path)
    (tmp_path / "index.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not an index of kimik3-prep"):
        FeatureStore(tmp_path)


def test_an_unfinished_run_says_to_encode_again(copy: Path) -> None:
    (copy / "index.parquet").unlink()
    with pytest.raises(InputError, match=r"is not finished \(run the same encode command again"):
        FeatureStore(copy)


def test_an_index_that_says_nothing_of_its_shards_is_refused(copy: Path) -> None:
    table = pq.read_table(copy / "index.parquet")
    pq.write_table(table.replace_schema_metadata(None), copy / "index.parquet")
    with pytest.raises(InputError, match="does not say the fingerprint"):
        FeatureStore(copy)
    about = {**json.loads(table.schema.metadata[b"kimik3_prep"]), "dtype": "int4"}
    pq.write_table(table.replace_schema_metadata({"kimik3_prep": json.dumps(about)}), copy / "index.parquet")
    with pytest.raises(InputError, match='its dtype is "int4"'):
        FeatureStore(copy)


def test_options_that_do_not_fit_are_refused(made: Path) -> None:
    for options, what in [
        ({"raw": True}, "the shards hold float32"),
        ({"dtype": "int8"}, "'int8' does not hold"),
        ({"dtype": torch.uint8}, "torch.uint8 does not hold"),
    ]:
        with pytest.raises(InputError, match=what):
            FeatureStore(made / "float32", **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="raw levels are not cast"):
        FeatureStore(made / "uint8", raw=True, dtype="float32")


def test_shards_that_are_gone_or_not_these_are_a_store_error(copy: Path, made: Path) -> None:
    shards = sorted((copy / "shards").glob("cpu-*.safetensors"))
    store = FeatureStore(copy)
    (copy / "shards" / f"{store['n3'].row['shard']}.safetensors").unlink()
    assert store["n3"].id == "n3"  # still mapped
    with pytest.raises(StoreError, match="No such file"):
        FeatureStore(copy)["n3"]
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-100])
    with pytest.raises(StoreError, match="not a shard"):
        list(FeatureStore(copy))
    shutil.copy(made / "uint8" / "shards" / shards[0].name, shards[0])
    with pytest.raises(StoreError, match="is of another run"):
        list(FeatureStore(copy).iterate("shard"))
    shutil.copy(shards[1], shards[0])  # of this run, but not the shard of that name
    with pytest.raises(StoreError, match="does not hold what the index says"):
        list(FeatureStore(copy).iterate("shard"))


@pytest.mark.parametrize(("column", "value"), [("row", 99), ("row", -2), ("patch_start", 9999), ("grid_h", 4)])
def test_a_place_that_the_shard_does_not_have_is_a_store_error(copy: Path, column: str, value: int) -> None:
    table = pq.read_table(copy / "index.parquet")
    place = table.schema.get_field_index(column)
    wrong = table.set_column(place, table.schema.field(column), pa.array([value] * len(table), pa.int64()))
    pq.write_table(wrong, copy / "index.parquet")
    with pytest.raises(StoreError, match=r"line 3, n1: .* does not hold what the index says"):
        FeatureStore(copy)["n1"]


@pytest.mark.parametrize("name", ["../../other", "cpu-00000/../../../other", "", "cpu-00000\n"])
def test_an_index_that_names_a_shard_elsewhere_is_a_store_error(copy: Path, name: str) -> None:
    """A shard lies in the named place, and it is not read."""
    index = pq.read_table(copy / "index.parquet")
    at = index.schema.get_field_index("shard")
    names = [shard and name for shard in index["shard"].to_pylist()]
    pq.write_table(index.set_column(at, index.schema.field(at), pa.array(names)), copy / "index.parquet")
    with contextlib.suppress(OSError):
        shutil.copy(copy / "shards" / "cpu-00000.safetensors", copy / "shards" / f"{name}.safetensors")
    store = FeatureStore(copy)
    for read in (lambda: store["n1"], lambda: list(store.iterate("shard")), lambda: store.batch(["n1"])):
        with pytest.raises(StoreError, match=r"names the shard .*; expected a name like cpu-00000"):
            read()


def test_a_run_that_was_changed_meanwhile_is_a_store_error(copy: Path) -> None:
    """Shards of a retried run have the same names and the same fingerprint, and other places for the same items."""
    store = FeatureStore(copy)
    index = (copy / "index.parquet").read_bytes()
    assert store["n3"].id == "n3"
    (copy / "index.parquet").unlink()
    with pytest.raises(StoreError, match="not the one that was read"):
        store["n1"]
    (copy / "again").write_bytes(index)
    (copy / "again").rename(copy / "index.parquet")
    with pytest.raises(StoreError, match="not the one that was read"):
        store["n1"]
    assert store["n3"].id == "n3"  # was mapped before
    assert FeatureStore(copy)["n1"].id == "n1"


def test_a_shard_of_another_dtype_than_the_index_says_is_a_store_error(copy: Path) -> None:
    table = pq.read_table(copy / "index.parquet")
    about = json.loads(table.schema.metadata[b"kimik3_prep"])
    for change in ({"dtype": "float16"}, {"patch_size": 28}):
        metadata = {"kimik3_prep": json.dumps({**about, **change})}
        pq.write_table(table.replace_schema_metadata(metadata), copy / "index.parquet")
        with pytest.raises(StoreError, match=r"holds F32 \[\d+, 3, 14, 14\], .*index\.parquet says "):
            FeatureStore(copy)["n1"]


# --- processes ----------------------------------------------------------------------------------------------------


class Rows(Dataset[Features]):
    """The plainest dataset there is."""

    def __init__(self, store: FeatureStore) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store.ok)

    def __getitem__(self, index: int) -> Features:
        return self.store[self.store.ok[index]]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_see_the_same(made: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    store = FeatureStore("bfloat16", dtype="float32")
    mine = [(item.id, item.pixel_values) for item in store]  # the parent's maps are open when workers are made
    context = multiprocessing.get_context(method)
    loader = DataLoader(Rows(store), batch_size=None, num_workers=2, multiprocessing_context=context)
    theirs = [(item.id, item.pixel_values) for item in loader]
    assert [name for name, _ in theirs] == OK
    assert all(same(one, other) for (_, one), (_, other) in zip(mine, theirs, strict=True))


class Everything(Rows):
    """Failed items too."""

    def __getitem__(self, index: int) -> Features:
        return self.store[index]


def test_a_failed_item_in_a_worker_says_so(made: Path) -> None:
    loader = DataLoader(Everything(FeatureStore(made / "float32")), batch_size=None, num_workers=1)
    with pytest.raises(Exception, match="line 2, gone has no features: not_found"):
        list(loader)


def test_a_lost_shard_in_a_worker_says_so(copy: Path) -> None:
    store = FeatureStore(copy)
    for path in (copy / "shards").glob("*.safetensors"):
        path.unlink()
    loader = DataLoader(Rows(store), batch_size=None, num_workers=1)
    with pytest.raises(StoreError, match="not a shard of kimik3-prep: No such file"):
        list(loader)


def test_a_pickle_holds_no_data(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(made)
    store = FeatureStore("uint8", dtype=torch.float16)
    item = store["n1"]
    content = pickle.dumps(store)
    assert len(content) < 1000
    monkeypatch.chdir(tmp_path)
    again = pickle.loads(content)
    assert same(again["n1"].pixel_values, item.pixel_values)
    away = pickle.loads(pickle.dumps(FeatureStore(made / "uint8", device=torch.device("meta"))))
    assert away["n1"].pixel_values.device.type == "meta"
    raw = pickle.loads(pickle.dumps(FeatureStore(made / "uint8", raw=True)))
    assert raw["n1"].pixel_values.dtype == torch.uint8


def test_few_shards_are_open_at_a_time(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_OPEN_SHARDS", 2)
    store = FeatureStore(made / "float32")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert len({item.row["shard"] for item in store}) > 3
    if before:
        assert len(os.listdir("/proc/self/fd")) - before <= 4  # two maps a shard
    assert store._run._open.cache_info().currsize == 2


# --- size ---------------------------------------------------------------------------------------------------------


def test_a_million_rows_are_columns(copy: Path) -> None:
    table = pq.read_table(copy / "index.parquet")
    many = 250_000
    long = table.take(pa.array(np.full(many, 2)))
    names = pa.array([f"row-{number}" for number in range(many)])
    long = long.set_column(long.schema.get_field_index("id"), "id", names)
    pq.write_table(long.cast(table.schema), copy / "index.parquet")
    del names, long, table
    tracemalloc.start()
    store = FeatureStore(copy)
    items = iter(store)
    assert (next(items).id, store["row-249999"].row["id"]) == ("row-0", "row-249999")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(store) == many
    assert peak < 120 * many  # a dict of the row alone takes 3,000 bytes; the strings stay in Arrow, uncounted here


def test_the_package_offers_it_lazily() -> None:
    assert kimik3_prep.FeatureStore is FeatureStore
    with pytest.raises(AttributeError, match="no attribute 'Features'"):
        _ = kimik3_prep.Features
    code = """
import sys, kimik3_prep
assert not {"torch", "pyarrow", "numpy"} & set(sys.modules), "import kimik3_prep alone"
from kimik3_prep import FeatureStore
sides = ("PIL", "kimik3_prep.images.decode", "kimik3_prep.run.workers", "kimik3_prep.pixels.cpu")
assert "torch" in sys.modules and not [name for name in sides if name in sys.modules], "the encode side"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- without shards -----------------------------------------------------------------------------------------------


@pytest.fixture
def indexed(made: Path, tmp_path: Path) -> Path:
    """The index alone of the same manifest, and one picture more as a data: URL."""
    rows = [json.loads(line) for line in (made / "m.jsonl").read_text().splitlines()]
    url = "data:image/png;base64," + base64.b64encode((made / "2.png").read_bytes()).decode()
    manifest = write_manifest(made / "indexed.jsonl", [*rows, {"id": "inline", "image": url}])
    prepare(Settings(str(manifest), tmp_path / "indexed", "kimi-k3", index_only=True), Silent())
    return tmp_path / "indexed"


@pytest.mark.parametrize("raw", [False, True])
def test_features_of_an_index_only_run_are_computed_from_the_images(made: Path, indexed: Path, raw: bool) -> None:
    store, stored = FeatureStore(indexed, raw=raw), FeatureStore(made / "uint8", raw=raw)
    for name in OK:
        assert same(store[name].pixel_values, stored[name].pixel_values), name
        assert store[name].grid_thw == stored[name].grid_thw
    assert store.prompt("n0") == stored.prompt("n0")
    assert same(store["inline"].pixel_values, stored["n2"].pixel_values)
    batch, other = store.batch(OK), stored.batch(OK)
    assert same(batch.pixel_values, other.pixel_values)
    assert torch.equal(batch.grid_thws, other.grid_thws)


def test_an_image_that_is_not_the_indexed_one_is_said(made: Path, indexed: Path, tmp_path: Path) -> None:
    store = FeatureStore(indexed)
    with pytest.raises(FailedItem, match="line 8, cut has no features: truncated"):
        store["cut"]
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in made.glob("*.*"):
        shutil.copy(path, moved)
    picture(31, 70).save(moved / "0.png")
    (moved / "1.png").unlink()
    store = pickle.loads(pickle.dumps(FeatureStore(indexed, images=moved)))
    with pytest.raises(FailedItem, match="n0 has no features: source_changed"):
        store["n0"]
    with pytest.raises(FailedItem, match="n1 has no features: not_found"):
        store["n1"]
    assert same(store["n3"].pixel_values, FeatureStore(made / "float32")["n3"].pixel_values)


def test_an_index_only_run_without_its_record_says_so(indexed: Path) -> None:
    (indexed / "run.json").unlink()
    with pytest.raises(StoreError, match=r"run\.json"):
        FeatureStore(indexed)["n0"]


def test_an_index_only_run_can_move_with_its_images_and_notices_others(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    picture(60, 50).save(tmp_path / "one" / "a.png")
    manifest = write_manifest(tmp_path / "one" / "m.jsonl", [{"image": "a.png"}])
    settings = Settings(str(manifest), tmp_path / "one" / "index", "kimi-k3", index_only=True)
    prepare(settings, Silent())
    os.rename(tmp_path / "one", tmp_path / "two")
    pixels = FeatureStore(tmp_path / "two" / "index")["a.png"].pixel_values
    assert same(pixels, torch.from_numpy(reference.features(picture(60, 50), reference.PUBLISHED)))
    Image.new("RGB", (60, 50)).save(tmp_path / "two" / "a.png")
    with pytest.raises(FailedItem, match="source_changed"):
        FeatureStore(tmp_path / "two" / "index")["a.png"]


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["row", "patch_start", "patch_count", "grid_h", "grid_w"])
@pytest.mark.parametrize("value", [0, -1, 1, 4, 2**31 - 1, 2**62, -(2**62)])
def test_a_number_of_the_index_that_is_not_the_shards_is_an_error(copy: Path, column: str, value: int) -> None:
    table = pq.read_table(copy / "index.parquet")
    place = table.schema.get_field_index(column)
    kind = table.schema.field(column).type
    if value not in range(-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1)):
        pytest.skip("no number of this column")
    numbers = table[column].to_pylist()
    row = table["id"].to_pylist().index("n1")
    if numbers[row] == value:
        value += 1
    numbers[row] = value
    pq.write_table(
        table.set_column(place, table.schema.field(column), [pa.array(numbers, kind)]), copy / "index.parquet"
    )
    store = FeatureStore(copy)
    for ask in (lambda: store["n1"], lambda: store.batch(["n0", "n1"])):
        with pytest.raises(StoreError, match=r"line 3, n1: .* does not hold what the index says of it"):
            ask()
    assert store["n0"].id == "n0"


def test_check_compares_what_is_read_with_what_was_written(copy: Path) -> None:
    row = FeatureStore(copy)["n1"].row
    path = copy / "shards" / f"{row['shard']}.safetensors"
    assert [item.id for item in FeatureStore(copy, check=True)] == OK
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for offset in range(header, len(content)):
        content[offset] ^= 1
    path.write_bytes(content)
    checked = pickle.loads(pickle.dumps(FeatureStore(copy, check=True)))
    with pytest.raises(StoreError, match=r"does not hold|are not those that were written"):
        checked["n1"]


def test_one_changed_pixel_is_seen_with_check(copy: Path) -> None:
    import safetensors

    row = FeatureStore(copy)["n1"].row
    path = copy / "shards" / f"{row['shard']}.safetensors"
    tensors = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    tensors["pixel_values"][row["patch_start"], 1, 2, 3] += 1
    safetensors.torch.save_file(tensors, path, metadata)
    FeatureStore(copy)["n1"]
    with pytest.raises(StoreError, match=r"line 3, n1: its bytes in .* are not those that were written"):
        FeatureStore(copy, check=True)["n1"]


# --- several folders as one ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run `first` of three pictures, `more` of what a longer manifest adds (two of one row, one gone), and `all`."""
    folder = tmp_path_factory.mktemp("grown")
    for number in range(6):
        picture(40 + 30 * number, 60, "RGB", number).save(folder / f"{number}.png")
    rows: list[dict[str, Any]] = [{"id": f"n{number}", "image": f"{number}.png"} for number in range(3)]
    write_manifest(folder / "first.jsonl", rows)
    rows += [{"id": "n3", "image": "3.png"}, {"id": "pair", "images": ["4.png", "5.png"]}, {"image": "gone.png"}]
    write_manifest(folder / "all.jsonl", rows)
    for manifest, name, since in (("first", "first", None), ("all", "more", folder / "first"), ("all", "all", None)):
        settings = Settings(
            manifest=str(folder / f"{manifest}.jsonl"), output=folder / name, config="kimi-k3", since=since
        )
        prepare(settings, Silent())
    return folder


@pytest.mark.parametrize("check", [False, True])
def test_several_folders_are_one_store(grown: Path, check: bool) -> None:
    whole, both = FeatureStore(grown / "all"), FeatureStore([grown / "first", str(grown / "more")], check=check)
    assert len(both) == len(whole) == 7
    assert both.ok.tolist() == whole.ok.tolist()
    assert both.num_tokens.tolist() == whole.num_tokens.tolist()
    assert [item.id for item in both] == [item.id for item in whole]
    for one, other in zip(both, whole, strict=True):
        assert torch.equal(one.pixel_values, other.pixel_values)
    assert sorted(item.id for item in both.iterate("shard")) == sorted(item.id for item in whole)
    assert torch.equal(both.batch([5, "n0", -3]).pixel_values, whole.batch([5, "n0", -3]).pixel_values)
    assert [failure.code for failure in both.failures] == ["not_found"]
    with pytest.raises(KeyError, match=r"first, .*more"):
        both["nobody"]


def test_a_row_of_several_images_stays_together_and_apart_from_the_other_folder(grown: Path) -> None:
    lines = FeatureStore([grown / "first", grown / "more"]).lines.tolist()
    assert lines[:3] == [1, 2, 3]
    assert lines[4] == lines[5]
    assert len(set(lines)) == 6


def test_a_store_of_several_folders_goes_to_workers(grown: Path) -> None:
    both = FeatureStore([grown / "first", grown / "more"])
    there = pickle.loads(pickle.dumps(both))
    assert torch.equal(there["n3"].pixel_values, both["n3"].pixel_values)
    assert repr(there) == repr(both)


def test_an_id_in_two_folders_is_refused(grown: Path) -> None:
    with pytest.raises(InputError, match=r"3 ids are in several folders: 'n0', 'n1', 'n2'.*first and .*all"):
        FeatureStore([grown / "first", grown / "all"])


def test_folders_of_other_recipes_are_refused_by_name(grown: Path, tmp_path: Path) -> None:
    settings = Settings(
        manifest=str(grown / "all.jsonl"), output=tmp_path / "odd", config="kimi-k3", dtype="uint8", exif="apply"
    )
    prepare(settings, Silent())
    with pytest.raises(InputError) as caught:
        FeatureStore([grown / "first", tmp_path / "odd"])
    assert [problem.where.rpartition(" ")[2] for problem in caught.value.problems] == ["dtype", "exif"]
    (tmp_path / "odd" / "run.json").unlink()
    with pytest.raises(InputError, match="is gone, or of another run"):
        FeatureStore([grown / "first", tmp_path / "odd"])


def test_no_folder_is_no_store() -> None:
    with pytest.raises(InputError, match="no folder is named"):
        FeatureStore([])
