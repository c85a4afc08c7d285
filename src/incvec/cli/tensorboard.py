"""TensorBoard event files of a run: `incvec run --log tensorboard`, then `tensorboard --logdir runs`.

Loss terms are plotted over the run's progress in millionths of its total work, so that a resumed run continues on the
same axis. Accuracies are plotted over the number of tasks learned.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from incvec.engine import events as ev
from incvec.errors import ConfigError

TOTAL_STEPS = 1_000_000  # the x value at the end of a run
FLUSH_SECONDS = 10


def summary_writer() -> Any:
    """Return torch's SummaryWriter class, or raise an error that names the missing package."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"--log tensorboard needs the package tensorboard ({error}): pip install tensorboard."
        ) from None


def log_events(events: Iterator[ev.Event], folder: Path) -> Iterator[ev.Event]:
    """Pass the events through, and write loss terms and accuracies to event files in `folder`."""
    writer = None
    try:
        for event in events:
            if isinstance(event, ev.EpochEnded | ev.TaskEnded):
                # Created with the first number: a run that was finished before leaves no empty file.
                writer = writer or summary_writer()(str(folder), flush_secs=FLUSH_SECONDS)
                write(writer, event)
            yield event
    finally:
        if writer is not None:
            writer.close()
        if (close := getattr(events, "close", None)) is not None:
            close()


def write(writer: Any, event: ev.EpochEnded | ev.TaskEnded) -> None:
    if isinstance(event, ev.EpochEnded):
        step = round(TOTAL_STEPS * event.fraction)
        for term, value in event.terms.items():
            writer.add_scalar(f"loss/{event.stage}/{term}", value, step)
        writer.add_scalar("task", event.task + 1, step)
    else:
        writer.add_scalar("accuracy/classes seen", event.accuracy, event.task + 1)
        for number, value in enumerate(event.row, start=1):
            writer.add_scalar(f"accuracy/task {number}", value, event.task + 1)
