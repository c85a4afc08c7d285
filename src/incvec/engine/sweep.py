"""Sweeps: many configurations, their common beginnings trained once, as many at a time as the device takes.

A sweep file is YAML: `name`, `summary`, and `runs`, a list of blocks. In a block every value that is a list is
varied, and the block stands for all combinations; `addons` is varied over lists of names, and so is every setting that
is a list itself (`milestones: [80, 120]` is one value, `[[80, 120], [60]]` are two). Other keys are as in a run's
configuration (`podnet: {memory: [5, 10, 20]}` varies inside a section).

A sweep may have a `check`: the first run that fits its `of` (settings, such as `method: zeroshot`) goes before all
others, and where its `metric` is further than `within` from `expected`, nothing else is run.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import torch
import yaml

from incvec.addons import ADDONS, find_addon
from incvec.config import RunConfig
from incvec.errors import ConfigError, nearest
from incvec.methods import METHODS, find_method

KEYS = ("name", "summary", "check", "runs")
METRICS = ("AA", "LA", "FM")


class Loader(yaml.SafeLoader):
    """YAML, but 1e-3 is a number, as everybody expects."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True)
class Check:
    """What one run has to show before the others are worth their time."""

    of: Mapping[str, Any]
    metric: str
    expected: float
    within: float
    hint: str = ""

    def judge(self, record: Mapping[str, Any]) -> None:
        found = record["metrics"][self.metric]
        if found is None or abs(found - self.expected) > self.within:
            raise ConfigError(
                f"{record['method']} has {self.metric} {found if found is None else round(found, 2)}, expected "
                f"{self.expected} within {self.within}: nothing else of this sweep was run. {self.hint}".strip()
            )


def read_content(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.load(path.read_text(), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not a sweep: {error}.") from None
    if not isinstance(content, Mapping) or not isinstance(content.get("runs"), list):
        raise ConfigError(f"{path} is not a sweep: it needs `runs`, a list of blocks.")
    for key in content:
        if key not in KEYS:
            raise ConfigError(
                f"{path}: unknown key {key!r}.{nearest(key, KEYS)} A sweep has {', '.join(KEYS)}; settings stand in "
                "the blocks of `runs`."
            )
    return content


def read_check(path: Path) -> Check | None:
    """The sweep's check, where it has one."""
    given = read_content(path).get("check")
    if given is None:
        return None
    try:
        check = Check(**given)
    except TypeError:
        raise ConfigError(
            f"{path}: `check` takes of, metric, expected, within and hint; it was given {given!r}."
        ) from None
    if not isinstance(check.of, Mapping):
        raise ConfigError(f"{path}: `of` of the check is {check.of!r}; expected settings, such as method: zeroshot.")
    if check.metric not in METRICS:
        raise ConfigError(
            f"{path}: `metric` of the check is {check.metric!r}.{nearest(str(check.metric), METRICS)} Expected one of "
            f"{', '.join(METRICS)}."
        )
    for name in ("expected", "within"):
        value = getattr(check, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{path}: `{name}` of the check is {value!r}; expected a number.")
    return check


def read_sweep(path: Path) -> list[dict[str, Any]]:
    """The run settings that a sweep file stands for, in its order."""
    return [given for _, given in read_runs(path)]


def read_runs(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The same, each with the place in the file that it comes from."""
    content = read_content(path)
    found: list[tuple[str, dict[str, Any]]] = []
    for number, block in enumerate(content["runs"], 1):
        where = f"{path}, block {number} of `runs`"
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where}: a block is a mapping, this one is {block!r}.")
        for given in expand(block, where):
            if not isinstance(given.get("method"), str):
                raise ConfigError(f"{where}: method = {given.get('method')!r} is not possible: expected a name.")
            if all(given != other for _, other in found):
                found.append((where, given))
    return found


def expand(block: Mapping[str, Any], where: str = "a block", section: str = "") -> Iterator[dict[str, Any]]:
    """All combinations of the block's lists; the last key varies fastest."""
    axes: list[list[tuple[str, Any]]] = []
    for key, value in block.items():
        name = f"{section}.{key}" if section else key
        if not isinstance(key, str):
            raise ConfigError(f"{where}: {name!r} is no setting: expected a name.")
        if key == "addons" and not section:
            several = isinstance(value, list) and value and all(isinstance(v, list) for v in value)
            choices = value if several else [value]
            if not all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in choices):
                raise ConfigError(
                    f"{where}: addons = {value!r} is not possible: expected a list of names, such as [ivt], or "
                    "several such lists."
                )
        elif value == []:
            raise ConfigError(
                f"{where}: {name} is an empty list, which stands for no run at all. Give it values or leave it out"
                + (f"; for a setting without values write {key}: [[]]." if is_list(section, key) else ".")
            )
        elif isinstance(value, Mapping):
            choices = list(expand(value, where, name))
        elif isinstance(value, list) and (not is_list(section, key) or all(isinstance(v, list) for v in value)):
            choices = value
        else:
            choices = [value]
        axes.append([(key, choice) for choice in choices])
    for combination in itertools.product(*axes):
        yield dict(combination)


def is_list(section: str, key: str) -> bool:
    """Whether a list is one value of this setting, such as milestones, and not several to be tried."""
    kind: Any = RunConfig
    if section:
        kind = find_method(section) if section in METHODS else find_addon(section) if section in ADDONS else None
        kind = getattr(kind, "Options", None)
    return kind is not None and key in kind.model_fields and _holds_a_list(kind.model_fields[key].annotation)


def _holds_a_list(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple) or any(map(_holds_a_list, get_args(annotation)))


def default_at_once(device: torch.device, configs: Sequence[RunConfig]) -> int:
    """Eight on a large GPU, fewer where its memory is short; one on a CPU."""
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(8, len(configs), int(free // (6 << 30))))
