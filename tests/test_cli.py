"""The real command: exit codes, output, files."""

from __future__ import annotations

import gzip
import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import BINARY, GOLDEN, Run, golden_cases, picture, write_manifest

from kimik3_prep import __version__

CONFIGS = golden_cases("configs")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A manifest of six pictures, the config beside it."""
    rows = []
    for number in range(6):
        picture(60 + 40 * number, 50 + 10 * number, seed=number).save(tmp_path / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png"})
    published = Path(__file__).parent.parent / "configs" / "kimi-k3" / "preprocessor_config.json"
    (tmp_path / "preprocessor_config.json").write_text(published.read_text())
    return write_manifest(tmp_path / "manifest.jsonl", rows)


def test_help_and_version(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("validate-config", "manifest", "encode", "finish", "inspect", "verify"):
        assert command in done.stdout
    assert run("--version").stdout == f"kimik3-prep {__version__}\n"
    assert run("encode", "--help").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["encode"],
        ["nonsense"],
        ["encode", "m.jsonl", "--dtype", "int8"],
        ["encode", "m.jsonl", "--workers", "0"],
        ["encode", "m.jsonl", "--backend", "cuda"],
        ["encode", "m.jsonl", "--nope"],
    ],
)
def test_usage_errors_exit_2(arguments: list[str], run: Run) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# --- validate-config ---


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case["id"])
def test_golden_configs(case: dict[str, Any], run: Run) -> None:
    done = run("validate-config", GOLDEN / case["file"], "--format", "json")
    report = json.loads(done.stdout)
    assert done.returncode == {"ok": 0, "error": 2}[case["expect"]]
    assert report["valid"] is (case["expect"] == "ok")
    errors = [problem for problem in report["problems"] if problem["severity"] == "error"]
    assert bool(errors) is (case["expect"] == "error")
    assert all(problem["where"].startswith(str(GOLDEN)) and problem["what"] for problem in report["problems"])


def test_validate_config_prints_the_table(run: Run) -> None:
    done = run("validate-config", "kimi-k3")
    assert done.returncode == 0
    for word in ("in_patch_limit", "65536", "after_resize", "published"):
        assert word in done.stdout


def test_validate_config_defaults_to_the_working_directory(pictures: Path, run: Run, tmp_path: Path) -> None:
    assert run("validate-config").returncode == 0
    (tmp_path / "preprocessor_config.json").unlink()
    done = run("validate-config")
    assert done.returncode == 2
    assert "Kimi-K3 encoder preprocessing needs an image processor" in done.stderr


def test_write_fixed(run: Run, tmp_path: Path) -> None:
    broken = GOLDEN / "configs" / "cfg_missing_limit.json"
    done = run("validate-config", broken, "--write-fixed", "fixed.json")
    assert done.returncode == 2  # what was asked about is still broken
    assert "restored in_patch_limit" in done.stdout
    assert run("validate-config", "fixed.json").returncode == 0
    again = run("validate-config", broken, "--write-fixed", "fixed.json")
    assert again.returncode == 2
    assert "exists already" in again.stderr


# --- encode ---


def test_the_config_of_a_checkpoint_folder(pictures: Path, run: Run, tmp_path: Path) -> None:
    """`--config` may name the folder; what else a checkpoint holds does not matter."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "preprocessor_config.json").rename(tmp_path / "checkpoint" / "preprocessor_config.json")
    (tmp_path / "checkpoint" / "config.json").write_text("not JSON")
    assert run("encode", "manifest.jsonl", "--dry-run").returncode == 2
    for folder in ("checkpoint", "checkpoint/"):
        assert run("encode", "manifest.jsonl", "--config", folder, "--dry-run").returncode == 0
    assert "checkpoint/preprocessor_config.json" in run("validate-config", "checkpoint").stdout
    (tmp_path / "checkpoint" / "preprocessor_config.json").unlink()
    refused = run("encode", "manifest.jsonl", "--config", "checkpoint", "--dry-run")
    assert (refused.returncode, "checkpoint" in refused.stderr) == (2, True)


def test_a_shell_completes_commands_and_options(run: Run) -> None:
    def complete(words: str) -> list[str]:
        env = {"_KIMIK3_PREP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return run(env=env).stdout.split()

    assert complete("kimik3-prep in") == ["inspect"]
    assert {"--render", "--grid", "--id"} <= set(complete("kimik3-prep inspect --"))
    assert "_KIMIK3_PREP_COMPLETE=complete_bash" in run("--show-completion", "bash").stdout


def test_encode_then_again(pictures: Path, run: Run, tmp_path: Path) -> None:
    done = run("encode", "manifest.jsonl", "--shard-size", "1MB")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    assert "6 of 6 items ok" in done.stdout
    out = tmp_path / "manifest-features"
    assert {path.name for path in out.iterdir()} == {"run.json", "plan.parquet", "shards", "index.parquet"}
    assert pq.read_table(out / "index.parquet")["status"].to_pylist() == ["ok"] * 6
    again = run("encode", "manifest.jsonl", "--shard-size", "1MB")
    assert again.returncode == 0
    assert "nothing to do" in again.stdout


def test_json_output_is_the_only_thing_on_stdout(pictures: Path, run: Run) -> None:
    done = run("encode", "manifest.jsonl", "--format", "json")
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["ok"], summary["failed"], summary["shards"]) == ("ok", 6, 0, 1)
    bad = run("encode", "nothing.jsonl", "--format", "json")
    assert bad.returncode == 2
    assert json.loads(bad.stdout)["problems"]


def test_failed_items_exit_1_and_are_named(pictures: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "3.png").write_bytes(b"")
    (tmp_path / "4.png").unlink()
    done = run("encode", "manifest.jsonl", "-o", "out")
    assert done.returncode == 1
    assert "line 4, n3: unidentified: the file is empty" in done.stderr
    assert "line 5, n4: not_found" in done.stderr
    strict = run("encode", "manifest.jsonl", "-o", "strict", "--on-error", "fail")
    assert strict.returncode == 3
    assert "--on-error fail" in strict.stderr
    assert "Traceback" not in strict.stderr


def test_bad_manifest_lines_are_all_named(pictures: Path, run: Run, tmp_path: Path) -> None:
    text = [
        '{"image": "0.png", "backend": "cuda"}',
        '{"image": "1.png",}',
        "",
        '{"id": 5, "video": "a.mp4"}',
        '{"image": "2.png", "id": "x", "id": "y"}',
        '{"image": "3.png", "score": }',
    ]
    (tmp_path / "bad.jsonl").write_text("\n".join(text))
    done = run("encode", "bad.jsonl")
    assert done.returncode == 2
    for words in ("bad.jsonl:1", 'was "gpu" meant?', "bad.jsonl:2", "bad.jsonl:4", "image input only", "bad.jsonl:6"):
        assert words in done.stderr
    assert not (tmp_path / "bad-features").exists()


def test_other_settings_name_the_field(pictures: Path, run: Run) -> None:
    assert run("encode", "manifest.jsonl").returncode == 0
    done = run("encode", "manifest.jsonl", "--dtype", "uint8")
    assert done.returncode == 2
    assert "dtype" in done.stderr
    assert "'float32'" in done.stderr
    assert "'uint8'" in done.stderr
    assert "--overwrite" in done.stderr
    assert run("encode", "manifest.jsonl", "--dtype", "uint8", "--overwrite").returncode == 0


def test_a_foreign_folder_is_left_alone(pictures: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    for more in ([], ["--overwrite"]):
        done = run("encode", "manifest.jsonl", "-o", "mine", *more)
        assert done.returncode == 2
        assert "thesis.txt" in done.stderr
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]


def test_stdin_gzip_and_parquet_manifests(pictures: Path, run: Run, tmp_path: Path) -> None:
    import pyarrow as pa

    rows = [json.loads(line) for line in pictures.read_text().splitlines()]
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(pictures.read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "m.parquet")
    assert run("encode", "m.jsonl.gz", "-o", "a").returncode == 0
    assert run("encode", "m.parquet", "-o", "b").returncode == 0
    assert run("encode", "-", "-o", "c", input=pictures.read_text()).returncode == 0
    shards = [(tmp_path / name / "shards" / "cpu-00000.safetensors").read_bytes() for name in "ac"]
    assert shards[0] == shards[1]


def test_dry_run(pictures: Path, run: Run, tmp_path: Path) -> None:
    done = run("encode", "manifest.jsonl", "--dry-run")
    assert done.returncode == 0
    for words in ("6 images to store", "uint8", "shards: 1 cpu", "tokens per image"):
        assert words in done.stdout
    assert not (tmp_path / "manifest-features").exists()


def test_limit_and_max_pixels(pictures: Path, run: Run) -> None:
    assert "2 of 2 items ok" in run("encode", "manifest.jsonl", "--limit", "2", "-o", "a").stdout
    done = run("encode", "manifest.jsonl", "--max-pixels", "10000", "-o", "b")
    assert done.returncode == 1
    assert "too_many_pixels" in done.stderr


def test_no_progress_is_silent_and_lines_replace_the_bar(pictures: Path, run: Run) -> None:
    assert run("encode", "manifest.jsonl", "-o", "a", "--no-progress").stderr == ""
    assert "images: 6 of 6 (100 %)" in run("encode", "manifest.jsonl", "-o", "b").stderr


def test_pythonwarnings_and_optimisation_change_nothing(run: Run, tmp_path: Path) -> None:
    rows = [{"id": path.name, "image": str(path)} for path in sorted((GOLDEN / "images").iterdir())]
    write_manifest(tmp_path / "m.jsonl", rows)
    results = []
    for name, env in (("a", {}), ("b", {"PYTHONWARNINGS": "error"}), ("c", {"PYTHONOPTIMIZE": "2"})):
        done = run("encode", "m.jsonl", "--config", "kimi-k3", "-o", name, "--dtype", "uint8", env=env)
        assert done.returncode == 1
        assert "Warning" not in done.stderr
        results.append((tmp_path / name / "index.parquet").read_bytes())
    assert results[0] == results[1] == results[2]


def test_a_progress_bar_on_a_terminal(pictures: Path, tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    command = [str(BINARY), "encode", "manifest.jsonl"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=terminal, stdout=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"}
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # the other end of a pseudo-terminal is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    assert process.wait(60) == 0
    assert b"6/6" in shown
    assert "━".encode() in shown


def test_ctrl_c_ends_with_130_and_resumes(run: Run, tmp_path: Path) -> None:
    rows = []
    for number in range(3):
        picture(1200, 900, seed=number).save(tmp_path / f"{number}.jpg")
        rows += [{"id": f"{number}-{copy}", "image": f"{number}.jpg"} for copy in range(80)]
    write_manifest(tmp_path / "m.jsonl", rows)
    arguments = ["encode", "m.jsonl", "--config", "kimi-k3", "--dedupe", "off", "--shard-size", "5MB"]
    arguments += ["--dtype", "uint8", "-j", "1", "-o", "out"]
    process = subprocess.Popen([str(BINARY), *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(tmp_path.glob("out/shards/*.parquet")) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command to continue" in stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("out/**/*.tmp"))
    assert not (tmp_path / "out" / "index.parquet").exists()
    resumed = run(*arguments)
    assert resumed.returncode == 0
    assert "committed before" in resumed.stdout
    arguments[arguments.index("out")] = "whole"
    assert run(*arguments).returncode == 0
    for path in (tmp_path / "whole").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes()


# --- inspect ---


def test_inspect_everything(pictures: Path, run: Run, tmp_path: Path) -> None:
    run("encode", "manifest.jsonl", "-o", "out")
    for path in ("out", "out/index.parquet", "out/shards/cpu-00000.safetensors", "out/shards/cpu-00000.parquet"):
        done = run("inspect", path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
        assert json.loads(run("inspect", path, "--format", "json").stdout)["path"] == path
    assert "pixel_values" in run("inspect", "out/shards/cpu-00000.safetensors").stdout


@pytest.mark.parametrize("path", ["nothing", "manifest.jsonl", "0.png", "."])
def test_inspect_says_what_it_can_show(path: str, pictures: Path, run: Run) -> None:
    done = run("inspect", path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "expected" in done.stderr
