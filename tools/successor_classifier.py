"""Analyses of docs/successor.md with frozen features: what a classifier could reach, and the parts of `carry`.

    python tools/successor_classifier.py last RUN DATA_ROOT JSON       classifiers on the features of the last snapshot
    python tools/successor_classifier.py ablation RUN DATA_ROOT JSON   statistics that follow all snapshots of the run

Both add a row to the file. The features are those of the run, so all classifiers of a row are compared on the same
network; no backbone is trained. `ablation` replays what `carry` does, and variants of it, along the snapshots.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.addons.carry import scaled_logits
from incvec.class_statistics import (
    JITTER,
    ClassStatistics,
    Displacement,
    class_gaussians,
    class_weights,
    draw,
    fit_displacement,
)
from incvec.data import load_dataset
from incvec.methods.common import ImageMethod
from incvec.presets import resolve
from incvec.study.geometry.snapshots import Snapshot, last_task, load_snapshot, read_snapshot

STEPS, BATCH = 3000, 64  # of the training of a classifier: 192,000 samples
HIDDEN, MAP_STEPS, DRAWS = 32, 1000, 2000  # of AdaGauss' map: width / that of the features; steps; draws per class
Sampler = Callable[[Tensor], tuple[Tensor, Tensor]]


class Frozen:
    """A snapshot whose features are fixed; its classifier can be trained and tested."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.task, self.world = snapshot, snapshot.task, snapshot.parts.world
        self.method = cast(ImageMethod, snapshot.method)
        self.generator = torch.Generator().manual_seed(0)
        test = snapshot.parts.test
        rows = test.rows_of(0, self.task.n_seen)
        self.test = self.features(test, rows), test.labels[rows].cpu()

    @torch.no_grad()
    def features(self, source: Any, rows: Tensor) -> Tensor:
        model = self.method.model.eval()
        return torch.cat([model(source.fetch(part, None, ("test",)).images).features.cpu() for part in rows.split(500)])

    def past(self) -> tuple[Tensor, Tensor]:
        """Features and labels of all training images of the classes so far."""
        rows = self.method.rows_of(range(self.task.n_seen))
        return self.features(self.world.train, rows), self.world.train.labels[rows].cpu()

    def accuracies(self) -> list[float]:
        """All, base and new classes."""
        self.method.model.head.cpu()
        features, labels = self.test
        correct = (scaled_logits(self.method, features).argmax(1) == labels).float()
        base = labels < self.world.tasks[0].last
        return [round(100 * float(part.mean()), 2) for part in (correct, correct[base], correct[~base])]

    def trained(self, sample: Sampler, steps: int = STEPS) -> list[float]:
        """The accuracies after the head alone is trained on samples of all classes; then it is restored."""
        start = {name: tensor.clone() for name, tensor in self.method.model.state_dict().items()}
        parameters = [p.requires_grad_() for p in self.method.model.head.cpu().blocks.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            features, targets = sample(torch.randint(self.task.n_seen, (BATCH,), generator=self.generator))
            optimizer.zero_grad()
            F.cross_entropy(scaled_logits(self.method, features), targets).backward()
            optimizer.step()
            schedule.step()
        found = self.accuracies()
        self.method.model.load_state_dict(start)
        return found

    def on_images(self, features: Tensor, labels: Tensor) -> list[float]:
        by_class = [(labels == c).nonzero().flatten() for c in range(self.task.n_seen)]

        def sample(classes: Tensor) -> tuple[Tensor, Tensor]:
            picks = [by_class[c][torch.randint(len(by_class[c]), (1,), generator=self.generator)] for c in classes]
            return features[torch.cat(picks)], classes

        return self.trained(sample)

    def on_draws(self, statistics: ClassStatistics, steps: int = STEPS) -> list[float]:
        return self.trained(lambda c: (draw(statistics.means, statistics.factors, c, self.generator), c), steps)


# Variants of how statistics follow ----------------------------------------------------------------------------


class NotMoved(ClassStatistics):
    def move(self, before: Tensor, after: Tensor, labels: Tensor, ridge: float = 0.01) -> None:
        pass


class MeansOnly(ClassStatistics):
    """Covariances stay as stored, as in LDC and EFC."""

    def move(self, before: Tensor, after: Tensor, labels: Tensor, ridge: float = 0.01) -> None:
        factors = self.factors
        super().move(before, after, labels, ridge)
        self.factors = factors


class Translation(ClassStatistics):
    """All means by the mean displacement."""

    def move(self, before: Tensor, after: Tensor, labels: Tensor, ridge: float = 0.01) -> None:
        w = class_weights(labels)[:, None]
        self.means = self.means + (w * (after - before)).sum(0) / w.sum()


class Nearby(ClassStatistics):
    """SDC: each mean by the displacements of features near it, exp(-|f - m|^2 / 2 s^2), s half the mean distance."""

    def move(self, before: Tensor, after: Tensor, labels: Tensor, ridge: float = 0.01) -> None:
        distance = torch.cdist(self.means, before)
        weights = torch.softmax(-0.5 * (distance / (0.5 * distance.mean())).square(), dim=1)
        self.means = self.means + weights @ (after - before)


class NoSpread(ClassStatistics):
    """Covariances follow the map, without the spread of features around it."""

    def move(self, before: Tensor, after: Tensor, labels: Tensor, ridge: float = 0.01) -> None:
        moves: Displacement = fit_displacement(before, after, class_weights(labels), ridge)
        fitted = before.double() + moves(before.double())
        super().move(before.double(), fitted, labels, 0.0)


class Network(ClassStatistics):
    """AdaGauss: a network with one hidden layer in place of the affine map, applied to draws of each class."""

    def move(self, before: Tensor, after: Tensor, labels: Tensor, ridge: float = 0.01) -> None:
        generator, width, scale = torch.Generator().manual_seed(0), before.shape[1], before.std()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(width, HIDDEN * width), nn.GELU(), nn.Linear(HIDDEN * width, width))
        optimizer, weights = torch.optim.Adam(net.parameters(), lr=1e-3), class_weights(labels)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, MAP_STEPS)
        for _ in range(MAP_STEPS):
            rows = torch.multinomial(weights, 128, replacement=True, generator=generator)
            optimizer.zero_grad()
            F.mse_loss(net(before[rows] / scale), (after - before)[rows] / scale).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            drawn = draw(self.means, self.factors, torch.arange(len(self)), generator, DRAWS)
            drawn = torch.cat([part + scale * net(part / scale) for part in drawn.split(10_000)])
        self.means, self.factors = class_gaussians(
            drawn, torch.arange(len(self)).repeat_interleave(DRAWS), range(len(self)), JITTER
        )


def covariances_of(statistics: ClassStatistics) -> Tensor:
    return statistics.factors @ statistics.factors.mT


def reshaped(statistics: ClassStatistics, change: Callable[[Tensor], Tensor]) -> ClassStatistics:
    """The same means, with other covariances."""
    other = ClassStatistics()
    eye = JITTER * torch.eye(statistics.means.shape[1])
    other.load_state_dict(statistics.state_dict())
    other.factors = torch.linalg.cholesky(change(covariances_of(statistics)) + eye)
    return other


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "map, variances only": lambda c: torch.diag_embed(c.diagonal(dim1=1, dim2=2)),
    "map, one covariance for all classes": lambda c: c.mean(0, keepdim=True).expand_as(c),
    "map, one radius for all classes": lambda c: c.diagonal(dim1=1, dim2=2).mean() * torch.eye(c.shape[1]).expand_as(c),
}


# Along the snapshots of a run ---------------------------------------------------------------------------------


class Increment(NamedTuple):
    """Features of the images at hand before and after a task, exemplars first, then the task's own."""

    before: Tensor
    after: Tensor
    labels: Tensor
    exemplars: int


def increments(run: str, snapshots: list[Frozen]) -> list[Increment]:
    found = []
    for number, now in enumerate(snapshots):
        own, old = now.method.rows_of(now.task.classes), torch.zeros(0, dtype=torch.int64)
        if number and "memory" in now.method.store:
            rows = now.method.exemplar_rows()
            old = rows[now.world.train.labels[rows] < now.task.n_old]
        rows, train = torch.cat([old, own]), now.world.train
        before = snapshots[max(number - 1, 0)].features(train, rows)
        found.append(Increment(before, now.features(train, rows), train.labels[rows].cpu(), len(old)))
    return found


def carried(
    statistics: ClassStatistics, path: list[Increment], ridge: float = 0.01, exemplars: bool = True
) -> ClassStatistics:
    for number, (before, after, labels, count) in enumerate(path):
        first = 0 if exemplars else count
        if number:
            statistics.move(before[first:], after[first:], labels[first:], ridge)
        statistics.add(after[count:], labels[count:])
    return statistics


def open_run(run: str, root: str) -> list[Frozen]:
    number = last_task(run)
    config = resolve(read_snapshot(run, number)[1]["config"])
    data = load_dataset(config.dataset, root, **config.data_options())
    return [Frozen(load_snapshot(run, each, data)) for each in range(number + 1)]


def describe(last: Frozen) -> dict[str, Any]:
    config = last.snapshot.config
    name = " + ".join([config.method, *config.addons]) + (" (oracle)" if config.oracle else "")
    return {"run": name, "classes": last.task.n_seen, "seed": config.seed}


def last(run: str, root: str) -> dict[str, Any]:
    frozen = open_run(run, root)[-1]
    features, labels = frozen.past()
    exact = ClassStatistics()
    exact.add(features, labels)
    return describe(frozen) | {
        "as delivered": frozen.accuracies(),
        "trained on the features of all past images": frozen.on_images(features, labels),
        "trained on draws from the Gaussians of all past images": frozen.on_draws(exact),
    }


def ablation(run: str, root: str) -> dict[str, Any]:
    snapshots = open_run(run, root)
    path, frozen = increments(run, snapshots), snapshots[-1]
    features, labels = frozen.past()
    exact, n_old = ClassStatistics(), frozen.task.n_old
    exact.add(features, labels)
    follow: dict[str, ClassStatistics] = {
        "map": carried(ClassStatistics(), path),
        "not moved": carried(NotMoved(), path),
        "one displacement for all classes": carried(Translation(), path),
        "displacements near the mean": carried(Nearby(), path),
        "map, means only": carried(MeansOnly(), path),
        "map, without the spread around it": carried(NoSpread(), path),
        "map, without exemplars": carried(ClassStatistics(), path, exemplars=False),
        "network": carried(Network(), path),
        **{f"map, ridge {ridge:g}": carried(ClassStatistics(), path, ridge) for ridge in (0.0001, 0.1, 1.0)},
    }
    follow |= {name: reshaped(follow["map"], change) for name, change in SHAPES.items()}
    rows: dict[str, Any] = {
        "as delivered": {"accuracy": frozen.accuracies()},
        "features of all past images": {"accuracy": frozen.on_images(features, labels)},
        "exact statistics": {"accuracy": frozen.on_draws(exact)},
    }
    if path[-1].exemplars:
        _, after, known, count = path[-1]
        at_hand = torch.cat([after[:count], after[count:]]), known
        rows["features of the images at hand"] = {"accuracy": frozen.on_images(*at_hand)}
    width, true = exact.factors.diagonal(dim1=1, dim2=2), covariances_of(exact)
    width = true.diagonal(dim1=1, dim2=2).sum(1).sqrt()
    for name, statistics in follow.items():
        mean = ((statistics.means - exact.means).norm(dim=1) / width)[:n_old].mean()
        covariance = ((covariances_of(statistics) - true).norm(dim=(1, 2)) / true.norm(dim=(1, 2)))[:n_old].mean()
        rows[name] = {
            "accuracy": frozen.on_draws(statistics),
            "mean": round(float(mean), 4),
            "covariance": round(float(covariance), 4),
        }
    rows |= fewer_and_more_draws(frozen, follow["map"])
    return describe(frozen) | {"rows": rows}


def fewer_and_more_draws(frozen: Frozen, statistics: ClassStatistics) -> dict[str, Any]:
    frozen.generator.manual_seed(0)  # whatever was drawn before
    return {
        f"map, {steps * BATCH:,} draws": {"accuracy": frozen.on_draws(statistics, steps)} for steps in (250, 1000, 8000)
    }


def main(command: str, run: str, root: str, target: str) -> None:
    path, row = Path(target), {"last": last, "ablation": ablation}[command](run, root)
    content = json.loads(path.read_text()) if path.exists() else {command: []}
    same = ("run", "classes", "seed")
    content[command] = [old for old in content[command] if any(old[key] != row[key] for key in same)] + [row]
    path.write_text(f'{{\n"{command}": [\n' + ",\n".join(json.dumps(row) for row in content[command]) + "\n]\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
