"""README.md says what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

from conftest import Run
from PIL import Image

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
    for more in (["features", "--id", "landscape"], ["features/shards/cpu-00000.safetensors"]):
        assert run("inspect", *more, "--render", "pictures").stdout.splitlines()[-1] in shown
    lines = [line.strip() for line in run("inspect", "features").stdout.splitlines()]
    begin = lines.index("largest images")
    assert set(lines[begin : begin + 5]) <= shown
    assert run("manifest", "sample", "-o", "pictures.jsonl").stderr.strip() in shown
    run("inspect", "features/shards/cpu-00000.safetensors", "--render", "sheets")
    with Image.open(tmp_path / "sheets" / "cpu-00000-01.png") as drawn, Image.open(SHEET) as printed:
        assert drawn.tobytes() == printed.tobytes()
    example = README.split("```python\n")[1].split("```")[0]
    code = f"{example}\nprint(list(pixel_values.shape), grid_thw)"
    printed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert printed.stdout == "[3700, 3, 14, 14] [1, 50, 74]\n"
    section = README.split("## Using the features")[1].split("\n## ")[0]
    look, train, serve = (block.split("```")[0] for block in section.split("```python\n")[1:])
    assert python(look, tmp_path) == (
        "torch.Size([3700, 3, 14, 14]) (1, 50, 74) 925 (1024, 683)\n"
        "Rows of hills in the evening sun\nline 13, cut-off: truncated\n"
    )
    epochs = [line.split("(")[0].split()[0] for line in python(train, tmp_path).splitlines()]
    assert epochs == sorted(epochs)
    assert set(epochs) == {"0", "1"}
    told = python(f"{serve}\nprint(prompt.count('pad'), *image_data[0], *for_vllm, *hashes)", tmp_path)
    assert re.fullmatch(
        r"1339 format modality pixel_values image_grid_thw pixel_values grid_thws( sha256:[0-9a-f]{64}){2}\n", told
    )


def python(code: str, folder: Path) -> str:
    """What a snippet prints when it is run as a file."""
    (folder / "snippet.py").write_text(code)
    return subprocess.run([sys.executable, "snippet.py"], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_the_table_of_item_errors_names_every_code() -> None:
    table = README.split("In an index, as `error_code`:")[1].split("\n\n")[1]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(get_args(ItemErrorCode))


# --- the documents of --format json ---------------------------------------------------------------------------------

_WORD = re.compile(r"\s*(\.\.\.|[\w*\"]+|[{}\[\]:,|?])")
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "int": (int,),
    "number": (int, float),
    "bool": (bool,),
    "null": (type(None),),
    "any": (object,),
}


def shapes() -> dict[str, Any]:
    """The documents of the README's section, by name: an object is a dict, a list `[T]`, a choice a tuple."""
    block = README.split("## JSON output")[1].split("```")[1]
    found: dict[str, Any] = {}
    for entry in re.split(r"\n+(?=\S)", block.strip()):
        name, _, text = entry.partition(":")
        words = _WORD.findall(text)
        found[name] = one_of(words)
        assert words == [], name
    return found


def one_of(words: list[str]) -> Any:
    """A type, or several with bars between them."""
    choices = [shape(words)]
    while words[:1] == ["|"]:
        words.pop(0)
        choices.append(shape(words))
    return choices[0] if len(choices) == 1 else tuple(choices)


def shape(words: list[str]) -> Any:
    word = words.pop(0)
    if word == "[":
        inside = one_of(words)
        assert words.pop(0) == "]"
        return [inside]
    if word != "{":
        return word
    keys: dict[str, Any] = {}
    while words[0] != "}":
        key = words.pop(0)
        if key == "...":
            keys["..."] = words.pop(0)
        else:
            key += words.pop(0) if words[0] == "?" else ""
            assert words.pop(0) == ":"
            keys[key] = one_of(words)
        if words[0] == ",":
            words.pop(0)
    words.pop(0)
    return keys


def differences(value: Any, form: Any, named: dict[str, Any], at: str = "") -> list[str]:
    """What of a document is not as the README says: a key too many or too few, another type."""
    if isinstance(form, tuple):
        found = [differences(value, choice, named, at) for choice in form]
        return [] if [] in found else found[0]
    if isinstance(form, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [text for part in value for text in differences(part, form[0], named, f"{at}[]")]
    if isinstance(form, str) and form in named:
        return differences(value, named[form], named, at)
    if isinstance(form, str) and form.startswith('"'):
        return [] if value == form.strip('"') else [f"{at} is {value!r}"]
    if isinstance(form, str):
        wrong = not isinstance(value, _KINDS[form]) or (type(value) is bool and form in ("int", "number"))
        return [f"{at} is {value!r}, not {form}"] if wrong else []
    if not isinstance(value, dict):
        return [f"{at} is no object"]
    if "*" in form:
        return [text for key in value for text in differences(value[key], form["*"], named, f"{at}.{key}")]
    form = {**form, **(named[form["..."]] if "..." in form else {})}
    form.pop("...", None)
    keys = {key.rstrip("?"): part for key, part in form.items()}
    found = [f"{at}.{key} is not said" for key in value.keys() - keys.keys()]
    found += [f"{at}.{key} is missing" for key in form if not key.endswith("?") and key not in value]
    return found + [t for key in keys if key in value for t in differences(value[key], keys[key], named, f"{at}.{key}")]


def test_a_document_that_is_not_as_said_is_found() -> None:
    named = {"A": {"x": "int", "y?": ["string"]}, "B": {"z": ("string", "null"), "...": "A"}}
    assert differences({"x": 1, "z": None}, "B", named) == []
    assert differences({"x": True, "y": [1], "z": "s"}, "B", named) == [
        *(".x is True, not int", ".y[] is 1, not string"),
    ]
    assert differences({"x": 1, "z": 5, "w": 0}, "B", named) == [".w is not said", ".z is 5, not string"]
    assert differences({"z": ""}, "B", named) == [".x is missing"]


def test_json_documents_are_as_the_readme_says(run: Run, tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "draw_sample.py", tmp_path / "sample"], check=True)
    config_of_published = (ROOT / "configs" / "kimi-k3" / "preprocessor_config.json").read_text()
    (tmp_path / "broken.json").write_text(config_of_published.replace('"in_patch_limit"', '"max_patches"'))
    shard, config = "out/shards/cpu-00000.safetensors", ["--config", "kimi-k3"]
    rows = "sample/manifest.jsonl"
    commands: list[tuple[str, list[str]]] = [
        ("validate-config", ["validate-config", "kimi-k3"]),
        ("validate-config", ["validate-config", "broken.json", "--write-fixed", "fixed.json"]),
        ("manifest", ["manifest", "sample", "-o", "m.jsonl"]),
        ("manifest", ["manifest", rows, "-o", "nowhere.jsonl", "--image-dir", "/nowhere"]),
        ("encode --dry-run", ["encode", rows, *config, "--dry-run"]),
        ("encode", ["encode", rows, *config, "-o", "out"]),
        ("inspect SHARD", ["inspect", shard]),
        ("inspect SHARD", ["inspect", shard, "--render", "png", "--first", "1"]),
        ("inspect INDEX", ["inspect", "out/index.parquet"]),
        ("inspect OUT", ["inspect", "out"]),
        ("inspect OUT", ["inspect", "out", "--render", "png", "--first", "1"]),
        ("verify", ["verify", "out"]),
        ("verify", ["verify", "out", "--against-source", "--manifest", rows, "--sample", "1"]),
        ("an error", ["encode", "broken.json", *config]),
        ("an error", ["inspect", "nothing"]),
    ]
    named = shapes()
    seen: set[str] = set()
    optional = {f"{name}.{key}" for name, form in named.items() for key in form if key.endswith("?")}
    for name, command in commands:
        done = run(*command, "--format", "json")
        document = json.loads(done.stdout)
        assert differences(document, named[name], named) == [], command
        seen |= {name}
        optional -= {f"{name}.{key}?" for key in document}
    (tmp_path / "out" / "index.parquet").unlink()
    for name, command in commands[9:12:2]:  # a run that is not finished, and its problems
        assert differences(json.loads(run(*command, "--format", "json").stdout), named[name], named) == []
    assert (seen, optional) == ({name for name in named if not name[0].isupper()}, set())
