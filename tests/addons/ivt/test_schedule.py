"""When a teleport happens: `interval`, `last`; which choices the presets make; notices and refusals."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.build import check_names
from incvec.errors import ConfigError
from incvec.presets import changed_settings, resolve
from tests.addons.ivt.conftest import Teleports
from tests.addons.tools import run_on, same
from tests.conftest import make_run, preset, quick


@pytest.mark.parametrize(
    ("interval", "epochs"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (5, [5]), (6, []), (None, [5])], ids=str
)
def test_teleports_follow_every_interval_epochs(
    interval: int | None, epochs: list[int], few: Dataset, tmp_path: Path, teleports: Teleports
) -> None:
    run_on(few, tmp_path, "finetune", "ivt", ivt={"interval": interval}, finetune={"epochs": 5}, tasks=1)
    assert teleports.epochs == [(1, "main", epoch) for epoch in epochs]


@pytest.mark.parametrize(("interval", "epochs"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (5, [])], ids=str)
def test_last_skip_omits_the_teleport_after_the_last_epoch(
    interval: int, epochs: list[int], few: Dataset, tmp_path: Path, teleports: Teleports
) -> None:
    options = {"interval": interval, "last": "skip"}
    run_on(few, tmp_path / "skip", "finetune", "ivt", ivt=options, finetune={"epochs": 5}, tasks=1)
    assert teleports.epochs == [(1, "main", epoch) for epoch in epochs]
    run_on(few, tmp_path / "all", "finetune", "ivt", ivt={"interval": interval}, finetune={"epochs": 5}, tasks=1)
    for one, other in zip(teleports.rows[: len(epochs)], teleports.rows[len(epochs) :], strict=False):
        same(one["after"], other["after"])


def test_only_the_main_stage_has_teleports(few: Dataset, tmp_path: Path, teleports: Teleports) -> None:
    run_on(few, tmp_path, "podnet", "ivt", tasks=1)
    assert teleports.epochs == [(1, "main", epoch) for epoch in (1, 2)]


def test_single_teleport_cannot_be_skipped() -> None:
    config = resolve(quick("finetune", "ivt", ivt={"interval": None, "last": "skip"}))
    with pytest.raises(ConfigError, match=r"never teleports.*ivt\.last=teleport"):
        check_names(config)


@pytest.mark.parametrize(
    ("interval", "last", "expected"),
    [(2, "teleport", 0), (4, "teleport", 0), (3, "skip", 0), (4, "skip", 1), (5, "teleport", 1)],
)
def test_run_without_any_teleport_gives_a_notice(
    interval: int, last: str, expected: int, few: Dataset, tmp_path: Path
) -> None:
    options = {"interval": interval, "last": last}
    run = make_run(few, tmp_path / "run", quick("finetune", "ivt", finetune={"epochs": 4}, ivt=options))
    with closing(run.events()) as events:
        texts = [event.text for event in itertools.takewhile(lambda e: not isinstance(e, ev.Started), events)]
    assert len(texts) == expected
    assert all("ivt changes nothing in this run" in text for text in texts)


def test_defaults_of_presets() -> None:
    """From scratch: no last teleport, no classifier; PASS and FCS also teleport layers as maps. PODNet, the digits and
    pre-trained models use Algorithm 1 verbatim, and so do records from before these options existed."""
    given = {"method": "mrfa", "addons": ["ivt"], "dataset": "cifar100"}
    verbatim = {"batchnorm": "keep", "last": "teleport", "head": "teleport"}

    def chosen(**other: Any) -> dict[str, str]:
        options = resolve({**given, **other}).sections["ivt"]
        return {key: options[key] for key in verbatim}

    assert chosen() == {"batchnorm": "keep", "last": "skip", "head": "keep"}
    assert chosen() == chosen(dataset="tiny-imagenet-100", variant="short")
    assert chosen() == chosen(dataset="folder") == chosen(dataset="packed")
    assert {"last": "teleport", "head": "teleport"}.items() <= preset("ivt", "folder", "pretrained").items()
    assert chosen(method="podnet") == chosen(dataset="digits") == chosen(method="flyp", variant="lite") == verbatim
    layer = {"batchnorm": "layer", "last": "skip", "head": "keep"}
    assert chosen(method="pass") == chosen(method="fcs") == layer
    assert all(chosen(method="pass", dataset=name) == layer for name in ("digits", "packed", "tiny-imagenet-100"))
    assert chosen(method="fcs", dataset="tiny-imagenet-100", variant="short") == layer
    assert chosen(method="pass", variant="authors") == layer  # a ResNet-18
    current = resolve(given).resolved()
    assert changed_settings(current) == {}
    old = {key: value for key, value in current["ivt"].items() if key not in verbatim}
    assert changed_settings({**current, "ivt": old}) == {"ivt.last": "teleport", "ivt.head": "teleport"}
