"""What was cut, flipped, swapped, lost or added is named, and nothing else is."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from conftest import Run, encode, flip, local_row, picture, tree, write_manifest

from kimik3_prep.errors import InputError
from kimik3_prep.images.decode import codec_versions
from kimik3_prep.output.folder import Output
from kimik3_prep.reading.verify import Comparison, Finding, Verification, verify


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three shards of equal size, with a repeat, a missing and a cut image."""
    folder = tmp_path_factory.mktemp("verify")
    for number in range(5):
        picture(100, 90, ["RGB", "RGBA"][number % 2], seed=number).save(folder / f"{number}.png")
    (folder / "cut.png").write_bytes((folder / "1.png").read_bytes()[:-900])
    rows = [{"id": f"n{number}", "image": f"{number}.png"} for number in range(5)]
    rows += [{"id": "gone", "image": "gone.png"}, {"id": "cut", "image": "cut.png"}, {"id": "again", "image": "0.png"}]
    encode(write_manifest(folder / "m.jsonl", rows), folder / "out", dtype="uint8", shard_size=80_000)
    assert len(list((folder / "out" / "shards").glob("*.safetensors"))) == 3
    return folder / "out"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """That run, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "out"))


def findings(root: Path) -> tuple[Finding, ...]:
    """What verify says; no advice of it destroys anything."""
    result = verify(root).problems
    assert all(finding.file and finding.what and finding.todo for finding in result)
    assert not any(word in finding.todo for finding in result for word in ("delete", "remove", "--overwrite"))
    return result


def again(root: Path, manifest: Path, sample: int | None = None) -> Verification:
    """Verify a run, and compute its images again."""
    return verify(root, Comparison(str(manifest), sample))


def test_a_run_as_it_was_written(whole: Path) -> None:
    size = sum(path.stat().st_size for path in whole.glob("shards/*.safetensors"))
    assert verify(whole) == Verification(
        path=str(whole), finished=True, rows=8, images=5, shards=3, bytes=size, problems=()
    )


def test_any_flipped_bit_of_a_shard_is_found(copy: Path) -> None:
    path = copy / "shards" / "cpu-00001.safetensors"
    good, chance = path.read_bytes(), random.Random(1)
    grids = good.index(b'"grid_thws"') and 8 + int.from_bytes(good[:8], "little")
    places = [*range(24), *range(grids, grids + 48), *(chance.randrange(len(good)) for _ in range(40)), len(good) - 1]
    for at in places:
        flip(path, at, chance.randrange(8))
        found = findings(copy)
        assert [finding.file for finding in found] == ["shards/cpu-00001.safetensors"], at
        assert "move index.parquet, shards/cpu-00001.parquet and shards/cpu-00001.safetensors out" in found[0].todo
        path.write_bytes(good)
    flip(path, grids + 48 + 5)
    assert findings(copy)[0].item == "n2"


def cut(root: Path) -> None:
    path = root / "shards/cpu-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def longer(root: Path) -> None:
    path = root / "shards/cpu-00000.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


def swap(root: Path) -> None:
    a, b = root / "shards/cpu-00000.safetensors", root / "shards/cpu-00001.safetensors"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def change(name: str, column: str, value: Any, row: int = 0) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        table = pq.read_table(root / name)
        values = table[column].to_pylist()
        values[row] = value
        at = table.schema.get_field_index(column)
        pq.write_table(
            table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type)), root / name
        )

    return damage


def drop_row(root: Path) -> None:
    table = pq.read_table(root / "index.parquet")
    pq.write_table(table.slice(0, table.num_rows - 1), root / "index.parquet")


def other_run(root: Path) -> None:
    table = pq.read_table(root / "shards/cpu-00000.parquet")
    about = json.loads(table.schema.metadata[b"kimik3_prep"])
    about["fingerprint"] = "0" * 64
    pq.write_table(table.replace_schema_metadata({"kimik3_prep": json.dumps(about)}), root / "shards/cpu-00000.parquet")


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (cut, "shards/cpu-00000.safetensors", ""),
        (longer, "shards/cpu-00000.safetensors", ""),
        (swap, "shards/cpu-00000.safetensors", "checksum"),
        (lambda root: (root / "shards/cpu-00001.parquet").unlink(), "shards/cpu-00001.parquet", "missing"),
        (lambda root: (root / "shards/cpu-00001.safetensors").unlink(), "shards/cpu-00001.safetensors", "missing"),
        (
            lambda root: (root / "shards/cpu-00001.parquet").write_bytes(b"x"),
            "shards/cpu-00001.parquet",
            "not an index",
        ),
        (lambda root: (root / "index.parquet").unlink(), "index.parquet", "not finished"),
        (lambda root: (root / "index.parquet").write_bytes(b"PAR1"), "index.parquet", "not an index"),
        (lambda root: (root / "plan.parquet").unlink(), "plan.parquet", "not a plan"),
        (lambda root: (root / ".lock").touch(), ".lock", "killed"),
        (lambda root: (root / ".lock-2-of-3").touch(), ".lock-2-of-3", "killed"),
        (lambda root: (root / ".lock-gpu-00001").touch(), ".lock-gpu-00001", "killed"),
        (
            lambda root: (root / "shards/cpu-00001.safetensors.tmp").touch(),
            "shards/cpu-00001.safetensors.tmp",
            "killed",
        ),
        (lambda root: (root / "shards/gpu-00009.parquet").touch(), "shards/gpu-00009.parquet", "no shard of the plan"),
        (drop_row, "index.parquet", "each once"),
        (other_run, "shards/cpu-00000.parquet", "metadata"),
        (change("index.parquet", "content_hash", "sha256:0"), "index.parquet", "it should be 'sha256:0'"),
        (change("index.parquet", "content_hash", "sha256:0", 1), "index.parquet", "one of the two files is damaged"),
        (change("index.parquet", "shard", "../../other"), "index.parquet", "shard is '../../other'"),
        (change("index.parquet", "item", 1), "index.parquet", "each once"),
        (change("shards/cpu-00000.parquet", "num_tokens", 7), "shards/cpu-00000.parquet", "num_tokens is 7"),
        (change("shards/cpu-00000.parquet", "id", "x"), "shards/cpu-00000.parquet", "id is 'x'"),
        (change("shards/cpu-00001.parquet", "checksum", "0" * 32), "shards/cpu-00001.parquet", "checksum"),
        (change("shards/cpu-00001.parquet", "patch_start", 4), "shards/cpu-00001.parquet", "without gaps"),
        (change("shards/cpu-00001.parquet", "grid_h", 9), "shards/cpu-00001.parquet", "grid_h is 9"),
        (change("shards/cpu-00001.parquet", "item", 0), "shards/cpu-00001.parquet", "planned for this shard"),
    ],
)
def test_damage_is_named(copy: Path, damage: Callable[[Path], None], file: str, words: str) -> None:
    damage(copy)
    result = findings(copy)
    assert any(finding.file == file and words in finding.what for finding in result), result


@pytest.mark.parametrize("name", ["cpu-00000/../../../x", "../../x", ""])
def test_a_plan_that_names_a_file_elsewhere_is_refused(copy: Path, name: str) -> None:
    """The plan is sealed: whoever wrote the name has sealed it anew."""
    output = Output(copy)
    plan = pa.concat_tables(output.read_plan())
    names = [name if shard == "cpu-00001" else shard for shard in plan["shard"].to_pylist()]
    at = plan.schema.get_field_index("shard")
    output.write_plan(plan.set_column(at, plan.schema.field(at), [names]))
    with pytest.raises(InputError, match=r"names the shard .*; expected a name like cpu-00000"):
        verify(copy)


def test_what_it_says_to_do_mends_it(copy: Path, whole: Path, tmp_path: Path) -> None:
    flip(copy / "shards" / "cpu-00001.safetensors", -5)
    for name in ("index.parquet", "shards/cpu-00001.parquet", "shards/cpu-00001.safetensors"):
        (copy / name).rename(tmp_path / Path(name).name)
    encode(whole.parent / "m.jsonl", copy, dtype="uint8", shard_size=80_000)
    assert tree(copy) == tree(whole)


def test_no_output_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run\.json"):
        verify(tmp_path)


def test_the_command(copy: Path, run: Run) -> None:
    done = run("verify", copy)
    assert (done.returncode, "all as it was written in 3 shards" in done.stdout) == (0, True)
    flip(copy / "shards" / "cpu-00000.safetensors", -1)
    done = run("verify", copy)
    assert done.returncode == 1
    assert "problem: shards/cpu-00000.safetensors, n1: pixel_values[" in done.stdout
    report = json.loads(run("verify", copy, "--format", "json").stdout)
    assert [problem["item"] for problem in report["problems"]] == ["n1"]
    assert run("verify", copy.parent).returncode == 2


# --- against the images -------------------------------------------------------------------------------------------


def test_against_the_images(copy: Path, whole: Path, run: Run) -> None:
    manifest = whole.parent / "m.jsonl"
    report = again(copy, manifest)
    assert (report.compared, report.problems) == (5, ())  # the cut one was planned, and is not stored
    assert again(copy, manifest, sample=2).compared == 2
    done = run("verify", copy, "--against-source", "--manifest", manifest, "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["compared"]) == (0, 5)


def forge(root: Path, name: str) -> None:
    """Change the last byte of a shard, and with it every checksum: stored features that nothing else contradicts."""
    shard, index = root / "shards" / f"{name}.safetensors", root / "shards" / f"{name}.parquet"
    flip(shard, -1)
    rows = pq.read_table(index)
    last = rows["patch_start"].to_pylist().index(max(rows["patch_start"].drop_null().to_pylist()))
    count = 588 * rows["patch_count"][last].as_py()
    digest = xxhash.xxh3_128_hexdigest(shard.read_bytes()[-count:])
    change(f"shards/{name}.parquet", "checksum", digest, last)(root)
    change("index.parquet", "checksum", digest, rows["item"][last].as_py())(root)


def test_damage_and_difference_have_their_own_advice(copy: Path, whole: Path) -> None:
    """A damaged image is not compared. Stored bytes that are as they were written are never called damaged."""
    flip(copy / "shards" / "cpu-00001.safetensors", -1)
    forge(copy, "cpu-00002")
    report = again(copy, whole.parent / "m.jsonl")
    damage, difference = report.problems
    assert report.compared == 4
    assert (damage.item, difference.item) == ("n3", "n4")
    assert "checksum" in damage.what
    assert "out of the folder" in damage.todo
    assert difference.what.startswith("the CPU backend gives other bytes; its versions are the run's own: ")
    assert difference.todo.startswith("nothing is damaged")


def test_versions_that_differ_are_named(copy: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(copy, "cpu-00002")
    here = {**codec_versions(), "pillow": "99.1"}
    monkeypatch.setattr("kimik3_prep.reading.verify.codec_versions", lambda *formats: here)
    (finding,) = again(copy, whole.parent / "m.jsonl").problems
    assert f"versions differ: pillow {codec_versions()['pillow']} in the run and 99.1 here" in finding.what


def test_a_damaged_plan_does_not_end_the_comparison_with_an_error(copy: Path, whole: Path) -> None:
    (copy / "plan.parquet").write_bytes(b"PAR1")
    report = again(copy, whole.parent / "m.jsonl")
    assert report.compared == 0
    assert [finding.file for finding in report.problems] == ["plan.parquet"]


def test_images_that_changed_or_went_away(whole: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(whole.parent, tmp_path / "moved"))
    (moved / "0.png").unlink()
    shutil.copy(moved / "2.png", moved / "3.png")
    gone, other = again(moved / "out", moved / "m.jsonl").problems
    assert (gone.item, gone.todo) == ("n0", "restore the image")
    assert "the image cannot be computed again: not_found" in gone.what
    assert (other.item, other.what.startswith("the image is another one now (sha256:")) == ("n3", True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
def test_every_dtype_and_path_against_the_images(tmp_path: Path, dtype: str) -> None:
    picture(300, 200, "RGBA").save(tmp_path / "a.png")
    rows = [{"id": "a", "image": "a.png"}, local_row(tmp_path, "b.npy", picture(30, 170))]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    encode(manifest, tmp_path / "out", dtype=dtype)
    report = again(tmp_path / "out", manifest)
    assert (report.compared, report.problems) == (2, ())


def test_code_runs_only_when_it_was_allowed(copy: Path, run: Run) -> None:
    done = run("verify", copy, "--processor", "somewhere")
    assert done.returncode == 2
    assert "--trust-remote-code" in done.stderr


def test_a_missing_transformers_is_said(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'kimik3-prep\[verify\]'"):
        verify(whole, Comparison(processor=Path("somewhere"), trusted=True))


PROCESSOR = '''
import numpy as np
import torch
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

class StandIn(BaseImageProcessor):
    """Enough for opaque pictures that need no resize. `wrong`: one value, the grid, or everything."""
    def __init__(self, wrong="", **more):
        super().__init__(**more)
        self.wrong = wrong

    def preprocess(self, medias, return_tensors="pt"):
        pixels, grids = [], []
        for media in medias:
            levels = np.asarray(media["image"].convert("RGB"))
            h, w = (-(-side // 28) * 28 for side in levels.shape[:2])
            padded = np.zeros((h, w, 3), np.uint8)
            padded[: levels.shape[0], : levels.shape[1]] = levels
            values = ((padded / 255.0).astype(np.float32) - np.float32(0.5)) * np.float32(2)
            patches = values.reshape(h // 14, 14, w // 14, 14, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 14, 14)
            pixels.append(patches)
            grids.append([1, h // 14, w // 14])
        out = np.ascontiguousarray(np.concatenate(pixels))
        if self.wrong == "everything":
            raise OverflowError("too much for it")
        if self.wrong == "grid":
            grids[0].reverse()
        if self.wrong == "value":
            out[0, 0, 0, 0] = out[0, 0, 0, 1] + 0.0 if out[0, 0, 0, 0] != out[0, 0, 0, 1] else -out[0, 0, 0, 0] or 1.0
        return BatchFeature({"pixel_values": torch.from_numpy(out), "grid_thws": torch.tensor(grids)})
'''


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("", ""),
        ("value", "gives other bytes"),
        ("grid", "gives the grid [8, 8, 1], stored is [1, 8, 8]"),
        ("everything", "fails: OverflowError: too much for it"),
    ],
)
def test_against_the_processor_of_a_checkpoint(tmp_path: Path, wrong: str, words: str, run: Run) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "stand_in.py").write_text(PROCESSOR)
    config = {"image_processor_type": "StandIn", "auto_map": {"AutoImageProcessor": "stand_in.StandIn"}, "wrong": wrong}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    picture(100, 90).save(tmp_path / "a.png")
    manifest = write_manifest(tmp_path / "m.jsonl", [{"id": "a", "image": "a.png"}])
    encode(manifest, tmp_path / "out")
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    options = ["--processor", folder, "--trust-remote-code", "--manifest", manifest]
    done = run("verify", tmp_path / "out", *options, env=home)
    assert done.returncode == (1 if wrong else 0), done.stderr
    said = f"the checkpoint's processor {words}; its versions are the run's own: "
    assert ("nothing is damaged" in done.stdout, said in done.stdout) == (bool(wrong), bool(wrong)), done.stdout
    assert "out of the folder" not in done.stdout
    assert "restore" not in done.stdout


@pytest.mark.parametrize("code", [None, "raise RuntimeError('no')", "class StandIn: pass", "def (:"])
def test_a_checkpoint_whose_processor_does_not_load(code: str | None, copy: Path, whole: Path, run: Run) -> None:
    folder = copy.parent / "checkpoint"
    folder.mkdir()
    if code is not None:
        (folder / "stand_in.py").write_text(code)
        config = {"image_processor_type": "StandIn", "auto_map": {"AutoImageProcessor": "stand_in.StandIn"}}
        (folder / "preprocessor_config.json").write_text(json.dumps(config))
    home = {"HF_HOME": str(copy.parent / "home"), "HF_HUB_OFFLINE": "1"}
    options = ["--processor", folder, "--trust-remote-code", "--manifest", whole.parent / "m.jsonl"]
    done = run("verify", copy, *options, env=home)
    assert done.returncode == 2, done.stderr
    assert f"{folder}: no image processor could be loaded from it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_picture_that_failed_does_not_hide_where_the_others_are(tmp_path: Path, run: Run) -> None:
    picture(60, 50).save(tmp_path / "a.png")
    write_manifest(tmp_path / "m.jsonl", [{"image": "gone.png"}, {"image": "a.png"}])
    assert run("encode", "m.jsonl", "--config", "kimi-k3", "-o", "out").returncode == 1
    assert run("verify", "out", "--against-source").returncode == 0
    (tmp_path / "elsewhere").mkdir()
    done = run("verify", "../out", "--against-source", cwd=tmp_path / "elsewhere")
    assert (done.returncode, "add --manifest FILE" in done.stderr) == (2, True)


def test_what_no_processor_looked_at_was_not_compared(copy: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimik3_prep.reading.verify._load_processor", lambda folder, trusted: None)
    monkeypatch.setattr("kimik3_prep.reading.verify._Processor.compute", lambda self, item, source: None)
    comparison = Comparison(str(whole.parent / "m.jsonl"), backend=False, processor=Path("x"), trusted=True)
    assert verify(copy, comparison).compared == 0
