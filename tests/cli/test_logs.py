"""Logs of a run: TensorBoard event files, CSV files, Weights & Biases in offline mode."""

from __future__ import annotations

import builtins
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from incvec.cli.logs import TOTAL_STEPS, CsvLog, TensorBoardLog, log_events
from incvec.data import Dataset
from incvec.engine import events as ev
from tests.cli.conftest import invoke, message
from tests.conftest import make_run, quick


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_event_files_have_losses_and_accuracies(few: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the optional package tensorboard is not installed")
    expected = list(make_run(few, tmp_path / "plain", quick("podnet")).events())
    run = make_run(few, tmp_path / "run", quick("podnet"))
    passed = list(log_events(run.events(), [lambda: TensorBoardLog(tmp_path / "log")]))
    kinds = [type(event) for event in passed if not isinstance(event, ev.Tick | ev.Saved)]
    assert kinds == [type(event) for event in expected if not isinstance(event, ev.Tick | ev.Saved)]
    found = scalars(tmp_path / "log")
    tasks = [event for event in passed if isinstance(event, ev.TaskEnded)]
    assert found["accuracy/classes seen"] == [(e.task + 1, pytest.approx(e.accuracy)) for e in tasks]
    assert found["accuracy/task 1"] == [(e.task + 1, pytest.approx(e.row[0])) for e in tasks]
    epochs = [event for event in passed if isinstance(event, ev.EpochEnded) and event.stage == "main"]
    assert found["loss/main/nca"] == [(round(TOTAL_STEPS * e.fraction), pytest.approx(e.terms["nca"])) for e in epochs]
    steps = [step for step, _ in found["task"]]
    assert steps == sorted(steps)
    assert steps[-1] <= TOTAL_STEPS


def test_interrupted_run_is_closed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the optional package tensorboard is not installed")
    closed = []

    def events() -> Iterator[ev.Event]:
        try:
            yield ev.TaskEnded(0, 50.0, [50.0])
            yield ev.TaskEnded(1, 40.0, [40.0, 40.0])
        finally:
            closed.append(True)

    logged = log_events(events(), [lambda: TensorBoardLog(tmp_path)])
    next(logged)
    logged.close()  # type: ignore[attr-defined]
    assert closed == [True]
    assert scalars(tmp_path)["accuracy/classes seen"] == [(1, 50.0)]


def test_missing_package_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "tensorboard":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    result = invoke("run", "--method", "finetune", "--log", "tensorboard", "--out", tmp_path / "run")
    assert result.exit_code == 1
    assert "pip install tensorboard" in message(result)
    assert not (tmp_path / "run").exists()


def rows(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text().splitlines()))


def test_csv_files_have_losses_and_accuracies_once(tmp_path: Path) -> None:
    """A resumed run repeats the epochs since its checkpoint; their rows, and a line that was cut off, are replaced."""

    def events(first: int, last: int) -> Iterator[ev.Event]:
        for epoch in range(first, last):
            yield ev.EpochEnded(0, "main", epoch + 1, 4, {"ce": float(epoch), "kd": 0.5}, (epoch + 1) / 4, None)
        yield ev.TaskEnded(0, 50.0, [50.0])

    def log(first: int, last: int) -> None:
        assert len(list(log_events(events(first, last), [lambda: CsvLog(tmp_path)]))) == last - first + 1

    log(0, 3)
    with (tmp_path / "losses.csv").open("a") as file:
        file.write("0.9,1,ma")
    log(2, 4)
    found = rows(tmp_path / "losses.csv")
    assert [(row["epoch"], row["term"], float(row["value"])) for row in found] == [
        (str(epoch + 1), term, value) for epoch in range(4) for term, value in (("ce", float(epoch)), ("kd", 0.5))
    ]
    assert [float(row["progress"]) for row in found] == [0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0]
    assert [row["name"] for row in rows(tmp_path / "accuracy.csv")] == ["classes seen", "task 1"]


@pytest.mark.slow  # wandb is installed with the libraries that make test-all uses
def test_wandb_in_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the optional package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    short = ["--set", "finetune.net=tiny", "--epochs", "1", "--set", "stop_after=2"]
    result = invoke("run", "--method", "finetune", "--log", "wandb", "--out", tmp_path / "run", *short)
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # its own process writes the file
    while not all(name in file.read_bytes() for name in (b"loss/main/ce", b"accuracy/classes seen")):
        assert time.monotonic() < deadline, file.read_bytes()[:1000]
        time.sleep(0.2)


def test_run_with_log_option_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the optional package tensorboard is not installed")
    short = ["--set", "finetune.net=tiny", "--set", "finetune.epochs=1"]
    result = invoke("run", "--method", "finetune", "--log", "tensorboard", "--out", tmp_path / "run", *short)
    assert result.exit_code == 0, result.output
    assert len(scalars(tmp_path / "run" / "tensorboard")["accuracy/classes seen"]) == 4
