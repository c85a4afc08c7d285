"""Which method the classifier should use: accuracy after each `learn`, against what people would do instead.

    python benchmarks/classifier_methods.py measure PHOTOS --first 8 --step 4 --json results/classifier/x.json
    python benchmarks/classifier_methods.py measure PHOTOS ... --approaches replay replay+ivt --device cuda
    python benchmarks/classifier_methods.py held-out PHOTOS
    python benchmarks/classifier_methods.py table results/classifier/x.json
    python benchmarks/classifier_methods.py draw results/classifier/x.json docs/pictures/classifier.png

PHOTOS has train/ and test/ with one folder per class. A seed shuffles the classes and is the seed of the training; the
approaches see the same classes in the same order. After each `learn`, all classes so far are tested. Rows that exist in
the file already are not measured again.

Approaches on frozen features, which are computed once and cached:

- lda: the default, linear discriminant analysis from class statistics; `lda-plain` without the square root;
- nearest-mean: the class with the nearest mean feature, by cosine;
- sgd: scikit-learn's SGDClassifier.partial_fit on the new photos, five passes;
- new-only: logistic regression on the new photos, its rows added to the old ones;
- linear-replay: logistic regression on the new photos and the remembered ones;
- all-linear: logistic regression on all photos so far, the bound for frozen features.

`linear-replay-power` and `all-linear-power` take the features raised to the same power as lda does, so that the
comparison is not one of features. `held-out` prints accuracies on folds of the training photos, from which power,
shrinkage and the regularization of the logistic regression are chosen; the test photos are not used for that.

The order of the classes makes no difference to lda, nearest-mean and all-linear, and the photos are the same for every
seed: their spread over seeds is 0 by construction. The standard error of an accuracy on n test photos is a better
measure of its uncertainty, and `table` prints it.

Approaches that train the network, through `Classifier`: the name of a method, with +ivt or not; `all-finetuned` trains
on all photos at once, the bound.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from incvec.atomic_files import write_bytes
from incvec.classifier import Classifier
from incvec.classifier.folder import Preprocessing
from incvec.classifier.network import in_batches, stored_side
from incvec.classifier.photos import ClassPhotos, list_photos, load_squares
from incvec.data.select import class_means, herd
from incvec.methods.lda import discriminants, signed_power
from incvec.nets import build_backbone
from incvec.nets.pretrained import copy_state, expected_input, load_weights
from incvec.records import environment

FROZEN = ("lda", "lda-plain", "nearest-mean", "sgd", "new-only", "linear-replay", "linear-replay-power", "all-linear",
          "all-linear-power")  # fmt: skip
KEEPS = {"linear-replay": "remembered", "linear-replay-power": "remembered"}
KEEPS |= dict.fromkeys(("all-linear", "all-linear-power", "all-finetuned"), "all photos")
BOUNDS = ("all-linear", "all-linear-power", "all-finetuned")
C = 0.1  # of the logistic regression, chosen with `held-out`
Score = Callable[[Tensor], Tensor]


class Features:
    """Features of the frozen default backbone for all photos, cached in a file."""

    def __init__(self, photos: Path, backbone: str, cache: Path) -> None:
        size, mean, std = expected_input(backbone)
        self.preprocessing = Preprocessing(side=size, stored=stored_side(size), mean=mean, std=std)
        self.parts = {part: list_photos(photos / part) for part in ("train", "test")}
        self.classes = self.parts["train"].classes
        names = [str(f) + str(f.stat().st_size) for p in self.parts.values() for own in p.files.values() for f in own]
        key = hashlib.sha256("\n".join([backbone, *names]).encode()).hexdigest()[:16]
        file = cache / f"features-{key}.pt"
        if not file.exists():
            cache.mkdir(parents=True, exist_ok=True)
            torch.save({part: self._compute(backbone, listed) for part, listed in self.parts.items()}, file)
        self.values = torch.load(file, weights_only=True)

    def _compute(self, backbone: str, photos: ClassPhotos) -> Tensor:
        net = cast(Any, build_backbone(backbone).eval()).to(memory_format=torch.channels_last)
        copy_state(net, load_weights(backbone))
        p = self.preprocessing
        mean, std = (torch.tensor(values)[:, None, None] for values in (p.mean, p.std))
        files = photos.labelled(self.classes)

        def features(pixels: Tensor) -> Tensor:
            return cast(Tensor, net((pixels - mean) / std).features)

        parts = []
        for start in range(0, len(files), 256):
            parts.append(
                in_batches(features, load_squares(files[start : start + 256], p.stored), p, torch.device("cpu"))
            )
            print(f"{photos.root.name}: {min(start + 256, len(files))} of {len(files)} features", flush=True)
        return torch.cat(parts).clone()

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
        self, approach: str, memory: int, seed: int, n_classes: int, power: float, shrinkage: float, c: float
    ) -> None:
        self.approach, self.memory, self.seed, self.n_classes = approach, memory, seed, n_classes
        self.power = power if approach == "lda" or approach.endswith("-power") else 1.0
        self.shrinkage, self.c = shrinkage, c
        self.kept: list[tuple[Tensor, Tensor]] = []  # features and labels that the approach may use later
        self.state: Any = None

    def learn(self, x: Tensor, y: Tensor) -> Score:
        if self.approach.endswith("-power"):
            score = self._learn(signed_power(x, self.power), y)
            return lambda z: score(signed_power(z, self.power))
        return self._learn(x, y)

    def _learn(self, x: Tensor, y: Tensor) -> Score:
        match self.approach.removesuffix("-power"):
            case "lda" | "lda-plain":
                return self._lda(x, y)
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
                if self.approach.startswith("all-linear"):
                    self.kept.append((x, y))
                else:
                    count = min(self.memory, int(torch.bincount(y)[y.unique()].min()))
                    rows = herd(x, y, y.unique().tolist(), count).flatten()
                    self.kept.append((x[rows], y[rows]))
                return linear_score(*logistic(torch.cat([a for a, _ in past]), torch.cat([b for _, b in past]), self.c))
        raise ValueError(f"unknown approach {self.approach!r}")

    def _lda(self, x: Tensor, y: Tensor) -> Score:
        z = signed_power(x, self.power).double()
        first = int(y.min())
        means = class_means(z, y - first, len(y.unique()))
        centered = z - means[y - first]
        old = (means[:0], torch.zeros(z.shape[1], z.shape[1], dtype=z.dtype), 0)
        known, scatter, count = old if self.state is None else self.state
        self.state = torch.cat([known, means]), scatter + centered.T @ centered, count + len(z)
        weight, bias = discriminants(self.state[0], self.state[1], torch.tensor(self.state[2]), self.shrinkage)
        return lambda t: signed_power(t, self.power).double() @ weight.T + bias

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
    learner = Frozen(approach, given.memory, seed, len(order), given.power, given.shrinkage, C)
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


# Approaches that train the network --------------------------------------------------------------------------


def link_classes(photos: ClassPhotos, names: Sequence[str], target: Path) -> Path:
    """A folder with links to the named class folders."""
    target.mkdir(parents=True)
    for name in names:
        (target / name).symlink_to((photos.root / name).resolve())
    return target


def measure_trained(
    data: Features, approach: str, order: Sequence[int], sizes: Sequence[int], given: argparse.Namespace, seed: int
) -> list[list[float]]:
    method, *addons = ("finetune" if approach == "all-finetuned" else approach).split("+")
    settings = {method: {"epochs": given.epochs}} if given.epochs else {}
    names = [data.classes[c] for c in order]
    lasts, rows = np.cumsum(sizes).tolist(), []
    options: dict[str, Any] = {"method": method, "addons": addons, "memory": given.memory, "check": 0, "seed": seed}
    options |= {"side": given.side, "settings": settings, "device": given.device, "backbone": given.backbone}
    with tempfile.TemporaryDirectory() as folder:
        root, classifier = Path(folder), None
        for number, last in enumerate(lasts):
            joint = approach == "all-finetuned"
            if joint and number + 1 < len(lasts):
                continue  # the bound is for all classes
            start = 0 if joint else last - sizes[number]
            new = link_classes(data.parts["train"], names[start:last], root / f"new-{number}")
            if classifier is None:
                classifier = Classifier.fit(new, root / "model", **options)
            else:
                classifier.learn(new)
            test = classifier.evaluate(link_classes(data.parts["test"], names[:last], root / f"test-{number}"))
            by_class = test.by_class()
            groups = [names[end - size : end] for end, size in zip(lasts[: number + 1], sizes, strict=False)]
            counts = [[sum(column) for column in zip(*(by_class[n] for n in group), strict=True)] for group in groups]
            rows.append([100 * test.accuracy, *(100 * correct / total for correct, total in counts)])
    return rows


# Commands ---------------------------------------------------------------------------------------------------


def measure(given: argparse.Namespace) -> None:
    data = Features(given.photos, given.backbone, given.cache)
    number = len(data.classes)
    sizes = [given.first, *[given.step] * ((number - given.first) // given.step)]
    content = json.loads(given.json.read_text()) if given.json.exists() else {"rows": []}
    for seed in given.seeds:
        order = np.random.RandomState(seed).permutation(number)[: sum(sizes)].tolist()
        for approach in given.approaches:
            settings = {"memory": given.memory, "sizes": sizes, "backbone": given.backbone, "name": given.name}
            if approach.startswith("lda"):
                settings |= {"power": given.power, "shrinkage": given.shrinkage}
            elif approach in FROZEN:
                settings |= {"C": C, "power": given.power if approach.endswith("-power") else 1.0}
            elif approach not in FROZEN:
                settings |= {"epochs": given.epochs, "side": given.side}
            key = {"approach": approach, "seed": seed, **settings}
            if any(all(row.get(k) == v for k, v in key.items()) for row in content["rows"]):
                continue
            began = time.monotonic()
            run = measure_frozen if approach in FROZEN else measure_trained
            rows = run(data, approach, order, sizes, given, seed)
            content["rows"].append(
                {**key, "accuracy": rows, "seconds": round(time.monotonic() - began, 1),
                 "test_photos": len(data.get("test", order)[1]), "classes": [data.classes[c] for c in order],
                 "environment": environment(torch.device("cpu"))}
            )  # fmt: skip
            write_bytes(given.json, (json.dumps(content, indent=1) + "\n").encode())
            print(f"{approach}, seed {seed}: {rows[-1][0]:.1f} % of all classes after the last learn", flush=True)


def held_out(given: argparse.Namespace) -> None:
    """Accuracy on four folds of the training photos, all classes at once."""
    data = Features(given.photos, given.backbone, given.cache)
    x, y = data.get("train", range(len(data.classes)))
    position = torch.cat([torch.arange(int((y == c).sum())) for c in range(len(data.classes))])
    for power in (1.0, 0.5, 0.33):
        choices = [("lda", value) for value in (0.1, 0.2, 0.3, 0.5, 0.7)] + [
            ("all-linear", c) for c in (0.001, 0.01, 0.1)
        ]
        for approach, value in choices:
            correct = 0
            for fold in range(4):
                test = position % 4 == fold
                learner = Frozen(approach, 0, 0, len(data.classes), 1.0, value, value)
                score = learner.learn(signed_power(x[~test], power), y[~test])
                correct += int((score(signed_power(x[test], power)).argmax(1) == y[test]).sum())
            print(f"power {power}, {approach} {value}: {100 * correct / len(y):.1f} % of {len(y)}", flush=True)


def final(rows: Sequence[dict[str, Any]], approach: str) -> dict[int, float]:
    """Accuracy on all classes after the last `learn`, by seed."""
    return {row["seed"]: row["accuracy"][-1][0] for row in rows if row["approach"] == approach}


def table(given: argparse.Namespace) -> None:
    """Markdown: accuracy after the last `learn` with its standard error from the number of test photos, and differences
    to the default for each order of the classes."""
    rows = json.loads(given.json.read_text())["rows"]
    approaches = sorted({row["approach"] for row in rows}, key=lambda a: -statistics.mean(final(rows, a).values()))
    default = final(rows, "lda")
    print("| approach | keeps photos | all classes, % | first classes | last classes | lda ahead by | orders |")
    print("|---|---|---|---|---|---|---|")
    for approach in approaches:
        own = [row for row in rows if row["approach"] == approach]
        values = final(rows, approach)
        paired = [default[seed] - value for seed, value in values.items() if seed in default]
        ends = [(row["accuracy"][-1][1], row["accuracy"][-1][-1]) for row in own]
        first, last = (statistics.mean(column) for column in zip(*ends, strict=True))
        keeps = KEEPS.get(approach, "none" if approach in FROZEN else "by method")
        ahead = "" if approach == "lda" else " ".join(f"{value:+.1f}" for value in paired)
        mean = statistics.mean(values.values())
        error = 100 * (mean / 100 * (1 - mean / 100) / own[0]["test_photos"]) ** 0.5
        print(
            f"| {approach} | {keeps} | {mean:.1f} ± {error:.1f} | {first:.1f} | {last:.1f} | {ahead} | {len(values)} |"
        )


def draw(given: argparse.Namespace) -> None:
    """Accuracy on all classes so far after each `learn`, mean of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = json.loads(given.json.read_text())["rows"]
    figure = Figure(figsize=(7, 4.2), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for approach in dict.fromkeys(row["approach"] for row in rows):
        curves = [[after[0] for after in row["accuracy"]] for row in rows if row["approach"] == approach]
        mean = np.mean(curves, axis=0)
        sizes = np.cumsum(rows[0]["sizes"])[-len(mean) :]
        style: dict[str, Any] = (
            {"linestyle": ("--", ":", "-.")[BOUNDS.index(approach)], "color": "0.4"} if approach in BOUNDS else {}
        )
        axes.plot(sizes, mean, marker="o", label=approach, linewidth=2.5 if approach == "lda" else 1.2, **style)
    axes.set_xlabel("classes learned so far")
    axes.set_ylabel("accuracy on all of them, %")
    axes.set_xticks(np.cumsum(rows[0]["sizes"]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(given.out, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    chosen = commands.add_parser("held-out")
    chosen.add_argument("photos", type=Path)
    chosen.add_argument("--backbone", default="lite0")
    chosen.add_argument("--cache", type=Path, default=Path("runs/features"))
    chosen.set_defaults(run=held_out)
    one = commands.add_parser("measure")
    one.add_argument("photos", type=Path)
    one.add_argument("--name", default="photos", help="of the data, for the record")
    one.add_argument("--first", type=int, default=8, help="classes of the first learn")
    one.add_argument("--step", type=int, default=4, help="classes of every later one")
    one.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    one.add_argument("--approaches", nargs="+", default=list(FROZEN))
    one.add_argument("--memory", type=int, default=20)
    one.add_argument("--backbone", default="lite0")
    one.add_argument("--power", type=float, default=0.5)
    one.add_argument("--shrinkage", type=float, default=0.5)
    one.add_argument("--epochs", type=int, default=None, help="of approaches that train the network")
    one.add_argument("--side", type=int, default=None)
    one.add_argument("--device", default="auto")
    one.add_argument("--cache", type=Path, default=Path("runs/features"))
    one.add_argument("--json", type=Path, required=True)
    one.set_defaults(run=measure)
    for name, function in (("table", table), ("draw", draw)):
        other = commands.add_parser(name)
        other.add_argument("json", type=Path)
        if name == "draw":
            other.add_argument("out", type=Path)
        other.set_defaults(run=function)
    given = parser.parse_args(arguments)
    given.run(given)


if __name__ == "__main__":
    main()
