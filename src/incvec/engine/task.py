"""One task: the hooks around its stages, its row of the accuracy matrix and its snapshot."""

from __future__ import annotations

from pathlib import Path

from incvec.atomic_files import write_tensors
from incvec.contracts import Task
from incvec.engine import events as ev
from incvec.engine.build import grow
from incvec.engine.checkpoint import Position, snapshot_tensors
from incvec.engine.evaluate import confusion_by_classifier, deployed_weights
from incvec.engine.record import MAX_CONFUSION, accuracy_matrix, task_counts
from incvec.engine.state import RunState
from incvec.metrics import weighted_mean


def begin_task(state: RunState, task: Task) -> None:
    """Grow the structure, then the begin hooks: the method's, then the add-ons'."""
    grow(state.parts, task, state.config.seed)
    state.reseed(task.index, "begin_task")
    state.parts.method.begin_task(task)
    state.synchronize()  # add-ons copy the weights
    for addon in state.listeners(task):
        state.reseed(task.index, "begin_task", addon.name)
        addon.begin_task(task)
    state.synchronize()


def end_task(state: RunState, task: Task) -> None:
    """End hooks: the add-ons', then the method's, so that the method sees the final weights."""
    for addon in state.parts.addons:
        state.reseed(task.index, "end_task", addon.name)
        addon.end_task(task)
    state.reseed(task.index, "end_task")
    state.parts.method.end_task(task)
    state.synchronize()
    state.progress.statistics.append({addon.name: addon.statistics() for addon in state.parts.addons})


def evaluate_task(state: RunState, task: Task, snapshot: Path | None) -> ev.TaskEnded:
    """Add a row to the accuracy matrix and write a snapshot, both with the deployed weights."""
    parts, method = state.parts, state.parts.method
    with deployed_weights(method, parts.addons, task) as trained:
        state.reseed(task.index, "evaluation")
        method.begin_evaluation(task)
        state.synchronize()
        rows = parts.test.rows_of(0, task.n_seen)
        # An add-on may change even a frozen encoder, so then nothing is cached.
        encoded = state.encoded_test_images if method.frozen_encoder and not parts.addons else None
        counts = confusion_by_classifier(method, parts.world, parts.test, rows, task, state.distributed, encoded)
        if tuple(counts) != method.classifiers:
            raise TypeError(
                f"{type(method).__name__}.forward returns scores of {list(counts)}, but its `classifiers` are "
                f"{list(method.classifiers)}: both need the same names in the same order"
            )
        for name, confusion in counts.items():
            state.progress.correct.setdefault(name, []).append(confusion.diagonal().tolist())
        reported = next(iter(counts.values()))
        state.progress.confusion = reported.tolist() if task.n_seen <= MAX_CONFUSION else []
        if snapshot is not None:
            meta = state.meta("snapshot", Position(task.index + 1))
            write_tensors(snapshot, snapshot_tensors(parts, trained), meta)
    row = accuracy_matrix(state.progress, parts)[-1]
    return ev.TaskEnded(task.index, weighted_mean(row, task_counts(parts)), row)
