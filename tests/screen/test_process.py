"""process.py: what surrounds a command, seen from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import on_full_output


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
    done = on_full_output(command, tmp_path)
    assert done.returncode == 3
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"
