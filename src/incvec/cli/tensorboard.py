"""TensorBoard event files of a run under way: `incvec run --log tensorboard`, then `tensorboard --logdir runs`.

A wrapper around a run's events that passes every one on and waits for nothing. The step is the run's progress in
millionths of its work, so that a run broken off and started again goes on along the same axis; accuracies have the
number of tasks learned as their step.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from incvec.engine import events as ev
from incvec.errors import ConfigError

WHOLE = 1_000_000
FLUSH = 10  # seconds after which what was told is on disk


def writer_type() -> Any:
    """torch's SummaryWriter, or a word on what it needs; to be asked before a run starts."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"--log tensorboard needs the package tensorboard ({error}): pip install tensorboard."
        ) from None


def logged(events: Iterator[ev.Event], folder: Path) -> Iterator[ev.Event]:
    """The same events; loss terms by stage and accuracies go to event files in `folder` as they pass."""
    return passing(events, writer_type(), folder)


def passing(events: Iterator[ev.Event], kind: Any, folder: Path) -> Iterator[ev.Event]:
    writer = None
    try:
        for event in events:
            if isinstance(event, ev.EpochEnded | ev.TaskEnded):
                # Made with the first number: a run that is done already leaves no empty file.
                writer = writer or kind(str(folder), flush_secs=FLUSH)
                write(writer, event)
            yield event
    finally:
        if writer is not None:
            writer.close()
        if (close := getattr(events, "close", None)) is not None:
            close()


def write(writer: Any, event: ev.EpochEnded | ev.TaskEnded) -> None:
    if isinstance(event, ev.EpochEnded):
        step = round(WHOLE * event.fraction)
        for term, value in event.terms.items():
            writer.add_scalar(f"loss/{event.stage}/{term}", value, step)
        writer.add_scalar("task", event.task + 1, step)
    else:
        writer.add_scalar("accuracy/classes seen", event.accuracy, event.task + 1)
        for number, value in enumerate(event.row, start=1):
            writer.add_scalar(f"accuracy/task {number}", value, event.task + 1)
