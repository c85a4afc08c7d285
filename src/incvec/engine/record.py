"""What a run has to show: kept in its checkpoint while it goes on, and in the end its record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from incvec.config import RunConfig
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.engine.build import Parts
from incvec.metrics import counts_by_task, matrix_from_counts, summarize
from incvec.records import FORMAT, environment


@dataclass
class Progress:
    """What a run has to show so far; plain values, kept in the checkpoint's JSON."""

    correct: dict[str, list[list[int]]] = field(default_factory=dict)  # classifier -> task -> by class
    losses: list[dict[str, Any]] = field(default_factory=list)  # a row a stage
    statistics: list[dict[str, Any]] = field(default_factory=list)  # a row a task, from the add-ons
    task_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    notices: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)  # whether the base task's weights came from another run
    ranks: list[int] = field(default_factory=list)  # over how many processes it ran; several where it went on with more

    def note(self, text: str) -> None:
        """Something the record should say, once."""
        if text not in self.notices:
            self.notices.append(text)

    def losses_of(self, task: Task, stage: Stage) -> dict[str, Any]:
        """The stage's row of losses, which a run that was killed goes on filling."""
        for row in self.losses:
            if row["task"] == task.index and row["stage"] == stage.name:
                return row
        row = {"task": task.index, "stage": stage.name, "terms": {}, "capture_seconds": 0.0, "seconds": 0.0}
        self.losses.append(row)
        return row


def class_counts(parts: Parts) -> list[int]:
    """Test images of each class, in the order of the classes."""
    counts: list[int] = parts.test.counts().tolist()
    return counts[: parts.tasks[-1].n_seen]


def task_counts(parts: Parts) -> list[int]:
    """Test images of each task."""
    return counts_by_task(class_counts(parts), parts.tasks)


def accuracy_matrix(progress: Progress, parts: Parts, classifier: str | None = None) -> list[list[float]]:
    """Rows of the accuracy matrix so far, in percent; by default of the classifier that is reported."""
    name = classifier or next(iter(progress.correct))
    return matrix_from_counts(progress.correct[name], class_counts(parts), parts.tasks)


def make_record(
    config: RunConfig, dataset: Dataset, parts: Parts, progress: Progress, seconds: float
) -> dict[str, Any]:
    """Everything about a finished run, as JSON."""
    by_class, by_task = class_counts(parts), task_counts(parts)
    classifiers: dict[str, dict[str, Any]] = {}
    for name, correct in progress.correct.items():
        matrix = accuracy_matrix(progress, parts, name)
        metrics = summarize(matrix, by_task, correct_by_class=correct, class_counts=by_class)
        classifiers[name] = {"accuracy": matrix, "metrics": metrics}
    first = next(iter(classifiers.values()))
    settings = config.resolved()
    if progress.base.get("shared"):
        settings["start"] = None  # at its own base task, trained elsewhere: no setting of its own, `base` tells it
    return {
        "format": FORMAT,
        "method": config.method,
        "addons": list(config.addons),
        "dataset": config.dataset,
        "tasks": config.tasks,
        "oracle": config.oracle,
        "seed": config.seed,
        "order_seed": config.order_seed,
        "metrics": first["metrics"],
        "accuracy": first["accuracy"],
        "test_counts": by_task,
        "classifier": next(iter(classifiers)),
        "classifiers": classifiers,
        "correct": progress.correct,
        "class_counts": by_class,
        "class_order": parts.order,
        "config": settings,
        "seconds": seconds,
        "task_seconds": progress.task_seconds,
        "losses": progress.losses,
        "statistics": progress.statistics,
        "base": progress.base,
        "engine": {
            "kind": parts.engine,
            "precision": parts.precision,
            "notices": progress.notices,
            "ranks": progress.ranks,
        },
        "environment": environment(parts.world.device),
        "data_fingerprint": dataset.fingerprint,
        "data": dict(dataset.about),
    }
