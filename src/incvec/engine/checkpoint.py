"""Checkpoints: what a saved file contains, and how a run is restored from it.

A checkpoint, a shared base and a snapshot have the same format: flat tensors with namespaced names (`method/`,
`store/`, `addon/NAME/`, `fisher/`, `loop/`), and JSON with the position in the run at which they were saved. To restore
one, the structure is grown task by task as the run grew it, then the values are copied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from incvec.atomic_files import START_AGAIN, check_fits, read_tensors
from incvec.config import RunConfig, differences, first_problem
from incvec.data import Dataset
from incvec.data.stream import split
from incvec.engine.build import RunParts, grow
from incvec.engine.code_version import code_version
from incvec.engine.device_errors import is_out_of_memory
from incvec.engine.loop import StageLoop
from incvec.engine.record import Progress
from incvec.errors import CheckpointError, shorten
from incvec.presets import complete_settings

REMOVE_BASE = "Remove it: the next run trains the base task again."

Namespaces = dict[str, dict[str, Tensor]]


class Position(NamedTuple):
    """A point in a run: everything before it is done.

    At epoch 0 the stage's begin hooks have not run; at stage 0, epoch 0 the task has not begun.
    """

    task: int = 0
    stage: int = 0
    epoch: int = 0


# The contents of a file -------------------------------------------------------------------------------------


def live_tensors(parts: RunParts, loop: StageLoop | None, addons: bool = True) -> dict[str, Tensor]:
    """Every live tensor that a run needs to continue."""
    method = parts.method
    tensors = {f"method/{name}": tensor for name, tensor in method.state_dict(keep_vars=False).items()}
    tensors |= {f"store/{name}": tensor for name, tensor in method.store.items()}
    if addons:
        for addon in parts.addons:
            tensors |= {f"addon/{addon.name}/{name}": tensor for name, tensor in addon.state().items()}
    if parts.world.base_fisher is not None:
        tensors |= {f"fisher/{name}": tensor for name, tensor in parts.world.base_fisher.items()}
    if loop is not None:
        tensors |= {f"loop/{name}": tensor for name, tensor in loop.state().items()}
    return tensors


def snapshot_tensors(parts: RunParts, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model at the end of a task, with what a run needs to start there: no teacher, no optimizer.

    `trained` are the weights that training continues from, if an add-on deploys others.
    """
    tensors = {
        name: tensor
        for name, tensor in live_tensors(parts, None, addons=False).items()
        if not name.startswith(("method/teacher.", "fisher/"))
    }
    for addon in parts.addons:
        tensors |= {f"addon/{addon.name}/{name}": tensor for name, tensor in addon.snapshot().items()}
    return tensors | {f"trained/{name}": weight for name, weight in trained.items()}


def trained_tensors(snapshot: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot's tensors with the trained weights in place of the deployed ones."""
    plain = {name: tensor for name, tensor in snapshot.items() if not name.startswith("trained/")}
    trained = {name.removeprefix("trained/"): t for name, t in snapshot.items() if name.startswith("trained/")}
    return plain | {f"method/model.{name}": tensor for name, tensor in trained.items()}


# The header -------------------------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=0, lt=2**63)]


class SavedConfig(BaseModel):
    """The settings of a header that are read one by one. The others are compared as a whole, or resolved again."""

    model_config = ConfigDict(extra="allow", strict=True)

    method: str
    addons: list[str]
    tasks: Count
    base_classes: Count

    @model_validator(mode="after")
    def has_sections(self) -> SavedConfig:
        for name in (self.method, *self.addons):
            if not isinstance((self.model_extra or {}).get(name, {}), dict):
                raise ValueError(f"the settings of {name} are not a mapping")
        return self


class Header(BaseModel):
    """What the JSON of a checkpoint, a shared base or a snapshot has to contain."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    kind: Literal["checkpoint", "base", "snapshot"]
    position: tuple[Count, Count, Count]
    grown: Annotated[int, Field(ge=-1)]
    config: SavedConfig
    class_order: list[Count]
    fingerprint: str
    code: str
    progress: Progress
    engine: str
    precision: str = ""  # not in the first files

    @model_validator(mode="after")
    def consistent(self) -> Header:
        task, *rest = self.position
        if self.grown != task - (rest == [0, 0]):
            raise ValueError(f"grown is {self.grown}, which does not belong to position {list(self.position)}")
        if self.kind == "checkpoint" and any(len(rows) != task for rows in self.progress.correct.values()):
            raise ValueError(f"progress.correct does not have a row for each of {task} tasks")
        return self


def check_header(meta: Mapping[str, Any], path: Path, kind: str, remedy: str = START_AGAIN) -> None:
    """Refuse a file of another kind, or whose JSON is not that of a run: the hashes of such a file may be right."""
    try:
        Header.model_validate_json(json.dumps(meta))
    except ValidationError as error:
        key, given, problem = first_problem(error)
        found = f"{key} is {shorten(given)}: " if key else ""
        raise CheckpointError(f"{path} has an invalid header: {found}{problem}. {remedy}") from None
    if meta["kind"] != kind:
        raise CheckpointError(f"{path} is a {meta['kind']}, not a {kind}. {remedy}")


@contextmanager
def restoring(path: Path, remedy: str = START_AGAIN) -> Iterator[None]:
    """Raise errors that the tensors of a file cause while they are loaded as errors of that file."""
    try:
        yield
    except (KeyError, IndexError, ValueError, TypeError, RuntimeError) as error:
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            raise
        raise CheckpointError(
            f"the saved tensors of {path} cannot be restored ({type(error).__name__}: {error}): they were modified, or "
            f"written by another version. {remedy}"
        ) from error
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from error


# Restoring --------------------------------------------------------------------------------------------------


def restore(
    parts: RunParts, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], seed: int, addons: bool = True
) -> Namespaces:
    """Grow the structure that the file was written with, then copy its values. Returns all tensors by namespace."""
    for task in parts.tasks[: meta["grown"] + 1]:
        grow(parts, task, seed)
    namespaces = by_namespace(tensors)
    method, device = parts.method, parts.world.device
    copy_weights(method.name, method.state_dict(keep_vars=False), namespaces.get("method", {}))
    method.store = {name: t.to(device, copy=True) for name, t in namespaces.get("store", {}).items()}
    if addons:
        states = by_namespace(namespaces.get("addon", {}))
        for addon in parts.addons:
            state = states.get(addon.name, {})
            addon.load_state({name: tensor.to(device, copy=True) for name, tensor in state.items()})
    method.restored()
    return namespaces


def by_namespace(tensors: Mapping[str, Tensor]) -> Namespaces:
    """`namespace/rest` becomes `[namespace][rest]`."""
    namespaces: Namespaces = {}
    for name, tensor in tensors.items():
        namespace, _, rest = name.partition("/")
        namespaces.setdefault(namespace, {})[rest] = tensor
    return namespaces


def copy_weights(title: str, live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights into a method of the same structure. The teacher may be missing: snapshots have none."""
    missing = [n for n in live if n not in saved and not n.startswith("teacher.")]
    unexpected = [n for n in saved if n not in live]
    if missing or unexpected:
        raise CheckpointError(
            f"the saved weights do not fit {title}: missing {missing[:3]}, unexpected {unexpected[:3]}. "
            "They were written by another version; move them away to start again."
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            check_fits(name, tensor, live[name])
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise CheckpointError(f"saved tensor {name!r} has values that are not finite.")
            live[name].copy_(tensor)


# Which files a run may continue from ------------------------------------------------------------------------


def check_config(config: RunConfig, saved: Mapping[str, Any], path: Path) -> None:
    rows = differences(config.resolved(), complete_settings(saved))
    if rows:
        raise CheckpointError(
            f"{path} belongs to another configuration ({'; '.join(rows[:6])}). Choose another --out, or "
            "give the settings it was written with."
        )


def check_images(dataset: Dataset, saved: str, path: Path) -> None:
    if saved != dataset.fingerprint:
        raise CheckpointError(
            f"{path} was made with other images of {dataset.name} (fingerprint {saved[:8]}) than the ones given "
            f"({dataset.fingerprint[:8]}). Give the data root it was made with, or choose another --out to train on "
            "these."
        )


def check_checkpoint(config: RunConfig, dataset: Dataset, meta: Mapping[str, Any], path: Path) -> str:
    """Refuse a checkpoint of another run. Returns a notice if the code has changed since it was written."""
    check_header(meta, path, "checkpoint")
    check_config(config, meta["config"], path)
    check_images(dataset, meta["fingerprint"], path)
    if meta["code"] != code_version(config.method):
        return "the code has changed since the checkpoint that this run resumes from"
    return ""


def read_base(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The shared base in a file, whose name is the hash of what it was trained with."""
    tensors, meta = read_tensors(path, REMOVE_BASE)
    check_header(meta, path, "base", REMOVE_BASE)
    return tensors, meta


def read_start(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The snapshot that the setting `start` names."""
    try:
        return read_tensors(path)
    except CheckpointError as error:
        reason = "it is damaged or not a file of incvec" if path.is_file() else "there is no such file"
        raise CheckpointError(
            f"cannot start from start={path}: {reason}. Give a snapshot of a run, RUN/snapshots/task-NN.safetensors, "
            "or leave start out."
        ) from error


def check_start(
    config: RunConfig, dataset: Dataset, parts: RunParts, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """A run may start from another's snapshot if both have the same past: network, classes, add-ons."""
    prefix = f"cannot start from {config.start}"
    check_header(meta, Path(str(config.start)), "snapshot", "Give another snapshot, or leave start out.")
    grown = meta["grown"]
    if grown + 1 >= len(parts.tasks):
        raise CheckpointError(
            f"{prefix}: it is of task {grown + 1}, this run ends after task {len(parts.tasks)}, so nothing is left to "
            "train. Give the snapshot of an earlier task."
        )
    other, seen = meta["config"], parts.tasks[grown].n_seen
    net, method = config.sections[config.method].get("net"), config.method
    if (other["method"], other.get(other["method"], {}).get("net")) != (method, net):
        raise CheckpointError(f"{prefix}: it is of {other['method']}, this run is {method} with {net}.")
    if meta["class_order"][:seen] != parts.order[:seen] or meta["fingerprint"] != dataset.fingerprint:
        raise CheckpointError(f"{prefix}: its classes so far, or their images, differ from this run's.")
    sizes = other.get("task_sizes")
    theirs = sizes or [t.n_new for t in split(len(meta["class_order"]), other["base_classes"], other["tasks"])]
    ours = [task.n_new for task in parts.tasks]
    if theirs[: grown + 1] != ours[: grown + 1]:
        raise CheckpointError(
            f"{prefix}: its tasks so far have {theirs[: grown + 1]} classes, this run's {ours[: grown + 1]}. Give "
            f"base_classes={other['base_classes']} and tasks of the same size."
        )
    lacking = [name for name in config.addons if name not in other["addons"]]
    if lacking:
        raise CheckpointError(
            f"{prefix}: its run did not use the add-on {', '.join(lacking)}, whose state after the tasks so far is "
            f"missing. Give a snapshot of a run with {', '.join(config.addons)}."
        )
    saved = {name.split("/")[1] for name in tensors if name.startswith("addon/")}
    stateless = [addon.name for addon in parts.addons if addon.state() and addon.name not in saved]
    if stateless:
        raise CheckpointError(
            f"{prefix}: it does not contain the state of {stateless[0]}. Train that run with "
            f"--set {stateless[0]}.snapshot_fisher=true."
        )


def check_finished(config: RunConfig, dataset: Dataset | None, record: Mapping[str, Any], path: Path) -> None:
    """Refuse a record of another run. The images are compared if a data set is given.

    A run that started from its own base has no `start` in its recorded settings.
    """
    saved, base = dict(record.get("config", {})), record.get("base", {})
    if base.get("shared") and base.get("snapshot") == config.start:
        saved["start"] = config.start
    check_config(config, saved, path)
    if dataset is not None and "data_fingerprint" in record:  # the first records had none
        check_images(dataset, record["data_fingerprint"], path)


def is_own_base(config: RunConfig, parts: RunParts, meta: Mapping[str, Any]) -> bool:
    """Whether a snapshot is the base task that this run would train itself, so that it counts as a shared base.

    The code may have changed in between. The record contains the code version of the snapshot.
    """
    other, own = complete_settings(meta["config"]), config.resolved()
    irrelevant = {"addons", "oracle", "tasks", "start", "device", "engine", "stop_after", "snapshots"}
    same_config = {k: v for k, v in own.items() if k not in irrelevant} == {
        k: v for k, v in other.items() if k not in irrelevant
    }
    same_numerics = (meta["engine"], meta.get("precision", parts.precision)) == (parts.engine, parts.precision)
    # With an add-on, the end of the base task may have changed the weights.
    return meta["grown"] == 0 and not other["addons"] and same_config and same_numerics
