"""The stream of a data set whose classes are known only from its folder: `folder` and `packed`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from incvec.config import RunConfig
from incvec.data.datasets import dataset_options, find_dataset
from incvec.declarations import declared
from incvec.errors import DataError
from incvec.methods import declared_method
from incvec.presets import check_names, preset_stream, resolve
from incvec.presets.given import parse_seeds

MAX_TASKS = 5  # increments of a stream that nobody chose
MAX_UNIFORM_TASKS = 10  # for pre-trained models, without a base task


def complete_stream(given: Mapping[str, Any], data_root: Path | None) -> tuple[dict[str, Any], str]:
    """The settings with `base_classes` and `tasks` that fit the data root, and a line that says so, or "".

    Settings that are given, and data sets that have a stream of their own, are left alone.
    """
    method, dataset = given.get("method"), given.get("dataset", "digits")
    if not isinstance(method, str) or not isinstance(dataset, str) or {"base_classes", "tasks"} <= given.keys():
        return dict(given), ""
    entry, kind = find_dataset(dataset), declared_method(method)
    if entry.count_classes is None or kind.joint or "tasks" in preset_stream(method, dataset):
        return dict(given), ""
    options = {key: given.get(key) for key in ("image_size", "class_list", "placement", "held_out")}
    classes = entry.count_classes(data_root, dataset_options(dataset, options))
    base, tasks = choose_stream(classes, given.get("base_classes"), given.get("tasks"), kind.pretrained)
    size = (classes - base) // tasks
    first = f"a base task of {base}, then " if base else ""
    chosen = " and ".join(f"--{key.replace('_', '-')}" for key in ("base_classes", "tasks") if key not in given)
    line = f"stream: {classes} classes: {first}{tasks} task{'s' * (tasks > 1)} of {size} (change it with {chosen})"
    return {**given, "base_classes": base, "tasks": tasks}, line


def resolve_seeds(given: Mapping[str, Any], seeds: str | None, data_root: Path | None) -> tuple[list[RunConfig], str]:
    """The complete configuration for each seed, checked as far as possible without data, and its stream, or ""."""
    chosen = [{}] if seeds is None else [{"seed": seed} for seed in parse_seeds(seeds)]
    check_names(resolve(given))  # wrong settings are reported before the data root is read
    tree, stream = complete_stream(given, data_root)
    configs = [resolve({**tree, **seed}) for seed in chosen]
    check_stream(configs[0])
    return configs, stream


def check_stream(config: RunConfig) -> None:
    """Refuse an impossible stream before any data is loaded, if the number of classes is known."""
    classes = find_dataset(config.dataset).classes
    if classes is None or config.class_list is not None:
        return
    declared("incvec.data.stream", "make_stream")(classes, config, declared_method(config.method).joint)
    if config.class_order is not None:
        declared("incvec.data.stream", "class_order")(classes, order=config.class_order)


def choose_stream(
    classes: int, base: int | None = None, tasks: int | None = None, uniform: bool = False
) -> tuple[int, int]:
    """Base classes and increments: about half of the classes first, then up to five equal tasks of two or more.

    With `uniform`, up to ten equal tasks without a base, if the number of classes can be divided. What is given stays.
    """
    if classes < 2:
        raise DataError(f"the data root has {classes} class(es): a stream needs at least two, one folder for each.")
    if uniform and not base:
        fitting = [n for n in range(2, MAX_UNIFORM_TASKS + 1) if classes % n == 0 and (classes // n > 1 or classes < 4)]
        if tasks is not None or fitting or base == 0:
            return 0, tasks if tasks is not None else max(fitting, default=classes)
    if base is not None:
        rest = max(classes - base, 1)
        fitting = [n for n in range(1, MAX_TASKS + 1) if rest % n == 0]
        return base, tasks or max((n for n in fitting if rest // n > 1), default=fitting[-1])
    half = classes // 2
    tasks = tasks or min(max(half // 2, 1), MAX_TASKS)
    return max(classes - tasks * max(half // tasks, 1), 0), tasks
