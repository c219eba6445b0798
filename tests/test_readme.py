"""README.md says what the code does."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from conftest import Run
from PIL import Image
from stand_ins import tiny_tokenizer

from kimik3_prep.errors import ItemErrorCode
from kimik3_prep.manifest.row import ID_KEYS, IMAGE_KEYS
from kimik3_prep.output.tables import INDEX_SCHEMA

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHEET = ROOT / ".github" / "contact-sheet.png"


def test_the_index_table_names_every_column_in_order() -> None:
    table = README.split("| column | type | meaning |")[1].split("\n\n")[0]
    names = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert names == INDEX_SCHEMA.names


def test_the_manifest_table_names_every_alias() -> None:
    table = README.split("| field | also called | meaning |")[1].split("\n\n")[0]
    for name in (*IMAGE_KEYS, *ID_KEYS):
        assert f"`{name}`" in table


def test_the_worked_example_is_what_the_commands_print(run: Run, tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "draw_sample.py", tmp_path / "sample"], check=True)
    shown = {line.strip() for line in README.splitlines()}
    config = ["--config", "kimi-k3"]
    dry = run("encode", "sample/manifest.jsonl", *config, "--dry-run")
    done = run("encode", "sample/manifest.jsonl", *config, "--output", "features")
    assert (dry.returncode, done.returncode) == (0, 1)
    assert [line for line in dry.stdout.splitlines() if line.strip() not in shown] == []
    assert [line for line in done.stdout.splitlines() if line.strip() not in shown] == []
    inspected = run("inspect", "features/shards/cpu-00000.safetensors").stdout
    assert {line.rstrip() for line in inspected.splitlines()[:4]} <= shown
    for more in (["features", "--id", "landscape"], ["features", "--sheets"]):
        assert run("inspect", *more, "--render", "pictures").stdout.splitlines()[-1] in shown
    lines = [line.strip() for line in run("inspect", "features").stdout.splitlines()]
    begin = lines.index("largest images")
    assert set(lines[begin : begin + 5]) <= shown
    assert set(run("manifest", "sample", "-o", "pictures.jsonl").stderr.splitlines()) <= shown
    with Image.open(tmp_path / "pictures" / "items-01.png") as drawn, Image.open(SHEET) as printed:
        assert drawn.tobytes() == printed.tobytes()
    # float32 and uint8 shards give the same values without this package
    levels = run("encode", "sample/manifest.jsonl", *config, "--dtype", "uint8", "--output", "levels")
    assert levels.returncode == 1
    told = "print(list(pixel_values.shape), str(pixel_values.dtype), grid_thw, pixel_values.astype('f8').sum())"
    alone = snippet("Read without this package")
    values, recoded = python(f"{alone}\n{told}\n{alone.replace('features/', 'levels/')}\n{told}", tmp_path).splitlines()
    assert values == recoded
    assert values.startswith("[3700, 3, 14, 14] float32 [1, 50, 74] ")
    assert snippet("Train").count('"features"') == 1
    epochs = [
        line.split()[0] for line in python(snippet("Train").replace('"features"', '"levels"'), tmp_path).splitlines()
    ]
    assert epochs == sorted(epochs)
    assert set(epochs) == {"0", "1"}
    tiny_tokenizer().save_pretrained(tmp_path / "CHECKPOINT")
    code = [snippet("Serve with SGLang"), snippet("FeatureStore"), VLLM, snippet("Serve with vLLM"), "print(inputs)"]
    served = python("\n".join(code), tmp_path).splitlines()
    assert served[0].endswith(" format modality pixel_values image_grid_thw offsets")
    assert int(served[0].split()[0]) > 925 + 414
    assert served[1:4] == [
        "torch.Size([3700, 3, 14, 14]) (1, 50, 74) 925 (1024, 683)",
        "Rows of hills in the evening sun",
        "line 13, cut-off: truncated",
    ]
    assert served[4:] == ["torch.uint8 [5356, 3, 14, 14] [[1, 50, 74], [1, 46, 36]]"]


def snippet(heading: str) -> str:
    """The first Python block under a heading or in the folded section of that name."""
    (begin,) = (match.end() for match in re.finditer(rf"^## {heading}$|<b>{heading}</b>", README, re.MULTILINE))
    return README[begin:].split("```python\n")[1].split("```")[0]


#: Stands in for the two modules of vLLM that `vllm_inputs` asks; what it builds is printed in short.
VLLM = """
import sys, types
from types import SimpleNamespace
def short(ids, items, hashes, ranges):
    pixels = items["pixel_values"]
    return f"{pixels.dtype} {list(pixels.shape)} {items['grid_thws'].tolist()}"
engine, inputs = types.ModuleType("vllm.inputs.engine"), types.ModuleType("vllm.multimodal.inputs")
engine.mm_input = short
inputs.PlaceholderRange = lambda **place: place
inputs.MultiModalKwargsItems = SimpleNamespace(from_hf_inputs=lambda features, fields: dict(features))
inputs.MultiModalFieldConfig = SimpleNamespace(flat_from_sizes=lambda *a, **k: a, batched=lambda *a, **k: a)
for name in ("vllm", "vllm.inputs", "vllm.multimodal"):
    sys.modules[name] = types.ModuleType(name)
sys.modules |= {"vllm.inputs.engine": engine, "vllm.multimodal.inputs": inputs}
"""


def python(code: str, folder: Path) -> str:
    """What a snippet prints when it is run as a file."""
    (folder / "snippet.py").write_text(code)
    return subprocess.run([sys.executable, "snippet.py"], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_every_python_block_is_run_by_the_test_above() -> None:
    run = [snippet(name) for name in ("Read without this package", "Train", "Serve with SGLang", "Serve with vLLM")]
    assert sorted([*run, snippet("FeatureStore")]) == sorted(re.findall("```python\n(.*?)```", README, re.DOTALL))


def test_what_stands_before_the_folds_is_short() -> None:
    assert README.partition("<details>")[0].count("\n") <= 200


def test_options_and_scripts_that_are_named_are_there(run: Run) -> None:
    commands = ("encode", "manifest", "inspect", "verify", "finish", "validate-config")
    known = set(re.findall(r"--[a-z][a-z-]+", "".join(run(name, "--help").stdout for name in commands)))
    lines = re.findall(r"^ +(?:\$ )?kimik3-prep .*", README, re.MULTILINE)
    assert len(lines) > 10
    named = {option for line in lines for option in re.findall(r"--[a-z][a-z-]+", line.partition("#")[0])}
    assert named - known == set()
    for path in re.findall(r"`(scripts/[\w/.]+)", README):
        assert (ROOT / path).exists(), path


def test_the_table_of_item_errors_names_every_code() -> None:
    table = README.split("In an index, as `error_code`:")[1].split("\n\n")[1]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(get_args(ItemErrorCode))


# --- the documents of --format json ---------------------------------------------------------------------------------


def describe_json() -> dict[str, Any]:
    """Return what scripts/describe_json.py defines."""
    return runpy.run_path(str(ROOT / "scripts" / "describe_json.py"))


def test_the_section_about_json_is_made_from_the_classes() -> None:
    assert describe_json()["written"]() == README, "run `python scripts/describe_json.py --write`"


def test_every_key_is_described() -> None:
    script = describe_json()
    documents = list(script["DOCUMENTS"].values())
    for kind in [*documents, *(part for document in documents for part in script["inside"](document))]:
        described = script["descriptions"](kind)
        assert described.keys() >= get_type_hints(kind).keys(), kind
        assert all(text.endswith(".") and "\n" not in text for text in described.values()), kind


def differences(value: Any, hint: Any, at: str = "") -> list[str]:
    """Say where a JSON value is not of a type: a key too many or too few, another kind of value."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return []
    if origin in (Union, types.UnionType):
        several = [differences(value, part, at) for part in arguments]
        return [] if [] in several else several[0]
    if origin is Literal:
        return [] if value in arguments else [f"{at} is {value!r}"]
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        if not isinstance(value, dict):
            return [f"{at} is {value!r}, not {hint}"]
        if value.keys() != hints.keys():
            return [f"{at} has the keys {list(value)}, not {list(hints)}"]
        return [text for key, part in hints.items() for text in differences(value[key], part, f"{at}.{key}")]
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            return [f"{at} is {value!r}, not {hint}"]
        return [text for key, part in value.items() for text in differences(part, arguments[1], f"{at}.{key}")]
    if origin is tuple or hasattr(hint, "_fields"):
        if not isinstance(value, list):
            return [f"{at} is {value!r}, not {hint}"]
        parts = arguments or tuple(get_type_hints(hint).values())
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(value) != len(parts):
            return [f"{at} is {value!r}, not {hint}"]
        pairs = zip(value, parts, strict=True)
        return [text for part, form in pairs for text in differences(part, form, f"{at}[]")]
    right = type(value) is hint or (hint is float and type(value) is int)
    return [] if right else [f"{at} is {value!r}, not {hint}"]


@dataclass
class Example:
    number: int
    names: tuple[str, ...]
    one: Literal["a"] | None


def test_a_value_that_is_not_as_said_is_found() -> None:
    assert differences({"number": 1, "names": ["a"], "one": None}, Example) == []
    assert differences({"number": True, "names": ["a", 1], "one": "b"}, Example) == [
        ".number is True, not <class 'int'>",
        ".names[] is 1, not <class 'str'>",
        ".one is 'b'",
    ]
    assert differences({"number": 1}, Example) == [" has the keys ['number'], not ['number', 'names', 'one']"]


def test_json_documents_are_as_the_readme_says(run: Run, tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "draw_sample.py", tmp_path / "sample"], check=True)
    config_of_published = (ROOT / "configs" / "kimi-k3" / "preprocessor_config.json").read_text()
    (tmp_path / "broken.json").write_text(config_of_published.replace('"in_patch_limit"', '"max_patches"'))
    shard, config = "out/shards/cpu-00000.safetensors", ["--config", "kimi-k3"]
    rows = "sample/manifest.jsonl"
    error = "any command that fails"
    commands: list[tuple[str, list[str]]] = [
        ("validate-config", ["validate-config", "kimi-k3"]),
        ("validate-config", ["validate-config", "broken.json", "--write-fixed", "fixed.json"]),
        ("validate-config A B", ["validate-config", "kimi-k3", "broken.json", "--strict"]),
        ("manifest", ["manifest", "sample", "-o", "m.jsonl"]),
        ("manifest", ["manifest", rows, "-o", "nowhere.jsonl", "--image-dir", "/nowhere"]),
        ("encode --dry-run", ["encode", rows, *config, "--dry-run"]),
        ("encode --shard-range", ["encode", rows, *config, "-o", "out", "--shard-range", "1/1"]),
        ("inspect OUT", ["inspect", "out"]),
        ("encode, finish", ["finish", "out"]),
        ("encode, finish", ["encode", rows, *config, "-o", "out"]),
        ("inspect SHARD", ["inspect", shard]),
        ("inspect SHARD", ["inspect", shard, "--render", "png", "--first", "1"]),
        ("inspect INDEX", ["inspect", "out/index.parquet"]),
        ("inspect OUT", ["inspect", "out", "--render", "png", "--first", "1"]),
        ("verify", ["verify", "out"]),
        ("verify", ["verify", "out", "--against-source", "--manifest", rows, "--sample", "1"]),
        (error, ["encode", "broken.json", *config]),
        (error, ["inspect", "nothing"]),
        (error, ["encode"]),
    ]
    documents = describe_json()["DOCUMENTS"]
    for name, command in commands:
        document = json.loads(run(*command, "--format", "json").stdout)
        assert differences(document, documents[name], name) == [], command
    assert {name for name, _ in commands} == set(documents)
