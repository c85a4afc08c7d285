"""The rooms' order: a room may use those above it in the list, never those below.

Imports are read from the syntax tree, those inside functions and under TYPE_CHECKING included: a hidden import is
one all the same.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib.util import resolve_name
from pathlib import Path

import pytest

import incvec
from incvec.addons import ADDONS
from incvec.methods import METHODS

PACKAGE = Path(incvec.__file__).parent

# From the top to the bottom. Names are those of files and folders in the package; "" is the package itself, which
# hands on the plug-in and nothing else.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("ivt",),
    ("",),
    ("errors", "contracts", "registry", "fused"),
    ("config",),
    ("atomic_files",),
    ("metrics",),
    ("records",),
    ("data",),
    ("nets",),
    ("methods",),
    ("addons",),
    ("presets",),
    ("engine",),
    ("study",),
    ("cli", "__main__", "lab"),
)
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}


def modules_of(folder: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name below it; "" is the package itself."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(name: str, file: Path, modules: Mapping[str, Path], package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that the file imports; of ours down to the module, not its contents."""
    own = f"{package}.{name}".rstrip(".")
    here = own if file.name == "__init__.py" else own.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), here)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner.partition(".")[2] in modules else source
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from ((node.lineno, str(a.value)) for a in node.args if isinstance(a, ast.Constant))


def violations(folder: Path, package: str) -> list[str]:
    """A line for every import that points downwards."""
    modules = modules_of(folder)
    found = []
    for name, file in modules.items():
        room = name.partition(".")[0]
        for line, target in imports_of(name, file, modules, package):
            root, _, inner = target.partition(".")
            if root != package:
                continue
            used = inner.partition(".")[0]
            if LEVEL.get(used, len(ROOMS)) > LEVEL[room]:
                found.append(f"{file.relative_to(folder)}:{line} ({room or package}) imports {target}")
    return found


def test_every_file_belongs_to_a_room() -> None:
    strangers = {name.partition(".")[0] for name in modules_of(PACKAGE)} - set(LEVEL)
    assert not strangers, f"{sorted(strangers)} are in no room: put them where they belong in ROOMS"


def test_every_room_exists() -> None:
    assert set(LEVEL) <= {name.partition(".")[0] for name in modules_of(PACKAGE)}


def test_no_room_uses_one_below() -> None:
    assert violations(PACKAGE, "incvec") == []


def test_the_plug_in_imports_torch_only() -> None:
    """Nothing of this package, and nothing outside torch and Python's own library; hosts are found by the adapters."""
    modules = modules_of(PACKAGE)
    for name, file in modules.items():
        if name.partition(".")[0] != "ivt":
            continue
        for line, target in imports_of(name, file, modules, "incvec"):
            root = target.partition(".")[0]
            place = f"{file.relative_to(PACKAGE)}:{line} imports {target}"
            if root == "incvec":
                assert target == "incvec.ivt" or target.startswith("incvec.ivt."), place
            elif not name.startswith("ivt.adapters."):
                assert root == "torch" or root in sys.stdlib_module_names, place
    assert "ivt.adapters" in modules  # so that the exception above is about something


@pytest.mark.parametrize(("registry", "room"), [(METHODS, "methods"), (ADDONS, "addons")], ids=["methods", "add-ons"])
def test_registries_name_files_of_their_own_room(registry: Mapping[str, str], room: str) -> None:
    """A registry's entries are imported by name, where the syntax tree does not show it."""
    modules = modules_of(PACKAGE)
    for name, address in registry.items():
        module = address.partition(":")[0].removeprefix("incvec.")
        assert module.partition(".")[0] == room, f"{name}: {address}"
        assert module in modules, f"{name}: there is no {module}"


@pytest.mark.parametrize(
    ("path", "text", "bad"),
    [
        ("methods/a.py", "from incvec.engine.run import Run", True),
        ("methods/a.py", "import incvec.engine.run as run", True),
        ("methods/a.py", "def f():\n    from incvec import cli", True),
        ("methods/a.py", "from .. import study", True),
        ("methods/a.py", "from ..engine import run", True),
        ("methods/a.py", "from importlib import import_module\nimport_module('incvec.engine.run')", True),
        ("methods/__init__.py", "from ..addons import x", True),
        ("methods/a.py", "from incvec.nothing import x", True),
        ("ivt/a.py", "import incvec", True),
        ("ivt/adapters/a.py", "from ...contracts import Method", True),
        ("contracts.py", "from incvec.config import Options", True),
        ("metrics.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from incvec import data", True),
        ("methods/a.py", "from incvec.data import x\nfrom incvec import __version__\nimport engine", False),
        ("methods/a.py", "from . import b\nfrom .b import c\nfrom ..ivt import IVT", False),
        ("ivt/adapters/a.py", "from ..plugin import IVT", False),
        ("cli/main.py", "from incvec.study import tables\nfrom incvec.cli import demo", False),
    ],
)  # fmt: skip
def test_the_rule_sees_what_it_should(path: str, text: str, bad: bool, tmp_path: Path) -> None:
    names = ["", "ivt", "ivt/adapters", "data", "methods", "addons", "engine", "study", "cli"]
    files = [f"{name}/__init__.py" for name in names]
    files += [
        "methods/b.py",
        "engine/run.py",
        "ivt/plugin.py",
        "cli/main.py",
        "cli/demo.py",
        "study/tables.py",
        "config.py",
    ]
    for file in files:
        (tmp_path / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.lstrip("/")).write_text("")
    (tmp_path / path).write_text(text)
    assert bool(violations(tmp_path, "incvec")) == bad
