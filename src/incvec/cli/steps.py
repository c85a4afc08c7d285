"""Progress of commands on photos and data sets, with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from incvec.cli.common import say
from incvec.study.tables import duration

LINE_INTERVAL = 5.0  # seconds between two lines of progress, without a terminal


class Steps:
    """What is being done, and an estimate of the time left: a bar on a terminal, lines now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console, self.what, self.shown = console, "", time.monotonic()
        self.began, self.before = self.shown, 0  # of what is being done: its start, and the part done before
        self.bar: Bar | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self.bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True)
            self.row = self.bar.add_task("", total=None)
            self.bar.start()

    def show(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self.what:
            self.what, self.began, self.before = what, now, done
            if self.bar is not None:
                self.bar.reset(self.row, description=what, total=total)
        if self.bar is not None:
            self.bar.update(self.row, completed=done, total=total)
        elif now - self.shown >= LINE_INTERVAL and done > self.before:
            self.shown = now
            left = duration((now - self.began) * (total - done) / (done - self.before))
            say(f"{time.strftime('%H:%M:%S')} {what}: {done} of {total}, {left} left", console=self.console)

    def event(self, event: Any) -> None:
        """An event of the training run."""
        from incvec.engine import events as ev

        if isinstance(event, ev.EpochEnded):
            self.show(f"training, stage {event.stage}", event.epoch, event.epochs)
        elif isinstance(event, ev.Started) and event.resumed:
            say(f"resuming from {event.resumed}", console=self.console)
        elif isinstance(event, ev.Notice):
            say(event.text, style="dim", console=self.console)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def steps() -> Iterator[Steps]:
    shown = Steps(Console(stderr=True))
    try:
        yield shown
    finally:
        shown.close()
