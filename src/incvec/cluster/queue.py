"""Which run a worker trains next: base tasks first and once, runs of lost workers again. No Ray, no clock, no files.

The coordinator and the simulation of whole clusters (benchmarks/cluster_simulation.py) use the same queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

MAX_ATTEMPTS = 4  # of a run that does not get further than before
MAX_FAILURES = 2  # of a worker, one after the other, for reasons of its node

State = Literal["waiting", "running", "finished", "failed"]


@dataclass
class Job:
    """A run and where it stands. Jobs of one group have the same base task."""

    number: int
    group: str | None
    state: State = "waiting"
    worker: str = ""
    attempts: int = 0  # that failed, since it last got further than before
    furthest: float = 0.0  # the largest fraction of its work that was ever done
    avoid: set[str] = field(default_factory=set)  # workers and nodes on which it failed
    not_before: float = 0.0
    started: bool = False


@dataclass
class Place:
    """A worker, and the runs that it has taken."""

    name: str
    node: str
    jobs: list[int] = field(default_factory=list)
    failures: int = 0
    retired: str = ""  # why it gets no more runs


class Queue:
    """The runs of a sweep and the workers that train them.

    Runs of one group share a base task: one of them goes first, the others follow when the base is stored. `first` is
    a run that all others wait for.
    """

    def __init__(self, groups: Sequence[str | None], first: int | None = None) -> None:
        self.jobs = [Job(number, group) for number, group in enumerate(groups)]
        self.first = first
        self.expected = 0  # workers, including those that have not joined yet
        self.places: dict[str, Place] = {}
        self.ready: set[str] = set()  # groups whose base is stored

    @property
    def done(self) -> bool:
        return all(job.state in ("finished", "failed") for job in self.jobs)

    # Workers --------------------------------------------------------------------------------------------

    def join(self, worker: str, node: str) -> None:
        self.places[worker] = Place(worker, node)

    def leave(self, worker: str) -> list[int]:
        """The worker is gone. Returns the runs that it had."""
        place = self.places.pop(worker, None)
        return [] if place is None else place.jobs

    def working(self) -> list[Place]:
        return [place for place in self.places.values() if not place.retired]

    def retired(self) -> list[Place]:
        """Those that get no more runs. They keep their place."""
        return [place for place in self.places.values() if place.retired]

    def blame(self, worker: str, reason: str, unless_last: bool = False) -> None:
        """A run failed because of the worker's node. After `MAX_FAILURES` in a row the worker gets no more runs.

        `unless_last`: other runs may still succeed there, so the last worker goes on.
        """
        place = self.places[worker]
        place.failures += 1
        if place.failures >= MAX_FAILURES and not (unless_last and self.working() == [place]):
            place.retired = reason

    # Runs -----------------------------------------------------------------------------------------------

    def take(self, worker: str, now: float) -> int | None:
        """A run for the worker, or None if there is none for it now."""
        place = self.places.get(worker)
        if place is None or place.retired or any(self._alone(self.jobs[number]) for number in place.jobs):
            return None
        running = [job for job in self.jobs if job.state == "running"]
        in_training = {job.group for job in running} - self.ready - {None}  # base tasks
        available = [job for job in self.jobs if job.group not in in_training and self._available(job, now)]
        workers = max(len(self.working()), self.expected, 1)
        if len(place.jobs) >= max(1, (len(running) + len(available)) // workers):
            return None  # the rest is for others
        suitable = [
            job
            for job in available
            if not (self._alone(job) and place.jobs) and not (self._avoids(job, place) and self._has_other_place(job))
        ]
        if not suitable:
            return None
        followers = self._followers()
        # First those that others wait for, of these first what has been started, then in the order of the sweep.
        job = min(suitable, key=lambda job: (-followers.get(job.group or "", 0), not job.started, job.number))
        job.state, job.worker, job.started = "running", worker, True
        place.jobs.append(job.number)
        return job.number

    def base_ready(self, number: int) -> None:
        """The base task of the run is stored: the others of its group may start."""
        if (group := self.jobs[number].group) is not None:
            self.ready.add(group)

    def progressed(self, number: int, fraction: float) -> None:
        job = self.jobs[number]
        if fraction > job.furthest:
            job.furthest, job.attempts = fraction, 0

    def finished(self, number: int) -> None:
        if (place := self.places.get(self.jobs[number].worker)) is not None:
            place.failures = 0
        self._end(number, "finished")
        self.base_ready(number)

    def failed(self, number: int) -> None:
        self._end(number, "failed")

    def requeue(self, number: int, avoid: str = "", not_before: float = 0.0, counts: bool = True) -> bool:
        """The run was interrupted. Returns False if that was its last attempt: then it has failed."""
        job = self.jobs[number]
        job.attempts += counts
        if avoid:
            job.avoid.add(avoid)
        self._end(number, "failed" if job.attempts >= MAX_ATTEMPTS else "waiting")
        job.not_before = not_before
        return job.state == "waiting"

    def _end(self, number: int, state: State) -> None:
        job = self.jobs[number]
        place = self.places.get(job.worker)
        if place is not None and number in place.jobs:
            place.jobs.remove(number)
        job.state, job.worker = state, ""

    def _available(self, job: Job, now: float) -> bool:
        if job.state != "waiting" or job.not_before > now:
            return False
        return self.first in (None, job.number) or self.jobs[self.first].state == "finished"

    def _followers(self) -> dict[str, int]:
        """How many runs wait for the base task of each group."""
        waiting: dict[str, int] = {}
        for job in self.jobs:
            if job.state == "waiting" and job.group is not None and job.group not in self.ready:
                waiting[job.group] = waiting.get(job.group, 0) + 1
        return waiting

    def _alone(self, job: Job) -> bool:
        """Whether a run has failed so often that it shall not take others down with it."""
        return job.attempts >= 2

    def _avoids(self, job: Job, place: Place) -> bool:
        return not job.avoid.isdisjoint((place.name, place.node))

    def _has_other_place(self, job: Job) -> bool:
        return any(not self._avoids(job, place) for place in self.working())
