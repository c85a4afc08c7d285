"""Sweep files: many configurations from a few lines of YAML.

A sweep file has the keys `name`, `summary` and `runs`, a list of blocks. A block is a run's configuration in which
lists are varied, also inside a section (`podnet: {memory: [5, 10, 20]}`). It expands to all combinations of their
values. Settings that are lists themselves are varied over lists of lists: `addons: [ivt]` and `milestones: [80, 120]`
are one value, `[[80, 120], [60]]` are two. The section of a method or add-on applies to the runs of the block that have
it: with `addons: [[], [ivt]]` and `ivt: {interval: [5, 10]}` there are three runs.

A sweep may have a `check`. The first run that matches its `of` (settings, such as `method: zeroshot`) is trained before
all others. If its `metric` differs from `expected` by more than `within`, the others are not run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from incvec.addons import ADDONS
from incvec.config import RunConfig, digest, read_yaml
from incvec.errors import ConfigError, nearest, shorten
from incvec.methods import METHODS, base_settings
from incvec.presets import declared_component

if TYPE_CHECKING:
    import torch

KEYS = ("name", "summary", "check", "runs")
METRICS = ("AA", "LA", "FM")
MAX_RUNS = 10_000  # of a sweep


@dataclass(frozen=True)
class Check:
    """The result that one run has to reach before the others are run."""

    of: Mapping[str, Any]
    metric: str
    expected: float
    within: float
    hint: str = ""

    def judge(self, record: Mapping[str, Any]) -> None:
        value = record["metrics"][self.metric]
        if value is None or abs(value - self.expected) > self.within:
            raise ConfigError(
                f"{record['method']} has {self.metric} {value if value is None else round(value, 2)}, expected "
                f"{self.expected} within {self.within}: nothing else of this sweep was run. {self.hint}".strip()
            )


def read_content(path: Path) -> Mapping[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("runs"), list):
        raise ConfigError(f"{path} is not a sweep: it needs `runs`, a list of blocks.")
    for key in content:
        if key not in KEYS:
            raise ConfigError(
                f"{path}: unknown key {key!r}.{nearest(key, KEYS)} A sweep has {', '.join(KEYS)}; settings belong into "
                "the blocks of `runs`."
            )
    return content


def read_check(path: Path) -> Check | None:
    """The sweep's check, if it has one."""
    given = read_content(path).get("check")
    if given is None:
        return None
    try:
        check = Check(**given)
    except TypeError:
        raise ConfigError(
            f"{path}: `check` takes of, metric, expected, within and hint; given was {shorten(given)}."
        ) from None
    if not isinstance(check.of, Mapping):
        raise ConfigError(
            f"{path}: `of` of the check is {shorten(check.of)}; expected settings, such as method: zeroshot."
        )
    if check.metric not in METRICS:
        raise ConfigError(
            f"{path}: `metric` of the check is {shorten(check.metric)}.{nearest(str(check.metric), METRICS)} Expected "
            f"one of {', '.join(METRICS)}."
        )
    for name in ("expected", "within"):
        value = getattr(check, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{path}: `{name}` of the check is {shorten(value)}; expected a number.")
    return check


def read_runs(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The settings of all runs of a sweep file, in its order, each with the block that defines it."""
    return expand_blocks(read_content(path)["runs"], str(path))


def expand_blocks(blocks: Sequence[Any], source: str) -> list[tuple[str, dict[str, Any]]]:
    """The settings of all runs of some blocks, each with the block that defines it."""
    runs: dict[str, tuple[str, dict[str, Any]]] = {}
    for number, block in enumerate(blocks, 1):
        where = f"{source}, block {number} of `runs`"
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where}: expected a mapping of settings, given was {shorten(block)}.")
        for given in expand_block(block, where):
            runs.setdefault(digest(given), (where, given))
        check_count(len(runs), where)
    return list(runs.values())


def check_count(count: int, where: str) -> None:
    if count > MAX_RUNS:
        raise ConfigError(f"{where}: {count} runs, expected at most {MAX_RUNS}. Divide the sweep.")


def expand_block(block: Mapping[str, Any], where: str = "a block") -> list[dict[str, Any]]:
    """All combinations of the values in the block's lists. The last key varies fastest.

    A run has no sections of methods and add-ons that only other runs of the block have.
    """
    axes = read_axes(block, where)
    for method in axes.get("method", [None]):
        if not isinstance(method, str):
            raise ConfigError(f"{where}: method = {shorten(method)} is not possible: expected a name.")
    members = list(itertools.product(enumerate(axes["method"]), enumerate(axes.get("addons", [()]))))
    names = set().union(*({method, *addons} for (_, method), (_, addons) in members))
    components = names & {*METHODS, *ADDONS}  # a section that no run has stays, and is refused
    runs: dict[tuple[int, ...], dict[str, Any]] = {}  # by the positions of their values
    count = 0
    for (i, method), (j, addons) in members:
        unused = components - {method, *addons}
        fixed = {"method": [i], "addons": [j]} | {key: [0] for key in unused}
        positions = [fixed.get(key, range(len(choices))) for key, choices in axes.items()]
        count += math.prod(map(len, positions))
        check_count(count, where)
        for chosen in itertools.product(*positions):
            pairs = zip(axes, chosen, strict=True)
            runs[chosen] = {key: axes[key][position] for key, position in pairs if key not in unused}
    return [runs[chosen] for chosen in sorted(runs)]


def expand_section(section: Mapping[str, Any], where: str, name: str) -> list[dict[str, Any]]:
    """All combinations of the values in the section's lists."""
    axes = read_axes(section, where, name)
    check_count(math.prod(map(len, axes.values())), where)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def read_axes(block: Mapping[str, Any], where: str, section: str = "") -> dict[str, list[Any]]:
    """The values that each setting of a block, or of a section, is varied over."""
    axes: dict[str, list[Any]] = {}
    for key, value in block.items():
        name = f"{section}.{key}" if section else key
        if not isinstance(key, str):
            raise ConfigError(f"{where}: {name!r} is not a setting: expected a name.")
        if key == "addons" and not section:
            several = isinstance(value, list) and value and all(isinstance(v, list) for v in value)
            choices = value if several else [value]
            if not all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in choices):
                raise ConfigError(
                    f"{where}: addons = {shorten(value)} is not possible: expected a list of names, such as [ivt], or "
                    "several such lists."
                )
        elif value == []:
            raise ConfigError(
                f"{where}: {name} is an empty list, so the block has no runs. Give it values or leave it out"
                + (f"; to set it to an empty list, write {key}: [[]]." if is_list_setting(section, key) else ".")
            )
        elif isinstance(value, Mapping):
            choices = expand_section(value, where, name)
        elif isinstance(value, list) and (not is_list_setting(section, key) or all(isinstance(v, list) for v in value)):
            choices = value
        else:
            choices = [value]
        axes[key] = choices
    return axes


def is_list_setting(section: str, key: str) -> bool:
    """Whether the values of this setting are lists, such as milestones."""
    kind: Any = RunConfig
    if section:
        kind = declared_component(section).Options if section in {*METHODS, *ADDONS} else None
    return kind is not None and key in kind.model_fields and _is_list_type(kind.model_fields[key].annotation)


def _is_list_type(annotation: Any) -> bool:
    return get_origin(annotation) in (list, tuple) or any(map(_is_list_type, get_args(annotation)))


def data_key(config: RunConfig) -> str:
    """Runs with the same key read the same data."""
    return f"{config.dataset} {config.data_options()}"


def base_group(config: RunConfig) -> str | None:
    """Runs with the same value have the same base task. None: the run starts from a snapshot.

    A hash of the settings that may determine the base; `shared_bases.base_key` is the exact one, but needs the data.
    Runs with and without `base_classes` are never in one group, even if their first tasks have the same classes.
    """
    if config.start:
        return None
    irrelevant = ("addons", "oracle", "variant", "stop_after", "snapshots", "sync_batchnorm", "placement")
    fields = config.model_dump(mode="json", exclude={*irrelevant, "sections"})
    if config.task_sizes is not None:
        fields |= {"task_sizes": None, "base_classes": config.task_sizes[0], "tasks": None}
    elif config.base_classes:
        fields["tasks"] = None
    return digest([fields, base_settings(config)])


def default_at_once(device: torch.device, configs: Sequence[RunConfig]) -> int:
    """How many runs to train at once: up to eight on a GPU, depending on its free memory; one on a CPU."""
    if device.type != "cuda":
        return 1
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(8, len(configs), int(free // (6 << 30))))
