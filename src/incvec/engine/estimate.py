"""How far a run is, and how long it will take: work counted in rows trained, at the rate so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from incvec.contracts import Stage, Task


class Estimate:
    """Counts rows times epochs. A stage not seen yet is taken to have its task's classes' images."""

    def __init__(self, tasks: Sequence[Task], plan: Callable[[Task], list[Stage]], per_class: float) -> None:
        self.tasks, self.plan, self.per_class = tasks, plan, per_class
        self._seen: dict[tuple[bool, str], float] = {}
        self._start: tuple[float, float] | None = None

    def saw(self, task: Task, stage: Stage, rows: int) -> None:
        """How many rows the stage trains on; those of its name in other increments will be about as large."""
        self._seen[(task.index == 0, stage.name)] = float(rows)

    def at(self, task: Task, stage: Stage, epochs_done: int) -> tuple[float, float | None]:
        """Share of the whole run's work done, and the seconds left at the rate so far."""
        total = done = 0.0
        now = (task.index, self.plan(task).index(stage))
        for t in self.tasks:
            for number, s in enumerate(self.plan(t)):
                rows = self._seen.get((t.index == 0, s.name), self.per_class * t.n_new)
                total += rows * s.epochs
                if (t.index, number) < now:
                    done += rows * s.epochs
                elif (t.index, number) == now:
                    done += rows * epochs_done
        clock = time.monotonic()
        if self._start is None:
            self._start = (clock, done)
            return done / total, None
        began, before = self._start
        rate = (done - before) / max(clock - began, 1e-9)
        return done / total, (total - done) / rate if rate > 0 else None
