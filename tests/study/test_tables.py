"""Records as tables: who is compared with whom, and what is shown."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from incvec.study import tables
from tests.study.samples import sample


def test_runs_of_other_settings_are_told_apart() -> None:
    """Alone a row has its name only; where two would read alike, their settings, or the folder."""
    usual, other = sample("podnet", "ivt"), sample("podnet", "ivt", ivt={"interval": 5})
    assert [row.apart for row in tables.rows([usual, sample(), sample(seed=1)])] == [None] * 3
    found = tables.rows([usual, other, sample()], ["runs/a/record.json", "runs/b/record.json", "runs/c/record.json"])
    assert [row.apart for row in found] == ["as preset, in a", "ivt.interval=5", None]
    assert "| podnet + ivt (ivt.interval=5) | cifar100 |" in tables.markdown(found)
    text = io.StringIO()
    Console(file=text, width=80).print(tables.rich_table(found))
    assert any(line.startswith(" podnet + ivt [2] ") for line in text.getvalue().splitlines())
    assert "[2] ivt.interval=5" in text.getvalue()
    unknown = {**usual["config"], "method": "mine"}
    for config in ({"device": "cpu"}, unknown, {}):  # what cannot be compared has its folder
        found = tables.rows([usual, {**usual, "config": config}], ["runs/a/record.json", "runs/b/record.json"])
        assert [row.apart for row in found] == ["as preset, in a", "b"]


def record(la: float, *addons: str, oracle: bool = False, seed: int = 0, **changes: Any) -> dict[str, Any]:
    config = {
        "method": "podnet", "addons": list(addons), "oracle": oracle, "seed": seed, "device": "auto",
        "podnet": {"epochs": 160}, **{name: {"interval": 10} for name in addons},
    }  # fmt: skip
    return {
        "method": "podnet", "addons": list(addons), "dataset": "cifar100", "tasks": 5, "oracle": oracle,
        "seed": seed, "order_seed": 1993, "test_counts": [50, 10], "accuracy": [[80.0], [la, la]],
        "metrics": {"AA": (80 + la) / 2, "LA": la, "FM": 80 - la}, "config": config, "seconds": 61.25, **changes,
    }  # fmt: skip


def test_share_of_the_gap_closed() -> None:
    found = tables.rows([record(57.0, "ivt"), record(54.0), record(70.0, oracle=True)])
    assert [row.gap_closed for row in found] == [pytest.approx(3 / 16), None, None]
    assert [row.run for row in found] == ["podnet + ivt", "podnet", "podnet oracle"]
    assert found[0].cells() == ["podnet + ivt", "cifar100", "5", "0", "68.50", "57.00", "23.00", "19 %", "61.2"]


@pytest.mark.parametrize(
    "other",
    [
        record(70.0, oracle=True, seed=1),
        record(70.0, oracle=True, order_seed=7),
        record(70.0, oracle=True, tasks=10),
        record(70.0, oracle=True, dataset="digits"),
        record(70.0, oracle=True, method="finetune"),
        record(70.0, oracle=True, config={"podnet": {"epochs": 40}}),
        record(70.0, "ivt", oracle=True),
        record(54.0, oracle=True),  # ahead of nothing
    ],
    ids=["seed", "order", "tasks", "dataset", "method", "options", "addon", "no gap"],
)
def test_no_gap_without_an_oracle_of_the_same_run(other: dict[str, Any]) -> None:
    assert tables.rows([record(57.0, "ivt"), record(54.0), other])[0].gap_closed is None


def test_the_device_and_options_of_the_addon_may_differ() -> None:
    oracle = record(70.0, oracle=True)
    oracle["config"] = {**oracle["config"], "device": "cuda"}
    ivt = record(62.0, "ivt")
    ivt["config"]["ivt"] = {"interval": 1}
    assert tables.rows([ivt, record(54.0), oracle])[0].gap_closed == pytest.approx(0.5)


def test_markdown_and_plain_data() -> None:
    single = record(54.0, metrics={"AA": 54.0, "LA": 54.0, "FM": None}, seconds=None)
    found = tables.rows([single], ["a/record.json"])
    assert tables.markdown(found).splitlines() == [
        "| run | data set | tasks | seed | AA | LA | FM | gap closed | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        "| podnet | cifar100 | 5 | 0 | 54.00 | 54.00 | – | – | – |",
    ]
    row = tables.plain_data(found)[0]
    assert row["path"] == "a/record.json"
    assert row["FM"] is None
    assert row["LA"] == 54.0


def test_a_table_of_ordinary_runs_fits_a_narrow_terminal() -> None:
    text = io.StringIO()
    found = tables.rows([record(57.0, "ivt"), record(54.0), record(70.0, oracle=True, seconds=12345.6)])
    Console(file=text, width=80).print(tables.rich_table(found, "heading"))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("podnet + ivt" in line and "19 %" in line for line in lines)
    assert any("podnet oracle" in line and "12345.6" in line for line in lines)
    assert "…" not in text.getvalue()


def test_long_names_and_settings_push_no_number_out_of_a_narrow_terminal() -> None:
    changes = {"last": "skip", "head": "keep", "batchnorm": "recalibrate", "interval": 5}
    many = sample("finetune", "ivt", "fisher-merge", "magmax")
    runs = [sample("podnet", "ivt"), sample("podnet", "ivt", ivt=changes), many]
    found = tables.rows(runs, ["a/r.json", "b/r.json", "c/r.json"])
    text = io.StringIO()
    Console(file=text, width=80).print(tables.rich_table(found))
    for row in found:
        assert f"{row.AA:.2f}  {row.LA:.2f}  {row.FM:.2f}" in text.getvalue()
    assert "ivt.batchnorm=recalibrate" in text.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.7, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599, "59 min 59 s"),
        (3599.7, "1 h 00 min"),
        (7465, "2 h 04 min"),
        (7475, "2 h 05 min"),
        (10795, "3 h 00 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text
