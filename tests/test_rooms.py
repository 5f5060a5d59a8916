"""The rooms keep apart: import arrows, torch only where marked, private torch in one room."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
BELOW = {"graphs": set(), "planner": {"graphs"}, "online": {"graphs", "planner"}}
PARTS = {  # each imports those before it
    "graphs": ("torch_private", "rewriting", "as_eager", "watching", "tracing"),
    "online": ("engines", "blocks"),
    "planner": ("process", "solvers", "walks", "least", "chains", "stages", "methods"),
}
ABOVE = {"belady", "scripts", "tests"}
FILES = sorted(path for room in BELOW for path in (ROOT / room).rglob("*.py"))
PRODUCT = [*FILES, *sorted((ROOT / "scripts").rglob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, *, at_start: bool = False) -> Iterator[str]:
    """Full names of what a file imports; ``at_start``: only what importing the file itself imports."""
    todo: list[ast.AST] = [parsed(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or path.parent.name == "scripts", f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and at_start:
            todo.extend(node.orelse)
            continue
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and at_start:
            continue
        todo.extend(ast.iter_child_nodes(node))


def marked(path: Path) -> bool:
    """The first line of its docstring ends in [torch]."""
    return (ast.get_docstring(parsed(path)) or "").partition("\n")[0].endswith("[torch]")


@functools.cache
def heavy() -> frozenset[str]:
    return frozenset(name_of(path) for path in FILES if marked(path))


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 20 and any(map(marked, FILES)) and not all(map(marked, FILES))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_rooms_import_only_what_lies_below(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    packages = {name.partition(".")[0] for name in imports(path)}
    assert packages & (BELOW.keys() | ABOVE) <= BELOW[room] | {room}


@pytest.mark.parametrize(("room", "part"), [(room, part) for room, parts in PARTS.items() for part in parts])
def test_parts_of_a_room_import_only_those_before_them(room: str, part: str) -> None:
    after = PARTS[room][PARTS[room].index(part) + 1 :]
    names = {name for path in (ROOT / room / part).glob("*.py") for name in imports(path)}
    assert not {name for name in names for other in after if f"{name}.".startswith(f"{room}.{other}.")}


def test_every_room_is_installed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(packages) == {"belady"} | {name_of(path) for path in FILES if path.name == "__init__.py"}


@pytest.mark.parametrize("room", sorted({path.parent for path in FILES if path.parent.parent != ROOT}), ids=name_of)
def test_the_parts_of_a_room_say_what_is_in_them(room: Path) -> None:
    """Each but the methods, which are listed in a table, has a map of its files."""
    told = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    files = {path.stem for path in room.glob("*.py")} - {"__init__"}
    missing = {
        name for name in files if not re.search(rf"\b{name}\b", told) and f"planner.methods.{name}" not in METHODS.values()
    }
    assert not missing


def test_methods_do_not_import_each_other() -> None:
    for module in METHODS.values():
        path = ROOT / (module.replace(".", "/") + ".py")
        others = {other for other in METHODS.values() if other != module}
        found = {other for other in others for name in imports(path) if f"{name}.".startswith(f"{other}.")}
        assert not found, f"{module} imports {found}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_marked_files_import_torch(path: Path) -> None:
    names = set(imports(path, at_start=True))
    if marked(path):
        assert any(name.partition(".")[0] == "torch" for name in names | set(imports(path))), "marked, but needs no torch"
        return
    for name in imports(path):  # also in functions: what needs torch has a file of its own
        if name.partition(".")[0] == "torch":
            assert name not in names and re.search(r"if TYPE_CHECKING:\n(    .*\n)*?    (import|from) torch", path.read_text())
    assert not {h for h in heavy() for name in names if f"{name}.".startswith(f"{h}.")}


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_private_torch_is_in_one_room(path: Path) -> None:
    if path.parent == ROOT / "graphs" / "torch_private":
        return
    private = [name for name in imports(path) if re.match(r"torch\.(\w+\.)*_", name)]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and re.match(r"torch\.(\w+\.)*_(?!_)", ast.unparse(node)):
            private.append(ast.unparse(node))
    assert not private


def test_everything_unmarked_can_be_imported_without_torch() -> None:
    modules = [name_of(path) for path in FILES if not marked(path)]
    assert {"graphs", "planner", "online", "graphs.importers", "planner.methods"} <= set(modules)
    code = f"import sys, importlib\nsys.modules['torch'] = None\nfor name in {modules}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("room", ["graphs", "planner", "online", "graphs.importers"])
def test_public_names_exist_and_are_sorted(room: str) -> None:
    module = importlib.import_module(room)
    assert list(module.__all__) == sorted(module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert all(hasattr(module, name) for name in module.__all__)


def test_no_file_names_a_package_registry() -> None:
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("anaconda", "org"), ("npmjs", "org"))]
    hosts.append(".".join(("download", "pytorch", "org")))
    top = [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".git")]
    folders = (".ci", "benchmarks", "docs", "graphs", "online", "planner", "scripts", "tests")
    files = [*top, *(path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())]
    named = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in files
        if path.suffix in {".cfg", ".ini", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".txt", ".yml", ""}
        for host in hosts
        if host in path.read_text(errors="replace")
    ]
    assert len(files) > 40
    assert not named
