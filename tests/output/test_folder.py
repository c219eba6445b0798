"""folder.py: whose files are whose, and in which order they may go."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference
import xxhash
from conftest import (
    VERSIONS,
    cfg_and_config,
    commit,
    encode,
    flip,
    item,
    picture,
    planned,
    recipe,
    tree,
    write_manifest,
)

from kimik3_prep.disk import claim
from kimik3_prep.errors import FolderRemoved, InputError, PlanMismatch, RunError
from kimik3_prep.output.folder import Output, RunRecord
from kimik3_prep.output.recipe import fingerprint
from kimik3_prep.output.shard_file import ShardFormat, ShardWriter
from kimik3_prep.output.tables import index_table, split_shards


@pytest.fixture
def output(tmp_path: Path) -> Output:
    """An empty output folder."""
    (tmp_path / "out").mkdir()
    return Output(tmp_path / "out")


def test_a_new_run_writes_its_record(output: Output) -> None:
    output.begin(recipe(), VERSIONS, overwrite=False)
    assert os.listdir(output.root) == ["run.json"]
    record = output.record()
    assert record == RunRecord(recipe(), VERSIONS)
    document = json.loads(output.run.read_text())
    seal = document.pop("seal")
    assert seal == fingerprint(document)
    assert document == {
        "format": 1,
        "fingerprint": recipe().fingerprint,
        "facts": recipe().facts(),
        "versions": VERSIONS,
    }
    assert output.run.read_text().endswith("}\n")


def test_the_same_settings_resume_and_other_versions_are_no_other_settings(output: Output) -> None:
    output.begin(recipe(), VERSIONS, overwrite=False)
    (output.root / "notes.txt").write_text("mine")  # somebody's own file is no reason to refuse a run of ours
    before = tree(output.root)
    output.begin(recipe(), {"torch": "3"}, overwrite=False)
    assert tree(output.root) == before


def test_a_run_that_was_killed_while_writing_its_record_starts_anew(output: Output) -> None:
    (output.root / "run.json.tmp").write_text('{"form')
    (output.root / ".lock-3-of-8").touch()
    output.begin(recipe(), VERSIONS, overwrite=False)
    assert sorted(os.listdir(output.root)) == [".lock-3-of-8", "run.json"]


def test_other_settings_are_named_each_with_old_and_new(output: Output) -> None:
    output.begin(recipe(), VERSIONS, overwrite=False)
    before = tree(output.root)
    board = {**reference.PUBLISHED["transparent_bg_config"], "chessboard_gray_value": 200}
    config = cfg_and_config(image_mean=[0.48, 0.45, 0.4], transparent_bg_config=board)[1]
    decoders = {"pillow": "12.3.0", "avif": "1.3.0"}
    other = recipe(config=config, decoders=decoders, dtype="uint8", limit=5)
    with pytest.raises(PlanMismatch) as caught:
        output.begin(other, VERSIONS, overwrite=False)
    said = {problem.where.rpartition(": ")[2]: problem.what for problem in caught.value.problems}
    start = "this run was started with "
    assert said == {
        "config.background.gray_value": f"{start}180, now it is 200",
        "config.image_mean": f"{start}[0.5, 0.5, 0.5], now it is [0.48, 0.45, 0.4]",
        "decoders.avif": f"{start}None, now it is '1.3.0'",
        "decoders.pillow": f"{start}'13.0.0', now it is '12.3.0'",
        "decoders.webp": f"{start}'1.6.0', now it is None",
        "dtype": f"{start}'float32', now it is 'uint8'",
        "limit": f"{start}None, now it is 5",
    }
    assert all("--overwrite" in problem.hint for problem in caught.value.problems)
    assert tree(output.root) == before


def test_a_setting_that_became_a_table_is_named_whole(output: Output) -> None:
    output.begin(recipe(config=cfg_and_config(transparent_bg_config=None)[1]), {}, overwrite=False)
    with pytest.raises(PlanMismatch, match=r"config\.background: this run was started with None, now it is \{"):
        output.begin(recipe(), {}, overwrite=False)


@pytest.mark.parametrize("name", ["photo.jpg", "index.parquet", "plan.parquet", "shards", ".hidden"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_elses_is_refused_and_untouched(output: Output, name: str, overwrite: bool) -> None:
    """Even under our own names: without run.json nothing says that the files are ours, or what is in them."""
    path = output.root / name / "cpu-00000.parquet" if name == "shards" else output.root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    with pytest.raises(InputError, match="choose another --output") as caught:
        output.begin(recipe(), VERSIONS, overwrite=overwrite)
    assert name in str(caught.value)
    assert path.read_text() == "precious"
    assert sum(1 for found in output.root.rglob("*") if found.is_file()) == 1


@pytest.mark.parametrize("below", ["", "sub", "sub/deeper"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(InputError, match="out: is a file"):
        Output(tmp_path / "out" / below).begin(recipe(), VERSIONS, overwrite=True)
    assert (tmp_path / "out").read_text() == "precious"


def test_overwrite_removes_our_files_and_keeps_the_others(output: Output) -> None:
    output.begin(recipe(), VERSIONS, overwrite=False)
    output.shards.mkdir()
    ours = ["index.parquet", "plan.parquet", "plan.parquet.tmp", "shards/cpu-00000.safetensors"]
    ours += ["shards/cpu-00000.parquet", "shards/gpu-123456.safetensors.tmp", "shards/local-00001.parquet"]
    others = ["notes.txt", "shards/notes.txt", "shards/cpu-0.parquet", "shards/cpu-00000.parquet.bak"]
    for name in ours + others:
        (output.root / name).write_text(name)
    output.begin(recipe(dtype="uint8"), VERSIONS, overwrite=True)
    assert sorted(tree(output.root)) == sorted([*others, "run.json"])
    record = output.record()
    assert record is not None
    assert record.recipe.dtype == "uint8"


def test_clearing_is_in_an_order_that_a_kill_cannot_turn_into_a_lie(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.begin(recipe(), VERSIONS, overwrite=False)
    commit(output, planned(output.root.parent / "set", [item("a.png"), item("b.png")], 4))
    for name in ("cpu-00000", "cpu-00001"):
        output.shard(name).touch()
    output.plan.touch()
    output.index.touch()
    removed: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    output.clear()
    assert removed[0] == "index.parquet"
    assert {name.rpartition(".")[2] for name in removed[1:3]} == {"parquet"}
    assert {name.rpartition(".")[2] for name in removed[3:5]} == {"safetensors"}
    assert removed[5:] == ["plan.parquet", "run.json"]
    assert os.listdir(output.root) == []


def test_shards_that_are_kept_on_another_disk_can_be_overwritten(output: Output, tmp_path: Path) -> None:
    output.begin(recipe(), VERSIONS, overwrite=False)
    (tmp_path / "disk").mkdir()
    output.shards.symlink_to(tmp_path / "disk")
    output.shard("cpu-00000").touch()
    output.begin(recipe(), VERSIONS, overwrite=True)
    assert os.listdir(tmp_path / "disk") == []
    assert output.shards.is_symlink()


def test_commits_are_taken_back_index_first(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    output.begin(recipe(), VERSIONS, overwrite=False)
    commit(output, planned(output.root.parent / "set", [item("a.png"), item("b.png"), item("c.png")], 4))
    for path in (output.shard("cpu-00000"), output.shard("cpu-00001"), output.shard("cpu-00002"), output.index):
        path.touch()
    removed: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    output.take_back(["cpu-00000", "cpu-00002"])
    endings = ["cpu-00000.parquet", "cpu-00002.parquet", "cpu-00000.safetensors", "cpu-00002.safetensors"]
    assert removed == ["index.parquet", *endings]
    assert sorted(tree(output.root)) == [
        "run.json",
        "shards/cpu-00001.parquet",
        "shards/cpu-00001.safetensors",
    ]


def test_a_sweep_takes_what_nobody_writes_any_more(output: Output) -> None:
    output.shards.mkdir(parents=True)
    names = ["cpu-00000.safetensors.tmp", "cpu-00001.parquet.tmp", "cpu-00002.safetensors.tmp", "notes.tmp"]
    for name in names:
        (output.shards / name).touch()
    (output.shards / "cpu-00003.parquet.tmp").symlink_to("nowhere")
    (output.root / "plan.parquet.tmp").touch()
    output.sweep(others_fill=True)
    assert len(os.listdir(output.shards)) == 5
    assert os.listdir(output.root) == ["shards"]
    living = claim(output.shards / names[2])
    output.sweep()
    assert sorted(os.listdir(output.shards)) == names[2:]
    os.close(living)
    output.sweep()
    assert os.listdir(output.shards) == ["notes.tmp"]


# --- a folder that is removed under a run ---------------------------------------------------------------------------


def test_no_write_makes_a_folder_again_that_was_removed(output: Output) -> None:
    """The next run would find files without a run record in it, and take them for a stranger's."""
    sealed(output)
    (_, rows), *_ = split_shards(output.read_plan())
    shutil.rmtree(output.root)
    writes: list[Callable[[], object]] = [
        lambda: output.write_plan(rows),
        output.seal_plan,
        output.filling().__enter__,
        lambda: ShardWriter(output.shard("cpu-00000"), ShardFormat(recipe(), "cpu"), 1, 4),
        lambda: output.commit("cpu-00000", index_table(rows, {}), recipe()),
        lambda: output.finish([], [], recipe()),
        output.holding_range(1, 2).__enter__,
        lambda: output.holding_shard("cpu-00000", 0.0).__enter__(),
    ]
    for write in writes:
        with pytest.raises(RunError):
            write()
        assert not output.root.exists()


@pytest.mark.parametrize("gone", ["", "shards", "run.json"])
@pytest.mark.parametrize("fault", [None, FileNotFoundError("a file"), InputError([])])
def test_what_was_removed_is_named_whatever_failed_by_then(output: Output, gone: str, fault: Exception | None) -> None:
    sealed(output)
    place = output.root / gone

    def run() -> None:
        with output.alone(), output.filling():
            place.unlink() if place.is_file() else shutil.rmtree(place)
            if fault is not None:
                raise fault

    with pytest.raises(FolderRemoved, match=rf"while the run was writing into it: {place} is gone\."):
        run()


@pytest.mark.parametrize("error", [InputError([]), RunError("no"), OSError(5, "no"), KeyboardInterrupt()])
def test_other_errors_stay_what_they_are(output: Output, error: BaseException) -> None:
    sealed(output)
    with pytest.raises(type(error)) as caught, output.alone(), output.filling():
        raise error
    assert caught.value is error


@pytest.mark.parametrize(("missed", "left"), [("shards/cpu-00000.safetensors", ["run.json", "shards"]), ("shards", [])])
def test_what_a_removal_has_missed_is_no_strangers(output: Output, missed: str, left: list[str]) -> None:
    """`rm -r` reads a folder's names once, and a shard that is committed just then stays."""
    sealed(output)
    record = output.run.read_bytes()

    def write_late() -> None:
        shutil.rmtree(output.root)
        output.shards.mkdir(parents=True)
        if missed != "shards":
            (output.root / missed).touch()

    with pytest.raises(FolderRemoved, match=r"run\.json is gone"), output.filling():
        write_late()
    assert sorted(os.listdir(output.root)) == left
    assert not left or output.run.read_bytes() == record
    output.begin(recipe(), VERSIONS)


# --- seals ----------------------------------------------------------------------------------------------------------


def sealed(output: Output, name: str = "a.png") -> None:
    """A run that has planned one image."""
    output.begin(recipe(), VERSIONS)
    output.write_plan(planned(output.root.parent / "set", [item(name)]))


def test_a_plan_is_sealed_and_only_that_plan_is_read(output: Output) -> None:
    sealed(output)
    record = output.record()
    assert record is not None
    assert record.plan == xxhash.xxh3_128_hexdigest(output.plan.read_bytes())
    assert [rows["image"].to_pylist() for rows in output.read_plan()] == [["a.png"]]
    good = output.plan.read_bytes()
    for at in range(0, len(good), 97):
        flip(output.plan, at)
        with pytest.raises(InputError, match=r"plan\.parquet: was changed or damaged"):
            list(output.read_plan())
        output.plan.write_bytes(good)


def test_a_letter_of_the_record_cannot_change_unseen(output: Output) -> None:
    sealed(output)
    text = output.run.read_text()
    record = json.loads(text)
    changes = [(name, str(record[name])) for name in ("seal", "plan")] + [
        ("torch", VERSIONS["torch"]),
        ("plan", "plan"),
    ]
    for name, part in changes:
        changed = text.replace(part, ("1" if part[0] != "1" else "2") + part[1:], 1)
        assert changed != text, name
        output.run.write_text(changed)
        with pytest.raises(InputError, match=r"run\.json: was changed by hand or damaged"):
            output.record()
    output.run.write_text(json.dumps({name: value for name, value in record.items() if name not in ("seal", "plan")}))
    assert output.record() == RunRecord(recipe(), VERSIONS)  # of a version that had no seals


def test_a_plan_without_a_seal_gets_one(output: Output) -> None:
    """A kill between the plan and its seal."""
    output.begin(recipe(), VERSIONS)
    before = output.run.read_bytes()
    sealed(output)
    after = tree(output.root)
    output.run.write_bytes(before)
    output.seal_plan()
    output.seal_plan()
    assert tree(output.root) == after


def test_another_plan_takes_the_seal_off_first(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two plans never leaves a plan with the seal of another."""
    sealed(output)
    table = planned(output.root.parent / "set", [item("b.png")])
    monkeypatch.setattr(Output, "seal_plan", lambda self: None)
    output.write_plan(table)
    record = output.record()
    assert record is not None
    assert record.plan is None
    assert [rows["image"].to_pylist() for rows in output.read_plan()] == [["b.png"]]


def test_a_plan_that_is_gone_comes_back_as_it_was_or_not_at_all(output: Output) -> None:
    sealed(output)
    before = tree(output.root)
    output.plan.unlink()
    with pytest.raises(InputError, match=r"is gone, and another plan comes of the images today"):
        output.write_plan(planned(output.root.parent / "set", [item("b.png")]))
    assert sorted(os.listdir(output.root)) == ["run.json"]
    sealed(output)
    assert tree(output.root) == before


def test_a_damaged_plan_never_stores_another_image_under_an_id(tmp_path: Path) -> None:
    """Rows with sizes have no stamp: nothing but the seal tells that a path in the plan has another letter."""
    for number in range(4):
        picture(60, 50, seed=number).save(tmp_path / f"{number}.png")
    rows = [{"id": f"n{number}", "image": f"{number}.png", "width": 60, "height": 50} for number in range(4)]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    encode(manifest, tmp_path / "out", dtype="uint8", shard_size=20_000)
    whole = tree(tmp_path / "out")
    output = Output(tmp_path / "out")
    for path in (output.index, output.shard_index("cpu-00001"), output.shard("cpu-00001")):
        path.unlink()
    table = pq.read_table(output.plan)
    swapped = [{"2.png": "3.png"}.get(image, image) for image in table["image"].to_pylist()]
    at = table.schema.get_field_index("image")
    pq.write_table(
        table.set_column(at, table.schema.field(at), pa.array(swapped, table.schema.field(at).type)), output.plan
    )
    before = tree(tmp_path / "out")
    with pytest.raises(InputError, match=r"plan\.parquet: was changed or damaged"):
        encode(manifest, tmp_path / "out", dtype="uint8", shard_size=20_000)
    assert tree(tmp_path / "out") == before
    output.plan.rename(tmp_path / "damaged.parquet")  # as the sentence says
    encode(manifest, tmp_path / "out", dtype="uint8", shard_size=20_000)
    assert tree(tmp_path / "out") == whole


def test_a_finished_run_gets_its_plan_back(tmp_path: Path) -> None:
    picture(60, 50).save(tmp_path / "a.png")
    manifest = write_manifest(tmp_path / "m.jsonl", [{"id": "a", "image": "a.png"}])
    encode(manifest, tmp_path / "out")
    whole = tree(tmp_path / "out")
    (tmp_path / "out" / "plan.parquet").unlink()
    encode(manifest, tmp_path / "out")
    assert tree(tmp_path / "out") == whole
