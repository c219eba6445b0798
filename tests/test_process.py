"""process.py: what surrounds a command, seen from outside."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import BINARY


@pytest.mark.parametrize(
    "command",
    [
        ["encode", "nothere.jsonl", "--config", "kimi-k3", "--format", "json"],
        ["validate-config", "nothere.json", "--format", "json"],
        ["validate-config", "kimi-k3"],
        ["--help"],
        ["--version"],
    ],
)
def test_nothing_fits_on_standard_output(command: list[str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [str(BINARY), *command],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 3
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"
