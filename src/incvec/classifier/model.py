"""`Classifier`: fit, learn, predict, score, undo. Every classifier lives in a model folder."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from incvec.classifier.evaluation import Evaluation, make_evaluation
from incvec.classifier.export import SUFFIXES, example, export_network
from incvec.classifier.folder import Description, ModelFolder, decode
from incvec.classifier.network import BATCH, Network, build_network, in_batches, to_pixels
from incvec.classifier.photos import Progress, is_single, list_images, list_photos, load_squares, to_square
from incvec.classifier.settings import CHECK, Settings, choose
from incvec.engine.build import pick_device
from incvec.errors import ConfigError, DataError, check_out, nearest
from incvec.nets import check_backbone
from incvec.nets.pretrained import DEFAULT, is_external, load_weights

METHOD = "lda"
WITHOUT_PHOTOS = "lwf"  # for a network whose photos are gone


class Classifier:
    """An image classifier that learns new classes without the photos of the old ones.

    `Classifier.fit(photos)` trains one, `Classifier.load(folder)` opens one. `learn` adds classes and saves the result
    in the classifier's folder. Images are given as paths, PIL images, arrays [H, W, 3] or tensors [3, H, W], alone or
    several in a list; a folder stands for all photos in it.
    """

    def __init__(self, folder: ModelFolder, device: str = "auto") -> None:
        self.folder, self.device = folder, device
        self.description: Description = folder.read()
        self._network: Network | None = None

    def __repr__(self) -> str:
        return f"Classifier({str(self.path)!r}: {len(self.description.classes)} classes, {self.description.method})"

    @property
    def path(self) -> Path:
        """The model folder."""
        return self.folder.path

    @property
    def classes_(self) -> np.ndarray[Any, Any]:
        """The class names, in the order of the columns of `predict_proba`."""
        return np.array(self.description.classes)

    # Making one -----------------------------------------------------------------------------------------

    @classmethod
    def load(cls, folder: str | Path, device: str = "auto") -> Self:
        """The classifier in a model folder."""
        return cls(ModelFolder(folder), device)

    @classmethod
    def fit(
        cls,
        photos: str | Path,
        out: str | Path | None = None,
        *,
        backbone: str = DEFAULT,
        weights: str | Path | None = None,
        method: str = METHOD,
        addons: Sequence[str] = (),
        memory: int | None = None,
        check: int = CHECK,
        side: int | None = None,
        seed: int = 0,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        device: str = "auto",
        progress: Progress | None = None,
        listen: Callable[[Any], None] | None = None,
    ) -> Self:
        """Learn the classes of a folder with one folder of photos per class, and return the classifier.

        Args:
            photos: the folder. Classes are named after the folders in it.
            out: the new model folder. None: a temporary one, removed with the object; see `save`.
            backbone: `lite0`, `timm/NAME`, `torchvision/NAME`, or a backbone of the lab, which has no weights.
            weights: a file of weights for the backbone; None: its pre-trained ones; "none": trained from scratch.
            method: how classes are learned; `incvec list methods`.
            addons: add-ons of the method, such as `ivt`.
            memory: photos remembered per class, by methods that train on them: 20 by default. 0: no photo is kept.
            check: photos per class held out of training to measure accuracy, at most one in ten.
            side: side of the network's input in pixels. None: that of the backbone.
            settings: options of the method and the add-ons, such as `{"replay": {"epochs": 5}}`.
            progress: called with what is being done, how much of it, and of how much.
            listen: called with the events of the training run.
        """
        from incvec.classifier.learning import Learning  # the engine, which predicting does not need

        check_backbone(backbone)
        scratch = str(weights) == "none" or not is_external(backbone)
        if weights is not None and str(weights) != "none" and not is_external(backbone):
            raise ConfigError(
                f"the backbone {backbone!r} has no weights to load; use lite0, timm/NAME or torchvision/NAME."
            )
        chosen = choose(backbone, method, addons, settings, memory, check, side, seed, pretrained=not scratch)
        file = None if weights is None else Path(weights).expanduser()

        def make(folder: ModelFolder) -> None:
            Learning(folder, chosen, None, device, progress, listen).learn(
                photos, None if scratch else lambda: load_weights(backbone, file)
            )

        return cls._make(out, device, make)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | Path,
        classes: Sequence[str] | str | Path,
        out: str | Path | None = None,
        *,
        backbone: str,
        photos: str | Path | None = None,
        method: str | None = None,
        addons: Sequence[str] = (),
        memory: int | None = None,
        check: int = CHECK,
        side: int | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        device: str = "auto",
        progress: Progress | None = None,
    ) -> Self:
        """A classifier from a network that was trained elsewhere: its classes count as the first `learn`.

        Args:
            checkpoint: weights of the backbone with its last linear layer; safetensors, or a state dict.
            classes: its class names, in the order of the rows of that layer; or a file with one name per line.
            out: the new model folder; None: a temporary one, removed with the classifier.
            backbone: the network's architecture, `timm/NAME` or `torchvision/NAME`.
            photos: photos of these classes, one folder per class, if they are still there. Class statistics, remembered
                photos and IVT's Fisher are then taken from them; they are not trained on.
            method: how further classes are learned: with photos any, by default the one of `fit`; without photos
                `lwf`, the default, or `finetune`.

        The others are those of `fit`.
        """
        from incvec.classifier.adoption import adopt, read_names

        names = read_names(classes) if isinstance(classes, str | Path) else tuple(classes)
        check_backbone(backbone)
        chosen = choose(
            backbone,
            method or (WITHOUT_PHOTOS if photos is None else METHOD),
            addons,
            settings,
            memory,
            check,
            side,
            seed,
            pretrained=True,
        )
        file, root = Path(checkpoint).expanduser(), None if photos is None else Path(photos)
        return cls._make(out, device, lambda folder: adopt(folder, chosen, file, names, root, device, progress))

    @classmethod
    def _make(cls, out: str | Path | None, device: str, make: Callable[[ModelFolder], object]) -> Self:
        """Write a new model folder with `make`, which is called with its lock held."""
        temporary = None if out is not None else tempfile.mkdtemp(prefix="incvec-")
        folder = ModelFolder(temporary or str(out))
        if folder.exists():
            raise ConfigError(
                f"{folder.path} has a classifier already. Add classes with --into {folder.path} "
                "(Classifier.load(...).learn), or choose another folder."
            )
        check_out(folder.path, "a classifier")
        created = not folder.path.exists() or temporary is not None
        with folder.lock:
            try:
                make(folder)
            except BaseException:
                if created:
                    folder.remove_if_empty()
                raise
        classifier = cls(folder, device)
        if temporary is not None:
            weakref.finalize(classifier, shutil.rmtree, temporary, ignore_errors=True)
        return classifier

    def learn(
        self,
        photos: str | Path,
        *,
        more: bool = False,
        progress: Progress | None = None,
        listen: Callable[[Any], None] | None = None,
    ) -> Self:
        """Learn the classes of another folder; only its photos are needed. The folder is changed at the very end.

        With `more`, the folder may have further photos of known classes.
        """
        from incvec.classifier.learning import Learning

        with self.folder.lock:
            d = self.reload().description
            Learning(self.folder, Settings.of(d), d, self.device, progress, listen).learn(photos, None, more)
        return self.reload()

    def undo(self) -> Self:
        """Go back to before the last `learn`."""
        with self.folder.lock:
            self.folder.undo()
        return self.reload()

    def reload(self) -> Self:
        """Read the folder again, after another process has changed it."""
        self.description, self._network = self.folder.read(), None
        return self

    def save(self, folder: str | Path) -> Self:
        """Copy the model folder, and continue in the copy."""
        target = Path(folder).expanduser()
        if target.exists():
            raise ConfigError(f"{target} exists already. Give a new folder.")
        names = {"model.json", *self.description.files}
        if self.description.previous is not None:
            names |= Description.model_validate(self.description.previous).files
        target.mkdir(parents=True)
        for name in sorted(names, key=lambda name: name == "model.json"):
            shutil.copyfile(self.path / name, target / name)
        self.folder = ModelFolder(target)
        return self

    # Using it -------------------------------------------------------------------------------------------

    @property
    def network(self) -> Network:
        """The deployed network: pixels from 0 to 1, [B, 3, side, side], to probabilities."""
        if self._network is None:
            tensors, _ = self.folder.read_weights(self.description)
            self._network = build_network(self.description, tensors, pick_device(self.device))
        return self._network

    def predict_proba(
        self, images: Any, progress: Progress | None = None, unreadable: dict[int, DataError] | None = None
    ) -> np.ndarray[Any, Any]:
        """Probabilities, [images, classes]; of one image, [classes].

        An image that cannot be read raises an error. With `unreadable`, the error is added there under the image's
        position, and its probabilities are NaN.
        """
        listed = list_images(images)
        probabilities = np.full((len(listed), len(self.description.classes)), np.nan, np.float32)
        for start in range(0, len(listed), BATCH):  # not all decoded at once: there may be many
            squares: dict[int, Tensor] = {}
            for position, image in enumerate(listed[start : start + BATCH], start):
                try:
                    squares[position] = to_square(image, self.description.preprocessing.stored)
                except DataError as error:
                    if unreadable is None:
                        raise
                    unreadable[position] = error
            if squares:
                probabilities[list(squares)] = self._probabilities(torch.stack(list(squares.values()))).numpy()
            if progress is not None:
                progress("predicting", min(start + BATCH, len(listed)), len(listed))
        return probabilities[0] if is_single(images) else probabilities

    def predict(self, images: Any) -> Any:
        """The most probable class of an image, or an array of them for several images."""
        probabilities = self.predict_proba(images)
        names = self.classes_[probabilities.argmax(-1)]
        return str(names) if is_single(images) else names

    def score(self, photos: str | Path) -> float:
        """The share of the photos in class folders that are recognized; every class has to be known."""
        return self.evaluate(photos).accuracy

    def evaluate(self, photos: str | Path, progress: Progress | None = None) -> Evaluation:
        """Accuracy on class folders: by class, by the `learn` that introduced it, and the confusion matrix."""
        listed, known = list_photos(photos), self.description.classes
        unknown = [name for name in listed.classes if name not in known]
        if unknown:
            raise DataError(
                f"{listed.root} has {len(unknown)} class(es) that were not learned, such as {unknown[0]!r}."
                f"{nearest(unknown[0], known)} Learn them first, or remove their folders."
            )
        files = listed.labelled(known)
        report = None if progress is None else lambda done, total: progress("reading photos", done, total)
        squares = load_squares(files, self.description.preprocessing.stored, report)
        guesses = self._probabilities(squares, progress).argmax(1)
        return make_evaluation(self.description, [label for _, label in files], guesses.numpy())

    def export(self, path: str | Path, kind: str | None = None) -> Path:
        """Write the network as ONNX (.onnx), a torch.export program (.pt2) or a state dict (.safetensors).

        The file contains labels and preprocessing. Before it is written, it is compared with the classifier on the
        remembered photos, or on noise if there are none.
        """
        target = Path(path).expanduser()
        if target.is_dir():
            raise ConfigError(f"{target} is a folder: expected the name of a file, such as {target / 'model.onnx'}.")
        kinds = {suffix: name for name, suffix in SUFFIXES.items()}
        by_ending = kinds.get(target.suffix)
        kind = kind or by_ending
        if kind is None:
            raise ConfigError(f"{target} has no known ending; expected one of {', '.join(kinds)}, or give the format.")
        if by_ending not in (None, kind):
            raise ConfigError(f"{target} has the ending of the format {by_ending}, but {kind} was given.")
        squares = self.remembered(100)
        pixels = example(self.description) if not len(squares) else to_pixels(squares, self.description.preprocessing)
        export_network(self.network, self.description, kind, target, pixels)
        self._network = None  # it may have been moved to the CPU
        return target

    def remembered(self, at_most: int) -> Tensor:
        """Some of the remembered photos, of all classes alike, as stored squares."""
        kept, check = self.folder.read_photos(self.description)
        ranked = sorted(
            (i, label, photo)
            for photos in (kept, check)
            for label, own in enumerate(photos)
            for i, photo in enumerate(own)
        )
        squares = [decode(photo) for _, _, photo in ranked[:at_most]]
        return torch.stack(squares) if squares else torch.zeros(0)

    def _probabilities(self, squares: Tensor, progress: Progress | None = None) -> Tensor:
        network = self.network
        report = None if progress is None else lambda done: progress("predicting", done, len(squares))
        return in_batches(network.forward, squares, self.description.preprocessing, network.mean.device, report)
