"""recipe.py: the facts are those of run.json, and no odd one gets past it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from conftest import cfg_and_config, recipe

from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.errors import InputError
from kimik3_prep.output.recipe import Recipe, canonical_json, fingerprint, odd_metadata

FACTS = recipe().facts()


def test_the_facts_are_those_that_earlier_versions_wrote() -> None:
    """The digest was computed with the version before there was a Recipe: old folders go on."""
    assert list(FACTS) == [
        *("config", "manifest", "limit", "backend", "dtype", "index_only", "shard_size", "dedupe"),
        *("max_pixels", "max_tokens", "exif", "decoders", "format"),
    ]
    assert (
        fingerprint(FACTS) == recipe().fingerprint == "05fd396329f9f5c3aae0654a0a28fbea9bc24959671486be10066da95fe452a4"
    )


@pytest.mark.parametrize(
    "made",
    [
        recipe(),
        recipe(config=cfg_and_config(transparent_bg_config=None)[1], limit=3, max_tokens=7, decoders={}),
        recipe(index_only=True, dtype="uint8", dedupe="content", exif="apply", backend="gpu"),
    ],
)
def test_facts_there_and_back(made: Recipe) -> None:
    again = Recipe.from_facts(json.loads(json.dumps(made.facts())))
    assert again == made == pickle.loads(pickle.dumps(made))
    assert again.fingerprint == made.fingerprint


def test_extra_formats_are_a_fact_only_where_there_are_some() -> None:
    assert "formats" not in FACTS
    more = replace(recipe(), formats=("heif", "jxl"))
    assert more.facts() == {**FACTS, "formats": ["heif", "jxl"]}
    assert Recipe.from_facts(json.loads(json.dumps(more.facts()))) == more
    assert more.fingerprint != recipe().fingerprint
    for odd in ([], ["jxl", "heif"], ["eps"], ["heif", "heif"], "heif", None, [1]):
        with pytest.raises(InputError, match=r"facts\.formats: is .*; expected some of heif, jxl, sorted"):
            Recipe.from_facts({**FACTS, "formats": odd})


def test_the_fingerprint_is_of_the_values_and_not_of_their_order() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert len({recipe().fingerprint, recipe(limit=1).fingerprint, recipe(dtype="uint8").fingerprint}) == 3
    assert canonical_json({"b": "é", "a": None}) == '{"a":null,"b":"é"}'


def changed(path: str, value: Any) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(json.dumps(FACTS))
    *folders, name = path.split(".")
    place = facts
    for folder in folders:
        place = place[folder]
    place[name] = value
    return facts


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config", None),
        ("config", [1]),
        ("config.patch_size", 0),
        ("config.patch_size", 14.0),
        ("config.merge_size", True),
        ("config.in_patch_limit", 10**30),
        ("config.image_mean", [0.5, 0.5]),
        ("config.image_mean", "0.5"),
        ("config.image_mean", [0.5, 0.5, float("inf")]),
        ("config.image_mean", [0.5, 0.5, None]),
        ("config.image_std", [0.5, 0.5, 0]),
        ("config.image_std", [0.5, 0.5, float("nan")]),
        ("config.fixed_output_tokens", -1),
        ("config.background", "white"),
        ("config.background.pattern", "pink"),
        ("config.background.gray_value", 256),
        ("config.background.square_size", 0),
        ("config.background.square_on_top_left", 1),
        ("config.fill_stage", ""),
        ("manifest", 5),
        ("limit", 0),
        ("limit", "3"),
        ("backend", "cuda"),
        ("dtype", "float64"),
        ("dtype", ["float32"]),
        ("dtype", {}),
        ("index_only", 0),
        ("shard_size", -5),
        ("dedupe", None),
        ("max_pixels", False),
        ("max_tokens", 1.5),
        ("exif", True),
        ("decoders", []),
        ("decoders", {"pillow": 13}),
        ("format", 2),
        ("format", True),
    ],
)
def test_an_odd_fact_is_named(path: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        Recipe.from_facts(changed(path, value), "run.json: facts")
    assert [problem.where for problem in caught.value.problems] == [f"run.json: facts.{path}"]


def test_missing_and_unknown_facts_are_named_together() -> None:
    facts = changed("config.pattern", "white")
    del facts["exif"], facts["config"]["image_std"]
    facts["turn"] = False
    with pytest.raises(InputError) as caught:
        Recipe.from_facts(facts)
    assert [(problem.where, problem.what.partition(",")[0]) for problem in caught.value.problems] == [
        ("facts", 'has "turn"'),
        ("facts.exif", "is missing"),
        ("facts.config", 'has "pattern"'),
        ("facts.config.image_std", "is missing"),
    ]
    with pytest.raises(InputError, match="facts: is null; expected an object"):
        Recipe.from_facts(None)


def test_metadata_says_what_readers_need() -> None:
    made = recipe(dtype="bfloat16")
    of_run = {
        **{"format": 1, "fingerprint": made.fingerprint, "dtype": "bfloat16"},
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "patch_size": 14, "merge_size": 2},
    }
    assert made.metadata() == of_run
    assert made.metadata("cpu") == {**of_run, "group": "cpu"}
    assert made.metadata("cpu", "cpu-00000") == {**of_run, "group": "cpu", "shard": "cpu-00000"}
    assert replace(made, index_only=True).metadata()["index_only"] is True


def test_what_follows_from_a_recipe() -> None:
    assert [recipe(dtype=dtype).patch_bytes for dtype in ("float32", "bfloat16", "uint8")] == [2352, 1176, 588]
    assert recipe().rule() == GridRule(14, 2, 65536, 512)
    assert recipe().rule(100) == GridRule(14, 2, 100, 512)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"merge_size": 0}, "its merge_size is 0, not a whole number from 1"),
        ({"merge_size": -1}, "its merge_size is -1"),
        ({"patch_size": "14"}, 'its patch_size is "14"'),
        (
            {"image_mean": [0.5] * 5},
            "its image_mean is [0.5, 0.5, 0.5, 0.5, 0.5], not three",
        ),
        ({"image_std": [0.5, 0.5, 0]}, "its image_std is"),
        ({"dtype": "float8"}, 'its dtype is "float8", not one of'),
    ],
)
def test_odd_metadata_is_said(odd: dict[str, Any], words: str) -> None:
    assert odd_metadata(recipe().metadata("cpu", "cpu-00000")) == odd_metadata({}) == ""
    assert odd_metadata(odd).startswith(words)
