"""What keeping old classes is worth: methods with a claim to it, beside plain fine-tuning on the same short stream."""

from __future__ import annotations

from typing import Any

import pytest

from tests.methods.conftest import ShortRun

# Options, and the percentage that old and new classes must reach.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "geodl": ({}, 70, 70),
    "mnemonics": ({}, 60, 60),
    "mrfa": ({}, 60, 60),
    "ssre": ({}, 60, 50),
    "pass": ({"epochs": 6, "milestones": [4, 5]}, 60, 40),
    "fcs": ({"epochs": 5, "milestones": [4]}, 60, 40),
}


@pytest.mark.parametrize("addons", [(), ("ivt",)], ids=["plain", "ivt"])
@pytest.mark.parametrize("method", CASES)
def test_keeps_old_digits_where_finetuning_loses_them(
    method: str, addons: tuple[str, ...], short_run: ShortRun, forgotten: float
) -> None:
    options, old, new = CASES[method]
    record = short_run(method, *addons, **options)
    assert record["accuracy"][-1][0] > old
    assert record["accuracy"][-1][1] > new
    assert record["metrics"]["FM"] < forgotten - 30
