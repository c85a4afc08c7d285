"""A short stream of two tasks on the digits, and the forgetting of fine-tuning on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from incvec.data import Dataset
from incvec.engine.run import Run, finish
from incvec.presets import resolve

ShortRun = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def short_run(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> ShortRun:
    """`short_run(method, *addons, **options)`: record of two tasks of five classes, eight epochs each."""

    def run(method: str, *addons: str, **options: Any) -> dict[str, Any]:
        given = {"method": method, "addons": addons, "dataset": "digits", "base_classes": 5, "tasks": 1}
        out: Path = tmp_path_factory.mktemp(method)
        return finish(Run(resolve({**given, method: {"epochs": 8, "milestones": [5, 7], **options}}), digits, out))

    return run


@pytest.fixture(scope="session")
def finetuning_forgetting(short_run: ShortRun) -> float:
    """FM of fine-tuning on that stream."""
    return float(short_run("finetune")["metrics"]["FM"])
