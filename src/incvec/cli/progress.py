"""Shows what a run tells: a live bar on a terminal, a few timestamped lines elsewhere.

The engine yields events and knows nothing of this. Nothing here waits for the device or draws more often than
a person reads, so showing a run does not slow it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from incvec.engine import events as ev
from incvec.study.tables import duration

PAUSE = 0.001  # seconds to sleep where a run can do nothing just now
QUIET = 5.0  # seconds between two lines about epochs, where there is no terminal


class Display(Protocol):
    def show(self, event: ev.Event) -> None: ...
    def close(self) -> None: ...


def follow(events: Iterator[ev.Event], console: Console | None = None) -> dict[str, Any]:
    """Turn a run to its end, showing it as it goes, and return its record."""
    console = console or Console()
    display: Display = Screen(console) if console.is_terminal else Lines(console)
    record: dict[str, Any] = {}
    with closing(display):
        try:
            for event in events:
                if isinstance(event, ev.Tick):
                    if event.waiting:
                        time.sleep(PAUSE)
                    continue
                display.show(event)
                if isinstance(event, ev.Finished):
                    record = event.record
        finally:
            # A run stopped half-way gives its lock back now, not when it happens to be collected.
            if (close := getattr(events, "close", None)) is not None:
                close()
    return record


def losses(terms: Mapping[str, float]) -> str:
    """`loss 1.23 (nca 0.91, flat 0.32)`."""
    total = f"loss {sum(terms.values()):.3g}"
    if len(terms) < 2:
        return total
    return f"{total} ({', '.join(f'{name} {value:.3g}' for name, value in terms.items())})"


def by_task(row: list[float]) -> str:
    return " ".join(f"{accuracy:.1f}" for accuracy in row)


class Reader:
    """What both displays remember of a run, and how they put it into words."""

    def __init__(self) -> None:
        self.name = ""
        self.tasks = 0

    def started(self, event: ev.Started) -> str:
        self.name, self.tasks = event.name, event.tasks
        return f"{event.name}: {event.tasks} tasks, {event.engine} engine on {event.device}" + (
            f", going on from {event.resumed}" if event.resumed else ""
        )

    def where(self, task: int, stage: str) -> str:
        return f"task {task + 1}/{self.tasks} {stage}"

    def task_ended(self, event: ev.TaskEnded) -> str:
        return (
            f"task {event.task + 1}/{self.tasks} done: accuracy {event.accuracy:.2f} % over the classes seen "
            f"(by task: {by_task(event.row)})"
        )

    def finished(self, event: ev.Finished) -> str:
        return f"done before: {event.path}" if event.already else f"record written to {event.path}"


class Lines(Reader):
    """Timestamped lines: one for each task and stage, one for epochs every few seconds."""

    def __init__(self, console: Console, quiet: float = QUIET) -> None:
        super().__init__()
        self.console = console
        self.quiet = quiet
        self.last = time.monotonic()

    def show(self, event: ev.Event) -> None:
        now = time.monotonic()
        match event:
            case ev.Started():
                self.line(self.started(event))
            case ev.StageStarted():
                done = f", {event.epoch} of them done" if event.epoch else ""
                self.line(
                    f"{self.where(event.task, event.stage)}: {event.rows} images, {event.epochs} epochs of "
                    f"{event.steps} steps{done}"
                )
            case ev.EpochEnded() if now - self.last >= self.quiet:
                left = "" if event.seconds_left is None else f", {duration(event.seconds_left)} left"
                self.line(
                    f"{self.where(event.task, event.stage)} epoch {event.epoch}/{event.epochs}: "
                    f"{losses(event.terms)}, {event.fraction:.0%} of the run{left}"
                )
            case ev.TaskEnded():
                self.line(self.task_ended(event))
            case ev.Notice():
                self.line(event.text)
            case ev.Finished():
                self.line(self.finished(event))

    def line(self, text: str) -> None:
        self.last = time.monotonic()
        self.console.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True, markup=False, highlight=False)

    def close(self) -> None: ...


class Screen(Reader):
    """One bar for the whole run, below it the epoch and its loss terms; finished tasks stay above."""

    def __init__(self, console: Console) -> None:
        super().__init__()
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
        self.doing = ""
        self.accuracy = ""
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=5, transient=True)
        self.live.start()

    def render(self) -> Group:
        text = ", ".join(part for part in (self.doing, self.accuracy) if part)
        return Group(self.bar.get_renderable(), Text(text, style="dim", no_wrap=True, overflow="ellipsis"))

    def show(self, event: ev.Event) -> None:
        match event:
            case ev.Started():
                self.say(self.started(event), "bold")
                self.bar.update(self.row, description=event.name)
            case ev.StageStarted():
                self.doing = f"{self.where(event.task, event.stage)}, epoch {event.epoch}/{event.epochs}"
            case ev.EpochEnded():
                left = "" if event.seconds_left is None else f"{duration(event.seconds_left)} left"
                self.bar.update(self.row, completed=event.fraction, left=left)
                self.doing = (
                    f"{self.where(event.task, event.stage)}, epoch {event.epoch}/{event.epochs}, {losses(event.terms)}"
                )
            case ev.TaskEnded():
                self.accuracy = f"accuracy {event.accuracy:.1f} %"
                self.say(f"  {self.task_ended(event)}")
            case ev.Notice():
                self.say(f"  {event.text}", "dim")
            case ev.Finished():
                self.say(f"  {self.finished(event)}", "dim")

    def say(self, text: str, style: str = "") -> None:
        """A line that stays, above the bar."""
        self.live.console.print(Text(text, style=style))

    def close(self) -> None:
        self.live.stop()
