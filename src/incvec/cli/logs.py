"""Numbers of a run while it trains, for other programs: `incvec run --log tensorboard`, `--log csv`, `--log wandb`.

Loss terms are logged over the run's progress, so that a resumed run continues on the same axis: as a share of its total
work, in TensorBoard in millionths of it. Accuracies are logged over the number of tasks learned.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from incvec.config import RunConfig, digest
from incvec.engine import events as ev
from incvec.errors import ConfigError

if TYPE_CHECKING:
    from incvec.engine.launch import Consume

TOTAL_STEPS = 1_000_000  # TensorBoard's x value at the end of a run
FLUSH_SECONDS = 10


class Log(StrEnum):
    tensorboard = "tensorboard"
    csv = "csv"
    wandb = "wandb"


class Writer(Protocol):
    """Receives the numbers of a run. It is made with the first one: a finished run leaves no empty files."""

    def epoch(self, event: ev.EpochEnded) -> None: ...
    def task(self, event: ev.TaskEnded) -> None: ...
    def close(self) -> None: ...


class TensorBoardLog:
    """Event files: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path) -> None:
        self.writer = package("tensorboard").SummaryWriter(str(folder), flush_secs=FLUSH_SECONDS)

    def epoch(self, event: ev.EpochEnded) -> None:
        step = round(TOTAL_STEPS * event.fraction)
        for name, value in losses(event).items():
            self.writer.add_scalar(name, value, step)
        self.writer.add_scalar("task", event.task + 1, step)

    def task(self, event: ev.TaskEnded) -> None:
        for name, value in accuracies(event).items():
            self.writer.add_scalar(name, value, event.task + 1)

    def close(self) -> None:
        self.writer.close()


class CsvLog:
    """`losses.csv` and `accuracy.csv`, one number per row; they can be read at any time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.losses = Rows(folder / "losses.csv", ("progress", "task", "stage", "epoch", "term", "value"))
        self.accuracies = Rows(folder / "accuracy.csv", ("tasks", "name", "accuracy"))

    def epoch(self, event: ev.EpochEnded) -> None:
        where = (event.fraction, event.task + 1, event.stage, event.epoch)
        self.losses.add(event.fraction, [(*where, term, value) for term, value in event.terms.items()])

    def task(self, event: ev.TaskEnded) -> None:
        rows = [(event.task + 1, name.removeprefix("accuracy/"), value) for name, value in accuracies(event).items()]
        self.accuracies.add(event.task + 1, rows)

    def close(self) -> None:
        """Every row is in its file already."""


class Rows:
    """A CSV file to which rows are appended. The first column increases; what a resumed run repeats is replaced."""

    def __init__(self, file: Path, header: Sequence[str]) -> None:
        self.file, self.header, self.started = file, header, False

    def add(self, position: float, rows: Sequence[Sequence[Any]]) -> None:
        if not self.started:
            self.started = True
            self.file.write_text(text_of([self.header, *self.before(position)]))
        with self.file.open("a") as file:
            file.write(text_of(rows))

    def before(self, position: float) -> list[list[str]]:
        """The rows of an earlier part of the run; a last line that was cut off is left out."""
        if not self.file.exists():
            return []
        rows = list(csv.reader(self.file.read_text().splitlines()))[1:]
        return [row for row in rows if len(row) == len(self.header) and float(row[0]) < position]


def text_of(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


class WandbLog:
    """A run of Weights & Biases, in the project WANDB_PROJECT or incvec; WANDB_MODE=offline needs no account.

    Its files are in the folder `wandb` of the run.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        wandb = package("wandb")
        identity = digest([str(folder.resolve()), config])  # a resumed run continues its own
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "incvec"),
                name=folder.name,
                id=identity,
                dir=str(folder),
                config=dict(config),
                resume="allow",
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"--log wandb: {error}. Log in with `wandb login`, or set WANDB_MODE=offline.") from None
        self.run.define_metric("progress", hidden=True)
        self.run.define_metric("tasks", hidden=True)
        self.run.define_metric("loss/*", step_metric="progress")
        self.run.define_metric("accuracy/*", step_metric="tasks")

    def epoch(self, event: ev.EpochEnded) -> None:
        self.run.log({"progress": event.fraction, "task": event.task + 1, **losses(event)})

    def task(self, event: ev.TaskEnded) -> None:
        self.run.log({"tasks": event.task + 1, **accuracies(event)})

    def close(self) -> None:
        self.run.finish()


def losses(event: ev.EpochEnded) -> dict[str, float]:
    return {f"loss/{event.stage}/{term}": value for term, value in event.terms.items()}


def accuracies(event: ev.TaskEnded) -> dict[str, float]:
    by_task = {f"accuracy/task {number}": value for number, value in enumerate(event.row, start=1)}
    return {"accuracy/classes seen": event.accuracy, **by_task}


def package(log: str) -> Any:
    """The package that a log needs, or an error that names it."""
    modules = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
    try:
        return importlib.import_module(modules[log]) if log in modules else None
    except ImportError as error:
        raise ConfigError(f"--log {log} needs the package {log} ({error}): pip install {log}.") from None


def make_writer(log: Log, folder: Path, config: Mapping[str, Any]) -> Writer:
    """The writer of a run's log, below the run's folder."""
    match log:
        case Log.tensorboard:
            return TensorBoardLog(folder / "tensorboard")
        case Log.csv:
            return CsvLog(folder / "csv")
        case Log.wandb:
            return WandbLog(folder, config)
    raise ValueError(log)


def logged(consume: Consume, logs: Sequence[Log] | None, folder: Path, config: RunConfig) -> Consume:
    """`consume`, with the run's loss terms and accuracies logged on the way. A missing package is an error now."""
    for log in logs or ():
        package(log)
    makers = [partial(make_writer, log, folder, config.resolved()) for log in logs or ()]
    return lambda events: consume(log_events(events, makers))


def log_events(events: Iterator[ev.Event], make: Sequence[Callable[[], Writer]]) -> Iterator[ev.Event]:
    """Pass the events through, and log loss terms and accuracies."""
    writers: list[Writer] = []
    try:
        for event in events:
            if isinstance(event, ev.EpochEnded | ev.TaskEnded):
                writers = writers or [each() for each in make]
                for writer in writers:
                    if isinstance(event, ev.EpochEnded):
                        writer.epoch(event)
                    else:
                        writer.task(event)
            yield event
    finally:
        for writer in writers:
            writer.close()
        if (close := getattr(events, "close", None)) is not None:
            close()
