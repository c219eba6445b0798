"""plan.py: spans, packing, and the table that holds them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.errors import InputError
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.output.plan import (
    PLAN_SCHEMA,
    make_plan,
    parse_size,
    split_shards,
)
from kimik3_prep.output.spans import Headers, Spans, find_spans
from kimik3_prep.run.item import planned_items

RULE = GridRule(14, 2, 65536, 512)


def planned(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    shard_patches: int = 1000,
    dedupe: bool = True,
    fail: Collection[int] = (),
) -> tuple[Spans, list[dict[str, Any]]]:
    manifest = read_manifest(str(write_manifest(tmp_path / "m.jsonl", rows)))
    spans = find_spans(manifest.items, manifest.base, "cpu", dedupe)
    headers = Headers(len(spans.first_row))
    for span, row in enumerate(spans.first_row):
        if row in fail:
            headers.error_code[span], headers.error_message[span] = "not_found", "gone"
        elif "width" in rows[row]:
            headers.width[span], headers.height[span] = rows[row]["width"], rows[row]["height"]
    table = make_plan(manifest.items, spans, headers, RULE, shard_patches)
    assert table.schema == PLAN_SCHEMA
    return spans, table.to_pylist()


def row(image: str, size: int = 28, **more: Any) -> dict[str, Any]:
    return {"id": more.pop("id", image), "image": image, "width": size, "height": size, **more}


def test_one_shard_in_manifest_order(tmp_path: Path) -> None:
    _, rows = planned(tmp_path, [row("b.png"), row("a.png", 56), row("c.png")])
    assert [(r["id"], r["shard"], r["row"], r["patch_start"], r["patch_count"]) for r in rows] == [
        ("b.png", "cpu-00000", 0, 0, 4),
        ("a.png", "cpu-00000", 1, 4, 16),
        ("c.png", "cpu-00000", 2, 20, 4),
    ]


def test_rows_that_name_one_image_share_a_span(tmp_path: Path) -> None:
    names = ["a.png", "./a.png", "x/../a.png", "b.png", "a.png"]
    rows = [row(name, id=str(i)) for i, name in enumerate(names)]
    spans, plan = planned(tmp_path, rows)
    assert spans.of_row.tolist() == [0, 0, 0, 1, 0]
    assert [(r["id"], r["row"]) for r in plan] == [("0", 0), ("1", 0), ("2", 0), ("4", 0), ("3", 1)]
    _, apart = planned(tmp_path, rows, dedupe=False)
    assert [r["row"] for r in apart] == [0, 1, 2, 3, 4]


def test_rows_that_promise_different_things_do_not_share(tmp_path: Path) -> None:
    rows = [row("a.png", id="1"), row("a.png", 30, id="2"), row("a.png", id="3", content_hash="sha256:" + "0" * 64)]
    spans, _ = planned(tmp_path, rows)
    assert spans.of_row.tolist() == [0, 1, 2]


def test_groups_get_shards_of_their_own_and_failed_rows_come_last(tmp_path: Path) -> None:
    rows = [
        row("a.png", backend="gpu"),
        {"id": "gone", "image": "gone.png"},
        row("b.png"),
        {"id": "local", "features": "f.npy", "grid_thw": [1, 4, 6]},
        row("c.png", backend="gpu"),
        row("d.png", backend="cpu"),
    ]
    _, plan = planned(tmp_path, rows, fail={1})
    assert [(r["id"], r["shard"]) for r in plan] == [
        *[("b.png", "cpu-00000"), ("d.png", "cpu-00000")],
        *[("a.png", "gpu-00000"), ("c.png", "gpu-00000")],
        *[("local", "local-00000"), ("gone", None)],
    ]
    local = plan[4]
    assert (local["grid_h"], local["grid_w"], local["num_tokens"], local["patch_count"]) == (4, 6, 6, 24)
    assert local["new_width"] is None
    assert (plan[5]["error_code"], plan[5]["patch_count"], plan[5]["grid_h"]) == ("not_found", None, None)


def test_an_image_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    _, plan = planned(tmp_path, [row("a.png"), row("big.png", 28 * 20), row("c.png"), row("d.png")], shard_patches=8)
    assert [(r["id"], r["shard"]) for r in plan] == [
        *[("a.png", "cpu-00000"), ("big.png", "cpu-00001")],
        *[("c.png", "cpu-00002"), ("d.png", "cpu-00002")],
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["cpu", "gpu"]), st.integers(1, 40), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 200),
)
def test_packing(tmp_path_factory: pytest.TempPathFactory, items: list[tuple[str, int, bool]], limit: int) -> None:
    rows = [row(f"{i}.png", 28 * side, backend=group) for i, (group, side, _) in enumerate(items)]
    fail = {i for i, (_, _, failed) in enumerate(items) if failed}
    _, plan = planned(tmp_path_factory.mktemp("plan"), rows, limit, fail=fail)
    assert sorted(r["item"] for r in plan) == list(range(len(items)))
    shards: dict[str, list[dict[str, Any]]] = {}
    for r in plan:
        if r["shard"] is None:
            assert r["item"] in fail
        else:
            shards.setdefault(r["shard"], []).append(r)
    for name, members in shards.items():
        assert {items[r["item"]][0] for r in members} == {name.partition("-")[0]}
        assert [r["item"] for r in members] == sorted(r["item"] for r in members)
        assert [r["row"] for r in members] == list(range(len(members)))
        starts = np.cumsum([0, *[r["patch_count"] for r in members]])
        assert [r["patch_start"] for r in members] == starts[:-1].tolist()
        assert starts[-1] <= limit or len(members) == 1
    for group in ("cpu", "gpu"):
        names = [name for name in shards if name.startswith(group)]
        assert names == [f"{group}-{i:05d}" for i in range(len(names))]


def test_split_and_shard_plan_give_the_rows_back(tmp_path: Path) -> None:
    rows = [row(f"{i % 7}.png", 28 * (1 + i % 7), id=str(i)) for i in range(40)] + [{"id": "x", "image": "x"}]
    manifest = read_manifest(str(write_manifest(tmp_path / "m.jsonl", rows)))
    spans = find_spans(manifest.items, manifest.base, "cpu", True)
    headers = Headers(len(spans.first_row))
    for span, first in enumerate(spans.first_row):
        headers.width[span] = headers.height[span] = rows[first].get("width", 0)
    headers.error_code[-1] = "not_found"
    table = make_plan(manifest.items, spans, headers, RULE, 100)
    for pieces in (1, 3, 100):
        streamed = (table.slice(begin, pieces) for begin in range(0, table.num_rows, pieces))
        parts = list(split_shards(streamed))
        assert sum(part.num_rows for _, part in parts) == len(rows)
        assert [name for name, _ in parts] == [*dict.fromkeys(table["shard"].to_pylist())]
        for name, part in parts[:-1]:
            assert name is not None
            assert name.startswith("cpu-")
            items = {item.row: item for item in planned_items(part)}
            assert sorted(items) == list(range(len(items)))
            ends = [item.patch_start + item.patch_count for item in items.values()]
            assert max(ends) == sum(item.patch_count for item in items.values())


def test_the_plan_does_not_depend_on_where_the_manifest_lies(tmp_path: Path) -> None:
    rows = [row(f"{i % 5}.png", id=str(i)) for i in range(20)]
    results = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        results.append(planned(tmp_path / name, rows)[1])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("1", 1), ("200MB", 200_000_000), ("2GiB", 2 << 30), ("512 mib", 512 << 20), ("1.5K", 1536)],
        *[("10b", 10), ("1tb", 10**12), (" 3M ", 3 << 20)],
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "MB", "-1", "1XB", "1.2.3", "1 2", "inf", "nan", "1e400"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="--shard-size"):
        parse_size(text, "--shard-size")


def test_a_token_budget_lowers_the_limit_of_the_images_that_need_it(tmp_path: Path) -> None:
    rows = [
        row("small.png", 280, id="small"),  # 100 tokens
        row("large.png", 2800, id="large"),
        {"id": "thin", "image": "thin.png", "width": 30_000, "height": 1},
        {"id": "local", "features": "f.npy", "grid_thw": [1, 40, 40]},
        {"id": "local-small", "features": "g.npy", "grid_thw": [1, 4, 4]},
    ]
    manifest = read_manifest(str(write_manifest(tmp_path / "m.jsonl", rows)))
    spans = find_spans(manifest.items, manifest.base, "cpu", True)
    headers = Headers(5)
    for span, number in enumerate(spans.first_row.tolist()):
        headers.width[span], headers.height[span] = rows[number].get("width", 0), rows[number].get("height", 0)
    plan = make_plan(manifest.items, spans, headers, RULE, 10_000, max_tokens=100).to_pylist()
    found = {r["id"]: (r["num_tokens"], r["in_patch_limit"], r["error_code"]) for r in plan}
    limit = RULE.limit_within(2800, 2800, 100)
    assert found["small"] == (100, None, None)
    assert found["large"][1:] == (limit, None)
    assert 81 <= found["large"][0] <= 100
    assert found["thin"][0] <= 100
    assert found["local"][2] == "too_many_tokens"
    assert found["local-small"] == (4, None, None)
    plan = make_plan(manifest.items, spans, headers, RULE, 10_000, max_tokens=4).to_pylist()
    errors = {r["id"]: r["error_message"] for r in plan if r["error_code"] == "too_many_tokens"}
    assert errors["thin"] == "no scale brings it down to 4 tokens"
    assert errors.keys() == {"thin", "local"}
