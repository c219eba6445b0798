"""planning.py: what is read to make a plan, which rows share an image, and where each image lands."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import Silent, picture, write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.errors import ItemError
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.output.tables import PLAN_SCHEMA, split_shards
from kimik3_prep.run import planning
from kimik3_prep.run.check import Settings, check
from kimik3_prep.run.item import planned_items
from kimik3_prep.run.planning import Headers, Spans, find_spans, join_equal, make_plan
from kimik3_prep.run.workers import Workers

# --- headers --------------------------------------------------------------------------------------------------------


def asked(tmp_path: Path, rows: list[dict[str, object]], **more: object) -> Settings:
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    return Settings(manifest=str(manifest), output=tmp_path / "out", config="kimi-k3", **more)  # type: ignore[arg-type]


def plan(wanted: Settings, reporter: Silent) -> pa.Table:
    """The plan that a run would make."""
    with Workers(1, 60, 1 << 30) as workers:
        return planning.plan(wanted, check(wanted, Silent()), workers, reporter)


def test_headers_are_read_once_and_only_where_the_manifest_gives_no_size(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(64, 48).save(tmp_path / f"{name}.png")
    rows: list[dict[str, object]] = [
        {"id": "1", "image": "a.png"},
        {"id": "2", "image": "a.png"},
        {"id": "3", "image": "b.png", "width": 64, "height": 48},
        {"id": "4", "image": "gone.png"},
    ]
    wanted = asked(tmp_path, rows)
    reporter = Silent()
    rows = plan(wanted, reporter).to_pylist()
    assert reporter.phases == [("headers", 2)]
    assert [(row["id"], row["width"], row["format"], row["error_code"]) for row in rows] == [
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
        wanted = asked(tmp_path, rows, dtype=dtype, shard_size=size)
        assert len(set(plan(wanted, Silent())["shard"].to_pylist())) == shards


# --- spans ----------------------------------------------------------------------------------------------------------


def spans_of(tmp_path: Path, rows: list[dict[str, Any]], dedupe: bool = True) -> Spans:
    manifest = read_manifest(str(write_manifest(tmp_path / "m.jsonl", rows)))
    return find_spans(manifest.items, manifest.base, "cpu", dedupe)


def test_a_span_is_a_path_a_group_and_what_rows_promise(tmp_path: Path) -> None:
    rows = [
        {"id": "0", "image": "a.png"},
        {"id": "1", "image": "x/../a.png"},
        {"id": "2", "image": "a.png", "backend": "gpu"},
        {"id": "3", "image": "a.png", "width": 3, "height": 4},
        {"id": "4", "features": "a.png", "grid_thw": [1, 2, 2]},
        {"id": "5", "image": "a.png", "content_hash": "sha256:" + "0" * 64},
    ]
    spans = spans_of(tmp_path, rows)
    assert [spans.of_row.tolist()[row] == spans.of_row[0] for row in range(6)] == [True, True, *[False] * 4]
    assert len(set(spans.of_row.tolist())) == 5
    assert spans_of(tmp_path, rows, dedupe=False).of_row.tolist() == list(range(6))


def test_equal_bytes_become_one_span_that_of_the_first_row(tmp_path: Path) -> None:
    rows = [{"id": name, "image": name} for name in ("b.png", "a.png", "c.png", "d.png")]
    spans = spans_of(tmp_path, rows)
    headers = Headers(4)
    headers.width[:], headers.height[:] = 20, 10
    headers.format[:] = ["PNG", "GIF", "PNG", "PNG"]
    headers.content_hash[:] = ["x", "y", "x", None]
    joined, kept = join_equal(spans, headers)
    of_row = joined.of_row.tolist()
    assert of_row[0] == of_row[2]
    assert len(set(of_row)) == 3
    assert joined.first_row[of_row].tolist() == [0, 1, 0, 3]
    assert [kept.format[span] for span in of_row] == ["PNG", "GIF", "PNG", "PNG"]


def test_a_wrong_promise_of_a_size_stays_apart(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, [{"id": name, "image": name} for name in ("a.png", "b.png")])
    headers = Headers(2)
    headers.width[:], headers.height[:], headers.content_hash[:] = [20, 21], 10, ["x", "x"]
    assert join_equal(spans, headers)[0].of_row.tolist() == [0, 1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("xyz"), st.integers(0, 1)), min_size=1, max_size=12))
def test_rows_share_a_span_exactly_where_all_is_equal(rows: list[tuple[int, str, int]]) -> None:
    """Rows of (file, its content, its group); a file's content and group are those of its first row."""
    truth = {}
    for file, content, group in rows:
        truth.setdefault(file, (content, group))
    files = sorted({file for file, _, _ in rows})
    of_row = np.array([files.index(file) for file, _, _ in rows])
    first = np.array([of_row.tolist().index(span) for span in range(len(files))])
    headers = Headers(len(files))
    headers.content_hash[:] = [truth[file][0] for file in files]
    joined, kept = join_equal(Spans(of_row, first, np.array([truth[file][1] for file in files])), headers)
    for one in range(len(rows)):
        for other in range(len(rows)):
            equal = truth[rows[one][0]] == truth[rows[other][0]]
            assert (joined.of_row[one] == joined.of_row[other]) == equal
        span = joined.of_row[one]
        assert (kept.content_hash[span], joined.groups[span]) == truth[rows[one][0]]
        assert joined.first_row[span] == min(row for row in range(len(rows)) if joined.of_row[row] == span)


def test_headers_taken_and_failed() -> None:
    headers = Headers(3)
    headers.width[:], headers.format[:] = [1, 2, 3], ["A", "B", "C"]
    headers.fail(1, ItemError("not_found", "gone"))
    taken = headers.take(np.array([2, 1]))
    assert taken.width.tolist() == [3, 2]
    assert (taken.format, taken.error_code, taken.error_message) == (["C", "B"], [None, "not_found"], [None, "gone"])


# --- places ---------------------------------------------------------------------------------------------------------


RULE = GridRule(14, 2, 65536, 512)


def placed(
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
    _, rows = placed(tmp_path, [row("b.png"), row("a.png", 56), row("c.png")])
    assert [(r["id"], r["shard"], r["row"], r["patch_start"], r["patch_count"]) for r in rows] == [
        ("b.png", "cpu-00000", 0, 0, 4),
        ("a.png", "cpu-00000", 1, 4, 16),
        ("c.png", "cpu-00000", 2, 20, 4),
    ]


def test_rows_that_name_one_image_share_a_span(tmp_path: Path) -> None:
    names = ["a.png", "./a.png", "x/../a.png", "b.png", "a.png"]
    rows = [row(name, id=str(i)) for i, name in enumerate(names)]
    spans, plan = placed(tmp_path, rows)
    assert spans.of_row.tolist() == [0, 0, 0, 1, 0]
    assert [(r["id"], r["row"]) for r in plan] == [("0", 0), ("1", 0), ("2", 0), ("4", 0), ("3", 1)]
    _, apart = placed(tmp_path, rows, dedupe=False)
    assert [r["row"] for r in apart] == [0, 1, 2, 3, 4]


def test_rows_that_promise_different_things_do_not_share(tmp_path: Path) -> None:
    rows = [row("a.png", id="1"), row("a.png", 30, id="2"), row("a.png", id="3", content_hash="sha256:" + "0" * 64)]
    spans, _ = placed(tmp_path, rows)
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
    _, plan = placed(tmp_path, rows, fail={1})
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
    _, plan = placed(tmp_path, [row("a.png"), row("big.png", 28 * 20), row("c.png"), row("d.png")], shard_patches=8)
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
    _, plan = placed(tmp_path_factory.mktemp("plan"), rows, limit, fail=fail)
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
        results.append(placed(tmp_path / name, rows)[1])
    assert results[0] == results[1]


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


@pytest.mark.parametrize("grid", [[1, 2**31 - 2, 2**31 - 2], [1, 2, 2**31 - 2], [1, 4096, 1026]])
def test_a_grid_that_no_file_of_features_has_fails_its_item_alone(grid: list[int], tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"id": "absurd", "features": "f.npy", "grid_thw": grid},
        {"id": "largest", "features": "f.npy", "grid_thw": [1, 2048, 2048]},
    ]
    (tmp_path / "f.npy").write_bytes(b"")
    planned = plan(asked(tmp_path, rows), Silent()).to_pylist()  # what failed stands last
    absurd, largest = sorted(planned, key=lambda row: str(row["id"]))
    assert (absurd["error_code"], absurd["shard"], absurd["patch_count"]) == ("bad_features", None, None)
    assert f"is {grid[1] * grid[2]:,} patches" in absurd["error_message"]
    assert (largest["error_code"], largest["patch_count"]) == (None, 2048 * 2048)
