"""missing.py: a wrong base folder is found before work, and where such files do lie is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Silent, write_manifest

from kimik3_prep.errors import InputError, Problem
from kimik3_prep.manifest.missing import missing_files
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.manifest.report import show
from kimik3_prep.run.check import Settings, check


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pictures in one place, lists in another; the working folder is neither."""
    (tmp_path / "data" / "pictures" / "2024").mkdir(parents=True)
    (tmp_path / "data" / "lists").mkdir()
    (tmp_path / "data" / "pictures" / "2024" / "a.jpg").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def told(path: Path, *images: str, **more: Any) -> Problem | None:
    return missing_files(read_manifest(str(write_manifest(path, [{"image": image} for image in images])), **more))


def test_the_folder_that_was_tried_and_the_one_that_has_them(folder: Path) -> None:
    problem = told(folder / "lists" / "m.jsonl", "2024/a.jpg", "2024/b.jpg")
    assert problem is not None
    assert f"the folder that was tried is {show(f'{folder}/lists')}" in problem.what
    assert f"--image-dir {folder}/pictures" in problem.hint
    assert told(folder / "lists" / "m.jsonl", "2024/a.jpg", image_dir=str(folder / "pictures")) is None


@pytest.mark.parametrize("image", ["/old/place/2024/a.jpg", "file:///old/2024/a.jpg"])
def test_absolute_paths_of_another_machine(folder: Path, image: str) -> None:
    problem = told(folder / "m.jsonl", image)
    assert problem is not None
    assert f"{folder}/pictures" in problem.hint


def test_one_file_that_is_there_is_enough(folder: Path) -> None:
    gone = [f"{n}.jpg" for n in range(90)]
    assert told(folder / "m.jsonl", *gone, "pictures/2024/a.jpg") is None
    assert told(folder / "m.jsonl", *gone) is not None
    assert told(folder / "m.jsonl", "https://host/a.jpg", "data:,x") is None


def test_the_run_stops_before_it_writes_a_folder_of_failures(folder: Path, tmp_path: Path) -> None:
    manifest = str(write_manifest(folder / "m.jsonl", [{"image": "a.jpg"}]))
    settings = Settings(manifest, tmp_path / "out", "kimi-k3", "cpu")
    with pytest.raises(InputError) as caught:
        check(settings, Silent())
    (problem,) = caught.value.problems
    assert (problem.severity, "--on-missing record goes on" in problem.hint) == ("error", True)
    assert not os.path.exists(tmp_path / "out")
    check(Settings(manifest, tmp_path / "out", "kimi-k3", "cpu", on_missing="record"), Silent())
