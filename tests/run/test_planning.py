"""planning.py: what is read to make a plan, and what a retry keeps of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Silent, picture, write_manifest

from kimik3_prep.images.decode import Probe, probe
from kimik3_prep.run import planning
from kimik3_prep.run.check import Settings, check


def settings(tmp_path: Path, rows: list[dict[str, object]], **more: object) -> Settings:
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    return Settings(manifest=str(manifest), output=tmp_path / "out", config="kimi-k3", **more)  # type: ignore[arg-type]


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose headers were read."""
    names: list[str] = []

    def recording(source: str, *arguments: int) -> Probe:
        names.append(Path(source).name)
        return probe(source, *arguments)

    monkeypatch.setattr(planning, "probe", recording)
    return names


def test_headers_are_read_once_and_only_where_the_manifest_gives_no_size(tmp_path: Path, probed: list[str]) -> None:
    for name in ("a", "b"):
        picture(64, 48).save(tmp_path / f"{name}.png")
    rows: list[dict[str, object]] = [
        {"id": "1", "image": "a.png"},
        {"id": "2", "image": "a.png"},
        {"id": "3", "image": "b.png", "width": 64, "height": 48},
        {"id": "4", "image": "gone.png"},
    ]
    wanted = settings(tmp_path, rows)
    plan = planning.plan(wanted, check(wanted, Silent()), Silent()).to_pylist()
    assert sorted(probed) == ["a.png", "gone.png"]
    assert [(row["id"], row["width"], row["format"], row["error_code"]) for row in plan] == [
        ("1", 64, "PNG", None),
        ("2", 64, "PNG", None),
        ("3", 64, None, None),
        ("4", None, None, "not_found"),
    ]


def test_the_shard_size_is_in_bytes_of_the_stored_type(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        picture(280, 280).save(tmp_path / f"{name}.png")  # 400 patches of 588 levels each
    rows: list[dict[str, object]] = [{"image": f"{name}.png"} for name in ("a", "b", "c")]
    for dtype, size, shards in (("uint8", 400 * 588 * 2, 2), ("float32", 400 * 588 * 2, 3), ("float32", 1 << 30, 1)):
        wanted = settings(tmp_path, rows, dtype=dtype, shard_size=size)
        plan = planning.plan(wanted, check(wanted, Silent()), Silent())
        assert len(set(plan["shard"].to_pylist())) == shards
