"""A network trained elsewhere, with its classifier and class names, becomes the first task of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from incvec.classifier.folder import Description, ModelFolder
from incvec.classifier.learning import Learning, make_draft
from incvec.classifier.past import give_past
from incvec.classifier.photos import Progress, check_case, list_photos
from incvec.classifier.settings import Settings, resolve_sections
from incvec.classifier.training import NewPhotos, Trained, load_new, make_config, make_dataset
from incvec.engine.build import build, grow, pick_device
from incvec.engine.checkpoint import live_tensors
from incvec.errors import ConfigError, DataError, nearest
from incvec.nets import LinearHead
from incvec.nets.pretrained import copy_state, read_state, split_checkpoint
from incvec.text_files import read_text

CONTINUED = ("ivt", "eopc")  # add-ons that need no training of the first classes
NEED_NO_PHOTOS = ("lwf", "finetune")  # methods that store nothing but weights after a task


def read_names(file: str | Path) -> tuple[str, ...]:
    """Class names from a text file, one per line; empty lines are ignored."""
    return tuple(line.strip() for line in read_text(Path(file).expanduser()).splitlines() if line.strip())


def check_names(classes: tuple[str, ...]) -> None:
    if len(classes) < 2:
        raise DataError(f"{len(classes)} class name(s) were given: expected 2 or more.")
    repeated = next((name for name in classes if classes.count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"the class name {repeated!r} was given twice: expected one for each row of the classifier.")
    check_case(classes)


def adopt(
    folder: ModelFolder,
    settings: Settings,
    checkpoint: Path,
    classes: tuple[str, ...],
    photos: Path | None,
    device: str,
    progress: Progress | None,
) -> Description:
    """Write a model folder whose lock is held. Nothing is trained."""
    check_names(classes)
    if photos is None and settings.method not in NEED_NO_PHOTOS:
        raise ConfigError(
            f"the method {settings.method!r} needs photos of the checkpoint's classes: give --photos, or a method that "
            f"needs none: {', '.join(NEED_NO_PHOTOS)}."
        )
    learning = Learning(folder, settings, None, device, progress)
    draft = make_draft(settings, None, classes, (len(classes),), resolve_sections(settings))
    for addon in settings.addons:
        if addon not in CONTINUED:
            raise ConfigError(
                f"the add-on {addon!r} needs what it measures when the first classes are trained, and this network was "
                f"trained elsewhere; use {' or '.join(CONTINUED)}, or none."
            )
    new = load_known(draft, photos, progress)
    dataset, rows = make_dataset(settings, classes, 0, new, [])
    target = pick_device(device)
    parts = build(make_config(settings, draft, device), dataset, torch.Generator(target), target)
    method: Any = parts.method
    grow(parts, parts.tasks[0], settings.seed)
    load_checkpoint(method.model, settings, checkpoint, classes)
    if len(new.labels):
        labelled = torch.arange(len(rows), device=target)
        give_past(parts.addons, method, labelled, labelled=True)
        method.end_task(parts.tasks[0])
        method.begin_evaluation(parts.tasks[0])
    scores = method.eval()(torch.zeros(1, *parts.world.image_shape, device=target))
    meta = {"position": [1, 0, 0], "grown": 0, "progress": {"correct": {name: [[0] * len(classes)] for name in scores}}}
    trained = Trained(live_tensors(parts, None, addons=len(new.labels) > 0), meta, rows)
    draft = draft.model_copy(update={"has_past": len(new.labels) > 0})
    return learning.finish(draft, checkpoint.name, classes, {}, new, trained, [], [])


def load_known(draft: Description, photos: Path | None, progress: Progress | None) -> NewPhotos:
    """The photos of the checkpoint's classes, none if they are gone."""
    side = draft.preprocessing.stored
    if photos is None:
        squares, labels = torch.zeros(0, 3, side, side, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
        return NewPhotos(squares, labels, squares, labels)
    listed = list_photos(photos, at_least=2)
    unknown = [name for name in listed.classes if name not in draft.classes]
    missing = [name for name in draft.classes if name not in listed.classes]
    if unknown or missing:
        wrong = f"has a folder {unknown[0]!r}" if unknown else f"has no folder {missing[0]!r}"
        hint = nearest(unknown[0], draft.classes) if unknown else ""
        raise DataError(
            f"{photos} {wrong}: expected one folder for each of the {len(draft.classes)} class names, and no "
            f"other.{hint}"
        )
    return load_new(listed, draft.classes, 0, side, draft.check, progress)


def load_checkpoint(model: Any, settings: Settings, checkpoint: Path, classes: tuple[str, ...]) -> None:
    """Copy the checkpoint's backbone and classifier into a model of one task."""
    if not isinstance(model.head, LinearHead) or model.head.rows_per_class > 1:
        raise ConfigError(
            f"the method {settings.method!r} does not classify with one linear row per class, as a checkpoint does; "
            "use lda, replay, icarl, lwf or finetune."
        )
    width = model.backbone.width
    backbone, weight, bias = split_checkpoint(settings.backbone, checkpoint, read_state(checkpoint), width)
    if len(weight) != len(classes):
        raise DataError(
            f"{checkpoint} has a classifier of {len(weight)} classes, but {len(classes)} class names were given: "
            "expected one name for each row of its last layer, in order."
        )
    copy_state(model.backbone, backbone)
    if model.head.width == width:  # otherwise the head is computed from photos
        model.head.set_block(0, weight, torch.zeros(len(weight)) if bias is None else bias)
