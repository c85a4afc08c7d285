"""What is in a run's files, which files a run may go on from, and when the next one is due.

A checkpoint, a shared base and a snapshot are the same kind of file: flat tensors whose names begin with a room
(`method/`, `store/`, `addon/NAME/`, `fisher/`, `loop/`), and JSON that says where in the run they were taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.atomic_files import Writer, read_tensors, write_tensors
from incvec.config import RunConfig, differences
from incvec.data import Dataset
from incvec.data.stream import split
from incvec.engine import events as ev
from incvec.engine.build import Parts, code_version
from incvec.engine.stage import StageLoop
from incvec.errors import CheckpointError

SAVING_SHARE = 20  # a checkpoint is due once 20 times the last write's duration has passed

Position = tuple[int, int, int]  # task, stage, epoch


# What is in a file ------------------------------------------------------------------------------------------


def live_tensors(
    parts: Parts, fisher: Mapping[str, Tensor] | None, loop: StageLoop | None, addons: bool = True
) -> dict[str, Tensor]:
    """Every live tensor needed to go on; the names never clash."""
    method = parts.method
    found = {f"method/{name}": tensor for name, tensor in method.state_dict(keep_vars=False).items()}
    found |= {f"store/{name}": tensor for name, tensor in method.store.items()}
    if addons:
        for addon in parts.addons:
            found |= {f"addon/{addon.name}/{name}": tensor for name, tensor in addon.state().items()}
    if fisher is not None:
        found |= {f"fisher/{name}": tensor for name, tensor in fisher.items()}
    if loop is not None:
        found |= {f"loop/{name}": tensor for name, tensor in loop.state().items()}
    return found


def snapshot_of(parts: Parts) -> dict[str, Tensor]:
    """A task's model, with what a run needs to begin there: no teacher, no optimizer."""
    tensors = live_tensors(parts, None, None, addons=False)
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith("method/teacher.")}
    for addon in parts.addons:
        found |= {f"addon/{addon.name}/{name}": tensor for name, tensor in addon.snapshot().items()}
    return found


def trained_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot's tensors with the weights that were trained in the place of those that were deployed."""
    plain = {name: tensor for name, tensor in tensors.items() if not name.startswith("trained/")}
    trained = {name.removeprefix("trained/"): t for name, t in tensors.items() if name.startswith("trained/")}
    return plain | {f"method/model.{name}": tensor for name, tensor in trained.items()}


def describe(
    kind: str, position: Position, config: RunConfig, dataset: Dataset, parts: Parts, progress: Mapping[str, Any]
) -> dict[str, Any]:
    """Where in which run the tensors were taken."""
    task, stage, epoch = position
    return {
        "kind": kind,
        "position": list(position),
        "grown": task - 1 if (stage, epoch) == (0, 0) else task,
        "config": config.resolved(),
        "class_order": parts.order,
        "fingerprint": dataset.fingerprint,
        "code": code_version(config.method),
        "progress": dict(progress),
        "engine": parts.engine,
        "precision": parts.precision,
    }


def taken_over(config: RunConfig, meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a run says of another's snapshot once it is its own beginning."""
    return {key: meta[key] for key in meta if key not in ("format", "hashes")} | {"config": config.resolved()}


# Which files a run may go on from ---------------------------------------------------------------------------


def check_config(config: RunConfig, saved: Mapping[str, Any], where: Path) -> None:
    rows = differences(config.resolved(), saved)
    if rows:
        raise CheckpointError(
            f"{where} belongs to another configuration ({'; '.join(rows[:6])}). Choose another --out, or "
            "give the settings it was made with."
        )


def check_images(dataset: Dataset, saved: str, where: Path) -> None:
    if saved != dataset.fingerprint:
        raise CheckpointError(
            f"{where} was made with other images of {dataset.name} (their fingerprint begins with {saved[:8]}) than "
            f"are given ({dataset.fingerprint[:8]}). Give the data root it was made with, or choose another --out to "
            "train on these."
        )


def check_checkpoint(config: RunConfig, dataset: Dataset, meta: Mapping[str, Any], where: Path) -> str:
    """Refuse a checkpoint of another run; returns what is worth saying about one that is accepted."""
    if meta.get("kind") != "checkpoint":
        raise CheckpointError(f"{where} is no checkpoint but a {meta.get('kind')}; move it away to start anew.")
    check_config(config, meta["config"], where)
    check_images(dataset, meta["fingerprint"], where)
    if meta["code"] != code_version(config.method):
        return "the program has changed since the checkpoint this run goes on from"
    return ""


def read_start(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The snapshot that `start` names."""
    try:
        return read_tensors(path)
    except CheckpointError as error:
        why = "it is damaged, or no file of ours" if path.is_file() else "there is no such file"
        raise CheckpointError(
            f"start={path} cannot be begun at: {why}. Give a snapshot of a run, RUN/snapshots/task-NN.safetensors, "
            "or leave start out."
        ) from error


def check_start(
    config: RunConfig, dataset: Dataset, parts: Parts, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """A run may begin at another's snapshot where both have the same past: network, classes, add-ons."""
    where = f"{config.start} cannot be begun at"
    if meta.get("kind") != "snapshot":
        raise CheckpointError(f"{where}: it is not a snapshot of a task.")
    grown = meta["grown"]
    if grown + 1 >= len(parts.tasks):
        raise CheckpointError(
            f"{where}: it is of task {grown + 1}, this run ends after task {len(parts.tasks)}, so nothing is left to "
            "train. Begin at an earlier task's snapshot."
        )
    other, seen = meta["config"], parts.tasks[grown].n_seen
    net, method = config.sections[config.method].get("net"), config.method
    if (other["method"], other.get(other["method"], {}).get("net")) != (method, net):
        raise CheckpointError(f"{where}: it is of {other['method']}, this run is {method} with {net}.")
    if meta["class_order"][:seen] != parts.order[:seen] or meta["fingerprint"] != dataset.fingerprint:
        raise CheckpointError(f"{where}: its classes so far, or their images, are not this run's.")
    theirs = [task.n_new for task in split(len(meta["class_order"]), other["base_classes"], other["tasks"])]
    ours = [task.n_new for task in parts.tasks]
    if theirs[: grown + 1] != ours[: grown + 1]:
        raise CheckpointError(
            f"{where}: its tasks so far have {theirs[: grown + 1]} classes, this run's {ours[: grown + 1]}. Give "
            f"base_classes={other['base_classes']} and tasks of the same size."
        )
    lacking = [name for name in config.addons if name not in other["addons"]]
    if lacking:
        raise CheckpointError(
            f"{where}: its run had no add-on {', '.join(lacking)}, whose memory of the tasks so far is missing. "
            f"Begin at a snapshot of a run with {', '.join(config.addons)}."
        )
    kept = {name.split("/")[1] for name in tensors if name.startswith("addon/")}
    bare = [addon.name for addon in parts.addons if addon.state() and addon.name not in kept]
    if bare:
        raise CheckpointError(
            f"{where}: what {bare[0]} remembers of the tasks so far was not kept in it. Train that run with "
            f"--set {bare[0]}.snapshot_fisher=true."
        )


def check_finished(config: RunConfig, dataset: Dataset | None, record: Mapping[str, Any], where: Path) -> None:
    """A record is the run's own; `start` is not among its settings where it began at its own base.

    Which images it was made with is asked where there is a data set to compare with.
    """
    saved, base = dict(record.get("config", {})), record.get("base", {})
    if base.get("shared") and base.get("snapshot") == config.start:
        saved["start"] = config.start
    check_config(config, saved, where)
    if dataset is not None and "data_fingerprint" in record:  # early ones lack it
        check_images(dataset, record["data_fingerprint"], where)


def is_own_base(config: RunConfig, parts: Parts, meta: Mapping[str, Any]) -> bool:
    """Whether a snapshot holds the base task that the run would train itself, so that it is as good as a shared one.

    The program may have changed in between: whoever names a snapshot answers for that, and the record tells of it.
    """
    other, own = meta["config"], config.resolved()
    free = {"addons", "oracle", "tasks", "start", "device", "engine", "stop_after", "snapshots"}  # not the base's
    same = {key: own[key] for key in own if key not in free} == {key: other[key] for key in other if key not in free}
    way = (meta["engine"], meta.get("precision", parts.precision)) == (parts.engine, parts.precision)
    return meta["grown"] == 0 and not other["addons"] and same and way  # an add-on may act at the end of the base


# When the next one is due -----------------------------------------------------------------------------------


class Saver:
    """Writes one run's checkpoint: on a GPU in a thread, elsewhere at once; about a twentieth of the time at most."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self.queued = device.type == "cuda"
        self.writer = Writer()
        self._last = (0.0, 0.0)  # when, and how long it took

    def due(self) -> bool:
        if self.queued:
            writer = self.writer
            return not writer.busy() and time.monotonic() - writer.finished > SAVING_SHARE * writer.took
        when, took = self._last
        return time.monotonic() - when > SAVING_SHARE * took

    def save(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> ev.Saved:
        began = time.monotonic()
        if self.queued:
            self.writer.submit(self.path, tensors, meta)
        else:
            write_tensors(self.path, tensors, meta)
        now = time.monotonic()
        self._last = (now, now - began)
        return ev.Saved(str(self.path), now - began)

    def wait(self) -> None:
        """Until nothing is being written; raises what a write raised."""
        self.writer.wait()
