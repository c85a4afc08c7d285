"""A run's results: the progress saved in its checkpoints, and the record at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from incvec.config import RunConfig
from incvec.contracts import Stage, Task
from incvec.data import Dataset
from incvec.engine.build import RunParts, describe_preprocessing
from incvec.errors import CheckpointError
from incvec.metrics import counts_by_task, matrix_from_counts, summarize
from incvec.records import FORMAT, environment

ALL_EPOCHS, EVERY = 20, 5  # longer stages are recorded with the losses of every fifth epoch
MAX_CONFUSION = 50  # classes; a larger confusion matrix would be most of the record


class StageLog(TypedDict):
    """A stage's row of `Progress.losses`."""

    task: int
    stage: str
    terms: dict[str, list[float]]  # one value per epoch
    capture_seconds: NotRequired[float]
    seconds: float


@dataclass
class Progress:
    """A run's results so far, as plain JSON values."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # of the header of a checkpoint

    correct: dict[str, list[list[int]]] = field(default_factory=dict)  # classifier -> task -> by class
    confusion: list[list[int]] = field(default_factory=list)  # after the last task: class -> predicted class
    losses: list[StageLog] = field(default_factory=list)  # one row per stage
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

    def stage_log(self, task: Task, stage: Stage) -> StageLog:
        """The stage's row of `losses`. A resumed run continues the row it has."""
        for present in self.losses:
            if present["task"] == task.index and present["stage"] == stage.name:
                return present
        row: StageLog = {"task": task.index, "stage": stage.name, "terms": {}, "capture_seconds": 0.0, "seconds": 0.0}
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


def check_counts(progress: Progress, parts: RunParts, evaluated: int) -> None:
    """Refuse saved counts that are not those of this run's classifiers after `evaluated` tasks."""
    expected = parts.method.classifiers if evaluated else ()
    if tuple(progress.correct) != expected:
        raise CheckpointError(
            f"progress.correct has the classifiers {list(progress.correct)}, but {parts.method.name} has "
            f"{list(expected)} after {evaluated} tasks."
        )
    for name, rows in progress.correct.items():
        if len(rows) != evaluated:
            raise CheckpointError(f"progress.correct.{name} has {len(rows)} rows, expected {evaluated}, one per task.")
        try:
            accuracy_matrix(progress, parts, name)
        except ValueError as error:
            raise CheckpointError(f"progress.correct.{name} is invalid: {error}.") from None


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
        "class_names": [dataset.class_names[label] for label in parts.order[: len(by_class)]],
        "confusion": progress.confusion or None,
        "preprocessing": describe_preprocessing(parts),
        "config": settings,
        "seconds": seconds,
        "task_seconds": progress.task_seconds,
        "losses": [thin_losses(row) for row in progress.losses],
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


def thin_losses(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `losses` with the first, every fifth and the last epoch of a long stage, listed in `epochs`.

    The losses of all epochs would be most of a record.
    """
    count = max((len(values) for values in row["terms"].values()), default=0)
    if count <= ALL_EPOCHS or "epochs" in row:
        return dict(row)
    epochs = [epoch for epoch in range(1, count + 1) if epoch in (1, count) or epoch % EVERY == 0]
    terms = {name: [values[epoch - 1] for epoch in epochs] for name, values in row["terms"].items()}
    return {**row, "epochs": epochs, "terms": terms}
