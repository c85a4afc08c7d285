"""Runs with add-ons that are interrupted at every event end with the same bits as uninterrupted runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from incvec.addons import ADDONS
from incvec.data import Dataset
from incvec.engine.run import finish
from tests.conftest import always_saving_run, make_run, quick, same_record, same_weights
from tests.engine.test_resume import interrupt_after

CASES: dict[str, dict[str, Any]] = {
    "cofima": quick("podnet", "cofima"),
    "cofima-ewc": quick("ewc", "cofima"),
    "carry": quick("podnet", "ivt", "carry"),
    "carry-prototypes": quick("pass", "carry"),
    "eopc": quick("podnet", "eopc"),
    "fisher-merge": quick("finetune", "fisher-merge"),
    "imm": quick("finetune", "imm"),
    "imm-mean": quick("finetune", "imm", imm={"moment": "mean"}),
    "ivt-kernel": quick("podnet", "ivt", ivt={"structure": "kernel", "batchnorm": "recalibrate"}),
    "ivt-sample": quick("finetune", "ivt", ivt={"first_fisher": "sample", "fisher_loss": "own"}),
    "ivt-layer": quick("pass", "ivt", ivt={"batchnorm": "layer", "last": "skip", "interval": 1}),
    "ivt-reset": quick("finetune", "ivt", ivt={"interval": None, "optimizer_state": "reset"}),
    "magmax": quick("podnet", "magmax"),
    "magmax-local": quick("finetune", "magmax", finetune={"loss_over": "new"}),
    "magmax-factors": quick("mnemonics", "magmax"),
    "all-at-once": quick("podnet", "ivt", "eopc", "cofima", "magmax"),
}


def test_every_addon_has_a_case() -> None:
    assert {addon for case in CASES.values() for addon in case["addons"]} >= set(ADDONS)


@pytest.mark.parametrize("name", CASES)
def test_interrupted_at_every_event(name: str, few: Dataset, tmp_path: Path) -> None:
    given = CASES[name]
    whole = make_run(few, tmp_path / "whole", given)
    record = finish(whole)
    out = tmp_path / "interrupted"
    breaks = 0
    while not interrupt_after(always_saving_run(few, out, given), 2 + breaks % 9):
        breaks += 1
        assert breaks < 100
    assert breaks > 5
    same_record(finish(make_run(few, out, given)), record)
    for task in range(3):
        same_weights(whole.snapshot_path(task), out / "snapshots" / f"task-{task:02d}.safetensors")


@pytest.mark.parametrize("name", sorted(ADDONS))
def test_shared_base_gives_the_same_run_as_scratch(name: str, few: Dataset, tmp_path: Path) -> None:
    """The method's stages of the base task do not depend on add-ons."""
    given = quick("podnet", name)
    scratch = make_run(few, tmp_path / "scratch", given)
    record = finish(scratch)
    bases = tmp_path / "bases"
    finish(make_run(few, tmp_path / "plain", quick("podnet"), bases))
    files = list(bases.glob("*.safetensors"))
    assert len(files) == 1
    shared = make_run(few, tmp_path / "shared", given, bases)
    same_record(finish(shared), record)
    assert list(bases.glob("*.safetensors")) == files
    for task in range(3):
        same_weights(scratch.snapshot_path(task), shared.snapshot_path(task))
