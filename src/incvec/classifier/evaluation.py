"""Accuracy on class folders: by class, by the `learn` that introduced it, and which classes are confused."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from incvec.atomic_files import write_bytes
from incvec.classifier.folder import Description
from incvec.errors import ConfigError

PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Evaluation:
    """Counts of true classes (rows) and predicted classes (columns), over all classes that were learned."""

    classes: tuple[str, ...]
    task_sizes: tuple[int, ...]  # classes of each `learn`; 0 for more photos of known ones
    confusion: np.ndarray[Any, Any]

    @property
    def accuracy(self) -> float:
        """The share of all photos that are recognized."""
        return float(self.confusion.trace() / max(self.confusion.sum(), 1))

    def by_class(self) -> dict[str, tuple[int, int]]:
        """Recognized photos and their total, of the classes that have any."""
        totals = self.confusion.sum(1)
        return {
            name: (int(self.confusion[i, i]), int(totals[i])) for i, name in enumerate(self.classes) if totals[i] > 0
        }

    def by_learn(self) -> list[tuple[int, int]]:
        """Recognized photos and their total, of the classes of each `learn`."""
        lasts = np.cumsum(self.task_sizes)
        spans = [range(int(last - size), int(last)) for size, last in zip(self.task_sizes, lasts, strict=True)]
        return [(sum(int(self.confusion[i, i]) for i in span), int(self.confusion[list(span)].sum())) for span in spans]

    def most_confused(self, name: str) -> tuple[str, int] | None:
        """The other class that photos of this one are most often taken for, and how many."""
        row = self.confusion[self.classes.index(name)].copy()
        row[self.classes.index(name)] = 0
        return None if not row.any() else (self.classes[int(row.argmax())], int(row.max()))

    def as_json(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "photos": int(self.confusion.sum()),
            "by_class": {name: {"correct": c, "photos": n} for name, (c, n) in self.by_class().items()},
            "by_learn": [{"correct": c, "photos": n} for c, n in self.by_learn()],
            "classes": list(self.classes),
            "confusion": self.confusion.tolist(),
        }


def make_evaluation(description: Description, labels: Any, guesses: Any) -> Evaluation:
    number = len(description.classes)
    confusion = np.zeros((number, number), np.int64)
    np.add.at(confusion, (np.asarray(labels), np.asarray(guesses)), 1)
    return Evaluation(description.classes, tuple(len(e.classes) for e in description.history), confusion)


def check_picture(path: Path) -> None:
    if path.suffix not in PICTURES:
        raise ConfigError(f"{path} has no ending of a picture: expected one of {', '.join(PICTURES)}.")


def draw_confusion(evaluation: Evaluation, path: Path) -> None:
    """The confusion matrix as a picture, each row as shares of its class; lines separate the `learn`s."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = evaluation.confusion
    present = counts.sum(1) > 0
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    number = len(evaluation.classes)
    size = min(3 + 0.28 * number, 24)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(np.where(present[:, None], shares, np.nan), cmap="Blues", vmin=0, vmax=1)
    if number <= 60:
        axes.set_xticks(range(number), evaluation.classes, rotation=90)
        axes.set_yticks(range(number), evaluation.classes)
    if number <= 30:
        for row, column in np.argwhere(counts > 0):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=7, color=color)
    for last in np.cumsum(evaluation.task_sizes)[:-1]:
        axes.axhline(last - 0.5, color="0.6", linewidth=0.8)
        axes.axvline(last - 0.5, color="0.6", linewidth=0.8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(f"{100 * evaluation.accuracy:.1f} % of {int(counts.sum())} photos recognized", fontsize=10)
    figure.colorbar(image, ax=axes, shrink=0.6, label="share of the class")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=120)
    write_bytes(path, buffer.getvalue(), ConfigError)
