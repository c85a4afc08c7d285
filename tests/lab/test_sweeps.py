"""The study's sweeps: what they stand for."""

from __future__ import annotations

import pytest

from incvec.sweeping import plan


@pytest.mark.parametrize(
    ("name", "section", "key", "values"),
    [
        ("ivt-interval", "ivt", "interval", [1, 2, 5, 10, 20, 40, 80, None]),
        ("memory", "podnet", "memory", [5, 10, 20]),
        ("fisher-structure", "ivt", "structure", ["diagonal", "kernel"]),
        ("fisher-estimator", "ivt", "first_fisher", ["batch", "sample"]),
        ("batchnorm", "ivt", "batchnorm", ["keep", "interpolate", "recalibrate"]),
    ],
)
def test_ablations(name: str, section: str, key: str, values: list[object]) -> None:
    configs = [config for _, config in plan(name, [])]
    found = [config.sections[section][key] for config in configs if section in config.sections]
    assert sorted(set(found), key=str) == sorted(values, key=str)
    assert {config.dataset for config in configs} == {"cifar100"}


def test_eopc_stands_beside() -> None:
    assert {config.addons for _, config in plan("memory", [])} == {(), ("eopc",), ("ivt",)}
    assert {config.addons for _, config in plan("training-time", [])} == {(), ("eopc",), ("ivt",)}


def test_comparisons() -> None:
    configs = [config for _, config in plan("cifar100-comparisons", [])]
    pairs = {(config.method, *config.addons) for config in configs}
    assert pairs == {
        ("icarl",), ("lucir",), ("ssre",), ("podnet", "eopc"), ("finetune", "cofima"), ("finetune", "magmax"),
    }  # fmt: skip
    assert all((config.variant == "local") == (config.method == "finetune") for config in configs)
    assert {config.tasks for config in configs} == {5, 10, 25}
