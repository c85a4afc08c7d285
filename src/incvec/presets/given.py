"""Settings that a user gives, in the order of their precedence, each with where it was given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from incvec.config import assign, read_yaml
from incvec.errors import ConfigError, shorten

MAX_SEEDS = 1000


class Given:
    """Settings from a file, from flags and from `--set`; a later one overrides an earlier one.

    `method.KEY` is an option of the run's method, whatever its name.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any, str]] = []  # path, value, origin

    def set(self, path: str, value: Any, origin: str) -> None:
        """Set `key` or `section.key`; a mapping sets every key of a section, an empty one names it only."""
        if isinstance(value, Mapping) and value:
            for key, each in value.items():
                self.set(f"{path}.{key}", each, origin)
        else:
            self.entries.append((path, value, origin))

    def update(self, settings: Mapping[str, Any], origin: str) -> None:
        for path, value in settings.items():
            self.set(str(path), value, origin)

    def set_text(self, setting: str) -> None:
        """`key=value` from the command line; the value is read as YAML."""
        tree: dict[str, Any] = {}
        assign(tree, setting)
        self.update(tree, "--set")

    def read(self, file: Path) -> None:
        self.update(read_settings(file), f"file {file}")

    def resolved_entries(self) -> list[tuple[str, Any, str]]:
        method = next((value for path, value, _ in reversed(self.entries) if path == "method"), None)
        return [
            (f"{method}.{path[7:]}" if method and path.startswith("method.") else path, value, origin)
            for path, value, origin in self.entries
        ]

    def tree(self) -> dict[str, Any]:
        """The settings as `presets.resolve` takes them."""
        tree: dict[str, Any] = {}
        for path, value, _ in self.resolved_entries():
            *parents, key = path.split(".")
            branch = tree
            for part in parents:
                branch = branch.setdefault(part, {})
                if not isinstance(branch, dict):
                    raise ConfigError(f"{path} = {value!r}: {part} is a single value and has no settings of its own.")
            if isinstance(value, Mapping):
                branch.setdefault(key, {})
            else:
                branch[key] = value
        return tree

    def origins(self) -> dict[str, str]:
        return {path: origin for path, _, origin in self.resolved_entries()}


def addon_names(given: Any) -> tuple[str, ...]:
    """The names of add-ons, which may be given as one string, `ivt,eopc`."""
    names = [name.strip() for name in given.split(",") if name.strip()] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"setting addons = {shorten(given)} is not possible: expected a list of names, such as [ivt]."
        )
    return tuple(names)


def read_settings(file: Path) -> dict[str, Any]:
    """The settings of a YAML file."""
    content = read_yaml(file)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file} contains no settings: expected lines such as `method: podnet`.")
    return content


def parse_seeds(text: str) -> list[int]:
    """`0,1,2`; also `0-2`."""
    try:
        seeds: list[int] = []
        for part in text.split(",") if text.isascii() else ():
            first, dash, last = part.strip().partition("-")
            several = range(int(first), int(last if dash else first) + 1)
            seeds += several[: MAX_SEEDS + 1]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds) or len(seeds) > MAX_SEEDS:
        raise ConfigError(
            f"--seeds {shorten(text)} is not possible: expected different whole numbers, such as 0,1,2 or 0-4, at most "
            f"{MAX_SEEDS}."
        )
    return seeds
