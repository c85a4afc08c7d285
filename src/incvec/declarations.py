"""Methods and add-ons as their source declares them, without importing torch, which takes seconds.

`incvec list`, `incvec show` and the validation of settings need a class's name, summary, paper, flags and `Options`.
These are plain Python, but the module that contains them imports torch. So the source is read, as setuptools reads a
version: of a module, only the statements that define a requested name are run, and what they import in turn. A package
that was not imported before, such as torch, is replaced by a placeholder.

    declared_class(METHODS, "podnet").Options      # a pydantic class that validates like the real one

A class whose module is imported already, and one that cannot be read in this way, is the real one. A test holds that
both have the same attributes and options. A declared class is never instantiated or trained: that is what
`registry.find_class` is for.
"""

from __future__ import annotations

import ast
import builtins
import sys
from functools import cache
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from incvec.errors import IncvecError
from incvec.registry import Registry, find_class


class Placeholder:
    """Stands for anything of a package that was not imported: as a base class it is left out."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: Any) -> tuple[()]:
        return ()


class Reader(ast.NodeTransformer):
    """Collects the names that a statement needs when it is run, and removes the annotations of functions."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def visit_Name(self, node: ast.Name) -> ast.Name:
        self.names.append(node.id)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Decorators and default values only: names in the body are looked up when the function is called."""
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        for part in (*node.decorator_list, node.args):
            self.visit(part)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node


class Names(dict[str, Any]):
    """The namespace of a module, in which a name is defined when it is first used."""

    def __init__(self, module: str) -> None:
        root, *parts = module.split(".")
        path = Path(sys.modules[root].__path__[0]).joinpath(*parts)  # without importing the packages between
        self.file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.package = module if path.is_dir() else module.rpartition(".")[0]
        self.statements: dict[str, ast.stmt] = {}
        for node in ast.parse(self.file.read_text("utf-8")).body:
            self.statements |= dict.fromkeys(defined_names(node), node)
        super().__init__(__name__=__name__, __builtins__=builtins)  # the module of its classes has to exist

    def __missing__(self, name: str) -> Any:
        node = self.statements.get(name)
        if node is None:
            raise KeyError(name)  # Python then looks among the builtins
        if isinstance(node, ast.Import | ast.ImportFrom):
            self[name] = self.imported(node, name)
        else:
            reader = Reader()
            code = reader.visit(ast.Module([node], []))
            for needed in reader.names:  # a class body does not find names that are missing
                if needed in self.statements and self.statements[needed] is not node:
                    self[needed]
            exec(compile(code, self.file, "exec", dont_inherit=True), self)
        return dict.__getitem__(self, name)

    def imported(self, node: ast.Import | ast.ImportFrom, name: str) -> Any:
        alias = next(alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) == name)
        if isinstance(node, ast.Import):
            module = alias.name if alias.asname else name
            return import_module(module) if is_cheap(module) else Placeholder()
        module = resolve_name("." * node.level + (node.module or ""), self.package)
        own = module.partition(".")[0] == self.package.partition(".")[0]
        if not own:
            return getattr(import_module(module), alias.name) if is_cheap(module) else Placeholder()
        if module in sys.modules and alias.name in vars(sys.modules[module]):
            return vars(sys.modules[module])[alias.name]
        names = names_of(module)
        return names[alias.name] if alias.name in names.statements else Placeholder()  # a module of that package


def defined_names(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    match node:
        case ast.Import():
            return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        case ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.ClassDef() | ast.FunctionDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def is_cheap(module: str) -> bool:
    """Whether importing a module costs nothing: it is imported, or belongs to the standard library."""
    return module in sys.modules or module.partition(".")[0] in sys.stdlib_module_names


@cache
def names_of(module: str) -> Names:
    return Names(module)


def declared(module: str, name: str) -> Any:
    """What a module calls `name`: from the module itself if it or torch is imported, else from its source."""
    if module not in sys.modules and "torch" not in sys.modules:
        try:
            return names_of(module)[name]
        except IncvecError:
            raise
        except Exception:  # the module needs more than placeholders
            names_of.cache_clear()
    return getattr(import_module(module), name)


def declared_class(registry: Registry[str], name: str) -> Any:
    """The class of a method or add-on with its class attributes, for reading them only."""
    module, _, attribute = registry.get(name, "").partition(":")
    if name in registry.builtins and module not in sys.modules and "torch" not in sys.modules:
        return declared(module, attribute)
    return find_class(registry, name)


def networks() -> dict[str, str]:
    """The backbones and the dual encoders, each with its summary."""
    backbones = {name: plan.summary for name, plan in declared("incvec.nets.backbones", "BACKBONES").items()}
    return {**backbones, **declared("incvec.nets.dual", "DUALS")}
