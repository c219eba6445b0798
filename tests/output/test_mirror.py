"""mirror.py: an output in an object store is the output in a folder, whatever fails on the way and whoever goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import BINARY, Silent, picture, write_manifest
from stores import Store

from kimik3_prep.errors import InputError, PlanMismatch, RunError
from kimik3_prep.output import mirror
from kimik3_prep.output.mirror import MirroredOutput, open_output, send, staging_folder
from kimik3_prep.run.check import Settings
from kimik3_prep.run.prepare import prepare

OUT = "s3://bucket/out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images in three shards, and one that is not there."""
    for number in range(5):
        picture(100 + 3 * number, 90, seed=number).save(tmp_path / f"{number}.png")
    rows = [{"id": f"n{n}", "image": f"{n}.png"} for n in range(5)]
    write_manifest(tmp_path / "m.jsonl", [*rows, {"id": "gone", "image": "gone.png"}])
    return tmp_path


def settings(folder: Path, store: str | None = OUT, staging: str = "staging", **more: Any) -> Settings:
    fixed: dict[str, Any] = {"config": "kimi-k3", "backend": "cpu", "dtype": "uint8", "shard_size": 80_000}
    place = {"output": folder / staging} if store is None else {"output": store, "staging": folder / staging}
    return Settings(str(folder / "m.jsonl"), **place, **fixed | more)


def local(folder: Path, name: str = "local", **more: Any) -> dict[str, bytes]:
    """The files of the same run into a folder."""
    prepare(settings(folder, None, name, **more), Silent())
    return files(folder / name)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_same_files_in_the_order_that_commits_them(s3: Store, folder: Path) -> None:
    whole = local(folder)
    summary = prepare(settings(folder), Silent())
    assert s3.objects("out/") == whole
    assert not (folder / "staging").exists()
    sent = [key.removeprefix("out/") for key in s3.sent()]
    assert (sent[:3], sent[-1]) == (["run.json", "plan.parquet", "run.json"], "index.parquet")
    shards = [name for name in sent if name.endswith(".safetensors")]
    assert len(shards) == 3
    assert all(sent.index(name) < sent.index(name.replace("safetensors", "parquet")) for name in shards)
    assert len(sent) == len(set(sent)) + 1 == 10  # the run record goes again, with the plan's seal
    assert (summary.output, summary.shards, summary.failed) == (OUT, 3, 1)
    assert summary.size == sum(len(content) for name, content in whole.items() if name.endswith(".safetensors"))
    s3.asked.clear()
    again = prepare(settings(folder), Silent())
    assert (again.skipped, again.size, s3.sent()) == (None, summary.size, [])


def test_killed_between_a_shard_and_its_index(s3: Store, folder: Path) -> None:
    """Then the same command, here and on another machine."""
    whole = local(folder)
    command = [BINARY, "encode", folder / "m.jsonl", "--config", "kimi-k3", "--backend", "cpu", "--dtype", "uint8"]
    command += ["--shard-size", "80000", "--no-progress", "-o", OUT, "--staging"]
    for other in (False, True):
        s3.empty()
        running: list[subprocess.Popen[str]] = []

        def kill(method: str, key: str, running: list[subprocess.Popen[str]] = running) -> int | None:
            if (method, key) == ("PUT", "out/shards/cpu-00001.parquet"):
                os.kill(running[0].pid, signal.SIGKILL)
                return 500
            return None

        s3.fault = kill
        running.append(subprocess.Popen([*map(str, command), folder / f"here-{other}"]))
        assert running[0].wait(120) == -signal.SIGKILL
        s3.fault = lambda method, key: None
        held = s3.objects("out/")
        assert "shards/cpu-00001.safetensors" in held
        assert not {"shards/cpu-00001.parquet", "index.parquet"} & set(held)
        s3.asked.clear()
        for number in range(5):  # as a machine would see them that has no business with finished shards
            os.utime(folder / f"{number}.png", ns=(1, (folder / f"{number}.png").stat().st_mtime_ns))
        place = folder / ("there" if other else "here-False")
        done = subprocess.run([*map(str, command), place], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1, done.stderr
        assert s3.objects("out/") == whole
        sent = s3.sent()
        assert not {"out/run.json", "out/plan.parquet", "out/shards/cpu-00000.safetensors"} & set(sent)
        assert "out/shards/cpu-00001.safetensors" not in sent, "it is there, byte for byte"
        assert "out/shards/cpu-00001.parquet" in sent


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize(
    "name",
    ["run.json", "plan.parquet", "shards/cpu-00000.safetensors", "shards/cpu-00002.parquet", "index.parquet"],
)
def test_stopped_at_every_upload(s3: Store, folder: Path, name: str, other: bool) -> None:
    whole = local(folder)
    s3.fault = lambda method, key: 403 if (method, key) == ("PUT", f"out/{name}") else None
    with pytest.raises(RunError, match=f"cannot write s3://bucket/out/{name}: the store does not allow it. What"):
        prepare(settings(folder), Silent())
    assert name not in s3.objects("out/")
    s3.fault = lambda method, key: None
    prepare(settings(folder, staging="elsewhere" if other else "staging"), Silent())
    assert s3.objects("out/") == whole


def test_what_arrives_damaged_is_sent_again(s3: Store, folder: Path) -> None:
    whole = local(folder)
    damaged: list[str] = []

    def damage(method: str, key: str) -> str | None:
        if method == "PUT" and key.endswith(".safetensors") and key not in damaged:
            damaged.append(key)
            return "damage"
        return None

    s3.fault = damage
    prepare(settings(folder), Silent())
    assert len(damaged) == 3
    assert s3.objects("out/") == whole
    s3.empty()
    s3.fault = lambda method, key: "damage" if method == "PUT" and key.endswith("0.safetensors") else None
    with pytest.raises(RunError):
        prepare(settings(folder), Silent())
    assert "shards/cpu-00000.parquet" not in s3.names("out/"), "no commit of what is not whole"


def test_a_store_without_checksums_is_read_back(folder: Path) -> None:
    whole = local(folder)
    store = fsspec.filesystem("memory")
    store.rm("/out", recursive=True) if store.exists("/out") else None
    prepare(settings(folder, "memory://out"), Silent())
    assert {name.removeprefix("/out/"): store.cat_file(name) for name in store.find("/out")} == whole


def test_large_files_go_in_parts_and_are_not_read_back(s3: Store, tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(b"start")
    os.truncate(path, 101 << 20)
    send(path, f"{OUT}/large.bin")
    assert len([key for key in s3.sent() if key == "out/large.bin"]) == 3
    assert s3.of("out/large.bin") == []


def test_starting_anew_removes_only_what_is_ours(s3: Store, folder: Path) -> None:
    foreign = {"notes.txt": b"mine", "shards/other.parquet": b"mine too", "shards/cpu-1.parquet": b"mine"}
    prepare(settings(folder, dtype="float32"), Silent())
    for name, content in foreign.items():
        s3.put(f"out/{name}", content)
    with pytest.raises(PlanMismatch, match=r"s3://bucket/out/run\.json: dtype"):
        prepare(settings(folder), Silent())
    s3.asked.clear()
    prepare(settings(folder, overwrite=True), Silent())
    removed = [key.removeprefix("out/") for verb, key, _ in s3.asked if verb == "DELETE"]
    assert (removed[0], removed[-1]) == ("index.parquet", "run.json")
    shards = [name for name in removed if name.startswith("shards/")]
    assert shards == sorted(shards, key=lambda name: name.endswith(".safetensors"))
    found = s3.objects("out/")
    assert {name: found.pop(name) for name in foreign} == foreign
    assert found == local(folder)


def test_a_place_with_objects_of_others_is_refused(s3: Store, folder: Path) -> None:
    s3.put("out/notes.txt", b"mine")
    with pytest.raises(InputError, match=r"s3://bucket/out: holds 'notes.txt' and no run.json"):
        prepare(settings(folder, overwrite=True), Silent())
    assert s3.objects() == {"out/notes.txt": b"mine"}


@pytest.mark.parametrize("staging", ["staging", "elsewhere"])
def test_retrying_failed_items(s3: Store, folder: Path, staging: str) -> None:
    os.truncate(folder / "1.png", 3000)
    prepare(settings(folder), Silent())
    picture(100, 90, seed=8).save(folder / "gone.png")
    picture(103, 90, seed=1).save(folder / "1.png")
    s3.asked.clear()
    s3.fault = lambda method, key: 403 if (method, key) == ("PUT", "out/plan.parquet") else None
    with pytest.raises(RunError):
        prepare(settings(folder, retry_failed=True), Silent())
    kept = ["plan.parquet", "run.json", "shards/cpu-00001.parquet", "shards/cpu-00001.safetensors"]
    assert s3.names("out/") == kept, "no commit of what the new plan does not keep, before the store has it"
    s3.fault = lambda method, key: None
    summary = prepare(settings(folder, staging=staging, retry_failed=True), Silent())
    assert summary.failed == 0
    assert s3.objects("out/") == local(folder)
    sent = {key for key in s3.sent() if key.endswith(".safetensors")}
    assert sent == {"out/shards/cpu-00000.safetensors", "out/shards/cpu-00002.safetensors"}
    quiet = len(s3.sent())
    assert prepare(settings(folder, retry_failed=True), Silent()).skipped is None
    assert len(s3.sent()) == quiet


def test_stale_staging_is_dropped(s3: Store, folder: Path) -> None:
    """Two machines: what the second has planned anew is not undone by what waits on the first."""
    s3.fault = lambda method, key: 403 if (method, key) == ("PUT", "out/shards/cpu-00002.parquet") else None
    with pytest.raises(RunError):
        prepare(settings(folder), Silent())
    assert (folder / "staging" / "shards" / "cpu-00002.safetensors").is_file()
    shutil.copytree(folder / "staging", folder / "first")
    s3.fault = lambda method, key: None
    picture(100, 90, seed=8).save(folder / "gone.png")
    prepare(settings(folder, staging="elsewhere", overwrite=True), Silent())
    whole = s3.objects("out/")
    assert whole == local(folder)
    for finished in (True, False):
        if not finished:
            for name in ("index.parquet", "shards/cpu-00002.parquet"):
                s3.client().delete_object(Bucket="bucket", Key=f"out/{name}")
        prepare(settings(folder, staging="staging" if finished else "first"), Silent())
        assert s3.objects("out/") == whole


def test_what_waits_in_the_staging_folder_is_sent(s3: Store, folder: Path) -> None:
    whole = local(folder)
    s3.fault = lambda method, key: 403 if (method, key) == ("PUT", "out/shards/cpu-00002.safetensors") else None
    with pytest.raises(RunError):
        prepare(settings(folder), Silent())
    s3.fault = lambda method, key: None
    (folder / "4.png").unlink()  # the image in that shard is not needed any more
    prepare(settings(folder), Silent())
    assert s3.objects("out/") == whole


def test_commits_that_the_store_lost_are_made_again(s3: Store, folder: Path) -> None:
    s3.fault = lambda method, key: 403 if (method, key) == ("PUT", "out/index.parquet") else None
    with pytest.raises(RunError):
        prepare(settings(folder), Silent())
    assert len(list((folder / "staging" / "shards").iterdir())) == 3, "the indexes of what has arrived"
    s3.fault = lambda method, key: None
    for name in ("cpu-00001.parquet", "cpu-00001.safetensors", "cpu-00002.safetensors"):
        s3.client().delete_object(Bucket="bucket", Key=f"out/shards/{name}")
    prepare(settings(folder), Silent())
    assert s3.objects("out/") == local(folder)


def test_a_staging_folder_of_something_else_is_left_alone(s3: Store, folder: Path) -> None:
    whole = local(folder)
    with pytest.raises(InputError, match="does not stage the output for s3://bucket/out"):
        prepare(settings(folder, staging="local"), Silent())
    assert files(folder / "local") == whole
    assert s3.objects() == {}


def test_the_default_staging_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, s3: Store) -> None:
    monkeypatch.setattr(mirror.tempfile, "tempdir", str(folder / "tmp"))
    output = open_output(f"{OUT}/")
    place = output.root
    assert output == MirroredOutput(staging_folder(OUT), OUT)
    assert place.parent == folder / "tmp"
    place.parent.mkdir()
    place.symlink_to(folder)
    with pytest.raises(InputError, match="belongs to somebody else"):
        prepare(settings(folder, staging=str(place)), Silent())


@pytest.mark.parametrize(
    ("output", "staging", "what"),
    [
        ("https://host/out", None, "a web server takes no files"),
        ("s9://bucket/out", None, "no protocol fsspec knows"),
        ("out", Path("staging"), "--staging: is for an output in an object store"),
    ],
)
def test_places_that_cannot_be(output: str, staging: Path | None, what: str) -> None:
    with pytest.raises(InputError, match=what):
        open_output(output, staging)


def test_a_bucket_that_is_not_there(s3: Store, folder: Path) -> None:
    with pytest.raises(RunError, match="no such bucket"):
        prepare(settings(folder, "s3://nobody/out"), Silent())
