"""The layers of the package: a layer may import those before it in the list, never those after it.

Imports are read from the syntax tree, including those inside functions and under TYPE_CHECKING.
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

# From the lowest to the highest. Names of files and folders in the package; "" is the package itself, which exports the
# plug-in, and, imported when they are used, the functions in `LAZY`.
LAZY = ("incvec.api", "incvec.classifier", "incvec.records")
LAYERS: tuple[tuple[str, ...], ...] = (
    ("ivt", "class_statistics", "lazy"),
    ("",),
    ("errors", "contracts", "registry", "fused", "file_names"),
    ("declarations", "text_files"),
    ("config",),
    ("atomic_files",),
    ("metrics", "calibration"),
    ("records",),
    ("data",),
    ("nets",),
    ("methods",),
    ("addons",),
    ("presets",),
    ("engine",),
    ("cluster",),
    ("classifier",),
    ("study",),
    ("cli", "__main__"),
    ("api",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules_of(folder: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name; "" is the package itself."""
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


def imports_of(name: str, file: Path, modules: Mapping[str, Path], package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that the file imports."""
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
    """One line for every import of a higher layer."""
    modules = modules_of(folder)
    found = []
    for name, file in modules.items():
        layer = name.partition(".")[0]
        for line, target in imports_of(name, file, modules, package):
            root, _, inner = target.partition(".")
            if root != package or (not name and target in LAZY):
                continue
            used = inner.partition(".")[0]
            if LEVEL.get(used, len(LAYERS)) > LEVEL[layer]:
                found.append(f"{file.relative_to(folder)}:{line} ({layer or package}) imports {target}")
    return found


def test_every_file_has_a_layer() -> None:
    unknown = {name.partition(".")[0] for name in modules_of(PACKAGE)} - set(LEVEL)
    assert not unknown, f"{sorted(unknown)} have no layer: add them to LAYERS"


def test_every_layer_exists() -> None:
    assert set(LEVEL) <= {name.partition(".")[0] for name in modules_of(PACKAGE)}


def test_no_layer_imports_a_higher_one() -> None:
    assert violations(PACKAGE, "incvec") == []


def test_plugin_imports_torch_only() -> None:
    """Nothing else of this package, and only torch and the standard library; adapters also import their hosts."""
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
    assert "ivt.adapters" in modules  # the exception above applies to something


@pytest.mark.parametrize(("registry", "layer"), [(METHODS, "methods"), (ADDONS, "addons")], ids=["methods", "add-ons"])
def test_registered_components_are_in_their_layer(registry: Mapping[str, str], layer: str) -> None:
    """Components are imported by name, which the syntax tree does not show."""
    modules = modules_of(PACKAGE)
    for name, address in registry.items():
        module = address.partition(":")[0].removeprefix("incvec.")
        assert module.partition(".")[0] == layer, f"{name}: {address}"
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
def test_violations_are_detected(path: str, text: str, bad: bool, tmp_path: Path) -> None:
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
