"""A model folder from a snapshot of the lab: its model predicts, is evaluated and exported without its data set."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from incvec.atomic_files import read_tensors
from incvec.classifier.folder import Description, Learned, ModelFolder, Preprocessing
from incvec.errors import CheckpointError, ConfigError
from incvec.methods import find_method


def folder_from_snapshot(snapshot: Path, out: Path) -> Description:
    """Write the model of a snapshot, RUN/snapshots/task-NN.safetensors, as a model folder.

    It has the classes and the state of the add-ons, and can learn more if its method needs no exemplars: those of a
    snapshot are row numbers of the data set, and are left out.
    """
    tensors, meta = read_tensors(snapshot)
    if meta.get("kind") != "snapshot":
        raise CheckpointError(
            f"{snapshot} is a {meta.get('kind')}, not a snapshot: give RUN/snapshots/task-NN.safetensors."
        )
    if "classes" not in meta:
        raise CheckpointError(
            f"{snapshot} was written by an earlier version, without class names and preprocessing. Train the run "
            "again, or load it with its data set: incvec.study.geometry.load_snapshot."
        )
    config = meta["config"]
    method = config["method"]
    if find_method(method).pretrained or find_method(method).joint:
        raise ConfigError(f"{snapshot} is of {method}; a model folder has a backbone with a classifier of its own.")
    sizes = tuple(meta["task_sizes"][: meta["grown"] + 1])
    classes = tuple(meta["classes"][: sum(sizes)])
    folder = ModelFolder(out)
    if folder.exists():
        raise ConfigError(f"{out} has a classifier already. Choose another folder with --out.")
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    source = f"{snapshot.parent.parent.name}/{snapshot.name}"
    learned = [
        Learned(when=when, source=source, classes=classes[first : first + size], photos=0, seconds=0.0)
        for first, size in zip(firsts, sizes, strict=True)
    ]
    none = (0,) * len(classes)
    description = Description(
        version=1,
        classes=classes,
        task_sizes=sizes,
        preprocessing=Preprocessing(**meta["preprocessing"]),
        backbone=config[method]["net"],
        method=method,
        addons=tuple(config["addons"]),
        sections={name: config[name] for name in (method, *config["addons"])},
        memory=0,
        check=0,
        seed=config["seed"],
        history=tuple(learned),
        remembered=none,
        checked=none,
        weights_file="weights-1.safetensors",
        photos_file=None,
    )
    kept = {name: tensor for name, tensor in tensors.items() if name != "store/memory"}
    # Accuracies of the run are those of its data set: what is learned later is measured on other photos.
    ends = [first + size for first, size in zip(firsts, sizes, strict=True)]
    correct = {name: [[0] * end for end in ends] for name in meta["progress"]["correct"]}
    saved = {key: meta[key] for key in ("position", "grown")} | {"progress": {"correct": correct}, "kind": "model"}
    with folder.lock:
        folder.commit(description, kept, saved, [], [])
    return description
