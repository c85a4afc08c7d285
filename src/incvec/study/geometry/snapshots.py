"""What a run had after one of its tasks, rebuilt from its snapshots, and whether two runs can be compared."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from incvec.addons.merging import class_outputs
from incvec.atomic_files import read_tensors
from incvec.config import RunConfig
from incvec.contracts import Method, Task
from incvec.data import Dataset
from incvec.data.source import chunk
from incvec.engine.build import RunParts, build, grow, pick_device
from incvec.engine.checkpoint import Namespaces, restore
from incvec.errors import CheckpointError, ConfigError, DataError
from incvec.methods import find_method
from incvec.presets import SETTINGS, resolve
from incvec.study.geometry.paths import State, tensors_of


@dataclass
class Rebuilt:
    """A method as a run had it after a task, and what is needed to evaluate it."""

    config: RunConfig
    parts: RunParts
    task: Task  # the last one its structure was grown for
    rooms: Namespaces = field(default_factory=dict)  # the snapshot's tensors, the add-ons' among them
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> Method:
        return self.parts.method

    @property
    def model(self) -> nn.Module:
        return self.parts.method.model

    def state(self) -> dict[str, Tensor]:
        """A copy of the deployed model's tensors."""
        return {name: tensor.detach().clone() for name, tensor in tensors_of(self.model.state_dict()).items()}


def snapshot_file(run: str | Path, task: int) -> Path:
    return Path(run) / "snapshots" / f"task-{task:02d}.safetensors"


def kept(run: str | Path) -> list[int]:
    """The tasks a run has snapshots of, in order, counted from 0; one that began at another's has none before it."""
    folder = Path(run) / "snapshots"
    if not folder.is_dir():
        check_folder(Path(run))
    return sorted(int(file.stem.removeprefix("task-")) for file in folder.glob("task-*.safetensors"))


def check_folder(given: Path) -> None:
    """Refuse a file of a run, its snapshots or a folder of many, which are there but are no run's folder."""
    if given.exists():
        near = [*list(given.parents)[:2], *(inner.parent for inner in sorted(given.glob("*/snapshots")))]
        runs = [folder for folder in near if (folder / "snapshots").is_dir()]
        if runs or given.is_file():
            told = f", such as {runs[0]}" if runs else ""
            raise DataError(f"{given} is not the folder of a run: the one that holds snapshots is expected{told}.")


def check_made(run: Path, wanted: str) -> None:
    """Refuse a run that is not there, with the command that makes it."""
    if not kept(run):
        raise DataError(f"there are no snapshots in {run}: that run was never made. Run first:\n  {wanted}")


def read_snapshot(run: str | Path, task: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the account of one snapshot, or a word on what makes it."""
    file = snapshot_file(run, task)
    if not file.exists():
        there = kept(run)
        if there and task < there[0]:
            raise ConfigError(
                f"there is no model after task {task + 1} in {run}: its first snapshot is that after task "
                f"{there[0] + 1}. Look at that one or a later one."
            )
        if there:
            config = run_config(run)
            if task >= task_count(config):
                raise ConfigError(f"there is no task {task + 1} in {run}: it has {task_count(config)}.")
            hint = f"the run has {len(there)} snapshot(s); finish it first:\n  {command(config, run)}"
        else:
            hint = "the run has not come to that task, or lies elsewhere. `incvec run` with the run's own settings "
            hint += f"makes it, such as:\n  incvec run --method podnet --dataset digits --out {shlex.quote(str(run))}"
        raise DataError(f"there is no snapshot {file}: {hint}")
    again = f"A run makes its snapshots once: move {run} away, and train it again with the same settings."
    tensors, meta = read_tensors(file, again)
    if meta.get("kind") != "snapshot":
        raise CheckpointError(f"{file} is a {meta.get('kind')}, not a snapshot of a task.")
    return tensors, meta


def task_count(config: RunConfig) -> int:
    """The tasks of a whole run."""
    count = 1 if find_method(config.method).joint else config.tasks + (config.base_classes > 0)
    return min(count, config.stop_after or count)


def first_task(run: str | Path) -> int:
    """The task of the run's first snapshot: 0, or that of the snapshot it began at."""
    return next(iter(kept(run)), 0)


def last_task(run: str | Path) -> int:
    """The task of the run's last snapshot, counted from 0."""
    return max(kept(run), default=0)


def first_account(run: str | Path) -> dict[str, Any]:
    """The account of a run's first snapshot: settings, class order, images."""
    return read_snapshot(run, first_task(run))[1]


def run_config(run: str | Path) -> RunConfig:
    """The settings of a run, from its first snapshot."""
    return resolve(first_account(run)["config"])


def command(config: RunConfig, out: str | Path | None = None, **changes: Any) -> str:
    """The `incvec run` that makes a run of this configuration, with some fields changed."""
    given = {key: getattr(config, key) for key in ("method", "addons", "dataset", "tasks", "seed", "oracle", "variant")}
    given |= changes
    ordinary = resolve(given)
    words = ["incvec", "run", "--method", given["method"]]
    for name in given["addons"]:
        words += ["--addon", name]
    words += ["--dataset", given["dataset"], "--tasks", str(given["tasks"]), "--seed", str(given["seed"])]
    words += ["--data-root", "DATA"] if given["dataset"] != "digits" else []  # those are embedded
    words += ["--oracle"] if given["oracle"] else []
    words += ["--variant", given["variant"]] if given["variant"] != "paper" else []
    for key in (name for name in SETTINGS if name != "variant"):
        if getattr(config, key) != getattr(ordinary, key):
            words += ["--set", f"{key}={json.dumps(getattr(config, key))}"]
    for name, section in ordinary.sections.items():
        for key, value in config.sections.get(name, section).items():
            if value != section[key]:
                words += ["--set", f"{name}.{key}={json.dumps(value)}"]
    words += ["--out", str(out)] if out is not None else []
    return shlex.join(words)


def snapshot_model(
    run: str | Path,
    task: int,
    dataset: Dataset,
    grow_to: int | None = None,
    device: str | torch.device | None = None,
) -> Rebuilt:
    """The method with the weights a run had after `task` (counted from 0).

    `run` is the run's folder. With `grow_to`, the structure is grown on for the tasks up to that one, and the
    rows of their classes have the values they had in the run when it grew them, before any imprinting (on a
    device of the same kind). `device` is the run's own unless given.
    """
    tensors, meta = read_snapshot(run, task)
    config = resolve(meta["config"])
    where = pick_device(config.device if device is None else str(device))
    parts = build(config, dataset, torch.Generator(where), where)
    if parts.order != meta["class_order"]:
        file = snapshot_file(run, task)
        raise DataError(f"{file} was made with other classes, or in another order, than {dataset.name} has.")
    last = meta["grown"] if grow_to is None else grow_to
    if not meta["grown"] <= last < len(parts.tasks):
        raise ConfigError(
            f"grow_to is {grow_to}: the snapshot has grown for task {meta['grown']}, the run's last is "
            f"{len(parts.tasks) - 1}; expected a task between them."
        )
    rooms = restore(parts, tensors, meta, config.seed, addons=False)
    for each in parts.tasks[meta["grown"] + 1 : last + 1]:
        grow(parts, each, config.seed)
    parts.method.eval()
    return Rebuilt(config, parts, parts.tasks[last], rooms, meta)


def check_same(one: Path, other: Path) -> None:
    """Refuse two runs that share no parameter space: another method, network, stream or data."""
    a, b = first_account(one), first_account(other)
    first, second = resolve(a["config"]), resolve(b["config"])
    pairs = {
        "method": (first.method, second.method),
        "network": (first.sections[first.method].get("net"), second.sections[second.method].get("net")),
        "class order": (a["class_order"], b["class_order"]),
        "number of base classes": (first.base_classes, second.base_classes),
        "number of tasks": (first.tasks, second.tasks),
        "images": (a["fingerprint"], b["fingerprint"]),
    }
    for what, (mine, theirs) in pairs.items():
        if mine != theirs:
            told = f" ({mine} and {theirs})" if not isinstance(mine, list) and what != "images" else ""
            changed: dict[str, Any] = {"addons": second.addons, "oracle": second.oracle, "seed": second.seed}
            raise DataError(
                f"{one} and {other} differ in their {what}{told}: their parameters cannot be compared. Run first:\n  "
                + command(first, **changed)
            )


def check_seeds(runs: Sequence[Path], advice: str = "") -> None:
    """Refuse runs of several seeds where all are seen from one start: the others never began there."""
    first = run_config(runs[0])
    for run in runs[1:]:
        other = run_config(run)
        if other.seed != first.seed:
            raise DataError(
                f"{runs[0]} and {run} differ in their seeds ({first.seed} and {other.seed}): they did not begin at one "
                f"model. {advice}Run first:\n  {command(other, None, seed=first.seed)}"
            )


def task_accuracy(rebuilt: Rebuilt, task: int = 0) -> Callable[[nn.Module], float]:
    """A function for `path`: percent right on the test images of one task, by the logits of all classes grown.

    Logits alone decide, since class means belong to one set of weights and not to a whole line of them.
    """
    parts = rebuilt.parts
    chosen = parts.tasks[task]
    rows = parts.test.rows_of(chosen.first, chosen.last)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        model.eval()
        right = torch.zeros((), device=parts.world.device)
        for part in rows.split(chunk(parts.test)):
            with parts.world.autocast():
                batch = parts.test.fetch(part, None, ("test",))
                logits = class_outputs(model(batch.images).logits, rebuilt.task.n_seen)
            right += (logits.argmax(1) == batch.labels).sum()
        return 100 * right.item() / len(rows)

    return evaluate


def distance(a: State, b: State, names: list[str]) -> float:
    """Euclidean distance of two states over the named tensors, in float64."""
    return float(torch.stack([(b[n].double() - a[n].double()).square().sum().cpu() for n in names]).sum().sqrt())
