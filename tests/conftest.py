"""Fixtures and helpers shared by all tests: a few images and very short runs on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from incvec.atomic_files import read_tensors
from incvec.data import Dataset, load_dataset
from incvec.engine.run import Run
from incvec.presets import preset_layers, resolve

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True)  # --hypothesis-profile=default draws at random
settings.load_profile("repeatable")

QUICK: dict[str, Any] = {"net": "tiny", "epochs": 2, "batch_size": 32, "memory": 3}
EXTRA: dict[str, dict[str, Any]] = {
    "bic": {"bias_epochs": 2},
    "geodl": {"balance_epochs": 2},
    "joint": {"epochs": 12},
    "lucir": {"balance_epochs": 2},
    "mnemonics": {"exemplar_epochs": 2},
    "podnet": {"balance_epochs": 2, "proxies": 2},
    "slca": {"align_epochs": 2, "samples": 16, "align_batch_size": 32},
    "ivt": {"interval": 1, "last": "teleport", "head": "teleport", "batchnorm": "keep"},  # Algorithm 1 verbatim
    "carry": {"epochs": 2, "samples": 8},
    "eopc": {"epochs": 2, "batch_size": 8, "positions": 3, "members": 3, "radius": 1.0},
}


@pytest.fixture(autouse=True)
def seeded_draws() -> None:
    """Seed the global generator, for tests that use it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_dataset("digits")


@pytest.fixture(scope="session")
def few(digits: Dataset) -> Dataset:
    """Six of the ten digits, at most 40 images each. A run of three tasks takes a fraction of a second."""

    def cut(images: torch.Tensor, labels: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([(labels == c).nonzero().flatten()[:count] for c in range(6)])
        return images[rows], labels[rows]

    train = cut(digits.train_images, digits.train_labels, 40)
    test = cut(digits.test_images, digits.test_labels, 20)
    return replace(
        digits, train_images=train[0], train_labels=train[1], test_images=test[0], test_labels=test[1],
        class_names=digits.class_names[:6], fingerprint="few digits",
    )  # fmt: skip


def quick(method: str, *addons: str, **given: Any) -> dict[str, Any]:
    """Settings of a very short run on `few`."""
    sections = {name: {**EXTRA.get(name, {}), **given.pop(name, {})} for name in addons}
    own = {**QUICK, **EXTRA.get(method, {}), **given.pop(method, {})}
    return {
        "method": method, "addons": list(addons), "dataset": "digits", "base_classes": 2, "tasks": 2,
        method: own, **sections, **given,
    }  # fmt: skip


def make_run(data: Dataset, out: Path, given: dict[str, Any], bases: Path | None = None, **options: Any) -> Run:
    return Run(resolve(given), data, out, bases, **options)


def always_saving_run(data: Dataset, out: Path, given: dict[str, Any], bases: Path | None = None) -> Run:
    """A run that saves a checkpoint after every epoch, so that it can be resumed from every position."""
    return make_run(data, out, given, bases, save_interval=0)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(path)[0]


def same_weights(a: Path, b: Path) -> None:
    """Assert that two files have the same tensors, bit for bit."""
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def same_record(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Assert that two records agree in everything but durations."""
    for key in ("metrics", "accuracy", "correct", "config", "statistics", "test_counts", "class_order"):
        assert a[key] == b[key], key
    assert [row["terms"] for row in a["losses"]] == [row["terms"] for row in b["losses"]]


def preset(component: str, dataset: str, variant: str = "paper", host: str = "") -> dict[str, Any]:
    """The option values that the presets give a component; `host` is the method that an add-on is used with."""
    layers = preset_layers(component, dataset, variant, host)
    return {key: value for values in layers.values() for key, value in values.items()}
