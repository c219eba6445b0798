"""The house rules of .github/CONTRIBUTING.md, read off the source: who may import whom, and what no module does."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import picture, write_manifest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kimik3_prep"
CONTRIBUTING = ROOT / ".github" / "CONTRIBUTING.md"

#: The house from the bottom up. A room imports from rooms before it, and a file from files before it in its room.
#: A new file gets a place here; CONTRIBUTING.md shows the same house.
HOUSE: dict[str, tuple[str, ...]] = {
    "": ("__init__", "errors", "strict_json", "disk", "remote"),
    "checkpoint": ("levels", "grid", "rules", "config", "mend"),
    "images": ("address", "cell", "packed", "source", "formats", "decode"),
    "manifest": ("items", "report", "magic", "row", "text", "tar", "columns", "folder", "read", "missing", "write"),
    "pixels": ("lent", "resample", "tensors", "cpu", "device", "ready"),
    "output": ("recipe", "tables", "shard_file", "folder", "mirror", "totals"),
    "run": (
        *("machine", "spool", "item", "worker", "workers", "shard", "ray"),
        *("since", "check", "planning", "fill", "prepare"),
    ),
    "reading": ("stored", "fetched", "engines", "features", "training", "verify", "pictures", "inspection", "report"),
    "screen": ("terminal", "progress", "answers", "process"),
}
DOORS = ("cli", "__main__")
ORDER = [
    *(
        f"{room}.{name}".lstrip(".")
        for room, names in HOUSE.items()
        for name in (("__init__", *names) if room else names)
    ),
    *DOORS,
]

#: Libraries that only some modules may import, and those modules.
LIBRARIES = {
    "typer": {"screen.process", "cli"},
    "rich": {"screen.terminal", "screen.progress"},
    "ray": {"run.ray"},
    "safetensors": {"output.shard_file", "pixels.ready"},
    "fsspec": {"remote"},
}
#: Modules that import torch as they are imported. Nothing on the way to --help, inspect or a dry run imports these.
OF_TORCH = {
    *("pixels.resample", "pixels.tensors", "pixels.device"),
    *("reading.engines", "reading.features", "reading.training"),
}

#: What the package itself offers: type checkers see the import, and it runs when somebody asks for the name.
FRONT_DOOR = {"reading.features", "reading.training"}

#: Where foreign exceptions of any kind are caught, to be translated.
SEAMS = {
    ("images.source", "foreign_errors"),
    ("images.decode", "_orientation"),
    ("remote", "asked"),
    ("run.worker", "_answer"),
    ("reading.verify", "_load_processor"),
    ("screen.process", "run_command"),
}


def name_of(path: Path) -> str:
    """A file as dotted name below the package: `run.item`, `run.__init__`, `disk`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, also those inside functions; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from (f"{base}.{alias.name}" for alias in node.names)


def ours(tree: ast.AST) -> set[str]:
    """Modules of the package that a module imports; a room's own file for names of a room."""
    found = set()
    for name in imports(tree):
        parts = name.split(".")
        if parts[0] != "kimik3_prep":
            continue
        steps = [".".join(parts[1:end]) for end in (3, 2)]
        module = next((step for step in steps if step in MODULES), None)
        room = f"{parts[1]}.__init__" if len(parts) > 1 and f"{parts[1]}.__init__" in MODULES else "__init__"
        found.add(module or room)
    return found


def libraries(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imports(tree)}


def upward(module: str, tree: ast.AST) -> list[str]:
    """Imports of a module that stand after it in the house."""
    found = ours(tree) - (FRONT_DOOR if module == "__init__" else set())
    return sorted(other for other in found if ORDER.index(other) >= ORDER.index(module))


# --- the house ----------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_and_every_place_its_module() -> None:
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    """Each import goes to a module that stands before, so there is no way round in a circle."""
    assert upward(module, MODULES[module]) == []


def test_nobody_imports_relatively() -> None:
    """The name of a room in each import shows which way it points."""
    relative = [
        (module, node.lineno)
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import kimik3_prep.run.prepare", ["run.prepare"]),
        ("from kimik3_prep.run.prepare import prepare", ["run.prepare"]),
        ("from kimik3_prep.run import prepare as run, check", ["run.check", "run.prepare"]),
        ("def f():\n    from kimik3_prep.cli import app", ["cli"]),
        ("if TYPE_CHECKING:\n    from kimik3_prep.output.totals import RunSummary", ["output.totals"]),
        ("from kimik3_prep.output.recipe import Recipe", []),
        ("from kimik3_prep import __version__\nfrom kimik3_prep.errors import Problem\nimport json", []),
    ],
)
def test_an_import_that_points_up_is_found(source: str, found: list[str]) -> None:
    assert upward("output.tables", ast.parse(source)) == found


@pytest.mark.parametrize("room", [room for room in HOUSE if room])
def test_a_room_says_what_it_is_and_exports_nothing(room: str) -> None:
    tree = MODULES[f"{room}.__init__"]
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_contributing_shows_the_same_house() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    shown = re.search(r"    kimik3_prep/\n((?:    .*\n|\n)+)", text)
    assert shown
    names: list[str] = []
    room = ""
    for line in shown[1].splitlines():
        if match := re.match(r"     {3}(\w+)/", line):
            room = match[1]
        elif re.match(r"     {3}\S", line):
            room = ""
        if match := re.match(r"     {3}(?:\w+/)? *(\w+) {2,}\S", line):
            names.append(f"{room}.{match[1]}".lstrip("."))
    places = [name for name in ORDER if not name.endswith("__init__")]
    assert sorted(names) == sorted(places)


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_that_have_their_place(library: str) -> None:
    users = {module for module, tree in MODULES.items() if library in libraries(tree)}
    assert users <= LIBRARIES[library]


# --- torch --------------------------------------------------------------------------------------------------------


def test_torch_is_imported_where_tensors_are_touched() -> None:
    """At module level only there; `safetensors.torch` imports it as well."""
    users = set()
    for module, tree in MODULES.items():
        functions = {id(node) for found in functions_of(tree) for node in ast.walk(found)}
        top = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [name for node in top if id(node) not in functions for name in imports(ast.Module([node], []))]
        if any("torch" in name.split(".") for name in names):
            users.add(module)
    assert users == OF_TORCH


#: Runs the command in an interpreter of its own, then tells by the exit code whether torch was imported.
SNIPPET = """
import sys
sys.argv[0] = "kimik3-prep"
from kimik3_prep.cli import app
try:
    app()
except SystemExit as end:
    if end.code:
        sys.exit(f"the command ended with {end.code}")
sys.exit(42 if "torch" in sys.modules else 0)
"""


def command(*arguments: object, python: tuple[str, ...] = ("-c", SNIPPET)) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1"}
    line = [sys.executable, *python, *map(str, arguments)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A manifest and the output of its run. A run on a device needs torch, and the snippet must notice it."""
    folder = tmp_path_factory.mktemp("run")
    picture(50, 40).save(folder / "a.png")
    manifest = write_manifest(folder / "m.jsonl", [{"id": "a", "image": "a.png"}])
    encode = ("encode", manifest, "--config", "kimi-k3")
    done = command(*encode, "--backend", "gpu", "--device", "cpu", "-o", folder / "device")
    assert done.returncode == 42, done.stderr
    done = command(*encode, "--backend", "cpu", "-o", folder / "out")
    assert done.returncode == 0, done.stderr or "torch was imported"
    return manifest, folder / "out"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["encode", "--help"],
        ["--version"],
        ["validate-config", "kimi-k3"],
        ["inspect", "OUT"],
        ["inspect", "OUT/index.parquet"],
        ["verify", "OUT"],
        ["verify", "OUT", "--against-source", "--manifest", "MANIFEST"],
        ["manifest", "MANIFEST", "--size"],
        ["inspect", "OUT/shards/cpu-00000.safetensors", "--render", "OUT-pictures"],
        ["finish", "OUT"],
        ["inspect", "OUT", "--render", "OUT-pictures"],
        ["inspect", "OUT/shards/cpu-00000.safetensors", "--format", "json"],
        ["encode", "MANIFEST", "--config", "kimi-k3", "--backend", "cpu", "--dry-run"],
    ],
)
def test_commands_that_touch_no_tensor_do_not_wait_for_torch(run: tuple[Path, Path], arguments: list[str]) -> None:
    manifest, out = run
    done = command(*(word.replace("OUT", str(out)).replace("MANIFEST", str(manifest)) for word in arguments))
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr or "torch was imported"
    assert done.stdout


def test_nothing_rests_on_what_python_dash_o_removes(run: tuple[Path, Path]) -> None:
    arguments = ("encode", run[0], "--config", "kimi-k3", "--backend", "cpu", "--dry-run", "--no-progress")
    plain, optimised = (command(*arguments, python=(*flags, "-m", "kimik3_prep.cli")) for flags in ((), ("-OO",)))
    assert (plain.returncode, plain.stderr) == (optimised.returncode, optimised.stderr) == (0, "")
    assert plain.stdout == optimised.stdout != ""


# --- what no module does ------------------------------------------------------------------------------------------

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def body_lines(function: Function) -> int:
    """Lines of a function from its first statement on. A signature is a list: a command has a line for each option."""
    return (function.end_lineno or 0) - function.body[0].lineno + 1


@pytest.mark.parametrize("module", MODULES)
def test_checks_never_rest_on_assert(module: str) -> None:
    assert [node.lineno for node in ast.walk(MODULES[module]) if isinstance(node, ast.Assert)] == []


def broad_handlers(module: str, tree: ast.AST) -> list[int]:
    """Lines that catch any exception: outside the seams, and not only to clean up and raise it again."""
    seams = {id(node) for f in functions_of(tree) if (module, f.name) in SEAMS for node in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = {"BaseException"} if node.type is None else _names(node.type)
            last = node.body[-1]
            raises_again = isinstance(last, ast.Raise) and last.exc is None
            allowed = id(node) in seams or ("Exception" not in caught and raises_again)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            caught, allowed = set().union(*map(_names, node.args)), False
        else:
            continue
        if caught & {"Exception", "BaseException"} and not allowed:
            found.append(node.lineno)
    return found


def _names(node: ast.AST) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_catches_everything_but_the_seams(module: str) -> None:
    assert broad_handlers(module, MODULES[module]) == []


def test_the_seams_are_there() -> None:
    assert {(module, f.name) for module, tree in MODULES.items() for f in functions_of(tree)} >= SEAMS


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("try: f()\nexcept: pass", [2]),
        ("try: f()\nexcept Exception as e: raise X from e", [2]),
        ("try: f()\nexcept (OSError, Exception): pass", [2]),
        ("try: f()\nexcept BaseException: pass", [2]),
        ("with contextlib.suppress(Exception): f()", [1]),
        ("try: f()\nexcept BaseException:\n    g()\n    raise", []),
        ("try: f()\nexcept (OSError, ValueError): pass", []),
        ("def foreign_errors():\n    try: f()\n    except Exception: pass", []),
    ],
)
def test_a_handler_that_is_too_broad_is_found(body: str, found: list[int]) -> None:
    assert broad_handlers("images.source", ast.parse(body)) == found


def undocumented(module: str, tree: ast.Module) -> list[str]:
    """Public functions, classes and methods without a docstring. Nested functions and private classes are inside."""
    found = [] if ast.get_docstring(tree) else [module]
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        methods = [part for part in node.body if isinstance(part, Function)] if isinstance(node, ast.ClassDef) else []
        public = [node, *(method for method in methods if not method.name.startswith("_"))]
        found += [f"{module}.{part.name}" for part in public if not ast.get_docstring(part)]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_says_what_it_is(module: str) -> None:
    assert undocumented(module, MODULES[module]) == []


def test_what_says_nothing_is_found() -> None:
    source = (
        '"""M."""\nclass A:\n    """A."""\n    def b(self): ...\n    def _c(self): ...\ndef d(): ...\ndef _e(): ...'
    )
    assert undocumented("m", ast.parse(source)) == ["m.b", "m.d"]


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc", "base", "core"])
def test_no_module_is_a_drawer(name: str) -> None:
    assert name not in {module.rpartition(".")[2] for module in MODULES}
