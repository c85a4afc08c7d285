"""Progress of runs: a live display on a terminal, a few timestamped lines elsewhere.

The engine yields events and knows nothing of displays. Nothing here waits for the device or draws more often than a
person reads, so displaying a run does not slow it down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from incvec.cli.common import say
from incvec.engine import events as ev
from incvec.engine.scheduler import Failed, Requeued
from incvec.errors import Busy, IncvecError
from incvec.study.tables import duration

IDLE_SLEEP = 0.001  # seconds to sleep when a run has nothing to do
EPOCH_INTERVAL = 5.0  # seconds between two lines about epochs, without a terminal
SWEEP_INTERVAL = 10.0  # seconds between two summaries of a sweep, without a terminal


def follow(events: Iterator[ev.Event], console: Console | None = None) -> dict[str, Any]:
    """Drive a run to its end, display its progress and return its record."""
    console = console or Console()
    display = LiveDisplay(console) if console.is_terminal else LogDisplay(console)
    record: dict[str, Any] = {}
    with closing(display):
        try:
            for event in events:
                if isinstance(event, ev.Tick):
                    if event.waiting:
                        time.sleep(IDLE_SLEEP)
                    continue
                display.show(event)
                if isinstance(event, ev.Finished):
                    record = event.record
        finally:
            # An interrupted run releases its lock now, not when it is garbage collected.
            if (close := getattr(events, "close", None)) is not None:
                close()
    return record


def format_losses(terms: Mapping[str, float]) -> str:
    """`loss 1.23 (nca 0.91, flat 0.32)`."""
    total = f"loss {sum(terms.values()):.3g}"
    if len(terms) < 2:
        return total
    return f"{total} ({', '.join(f'{name} {value:.3g}' for name, value in terms.items())})"


class LogDisplay:
    """Timestamped lines: one per task and stage, and one about epochs every few seconds."""

    def __init__(self, console: Console, interval: float = EPOCH_INTERVAL) -> None:
        self.console, self.interval = console, interval
        self.last = time.monotonic()
        self.tasks = 0

    def show(self, event: ev.Event) -> None:
        match event:
            case ev.Started():
                self.tasks = event.tasks
                resumed = f", resuming from {event.resumed}" if event.resumed else ""
                engine = f"{event.engine} engine on {event.device}"
                self.line(f"{event.name}: {event.tasks} tasks, {engine}{resumed}", "bold")
            case ev.StageStarted():
                self.stage_started(event)
            case ev.EpochEnded():
                self.epoch_ended(event)
            case ev.TaskEnded():
                accuracy = f"accuracy {event.accuracy:.2f} % on all classes seen"
                by_task = " ".join(f"{value:.1f}" for value in event.row)
                self.line(f"task {event.task + 1}/{self.tasks} finished: {accuracy} (by task: {by_task})")
            case ev.Notice():
                self.line(event.text, "dim")
            case ev.Finished():
                self.line(f"{'already finished:' if event.already else 'record written to'} {event.path}", "dim")

    def stage(self, event: ev.StageStarted | ev.EpochEnded) -> str:
        return f"task {event.task + 1}/{self.tasks} {event.stage}"

    def stage_started(self, event: ev.StageStarted) -> None:
        done = f", {event.epoch} of them done" if event.epoch else ""
        self.line(f"{self.stage(event)}: {event.rows} images, {event.epochs} epochs of {event.steps} steps{done}")

    def epoch_ended(self, event: ev.EpochEnded) -> None:
        if time.monotonic() - self.last >= self.interval:
            left = "" if event.seconds_left is None else f", {duration(event.seconds_left)} left"
            self.line(
                f"{self.stage(event)} epoch {event.epoch}/{event.epochs}: {format_losses(event.terms)}, "
                f"{event.fraction:.0%} of the run{left}"
            )

    def line(self, text: str, style: str = "") -> None:
        self.last = time.monotonic()
        say(f"{time.strftime('%H:%M:%S')} {text}", console=self.console)

    def close(self) -> None:
        """Leave the terminal as it was."""


class LiveDisplay(LogDisplay):
    """One bar for the whole run, with the current epoch and its loss terms below. Finished tasks stay above."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self.row = self.bar.add_task("", total=1.0, left="")
        self.current = ""
        self.accuracy = ""
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=5, transient=True)
        self.live.start()

    def render(self) -> Group:
        text = ", ".join(part for part in (self.current, self.accuracy) if part)
        return Group(self.bar.get_renderable(), Text(text, style="dim", no_wrap=True, overflow="ellipsis"))

    def show(self, event: ev.Event) -> None:
        if isinstance(event, ev.Started):
            self.bar.update(self.row, description=event.name)
        elif isinstance(event, ev.TaskEnded):
            self.accuracy = f"accuracy {event.accuracy:.1f} %"
        super().show(event)

    def stage_started(self, event: ev.StageStarted) -> None:
        self.current = f"{self.stage(event)}, epoch {event.epoch}/{event.epochs}"

    def epoch_ended(self, event: ev.EpochEnded) -> None:
        left = "" if event.seconds_left is None else f"{duration(event.seconds_left)} left"
        self.bar.update(self.row, completed=event.fraction, left=left)
        self.current = f"{self.stage(event)}, epoch {event.epoch}/{event.epochs}, {format_losses(event.terms)}"

    def line(self, text: str, style: str = "") -> None:
        """Print a line that stays, above the bar; all but the heading are indented."""
        self.live.console.print(Text(text if style == "bold" else f"  {text}", style=style))

    def close(self) -> None:
        self.live.stop()


@dataclass
class RunStatus:
    """One run of a sweep, as displayed."""

    name: str
    state: str = "waiting"
    stage: str = ""
    fraction: float = 0.0
    seconds_left: float | None = None
    accuracy: str = ""
    error: str = ""
    short: str = ""  # what distinguishes its name from those of the others

    def update(self, event: ev.Event) -> None:
        match event:
            case ev.Started():
                self.state = "resuming" if event.resumed else "training"
            case ev.Tick(blocked=True):
                self.state = "waiting for base"
            case ev.EpochEnded():
                self.state = "training"
                self.stage = f"task {event.task + 1} {event.stage} {event.epoch}/{event.epochs}"
                self.fraction, self.seconds_left = event.fraction, event.seconds_left
            case ev.TaskEnded():
                self.accuracy = f"{event.accuracy:.2f}"
            case ev.Notice():
                self.stage = event.text[:60]
            case Requeued():
                self.state, self.stage, self.seconds_left = "queued again", event.reason[:60], None
            case Failed(error=Busy()):
                self.state = "in another process"  # several processes may share a sweep
            case Failed():
                self.state = "failed"
                self.error = f"{type(event.error).__name__}: {event.error}"
                if not isinstance(event.error, IncvecError):
                    self.error += " (a bug in incvec: please report it)"
            case ev.Finished():
                self.state, self.fraction, self.seconds_left, self.stage = "finished", 1.0, None, ""
                metrics = event.record["metrics"]
                forgetting = "" if metrics["FM"] is None else f"  FM {metrics['FM']:.2f}"
                self.accuracy = f"AA {metrics['AA']:.2f}  LA {metrics['LA']:.2f}{forgetting}"

    def summary(self) -> str:
        left = "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"
        return f"{self.short or self.name} {self.stage} {100 * self.fraction:.0f} %{left}"


def short_names(names: Sequence[str]) -> list[str]:
    """Names of runs without the words that all of them have; a name that has no others is left as it is."""
    words = [name.split("-") for name in names]
    common = set(words[0]).intersection(*words)
    short = ["-".join(word for word in each if word not in common) for each in words]
    return [one or name for one, name in zip(short, names, strict=True)] if len({*short}) == len(names) else [*names]


def status_table(runs: Sequence[RunStatus], title: str) -> Table:
    """A table whose columns all fold, so that it fits a narrow terminal while it is updated."""
    table = Table(title=Text(title), title_justify="left")
    for column in ("run", "state", "stage", "done", "left", "accuracy"):
        table.add_column(column, overflow="fold")
    for run in runs:
        left = "" if run.seconds_left is None else duration(run.seconds_left)
        cells = (run.name, run.state, run.stage, f"{100 * run.fraction:.0f} %", left, run.accuracy)
        table.add_row(*map(Text, cells))
    return table


class TotalEstimate:
    """The time that all runs of a sweep need, from the share of their work done since this process began.

    It counts every run as the same amount of work, and knows nothing before the first epochs have ended.
    """

    def __init__(self, runs: Sequence[RunStatus]) -> None:
        self.runs, self.began = runs, time.monotonic()
        self.before: dict[str, float] = {}  # by run: what an earlier process did, or the run that trained its base

    def update(self, run: RunStatus, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and event.already:
            self.before[run.name] = 1.0
        elif isinstance(event, ev.EpochEnded):
            self.before.setdefault(run.name, event.fraction)

    def text(self) -> str:
        done = sum(run.fraction - self.before.get(run.name, 0.0) for run in self.runs)
        left = sum(1.0 - run.fraction for run in self.runs if run.state != "failed")
        if done <= 0 or left <= 0:
            return ""
        return f"about {duration((time.monotonic() - self.began) * left / done)} left in all"


def follow_sweep(
    names: Sequence[str],
    events: Iterable[tuple[int, ev.Event]],
    title: str,
    console: Console,
    nodes: Callable[[], str] = str,
) -> list[RunStatus]:
    """Drive all runs to their ends: with a live table on a terminal, with a line now and then elsewhere.

    Both have an estimate for every run in training and one for all together. `nodes` describes the machines, if there
    are several.
    """
    runs = [RunStatus(name, short=short) for name, short in zip(names, short_names(names), strict=True)]
    estimate = TotalEstimate(runs)
    live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
    if live:
        live.start()
    else:
        say(title, console=console)
    last = time.monotonic()
    try:
        for number, event in events:
            run = runs[number]
            run.update(event)
            estimate.update(run, event)
            if isinstance(event, ev.Notice) and event.warning:
                say(f"{run.name}: {event.text}", console=console)
            if isinstance(event, Requeued):
                say(f"queued again: {run.name}: {event.reason}", console=console)
            if isinstance(event, ev.Finished | Failed) and live is None:
                say(f"{run.state} {run.name}: {run.error or run.accuracy}", console=console)
            now = time.monotonic()
            if now - last < (0.5 if live else SWEEP_INTERVAL):
                continue
            last = now
            if live:
                live.update(status_table(runs, ", ".join(filter(None, (title, estimate.text(), nodes())))))
            else:
                finished = sum(r.state == "finished" for r in runs)
                active = [r.summary() for r in runs if r.state == "training"]
                parts = [f"{finished}/{len(runs)} finished", estimate.text(), nodes(), *active]
                say("; ".join(filter(None, parts)), console=console)
    finally:
        if live:
            live.update(status_table(runs, title))
            live.stop()
    console.print(status_table(runs, title) if not live else "")
    return runs
