"""since.py: a month's new pictures cost what they are, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import Run, png_bytes, write_manifest

from kimik3_prep.output.folder import Output


def options(*more: str) -> list[str]:
    return ["--config", "kimi-k3", "--backend", "cpu", "--dtype", "uint8", "-j", "1", "--format", "json", *more]


def test_only_what_is_new_is_prepared(tmp_path: Path, run: Run) -> None:
    """New ids, and ids whose bytes have changed; a file that was only touched is read and left out."""
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(png_bytes(40 + n, 30, n))
    rows = [{"id": str(n), "image": f"{n}.png"} for n in range(4)]
    write_manifest(tmp_path / "old.jsonl", [*rows[:3], {"id": "gone", "image": "gone.png"}])
    assert run("encode", "old.jsonl", *options("-o", "old")).returncode == 1
    (tmp_path / "0.png").write_bytes(png_bytes(50, 30, 9))
    os.utime(tmp_path / "1.png", ns=(1, 1))
    (tmp_path / "gone.png").write_bytes(png_bytes(33, 30, 5))
    write_manifest(tmp_path / "all.jsonl", [*rows, {"id": "gone", "image": "gone.png"}])
    done = run("encode", "all.jsonl", *options("--since", "old", "-o", "more"))
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert (said["rows"], said["images"]) == (3, 3)
    assert [(each["count"], each["names"]) for each in said["passed_over"]] == [(2, ["1", "2"])]
    index = Output(tmp_path / "more").read_index()
    assert (index["id"].to_pylist(), index["item"].to_pylist()) == (["0", "3", "gone"], [0, 1, 2])
    again = run("encode", "all.jsonl", *options("--since", "old", "-o", "more"))
    assert (again.returncode, json.loads(again.stdout)["skipped"]) == (0, None)
    write_manifest(tmp_path / "held.jsonl", rows[1:3])
    nothing = run("encode", "held.jsonl", *options("--since", "old", "-o", "x"))
    assert "all 2 items are in old already" in json.loads(nothing.stdout)["message"]
    refused = run("encode", "all.jsonl", *options("--since", "old", "-o", "other", "--max-tokens", "4"))
    assert refused.returncode == 2
    assert "--since old: max_tokens" in json.loads(refused.stdout)["problems"][0]["where"]
    unfinished = run("encode", "all.jsonl", *options("--since", "nothing", "-o", "other"))
    assert "no finished run is in it" in json.loads(unfinished.stdout)["message"]
