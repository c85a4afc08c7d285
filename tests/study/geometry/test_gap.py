"""The gap between a method and its oracle, from records written by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from incvec.errors import DataError
from incvec.presets import resolve
from incvec.study import style
from incvec.study.geometry.gap import draw, gap, seeds_told


def record(
    method: str, last: float, *addons: str, oracle: bool = False, seed: int = 0, **changes: Any
) -> dict[str, Any]:
    settings = changes.pop("settings", {})
    given = {"method": method, "addons": list(addons), "dataset": "digits", "oracle": oracle, "seed": seed}
    config = resolve({**given, **settings})
    curve = [last] if method == "joint" else [90.0, last]
    return {
        "method": method, "addons": list(addons), "dataset": "digits", "tasks": 3, "oracle": oracle, "seed": seed,
        "class_order": [1, 0], "test_counts": [20] if method == "joint" else [10, 10], "config": config.resolved(),
        "metrics": {"LA": last, "a": curve}, **changes,
    }  # fmt: skip


def test_shares_by_seed(tmp_path: Path) -> None:
    records = [
        record("podnet", 50.0), record("podnet", 52.0, "ivt"), record("podnet", 60.0, oracle=True),
        record("podnet", 54.0, seed=1), record("podnet", 58.0, "ivt", seed=1),
        record("podnet", 64.0, oracle=True, seed=1), record("joint", 70.0),
    ]  # fmt: skip
    (found,) = gap(records)
    runs = {run["name"]: run for run in found["runs"]}
    assert list(runs) == ["PODNet", "PODNet + IVT", "PODNet oracle", "joint"]
    assert runs["PODNet + IVT"]["gap_closed_by_seed"] == pytest.approx([0.2, 0.4])
    assert runs["PODNet + IVT"]["gap_closed"] == pytest.approx(0.3)
    assert runs["PODNet"]["gap_closed"] is runs["PODNet oracle"]["gap_closed"] is runs["joint"]["gap_closed"] is None
    assert runs["PODNet"]["LA"] == {"mean": 52.0, "std": pytest.approx(8**0.5)}
    assert runs["joint"]["LA"] == {"mean": 70.0, "std": None}
    assert runs["PODNet + IVT"]["accuracy"][0] == {"mean": 90.0, "std": 0.0}
    assert found["gap"] == 10.0
    assert all(file.stat().st_size > 1000 for file in draw(found, tmp_path / "gap"))


def test_no_gap_no_share() -> None:
    (found,) = gap([record("podnet", 50.0), record("podnet", 52.0, "ivt"), record("podnet", 49.0, oracle=True)])
    assert found["runs"][1]["gap_closed"] is None


def test_each_method_apart() -> None:
    records = [
        record(name, last, oracle=o) for name in ("podnet", "lucir") for last, o in ((50.0, False), (60.0, True))
    ]
    assert [study["method"] for study in gap(records)] == ["podnet", "lucir"]


def test_other_settings_of_an_addon_stay_out_and_those_of_the_method_stand_apart() -> None:
    """As in a folder that holds a whole study: switches of IVT, another memory."""
    other = {"settings": {"podnet": {"memory": 9}}}
    records = [
        record("podnet", 50.0), record("podnet", 52.0, "ivt"), record("podnet", 60.0, oracle=True),
        record("podnet", 59.0, "ivt", settings={"ivt": {"interval": 1}}),
        record("podnet", 40.0, **other), record("podnet", 42.0, "ivt", **other),
        record("podnet", 45.0, oracle=True, **other),
    ]  # fmt: skip
    usual, changed = gap(records)
    assert [run["LA"]["mean"] for run in usual["runs"]] == [50.0, 52.0, 60.0]
    assert [run["LA"]["mean"] for run in changed["runs"]] == [40.0, 42.0, 45.0]
    assert (usual["changed"], changed["changed"]) == ({}, {"podnet.memory": 9})
    lone = [r for r in records if r["config"].get("ivt", {}).get("interval") != 5]  # the preset's, on the digits
    assert [run["LA"]["mean"] for run in gap(lone)[0]["runs"]] == [50.0, 59.0, 60.0]


def test_a_method_without_its_oracle_is_left_out_where_others_have_theirs() -> None:
    heard: list[str] = []
    records = [record("podnet", 50.0), record("podnet", 60.0, oracle=True), record("lucir", 50.0)]
    assert [study["method"] for study in gap(records, heard.append)] == ["podnet"]
    assert len(heard) == 1
    assert "--method lucir" in heard[0]


def test_texts_of_many_bars_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addons = ("ivt", "eopc", "cofima", "magmax", "imm", "fisher-merge")
    records = [record("podnet", 50.0), record("podnet", 60.0, oracle=True), record("joint", 70.0)]
    kept: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, _: kept.append(figure) or [])
    for count in (1, 3, len(addons)):
        (found,) = gap([*records, *(record("podnet", 52.0, name) for name in addons[:count])])
        draw(found, tmp_path / "gap")
        figure = kept.pop()
        figure.draw_without_rendering()
        for texts in (figure.axes[1].texts, figure.axes[1].get_xticklabels()):
            boxes = sorted((text.get_window_extent() for text in texts), key=lambda box: box.x0)
            assert len(boxes) >= count
            assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_seeds_are_told_by_run_where_they_differ() -> None:
    records = [record("podnet", 50.0), record("podnet", 60.0, oracle=True), record("podnet", 52.0, "ivt")]
    assert seeds_told(gap(records)[0]["runs"]) == "seed 0"
    (found,) = gap([*records, record("podnet", 53.0, "ivt", seed=1)])
    assert seeds_told(found["runs"]) == (
        "PODNet, PODNet oracle: seed 0; PODNet + IVT: seeds 0, 1 (share of the gap: seed 0)"
    )


def test_another_class_order_is_another_study() -> None:
    usual = [record("podnet", 50.0), record("podnet", 60.0, oracle=True)]
    other = {"settings": {"order_seed": 7}, "class_order": [0, 1]}
    heard: list[str] = []
    (found,) = gap([*usual, record("podnet", 40.0, **other)], heard.append)
    assert [run["LA"]["mean"] for run in found["runs"]] == [50.0, 60.0]
    assert "--oracle --set order_seed=7" in heard[0]
    both = gap([*usual, record("podnet", 40.0, **other), record("podnet", 45.0, oracle=True, **other)])
    assert [(study["gap"], study["changed"]) for study in both] == [(10.0, {}), (5.0, {"order_seed": 7})]


def test_what_is_missing_is_named() -> None:
    with pytest.raises(DataError, match=r"oracle, which was never trained. Run first:\n  incvec run .*--oracle"):
        gap([record("podnet", 50.0), record("podnet", 52.0, "ivt")])
    with pytest.raises(DataError, match=r"the plain method. Run first:\n  incvec run --method podnet --dataset"):
        gap([record("podnet", 52.0, "ivt"), record("podnet", 60.0, oracle=True)])
    with pytest.raises(DataError, match="no record is of a method"):
        gap([record("joint", 52.0)])
    with pytest.raises(DataError, match="oracle, which was never trained"):  # one of another class order is none
        gap([record("podnet", 50.0), record("podnet", 60.0, oracle=True, class_order=[0, 1])])
    with pytest.raises(DataError, match="two records are of PODNet with seed 0"):
        gap([record("podnet", 50.0), record("podnet", 51.0), record("podnet", 60.0, oracle=True)])
