"""Presets: the paper's settings as data, and how a run's configuration is resolved from them.

There is one YAML file per method and add-on:

    shared:                    # optional: anchors for the rest of the file, otherwise ignored
    datasets:
      cifar100:                # option values for one data set: the paper's settings
        batch_size: 64
        variants:              # selected with --variant; applied on top
          authors: {epochs: 101}
        hosts:                 # add-ons only: applied with this method on this data set (not with a variant)
          pass: {batchnorm: layer}
    hosts:                     # add-ons only: applied with this method on any data set
      podnet: {last: teleport}

Each layer overrides the one before: the defaults of the options, the data set, the variant, the host, the host on this
data set, the values given by the caller. Other packages add presets through `incvec.registry`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from incvec.addons import ADDONS, declared_addon
from incvec.config import RunConfig, read_yaml, validate
from incvec.data.datasets import dataset_options, find_dataset
from incvec.declarations import declared
from incvec.errors import ConfigError, nearest, shorten
from incvec.methods import METHODS, declared_method
from incvec.presets.given import addon_names
from incvec.presets.names import changes_text
from incvec.registry import PRESETS

Values = dict[str, Any]

STREAMS: dict[str, dict[str, Any]] = {
    "cifar100": {"base_classes": 50, "tasks": 5},
    "digits": {"base_classes": 4, "tasks": 3},
    "imagenet": {"base_classes": 500, "tasks": 10},
    "imagenet-subset": {"base_classes": 50, "tasks": 5},
    "tiny-imagenet-100": {"base_classes": 50, "tasks": 5},
}
# For pre-trained methods: tasks of equal size, without a large base task.
UNIFORM: dict[str, dict[str, Any]] = {
    "aircraft": {"base_classes": 0, "tasks": 10},
    "cifar100": {"base_classes": 0, "tasks": 10},
    "digits": {"base_classes": 0, "tasks": 5},
}
# Settings outside the sections that make a run a different experiment. Seed, device and engine do not.
SETTINGS = (
    "order_seed",
    "base_classes",
    "task_sizes",
    "class_order",
    "class_list",
    "variant",
    "precision",
    "start",
    "image_size",
    "last_batch",
    "sync_batchnorm",
    "held_out",
    "stop_after",
)


class DatasetPreset(NamedTuple):
    """Settings of one component on one data set."""

    options: Values
    variants: dict[str, Values]
    hosts: dict[str, Values]


class ComponentPresets(NamedTuple):
    """All presets of one method or add-on."""

    datasets: dict[str, DatasetPreset]
    hosts: dict[str, Values]


def _sources(component: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where presets of a component come from, and their content: built-in ones, then those of other packages."""
    for package, source in {"incvec": __package__, **PRESETS}.items():
        listed = isinstance(source, Mapping)  # component -> preset; otherwise a package with YAML files
        found = source.get(component) if listed else resources.files(source) / f"{component}.yaml"
        if isinstance(found, Mapping):
            yield package, found
        elif found is not None and (listed or found.is_file()):
            yield str(found), read_yaml(Path(str(found))) or {}


def load_presets(component: str) -> ComponentPresets:
    """All presets of one method or add-on."""
    return _load_presets(component, tuple(PRESETS))


@cache
def _load_presets(component: str, packages: tuple[str, ...]) -> ComponentPresets:
    datasets: dict[str, Values] = {}
    hosts: dict[str, Values] = {}
    for source, content in _sources(component):
        for key in content.keys() - {"shared", "datasets", "hosts"}:
            raise ConfigError(
                f"the presets of {component} ({source}) have an unknown key {key!r}: expected datasets or hosts."
            )
        for known, key in ((datasets, "datasets"), (hosts, "hosts")):
            added = content.get(key) or {}
            for name in known.keys() & added.keys():
                raise ConfigError(f"{component} has presets for {name} already: remove those in {source}.")
            known.update(added)

    def entry(values: Values | None) -> DatasetPreset:
        options = dict(values or {})
        return DatasetPreset(variants=options.pop("variants", {}), hosts=options.pop("hosts", {}), options=options)

    return ComponentPresets({name: entry(values) for name, values in datasets.items()}, hosts)


def preset_layers(component: str, dataset: str, variant: str = "paper", host: str = "") -> dict[str, Values]:
    """The presets that apply to a component, by name, as `incvec list presets` has it; the last one wins."""
    known = load_presets(component)
    entry = known.datasets.get(dataset, DatasetPreset({}, {}, {}))
    layers = {f"{component}-{dataset}": entry.options}
    if variant != "paper":
        layers[f"{component}-{dataset}-{variant}"] = entry.variants.get(variant, {})
    layers[f"{component}+{host}"] = known.hosts.get(host, {})
    if variant == "paper":
        layers[f"{component}-{dataset}+{host}"] = entry.hosts.get(host, {})
    return {name: values for name, values in layers.items() if values}


def layers_of(component: str, method: str, dataset: str, variant: str) -> dict[str, Values]:
    """The presets of a method, or of an add-on used with it, by name."""
    if component == method:
        return preset_layers(component, dataset, variant)
    pretrained = declared_method(method).pretrained
    return preset_layers(component, dataset, "pretrained" if pretrained else variant, method)


def declared_component(name: str) -> Any:
    """The declared class of a method or an add-on."""
    return declared_method(name) if name in METHODS else declared_addon(name)


def presets() -> list[dict[str, Any]]:
    """Name, component, data set, variant and values of every preset, without those that it is applied on top of.

    The data set `any with podnet` is that of an add-on's preset for a host.
    """
    rows: list[dict[str, Any]] = []

    def add(name: str, dataset: str, values: Values, variant: str = "paper") -> None:
        entry = {"name": component + name, "component": component, "dataset": dataset, "variant": variant}
        rows.append(entry | {"values": values})

    for component in [*METHODS, *ADDONS]:
        known = load_presets(component)
        for dataset, entry in known.datasets.items():
            add(f"-{dataset}", dataset, entry.options)
            for variant, values in entry.variants.items():
                add(f"-{dataset}-{variant}", dataset, values, variant)
            for host, values in entry.hosts.items():
                add(f"-{dataset}+{host}", f"{dataset} with {host}", values)
        for host, values in known.hosts.items():
            add(f"+{host}", f"any with {host}", values)
    return rows


def resolve(given: Mapping[str, Any]) -> RunConfig:
    """A complete, validated configuration from a few given values, with every option of every section."""
    given = dict(given)
    if "method" not in given:
        raise ConfigError("no method was named; --method takes one of: " + ", ".join(METHODS) + ".")
    for key in ("method", "dataset", "variant"):
        if not isinstance(given.get(key, ""), str):
            raise ConfigError(f"setting {key} = {shorten(given[key])} is not possible: expected a name.")
    method = given["method"]
    addons = given["addons"] = addon_names(given.get("addons", ()))
    kinds = {method: declared_method(method).Options} | {name: declared_addon(name).Options for name in addons}
    dataset = given.get("dataset", "digits")
    find_dataset(dataset)
    variant = given.get("variant", "paper")
    if variant != "paper":
        entry = load_presets(method).datasets.get(dataset)
        variants = ["paper", *entry.variants] if entry else []
        if variant not in variants:
            known = ", ".join(variants) or "none"
            raise ConfigError(f"{method} has no variant {shorten(variant)} for {dataset}; it has: {known}.")
    sections: dict[str, Values] = {}
    for name, kind in kinds.items():
        options = given.pop(name, None) or {}
        if not isinstance(options, Mapping):
            raise ConfigError(f"{name} is a section with its own settings ({name}.key=value), not {shorten(options)}.")
        base: Values = {}
        for values in layers_of(name, method, dataset, variant).values():
            base |= values
        sections[name] = validate(kind, {**base, **options}, where=name).model_dump(mode="json")
    fields = set(RunConfig.model_fields) - {"sections"}
    for key in given:
        if key not in fields:
            other = " (its method is not part of this run)" if key in METHODS else ""
            other = f" (that add-on is not part of this run: add it with --addon {key})" if key in ADDONS else other
            owners = [name for name, section in sections.items() if key in section]
            hint = f" Did you mean '{owners[0]}.{key}'?" if owners else nearest(key, [*fields, *kinds])
            if not owners and not other:
                hint += f" Known settings: {', '.join(sorted(fields))}; and those of {', '.join(kinds)}."
            raise ConfigError(f"unknown setting {shorten(key)}{other}.{hint}")
    values = {**preset_stream(method, dataset), **given}
    if values.get("class_order") is not None:
        values["order_seed"] = None  # an explicit order does not come from a seed
    config: RunConfig = validate(RunConfig, {**values, "sections": sections})
    dataset_options(dataset, config.data_options())
    return config


def preset_stream(method: str, dataset: str) -> Values:
    """`base_classes` and `tasks` of a data set, as far as they are known before it is loaded."""
    if declared_method(method).pretrained:
        return {"base_classes": 0, **UNIFORM.get(dataset, {})}
    return STREAMS.get(dataset, {})


def check_names(config: RunConfig) -> None:
    """Refuse unknown names, incompatible add-ons and impossible options before any data is loaded."""
    method = declared_method(config.method)
    before: list[str] = []
    for name in config.addons:
        if name in before:
            raise ConfigError(f"add-on {name!r} is given twice.")
        reason = declared_addon(name).incompatibility(method, before)
        if reason:
            raise ConfigError(
                f"add-on {name!r} cannot be combined with {' + '.join([config.method, *before])}: {reason}"
            )
        before.append(name)
    options = config.options(config.method, method.Options)
    if not method.pretrained and hasattr(options, "net"):  # pre-trained methods validate theirs
        try:
            declared("incvec.nets.backbones", "check_backbone")(options.net)
        except ConfigError as error:
            raise ConfigError(f"setting {config.method}.net: {error}") from None
    for name in config.addons:
        addon = declared_addon(name)
        reason = addon.incompatible_options(config.options(name, addon.Options), method, options)
        if reason:
            raise ConfigError(f"add-on {name!r} cannot be combined with {config.method} with these settings: {reason}")


def run_name(config: RunConfig) -> str:
    """`cifar100-podnet+ivt-5-s0`, then the variant, and every other setting that differs from its preset's."""
    named = ("method", "addons", "dataset", "tasks", "seed", "oracle", "variant")
    default = resolve({key: getattr(config, key) for key in named})
    parts = [config.dataset, "+".join([config.method, *config.addons])]
    parts += ["oracle"] if config.oracle else []
    parts += [str(config.tasks), f"s{config.seed}"]
    parts += [config.variant] if config.variant != "paper" else []
    defaults = default.resolved() | ({"order_seed": None} if config.class_order is not None else {})
    return "-".join([*parts, *changes_text(config.resolved(), defaults)])


def changed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which a resolved configuration differs from the presets of its variant, `section.key: value`."""
    named = {key: config[key] for key in ("method", "dataset", "addons")}
    default = resolve(named | {"variant": config.get("variant", "paper")})
    defaults = default.resolved() | {"variant": "paper"}
    changed = {key: config[key] for key in SETTINGS if key in config and config[key] != defaults.get(key)}
    if config.get("class_order"):  # an explicit order has no seed
        changed.pop("order_seed", None)
    for section, values in default.sections.items():
        # An option that a record lacks was introduced later; its default is the earlier behavior.
        complete = _default_options(section) | config[section] if section in config else {}
        changed |= {
            f"{section}.{key}": value
            for key, value in complete.items()
            if values.get(key) != value and effective_value(values, key) != effective_value(complete, key)
        }
    return changed


def complete_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration with the options that were introduced after it, whose default is the earlier behavior."""
    known = {*METHODS, *ADDONS}
    return {
        key: {**_default_options(key), **value} if key in known and isinstance(value, Mapping) else value
        for key, value in config.items()
    }


@cache
def _default_options(component: str) -> dict[str, Any]:
    """The options of a method or add-on without any preset."""
    options: Any = declared_component(component).Options
    values: dict[str, Any] = options.model_construct().model_dump(mode="json")  # not validated: some require a value
    return values


def effective_value(values: Mapping[str, Any], key: str) -> Any:
    """A setting's value; a `base_` setting that is null takes the value of the incremental tasks."""
    value = values.get(key)
    return values.get(key.removeprefix("base_")) if value is None else value


def sweeps() -> dict[str, Path]:
    """The sweeps of this package, by name."""
    folder = resources.files(__package__) / "sweeps"
    return {Path(str(file)).stem: Path(str(file)) for file in sorted(folder.iterdir(), key=str) if file.is_file()}
