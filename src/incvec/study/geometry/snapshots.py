"""Snapshots of a run: restore the model it had after a task, and check that runs can be compared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from incvec.atomic_files import read_tensors
from incvec.config import RunConfig
from incvec.contracts import Method, Task
from incvec.data import Dataset
from incvec.data.source import inference_batch_size
from incvec.engine.build import RunParts, build, grow, pick_device
from incvec.engine.checkpoint import Namespaces, check_header, restore, restoring
from incvec.errors import CheckpointError, ConfigError, DataError
from incvec.methods import find_method
from incvec.presets import resolve
from incvec.records import title
from incvec.study import style
from incvec.study.geometry.states import tensors_of
from incvec.study.runs import run_command


@dataclass
class Snapshot:
    """A method with the values it had after a task, and what is needed to evaluate it."""

    config: RunConfig
    parts: RunParts
    task: Task  # the last one that its structure has grown for
    saved: Namespaces = field(default_factory=dict)  # the tensors of the file, those of add-ons included

    @property
    def method(self) -> Method:
        return self.parts.method

    @property
    def model(self) -> nn.Module:
        return self.parts.method.model

    def state(self) -> dict[str, Tensor]:
        """A copy of the tensors of the deployed model."""
        return {name: tensor.detach().clone() for name, tensor in tensors_of(self.model.state_dict()).items()}


def load_snapshot(
    run: str | Path, task: int, dataset: Dataset, grow_to: int | None = None, device: str | torch.device | None = None
) -> Snapshot:
    """Restore the method of a run as it was after `task`.

    Args:
        run: the folder of the run.
        task: counted from 0.
        dataset: the data set of the run.
        grow_to: grow the structure up to this later task. The rows of its classes get the values they had in the run
            when it grew them, before imprinting (on a device of the same type).
        device: by default that of the run.
    """
    tensors, metadata = read_snapshot(run, task)
    config = resolve(metadata["config"])
    target = pick_device(config.device if device is None else str(device))
    parts = build(config, dataset, torch.Generator(target), target)
    if parts.order != metadata["class_order"]:
        file = snapshot_path(run, task)
        raise DataError(f"{file} was made with classes or a class order that differ from those of {dataset.name}.")
    grown = metadata["grown"]
    last = grown if grow_to is None else grow_to
    if not grown <= last < len(parts.tasks):
        raise ConfigError(
            f"grow_to is {grow_to}: expected a task from {grown}, which the snapshot has grown for, to "
            f"{len(parts.tasks) - 1}, the last of the run."
        )
    with restoring(snapshot_path(run, task)):
        saved = restore(parts, tensors, metadata, config.seed, addons=False)
    for later in parts.tasks[grown + 1 : last + 1]:
        grow(parts, later, config.seed)
    parts.method.eval()
    return Snapshot(config, parts, parts.tasks[last], saved)


def task_accuracy(snapshot: Snapshot, task: int = 0) -> Callable[[nn.Module], float]:
    """A function for `path`: accuracy on the test images of one task, in percent.

    It classifies by the logits of all classes the snapshot has grown for. Class means belong to one set of weights, not
    to a line of them.
    """
    parts = snapshot.parts
    rows = parts.test.rows_of(parts.tasks[task].first, parts.tasks[task].last)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        model.eval()
        correct = torch.zeros((), device=parts.world.device)
        for part in rows.split(inference_batch_size(parts.test)):
            with parts.world.autocast():
                batch = parts.test.fetch(part, None, ("test",))
                logits = snapshot.method.class_logits(model(batch.images).logits)
            correct += (logits.argmax(1) == batch.labels).sum()
        return 100 * correct.item() / len(rows)

    return evaluate


def snapshot_path(run: str | Path, task: int) -> Path:
    return Path(run) / "snapshots" / f"task-{task:02d}.safetensors"


def snapshot_tasks(run: str | Path) -> list[int]:
    """The tasks a run has snapshots of, counted from 0. A run that started at a snapshot has none before it."""
    folder = Path(run) / "snapshots"
    if not folder.is_dir():
        check_run_folder(Path(run))
    return sorted(int(file.stem.removeprefix("task-")) for file in folder.glob("task-*.safetensors"))


def first_task(run: str | Path) -> int:
    return min(snapshot_tasks(run), default=0)


def last_task(run: str | Path) -> int:
    return max(snapshot_tasks(run), default=0)


def read_snapshot(run: str | Path, task: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of one snapshot; if there is none, the error has the command that makes it."""
    file = snapshot_path(run, task)
    if not file.exists():
        raise missing_snapshot(run, task)
    repair = f"A run writes its snapshots once: move {run} away, and train it again with the same settings."
    tensors, metadata = read_tensors(file, repair)
    check_header(metadata, file, "snapshot", repair)
    try:
        resolve(metadata["config"])
    except ConfigError as error:
        raise CheckpointError(f"{file} has settings that this version does not have: {error}") from None
    return tensors, metadata


def missing_snapshot(run: str | Path, task: int) -> ConfigError | DataError:
    available = snapshot_tasks(run)
    if not available:
        return DataError(
            f"there is no snapshot {snapshot_path(run, task)}: the run has not reached that task, or is in another "
            "folder. `incvec run` with the settings of the run makes it, such as:\n  incvec run --method podnet "
            f"--dataset digits --out {shlex.quote(str(run))}"
        )
    if task < available[0]:
        return ConfigError(
            f"there is no model after task {task + 1} in {run}: its first snapshot is that after task "
            f"{available[0] + 1}. Choose that task or a later one."
        )
    config = run_config(run)
    count = 1 if find_method(config.method).joint else config.tasks + (config.base_classes > 0)
    count = min(count, config.stop_after or count)
    if task >= count:
        return ConfigError(f"there is no task {task + 1} in {run}: it has {count}.")
    return DataError(
        f"there is no snapshot {snapshot_path(run, task)}: the run has {len(available)} snapshot(s); finish it first:"
        f"\n  {run_command(config.resolved(), run)}"
    )


def run_metadata(run: str | Path) -> dict[str, Any]:
    """The metadata of a run's first snapshot: settings, class order, fingerprint of the images."""
    return read_snapshot(run, first_task(run))[1]


def run_config(run: str | Path) -> RunConfig:
    return resolve(run_metadata(run)["config"])


def describe_run(run: Path) -> dict[str, Any]:
    """Name, method, add-ons and folder, for the JSON file of a figure."""
    config = run_config(run)
    named = {"method": config.method, "addons": list(config.addons), "oracle": config.oracle}
    return {"name": style.label(title(named)), **named, "seed": config.seed, "run": run.name}


def check_run_folder(path: Path) -> None:
    """Refuse a file of a run, its snapshots, or a folder of several runs, and name the folder of a run instead."""
    if path.exists():
        candidates = [*list(path.parents)[:2], *(inner.parent for inner in sorted(path.glob("*/snapshots")))]
        runs = [folder for folder in candidates if (folder / "snapshots").is_dir()]
        if runs or path.is_file():
            example = f", such as {runs[0]}" if runs else ""
            raise DataError(f"{path} is not the folder of a run: expected one that contains snapshots{example}.")


def require_run(run: Path, like: RunConfig, valid: Callable[[RunConfig], bool], problem: str, **changes: Any) -> None:
    """Refuse a folder without a run, or with a run that is not `valid`.

    The error has the command that makes the run needed: the configuration `like` with some fields changed.
    """
    if not snapshot_tasks(run):
        command = run_command(like.resolved(), run, **changes)
        raise DataError(f"there are no snapshots in {run}: this run was never trained. Run first:\n  {command}")
    if not valid(run_config(run)):
        raise DataError(f"{run} {problem}. Run first:\n  {run_command(like.resolved(), **changes)}")


def require_ivt(run: Path, like: RunConfig) -> None:
    addons = (*(name for name in like.addons if name != "ivt"), "ivt")
    require_run(run, like, lambda c: "ivt" in c.addons, "was trained without the add-on ivt", addons=addons)


def check_runs(runs: Sequence[Path], oracle: Path | None, one_seed: bool = False) -> list[Path]:
    """All runs, the oracle last; refuses runs whose parameters cannot be compared.

    `one_seed` also refuses runs of several seeds, which did not start at the same model.
    """
    if not runs:
        raise ConfigError("no run was given: name the folder of one, such as runs/digits-podnet-3-s0.")
    if oracle is not None:
        problem = "is not an oracle: it was trained without the images of the past"
        require_run(oracle, run_config(runs[0]), lambda c: c.oracle, problem, oracle=True, addons=())
    everyone = [*runs, *([oracle] if oracle is not None and oracle not in runs else [])]
    for other in everyone[1:]:
        check_comparable(everyone[0], other, one_seed)
    return everyone


def check_comparable(run: Path, other: Path, one_seed: bool) -> None:
    metadata = run_metadata(run), run_metadata(other)
    first, second = (resolve(each["config"]) for each in metadata)
    properties: dict[str, tuple[Any, ...]] = {
        "method": (first.method, second.method),
        "network": tuple(config.sections[config.method].get("net") for config in (first, second)),
        "class order": tuple(each["class_order"] for each in metadata),
        "number of base classes": (first.base_classes, second.base_classes),
        "number of tasks": (first.tasks, second.tasks),
        "images": tuple(each["fingerprint"] for each in metadata),
        "seeds": (first.seed, second.seed) if one_seed else (),
    }
    for name, values in properties.items():
        if len(set(map(str, values))) > 1:
            text = "" if name in ("class order", "images") else f" ({values[0]} and {values[1]})"
            reason = "their parameters cannot be compared."
            if name == "seeds":
                reason = "they did not start at the same model. Use runs of one seed, or --start own for paths."
            seed = first.seed if one_seed else second.seed
            command = run_command(first.resolved(), addons=second.addons, oracle=second.oracle, seed=seed)
            raise DataError(f"{run} and {other} differ in their {name}{text}: {reason} Run first:\n  {command}")
