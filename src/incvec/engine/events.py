"""What a run yields while it trains. Progress displays, logs and sweeps consume these; the engine displays nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """Base class of all events."""


@dataclass(frozen=True)
class Started(Event):
    name: str
    tasks: int
    engine: str
    device: str
    resumed: str | None = None  # the position or snapshot it resumes from, if any


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
    """Work was queued; nothing to display. Lets one thread alternate between many runs."""

    waiting: bool = False  # the run waits for the device or for another run
    blocked: bool = False  # it waits for another run, so it needs no turn until that one has progressed


@dataclass(frozen=True)
class EpochEnded(Event):
    task: int
    stage: str
    epoch: int
    epochs: int
    terms: dict[str, float]
    fraction: float  # of the whole run's work
    seconds_left: float | None


@dataclass(frozen=True)
class TaskEnded(Event):
    task: int
    accuracy: float  # over all classes seen, in percent
    row: list[float]  # by task


@dataclass(frozen=True)
class Saved(Event):
    path: str
    seconds: float


@dataclass(frozen=True)
class Notice(Event):
    text: str
    warning: bool = False  # something is probably not intended


@dataclass(frozen=True)
class Finished(Event):
    record: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    already: bool = False  # it was finished before
