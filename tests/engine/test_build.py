"""How a run is assembled from its settings, and what is refused before training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from incvec.data import Dataset
from incvec.engine.build import pick_device
from incvec.engine.run import finish
from incvec.errors import ConfigError
from tests.conftest import make_run, quick, same_weights


def with_fewer(data: Dataset, label: int, count: int) -> Dataset:
    """The data set with at most `count` training images of one class."""
    of_class = data.train_labels == label
    rows = ~of_class | (of_class.cumsum(0) <= count)
    return replace(data, train_images=data.train_images[rows], train_labels=data.train_labels[rows])


def test_memory_total_that_leaves_no_exemplar_per_class_is_refused(few: Dataset, tmp_path: Path) -> None:
    """Five exemplars are enough for the first two tasks, of 2 and 4 classes."""
    run = make_run(few, tmp_path, quick("podnet", podnet={"memory_total": 5}))
    with pytest.raises(ConfigError, match="5 in total for 6 classes"):
        next(run.events())


def test_memory_total_is_divided_by_the_classes_seen_when_a_class_is_learned(few: Dataset, tmp_path: Path) -> None:
    """80 in total are 40 per class in the base task, but 13 when the last class is learned."""
    given = quick("podnet", podnet={"memory_total": 80}, class_order=[0, 1, 2, 3, 4, 5])
    next(make_run(with_fewer(few, 5, 13), tmp_path / "enough", given).events())
    with pytest.raises(ConfigError, match=r"'5' has 12 training images, but 13 are needed.*lower podnet.memory_total"):
        next(make_run(with_fewer(few, 5, 12), tmp_path / "short", given).events())
    with pytest.raises(ConfigError, match="'0' has 39 training images, but 40 are needed"):
        next(make_run(with_fewer(few, 0, 39), tmp_path / "base", given).events())


def test_weight_decay_that_makes_weights_grow_is_refused(few: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lr=0.1 and weight_decay=30 \(stage 'main' of finetune\)"):
        next(make_run(few, tmp_path, quick("finetune", finetune={"lr": 0.1, "weight_decay": 30.0})).events())


def test_explicit_class_order_has_no_seed(few: Dataset, tmp_path: Path) -> None:
    order = [5, 4, 3, 2, 1, 0]
    record = finish(make_run(few, tmp_path, quick("finetune", class_order=order, order_seed=7, stop_after=1)))
    assert (record["order_seed"], record["config"]["order_seed"]) == (None, None)
    assert record["class_order"] == record["config"]["class_order"] == order


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("icarl", {"loss": "sigmoid"}),  # divided by the outputs of the whole stream
        ("flyp", {"schedule": "spu_cosine", "epochs": 3}),  # which comes down to 0 over the whole stream
        ("slca", {"compat": "spu"}),  # whose logits are padded to the whole stream's classes
    ],
)
def test_stop_after_trains_the_start_of_the_whole_stream(
    method: str, options: dict[str, Any], few: Dataset, tmp_path: Path
) -> None:
    runs = [
        make_run(few, tmp_path / "whole", quick(method, **{method: options})),
        make_run(few, tmp_path / "short", quick(method, **{method: options}, stop_after=2)),
    ]
    whole, short = (finish(run) for run in runs)
    assert short["accuracy"] == whole["accuracy"][:2]
    for task in range(2):
        same_weights(*(run.snapshot_path(task) for run in runs))


def test_stop_after_more_tasks_than_the_stream_has_is_refused(few: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stop_after=9: the stream has \d tasks. Give 1 to \d"):
        finish(make_run(few, tmp_path, quick("finetune", stop_after=9)))


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="'cuda:2' was requested, but the last one is cuda:1"):
        pick_device("cuda:2")


@pytest.mark.parametrize(
    ("method", "addons", "option"),
    [
        ("rapf", (), "samples"), ("slca", (), "samples"), ("podnet", (), "proxies"), ("geodl", (), "positions"),
        ("fcs", (), "mixups"), ("fcs", (), "mixing"), ("podnet", ("eopc",), "positions"),
        ("podnet", ("carry",), "samples"),
    ],
)  # fmt: skip
def test_options_that_cannot_fit_into_memory_are_refused_before_training(
    method: str, addons: tuple[str, ...], option: str, few: Dataset, tmp_path: Path
) -> None:
    section = addons[0] if addons else method
    given = {"method": method, "addons": list(addons), "dataset": "digits", "base_classes": 0, "tasks": 3}
    given |= {} if method in ("rapf", "slca") else {method: {"net": "tiny", "memory": 5}}
    given[section] = {**given.get(section, {}), option: 4 * 10**9}  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=rf"setting {section}.{option} = 4000000000 needs \d+ GB of memory or more"):
        finish(make_run(few, tmp_path / "run", given))
    assert not (tmp_path / "run").exists()
