"""Runs to look into: PODNet, with IVT, and its oracle, on a handful of digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from incvec.data import Dataset
from incvec.engine.run import finish
from tests.conftest import make_run, quick

LONGER = {"epochs": 6, "batch_size": 16, "lr": 0.05}  # so that the accuracies tell one model from another


class Finished(NamedTuple):
    plain: Path
    ivt: Path
    oracle: Path
    records: dict[str, dict[str, Any]]


def train(data: Dataset, folder: Path, **given: Any) -> Finished:
    """The three runs; their base task is trained once."""
    bases = folder / "bases"
    own = given.pop("podnet", LONGER)
    settings = {
        "plain": quick("podnet", seed=3, podnet=own, **given),
        "ivt": quick("podnet", "ivt", seed=3, podnet=own, **given),
        "oracle": quick("podnet", seed=3, podnet=own, oracle=True, **given),
    }
    records = {name: finish(make_run(data, folder / name, each, bases)) for name, each in settings.items()}
    return Finished(folder / "plain", folder / "ivt", folder / "oracle", records)


def begun(data: Dataset, folder: Path, **given: Any) -> Finished:
    """Three runs begun at one snapshot, that of a run with IVT after its second task."""
    own = given.get("podnet", LONGER)
    whole = make_run(data, folder / "whole", quick("podnet", "ivt", **{**given, "seed": 3, "podnet": own}))
    finish(whole)
    return train(data, folder, start=str(whole.snapshot_path(1)), **given)


@pytest.fixture(scope="session")
def finished(few: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(few, tmp_path_factory.mktemp("lab"))
