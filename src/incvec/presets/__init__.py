"""The paper's settings as data, and how a run's configuration is put together from them.

One YAML file for each method and add-on: a mapping from data set (`cifar100`, or `cifar100.authors` for a
variant) to option values; an add-on's file may have `+podnet`, for one host on any data set, and `cifar100+podnet`,
for the paper's settings there. Layers, weakest first: the options' own defaults, the preset, the add-on's for its host,
what the caller gave.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from incvec.addons import ADDONS, find_addon
from incvec.config import RunConfig, differences, digest, validate
from incvec.data import DATASETS
from incvec.errors import ConfigError, nearest
from incvec.methods import METHODS, find_method

STREAMS: dict[str, dict[str, Any]] = {
    "cifar100": {"base_classes": 50, "tasks": 5},
    "digits": {"base_classes": 4, "tasks": 3},
    "imagenet": {"base_classes": 500, "tasks": 10},
    "imagenet-subset": {"base_classes": 50, "tasks": 5},
    "tiny-imagenet-100": {"base_classes": 50, "tasks": 5},
}
# Methods that start from pre-trained weights: equal tasks, no base half.
UNIFORM: dict[str, dict[str, Any]] = {
    "aircraft": {"base_classes": 0, "tasks": 10},
    "cifar100": {"base_classes": 0, "tasks": 10},
    "digits": {"base_classes": 0, "tasks": 5},
}
# Settings outside the sections that make a run another experiment; its seed, device and engine do not.
SETTINGS = (
    "order_seed",
    "base_classes",
    "class_order",
    "class_list",
    "variant",
    "precision",
    "start",
    "image_size",
    "sync_batchnorm",
    "held_out",
    "stop_after",
)


@cache
def preset_file(component: str) -> dict[str, dict[str, Any]]:
    """All presets of one method or add-on, by data set and variant."""
    file = resources.files(__package__) / f"{component}.yaml"
    if not file.is_file():
        return {}
    content: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text()) or {}
    return content


def preset(component: str, dataset: str, variant: str = "paper", host: str | None = None) -> dict[str, Any]:
    """Option values for one component on one data set, of an add-on with its host; the paper's are the plain entry."""
    content = preset_file(component)
    values = dict(content.get(dataset, {}))
    if variant != "paper":
        return values | content.get(f"{dataset}.{variant}", {}) | content.get(f"+{host}", {})
    return values | content.get(f"+{host}", {}) | content.get(f"{dataset}+{host}", {})


def presets() -> list[dict[str, str]]:
    """Every preset there is: its name, component, data set and variant; an add-on's for a host is for any data set."""
    rows = []
    for component in [*METHODS, *ADDONS]:
        for key in preset_file(component):
            dataset, _, variant = key.partition(".")
            name = "-".join(part for part in (component, dataset, variant) if part)
            if "+" in key:
                where, _, host = key.partition("+")
                name, dataset = component + key if not where else f"{component}-{key}", f"{where or 'any'} with {host}"
            rows.append({"name": name, "component": component, "dataset": dataset, "variant": variant or "paper"})
    return rows


def resolve(given: Mapping[str, Any]) -> RunConfig:
    """A complete, validated configuration from a few given values; every section is spelled out in it."""
    given = dict(given)
    if "method" not in given:
        raise ConfigError("no method was named; --method takes one of: " + ", ".join(METHODS) + ".")
    for key in ("method", "dataset", "variant"):
        if not isinstance(given.get(key, ""), str):
            raise ConfigError(f"setting {key} = {given[key]!r} is not possible: expected a name.")
    if isinstance(given.get("addons"), str) or not all(isinstance(name, str) for name in given.get("addons", ())):
        raise ConfigError(f"setting addons = {given['addons']!r} is not possible: expected a list of names.")
    method, addons = given["method"], tuple(given.get("addons", ()))
    pretrained = find_method(method).pretrained
    kinds = {method: find_method(method).Options} | {name: find_addon(name).Options for name in addons}
    dataset = given.get("dataset", "digits")
    if dataset not in DATASETS:
        raise ConfigError(f"unknown data set {dataset!r}.{nearest(dataset, DATASETS)} Known: {', '.join(DATASETS)}.")
    variant = given.get("variant", "paper")
    if variant != "paper" and f"{dataset}.{variant}" not in preset_file(method):
        have = [row["variant"] for row in presets() if row["component"] == method and row["dataset"] == dataset]
        raise ConfigError(f"{method} has no variant {variant!r} for {dataset}; it has: {', '.join(have) or 'none'}.")
    sections: dict[str, dict[str, Any]] = {}
    for name, kind in kinds.items():
        own = given.pop(name, None) or {}
        if not isinstance(own, Mapping):
            raise ConfigError(f"{name} takes settings of its own ({name}.key=value), it was given {own!r}.")
        which = "pretrained" if pretrained and name != method else variant  # the paper treats those models otherwise
        host = None if name == method else method
        options = validate(kind, {**preset(name, dataset, which, host), **own}, where=name)
        sections[name] = options.model_dump(mode="json")
    fields = set(RunConfig.model_fields) - {"sections"}
    for key in given:
        if key not in fields:
            other = " (its method is not part of this run)" if key in METHODS else ""
            other = f" (that add-on is not part of this run: add it with --addon {key})" if key in ADDONS else other
            owners = [name for name, section in sections.items() if key in section]
            hint = f" Did you mean '{owners[0]}.{key}'?" if owners else nearest(key, [*fields, *kinds])
            if not owners and not other:
                hint += f" Known settings: {', '.join(sorted(fields))}; and those of {', '.join(kinds)}."
            raise ConfigError(f"unknown setting {key!r}{other}.{hint}")
    stream = {"base_classes": 0, **UNIFORM.get(dataset, {})} if pretrained else STREAMS.get(dataset, {})
    values = {**stream, **given}
    if values.get("class_order") is not None:
        values["order_seed"] = None  # no seed has made this order, so no record shall say so
    config: RunConfig = validate(RunConfig, {**values, "sections": sections})
    return config


def run_name(config: RunConfig) -> str:
    """`cifar100-podnet+ivt-5-s0`, and eight digits more where a setting that the name does not tell was changed."""
    told = ("method", "addons", "dataset", "tasks", "seed", "oracle")
    ordinary = resolve({key: getattr(config, key) for key in told})
    changes = differences(config.resolved(), ordinary.resolved())
    parts = [config.dataset, "+".join([config.method, *config.addons])]
    parts += ["oracle"] if config.oracle else []
    parts += [str(config.tasks), f"s{config.seed}"]
    parts += [digest(changes)[:8]] if changes else []
    return "-".join(parts)


def changed_settings(own: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's resolved configuration has that the presets of its variant do not, `section.key: value`."""
    given = {key: own[key] for key in ("method", "dataset", "addons")} | {"variant": own.get("variant", "paper")}
    preset = resolve(given)
    usual = preset.resolved() | {"variant": "paper"}
    changed = {key: own[key] for key in SETTINGS if key in own and own[key] != usual.get(key)}
    if own.get("class_order"):  # an order that is given has no seed
        changed.pop("order_seed", None)
    for section, values in preset.sections.items():
        # An option that a record lacks came later, and its own default is what was done before.
        spelt = _own_defaults(section) | own[section] if section in own else {}
        changed |= {
            f"{section}.{key}": value
            for key, value in spelt.items()
            if values.get(key) != value and in_effect(values, key) != in_effect(spelt, key)
        }
    return changed


@cache
def _own_defaults(component: str) -> dict[str, Any]:
    """A method's or add-on's options without any preset."""
    options: Any = (find_method if component in METHODS else find_addon)(component).Options
    values: dict[str, Any] = options.model_construct().model_dump(mode="json")  # some need a setting to be valid
    return values


def in_effect(values: Mapping[str, Any], key: str) -> Any:
    """A setting's value; a `base_` setting left out is that of the other tasks."""
    value = values.get(key)
    return values.get(key.removeprefix("base_")) if value is None else value


def sweeps() -> dict[str, Path]:
    """The sweeps that come with the package, by name."""
    folder = resources.files(__package__) / "sweeps"
    return {Path(str(file)).stem: Path(str(file)) for file in sorted(folder.iterdir(), key=str) if file.is_file()}
