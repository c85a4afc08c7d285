"""The fraction of a run that is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from incvec.data import Dataset
from incvec.engine import events as ev
from tests.conftest import make_run, quick


@pytest.mark.parametrize("stop_after", [None, 2])
def test_fraction_grows_to_one_with_each_epoch(stop_after: int | None, few: Dataset, tmp_path: Path) -> None:
    """Six classes of 40 images, two epochs each. A run of two tasks has 80 + 80 images, not 240."""
    run = make_run(few, tmp_path, quick("finetune", **({} if stop_after is None else {"stop_after": stop_after})))
    fractions = [event.fraction for event in run.events() if isinstance(event, ev.EpochEnded)]
    epochs = 2 * (stop_after or 3)
    assert fractions == pytest.approx([done / epochs for done in range(1, epochs + 1)])
