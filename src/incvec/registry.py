"""Names of methods, add-ons, data sets and presets: built-in ones and those of other packages.

Another package registers its components through entry points. In its pyproject.toml:

    [project.entry-points."incvec.methods"]
    tether = "my_package.tether:Tether"
    [project.entry-points."incvec.presets"]
    my_package = "my_package.presets"  # a package with one YAML file per component, or a mapping

For a single file, `incvec run --plugin my_method.py --method tether` is enough. The file registers its classes:

    @register_method
    class Tether(ImageMethod): ...

A preset has the form of the files in `incvec/presets`: a mapping, or the path of a YAML file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, TypeVar

from incvec.errors import ConfigError, IncvecError, nearest, shorten

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type)
Preset = Mapping[str, Any] | str | Path


@cache
def installed_entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


class Registry(MutableMapping[str, T]):
    """Name -> entry. Entry points of installed packages are read on first use, and imported when they are needed."""

    def __init__(self, kind: str, group: str, load: Callable[[EntryPoint], T] = EntryPoint.load) -> None:
        self.kind, self.group, self.load = kind, group, load
        self.builtins: frozenset[str] = frozenset()
        self._entries: dict[str, T | EntryPoint] = {}
        self._scanned = False

    def add_builtins(self, entries: Mapping[str, T]) -> None:
        """The package's own entries, which come first and cannot be replaced."""
        for name in self._entries.keys() & entries.keys():
            raise ConfigError(self._clash(name))
        self.builtins |= entries.keys()
        self._entries = {**entries, **self._entries}

    def add(self, name: str, entry: T | EntryPoint) -> None:
        """Register an entry under a new name."""
        if self._all().get(name, entry) != entry:
            raise ConfigError(self._clash(name))
        self._entries[name] = entry

    def _clash(self, name: str) -> str:
        owner = "built in" if name in self.builtins else "registered already"
        return f"the {self.kind} name {name!r} is {owner}: give your {self.kind} another name."

    def _all(self) -> dict[str, T | EntryPoint]:
        if not self._scanned:
            self._scanned = True
            for point in installed_entry_points(self.group):
                if point.name in self._entries:
                    self._scanned = False
                    source = f"entry point {point.value!r} of {point.dist.name if point.dist else 'a package'}"
                    raise ConfigError(f"{source}: {self._clash(point.name)}")
                self._entries[point.name] = point
        return self._entries

    def __getitem__(self, name: str) -> T:
        entry = self._all()[name]
        if isinstance(entry, EntryPoint):
            self._entries[name] = entry = self.load(entry)
        return entry

    def __setitem__(self, name: str, entry: T) -> None:
        self._all()[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def _address(point: EntryPoint) -> str:
    return point.value


METHODS: Registry[str] = Registry("method", "incvec.methods", _address)  # "module:Class"
ADDONS: Registry[str] = Registry("add-on", "incvec.addons", _address)
DATASETS: Registry[Any] = Registry("data set", "incvec.datasets")
PRESETS: Registry[Any] = Registry("preset", "incvec.presets")  # a package of YAML files, or component -> preset


def find_class(registry: Registry[str], name: str) -> Any:
    """The class of that name, imported."""
    kind = registry.kind
    if name not in registry:
        known = f"{nearest(name, registry)} {kind.capitalize()}s: {', '.join(registry)}."
        raise ConfigError(f"unknown {kind} {shorten(name)}.{known}")
    module, _, attribute = registry[name].partition(":")
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if name in registry.builtins:
            raise
        raise ConfigError(f"the {kind} {name!r} cannot be imported from {registry[name]!r}: {error}.") from error
    _check_class(found, registry)
    if found.name != name:
        raise ConfigError(f"the {kind} {name!r} is a class with the name {found.name!r}: use one name for both.")
    return found


def _check_class(cls: Any, registry: Registry[str]) -> None:
    from incvec.contracts import AddOn, Method  # torch is imported when the first class is

    base, kind = (Method if registry is METHODS else AddOn), registry.kind
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(f"{cls!r} is not a {kind}: expected a subclass of incvec.contracts.{base.__name__}.")
    for attribute in ("name", "summary", "paper", "Options"):
        if not hasattr(cls, attribute):
            raise ConfigError(f"the {kind} class {cls.__name__} has no `{attribute}`: set it as a class attribute.")


def _register(registry: Registry[str], cls: Any, preset: Preset | None) -> None:
    _check_class(cls, registry)
    registry.add(cls.name, f"{cls.__module__}:{cls.__qualname__}")
    if preset is not None:
        PRESETS.add(cls.name, {cls.name: preset})


def register_method(cls: Kind, preset: Preset | None = None) -> Kind:
    """Make a `Method` subclass available as `--method NAME`; usable as a decorator."""
    _register(METHODS, cls, preset)
    return cls


def register_addon(cls: Kind, preset: Preset | None = None) -> Kind:
    """Make an `AddOn` subclass available as `--addon NAME`; usable as a decorator."""
    _register(ADDONS, cls, preset)
    return cls


def register_dataset(name: str, entry: Any) -> None:
    """Make a data set available as `--dataset NAME`; `entry` is an `incvec.data.datasets.DatasetEntry`."""
    DATASETS.add(name, entry)


def load_plugin(path: Path) -> None:
    """Run a Python file that registers methods, add-ons or data sets; a file is run once per process."""
    path = Path(path).expanduser().resolve()
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"the plug-in {path} {problem}: give the path of a Python file.")
    name = f"incvec_plugin_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"the plug-in {path} is not a Python file: its name has to end in .py.")
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except IncvecError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"the plug-in {path} cannot be loaded: {type(error).__name__}: {error}.") from error
