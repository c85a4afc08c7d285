"""Approaches of classifier_methods.py that use features of a frozen backbone; they are computed once and cached."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from incvec.atomic_files import write_bytes
from incvec.classifier.folder import Preprocessing
from incvec.classifier.network import in_batches, stored_side
from incvec.classifier.photos import ClassPhotos, list_photos, load_squares
from incvec.data.select import class_means, herd
from incvec.methods.lda import discriminants, signed_power, stage_features
from incvec.nets import build_backbone
from incvec.nets.pretrained import copy_state, expected_input, load_weights
from incvec.records import environment

# `-stages`: the features that lda takes, of all stages, raised to its power.
FROZEN = ("lda", "lda-last", "lda-plain", "nearest-mean", "sgd", "new-only", "linear-replay", "linear-replay-stages",
          "all-linear", "all-linear-stages")  # fmt: skip
C = 0.1  # of the logistic regression, chosen with `held-out`
Score = Callable[[Tensor], Tensor]


class Features:
    """Features of the frozen default backbone for all photos, cached in a file: those of all stages, of which the first
    part are those of the backbone."""

    def __init__(self, photos: Path, backbone: str, cache: Path, side: int | None = None) -> None:
        size, mean, std = expected_input(backbone)
        size = side or size
        self.preprocessing = Preprocessing(side=size, stored=stored_side(size), mean=mean, std=std)
        self.parts = {part: list_photos(photos / part) for part in ("train", "test")}
        self.classes = self.parts["train"].classes
        names = [
            "stages",
            *(str(f) + str(f.stat().st_size) for p in self.parts.values() for own in p.files.values() for f in own),
        ]
        key = hashlib.sha256("\n".join([backbone, str(size), *names]).encode()).hexdigest()[:16]
        self.backbone, self.file = backbone, cache / f"features-{key}.pt"

    @cached_property
    def values(self) -> dict[str, Tensor]:
        if not self.file.exists():
            self.file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({part: self._compute(self.backbone, listed) for part, listed in self.parts.items()}, self.file)
        return cast(dict[str, Tensor], torch.load(self.file, weights_only=True))

    def _compute(self, backbone: str, photos: ClassPhotos) -> Tensor:
        net = cast(Any, build_backbone(backbone).eval()).to(memory_format=torch.channels_last)
        copy_state(net, load_weights(backbone))
        p = self.preprocessing
        mean, std = (torch.tensor(values)[:, None, None] for values in (p.mean, p.std))
        files = photos.labelled(self.classes)

        def features(pixels: Tensor) -> Tensor:
            return torch.cat(stage_features(net((pixels - mean) / std)), 1)

        parts = []
        for start in range(0, len(files), 256):
            parts.append(
                in_batches(features, load_squares(files[start : start + 256], p.stored), p, torch.device("cpu"))
            )
            print(f"{photos.root.name}: {min(start + 256, len(files))} of {len(files)} features", flush=True)
        return torch.cat(parts).clone()

    @cached_property
    def widths(self) -> list[int]:
        """Of the parts of the features."""
        side = self.preprocessing.side
        return [
            part.shape[1]
            for part in stage_features(build_backbone(self.backbone).eval()(torch.zeros(1, 3, side, side)))
        ]

    def count(self, part: str, order: Sequence[int]) -> int:
        return sum(len(self.parts[part].files[self.classes[c]]) for c in order)

    def get(self, part: str, order: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features of the given classes, and labels by their position in `order`."""
        labels = torch.tensor([label for _, label in self.parts[part].labelled(self.classes)])
        position = {c: i for i, c in enumerate(order)}
        rows = torch.tensor([i for i, label in enumerate(labels.tolist()) if label in position])
        return self.values[part][rows], torch.tensor([position[label] for label in labels[rows].tolist()])


# Approaches on frozen features: from the `learn`s so far to a function that scores features ---------------------


def logistic(
    features: Tensor, labels: Tensor, c: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Tensor, Tensor]:
    """Rows, biases, and the mean and standard deviation of the features, which are standardized."""
    from sklearn.linear_model import LogisticRegression

    mean, std = features.mean(0), features.std(0) + 1e-6
    model = LogisticRegression(C=c, max_iter=200).fit(((features - mean) / std).numpy(), labels.numpy())
    weight, bias = model.coef_, model.intercept_
    if len(weight) == 1:  # two classes have one row
        weight, bias = np.concatenate([-weight, weight]), np.concatenate([-bias, bias])
    return weight, bias, mean, std


def linear_score(weight: Any, bias: Any, mean: Tensor, std: Tensor) -> Score:
    w, b = torch.as_tensor(weight).float(), torch.as_tensor(bias).float()
    return lambda x: (x - mean) / std @ w.T + b


class Frozen:
    """One approach on frozen features. `learn` gets the features of new classes and returns a scoring function."""

    def __init__(
        self,
        approach: str,
        memory: int,
        seed: int,
        n_classes: int,
        widths: Sequence[int],
        power: float,
        shrinkage: float,
        c: float,
    ) -> None:
        self.memory, self.seed, self.n_classes = memory, seed, n_classes
        stages = approach == "lda" or approach.endswith("-stages")
        self.widths = list(widths) if stages else list(widths[:1])
        self.power = power if stages or approach == "lda-last" else 1.0
        self.approach = approach.removesuffix("-stages").removesuffix("-last").removesuffix("-plain")
        self.shrinkage, self.c = shrinkage, c
        self.kept: list[tuple[Tensor, Tensor]] = []  # features and labels that the approach may use later
        self.state: Any = None

    def learn(self, x: Tensor, y: Tensor) -> Score:
        def view(features: Tensor) -> Tensor:
            return signed_power(features[:, : sum(self.widths)], self.power)

        score = self._learn(view(x), y)
        return lambda z: score(view(z))

    def _learn(self, x: Tensor, y: Tensor) -> Score:
        match self.approach:
            case "lda":
                return self._lda(x.double(), y)
            case "nearest-mean":
                unit = torch.nn.functional.normalize
                new = torch.stack([unit(x[y == c], dim=1).mean(0) for c in y.unique().tolist()])
                self.state = new if self.state is None else torch.cat([self.state, new])
                means = unit(self.state, dim=1)
                return lambda z: unit(z, dim=1) @ means.T
            case "sgd":
                return self._sgd(x, y)
            case "new-only":
                weight, bias, mean, std = logistic(x, y - int(y.min()), self.c)
                rows = torch.as_tensor(weight).float() / std
                biases = torch.as_tensor(bias).float() - rows @ mean
                old = (rows[:0], biases[:0]) if self.state is None else self.state
                w, b = self.state = torch.cat([old[0], rows]), torch.cat([old[1], biases])
                return lambda z: z @ w.T + b
            case "linear-replay" | "all-linear":
                past = [(x, y), *self.kept]
                if self.approach == "all-linear":
                    self.kept.append((x, y))
                else:
                    count = min(self.memory, int(torch.bincount(y)[y.unique()].min()))
                    rows = herd(x, y, y.unique().tolist(), count).flatten()
                    self.kept.append((x[rows], y[rows]))
                return linear_score(*logistic(torch.cat([a for a, _ in past]), torch.cat([b for _, b in past]), self.c))
        raise ValueError(f"unknown approach {self.approach!r}")

    def _lda(self, x: Tensor, y: Tensor) -> Score:
        first = int(y.min())
        means = class_means(x, y - first, len(y.unique()))
        centered = x - means[y - first]
        old = (means[:0], torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype), 0)
        known, scatter, count = old if self.state is None else self.state
        known, scatter, count = torch.cat([known, means]), scatter + centered.T @ centered, count + len(x)
        self.state = known, scatter, count
        weight, bias = discriminants(known, scatter, torch.tensor(count), self.shrinkage, self.widths)
        return lambda t: t.double() @ weight.T + bias

    def _sgd(self, x: Tensor, y: Tensor) -> Score:
        from sklearn.linear_model import SGDClassifier

        if self.state is None:
            self.state = SGDClassifier(loss="log_loss", random_state=self.seed), x.mean(0), x.std(0) + 1e-6
        model, mean, std = self.state
        draw = np.random.default_rng(self.seed)
        for _ in range(5):
            order = draw.permutation(len(x))
            model.partial_fit(((x - mean) / std)[order].numpy(), y[order].numpy(), classes=np.arange(self.n_classes))
        return linear_score(model.coef_, model.intercept_, mean, std)


def measure_frozen(
    data: Features, approach: str, order: Sequence[int], sizes: Sequence[int], given: argparse.Namespace, seed: int
) -> list[list[float]]:
    """Rows of accuracies: after each `learn`, on the classes of each `learn` so far."""
    x, y = data.get("train", order)
    test_x, test_y = data.get("test", order)
    lasts = np.cumsum(sizes).tolist()
    learner = Frozen(approach, given.memory, seed, len(order), data.widths, given.power, given.shrinkage, C)
    rows = []
    for number, last in enumerate(lasts):
        new = (y >= last - sizes[number]) & (y < last)
        score = learner.learn(x[new], y[new])
        seen = test_y < last
        guess = score(test_x[seen])[:, :last].argmax(1)
        rows.append(accuracies(guess == test_y[seen], test_y[seen], lasts[: number + 1], sizes))
    return rows


def accuracies(correct: Tensor, labels: Tensor, lasts: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """In percent: of all, then of the classes of each `learn`."""
    groups = [(labels >= last - size) & (labels < last) for last, size in zip(lasts, sizes, strict=False)]
    return [100 * float(part.double().mean()) for part in (correct, *(correct[group] for group in groups))]


def held_out(given: argparse.Namespace) -> None:
    """Accuracy on four folds of the training photos, all classes at once."""
    data = Features(given.photos, given.backbone, given.cache, given.side)
    x, y = data.get("train", range(len(data.classes)))
    position = torch.cat([torch.arange(int((y == c).sum())) for c in range(len(data.classes))])
    shrinkages, constants = (0.1, 0.2, 0.3, 0.5, 0.7), (0.001, 0.01, 0.1)
    choices = [("lda-last", power, value) for power in (1.0, 0.5, 0.33) for value in shrinkages]
    choices += [("lda", power, value) for power in (1.0, 0.5, 0.33) for value in shrinkages]
    choices += [(approach, 0.5, c) for approach in ("all-linear", "all-linear-stages") for c in constants]
    rows: list[dict[str, Any]] = []
    for approach, power, value in choices:
        correct = 0
        for fold in range(4):
            test = position % 4 == fold
            learner = Frozen(approach, 0, 0, len(data.classes), data.widths, power, value, value)
            score = learner.learn(x[~test], y[~test])
            correct += int((score(x[test]).argmax(1) == y[test]).sum())
        setting = {"power": power, "shrinkage": value} if approach.startswith("lda") else {"C": value}
        rows.append({"approach": approach, **setting, "accuracy": 100 * correct / len(y), "photos": len(y)})
        print(f"{approach}, {setting}: {rows[-1]['accuracy']:.1f} % of {len(y)}", flush=True)
    if given.json is not None:
        content = {"rows": rows, "environment": environment(torch.device("cpu"))}
        write_bytes(given.json, (json.dumps(content, indent=1) + "\n").encode())
