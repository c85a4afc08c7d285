"""Every method with every add-on: a run of two small tasks, or a refusal with a reason."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from incvec.addons import ADDONS, find_addon
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import ConfigError
from incvec.methods import METHODS, find_method
from incvec.presets import resolve
from tests.conftest import make_run, quick

PAIRS = list(itertools.product(sorted(METHODS), sorted(ADDONS)))


def expected_refusal(method: str, addon: str) -> str | None:
    """A part of the expected reason."""
    kind = find_method(method)
    if kind.joint:
        return "exemplars" if addon == "eopc" else "one task"
    if addon == "eopc" and not kind.exemplars:
        return "exemplars"
    if addon == "carry" and kind.pretrained and kind.trains:
        return "pre-trained"
    return None if kind.trains else "trains nothing"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base task of a method is trained once for all add-ons."""
    return tmp_path_factory.mktemp("bases")


@pytest.mark.parametrize(("method", "addon"), PAIRS, ids=["+".join(pair) for pair in PAIRS])
def test_pair(method: str, addon: str, few: Dataset, tmp_path: Path, bases: Path) -> None:
    given = quick(method, addon, tasks=1)
    refusal = expected_refusal(method, addon)
    run = make_run(few, tmp_path, given, bases)
    if refusal is not None:
        with pytest.raises(ConfigError, match=f"add-on '{addon}' cannot be combined with {method}: .*{refusal}"):
            finish(run)
        return
    record = finish(run)
    assert len(record["accuracy"]) == 2
    assert (record["method"], record["addons"]) == (method, [addon])
    for row in record["losses"]:
        for values in row["terms"].values():
            assert all(math.isfinite(value) for value in values), row


def test_compatible_methods_of_every_addon() -> None:
    for addon in ADDONS:
        accepted = [name for name in METHODS if find_addon(addon).incompatibility(find_method(name), []) is None]
        wanted = [name for name in METHODS if expected_refusal(name, addon) is None]
        assert accepted == wanted
        assert len(accepted) >= 5


def test_addons_have_name_summary_and_paper() -> None:
    for name in ADDONS:
        addon = find_addon(name)
        assert addon.name == name
        assert "http" in addon.paper
        assert addon.summary
        resolve({"method": "podnet", "addons": [name], "dataset": "cifar100"})
