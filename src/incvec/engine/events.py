"""What a run tells while it goes on. Progress displays, logs and sweeps consume these; the loop draws nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True)
class Started(Event):
    name: str
    tasks: int
    engine: str
    device: str
    resumed: str | None = None  # where it goes on, where it does


@dataclass(frozen=True)
class StageStarted(Event):
    task: int
    stage: str
    epochs: int
    epoch: int  # epochs already done
    rows: int
    steps: int


@dataclass(frozen=True)
class Tick(Event):
    """Work was queued; nothing to show. Lets one thread turn many runs."""

    waiting: bool = False  # the run can do nothing just now
    blocked: bool = False  # and will not until another run has done its part


@dataclass(frozen=True)
class EpochEnded(Event):
    task: int
    stage: str
    epoch: int
    epochs: int
    terms: dict[str, float]
    fraction: float  # of the whole run, by work
    seconds_left: float | None


@dataclass(frozen=True)
class TaskEnded(Event):
    task: int
    accuracy: float  # over all classes seen, percent
    row: list[float]  # by task


@dataclass(frozen=True)
class Saved(Event):
    path: str
    seconds: float


@dataclass(frozen=True)
class Notice(Event):
    text: str


@dataclass(frozen=True)
class Finished(Event):
    record: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    already: bool = False  # it had been finished before
