"""Finished runs on a few digits: PODNet, PODNet with IVT, and its oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from incvec.data import Dataset
from incvec.engine.run import finish
from tests.conftest import make_run, quick

LONGER = {"epochs": 6, "batch_size": 16, "lr": 0.05}  # so that models differ in their accuracies


class FinishedRuns(NamedTuple):
    plain: Path
    ivt: Path
    oracle: Path
    records: dict[str, dict[str, Any]]


def train(data: Dataset, folder: Path, **given: Any) -> FinishedRuns:
    """Train the three runs with a shared base task."""
    settings = {"seed": 3, "podnet": LONGER, **given}
    configs = {
        "plain": quick("podnet", **settings),
        "ivt": quick("podnet", "ivt", **settings),
        "oracle": quick("podnet", oracle=True, **settings),
    }
    runs = {name: make_run(data, folder / name, config, folder / "bases") for name, config in configs.items()}
    records = {name: finish(run) for name, run in runs.items()}
    return FinishedRuns(folder / "plain", folder / "ivt", folder / "oracle", records)


def train_from_snapshot(data: Dataset, folder: Path, **given: Any) -> FinishedRuns:
    """Train three runs that start at one snapshot: that of a run with IVT after its second task."""
    first = make_run(data, folder / "first", quick("podnet", "ivt", **{"seed": 3, "podnet": LONGER, **given}))
    finish(first)
    return train(data, folder, start=str(first.snapshot_path(1)), **given)


@pytest.fixture(scope="session")
def runs(few: Dataset, tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    return train(few, tmp_path_factory.mktemp("runs"))
