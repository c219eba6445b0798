"""config_rules.py: what each key may be, and the place, words and hint of every way to get it wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ABSENT, BOARD, PUBLISHED, RELATIVES, Bench, nested
from hypothesis import given
from hypothesis import strategies as st

from kimik3_prep.checkpoint import rules as config_rules
from kimik3_prep.checkpoint.config import Background, PreprocessorConfig


def board(**changes: Any) -> dict[str, Any]:
    return nested(transparent_bg_config={**BOARD, **changes})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- absent optional keys ---


def test_optional_keys_absent(bench: Bench) -> None:
    absent = dict.fromkeys(config_rules.RESTORED[6:], ABSENT)
    found = bench(nested(**absent))
    assert found.config is not None
    assert (found.config.background, found.config.fill_stage) == (None, "before_resize")
    assert found.config.fixed_output_tokens is None
    assert len(found.warnings) == 3
    for key, warning in zip(absent, sorted(found.warnings, key=lambda problem: problem.where), strict=True):
        assert warning.where.endswith(f"media_proc_cfg.{key}")
        assert warning.what.startswith("absent")
    sources = {setting.key: setting.source for setting in found.settings}
    assert [sources[key] for key in absent] == ["default"] * 3
    stage = next(setting for setting in found.settings if setting.key == "transparent_bg_fill_stage")
    assert (stage.value, stage.published) == ("before_resize", "after_resize")


def test_null_background_drops_alpha_without_a_word(bench: Bench) -> None:
    found = bench(nested(transparent_bg_config=None))
    assert found.config is not None
    assert found.config.background is None
    assert found.problems == ()


def test_background_defaults_are_named(bench: Bench) -> None:
    warning = bench.only(nested(transparent_bg_config={}), "warning")
    assert warning.where == "media_proc_cfg.transparent_bg_config"
    assert '"pattern": "black"' in warning.what
    config = bench(nested(transparent_bg_config={})).config
    assert config is not None
    assert config.background == Background("black", 16, True, 255, 200)
    warning = bench.only(nested(transparent_bg_config={"pattern": "chessboard"}), "warning")
    assert '"chessboard_gray_value": 200' in warning.what
    assert bench(nested(transparent_bg_config={"pattern": "white"})).problems == ()


# --- missing keys, near misses ---


@pytest.mark.parametrize("document", [nested, lambda **changes: nested(**changes)["media_proc_cfg"]])
def test_missing_keys_are_one_error_that_lists_them(bench: Bench, document: Any) -> None:
    problem = bench.only(document(image_mean=ABSENT, in_patch_limit=ABSENT))
    assert problem.what == (
        "Kimi-K3 image processor is missing deferred-preprocessing config: in_patch_limit, image_mean"
    )
    assert problem.expected == '"in_patch_limit": 65536, "image_mean": [0.5, 0.5, 0.5], as published'
    assert "validate-config --write-fixed" in problem.hint
    sources = {setting.key: setting.source for setting in bench(document(image_mean=ABSENT)).settings}
    assert (sources["image_mean"], sources["image_std"]) == ("missing", "file")


@pytest.mark.parametrize("key", config_rules.REQUIRED)
def test_each_required_key_is_required(bench: Bench, key: str) -> None:
    assert bench.only(nested(**{key: ABSENT})).what.endswith(f"deferred-preprocessing config: {key}")


def test_no_key_at_all_is_all_missing(bench: Bench) -> None:
    problem = bench.only({"media_proc_cfg": {}})
    assert all(key in problem.what for key in config_rules.REQUIRED)


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ("max_patches", "in_patch_limit"),
        ("in_patch_limits", "in_patch_limit"),
        ("spatial_merge_size", "merge_kernel_size"),
        ("merge-kernel-size", "merge_kernel_size"),
        ("mean", "image_mean"),
        ("pixel_std", "image_std"),
        ("Patch_Size", "patch_size"),
        ("max_patches_per_side", "patch_limit_on_one_side"),
    ],
)
def test_a_near_miss_of_a_missing_key(bench: Bench, wrong: str, key: str) -> None:
    problem = bench.only(nested(**{key: ABSENT, wrong: PUBLISHED[key]}))
    assert f'was "{wrong}" meant to be {key}?' in problem.hint
    assert "meant" not in bench.only(nested(patch_limit_on_one_side=ABSENT, patch_sizes=14)).hint  # patch_size is there
    found = bench(nested(**{wrong: PUBLISHED[key]}))  # nothing is missing: an extra key, legal
    assert [problem.what for problem in found.problems] == ["nothing reads this key"]


def test_a_video_key_is_no_near_miss(bench: Bench) -> None:
    assert "meant" not in bench.only(nested(in_patch_limit=ABSENT)).hint


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ("transparent_bg_cfg", "transparent_bg_config"),
        ("transparent_background_config", "transparent_bg_config"),
        ("fill_stage", "transparent_bg_fill_stage"),
        ("fixed_output_token", "fixed_output_tokens"),
    ],
)
def test_a_near_miss_of_an_optional_key_is_a_warning(bench: Bench, wrong: str, key: str) -> None:
    found = bench(nested(**{key: ABSENT, wrong: PUBLISHED[key]}))
    assert found.config is not None
    near = [problem for problem in found.warnings if problem.where.endswith(f": media_proc_cfg.{wrong}")]
    assert [problem.hint for problem in near] == [f"was {key} meant?"]
    extra = {wrong: PUBLISHED[key]}  # the key itself is there, so the other one is only an extra key
    assert [problem.what for problem in bench(nested(**extra)).problems] == ["nothing reads this key"]


def test_a_near_miss_with_a_line_break_is_shown_on_one_line(bench: Bench) -> None:
    flat = nested(fixed_output_tokens=ABSENT)["media_proc_cfg"]
    places = [problem.where for problem in bench({**flat, "fixed_output_tokens\n": None}).warnings]
    assert f'{bench.path}: ["fixed_output_tokens\\n"]' in places


def test_a_hostile_number_of_near_misses_is_told_in_a_few_words(bench: Bench) -> None:
    problem = bench.only({"media_proc_cfg": {f"in_patch_limi{number}": 1 for number in range(20_000)}})
    assert 'was "in_patch_limi0" meant to be in_patch_limit?' in problem.hint
    assert len(problem.hint) < 500


# --- numbers ---


@pytest.mark.parametrize("key", ["patch_size", "in_patch_limit", "patch_limit_on_one_side", "merge_kernel_size"])
@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("4", "write 4"),
        (" 4 ", "write 4"),
        (4.0, "write 4"),
        (True, None),
        (4.5, None),
        ("4.5", None),
        ("-4", None),
        ("1_4", None),
        ("9" * 5000, None),
        (0, None),
        (-1, None),
        (2**31, None),
        (10**400, None),
        (1e300, None),
        (None, None),
        ({}, None),
        ("", None),
    ],
)
def test_integers(bench: Bench, key: str, value: Any, hint: str | None) -> None:
    problem = bench.only(nested(**{key: value}))
    assert problem.where == f"media_proc_cfg.{key}"
    assert problem.hint == (hint or f"the published value is {PUBLISHED[key]}")
    assert problem.expected in ("an integer above zero", "at most 2147483647", "at most 4096")
    assert len(problem.what) < 120


def test_the_path_of_a_flat_key(bench: Bench) -> None:
    assert bench.only({**PUBLISHED, "patch_size": 0}).where == "patch_size"


def test_sides_whose_square_would_overflow(bench: Bench) -> None:
    assert bench.only(nested(patch_size=4097, patch_limit_on_one_side=2)).expected == "at most 4096"
    assert bench(nested(patch_size=4096, patch_limit_on_one_side=2)).problems == ()
    problem = bench.only(nested(patch_size=4096, patch_limit_on_one_side=2**20))
    assert problem.expected == "a side of at most 2147483647 pixels"
    assert bench(nested(patch_size=2048, patch_limit_on_one_side=2**20 - 2)).problems == ()


def test_merge_as_a_pair(bench: Bench) -> None:
    found = bench(nested(merge_kernel_size=[2, 2]))
    assert found.config is not None
    assert found.config.merge_size == 2
    assert "write 2" in bench.only(nested(merge_kernel_size=[2, 2]), "warning").hint


@pytest.mark.parametrize("value", [[2, 4], [2], [], [2, 2, 2], ["2", "2"], [0, 0], [True, True], [[2], [2]], [2, 2.0]])
def test_merge_as_a_wrong_list(bench: Bench, value: Any) -> None:
    assert bench.only(nested(merge_kernel_size=value)).where == "media_proc_cfg.merge_kernel_size"


def test_side_limit_is_a_multiple_of_the_merge(bench: Bench) -> None:
    problem = bench.only(nested(patch_limit_on_one_side=511))
    assert problem.where == "media_proc_cfg.patch_limit_on_one_side"
    assert problem.expected == "a multiple of merge_kernel_size (2)"
    assert problem.hint == "write 510 or 512"
    assert bench.only(nested(patch_limit_on_one_side=3, merge_kernel_size=8)).hint == "write 8"


@pytest.mark.parametrize("key", ["image_mean", "image_std"])
@pytest.mark.parametrize("value", [[0.5], [0.5] * 4, [], None, "0.5", ["0.5"] * 3, [True] * 3, [10**400, 1, 1], {}])
def test_mean_and_std_are_three_numbers(bench: Bench, key: str, value: Any) -> None:
    problem = bench.only(nested(**{key: value}))
    assert problem.where == f"media_proc_cfg.{key}"
    assert problem.expected == "exactly three finite numbers"
    assert problem.hint == "the published value is [0.5, 0.5, 0.5]"


@pytest.mark.parametrize("key", ["image_mean", "image_std"])
def test_mean_and_std_as_one_number(bench: Bench, key: str) -> None:
    assert bench.only(nested(**{key: 0.4})).hint == "write [0.4, 0.4, 0.4]"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([0, 1, 1], "numbers above zero"),
        ([0.5, -0.5, 0.5], "numbers above zero"),
        ([1e-320, 1, 1], "numbers that one can divide by in float32"),
        ([1e31, 1, 1], "numbers for pixels from 0 to 1"),
    ],
)
def test_std_is_above_zero(bench: Bench, value: Any, expected: str) -> None:
    problem = bench.only(nested(image_std=value))
    assert (problem.where, problem.expected) == ("media_proc_cfg.image_std", expected)
    assert problem.hint == "the published value is [0.5, 0.5, 0.5]"


def test_features_stay_finite_in_float32(bench: Bench) -> None:
    problem = bench.only(nested(image_mean=[1e20, 0, 0], image_std=[1e-20, 1, 1]))
    assert "float32" in problem.what
    assert not bench(nested(image_mean=[1e10, 0, 0], image_std=[1e-20, 1, 1])).errors


@pytest.mark.parametrize("key", ["image_mean", "image_std"])
def test_the_scale_of_bytes_is_suspected(bench: Bench, key: str) -> None:
    warning = bench.only(nested(**{key: [123.7, 116.3, 103.5]}), "warning")
    assert warning.where == f"media_proc_cfg.{key}"
    assert "255" in warning.expected
    assert warning.hint == "divided by 255: [0.485098, 0.456078, 0.405882]"
    assert bench(nested(**{key: [1, 1, 1]})).problems == ()


def test_fixed_output_tokens(bench: Bench) -> None:
    found = bench(nested(fixed_output_tokens=256))
    assert found.config is not None
    assert found.config.fixed_output_tokens == 256
    assert "num_tokens" in bench.only(nested(fixed_output_tokens=256), "warning").what
    for wrong in (0, "256", 256.0, False, []):
        assert bench.only(nested(fixed_output_tokens=wrong)).where == "media_proc_cfg.fixed_output_tokens"


# --- background ---


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("afterresize", 'was "after_resize" meant?'),
        ("before", 'was "before_resize" meant?'),
        ("AFTER_RESIZE", 'was "after_resize" meant?'),
        ("zzz", 'the published value is "after_resize"'),
        (None, 'the published value is "after_resize"'),
        (1, 'the published value is "after_resize"'),
    ],
)
def test_fill_stage(bench: Bench, value: Any, hint: str) -> None:
    problem = bench.only(nested(transparent_bg_fill_stage=value))
    assert problem.where == "media_proc_cfg.transparent_bg_fill_stage"
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("checker", 'was "chessboard" meant?'),
        ("grey", 'was "gray" meant?'),
        ("White", 'was "white" meant?'),
        (None, 'the published value is "chessboard"'),
        (["white"], 'the published value is "chessboard"'),
    ],
)
def test_pattern(bench: Bench, value: Any, hint: str) -> None:
    problem = bench.only(board(pattern=value))
    assert problem.where == "media_proc_cfg.transparent_bg_config.pattern"
    assert problem.hint == hint


@pytest.mark.parametrize("pattern", ["chessboard", "white"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chessboard_square_size", 0),
        ("chessboard_square_size", "8"),
        ("chessboard_square_size", True),
        ("chessboard_square_on_top_left", 1),
        ("chessboard_square_on_top_left", "true"),
        ("chessboard_white_value", 256),
        ("chessboard_white_value", 255.0),
        ("chessboard_gray_value", -1),
        ("chessboard_gray_value", False),
        ("chessboard_gray_value", None),
    ],
)
def test_background_values(bench: Bench, pattern: str, key: str, value: Any) -> None:
    """Checked whatever the pattern: only images with alpha would run into them."""
    assert bench.only(board(pattern=pattern, **{key: value})).where == f"media_proc_cfg.transparent_bg_config.{key}"


def test_background_edges_are_legal(bench: Bench) -> None:
    edges = board(chessboard_square_size=1, chessboard_white_value=0, chessboard_gray_value=255)
    assert bench(edges).problems == ()


@pytest.mark.parametrize("wrong", ["grey_value", "chessboard_grey_value", "chessboard_gray_values"])
def test_an_unknown_background_key_is_an_error(bench: Bench, wrong: str) -> None:
    problem = bench.only(board(**{wrong: 180}))
    assert problem.where == f"media_proc_cfg.transparent_bg_config.{wrong}"
    assert problem.hint == "was chessboard_gray_value meant?"
    assert "it knows pattern, " in bench.only(board(colour=[1, 2, 3])).hint
    assert bench.only(board(**{"a\nb": 1})).where == 'media_proc_cfg.transparent_bg_config["a\\nb"]'
    assert len(bench.only(board(**{"x" * 5000: 1})).where) < 200


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("chessboard_square_size", "8", "write 8"),
        ("chessboard_square_size", 0, "the published value is 8"),
        ("chessboard_square_size", 2**31, "the published value is 8"),
        ("chessboard_white_value", 250.0, "write 250"),
        ("chessboard_white_value", "256", "the published value is 255"),
        ("chessboard_square_on_top_left", "False", "write false"),
        ("chessboard_square_on_top_left", 0, "write false"),
        ("chessboard_square_on_top_left", "TRUE", "write true"),
        ("chessboard_square_on_top_left", [], "the published value is true"),
    ],
)
def test_hints_for_background_values(bench: Bench, key: str, value: Any, hint: str) -> None:
    assert bench.only(board(**{key: value})).hint == hint


@pytest.mark.parametrize("value", ["white", [], 0, False])
def test_a_background_that_is_no_object(bench: Bench, value: Any) -> None:
    assert bench.only(nested(transparent_bg_config=value)).expected == "an object or null"


# --- where the keys stand ---


def test_both_places_agreeing(bench: Bench) -> None:
    assert bench({**nested(), **PUBLISHED}).problems == ()


def test_both_places_disagreeing_names_each_key_and_both_values(bench: Bench) -> None:
    found = bench({**nested(), "in_patch_limit": 16384, "patch_size": 16})
    assert {problem.where.removeprefix(f"{bench.path}: ") for problem in found.errors} == {
        "in_patch_limit",
        "patch_size",
    }
    limit = next(problem for problem in found.errors if "in_patch_limit" in problem.where)
    assert "65536" in limit.what
    assert "16384" in limit.what


def test_a_key_beside_media_proc_cfg_only(bench: Bench) -> None:
    found = bench({**nested(in_patch_limit=ABSENT), "in_patch_limit": 16384})
    assert [problem.hint for problem in found.errors if problem.where.endswith(": in_patch_limit")] == [
        "move it into media_proc_cfg"
    ]
    found = bench({**nested(transparent_bg_fill_stage=ABSENT), "transparent_bg_fill_stage": "after_resize"})
    assert [problem.hint for problem in found.errors] == ["move it into media_proc_cfg"]


def test_a_key_beside_media_proc_cfg_that_says_what_absence_says(bench: Bench) -> None:
    found = bench({**nested(fixed_output_tokens=ABSENT), "fixed_output_tokens": None})
    assert found.errors == ()


def test_ignored_keys_may_stand_anywhere(bench: Bench) -> None:
    document = {
        **nested(sample_fps=8.0),
        "sample_fps": 2,
        "auto_map": {},
        "config_type": "x",
        "in_patch_limit_video": 1,
    }
    assert bench(document).problems == ()


@pytest.mark.parametrize("inner", [None, [], "x", 1, [PUBLISHED]])
def test_media_proc_cfg_that_is_no_object(bench: Bench, inner: Any) -> None:
    assert bench.only({**PUBLISHED, "media_proc_cfg": inner}).where == "media_proc_cfg"


@pytest.mark.parametrize("document", [[], None, 1, "x", [nested()]])
def test_a_top_level_that_is_no_object(bench: Bench, document: Any) -> None:
    assert "the top level is" in bench.only(json.dumps(document)).what


@pytest.mark.parametrize("key", ["image_processor_type", "processor_class", "feature_extractor_type", "model_type"])
def test_another_models_config_is_refused_by_name(bench: Bench, key: str) -> None:
    shared = {name: PUBLISHED[name] for name in ("patch_size", "image_mean", "image_std")}
    problem = bench.only({key: "Qwen2VLImageProcessor", "merge_size": 2, **shared})
    assert "a config of Qwen2VLImageProcessor, not of Kimi-K3" in problem.what
    assert "--config kimi-k3" in problem.hint


def test_none_of_our_keys(bench: Bench) -> None:
    assert "none of Kimi-K3's own keys" in bench.only({}).what
    assert "none of Kimi-K3's own keys" in bench.only({"patch_size": 14}).what
    assert "model's config.json" in bench.only({"model_type": "kimi_k3", "architectures": ["K"]}).hint
    assert 'was "media_proc_config" meant to be media_proc_cfg?' in bench.only({"media_proc_config": PUBLISHED}).hint
    assert "a config of KimiK3ImageProcessor: it" in bench.only({"image_processor_type": "KimiK3ImageProcessor"}).what


@pytest.mark.parametrize("document", RELATIVES)
def test_a_relative_is_refused_by_name(bench: Bench, document: dict[str, Any]) -> None:
    problem = bench.only(document)
    assert problem.what.startswith("this is a config of Kimi") or "kimi_vl" in problem.what
    assert "a relative of Kimi-K3 that prepares images in another way" in problem.what
    assert bench(document).settings == ()


@pytest.mark.parametrize("name", ["KimiK3Processor", "KimiK25VisionProcessor", "Kimi-K2.6", "kimi_k3", "KimiProcessor"])
def test_kimi_k3_and_the_older_models_are_no_relatives(bench: Bench, name: str) -> None:
    for document in ({"processor_class": name, **nested()}, {"auto_map": {"AutoProcessor": f"x.{name}"}, **nested()}):
        assert bench(document).config is not None


def test_another_model_that_lacks_keys_is_not_mended_into_this_one(bench: Bench) -> None:
    document = {"processor_class": "OtherProcessor", "patch_limit_on_one_side": 512, "patch_size": 14}
    assert "a config of OtherProcessor, not of Kimi-K3: keys of Kimi-K3 are missing" in bench.only(document).what


# --- one level down, as transformers 5 writes it ---


@pytest.mark.parametrize("inside", [nested(), PUBLISHED])
def test_settings_one_level_down(bench: Bench, inside: dict[str, Any]) -> None:
    document = {"processor_class": "KimiK3Processor", "image_processor": {**inside, "image_processor_type": "x"}}
    assert bench(document).problems == ()
    assert bench(document).config == bench(nested()).config


def test_problems_one_level_down_have_their_path(bench: Bench) -> None:
    problem = bench.only({"image_processor": nested(patch_size="14")})
    assert problem.where == "image_processor.media_proc_cfg.patch_size"
    assert bench.only({"image_processor": {**PUBLISHED, "patch_size": 0}}).where == "image_processor.patch_size"
    assert bench.only({"image_processor": {"media_proc_cfg": None}}).where == "image_processor.media_proc_cfg"
    problem = bench.only({**nested(), "image_processor": nested(in_patch_limit=9)})
    assert problem.where == "image_processor.media_proc_cfg.in_patch_limit"
    assert problem.what == "media_proc_cfg says 65536, image_processor.media_proc_cfg says 9"


# --- keys that nothing reads ---


def test_unknown_keys_are_a_warning(bench: Bench) -> None:
    found = bench(nested(colour=1, **{"a\nb": 2}))
    assert found.config is not None
    assert [(problem.where, problem.what) for problem in found.warnings] == [
        (f"{bench.path}: media_proc_cfg.colour", "nothing reads this key"),
        (f'{bench.path}: media_proc_cfg["a\\nb"]', "nothing reads this key"),
    ]
    assert len(bench(nested(**{f"x{number}": 1 for number in range(30_000)})).warnings) == 21
    usual = {"auto_map": {}, "image_processor_type": "x", "processor_class": "KimiK3Processor"}
    assert bench({**PUBLISHED, **usual}).problems == ()


def test_a_name_with_control_characters_is_shown_escaped(bench: Bench) -> None:
    assert bench.only({"image_processor_type": "\x1b[31m" * 1000}).what.isprintable()


# --- everything at once, anything at all ---


def test_all_problems_at_once(bench: Bench) -> None:
    document = nested(
        patch_size="14",
        in_patch_limit=ABSENT,
        image_mean=0.5,
        transparent_bg_fill_stage="afterresize",
        fixed_output_tokens=ABSENT,
    )
    places = [problem.where.rpartition(".")[2] for problem in bench(document).problems]
    assert sorted(places) == [
        "fixed_output_tokens",
        "image_mean",
        "json: media_proc_cfg",
        "patch_size",
        "transparent_bg_fill_stage",
    ]


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 600)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["14", "white", "after_resize", "grey", 2**31, 10**400, 1e308, 5e-324])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*BOARD, *PUBLISHED, "colour"]) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)


def check(document: Any) -> None:
    checker = config_rules.Checker("x.json", PUBLISHED)
    values = checker.check(document)
    if values is not None and not any(problem.severity == "error" for problem in checker.problems):
        config = PreprocessorConfig.from_dict(values)
        assert PreprocessorConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    else:
        assert any(problem.severity == "error" for problem in checker.problems)
    for problem in checker.problems:
        assert problem.where.startswith("x.json")
        assert problem.where.isprintable()
        assert problem.what
        assert problem.what.isprintable()


@given(ANYTHING)
def test_any_document_is_diagnosed(document: Any) -> None:
    check(document)


@given(st.dictionaries(st.sampled_from([*PUBLISHED, "max_patches", "transparent_bg"]), ANYTHING, max_size=3))
def test_any_value_at_any_key_is_diagnosed(changes: dict[str, Any]) -> None:
    for document in (nested(**changes), {**PUBLISHED, **changes}, {**nested(), **changes}):
        check(document)


@given(st.dictionaries(st.sampled_from([*BOARD, "colour"]), ANYTHING, max_size=3))
def test_any_value_at_any_background_key_is_diagnosed(changes: dict[str, Any]) -> None:
    check(board(**changes))
