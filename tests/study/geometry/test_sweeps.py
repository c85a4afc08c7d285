"""The packaged sweeps of the study: the runs they contain."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from incvec.cli.sweep import plan
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.presets import changed_settings
from tests.conftest import make_run, quick, weights


@pytest.mark.parametrize(
    ("name", "section", "key", "values"),
    [
        ("ivt-interval", "ivt", "interval", [1, 2, 5, 10, 20, 40, 80, None]),
        ("memory", "podnet", "memory", [5, 10, 20]),
        ("fisher-structure", "ivt", "structure", ["diagonal", "kernel"]),
        ("fisher-estimator", "ivt", "first_fisher", ["batch", "sample"]),
        ("batchnorm", "ivt", "batchnorm", ["keep", "recalibrate", "layer"]),
    ],
)
def test_ablation_sweeps(name: str, section: str, key: str, values: list[object]) -> None:
    configs = [config for _, config in plan(name, [])]
    settings = [config.sections[section][key] for config in configs if section in config.sections]
    assert sorted(set(settings), key=str) == sorted(values, key=str)
    assert {config.dataset for config in configs} == {"cifar100"}


@pytest.mark.parametrize("name", ["memory", "training-time"])
def test_eopc_is_part_of_the_comparisons(name: str) -> None:
    assert {config.addons for _, config in plan(name, [])} == {(), ("eopc",), ("ivt",)}


def test_comparison_sweep() -> None:
    configs = [config for _, config in plan("cifar100-comparisons", [])]
    pairs = {(config.method, *config.addons) for config in configs}
    assert pairs == {
        ("icarl",), ("lucir",), ("ssre",), ("podnet", "eopc"), ("finetune", "cofima"), ("finetune", "magmax"),
    }  # fmt: skip
    assert all((config.variant == "local") == (config.method == "finetune") for config in configs)
    assert {config.tasks for config in configs} == {5, 10, 25}


def test_podnet_sweep_has_oracle_joint_training_and_seeds() -> None:
    configs = [config for _, config in plan("cifar100-podnet", [])]
    assert [c.tasks for c in configs if c.oracle] == [5]
    assert [c.method for c in configs if c.method != "podnet"] == ["joint"]
    pairs = sorted((len(c.addons), c.tasks, c.seed) for c in configs if c.method == "podnet" and not c.oracle)
    streams = [(5, 0), (5, 1), (5, 2), (10, 0), (25, 0)]
    assert pairs == [(addons, *stream) for addons in (0, 1) for stream in streams]


def test_switch_sweep_changes_one_setting_per_run() -> None:
    configs = [config for _, config in plan("cifar100-switches", [])]
    assert [changed_settings(config.resolved()) for config in configs] == [
        {"ivt.first_fisher": "sample"}, {"ivt.batchnorm": "recalibrate"}, {"ivt.batchnorm": "layer"},
        {"ivt.last": "skip"}, {"ivt.optimizer_state": "reset"}, {"ivt.fisher_loss": "own"},
        {"ivt.interval": 5}, {"ivt.interval": 20},
    ]  # fmt: skip
    assert {(c.method, c.addons, c.tasks, c.seed, c.oracle) for c in configs} == {("podnet", ("ivt",), 5, 0, False)}


def test_every_switch_changes_the_result_and_shares_the_base(few: Dataset, tmp_path: Path) -> None:
    """The settings of the sweep on a few digits: one base, and no two final models are equal."""
    ends = []
    for number, config in enumerate([None, *(config for _, config in plan("cifar100-switches", []))]):
        settings = {"interval": 10} if config is None else config.sections["ivt"]
        given = quick("podnet", "ivt", tasks=1, podnet={"epochs": 20, "balance_epochs": 10}, ivt=settings)
        folder = tmp_path / str(number)
        finish(make_run(few, folder, given, tmp_path / "bases"))
        after = weights(folder / "snapshots" / "task-01.safetensors")
        ends.append(torch.cat([t.flatten() for name, t in after.items() if name.startswith("method/model.")]))
        assert ends[-1].isfinite().all()
    assert len(list((tmp_path / "bases").glob("*.safetensors"))) == 1
    assert not any(torch.equal(one, other) for one, other in combinations(ends, 2))
