"""Sweeps: many configurations, their common beginnings trained once, as many at a time as the device takes.

A sweep file is YAML: `name`, `summary`, and `runs`, a list of blocks. In a block every value that is a list is
varied, and the block stands for all combinations; `addons` is varied over lists of names. Other keys are as in a
run's configuration (`podnet: {memory: [5, 10, 20]}` varies inside a section).

A sweep may have a `check`: the first run that fits its `of` (settings, such as `method: zeroshot`) goes before all
others, and where its `metric` is further than `within` from `expected`, nothing else is run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from incvec.config import RunConfig
from incvec.errors import ConfigError

PLAIN_LISTS = {"class_order", "milestones", "base_milestones", "stages"}  # lists that are one value


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
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not a sweep: {error}.") from None
    if not isinstance(content, Mapping) or not isinstance(content.get("runs"), list):
        raise ConfigError(f"{path} is not a sweep: it needs `runs`, a list of blocks.")
    return content


def read_check(path: Path) -> Check | None:
    """The sweep's check, where it has one."""
    given = read_content(path).get("check")
    if given is None:
        return None
    try:
        return Check(**given)
    except TypeError:
        raise ConfigError(
            f"{path}: `check` takes of, metric, expected, within and hint; it was given {given!r}."
        ) from None


def read_sweep(path: Path) -> list[dict[str, Any]]:
    """The run settings that a sweep file stands for, in its order."""
    content = read_content(path)
    found: list[dict[str, Any]] = []
    for number, block in enumerate(content["runs"], 1):
        where = f"{path}, block {number} of `runs`"
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where}: a block is a mapping, this one is {block!r}.")
        found += [given for given in expand(block, where) if given not in found]
    return found


def expand(block: Mapping[str, Any], where: str = "a block") -> Iterator[dict[str, Any]]:
    """All combinations of the block's lists; the last key varies fastest."""
    axes: list[list[tuple[str, Any]]] = []
    for key, value in block.items():
        if isinstance(value, Mapping):
            axes.append([(key, inner) for inner in expand(value, f"{where}, {key}")])
        elif key == "addons":
            several = isinstance(value, list) and value and all(isinstance(v, list) for v in value)
            axes.append([(key, names) for names in (value if several else [value])])
        elif value == []:
            raise ConfigError(
                f"{where}: {key} is an empty list, which stands for no run at all. Give it values or leave it out; "
                f"where no values are the setting, write {key}: [[]]."
            )
        elif isinstance(value, list) and (key not in PLAIN_LISTS or all(isinstance(v, list) for v in value)):
            axes.append([(key, inner) for inner in value])
        else:
            axes.append([(key, value)])
    for combination in itertools.product(*axes):
        yield dict(combination)


def default_at_once(device: torch.device, configs: Sequence[RunConfig]) -> int:
    """Eight on a large GPU, fewer where its memory is short; one on a CPU."""
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(8, len(configs), int(free // (6 << 30))))
