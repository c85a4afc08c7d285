"""The training of one `learn`: a run of the engine whose stream goes on where the model folder's ended.

The run's data set has the remembered photos of old classes and the new photos. It trains the last task only, in the
folder `learning`, from whose checkpoint an interrupted `learn` resumes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from incvec.atomic_files import read_tensors, write_bytes
from incvec.classifier.folder import Description, ModelFolder, Photos, decode
from incvec.classifier.past import give_past
from incvec.classifier.photos import ClassPhotos, Progress, load_squares
from incvec.classifier.settings import Settings
from incvec.config import RunConfig, digest, validate
from incvec.data.dataset import Dataset
from incvec.engine import events as ev
from incvec.engine.checkpoint import trained_tensors
from incvec.engine.run import Run
from incvec.engine.state import RunState
from incvec.methods import find_method
from incvec.nets.pretrained import copy_state

CHECK_FROM = 20  # photos of a class from which some are held out to measure accuracy
CHECK_SHARE = 10  # one in ten of them, at most
Weights = Callable[[], Mapping[str, Tensor]]  # loads those of a pre-trained backbone


@dataclass(frozen=True)
class NewPhotos:
    """The decoded photos of one `learn`, split into those to train on and those to check accuracy with."""

    squares: Tensor  # uint8 [N, 3, stored, stored]
    labels: Tensor
    check_squares: Tensor
    check_labels: Tensor

    @property
    def count(self) -> int:
        return len(self.labels) + len(self.check_labels)

    def fingerprint(self) -> str:
        hashed = hashlib.blake2b(digest_size=16)
        for tensor in (self.squares, self.labels, self.check_squares, self.check_labels):
            hashed.update(tensor.contiguous().numpy().tobytes())
        return hashed.hexdigest()


def load_new(
    photos: ClassPhotos, classes: Sequence[str], known: int, stored: int, check: int, progress: Progress | None
) -> NewPhotos:
    """Decode all photos. Of new classes (from `known` on) with enough of them, some are held out to check accuracy."""
    files = photos.labelled(classes)
    report = None if progress is None else lambda done, total: progress("reading photos", done, total)
    squares = load_squares(files, stored, report)
    labels = torch.tensor([label for _, label in files], dtype=torch.int64)
    held_out = torch.zeros(len(files), dtype=torch.bool)
    for label in range(known, len(classes)):
        rows = (labels == label).nonzero().flatten()
        count = min(check, len(rows) // CHECK_SHARE) if len(rows) >= CHECK_FROM else 0
        held_out[rows[torch.linspace(0, len(rows) - 1, count + 2).round().long()[1:-1]]] = True
    keep = ~held_out
    return NewPhotos(squares[keep], labels[keep], squares[held_out], labels[held_out])


class LearnRun(Run):
    """A run that starts from the weights of a model folder, or of a pre-trained backbone."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        out: Path,
        prepare: Callable[[RunState], None],
        progress: Progress | None = None,
    ) -> None:
        super().__init__(config, dataset, out)
        self.prepare, self.report = prepare, progress

    def _build(self) -> RunState:
        state = super()._build()
        cast(Any, state.parts.method).to(memory_format=torch.channels_last)
        if not self.checkpoint_path.exists():
            self.prepare(state)
        if self.report is not None:
            self._report_features(state, self.report)
        return state

    def _report_features(self, state: RunState, progress: Progress) -> None:
        """Report the images that hooks fetch outside of training, to compute features: epochs report themselves."""
        source: Any = state.parts.world.train
        fetch, total, done = source.fetch, len(source), 0

        def counted(indices: Tensor, *rest: Any) -> Any:
            nonlocal done
            batch = fetch(indices, *rest)
            if state.loop is None:
                done += len(indices)
                progress("computing features", min(done, total), total)
            return batch

        source.fetch = counted


@dataclass(frozen=True)
class Trained:
    """The snapshot of the trained task, and where each row of its data set comes from: encoded bytes of a remembered
    photo, or a row of the new photos."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    rows: list[bytes | int]

    def remembered(self, new: NewPhotos, encode: Callable[[Tensor], bytes]) -> Photos:
        """The method's exemplars by class, as encoded photos."""
        chosen = [list(dict.fromkeys(self.rows[row] for row in line)) for line in self.tensors["store/memory"].tolist()]
        return [[p if isinstance(p, bytes) else encode(new.squares[p]) for p in photos] for photos in chosen]


def train(
    folder: ModelFolder,
    settings: Settings,
    before: Description | None,
    draft: Description,
    new: NewPhotos,
    kept: Photos,
    weights: Weights | None,
    device: str,
    progress: Progress | None,
    listen: Callable[[ev.Event], None] | None,
) -> Trained:
    """Train the last task of `draft`."""
    first = len(before.classes) if before else 0
    dataset, rows = make_dataset(settings, draft.classes, first, new, kept)
    config = make_config(settings, draft, device)
    discard_other(folder, digest([config.resolved(), dataset.fingerprint, before.version if before else 0]))
    try:
        run = LearnRun(config, dataset, folder.working, lambda state: prepare(state, folder, before, weights), progress)
        for event in run.events():
            if isinstance(event, ev.Tick) and event.waiting:
                time.sleep(0.001)
            if listen is not None:
                listen(event)
    except BaseException:
        if not any(folder.working.rglob("*.safetensors")):  # nothing to resume from
            shutil.rmtree(folder.working, ignore_errors=True)
        raise
    tensors, meta = read_tensors(run.snapshot_path(len(draft.task_sizes) - 1))
    return Trained(tensors, meta, rows)


def make_config(settings: Settings, draft: Description, device: str) -> RunConfig:
    """A `learn` takes a few hundred steps, so nothing is compiled. Frozen features are computed in float32, as the
    deployed network computes them."""
    given: dict[str, Any] = {"method": settings.method, "addons": settings.addons, "dataset": "folder"}
    given |= {"task_sizes": draft.task_sizes, "order_seed": None, "seed": settings.seed, "device": device}
    given |= {"engine": "eager", "precision": "auto" if find_method(settings.method).trains else "fp32"}
    config: RunConfig = validate(RunConfig, {**given, "sections": draft.sections})
    return config


def make_dataset(
    settings: Settings, classes: tuple[str, ...], first: int, new: NewPhotos, kept: Photos
) -> tuple[Dataset, list[bytes | int]]:
    """Remembered photos and those of new classes as a data set, and where each row comes from.

    A class with fewer photos than are to be remembered has some of them twice: the exemplar memory is a rectangle.
    """
    rows: list[bytes | int] = []
    labels: list[int] = []
    memory = settings.memory if find_method(settings.method).exemplars else 0
    for label, photos in enumerate(kept if memory else ()):
        rows += [photos[i % len(photos)] for i in range(memory)]
        labels += [label] * memory
    for label in range(first, len(classes)):
        own = (new.labels == label).nonzero().flatten().tolist()
        repeated = [own[i % len(own)] for i in range(max(len(own), memory))]
        rows += repeated
        labels += [label] * len(repeated)
    squares = [decode(row) if isinstance(row, bytes) else new.squares[row] for row in rows]
    p = settings.preprocessing
    blank = torch.zeros(3, p.stored, p.stored, dtype=torch.uint8)
    missing = sorted(set(range(len(classes))) - set(labels))  # old classes of methods without remembered photos
    dataset = Dataset(
        name="photos",
        train_images=torch.stack([*squares, *(blank for _ in missing)]),
        train_labels=torch.tensor([*labels, *missing], dtype=torch.int64),
        # A run evaluates after each task. The check photos are evaluated afterwards, by the deployed network.
        test_images=blank.expand(len(classes), -1, -1, -1),
        test_labels=torch.arange(len(classes)),
        class_names=classes,
        pad=0,
        flip=True,
        fingerprint=new.fingerprint(),
        normalizations={"default": (p.mean, p.std)},
        side=p.side,
    )
    return dataset, rows


def discard_other(folder: ModelFolder, plan: str) -> None:
    """Keep an interrupted `learn` of the same photos with the same settings, and remove any other."""
    file = folder.working / "plan.json"
    try:
        same = json.loads(file.read_text())["plan"] == plan
    except (OSError, ValueError, KeyError):
        same = False
    if not same:
        shutil.rmtree(folder.working, ignore_errors=True)
        write_bytes(file, json.dumps({"plan": plan}).encode())


def prepare(state: RunState, folder: ModelFolder, before: Description | None, weights: Weights | None) -> None:
    """Load the version before, or the backbone's pre-trained weights."""
    if before is None:
        if weights is not None:
            copy_state(state.parts.method.model.get_submodule("backbone"), weights())
        return
    tensors, meta = folder.read_weights(before)
    tensors = trained_tensors(tensors)
    if "store/memory" in tensors:
        n, m = tensors["store/memory"].shape
        tensors["store/memory"] = torch.arange(n * m).view(n, m)  # the first rows of the data set
    if before.has_past:
        state.load(tensors, meta)
    else:
        state.load(tensors, meta, addons=False)
        new = (state.parts.world.train.labels >= len(before.classes)).nonzero().flatten()
        state.reseed("past")
        give_past(state.parts.addons, state.parts.method, new, labelled=False)
