"""folder.py: whose files are whose, and in which order they may go."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import reference
from conftest import VERSIONS, cfg_and_config, commit, item, planned, recipe, tree

from kimik3_prep.disk import claim
from kimik3_prep.errors import InputError, PlanMismatch
from kimik3_prep.output.folder import clear_output, open_run, sweep, uncommit
from kimik3_prep.output.tables import Layout, RunRecord, read_run


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """An output folder that is not there yet."""
    return Layout(tmp_path / "out")


def test_a_new_run_writes_its_record(layout: Layout) -> None:
    open_run(layout, recipe(), VERSIONS, overwrite=False)
    assert os.listdir(layout.root) == ["run.json"]
    record = read_run(layout)
    assert record == RunRecord(recipe(), VERSIONS)
    assert json.loads(layout.run.read_text()) == {
        "format": 1,
        "fingerprint": recipe().fingerprint,
        "facts": recipe().facts(),
        "versions": VERSIONS,
    }
    assert layout.run.read_text().endswith("}\n")


def test_the_same_settings_resume_and_other_versions_are_no_other_settings(layout: Layout) -> None:
    open_run(layout, recipe(), VERSIONS, overwrite=False)
    (layout.root / "notes.txt").write_text("mine")  # somebody's own file is no reason to refuse a run of ours
    before = tree(layout.root)
    open_run(layout, recipe(), {"torch": "3"}, overwrite=False)
    assert tree(layout.root) == before


def test_a_run_that_was_killed_while_writing_its_record_starts_anew(layout: Layout) -> None:
    layout.root.mkdir()
    (layout.root / "run.json.tmp").write_text('{"form')
    (layout.root / ".lock-3-of-8").touch()
    open_run(layout, recipe(), VERSIONS, overwrite=False)
    assert sorted(os.listdir(layout.root)) == [".lock-3-of-8", "run.json"]


def test_other_settings_are_named_each_with_old_and_new(layout: Layout) -> None:
    open_run(layout, recipe(), VERSIONS, overwrite=False)
    before = tree(layout.root)
    board = {**reference.PUBLISHED["transparent_bg_config"], "chessboard_gray_value": 200}
    config = cfg_and_config(image_mean=[0.48, 0.45, 0.4], transparent_bg_config=board)[1]
    decoders = {"pillow": "12.3.0", "avif": "1.3.0"}
    other = recipe(config=config, decoders=decoders, dtype="uint8", limit=5)
    with pytest.raises(PlanMismatch) as caught:
        open_run(layout, other, VERSIONS, overwrite=False)
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
    assert tree(layout.root) == before


def test_a_setting_that_became_a_table_is_named_whole(layout: Layout) -> None:
    open_run(layout, recipe(config=cfg_and_config(transparent_bg_config=None)[1]), {}, overwrite=False)
    with pytest.raises(PlanMismatch, match=r"config\.background: this run was started with None, now it is \{"):
        open_run(layout, recipe(), {}, overwrite=False)


@pytest.mark.parametrize("name", ["photo.jpg", "index.parquet", "plan.parquet", "shards", ".hidden"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_elses_is_refused_and_untouched(layout: Layout, name: str, overwrite: bool) -> None:
    """Even under our own names: without run.json nothing says that the files are ours, or what is in them."""
    (layout.root / "shards").mkdir(parents=True) if name == "shards" else layout.root.mkdir()
    path = layout.root / name / "cpu-00000.parquet" if name == "shards" else layout.root / name
    path.write_text("precious")
    with pytest.raises(InputError, match="choose another --output") as caught:
        open_run(layout, recipe(), VERSIONS, overwrite)
    assert name in str(caught.value)
    assert path.read_text() == "precious"
    assert sum(1 for found in layout.root.rglob("*") if found.is_file()) == 1


@pytest.mark.parametrize("below", ["", "sub", "sub/deeper"])
def test_a_file_in_the_way(tmp_path: Path, below: str) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(InputError, match="out: is a file"):
        open_run(Layout(tmp_path / "out" / below), recipe(), VERSIONS, overwrite=True)
    assert (tmp_path / "out").read_text() == "precious"


def test_overwrite_removes_our_files_and_keeps_the_others(layout: Layout) -> None:
    open_run(layout, recipe(), VERSIONS, overwrite=False)
    layout.shards.mkdir()
    ours = ["index.parquet", "plan.parquet", "plan.parquet.tmp", "shards/cpu-00000.safetensors"]
    ours += ["shards/cpu-00000.parquet", "shards/gpu-123456.safetensors.tmp", "shards/local-00001.parquet"]
    others = ["notes.txt", "shards/notes.txt", "shards/cpu-0.parquet", "shards/cpu-00000.parquet.bak"]
    for name in ours + others:
        (layout.root / name).write_text(name)
    open_run(layout, recipe(dtype="uint8"), VERSIONS, overwrite=True)
    assert sorted(tree(layout.root)) == sorted([*others, "run.json", "shards"])
    record = read_run(layout)
    assert record is not None
    assert record.recipe.dtype == "uint8"


def test_clearing_is_in_an_order_that_a_kill_cannot_turn_into_a_lie(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_run(layout, recipe(), VERSIONS, overwrite=False)
    commit(layout, planned(layout.root.parent / "set", [item("a.png"), item("b.png")], 4))
    for name in ("cpu-00000", "cpu-00001"):
        layout.shard(name).touch()
    layout.plan.touch()
    layout.index.touch()
    removed: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    clear_output(layout)
    assert removed[0] == "index.parquet"
    assert {name.rpartition(".")[2] for name in removed[1:3]} == {"parquet"}
    assert {name.rpartition(".")[2] for name in removed[3:5]} == {"safetensors"}
    assert removed[5:] == ["plan.parquet", "run.json"]
    assert os.listdir(layout.root) == []


def test_shards_that_are_kept_on_another_disk_can_be_overwritten(layout: Layout, tmp_path: Path) -> None:
    open_run(layout, recipe(), VERSIONS, overwrite=False)
    (tmp_path / "disk").mkdir()
    layout.shards.symlink_to(tmp_path / "disk")
    layout.shard("cpu-00000").touch()
    open_run(layout, recipe(), VERSIONS, overwrite=True)
    assert os.listdir(tmp_path / "disk") == []
    assert layout.shards.is_symlink()


def test_commits_are_taken_back_index_first(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    open_run(layout, recipe(), VERSIONS, overwrite=False)
    commit(layout, planned(layout.root.parent / "set", [item("a.png"), item("b.png"), item("c.png")], 4))
    for path in (layout.shard("cpu-00000"), layout.shard("cpu-00001"), layout.shard("cpu-00002"), layout.index):
        path.touch()
    removed: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    uncommit(layout, ["cpu-00000", "cpu-00002"])
    endings = ["cpu-00000.parquet", "cpu-00002.parquet", "cpu-00000.safetensors", "cpu-00002.safetensors"]
    assert removed == ["index.parquet", *endings]
    assert sorted(tree(layout.root)) == [
        "run.json",
        "shards",
        "shards/cpu-00001.parquet",
        "shards/cpu-00001.safetensors",
    ]


def test_a_sweep_takes_what_nobody_writes_any_more(layout: Layout) -> None:
    layout.shards.mkdir(parents=True)
    names = ["cpu-00000.safetensors.tmp", "cpu-00001.parquet.tmp", "cpu-00002.safetensors.tmp", "notes.tmp"]
    for name in names:
        (layout.shards / name).touch()
    (layout.shards / "cpu-00003.parquet.tmp").symlink_to("nowhere")
    (layout.root / "plan.parquet.tmp").touch()
    sweep(layout, shards=False)
    assert len(os.listdir(layout.shards)) == 5
    assert os.listdir(layout.root) == ["shards"]
    living = claim(layout.shards / names[2])
    sweep(layout)
    assert sorted(os.listdir(layout.shards)) == names[2:]
    os.close(living)
    sweep(layout)
    assert os.listdir(layout.shards) == ["notes.tmp"]
