"""Progress of the classifier's commands, with an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from incvec.cli.common import say

LINE_INTERVAL = 5.0  # seconds between two lines of progress, without a terminal


class Steps:
    """What is being done, and an estimate of the time left: a bar on a terminal, lines now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console, self.what, self.shown, self.began = console, "", time.monotonic(), time.monotonic()
        self.bar: Bar | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
            self.bar = Bar(*columns, console=console, transient=True)
            self.row = self.bar.add_task("", total=None)
            self.bar.start()

    def show(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self.what:
            self.what, self.began = what, now
            if self.bar is not None:
                self.bar.reset(self.row, description=what, total=total)
        if self.bar is not None:
            self.bar.update(self.row, completed=done, total=total)
        elif now - self.shown >= LINE_INTERVAL and done:
            self.shown = now
            left = (now - self.began) * (total - done) / done
            say(f"{time.strftime('%H:%M:%S')} {what}: {done} of {total}, {left:.0f} s left", console=self.console)

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
