"""config.py: where the preprocessor config is found, what it means, and the mended copy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import ABSENT, BOARD, GOLDEN, PUBLISHED, RELATIVES, Bench, golden_cases, nested
from hypothesis import given
from hypothesis import strategies as st

from kimik3_prep import remote
from kimik3_prep.checkpoint import rules as config_rules
from kimik3_prep.checkpoint.config import (
    FILE_NAME,
    FILE_NAMES,
    Background,
    ConfigReports,
    Mended,
    PreprocessorConfig,
    diagnose,
    diagnose_all,
    find_config,
    load_config,
    published_path,
    report_all,
)
from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.checkpoint.mend import write_fixed_copy
from kimik3_prep.errors import InputError


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- what a good one means ---


@pytest.mark.parametrize("case", golden_cases("configs"), ids=lambda case: case["id"])
def test_golden(case: dict[str, Any]) -> None:
    found = diagnose(GOLDEN / case["file"])
    assert ("error" if found.errors else "ok") == case["expect"]
    assert (found.config is None) == bool(found.errors)


def test_the_published_file() -> None:
    config, warnings = load_config(find_config("kimi-k3"))
    assert warnings == []
    half = (0.5, 0.5, 0.5)
    background = Background("chessboard", 8, True, 255, 180)
    assert config == PreprocessorConfig(14, 2, 65536, 512, half, half, None, background, "after_resize")
    assert all(setting.value == setting.published for setting in diagnose(published_path()).settings)


def test_the_published_file_keeps_the_video_keys() -> None:
    assert PUBLISHED["in_patch_limit_video"] == 655360
    assert PUBLISHED["timestamp_mode"] == "hh:mm:ss.fff"


def test_flat_keys_mean_the_same(bench: Bench) -> None:
    found = bench(PUBLISHED)
    assert found.problems == ()
    assert found.config == load_config(published_path())[0]


def test_a_byte_order_mark_is_fine(bench: Bench) -> None:
    assert bench("\ufeff" + json.dumps(nested())).problems == ()


BYTE = st.integers(0, 255)
BACKGROUNDS = st.builds(
    Background,
    st.sampled_from(["white", "black", "gray", "chessboard"]),
    st.integers(1, 10**6),
    st.booleans(),
    BYTE,
    BYTE,
)
CONFIGS = st.builds(
    PreprocessorConfig,
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 2**31 - 1),
    st.integers(1, 1000).map(lambda n: n * 840),
    st.tuples(*[st.floats(-1, 1)] * 3),
    st.tuples(*[st.floats(0.001, 1)] * 3),
    st.none() | st.integers(1, 10**6),
    st.none() | BACKGROUNDS,
    st.sampled_from(["before_resize", "after_resize"]),
)


@given(CONFIGS)
def test_a_valid_config_round_trips(config: PreprocessorConfig) -> None:
    assert PreprocessorConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(CONFIGS)
def test_a_valid_config_is_read_back_from_its_file_form(config: PreprocessorConfig) -> None:
    background = config.background
    document = nested(
        patch_size=config.patch_size,
        merge_kernel_size=config.merge_size,
        in_patch_limit=config.in_patch_limit,
        patch_limit_on_one_side=config.patch_limit_on_one_side,
        image_mean=list(config.image_mean),
        image_std=list(config.image_std),
        fixed_output_tokens=config.fixed_output_tokens,
        transparent_bg_fill_stage=config.fill_stage,
        transparent_bg_config=background
        and {
            "pattern": background.pattern,
            "chessboard_square_size": background.square_size,
            "chessboard_square_on_top_left": background.square_on_top_left,
            "chessboard_white_value": background.white_value,
            "chessboard_gray_value": background.gray_value,
        },
    )
    checker = config_rules.Checker("x.json", PUBLISHED)
    values = checker.check(document)
    assert values is not None
    assert PreprocessorConfig.from_dict(values) == config
    assert [problem for problem in checker.problems if problem.severity == "error"] == []


def test_the_part_that_decides_grids() -> None:
    config = load_config(published_path())[0]
    assert config.grid_rule() == GridRule(14, 2, 65536, 512, None)


def test_a_report_is_json(bench: Bench) -> None:
    found = bench(nested(patch_size="14"))
    read = json.loads(json.dumps(asdict(found.report()), allow_nan=False))
    assert (read["path"], read["valid"]) == (str(bench.path), False)
    assert read["settings"][0] == {"key": "patch_size", "value": "14", "published": 14, "source": "file"}
    assert read["problems"][0]["hint"] == "write 14"
    assert bench(nested()).report().valid


# --- the table ---


def table(bench: Bench, document: Any) -> dict[str, tuple[Any, Any, str]]:
    return {setting.key: (setting.value, setting.published, setting.source) for setting in bench(document).settings}


def test_the_table_of_the_published_file(bench: Bench) -> None:
    expected = {key: (PUBLISHED[key], PUBLISHED[key], "file") for key in config_rules.RESTORED}
    del expected["transparent_bg_config"]
    expected |= {f"transparent_bg_config.{key}": (value, value, "file") for key, value in BOARD.items()}
    assert table(bench, nested()) == expected


def test_the_table_says_what_is_missing_and_what_is_a_default(bench: Bench) -> None:
    rows = table(bench, {"media_proc_cfg": {}})
    assert list(rows) == list(config_rules.RESTORED)
    assert rows["patch_size"] == (None, 14, "missing")
    assert rows["image_std"] == (None, [0.5, 0.5, 0.5], "missing")
    assert rows["fixed_output_tokens"] == (None, None, "default")
    assert rows["transparent_bg_config"] == (None, BOARD, "default")
    assert rows["transparent_bg_fill_stage"] == ("before_resize", "after_resize", "default")


def test_the_table_of_a_background_shows_its_defaults(bench: Bench) -> None:
    rows = table(bench, nested(transparent_bg_config={"pattern": "white", "chessboard_gray_value": 7}))
    assert rows["transparent_bg_config.pattern"] == ("white", "chessboard", "file")
    assert rows["transparent_bg_config.chessboard_square_size"] == (16, 8, "default")
    assert rows["transparent_bg_config.chessboard_gray_value"] == (7, 180, "file")
    assert table(bench, nested(transparent_bg_config=None))["transparent_bg_config"] == (None, BOARD, "file")


def test_the_table_shows_a_value_as_it_is_read_and_a_wrong_one_as_it_stands(bench: Bench) -> None:
    wrong = {"patch_size": True, "transparent_bg_config": "x", "transparent_bg_fill_stage": "afterresize"}
    rows = table(bench, nested(merge_kernel_size=[2, 2], **wrong))
    assert rows["transparent_bg_fill_stage"] == ("afterresize", "after_resize", "file")
    assert rows["merge_kernel_size"] == (2, 2, "file")
    assert rows["patch_size"] == (True, 14, "file")
    assert rows["transparent_bg_config"] == ("x", BOARD, "file")
    assert table(bench, nested(merge_kernel_size=[2, 4]))["merge_kernel_size"] == ([2, 4], 2, "file")


@pytest.mark.parametrize("document", [[], {}, {"media_proc_cfg": None}, "{"])
def test_no_table_of_what_is_no_config(bench: Bench, document: Any) -> None:
    assert bench(document).settings == ()


# --- differences, several files ---


def test_settings_that_are_not_as_published(bench: Bench) -> None:
    found = bench(nested(in_patch_limit=16384, transparent_bg_config={**BOARD, "chessboard_gray_value": 181}))
    assert found.differing == ("in_patch_limit", "transparent_bg_config.chessboard_gray_value")
    assert bench(nested(merge_kernel_size=[2, 2])).differing == ()
    strict = found.strictly()
    assert (found.errors, strict.config) == ((), None)
    assert [problem.where for problem in strict.errors] == [f"{bench.path}: {key}" for key in found.differing]
    assert "it is 16384, and --strict asks for the published settings; expected 65536" in str(strict.errors[0])
    published = diagnose(published_path())
    assert published.strictly() == published


def test_several_configs_are_diagnosed_together(bench: Bench, tmp_path: Path) -> None:
    bench(nested(in_patch_limit=16384))
    gone = str(tmp_path / "gone.json")
    diagnoses = diagnose_all(["kimi-k3", str(bench.path), gone])
    assert [diagnosis.config is not None for diagnosis in diagnoses] == [True, True, False]
    assert "looked at" in diagnoses[2].problems[0].what
    report = report_all(diagnoses)
    assert isinstance(report, ConfigReports)
    assert ([one.valid for one in report.configs], report.valid) == ([True, True, False], False)
    assert [diagnosis.config is None for diagnosis in diagnose_all(["kimi-k3", str(bench.path)], True)] == [False, True]
    with pytest.raises(InputError):
        diagnose_all([gone])


# --- reading ---


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('{"media_proc_cfg": {\n "image_mean": [NaN, 0, 0]}}', ":2:17", "NaN"),
        ('{"patch_size": 14,\n "patch_size": 16}', ":2:2", "twice"),
        ('{"patch_size": 14 // pixels\n}', ":1:19", "not JSON"),
        ("", "", "nothing in it"),
        ('{"patch_size": ' + "[" * 10_000, "", "200 deep"),
    ],
)
def test_bad_json_has_line_and_column(bench: Bench, text: str, where: str, what: str) -> None:
    (problem,) = bench(text).problems
    assert problem.where == f"{bench.path}{where}"
    assert what in problem.what


def test_load_raises_every_error_and_only_errors(bench: Bench) -> None:
    bench(nested(patch_size="14", image_mean=0.5, fixed_output_tokens=ABSENT))
    with pytest.raises(InputError) as caught:
        load_config(bench.path)
    assert [problem.severity for problem in caught.value.problems] == ["error", "error"]
    bench(nested(fixed_output_tokens=ABSENT))
    assert [problem.severity for problem in load_config(bench.path)[1]] == ["warning"]


def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    (problem,) = diagnose(find_config(str(tmp_path))).problems
    assert problem.what == "not a regular file"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_a_refused_file_is_closed_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        diagnose(tmp_path)
        diagnose(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before


def test_unreadable_files_are_problems(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "big").write_bytes(b" " * (1 << 20) + b"{}")
    for name, what in (
        ("nothing", "No such file"),
        (".", "directory"),
        ("loop", "symbolic link"),
        ("a\0b", "null byte"),
        ("big", "more than 1,048,576 bytes"),
    ):
        (problem,) = diagnose(tmp_path / name).problems
        assert what in problem.what


# --- finding ---


def test_find_beside_before_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / FILE_NAME).write_text("{}")
    monkeypatch.chdir(here)
    assert find_config(None, there) == there / FILE_NAME
    (there / FILE_NAME).unlink()
    assert find_config(None, there) == Path(FILE_NAME)
    assert find_config(str(here)) == here / FILE_NAME
    assert find_config(str(here / FILE_NAME)) == here / FILE_NAME


def test_a_dangling_link_beside_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILE_NAME).write_text("{}")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / FILE_NAME).symlink_to("nowhere")
    found = find_config(None, tmp_path / "there")
    assert found == tmp_path / "there" / FILE_NAME
    assert "No such file" in diagnose(found).problems[0].what


def test_a_folder_that_transformers_5_wrote(tmp_path: Path) -> None:
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({"processor_class": "KimiK3Processor", "image_processor": nested()}))
    assert find_config(str(tmp_path)) == path
    assert diagnose(path).config == load_config(published_path())[0]
    (tmp_path / FILE_NAME).write_text(json.dumps(nested()))
    assert find_config(str(tmp_path)) == tmp_path / FILE_NAME


@pytest.mark.parametrize("name", ["", f"/{FILE_NAME}"])
def test_an_address_that_nobody_answers_is_no_missing_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    with pytest.raises(InputError) as caught:
        diagnose(find_config(f"http://127.0.0.1:9{name}"))
    (problem,) = caught.value.problems
    assert "its server cannot be reached" in problem.what
    assert "check the address and the network" in problem.hint


def test_nothing_found_lists_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        find_config(None, tmp_path / "there")
    (problem,) = caught.value.problems
    assert "Kimi-K3 encoder preprocessing needs an image processor" in problem.what
    names = [*(str(tmp_path / "there" / name) for name in FILE_NAMES), *FILE_NAMES]
    assert problem.what.endswith(f"looked at {', '.join(names)}")
    assert "kimi-k3" in problem.hint
    assert "checkpoint folder" in problem.hint


def test_a_folder_named_kimi_k3_does_not_hide_the_published_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kimi-k3").mkdir()
    (tmp_path / "kimi-k3" / FILE_NAME).write_text("{}")
    assert find_config("kimi-k3") == published_path()
    assert find_config("./kimi-k3") == Path("kimi-k3") / FILE_NAME


@pytest.mark.parametrize("argument", ["", "a\0b", "x" * 5000, "moonshotai/Kimi-K3"])
def test_arguments_that_name_nothing(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(InputError):
        find_config(argument)


# --- mending ---


def test_missing_keys_are_restored_and_nothing_else_moves(bench: Bench, tmp_path: Path) -> None:
    document = {"auto_map": {"a": "é"}, **nested(image_mean=ABSENT, transparent_bg_fill_stage=ABSENT, patch_size=16)}
    target = tmp_path / "fixed.json"
    assert write_fixed_copy(bench(document), target) == Mended(("image_mean", "transparent_bg_fill_stage"))
    fixed = json.loads(target.read_text(encoding="utf-8"))
    assert diagnose(target).problems == ()
    assert list(fixed) == ["auto_map", "media_proc_cfg"]
    assert fixed["media_proc_cfg"].pop("image_mean") == [0.5, 0.5, 0.5]
    assert fixed["media_proc_cfg"].pop("transparent_bg_fill_stage") == "after_resize"
    assert fixed == document
    assert list(fixed["media_proc_cfg"]) == list(document["media_proc_cfg"])
    assert json.loads(bench.path.read_text()) == document


def test_a_flat_file_stays_flat(bench: Bench, tmp_path: Path) -> None:
    target = tmp_path / "fixed.json"
    assert write_fixed_copy(bench(nested(patch_size=ABSENT)["media_proc_cfg"]), target).restored == ("patch_size",)
    assert json.loads(target.read_text())["patch_size"] == 14
    assert "media_proc_cfg" not in json.loads(target.read_text())


@pytest.mark.parametrize(
    ("wrong", "key", "value"),
    [
        ("in_patch_limt", "in_patch_limit", 16384),
        ("max_patches", "in_patch_limit", 9),
        ("Image-Mean", "image_mean", [0.1, 0.2, 0.3]),
        ("fill_stage", "transparent_bg_fill_stage", "before_resize"),
    ],
)
def test_a_misspelt_key_keeps_its_value(bench: Bench, wrong: str, key: str, value: Any, tmp_path: Path) -> None:
    target = tmp_path / "fixed.json"
    document = nested(**{key: ABSENT, wrong: value, "fixed_output_tokens": ABSENT})
    assert write_fixed_copy(bench(document), target) == Mended(("fixed_output_tokens",), {wrong: key})
    fixed = json.loads(target.read_text())["media_proc_cfg"]
    assert fixed[key] == value
    assert wrong not in fixed
    assert [name if name != key else wrong for name in fixed] == [*document["media_proc_cfg"], "fixed_output_tokens"]
    assert diagnose(target).errors == ()


def test_a_misspelt_background_key_keeps_its_value(bench: Bench, tmp_path: Path) -> None:
    background = {**BOARD, "chessboard_grey_value": 7}
    del background["chessboard_gray_value"]
    target = tmp_path / "fixed.json"
    mended = write_fixed_copy(bench(nested(transparent_bg_config=background)), target)
    assert mended.renamed == {"chessboard_grey_value": "chessboard_gray_value"}
    config = diagnose(target).config
    assert config is not None
    assert config.background == Background("chessboard", 8, True, 255, 7)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (nested(in_patch_limit=ABSENT, in_patch_limt=1, max_patches=2), "may both be meant to be in_patch_limit"),
        (nested(in_patch_limit=ABSENT, in_patch_limt="many"), 'in_patch_limit: it is "many"'),
        (nested(in_patch_limit=ABSENT, patch_size="14"), 'media_proc_cfg.patch_size: it is "14"'),
        (nested(patch_size=ABSENT, transparent_bg_config={"colour": 1}), "transparent_bg_config.colour"),
        ({**nested(in_patch_limit=ABSENT, in_patch_limt=9), "in_patch_limit": 8}, "media_proc_cfg says 9, the top"),
    ],
)
def test_a_copy_that_would_still_be_wrong_is_not_written(
    bench: Bench, tmp_path: Path, document: Any, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        write_fixed_copy(bench(document), tmp_path / "fixed.json")
    assert words in str(caught.value)
    assert not (tmp_path / "fixed.json").exists()


def test_nothing_is_written_where_nothing_is_to_mend(bench: Bench, tmp_path: Path) -> None:
    for document in (nested(), nested(patch_size="14"), nested(colour=1)):
        assert write_fixed_copy(bench(document), tmp_path / "fixed.json") == Mended()
    assert not (tmp_path / "fixed.json").exists()


def test_a_relative_is_never_repaired_into_kimi_k3(bench: Bench, tmp_path: Path) -> None:
    for document in RELATIVES:
        with pytest.raises(InputError, match="a relative of Kimi-K3"):
            write_fixed_copy(bench(document), tmp_path / "fixed.json")
    assert not (tmp_path / "fixed.json").exists()


def test_an_older_model_is_mended_to_what_it_reads_and_not_to_kimi_k3(bench: Bench, tmp_path: Path) -> None:
    absent = dict.fromkeys(("transparent_bg_config", "transparent_bg_fill_stage"), ABSENT)
    older = {"auto_map": {"AutoProcessor": "kimi_k25_processor.KimiK25Processor"}}
    found = bench({**older, **nested(in_patch_limit=16384, **absent)})
    assert found.config is not None
    write_fixed_copy(found, tmp_path / "fixed.json")
    assert diagnose(tmp_path / "fixed.json").config == found.config
    with pytest.raises(InputError, match=r"Kimi-K2.5 or K2.6 without in_patch_limit"):
        write_fixed_copy(bench({**older, **nested(in_patch_limit=ABSENT)}), tmp_path / "other.json")


def test_a_key_that_stands_outside_is_restored_with_its_own_value(bench: Bench, tmp_path: Path) -> None:
    target = tmp_path / "fixed.json"
    document = {**nested(in_patch_limit=ABSENT), "in_patch_limit": 16384}
    assert write_fixed_copy(bench(document), target).restored == ("in_patch_limit",)
    config = diagnose(target).config
    assert config is not None
    assert config.in_patch_limit == 16384


def test_numbers_stay_as_they_are(bench: Bench, tmp_path: Path) -> None:
    target = tmp_path / "fixed.json"
    numbers = {"image_mean": [0, 1, 0], "x": [8.0, 1e-7, 10**400, -0.0, 0.1]}
    write_fixed_copy(bench(nested(patch_size=ABSENT, **numbers)), target)
    fixed = json.loads(target.read_text())["media_proc_cfg"]
    assert {key: repr(fixed[key]) for key in numbers} == {key: repr(value) for key, value in numbers.items()}


def test_the_deepest_file_that_is_read_can_be_mended(bench: Bench, tmp_path: Path) -> None:
    deep = json.loads("[" * 198 + "]" * 198)
    assert write_fixed_copy(bench(nested(patch_size=ABSENT, x=deep)), tmp_path / "fixed.json").restored
    assert diagnose(tmp_path / "fixed.json").errors == ()


@pytest.mark.parametrize("size", [0, 50_000])
def test_a_disk_that_fills_up_leaves_no_half_config(bench: Bench, tmp_path: Path, size: int) -> None:
    bench(nested(patch_size=ABSENT, x="y" * size))
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from kimik3_prep.checkpoint.config import diagnose\n"
        "from kimik3_prep.checkpoint.mend import write_fixed_copy\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))\n"
        "write_fixed_copy(diagnose(Path(sys.argv[1])), Path(sys.argv[2]))\n"
    )
    command = [sys.executable, "-c", script, str(bench.path), str(tmp_path / "fixed.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "cannot be written: File too large" in done.stderr
    assert not (tmp_path / "fixed.json").exists()


def test_the_folder_of_the_copy_has_to_exist(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its folder does not exist"):
        write_fixed_copy(bench(nested(patch_size=ABSENT)), tmp_path / "none" / "fixed.json")


def test_an_empty_media_proc_cfg_can_be_mended(bench: Bench, tmp_path: Path) -> None:
    target = tmp_path / "fixed.json"
    assert write_fixed_copy(bench({"media_proc_cfg": {}}), target) == Mended(config_rules.RESTORED)
    assert diagnose(target).problems == ()


def test_no_file_is_overwritten(bench: Bench, tmp_path: Path) -> None:
    found = bench(nested(image_mean=ABSENT))
    before = bench.path.read_bytes()
    (tmp_path / "soft").symlink_to(bench.path)
    os.link(bench.path, tmp_path / "hard")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    targets = ["x.json", "soft", "hard", "dangling", "folder", "folder/../x.json", "none/fixed.json", "a\0b"]
    for name in targets:
        with pytest.raises(InputError):
            write_fixed_copy(found, tmp_path / name)
    assert bench.path.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "folder", "hard", "soft", "x.json"]


@pytest.mark.parametrize(
    "document",
    [
        "{",
        '{"patch_size": NaN}',
        [],
        {},
        {"media_proc_cfg": None},
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "image_mean": [0, 0, 0]},
    ],
)
def test_what_cannot_be_mended_is_not_written(bench: Bench, tmp_path: Path, document: Any) -> None:
    with pytest.raises(InputError):
        write_fixed_copy(bench(document), tmp_path / "fixed.json")
    assert not (tmp_path / "fixed.json").exists()
