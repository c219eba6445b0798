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

#: From the bottom up. A module imports from floors below its own, and on its own floor from what stands before it.
#: A new module gets a place here and in the table of CONTRIBUTING.md.
FLOORS = (
    ("__init__", "errors", "strict_json"),
    ("threads", "memory", "grid", "levels", "disk", "offsets", "remote", "config_rules", "config"),
    ("fields", "members", "tars", "tables", "manifest", "records"),
    ("spans", "plan"),
    ("sources", "images", "shards", "store", "folder", "mirror", "summary"),
    ("resample", "pixels_cpu", "pixels_device", "local", "compute", "devices", "reading", "features", "training"),
    ("jobs", "work"),
    ("engines",),
    ("check", "planning", "prepare", "ranges", "verify", "recompute", "inspection", "pictures", "sheets", "gathering"),
    ("terminal", "progress", "findings", "process", "cli"),
)
ORDER = [module for floor in FLOORS for module in floor]

#: Libraries that only some modules may import, and those modules.
LIBRARIES = {
    "typer": {"process", "cli"},
    "rich": {"terminal", "progress"},
    "ray": {"engines"},
    "safetensors": {"shards", "local"},
    "fsspec": {"remote"},
}
#: Modules that import torch as they are imported. Nothing on the way to --help, inspect or a dry run imports these.
OF_TORCH = {
    "resample",
    "pixels_cpu",
    "pixels_device",
    "local",
    "compute",
    "jobs",
    "work",
    "recompute",
    "features",
    "training",
}

#: What the package itself offers: type checkers see the import, and it runs when somebody asks for the name.
FRONT_DOOR = {"features"}

#: Where foreign exceptions of any kind are caught, to be translated.
SEAMS = {
    ("sources", "foreign_errors"),
    ("remote", "asked"),
    ("threads", "_work"),
    ("recompute", "_load_processor"),
    ("process", "exit_codes"),
}

MODULES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, also those inside functions; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # one flat package: a relative import is one from the package
                base = f"kimik3_prep.{base}".rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def ours(tree: ast.AST) -> set[str]:
    """Modules of the package that a module imports; `__init__` for the package's own names."""
    found = [name.split(".") for name in imports(tree) if name.split(".")[0] == "kimik3_prep"]
    return {name[1] if len(name) > 1 and (PACKAGE / f"{name[1]}.py").is_file() else "__init__" for name in found}


def libraries(tree: ast.AST) -> set[str]:
    return {name.split(".")[0] for name in imports(tree)}


def upward(module: str, tree: ast.AST) -> list[str]:
    """Imports of a module that stand after it in the house."""
    found = ours(tree) - (FRONT_DOOR if module == "__init__" else set())
    return sorted(other for other in found if ORDER.index(other) >= ORDER.index(module))


# --- the house ----------------------------------------------------------------------------------------------------


def test_every_module_has_its_place_and_every_place_its_module() -> None:
    assert sorted(ORDER) == sorted(MODULES)
    assert all(path.parent == PACKAGE for path in PACKAGE.rglob("*.py")), "one flat package"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    """Each import goes to a module that stands before, so there is no way round in a circle."""
    assert upward(module, MODULES[module]) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import kimik3_prep.prepare", ["prepare"]),
        ("from kimik3_prep.prepare import prepare", ["prepare"]),
        ("from kimik3_prep import prepare as run, errors", ["prepare"]),
        ("from . import prepare", ["prepare"]),
        ("from .prepare import Settings", ["prepare"]),
        ("def f():\n    from kimik3_prep.cli import app", ["cli"]),
        ("if TYPE_CHECKING:\n    from kimik3_prep.plan import Spans", ["plan"]),
        ("from kimik3_prep.images import probe", ["images"]),
        ("from kimik3_prep.summary import summarize", ["summary"]),
        ("from kimik3_prep import __version__, grid\nfrom kimik3_prep.errors import Problem\nimport json", []),
    ],
)
def test_an_import_that_points_up_is_found(source: str, found: list[str]) -> None:
    assert upward("plan", ast.parse(source)) == found


def test_on_one_floor_the_order_counts() -> None:
    assert upward("shards", ast.parse("from kimik3_prep.store import Layout")) == ["store"]
    assert upward("store", ast.parse("from kimik3_prep.shards import Shard")) == []


def table(heading: str) -> list[list[str]]:
    """The rows of the CONTRIBUTING table with this heading, cell by cell."""
    lines = CONTRIBUTING.read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def modules_in(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`(\w+)\.py`", cell))


def test_contributing_shows_the_same_house() -> None:
    rows = table("floor")
    assert [int(row[0]) for row in rows] == list(range(len(FLOORS) - 1, -1, -1))
    assert [modules_in(row[1]) for row in reversed(rows)] == list(FLOORS)


def test_contributing_names_the_same_places_of_libraries() -> None:
    rows = {row[0]: set(modules_in(row[1])) for row in table("library")}
    assert rows.keys() == {*LIBRARIES, "torch"}
    assert {name: rows[name] for name in LIBRARIES} == LIBRARIES


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
    """A manifest and the output of its run, made by a command that needs torch: the snippet must notice."""
    folder = tmp_path_factory.mktemp("run")
    picture(50, 40).save(folder / "a.png")
    manifest = write_manifest(folder / "m.jsonl", [{"id": "a", "image": "a.png"}])
    done = command("encode", manifest, "--config", "kimi-k3", "--backend", "cpu", "-o", folder / "out")
    assert done.returncode == 42, done.stderr
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
def test_modules_are_short_and_so_are_functions(module: str) -> None:
    lines = len((PACKAGE / f"{module}.py").read_text(encoding="utf-8").splitlines())
    assert lines <= 350
    assert {f.name: body_lines(f) for f in functions_of(MODULES[module]) if body_lines(f) > 50} == {}


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
    assert broad_handlers("sources", ast.parse(body)) == found


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
    assert name not in MODULES
