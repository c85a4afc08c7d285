"""The table of reproduced numbers comes from records alone, and the committed page is never stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from incvec.presets import resolve
from incvec.records import find_records, read_record
from incvec.report.reproduced import gains, page, paper, paper_gains, stand_in, table

RESULTS = Path(__file__).parents[2] / "results"


def record(seed: int, aa: float, *addons: str, dataset: str = "cifar100", **changed: Any) -> dict[str, Any]:
    config = resolve({"method": "podnet", "dataset": dataset, "addons": list(addons), "seed": seed, **changed})
    return {
        "method": "podnet", "addons": list(addons), "dataset": dataset, "tasks": 5, "oracle": False, "seed": seed,
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


def test_values_the_paper_leaves_out() -> None:
    lines = table("imagenet-subset", [])
    assert row_of(lines, "| icarl | 25 |")[2:] == ["not run", "52.97", "", "not run", "", "", "not run", "", ""]
    assert row_of(table("imagenet", []), "| podnet + ivt | 10 |")[3] == "65.07"
    assert not [line for line in table("imagenet", []) if line.startswith("| fcs")]  # not reported there


def test_the_papers_average_gains_are_those_of_its_rows() -> None:
    """The last line of its second table, which nothing here is made from."""
    told = {5: (3.93, 5.45, -8.90), 10: (5.36, 6.23, -11.65), 25: (6.61, 6.10, -12.53)}
    for tasks, averages in told.items():
        hosts = [paper_gains(paper()["imagenet-subset"]["rows"], h, tasks) for h in ("podnet", "mrfa", "pass", "fcs")]
        for place, average in enumerate(averages):
            assert sum(gain[place] or 0 for gain in hosts) / 4 == pytest.approx(average, abs=0.011)


def test_a_data_set_in_place_of_another() -> None:
    def tiny(aa: float, *addons: str, **changed: Any) -> dict[str, Any]:
        return record(0, aa, *addons, dataset="tiny-imagenet-100", **changed)

    records = [tiny(50.0), tiny(40.0, variant="short"), tiny(43.5, "ivt", variant="short")]
    content = paper()["tiny-imagenet-100"]
    lines = stand_in("tiny-imagenet-100", content, records)
    assert row_of(lines, "| podnet | paper |")[3:6] == ["50.00", "not run", "not run"]
    assert row_of(lines, "| podnet | short |")[3:8] == ["40.00", "43.50", "+3.50", "+0.95", "+1.36"]
    assert row_of(lines, "| fcs | paper |")[3:7] == ["not run", "not run", "not run", "+2.92"]
    text = page([*records, tiny(60.0, podnet={"memory": 5})])
    assert "64 x 64 pixels" in text
    assert text.count("podnet.memory=5") == 1  # below, with what was changed
    assert "variant=short" not in text  # those have their own rows


def test_committed_page_is_current() -> None:
    if not (RESULTS / "REPRODUCED.md").exists():
        return
    records = [read_record(path) for path in find_records([RESULTS])]
    assert (RESULTS / "REPRODUCED.md").read_text() == page(records), (
        "results/REPRODUCED.md is stale: run python -m incvec.report.reproduced results"
    )
