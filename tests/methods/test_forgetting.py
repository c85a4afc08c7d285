"""Every method forgets less than fine-tuning on the same short stream, with and without IVT."""

from __future__ import annotations

from typing import Any

import pytest

from tests.methods.conftest import ShortRun
from tests.methods.tools import final_record, old_accuracy

ADDONS = pytest.mark.parametrize("addons", [(), ("ivt",)], ids=["plain", "ivt"])

# Two tasks of five classes: options, and the accuracy in percent that old and new classes must reach.
TWO_TASKS: dict[str, tuple[dict[str, Any], int, int]] = {
    "geodl": ({}, 70, 70),
    "mnemonics": ({}, 60, 60),
    "mrfa": ({}, 60, 60),
    "ssre": ({}, 60, 50),
    "pass": ({"epochs": 6, "milestones": [4, 5]}, 60, 40),
    "fcs": ({"epochs": 5, "milestones": [4]}, 60, 40),
}
# Tasks of 4, 3 and 3 classes: the reported classifier, the accuracy on old classes, and the reduction of FM.
THREE_TASKS = {
    "bic": ("cnn", 70, 50),
    "ewc": ("cnn", 40, 40),
    "icarl": ("nme", 75, 50),
    "lucir": ("cnn", 60, 40),
    "lwf": ("cnn", 25, 20),
    "replay": ("cnn", 25, 20),
}


@ADDONS
@pytest.mark.parametrize("method", TWO_TASKS)
def test_forgets_less_than_finetuning_in_two_tasks(
    method: str, addons: tuple[str, ...], short_run: ShortRun, finetuning_forgetting: float
) -> None:
    options, old, new = TWO_TASKS[method]
    record = short_run(method, *addons, **options)
    assert record["accuracy"][-1][0] > old
    assert record["accuracy"][-1][1] > new
    assert record["metrics"]["FM"] < finetuning_forgetting - 30


@ADDONS
@pytest.mark.parametrize("method", THREE_TASKS)
def test_forgets_less_than_finetuning_in_three_tasks(method: str, addons: tuple[str, ...]) -> None:
    classifier, old, reduction = THREE_TASKS[method]
    record, plain = final_record(method, *addons), final_record("finetune")
    assert record["classifier"] == classifier
    assert old_accuracy(record) > old
    assert record["metrics"]["FM"] < plain["metrics"]["FM"] - reduction


def test_bias_correction_improves_on_replay() -> None:
    assert old_accuracy(final_record("bic")) > old_accuracy(final_record("replay"))


def test_joint_training_is_best() -> None:
    record = final_record("joint")
    assert record["tasks"] == 2  # the configured stream
    assert record["config"]["base_classes"] == 4
    metrics = record["metrics"]
    assert metrics["AA"] == metrics["LA"] == pytest.approx(record["accuracy"][0][0])
    assert metrics["FM"] is None
    assert metrics["LA"] > 95
    assert metrics["LA"] > final_record("icarl")["metrics"]["LA"]
