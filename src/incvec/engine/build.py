"""From a configuration to the parts of a run: device, sources, method, add-ons."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from incvec.addons import find_addon
from incvec.config import RunConfig
from incvec.contracts import AddOn, Method, Stage, Task, World
from incvec.data import Dataset, ImageSource, class_order, make_source, make_views, relabel
from incvec.data.image_files import available_memory
from incvec.data.memory import quota
from incvec.data.stream import make_stream
from incvec.data.views import CROP_AREA, ResizedViews
from incvec.engine.seeds import derive
from incvec.errors import ConfigError, TrainingError
from incvec.methods import find_method
from incvec.nets import kernels
from incvec.presets import check_names


@dataclass
class RunParts:
    """The objects that a run is assembled from."""

    world: World
    method: Method
    addons: list[AddOn]
    test: ImageSource
    tasks: tuple[Task, ...]  # to train; `world.tasks` is the whole stream
    order: list[int]  # the data set's class numbers in the order in which they are learned
    engine: str  # "eager" or "graph"
    precision: str
    _plans: dict[int, list[Stage]] = field(default_factory=dict)

    def plan(self, task: Task) -> list[Stage]:
        """The task's stages: the method's, as changed by each add-on in turn."""
        if task.index not in self._plans:
            stages = method_stages = self.method.stages(task)
            for addon in self.addons:
                stages = addon.plan(task, list(stages))
            if task.index == 0 and stages[: len(method_stages)] != method_stages:
                raise TrainingError(
                    "an add-on changed the method's stages of the base task; it may only append to them."
                )
            self._plans[task.index] = stages
        return self._plans[task.index]


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of that name. With several processes on a machine, "cuda" is the GPU of this one's local rank."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] == "mps":
        raise ConfigError(
            "device 'mps' is not supported: incvec was never run on Apple's GPUs, and parts of it need float64, which "
            "torch does not have there. Use --device cpu; that is what auto selects on a Mac."
        )
    unknown = ConfigError(f"device {name!r} is not known; expected auto, cpu, cuda or cuda:N.")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown from None
    if device.type not in ("cpu", "cuda"):
        raise unknown
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was requested, but torch {torch.__version__} finds no CUDA device.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} was requested, but the last one is cuda:{torch.cuda.device_count() - 1}.")
    if device.type == "cuda" and ":" not in name and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"there is no GPU for process {local_rank} of this machine, which has {torch.cuda.device_count()}. "
                f"Start as many processes (--nproc-per-node {torch.cuda.device_count()}), or use --device cpu."
            )
        return torch.device("cuda", local_rank)
    return device


def make_autocast(device: torch.device, precision: str) -> Any:
    """A function that returns a new mixed-precision context. The weight cache is off: a graph must not capture it."""

    def enter() -> AbstractContextManager[Any]:
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    return enter


def build(config: RunConfig, dataset: Dataset, generator: torch.Generator, device: torch.device) -> RunParts:
    """Assemble a run's parts. Trains and writes nothing."""
    kernels.allowed(os.environ)
    check_names(config)
    kind = find_method(config.method)
    options = config.options(config.method, kind.Options)
    n_classes = len(dataset.class_names)
    order = class_order(n_classes, config.order_seed, config.class_order)
    tasks = make_stream(n_classes, config, kind.joint)
    trained = tasks[: config.stop_after]
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    engine = config.engine
    if engine == "auto":
        engine = "graph" if device.type == "cuda" else "eager"
    if engine == "graph" and device.type != "cuda":
        raise ConfigError("engine=graph needs a CUDA device; use engine=auto or engine=eager.")
    norms = dataset.normalizations
    mean, std = norms.get(getattr(options, "normalization", "default"), norms["default"])
    expected = kind.input(options)
    if expected is not None:
        mean, std = expected.mean, expected.std
    size = None if expected is None else expected.size
    brightness, crop_area = getattr(options, "brightness", 0.0), getattr(options, "crop_area", CROP_AREA)
    views = make_views(dataset, brightness, mean, std, size, crop_area)
    channels_last = device.type == "cuda"
    train = make_source(dataset.train_images, relabel(dataset.train_labels, order), views, device, channels_last)
    test = make_source(dataset.test_images, relabel(dataset.test_labels, order), views, device, channels_last)
    check_counts(train, options, kind, trained, dataset, order)
    channels, height, width = dataset.image_shape
    world = World(
        device=device,
        tasks=tasks,
        sources={"train": train},
        generator=generator,
        image_shape=(channels, height, width) if expected is None else (len(mean), expected.size, expected.size),
        oracle=config.oracle,
        class_names=tuple(dataset.class_names[label] for label in order),
        autocast=make_autocast(device, precision),
    )
    generator.manual_seed(derive(config.seed, "build"))
    method = kind(options, world)
    method.to(device)
    if channels_last:
        cast(Any, method).to(memory_format=torch.channels_last)  # torch's stubs do not type this call
    addons = []
    for name in config.addons:
        cls = find_addon(name)
        addons.append(cls(config.options(name, cls.Options), world, method))
    check_memory(config, method, addons, device)
    return RunParts(world, method, addons, test, trained, order, engine, precision)


def check_memory(config: RunConfig, method: Method, addons: Sequence[AddOn], device: torch.device) -> None:
    """Refuse options with which a run cannot fit into the memory of the device."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else available_memory()
    parts: list[Method | AddOn] = [method, *addons]
    for part in parts:
        for option, needed in part.memory().items():
            if needed > total:
                raise ConfigError(
                    f"setting {part.name}.{option} = {config.sections[part.name][option]} needs {needed / 1e9:.0f} GB "
                    f"of memory or more, and {device} has {total / 1e9:.0f} GB: lower it."
                )


def describe_preprocessing(parts: RunParts) -> dict[str, Any]:
    """How an image becomes the network's input: short side to `stored` pixels, center square of `side`."""
    views, side = parts.test.views, parts.world.image_shape[-1]
    stored = views.stored if isinstance(views, ResizedViews) else side
    mean, std = (values.flatten().tolist() for values in (views.mean, views.std))
    return {"side": side, "stored": stored, "mean": mean, "std": std}


def grow(parts: RunParts, task: Task, seed: int) -> None:
    """Add the structure for a task. The initial values of new parameters depend on the seed only."""
    parts.world.generator.manual_seed(derive(seed, task.index, "grow"))
    parts.method.task = task
    parts.method.grow(task)


def check_counts(
    train: ImageSource,
    options: Any,
    kind: type[Method],
    tasks: tuple[Task, ...],
    dataset: Dataset,
    order: list[int],
) -> None:
    """Refuse classes with fewer images than the exemplars to be stored of them, or without any."""
    memory, total = getattr(options, "memory", 1), getattr(options, "memory_total", None)
    setting = "memory" if total is None else "memory_total"
    counts = train.counts().tolist()
    for task in tasks:
        needed = quota(task.n_seen, memory if total is None else None, total) if kind.exemplars else 1
        for label in task.classes:
            if counts[label] < needed:
                raise ConfigError(
                    f"class {dataset.class_names[order[label]]!r} has {counts[label]} training images, but {needed} "
                    f"are needed ({kind.name} stores that many exemplars per class); lower {kind.name}.{setting}."
                )
