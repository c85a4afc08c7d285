"""Snapshots restored: accuracies of the record, initial values of new rows, commands that make a run."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.atomic_files import read_tensors, write_tensors
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.engine.seeds import derive
from incvec.errors import ConfigError, DataError
from incvec.presets import resolve
from incvec.study.geometry import load_snapshot, path, task_accuracy
from incvec.study.geometry.snapshots import last_task, run_config
from incvec.study.runs import run_command
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import FinishedRuns


@pytest.fixture(scope="module")
def run(few: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("podnet")
    longer = {"epochs": 10, "batch_size": 16, "lr": 0.05}  # so that models differ in their accuracies
    return out, finish(make_run(few, out, quick("podnet", seed=3, podnet=longer)))


def test_path_ends_at_the_accuracies_of_the_record(run: tuple[Path, dict[str, Any]], few: Dataset) -> None:
    out, record = run
    accuracy = record["classifiers"]["cnn"]["accuracy"]
    start, end = load_snapshot(out, 1, few), load_snapshot(out, 2, few)
    assert (start.task.index, end.task.index) == (1, 2)
    assert [task_accuracy(start, i)(start.model) for i in (0, 1)] == accuracy[1]
    grown = load_snapshot(out, 0, few, grow_to=2)
    values = path(end.model, grown.state(), end.state(), task_accuracy(end, 0), points=5)
    assert values[-1] == accuracy[2][0]
    assert values[0] == task_accuracy(grown, 0)(grown.model)
    assert values[0] > values[-1]


def test_grown_rows_have_their_initial_values_of_the_run(run: tuple[Path, dict[str, Any]], few: Dataset) -> None:
    out, _ = run
    plain, grown = load_snapshot(out, 0, few).state(), load_snapshot(out, 0, few, grow_to=2).state()
    assert all(torch.equal(grown[name], value) for name, value in plain.items())
    for index in (1, 2):
        rows = grown[f"head.blocks.{index}.weight"]
        generator = torch.Generator().manual_seed(derive(3, index, "grow"))
        drawn = torch.randn(rows.shape, generator=generator) / rows.shape[1] ** 0.5
        torch.testing.assert_close(rows, drawn, rtol=0, atol=0)


def test_missing_snapshots_and_impossible_growth(run: tuple[Path, dict[str, Any]], few: Dataset) -> None:
    out, _ = run
    with pytest.raises(DataError, match=r"no snapshot .*task-07"):
        load_snapshot(out / "none", 7, few)
    with pytest.raises(ConfigError, match=r"no task 8 in .*: it has 3"):
        load_snapshot(out, 7, few)
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match=f"grow_to is {wrong}: expected a task from 1,.* to 2"):
            load_snapshot(out, 1, few, grow_to=wrong)


def test_snapshots_of_format_1_are_read(runs: FinishedRuns, tmp_path: Path) -> None:
    tensors, metadata = read_tensors(runs.ivt / "snapshots" / "task-00.safetensors")
    metadata["config"]["ivt"]["optimiser_state"] = metadata["config"]["ivt"].pop("optimizer_state")
    (tmp_path / "snapshots").mkdir()
    write_tensors(tmp_path / "snapshots" / "task-00.safetensors", tensors, {**metadata, "format": 1})
    assert run_config(tmp_path) == run_config(runs.ivt)


def test_last_task_is_the_highest(runs: FinishedRuns, tmp_path: Path) -> None:
    incomplete = shutil.copytree(runs.plain, tmp_path / "incomplete")
    (incomplete / "snapshots" / "task-01.safetensors").unlink()
    assert last_task(incomplete) == 2


def test_command_of_a_run_has_every_changed_setting(runs: FinishedRuns) -> None:
    words = run_command(run_config(runs.ivt).resolved(), "out").split()
    assert words[:6] == ["incvec", "run", "--method", "podnet", "--addon", "ivt"]
    assert {"podnet.epochs=6", "base_classes=2", "ivt.interval=1"} <= set(words)
    assert any("net=" in word and "tiny" in word for word in words)
    assert words[-2:] == ["--out", "out"]
    assert "--data-root" not in words  # the digits are embedded
    subset = resolve({"method": "podnet", "dataset": "imagenet-subset", "class_list": "cmc", "held_out": 5})
    command = run_command(subset.resolved())
    assert {"class_list=cmc", "held_out=5"} == {word for word in shlex.split(command) if "_" in word}
    assert "--data-root DATA" in command
