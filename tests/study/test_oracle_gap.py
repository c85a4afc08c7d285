"""The gap between a method and its oracle, from records written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from incvec.errors import DataError
from incvec.presets import resolve
from incvec.study import oracle_gap
from incvec.study.runs import RunRecord


def record(
    method: str, last: float, *addons: str, oracle: bool = False, seed: int = 0, **changes: Any
) -> dict[str, Any]:
    settings = changes.pop("settings", {})
    given = {"method": method, "addons": list(addons), "dataset": "digits", "oracle": oracle, "seed": seed}
    return {
        **given, "tasks": 3, "class_order": [1, 0], "test_counts": [20] if method == "joint" else [10, 10],
        "config": resolve({**given, **settings}).resolved(),
        "metrics": {"LA": last, "a": [last] if method == "joint" else [90.0, last]}, **changes,
    }  # fmt: skip


def gaps(records: list[dict[str, Any]], warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    return oracle_gap.oracle_gap([RunRecord(f"{k}.json", record) for k, record in enumerate(records)], warn)


def test_gap_closed_is_averaged_over_seeds() -> None:
    records = [
        record("podnet", 50.0), record("podnet", 52.0, "ivt"), record("podnet", 60.0, oracle=True),
        record("podnet", 54.0, seed=1), record("podnet", 58.0, "ivt", seed=1),
        record("podnet", 64.0, oracle=True, seed=1), record("joint", 70.0),
    ]  # fmt: skip
    (data,) = gaps(records)
    runs = {run["name"]: run for run in data["runs"]}
    assert list(runs) == ["PODNet", "PODNet + IVT", "PODNet oracle", "joint"]
    assert runs["PODNet + IVT"]["gap_closed_by_seed"] == pytest.approx([0.2, 0.4])
    assert runs["PODNet + IVT"]["gap_closed"] == pytest.approx(0.3)
    assert runs["PODNet"]["gap_closed"] is runs["PODNet oracle"]["gap_closed"] is runs["joint"]["gap_closed"] is None
    assert runs["PODNet"]["LA"] == {"mean": 52.0, "std": pytest.approx(8**0.5)}
    assert runs["joint"]["LA"] == {"mean": 70.0, "std": None}
    assert runs["joint"]["accuracy"] == []
    assert runs["PODNet + IVT"]["accuracy"][0] == {"mean": 90.0, "std": 0.0}
    assert data["gap"] == 10.0


def test_oracle_behind_the_plain_method_leaves_no_gap_to_close() -> None:
    (data,) = gaps([record("podnet", 50.0), record("podnet", 52.0, "ivt"), record("podnet", 49.0, oracle=True)])
    assert data["runs"][1]["gap_closed"] is None


def test_one_figure_per_method() -> None:
    pairs = ((50.0, False), (60.0, True))
    records = [record(name, last, oracle=oracle) for name in ("podnet", "lucir") for last, oracle in pairs]
    assert [data["method"] for data in gaps(records)] == ["lucir", "podnet"]


def test_changed_addons_are_left_out_and_changed_methods_get_their_own_figure() -> None:
    """As in the folder of a whole study: ablations of IVT, another memory size."""
    other: dict[str, Any] = {"settings": {"podnet": {"memory": 9}}}
    records = [
        record("podnet", 50.0), record("podnet", 52.0, "ivt"), record("podnet", 60.0, oracle=True),
        record("podnet", 59.0, "ivt", settings={"ivt": {"interval": 1}}),
        record("podnet", 40.0, **other), record("podnet", 42.0, "ivt", **other),
        record("podnet", 45.0, oracle=True, **other),
    ]  # fmt: skip
    preset, changed = gaps(records)
    assert [run["LA"]["mean"] for run in preset["runs"]] == [50.0, 52.0, 60.0]
    assert [run["LA"]["mean"] for run in changed["runs"]] == [40.0, 42.0, 45.0]
    assert (preset["changed"], changed["changed"]) == ({}, {"podnet.memory": 9})
    without_preset = [r for r in records if r["config"].get("ivt", {}).get("interval") != 5]  # the preset's on digits
    assert [run["LA"]["mean"] for run in gaps(without_preset)[0]["runs"]] == [50.0, 59.0, 60.0]
    two = [*without_preset, record("podnet", 51.0, "ivt", settings={"ivt": {"interval": 2}})]
    names = [run["name"] for run in gaps(two)[0]["runs"]]
    assert names == ["PODNet", "PODNet + IVT (interval 1)", "PODNet + IVT (interval 2)", "PODNet oracle"]


def test_method_without_oracle_is_left_out_if_others_have_one() -> None:
    warnings: list[str] = []
    records = [record("podnet", 50.0), record("podnet", 60.0, oracle=True), record("lucir", 50.0)]
    assert [data["method"] for data in gaps(records, warnings.append)] == ["podnet"]
    assert len(warnings) == 1
    assert "--method lucir" in warnings[0]


def test_several_methods_without_oracle_are_one_line() -> None:
    warnings: list[str] = []
    records = [record("podnet", 50.0), record("podnet", 60.0, oracle=True)]
    gaps([*records, record("lucir", 50.0), record("icarl", 50.0)], warnings.append)
    assert warnings == ["2 streams or settings without a plain run or an oracle, of icarl, lucir"]


def test_another_class_order_gets_its_own_figure() -> None:
    usual = [record("podnet", 50.0), record("podnet", 60.0, oracle=True)]
    other: dict[str, Any] = {"settings": {"order_seed": 7}, "class_order": [0, 1]}
    warnings: list[str] = []
    (data,) = gaps([*usual, record("podnet", 40.0, **other)], warnings.append)
    assert [run["LA"]["mean"] for run in data["runs"]] == [50.0, 60.0]
    assert "--oracle --set order_seed=7" in warnings[0]
    both = gaps([*usual, record("podnet", 40.0, **other), record("podnet", 45.0, oracle=True, **other)])
    assert [(data["gap"], data["changed"]) for data in both] == [(10.0, {}), (5.0, {"order_seed": 7})]


def test_missing_records_are_named() -> None:
    plain, ivt, oracle = record("podnet", 50.0), record("podnet", 52.0, "ivt"), record("podnet", 60.0, oracle=True)
    for records, message in (
        ([plain, ivt], r"oracle, which was never trained. Run first:\n  incvec run .*--oracle"),
        ([ivt, oracle], r"the plain method. Run first:\n  incvec run --method podnet --dataset"),
        ([record("joint", 52.0)], "no record is of a class-incremental method"),
    ):
        with pytest.raises(DataError, match=message):
            gaps(records)
