"""README.md says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from conftest import Run

from kimik3_prep.errors import ItemErrorCode
from kimik3_prep.fields import ID_KEYS, IMAGE_KEYS
from kimik3_prep.store import INDEX_SCHEMA

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


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
    assert run("inspect", "features", "--render", "pictures", "--id", "landscape").stdout.splitlines()[-1] in shown
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
