"""summary.py: what a plan will make and what a run has made, counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import recipe, write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.errors import ItemError
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.output.folder import Output
from kimik3_prep.output.tables import PLAN_SCHEMA, Outcome, Stored, index_table, split_shards
from kimik3_prep.output.totals import PlanSummary, RunSummary, summarize, summarize_plan
from kimik3_prep.run.planning import Headers, find_spans, make_plan


def planned(folder: Path, rows: list[dict[str, Any]], shard_patches: int = 1000, tokens: int | None = None) -> pa.Table:
    """The plan of a manifest; rows without a size and a grid fail. `tokens`: the config's fixed_output_tokens."""
    manifest = read_manifest(str(write_manifest(folder / "m.jsonl", rows)))
    spans = find_spans(manifest.items, manifest.base, "cpu", True)
    headers = Headers(len(spans.first_row))
    for span, row in enumerate(spans.first_row):
        headers.width[span], headers.height[span] = rows[row].get("width", 0), rows[row].get("height", 0)
        if not headers.width[span] and "grid_thw" not in rows[row]:
            headers.error_code[span], headers.error_message[span] = "not_found", "gone"
    return make_plan(manifest.items, spans, headers, GridRule(14, 2, 65536, 512, tokens), shard_patches)


def item(image: str, width: int = 28, height: int = 28, **more: Any) -> dict[str, Any]:
    return {"id": more.pop("id", image), "image": image, "width": width, "height": height, **more}


def run(folder: Path, plan: pa.Table, fail: dict[str, set[int]] | None = None) -> RunSummary:
    """Write the indexes of a plan, with the rows in `fail` failed by shard, and sum them up."""
    output = Output(folder / "out")
    output.shards.mkdir(parents=True)
    names: list[str] = []
    lost: list[pa.Table] = []
    for name, rows in split_shards(iter([plan])):
        if name is None:
            lost.append(index_table(rows, {}))
            continue
        bad = (fail or {}).get(name, set())
        kept = [row for row in sorted(set(rows["row"].to_pylist())) if row not in bad]
        outcomes: dict[int, Outcome] = {
            row: Stored(place, 0, "RGB", "PNG", None, None, "") for place, row in enumerate(kept)
        }
        outcomes |= {row: ItemError("corrupt", f"row {row}") for row in bad}
        output.commit(name, index_table(rows, outcomes), recipe())
        output.shard(name).write_bytes(bytes(1000))
        names.append(name)
    output.finish(names, lost, recipe())
    return summarize(output, skipped=1)


def test_totals_of_a_plan_and_of_its_run(tmp_path: Path) -> None:
    rows = [
        item("a.png", 56, 28),
        item("b.png", 28, 28, backend="gpu"),
        item("a.png", 56, 28, id="again"),
        {"id": "gone", "image": "gone.png"},
        item("c.png", 280, 28),
        item("./a.png", 56, 28, id="once more"),
        item("a.png", 56, 28, id="elsewhere", backend="gpu"),
    ]
    plan = planned(tmp_path, rows, shard_patches=40)
    assert summarize_plan(plan, 14, "float32") == PlanSummary(
        rows=7,
        failed=1,
        failures=((4, "gone", "not_found", "gone"),),
        images=4,  # the two rows that repeat a.png on its path add none
        pixels=56 * 28 * 2 + 28 * 28 + 280 * 28,
        patches=8 + 4 + 40 + 8,
        dtype="float32",
        tokens=2 * 4 + 1 + 10,  # of all rows: every one of them is a prompt of its own
        bytes_by_dtype={"float32": 60 * 588 * 4, "bfloat16": 60 * 588 * 2, "float16": 60 * 588 * 2, "uint8": 60 * 588},
        shards={"cpu": 2, "gpu": 1},
        histogram=((16, 4),),
    )
    assert run(tmp_path, plan) == RunSummary(
        output=str(tmp_path / "out"),
        rows=7,
        ok=6,
        failed=1,
        failures=((4, "gone", "not_found", "gone"),),
        images=4,
        patches=60,
        tokens=19,
        size=3000,
        shards=3,
        skipped=1,
    )


def test_a_failed_image_takes_its_repeats_with_it(tmp_path: Path) -> None:
    rows = [item("a.png", 56), item("b.png"), item("a.png", 56, id="again"), item("c.png")]
    summary = run(tmp_path, planned(tmp_path, rows), {"cpu-00000": {0}})
    assert (summary.rows, summary.ok, summary.failed, summary.images) == (4, 2, 2, 2)
    assert (summary.patches, summary.tokens, summary.shards) == (8, 2, 1)
    assert summary.failures == ((1, "a.png", "corrupt", "row 0"), (3, "again", "corrupt", "row 0"))


def test_the_same_row_number_in_two_shards_is_two_images(tmp_path: Path) -> None:
    plan = planned(tmp_path, [item(f"{i}.png") for i in range(6)], shard_patches=8)
    assert (summarize_plan(plan, 14, "float32").images, run(tmp_path, plan).images) == (6, 6)


def test_shards_of_one_image_each(tmp_path: Path) -> None:
    """Row and patch_start are 0 in all of them: only the shard tells one from the next."""
    plan = planned(tmp_path, [item(f"{i}.png") for i in range(3)], shard_patches=1)
    summary = summarize_plan(plan, 14, "float32")
    assert (summary.images, summary.patches, summary.shards) == (3, 12, {"cpu": 3})


def test_features_files_count_without_pixels(tmp_path: Path) -> None:
    rows = [{"id": "f", "features": "f.npy", "grid_thw": [1, 4, 6]}, item("a.png"), item("b.png", backend="gpu")]
    summary = summarize_plan(planned(tmp_path, rows), 14, "float32")
    assert (summary.images, summary.pixels, summary.patches, summary.tokens) == (3, 2 * 784, 32, 8)
    assert list(summary.shards.items()) == [("cpu", 1), ("gpu", 1), ("local", 1)]


def test_only_files_of_the_run_are_counted(tmp_path: Path) -> None:
    plan = planned(tmp_path, [item("a.png")])
    run(tmp_path, plan)
    for name in ("model.safetensors", "cpu-00007.safetensors", "cpu-00000.safetensors.tmp"):
        (tmp_path / "out" / "shards" / name).write_bytes(bytes(5))
    summary = summarize(Output(tmp_path / "out"))
    assert (summary.shards, summary.size, summary.skipped) == (1, 1000, 0)


def test_a_run_in_which_all_failed(tmp_path: Path) -> None:
    plan = planned(tmp_path, [{"id": str(i), "image": f"{i}.png"} for i in range(3)])
    summary = run(tmp_path, plan)
    assert (summary.ok, summary.failed, summary.images, summary.patches) == (0, 3, 0, 0)
    assert (summary.tokens, summary.size, summary.shards) == (0, 0, 0)
    plain = summarize_plan(plan, 14, "float32")
    assert (plain.images, plain.pixels, plain.tokens, plain.shards, plain.histogram) == (0, 0, 0, {}, ())


def test_a_plan_of_nothing() -> None:
    summary = summarize_plan(PLAN_SCHEMA.empty_table(), 14, "float32")
    assert (summary.rows, summary.failed, summary.images, summary.histogram) == (0, 0, 0, ())
    assert summary.bytes_by_dtype == {"float32": 0, "bfloat16": 0, "float16": 0, "uint8": 0}


def test_failures_are_the_first_ones_and_all_are_counted(tmp_path: Path) -> None:
    plan = planned(tmp_path, [{"id": str(i), "image": f"{i}.png"} for i in range(25)])
    for summary in (summarize_plan(plan, 14, "float32"), run(tmp_path, plan)):
        assert summary.failed == 25
        assert summary.failures == tuple((i + 1, str(i), "not_found", "gone") for i in range(20))


def test_sizes_follow_the_patch_size(tmp_path: Path) -> None:
    summary = summarize_plan(planned(tmp_path, [item("a.png")]), 16, "float32")
    assert summary.bytes_by_dtype["uint8"] == 4 * 3 * 16 * 16


# --- histogram ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "bins"),
    [
        ([1], ((16, 1),)),
        ([16], ((16, 1),)),
        ([17], ((16, 0), (32, 1))),
        ([1, 16, 17, 32, 33], ((16, 2), (32, 2), (64, 1))),
        ([16384], (*((2**n, 0) for n in range(4, 14)), (16384, 1))),
        ([16385], (*((2**n, 0) for n in range(4, 15)), (32768, 1))),
    ],
)
def test_a_power_of_two_ends_its_bin(tmp_path: Path, tokens: list[int], bins: tuple[tuple[int, int], ...]) -> None:
    rows = [{"id": str(i), "features": f"{i}.npy", "grid_thw": [1, 2, 2 * n]} for i, n in enumerate(tokens)]
    assert summarize_plan(planned(tmp_path, rows), 14, "float32").histogram == bins


def test_an_image_smaller_than_a_merged_square_is_in_the_first_bin(tmp_path: Path) -> None:
    rows = [{"id": "f", "features": "f.npy", "grid_thw": [1, 1, 1]}]
    assert summarize_plan(planned(tmp_path, rows), 14, "float32").histogram == ((16, 1),)


@pytest.mark.parametrize("fixed", [1, 2**31 - 1])
def test_a_fixed_number_of_tokens(tmp_path: Path, fixed: int) -> None:
    summary = summarize_plan(planned(tmp_path, [item("a.png"), item("b.png", 280)], tokens=fixed), 14, "float32")
    assert summary.tokens == 2 * fixed
    assert summary.histogram[-1] == (max(16, 2 ** (fixed - 1).bit_length()), 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_every_image_is_in_the_bin_that_holds_its_tokens(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int]
) -> None:
    rows = [{"id": str(i), "features": f"{i}.npy", "grid_thw": [1, 2, 2 * n]} for i, n in enumerate(tokens)]
    bins = summarize_plan(planned(tmp_path_factory.mktemp("plan"), rows), 14, "float32").histogram
    highs = [0, *(high for high, _ in bins)]
    values = np.array(tokens)
    for low, (high, count) in zip(highs, bins, strict=False):
        assert count == ((values > low) & (values <= high)).sum()
    assert bins[-1][1] > 0 or len(bins) == 1
