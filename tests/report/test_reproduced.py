"""The table of reproduced numbers comes from records alone, and the committed page is never stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from incvec.presets import resolve
from incvec.records import find_records, read_record
from incvec.report.reproduced import gains, page, table

RESULTS = Path(__file__).parents[2] / "results"


def record(seed: int, aa: float, *addons: str, **changed: Any) -> dict[str, Any]:
    config = resolve({"method": "podnet", "dataset": "cifar100", "addons": list(addons), "seed": seed, **changed})
    return {
        "method": "podnet", "addons": list(addons), "dataset": "cifar100", "tasks": 5, "oracle": False, "seed": seed,
        "metrics": {"AA": aa, "LA": aa - 10, "FM": 20.0}, "config": config.resolved(), "seconds": 60.0,
        "environment": {"device": "a card", "commit": "abc"},
    }  # fmt: skip


def row_of(lines: list[str], start: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_mean_spread_and_difference() -> None:
    lines = table("cifar100", [record(0, 64.0), record(1, 66.0)])
    cells = row_of(lines, "| podnet | 5 |")
    assert cells[2:5] == ["65.00 ± 1.41 (2)", "64.00", "+1.00"]
    assert row_of(lines, "| podnet | 10 |")[2] == "not run"


def test_gains_are_paired() -> None:
    records = [record(0, 60.0), record(1, 70.0), record(0, 61.0, "ivt"), record(1, 73.0, "ivt"), record(2, 99.0, "ivt")]
    cells = row_of(gains("cifar100", records), "| podnet | 5 |")
    assert cells[2:5] == ["2", "+2.00 ± 1.00", "+1.36"]


def test_changed_settings_stay_out_of_the_main_table() -> None:
    records = [record(0, 64.0), record(0, 99.0, podnet={"memory": 5})]
    assert row_of(table("cifar100", records), "| podnet | 5 |")[2] == "64.00"
    assert "podnet.memory=5" in page(records)


def test_committed_page_is_current() -> None:
    if not (RESULTS / "REPRODUCED.md").exists():
        return
    records = [read_record(path) for path in find_records([RESULTS])]
    assert (RESULTS / "REPRODUCED.md").read_text() == page(records), (
        "results/REPRODUCED.md is stale: run python -m incvec.report.reproduced results"
    )
