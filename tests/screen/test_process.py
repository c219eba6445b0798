"""process.py: what surrounds a command, seen from outside. Every end of a command is one JSON document if asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BINARY, Run, on_full_output

from kimik3_prep.screen.process import asked_format


@pytest.mark.parametrize(
    "command",
    [
        ["encode", "nothere.jsonl", "--config", "kimi-k3", "--format", "json"],
        ["validate-config", "nothere.json", "--format", "json"],
        ["validate-config", "kimi-k3"],
        ["--help"],
    ],
)
def test_nothing_fits_on_standard_output(command: list[str], tmp_path: Path) -> None:
    done = on_full_output(command, tmp_path)
    assert done.returncode in (2, 3)
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_reader_that_has_gone_changes_no_exit_code(tmp_path: Path) -> None:
    for arguments, code in ((["validate-config", "kimi-k3"], 0), (["validate-config", "nothere.json"], 2)):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([BINARY, *arguments], cwd=tmp_path, stdout=write, stderr=-1, text=True, check=False)
        os.close(write)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)


@pytest.mark.parametrize(
    ("arguments", "format"),
    [
        (["encode", "--format", "json"], "json"),
        (["--format=json", "x"], "json"),
        (["--format", "json", "--format", "text"], "text"),
        (["inspect", "--", "--format", "json"], "text"),
        (["inspect", "--format"], "text"),
        (["inspect", "--format", "xml"], "text"),
    ],
)
def test_the_format_is_known_before_the_arguments_are_read(arguments: list[str], format: str) -> None:
    assert asked_format(arguments) == format


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["encode"], "Missing argument"),
        (["nonsense"], "No such command"),
        (["encode", "m.jsonl", "--nope"], "No such option"),
        (["encode", "m.jsonl", "--dtype", "int8"], "'int8' is not one of"),
        (["encode", "m.jsonl", "-j", "0"], "greater than or equal to 1"),
        (["inspect", "out", "--first"], "requires an argument"),
        ([], "No such option"),
    ],
)
def test_a_usage_error_is_one_document(arguments: list[str], words: str, run: Run) -> None:
    done = run(*arguments[:1], "--format=json", *arguments[1:])
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (2, "")
    assert (report["status"], report["kind"], report["exit_code"], report["problems"]) == ("error", "usage", 2, [])
    assert words in report["message"]


def test_an_input_error_is_one_document(run: Run) -> None:
    done = run("inspect", "nothing", "--format", "json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["kind"], report["problems_in_all"]) == (2, "input", 1)
    assert report["problems"][0]["where"] == "nothing"


@pytest.mark.parametrize("format", ["text", "json"])
def test_an_internal_error_says_so(format: str) -> None:
    code = """
import sys
from kimik3_prep import cli
from kimik3_prep.checkpoint import config
def broken(*arguments):
    raise ZeroDivisionError("unforeseen")
config.find_config = broken
sys.argv = ["kimik3-prep", "validate-config", "--format", sys.argv[1]]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code, format], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    if format == "json":
        report = json.loads(done.stdout)
        assert (report["kind"], report["exit_code"]) == ("internal", 3)
        assert report["message"].startswith("ZeroDivisionError: unforeseen (at ")
    else:
        assert (done.stdout, done.stderr[:45]) == ("", "internal error: ZeroDivisionError: unforeseen")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_document(number: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [BINARY, "encode", "-", "--config", "kimi-k3", "--format", "json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=-1, stdout=-1, stderr=-1)
    assert process.stdin
    process.stdin.write(b"\n" * (1 << 20))  # more than a pipe holds: from here on the command reads its manifest
    process.stdin.flush()
    process.send_signal(number)
    assert process.wait(60) == code
    process.stdin.close()
    assert process.stdout
    assert process.stderr
    with process.stdout, process.stderr:
        report = json.loads(process.stdout.read())
        assert (report["kind"], report["exit_code"], process.stderr.read()) == ("interrupted", code, b"")
    assert "run the same command to continue" in report["message"]


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "kimik3_prep", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kimik3-prep ")
