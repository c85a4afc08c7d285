"""From a configuration to the things of a run: device, sources, method, add-ons."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

import incvec
from incvec.addons import find_addon
from incvec.config import RunConfig
from incvec.contracts import AddOn, Method, Stage, Task, World
from incvec.data import Dataset, ImageSource, class_order, make_source, make_views, relabel, split
from incvec.data.memory import quota
from incvec.engine.seeds import derive
from incvec.errors import ConfigError, TrainingError
from incvec.methods import find_method
from incvec.nets import check_backbone, kernels


@dataclass
class Parts:
    """Everything a run is made of."""

    world: World
    method: Method
    addons: list[AddOn]
    test: ImageSource
    tasks: tuple[Task, ...]  # those that are trained; `world.tasks` are the whole stream's
    order: list[int]
    engine: str  # "eager" or "graph"
    precision: str
    plans: dict[int, list[Stage]] = field(default_factory=dict)

    def plan(self, task: Task) -> list[Stage]:
        """The task's stages: the method's, changed by the add-ons in their order."""
        if task.index not in self.plans:
            own = self.method.stages(task)
            stages = own
            for addon in self.addons:
                stages = addon.plan(task, list(stages))
            if task.index == 0 and stages[: len(own)] != own:
                raise TrainingError("an add-on changed the base task's own stages; it may only append to them.")
            self.plans[task.index] = stages
        return self.plans[task.index]


def pick_device(name: str, local: int | None = None) -> torch.device:
    """The device of that name; where several processes share a machine, `local` is this one's number there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    unknown = ConfigError(f"device {name!r} is not known; expected auto, cpu, cuda or cuda:N.")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown from None
    if device.type not in ("cpu", "cuda"):
        raise unknown
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch {torch.__version__} sees no CUDA device here.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, but the last one here is cuda:{torch.cuda.device_count() - 1}."
        )
    if device.type == "cuda" and ":" not in name and local is not None:
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local} of this machine has no GPU of its own: there are {torch.cuda.device_count()}. Start "
                f"as many (--nproc-per-node {torch.cuda.device_count()}), or choose --device cpu."
            )
        return torch.device("cuda", local)
    return device


def check_names(config: RunConfig) -> None:
    """Unknown names, add-ons that refuse the method or one another, impossible options: before any data."""
    method = find_method(config.method)
    before: list[str] = []
    for name in config.addons:
        if name in before:
            raise ConfigError(f"add-on {name!r} is named twice.")
        reason = find_addon(name).incompatibility(method, before)
        if reason:
            raise ConfigError(f"add-on {name!r} cannot go with {' + '.join([config.method, *before])}: {reason}")
        before.append(name)
    own = config.options(config.method, method.Options)
    if not method.pretrained and hasattr(own, "net"):  # options of pre-trained methods check their own
        check_backbone(own.net)
    for name in config.addons:
        addon = find_addon(name)
        reason = addon.incompatible_options(config.options(name, addon.Options), method, own)
        if reason:
            raise ConfigError(f"add-on {name!r} cannot go with {config.method} so: {reason}")


def autocaster(device: torch.device, precision: str) -> Any:
    """A fresh mixed-precision context at each call. Its weight cache is off: a captured step must not see it."""

    def enter() -> AbstractContextManager[Any]:
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    return enter


def build(config: RunConfig, dataset: Dataset, generator: torch.Generator, device: torch.device) -> Parts:
    """Assemble a run's parts; nothing is trained or written."""
    kernels.allowed(os.environ)
    check_names(config)
    kind = find_method(config.method)
    options = config.options(config.method, kind.Options)
    n_classes = len(dataset.class_names)
    order = class_order(n_classes, config.order_seed, config.class_order)
    tasks = split(n_classes, n_classes, 0) if kind.joint else split(n_classes, config.base_classes, config.tasks)
    if config.stop_after is not None and config.stop_after > len(tasks):
        raise ConfigError(
            f"stop_after={config.stop_after}: the stream has {len(tasks)} tasks. Give one of 1 to {len(tasks)}, or "
            "leave it out."
        )
    trained = tasks[: config.stop_after]  # methods know the whole stream: a run broken off is the whole one's beginning
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    engine = config.engine
    if engine == "auto":
        engine = "graph" if device.type == "cuda" else "eager"
    if engine == "graph" and device.type != "cuda":
        raise ConfigError("engine=graph needs a CUDA device; use engine=auto or eager here.")
    norms = dataset.normalizations
    mean, std = norms.get(getattr(options, "normalization", "default"), norms["default"])
    wanted = kind.input(options)
    if wanted is not None:
        mean, std = wanted.mean, wanted.std
    size = None if wanted is None else wanted.size
    views = make_views(dataset, getattr(options, "brightness", 0.0), mean, std, size)
    last = device.type == "cuda"
    train = make_source(dataset.train_images, relabel(dataset.train_labels, order), views, device, last)
    test = make_source(dataset.test_images, relabel(dataset.test_labels, order), views, device, last)
    check_counts(train, options, kind, trained, dataset, order)
    channels, height, width = dataset.image_shape
    world = World(
        device=device,
        tasks=tasks,
        sources={"train": train},
        generator=generator,
        image_shape=(channels, height, width) if wanted is None else (len(mean), wanted.size, wanted.size),
        oracle=config.oracle,
        class_names=tuple(dataset.class_names[label] for label in order),
        autocast=autocaster(device, precision),
    )
    generator.manual_seed(derive(config.seed, "build"))
    method = kind(options, world)
    method.to(device)
    if last:
        cast(Any, method).to(memory_format=torch.channels_last)  # torch's own stubs disagree about this call
    addons = []
    for name in config.addons:
        cls = find_addon(name)
        addons.append(cls(config.options(name, cls.Options), world, method))
    return Parts(world, method, addons, test, trained, order, engine, precision)


def check_counts(
    train: ImageSource,
    options: Any,
    kind: type[Method],
    tasks: tuple[Task, ...],
    dataset: Dataset,
    order: list[int],
) -> None:
    """Every class needs images, and as many as the exemplars that its task leaves of it."""
    memory, total = getattr(options, "memory", 1), getattr(options, "memory_total", None)
    setting = "memory" if total is None else "memory_total"
    counts = train.counts().tolist()
    for task in tasks:
        wanted = quota(task.n_seen, memory if total is None else None, total) if kind.exemplars else 1
        for label in task.classes:
            if counts[label] < wanted:
                raise ConfigError(
                    f"class {dataset.class_names[order[label]]!r} has {counts[label]} training images, but {wanted} "
                    f"are needed ({kind.name} keeps that many exemplars a class); lower {kind.name}.{setting}."
                )


@cache
def code_version(method: str) -> str:
    """A hash of the source files a base task depends on."""
    root = Path(incvec.__file__).parent
    files = [
        root / name
        for name in ("contracts.py", "config.py", "fused.py", "atomic_files.py", "ivt/fisher.py", "ivt/names.py")
    ]
    for room in ("data", "nets", "engine"):
        files += sorted((root / room).rglob("*.py"))
    for ancestor in find_method(method).__mro__:
        if not ancestor.__module__.startswith("incvec.methods."):
            continue
        used = [getattr(value, "__module__", None) for value in vars(sys.modules[ancestor.__module__]).values()]
        for module in {ancestor.__module__, *used}:
            if isinstance(module, str) and module.startswith("incvec.methods."):
                files.append(root / "methods" / (module.rpartition(".")[2] + ".py"))
    total = hashlib.blake2b(digest_size=12)
    for file in sorted(set(files)):
        total.update(os.fsencode(file.name) + file.read_bytes())
    return total.hexdigest()
