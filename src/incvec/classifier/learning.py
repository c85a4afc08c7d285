"""One `learn`: photos in, training, what is kept and how accurate it is, then a commit.

The model folder changes in one step at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.calibration import fit_temperature
from incvec.classifier.folder import Description, Learned, ModelFolder, Photos, decode, encode
from incvec.classifier.network import Network, build_network, in_batches
from incvec.classifier.photos import Progress, check_new, list_photos
from incvec.classifier.settings import Settings, resolve_sections
from incvec.classifier.training import NewPhotos, Trained, Weights, load_new, train
from incvec.contracts import Method
from incvec.data.source import ImageSource
from incvec.data.views import ResizedViews
from incvec.engine import events as ev
from incvec.engine.build import pick_device
from incvec.errors import ConfigError
from incvec.methods import find_method


class Learning:
    """One `learn` into a folder whose lock is held."""

    def __init__(
        self,
        folder: ModelFolder,
        settings: Settings,
        before: Description | None,
        device: str = "auto",
        progress: Progress | None = None,
        listen: Callable[[ev.Event], None] | None = None,
    ) -> None:
        self.folder, self.settings, self.before = folder, settings, before
        self.device, self.progress, self.listen = device, progress, listen
        self.kind: type[Method] = find_method(settings.method)
        self.began = time.monotonic()

    def learn(self, root: str | Path, weights: Weights | None, more: bool = False) -> Description:
        """Learn the classes of a folder; `weights` returns those of the backbone for the first `learn`."""
        known = self.before.classes if self.before else ()
        if known and self.kind.exemplars and not self.settings.memory:
            raise ConfigError(
                f"the method {self.kind.name!r} trains on remembered photos, and {self.folder.path} has none: it was "
                "made from a snapshot. It predicts and is exported, but cannot learn more."
            )
        if self.folder.path.resolve().is_relative_to(Path(root).expanduser().resolve()):
            raise ConfigError(
                f"the model folder {self.folder.path} is within the folder of the photos, where it could be taken for "
                "a class: choose another."
            )
        photos = list_photos(root, at_least=1 if known else 2)
        check_new(photos, known, more)
        again = [name for name in photos.classes if name in known]
        if again and not hasattr(self.kind, "update"):
            raise ConfigError(
                f"the method {self.kind.name!r} cannot learn more photos of known classes ({again[0]!r}); `lda` can."
            )
        added = [name for name in photos.classes if name not in known]
        s = self.settings
        sections = dict(self.before.sections) if self.before else resolve_sections(s)
        sizes = self.before.task_sizes if self.before else ()
        draft = make_draft(s, self.before, (*known, *added), (*sizes, len(added)) if added else sizes, sections)
        new = load_new(photos, draft.classes, len(known), s.preprocessing.stored, s.check, self.progress)
        kept, check = self.folder.read_photos(self.before) if self.before else ([], [])
        if added:
            trained = train(
                self.folder, s, self.before, draft, new, kept, weights, self.device, self.progress, self.listen
            )
        else:
            assert self.before is not None
            trained = Trained(*self.folder.read_weights(self.before), [])
        if again:
            trained.tensors.update(add_photos(draft, trained.tensors, new, len(known)))
        extra = {name: len(photos.files[name]) for name in again}
        return self.finish(draft, photos.root.name, added, extra, new, trained, kept, check)

    def finish(
        self,
        draft: Description,
        source: str,
        added: Sequence[str],
        more: dict[str, int],
        new: NewPhotos,
        trained: Trained,
        kept: Photos,
        check: Photos,
    ) -> Description:
        """Choose what is remembered, measure accuracy on the check photos, and commit."""
        s, classes = self.settings, draft.classes
        network = build_network(draft, trained.tensors, pick_device(self.device))
        if "store/memory" in trained.tensors and trained.rows:
            kept = trained.remembered(new, encode)
        kept = [*kept, *([] for _ in range(len(classes) - len(kept)))]
        check = [*check, *([] for _ in range(len(classes) - len(check)))]
        squares, labels = list(new.check_squares), new.check_labels.tolist()
        if s.keeps_photos:
            for square, label in zip(squares, labels, strict=True):
                check[label] = [*check[label], encode(square)]
            squares = [decode(photo) for own in check for photo in own]  # as they will be after later `learn`s
            labels = [label for label, own in enumerate(check) for _ in own]
        accuracy, temperature = measure(network, draft, squares, labels, self.before)
        entry = Learned(
            when=datetime.now().astimezone().isoformat(timespec="seconds"),
            source=source,
            classes=tuple(added),
            photos=new.count,
            check=accuracy,
            more=more,
            seconds=round(time.monotonic() - self.began, 1),
        )
        changes: dict[str, Any] = {"history": (*draft.history, entry), "temperature": temperature}
        changes |= {"remembered": tuple(map(len, kept)), "checked": tuple(map(len, check))}
        if any(map(len, (*kept, *check))):
            changes["photos_file"] = f"photos-{draft.version}.zip"
        description = draft.model_copy(update=changes)
        saved = {key: trained.meta[key] for key in ("position", "grown", "progress")} | {"kind": "model"}
        self.folder.commit(description, trained.tensors, saved, kept, check)
        return description


def make_draft(
    settings: Settings,
    before: Description | None,
    classes: tuple[str, ...],
    sizes: tuple[int, ...],
    sections: Mapping[str, dict[str, Any]],
) -> Description:
    """The description of the next version, without what is measured and kept."""
    s, version = settings, 1 if before is None else before.version + 1
    return Description(
        version=version,
        classes=classes,
        task_sizes=sizes,
        preprocessing=s.preprocessing,
        backbone=s.backbone,
        method=s.method,
        addons=s.addons,
        sections=dict(sections),
        memory=s.memory,
        check=s.check,
        keeps_photos=s.keeps_photos,
        seed=s.seed,
        history=before.history if before else (),
        remembered=(0,) * len(classes),
        checked=(0,) * len(classes),
        weights_file=f"weights-{version}.safetensors",
        photos_file=None,
        previous=None if before is None else before.model_copy(update={"previous": None}).model_dump(mode="json"),
    )


def measure(
    network: Network, draft: Description, squares: Sequence[Tensor], labels: Sequence[int], before: Description | None
) -> tuple[dict[str, tuple[int, int]], float]:
    """Correct and total check photos by class, and the temperature that calibrates the probabilities on them.

    Without check photos of earlier `learn`s, which are not kept with `--memory 0`, the temperature stays: on the new
    classes alone the network is more often right than on all.
    """
    temperature = before.temperature if before else 1.0
    if not squares:
        return {}, temperature
    scores = in_batches(network.scores, torch.stack(list(squares)), draft.preprocessing, network.mean.device)
    result: dict[str, tuple[int, int]] = {}
    for guess, label in zip(scores.argmax(1).tolist(), labels, strict=True):
        correct, total = result.get(draft.classes[label], (0, 0))
        result[draft.classes[label]] = (correct + (guess == label), total + 1)
    every_learn = all(any(name in result for name in entry.classes) for entry in draft.history if entry.classes)
    return result, fit_temperature(scores, torch.tensor(labels), temperature) if every_learn else temperature


def add_photos(draft: Description, tensors: Mapping[str, Tensor], new: NewPhotos, known: int) -> dict[str, Tensor]:
    """The tensors that change when a method with class statistics sees more photos of classes that it knows."""
    method: Any = build_network(draft, tensors, torch.device("cpu")).method
    p = draft.preprocessing
    views = ResizedViews(p.stored, p.side, True, 0.0, p.mean, p.std)
    method.world.sources = {"train": ImageSource(new.squares, new.labels, views)}
    method.update((new.labels < known).nonzero().flatten(), len(draft.classes))
    updated = {f"method/{name}": tensor for name, tensor in method.state_dict().items()}
    return updated | {f"store/{name}": tensor for name, tensor in method.store.items()}
