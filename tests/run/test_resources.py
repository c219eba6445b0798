"""The real command where the machine is short of something, or is odd: it ends as a person would hope, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import BINARY, Run, Silent, on_full_output, picture, tree, until, write_manifest
from PIL import Image

from kimik3_prep.disk import LOCK_NAME, only_run
from kimik3_prep.errors import InputError
from kimik3_prep.run import prepare as run_module

ENCODE = ["encode", "m.jsonl", "--config", "kimi-k3", "--backend", "cpu", "--no-progress"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A manifest of six pictures."""
    rows = []
    for number in range(6):
        picture(100, 90, seed=number).save(tmp_path / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png"})
    return write_manifest(tmp_path / "m.jsonl", rows)


def limited(kind: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (most, most))


def committed(out: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree(out).items() if name.startswith("shards/")}


# --- one run at a time --------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_told_whose_the_first_is(pictures: Path, run: Run, tmp_path: Path) -> None:
    import socket

    (tmp_path / "out").mkdir()
    with only_run(tmp_path / "out"):
        done = run(*ENCODE, "-o", "out")
        assert done.returncode == 2
        assert f"another run is writing into it: process {os.getpid()} on {socket.gethostname()}" in done.stderr
        assert os.listdir(tmp_path / "out") == [LOCK_NAME]
    assert os.listdir(tmp_path / "out") == []
    assert run(*ENCODE, "-o", "out").returncode == 0


def test_a_lock_of_a_dead_process_holds_nothing(pictures: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_NAME).write_text("process 1 on here\n")
    assert run(*ENCODE, "-o", "out").returncode == 0
    assert not (tmp_path / "out" / LOCK_NAME).exists()


def test_a_lock_that_was_removed_while_it_was_taken_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kimik3_prep import disk

    real, seen = disk.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not seen:  # its owner ends between our open and our lock
            (tmp_path / LOCK_NAME).unlink()
        seen.append(descriptor)
        real(descriptor, how)

    monkeypatch.setattr(disk.fcntl, "flock", late)
    with only_run(tmp_path):
        assert len(seen) == 2
        monkeypatch.undo()
        with pytest.raises(InputError, match="another run"), only_run(tmp_path):
            pass


def test_a_lock_is_never_written_through_a_link(tmp_path: Path, run: Run, pictures: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("dear")
    (tmp_path / "out" / LOCK_NAME).symlink_to(tmp_path / "precious")
    assert run(*ENCODE, "-o", "out").returncode == 3
    assert (tmp_path / "precious").read_text() == "dear"


# --- disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [100, 5_000, 60_000])
def test_a_quota_stops_the_run_and_it_goes_on(pictures: Path, run: Run, tmp_path: Path, most: int) -> None:
    """The limits hit the run record, the plan and a shard: EFBIG, as ENOSPC an error of a write."""
    done = run(*ENCODE, "-o", "out", "--dtype", "uint8", preexec_fn=limited(resource.RLIMIT_FSIZE, most))
    assert done.returncode == 3, done.stderr
    assert "File too large" in done.stderr
    assert str(tmp_path / "out") in done.stderr or "out/" in done.stderr
    assert "bytes free" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert run(*ENCODE, "-o", "out", "--dtype", "uint8").returncode == 0
    assert run(*ENCODE, "-o", "whole", "--dtype", "uint8").returncode == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_what_is_committed_survives_a_full_disk(run: Run, tmp_path: Path) -> None:
    sizes = [(100, 90), (100, 90), (600, 500)]
    rows = []
    for number, size in enumerate(sizes):
        picture(*size, seed=number).save(tmp_path / f"{number}.png")
        rows.append({"id": str(number), "image": f"{number}.png"})
    write_manifest(tmp_path / "m.jsonl", rows)
    command = [*ENCODE, "-o", "out", "--dtype", "uint8", "--shard-size", "50kB", "-j", "1"]
    done = run(*command, preexec_fn=limited(resource.RLIMIT_FSIZE, 100_000))
    assert done.returncode == 3
    assert "bytes needed" in done.stderr
    before = committed(tmp_path / "out")
    assert "shards/cpu-00000.parquet" in before
    assert run(*command).returncode == 0
    assert before.items() <= committed(tmp_path / "out").items()


def test_a_short_disk_is_said_before_the_first_shard(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("kimik3_prep.run.fill.shutil.disk_usage", lambda path: usage)
    reporter = Silent()
    settings = run_module.Settings(str(pictures), tmp_path / "out", "kimi-k3", "cpu")
    run_module.prepare(settings, reporter)
    assert "bytes are to be written and 1,000 are free" in str(reporter.warnings[0])
    assert "--dtype uint8 would need" in reporter.warnings[0].hint
    again = Silent()
    run_module.prepare(settings, again)
    assert again.warnings == []


def test_a_place_that_cannot_be_written(pictures: Path, run: Run) -> None:
    done = run(*ENCODE, "-o", "/proc/nowhere")
    assert done.returncode == 3
    assert "cannot write /proc/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(pictures: Path, run: Run, tmp_path: Path) -> None:
    assert run(*ENCODE, "-o", "out").returncode == 0
    (tmp_path / "out").chmod(0o500)
    assert run(*ENCODE, "-o", "out").returncode == 0  # finished: there is nothing to write
    (tmp_path / "empty").mkdir(mode=0o500)
    assert run(*ENCODE, "-o", "empty").returncode == 3


def test_a_disk_that_is_really_full(pictures: Path, run: Run, tmp_path: Path) -> None:
    """A file system of 600 kB in a namespace of its own: the second shard does not fit until there is more room."""
    (tmp_path / "small").mkdir()
    encode = f"'{BINARY}' {' '.join(ENCODE)} -o small/out --shard-size 400kB"
    script = f"""
        mount -t tmpfs -o size=600k none small || exit 77
        {encode}; test $? = 3 || exit 1
        ls small/out/shards >first; test -e small/out/index.parquet && exit 2
        mount -o remount,size=100m small
        {encode} || exit 3
        cp -r small/out out
    """
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert "bytes free" in done.stderr  # the index of the first shard or the second shard meets the end of the disk
    left = (tmp_path / "first").read_text().split()
    assert "cpu-00000.parquet" in left
    assert not [name for name in left if name.endswith(".tmp")]
    assert run(*ENCODE, "-o", "whole", "--shard-size", "400kB").returncode == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


# --- a folder that is removed under a run -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "more"),
    [("out", []), ("out/shards", []), ("out", ["--shard-range", "1/1"])],
    ids=["out", "shards", "range"],
)
def test_a_folder_that_is_removed_under_a_run_is_said(run: Run, tmp_path: Path, gone: str, more: list[str]) -> None:
    picture(600, 400).save(tmp_path / "a.png")
    write_manifest(tmp_path / "m.jsonl", [{"id": str(number), "image": "a.png"} for number in range(80)])
    command = [*ENCODE, "--dedupe", "off", "--shard-size", "1MB", "--dtype", "uint8", "-j", "1", "-o", "out", *more]
    process = subprocess.Popen([str(BINARY), *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: list(tmp_path.glob("out/shards/*.parquet")))
    until(lambda: shutil.rmtree(tmp_path / gone, ignore_errors=True) or not (tmp_path / gone).exists())
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3, stderr
    assert stderr.startswith(f"error: the output folder was removed while the run was writing into it: {gone}")
    assert stderr.count("\n") == 1
    done = run(*command)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_is_removed_while_a_run_plans_is_said(run: Run, tmp_path: Path) -> None:
    picture(60, 50).save(tmp_path / "a.png")
    asked, answer = threading.Event(), threading.Event()

    class Patient(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            answer.wait(120)
            super().do_GET()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Patient, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_manifest(tmp_path / "m.jsonl", [{"image": f"http://127.0.0.1:{server.server_port}/a.png"}])
        process = subprocess.Popen([str(BINARY), *ENCODE, "-o", "out"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert asked.wait(120)
        shutil.rmtree(tmp_path / "out")
        answer.set()
        _, stderr = process.communicate(timeout=120)
        assert (process.returncode, "out is gone" in stderr) == (3, True), stderr
        assert run(*ENCODE, "-o", "out").returncode == 0
        server.shutdown()


# --- descriptors, locale, streams, signals ------------------------------------------------------------------------


def test_few_file_descriptors(pictures: Path, run: Run, tmp_path: Path) -> None:
    done = run(
        *ENCODE, "-o", "out", "-j", "16", "--shard-size", "200kB", preexec_fn=limited(resource.RLIMIT_NOFILE, 64)
    )
    assert done.returncode == 0, done.stderr
    assert run(*ENCODE, "-o", "whole", "--shard-size", "200kB").returncode == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_closed_streams(pictures: Path, tmp_path: Path, closed: str, form: str) -> None:
    line = f'"{BINARY}" {" ".join(ENCODE)} -o out --format {form} {closed}'
    assert subprocess.run(["sh", "-c", line], cwd=tmp_path, timeout=120, check=False).returncode == 0
    assert (tmp_path / "out" / "index.parquet").is_file()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_goes_away_changes_no_exit_code(pictures: Path, tmp_path: Path, form: str) -> None:
    (tmp_path / "5.png").unlink()
    command = [str(BINARY), *ENCODE, "-o", "out", "--format", form]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # type: ignore[union-attr]
    stderr = process.stderr.read()  # type: ignore[union-attr]
    assert process.wait(120) == 1, stderr
    assert b"BrokenPipe" not in stderr


def test_python_dash_o_and_warnings_as_errors(pictures: Path, run: Run, tmp_path: Path) -> None:
    assert run(*ENCODE, "-o", "plain").returncode == 0
    command = [sys.executable, "-O", "-W", "error", "-m", "kimik3_prep.cli", *ENCODE, "-o", "odd"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "odd") == tree(tmp_path / "plain")


def test_sigterm_ends_as_ctrl_c_does(run: Run, tmp_path: Path) -> None:
    picture(1200, 900).save(tmp_path / "a.jpg")
    write_manifest(tmp_path / "m.jsonl", [{"id": str(number), "image": "a.jpg"} for number in range(240)])
    command = [*ENCODE, "--dedupe", "off", "--shard-size", "5MB", "--dtype", "uint8", "-j", "1", "-o", "out"]
    process = subprocess.Popen([str(BINARY), *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: list(tmp_path.glob("out/shards/*.parquet")))
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "run the same command to continue" in stderr
    left: list[Any] = [*tmp_path.glob("out/**/*.tmp"), *tmp_path.glob("out/.lock"), *tmp_path.glob("out/index.parquet")]
    assert left == []
    assert run(*command).returncode == 0


@pytest.mark.parametrize("coerce", ["0", "1"])
def test_the_c_locale_takes_any_file_name(coerce: str, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "Bilder für 黒"
    folder.mkdir()
    picture(60, 50).save(folder / "grüße-図.png")
    write_manifest(folder / "m.jsonl", [{"image": "grüße-図.png"}])
    env = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": coerce}
    for command in ([*ENCODE, "-o", "aus-出"], ["verify", "aus-出"], ["inspect", "aus-出"]):
        done = run(*command, cwd=folder, env=env, encoding="utf-8")
        assert (done.returncode, done.stderr.count("rror")) == (0, 0), done.stderr
    assert sorted(os.listdir(folder)) == ["aus-出", "grüße-図.png", "m.jsonl"]


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("command", [["inspect", "out"], ["verify", "out"], [*ENCODE, "-o", "out"]])
def test_an_output_that_is_full_is_said_in_a_sentence(
    command: list[str], form: str, pictures: Path, run: Run, tmp_path: Path
) -> None:
    assert run(*ENCODE, "-o", "out").returncode == 0
    done = on_full_output([*command, "--format", form], tmp_path)
    assert done.returncode == 3
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


# --- memory -------------------------------------------------------------------------------------------------------


def test_an_image_that_does_not_fit_into_memory_fails_alone(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(60, 50).save(tmp_path / f"{name}.png")
    Image.new("RGB", (13_000, 13_000)).save(tmp_path / "large.png", compress_level=1)  # 645 MiB as Pillow holds it
    write_manifest(tmp_path / "m.jsonl", [{"image": name} for name in ("a.png", "large.png", "b.png")])
    command = [*ENCODE, "-o", "out", "-j", "1", "--dtype", "uint8"]
    # Address space for either process with its libraries, and not for the picture.
    done = run(*command, preexec_fn=limited(resource.RLIMIT_AS, 800 << 20))
    assert done.returncode == 1, done.stderr
    assert "large.png: out_of_memory" in done.stderr
    assert run("verify", "out").returncode == 0


def test_little_memory_takes_large_images_one_by_one(run: Run, tmp_path: Path) -> None:
    for name in "abcd":
        Image.new("RGB", (4000, 4000)).save(tmp_path / f"{name}.png", compress_level=1)  # 61 MiB as Pillow holds it
    write_manifest(tmp_path / "m.jsonl", [{"image": f"{name}.png"} for name in "abcd"])
    processes = {}
    for memory in ("100MiB", "8GiB"):
        command = [str(BINARY), *ENCODE, "-o", memory, "-j", "4", "--dtype", "uint8", "--memory", memory]
        processes[memory] = most_children(command, tmp_path)
    assert tree(tmp_path / "100MiB") == tree(tmp_path / "8GiB")
    assert processes == {"100MiB": 1, "8GiB": 4}  # a worker starts when there is something that it may do


def most_children(command: list[str], folder: Path) -> int:
    """The most processes that a command has started and that run at a time."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with contextlib.suppress(OSError):
            most = max(most, len(children.read_text().split()))
    assert process.returncode == 0
    return most


# --- hostile manifests --------------------------------------------------------------------------------------------


def test_hostile_ids_are_only_text_and_nothing_is_written_outside(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    picture(60, 50).save(folder / "a.png")
    ids = ["__metadata__", "../../x", "/etc/passwd", "pixel_values", "x" * 70_000, "a\nb\x1b[2J", "nul\x00", ".", "‮"]
    write_manifest(folder / "m.jsonl", [{"id": name, "image": "a.png"} for name in ids])
    done = run(*ENCODE, "-o", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["in"]
    assert sorted(os.listdir(folder)) == ["a.png", "m.jsonl", "out"]
    assert sorted(os.listdir(folder / "out" / "shards")) == ["cpu-00000.parquet", "cpu-00000.safetensors"]
    assert run("verify", "out", cwd=folder).returncode == 0


def test_a_large_data_url_is_an_image_like_any_other(run: Run, tmp_path: Path) -> None:
    import base64
    import io

    content = io.BytesIO()
    picture(60, 50).save(content, "PNG")
    url = "data:image/png;base64," + base64.b64encode(content.getvalue() + bytes(20 << 20)).decode()
    write_manifest(tmp_path / "m.jsonl", [{"id": "a", "image": url}, {"id": "b", "image": "data:,"}])
    done = run(*ENCODE, "-o", "out")
    assert (done.returncode, "b: unidentified: the file is empty" in done.stderr) == (1, True)
    assert (tmp_path / "out" / "index.parquet").stat().st_size < 20_000


def test_a_row_of_hundreds_of_megabytes_is_refused_as_a_row(run: Run, tmp_path: Path) -> None:
    picture(60, 50).save(tmp_path / "a.png")
    with open(tmp_path / "m.jsonl", "wb") as file:
        file.write(b'{"image": "a.png"}\n{"id": "b", "image": "data:image/png;base64,')
        for _ in range(600):
            file.write(b"A" * (1 << 20))
        file.write(b'"}\n{"image": "a.png", "id": "c", "width": "wide"}\n')
    done = run(*ENCODE, "-o", "out", "--format", "json", preexec_fn=limited(resource.RLIMIT_DATA, 3 << 30))
    assert done.returncode == 2
    problems = json.loads(done.stdout)["problems"]
    assert sorted({problem["where"].rpartition(":")[2] for problem in problems}) == ["2", "3"]
    assert problems[0]["what"] == "a row of more than 256 MiB"


def test_image_root(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for place in (root / "a.png", tmp_path / "b.png"):
        picture(60, 50).save(place)
    (root / "inside.png").symlink_to(root / "a.png")
    (root / "outside.png").symlink_to(tmp_path / "b.png")
    (root / "up").symlink_to(tmp_path)
    (tmp_path / "root-too").mkdir()
    good = ["a.png", "inside.png", "./../root/a.png", str(root / "a.png"), "data:,x", "missing.png"]
    bad = ["outside.png", "../b.png", "up/b.png", str(tmp_path / "b.png"), "../root-too/x.png", "/etc/passwd"]
    bad += ["file:///etc/passwd", "local:///etc/passwd", "zip://x::/tmp/y.zip"]
    manifest = write_manifest(root / "m.jsonl", [{"image": image} for image in good + bad])
    command = [
        "encode",
        manifest,
        "--config",
        "kimi-k3",
        "--backend",
        "cpu",
        "--image-root",
        root,
        "-o",
        tmp_path / "o",
    ]
    done = run(*command, "--format", "json")
    assert done.returncode == 2
    lines = [int(problem["where"].rpartition(":")[2]) for problem in json.loads(done.stdout)["problems"]]
    assert lines == list(range(len(good) + 1, len(good) + len(bad) + 1))
    assert not (tmp_path / "o").exists()
    write_manifest(root / "m.jsonl", [{"image": image} for image in good])
    assert run(*command).returncode == 1
