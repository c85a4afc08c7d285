"""A run's results: the progress saved in its checkpoints, and the record at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from incvec.config import RunConfig
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.engine.build import RunParts, describe_preprocessing
from incvec.metrics import counts_by_task, matrix_from_counts, summarize
from incvec.records import FORMAT, environment


@dataclass
class Progress:
    """A run's results so far, as plain JSON values."""

    correct: dict[str, list[list[int]]] = field(default_factory=dict)  # classifier -> task -> by class
    losses: list[dict[str, Any]] = field(default_factory=list)  # one row per stage
    statistics: list[dict[str, Any]] = field(default_factory=list)  # one row per task, by add-on
    task_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    notices: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)  # where the base task's weights came from, if not trained here
    ranks: list[int] = field(default_factory=list)  # numbers of processes it ran on; several after a resume with more

    def add_notice(self, text: str) -> None:
        """Record a notice, once."""
        if text not in self.notices:
            self.notices.append(text)

    def stage_log(self, task: Task, stage: Stage) -> dict[str, Any]:
        """The stage's row of `losses`. A resumed run continues the row it has."""
        for row in self.losses:
            if row["task"] == task.index and row["stage"] == stage.name:
                return row
        row = {"task": task.index, "stage": stage.name, "terms": {}, "capture_seconds": 0.0, "seconds": 0.0}
        self.losses.append(row)
        return row


def class_counts(parts: RunParts) -> list[int]:
    """The number of test images of each class, in class order."""
    counts: list[int] = parts.test.counts().tolist()
    return counts[: parts.tasks[-1].n_seen]


def task_counts(parts: RunParts) -> list[int]:
    """The number of test images of each task."""
    return counts_by_task(class_counts(parts), parts.tasks)


def accuracy_matrix(progress: Progress, parts: RunParts, classifier: str | None = None) -> list[list[float]]:
    """Rows of the accuracy matrix so far, in percent; by default of the reported classifier."""
    name = classifier or next(iter(progress.correct))
    return matrix_from_counts(progress.correct[name], class_counts(parts), parts.tasks)


def make_record(
    config: RunConfig, dataset: Dataset, parts: RunParts, progress: Progress, seconds: float
) -> dict[str, Any]:
    """The record of a finished run, as JSON values."""
    by_class, by_task = class_counts(parts), task_counts(parts)
    classifiers: dict[str, dict[str, Any]] = {}
    for name, correct in progress.correct.items():
        matrix = accuracy_matrix(progress, parts, name)
        metrics = summarize(matrix, by_task, correct_by_class=correct, class_counts=by_class)
        classifiers[name] = {"accuracy": matrix, "metrics": metrics}
    first = next(iter(classifiers.values()))
    settings = config.resolved()
    if progress.base.get("shared"):
        settings["start"] = None  # `base` records that another run trained its base task
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
        "classes": list(parts.world.class_names),  # by label
        "preprocessing": describe_preprocessing(parts),
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
