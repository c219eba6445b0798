"""compute.py: what is computed on the spot is what a run stores."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import xxhash
from conftest import Silent, picture, write_manifest

from kimik3_prep.errors import ItemError
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.tables import shard_plan
from kimik3_prep.run.check import Settings
from kimik3_prep.run.compute import features
from kimik3_prep.run.prepare import prepare


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
def test_the_recipe_of_a_run_gives_its_bytes(dtype: str, tmp_path: Path) -> None:
    for name, mode in (("a.png", "RGBA"), ("b.png", "P")):
        picture(90, 50, mode).save(tmp_path / name)
    manifest = write_manifest(tmp_path / "m.jsonl", [{"image": "a.png"}, {"image": "b.png"}])
    prepare(Settings(str(manifest), tmp_path / "out", "kimi-k3", "cpu", dtype, max_tokens=5), Silent())
    recipe = Recipe.from_facts(json.loads((tmp_path / "out" / "run.json").read_text())["facts"])
    index = pq.read_table(tmp_path / "out" / "index.parquet")
    for item in shard_plan("cpu-00000", pq.read_table(tmp_path / "out" / "plan.parquet")).items:
        values, content_hash = features(item, str(tmp_path / item.image), recipe)
        assert content_hash == index["content_hash"][item.row].as_py()
        digest = xxhash.xxh3_128_hexdigest(values.tobytes())
        assert digest == index["checksum"][item.row].as_py()
    picture(91, 50).save(tmp_path / "b.png")
    with pytest.raises(ItemError, match="source_changed"):
        features(item, str(tmp_path / "b.png"), recipe)
