"""terminal.py: the words people read, and that nobody's words can do more than be read."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from conftest import HOSTILE, SHOWN

from kimik3_prep.errors import Problem
from kimik3_prep.screen import terminal
from kimik3_prep.screen.terminal import counted, harmless, size_text

Capture = pytest.CaptureFixture[str]


# --- words --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *[(0, "0 B"), (1, "1 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB")],
        *[(1024**2 - 1, "1.0 MiB"), (1024**2, "1.0 MiB"), (55_206_144, "52.6 MiB"), (1024**3, "1.0 GiB")],
        *[(1023.94 * 1024**3, "1,023.9 GiB"), (1023.96 * 1024**3, "1.0 TiB"), (1024**4, "1.0 TiB")],
        (5000 * 1024**4, "5,000.0 TiB"),
    ],
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 shards"), (1, "1 shard"), (2, "2 shards"), (1234, "1,234 shards")])
def test_counts(number: int, text: str) -> None:
    assert counted(number, "shard") == text


def test_what_could_do_something_is_shown_as_an_escape() -> None:
    assert harmless(HOSTILE) == SHOWN
    assert harmless("".join(map(chr, [*range(32), *range(127, 160)]))).isascii()
    for text in ("Schöne Grüße", "猫の写真.jpg", "👩‍👩‍👧", "नमस्ते", "שלום", "a\\b", "€"):  # letters stay what they are
        assert harmless(text) == text


def test_long_texts_keep_their_beginning_and_end() -> None:
    text = "start" + "x" * 10_000 + "end"
    short = harmless(text, 60)
    assert (len(short), short[:5], short[-3:], short.count("…")) == (60, "start", "end", 1)
    assert harmless("x" * 60, 60) == "x" * 60


# --- saying ---------------------------------------------------------------------------------------------------------


def test_warnings_are_called_so(capsys: Capture) -> None:
    terminal.print_problem(Problem("c.json: image_mean", "above 1", severity="warning"))
    assert capsys.readouterr().err == "warning: c.json: image_mean: above 1\n"


def test_nor_does_what_a_command_prints_itself(capsys: Capture) -> None:
    for console in (terminal.out, terminal.err):
        console.print("[red]a[/red] :cat: " + "x" * 500)
    assert capsys.readouterr() == ("[red]a[/red] :cat: " + "x" * 500 + "\n",) * 2


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_is_whole_and_harmless_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    value = {"id": HOSTILE, "猫": ["é\u2028", 1, None]}
    terminal.print_json(value)
    stream.flush()
    said = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert json.loads(said) == value
    assert harmless(said.replace("\n", "")) == said.replace("\n", "")
    assert ("猫" in said) is (encoding == "utf-8")


def test_json_for_a_reader_that_has_gone() -> None:
    code = "from kimik3_prep.screen import terminal; terminal.print_json('x' * 1_000_000)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, env=environment)
    with process as running:
        running.stdout.close()  # type: ignore[union-attr]
        assert running.stderr.read() == b""  # type: ignore[union-attr]
    assert process.returncode == 0  # the work was done; that nobody reads on is no failure


@pytest.mark.parametrize("say", ["print_json(1)", "say(terminal.out, 'text')", "print_lines([b'{}'])"])
def test_a_full_stdout_is_an_error_and_a_full_stderr_is_not(say: str) -> None:
    code = f"from kimik3_prep.screen import terminal; terminal.say(terminal.err, 'lost'); terminal.{say}"
    with open("/dev/full", "w") as full:
        quiet = subprocess.run([sys.executable, "-c", code], stdout=-1, stderr=full, check=False)
        loud = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=-1, check=False, text=True)
    assert quiet.returncode == 0
    assert loud.stderr.splitlines()[-1].endswith(
        "CannotPrint: cannot write to standard output: No space left on device"
    )
