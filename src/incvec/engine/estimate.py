"""How much of a run is done and how long the rest will take, from the rows trained so far and their rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from incvec.contracts import Stage, Task


class Estimate:
    """Counts rows times epochs. A stage that has not started is assumed to train on its task's new classes."""

    def __init__(self, tasks: Sequence[Task], plan: Callable[[Task], list[Stage]], rows_per_class: float) -> None:
        self.tasks, self.plan, self.rows_per_class = tasks, plan, rows_per_class
        self._rows: dict[tuple[bool, str], float] = {}  # by (base task?, stage name)
        self._start: tuple[float, float] | None = None

    def record_rows(self, task: Task, stage: Stage, rows: int) -> None:
        """How many rows the stage trains on; the same stage of other increments is assumed to have as many."""
        self._rows[(task.index == 0, stage.name)] = float(rows)

    def progress(self, task: Task, stage: Stage, epochs_done: int) -> tuple[float, float | None]:
        """The fraction of the run's work that is done, and the seconds left at the rate so far."""
        total = done = 0.0
        current = (task.index, self.plan(task).index(stage))
        for t in self.tasks:
            for number, s in enumerate(self.plan(t)):
                rows = self._rows.get((t.index == 0, s.name), self.rows_per_class * t.n_new)
                total += rows * s.epochs
                if (t.index, number) < current:
                    done += rows * s.epochs
                elif (t.index, number) == current:
                    done += rows * epochs_done
        now = time.monotonic()
        if self._start is None:
            self._start = (now, done)
            return done / total, None
        started, before = self._start
        rate = (done - before) / max(now - started, 1e-9)
        return done / total, (total - done) / rate if rate > 0 else None
