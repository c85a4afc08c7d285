"""One row per record: which runs are compared with which, and what the table shows."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from incvec.errors import DataError
from incvec.presets import resolve
from incvec.study.run_table import run_rows, runs_table
from incvec.study.runs import RunRecord, load_runs, run_command
from tests.study.samples import sample, write


def test_runs_with_other_settings_show_them() -> None:
    """A row alone shows its name; rows that would read the same show their settings, or the folder."""
    usual, other = sample("podnet", "ivt"), sample("podnet", "ivt", ivt={"interval": 5})
    assert [row.changed for row in run_rows([usual, sample(), sample(seed=1)])] == [None] * 3
    rows = run_rows([usual, other, sample()], ["runs/a/record.json", "runs/b/record.json", "runs/c/record.json"])
    assert [row.changed for row in rows] == ["as preset, in a", "ivt.interval=5", None]
    assert "| podnet + ivt (ivt.interval=5) | cifar100 |" in runs_table(rows, footnotes=False).markdown()
    text = io.StringIO()
    Console(file=text, width=80).print(runs_table(rows).rich())
    assert any(line.startswith(" podnet + ivt [2] ") for line in text.getvalue().splitlines())
    assert "[2] ivt.interval=5" in text.getvalue()
    unknown = {**usual["config"], "method": "mine"}
    for config in ({"device": "cpu"}, unknown, {}):  # settings that cannot be compared
        rows = run_rows([usual, {**usual, "config": config}], ["runs/a/record.json", "runs/b/record.json"])
        assert [row.changed for row in rows] == ["as preset, in a", "b"]


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


def test_gap_closed() -> None:
    rows = run_rows([record(57.0, "ivt"), record(54.0), record(70.0, oracle=True)])
    assert [row.gap_closed for row in rows] == [pytest.approx(3 / 16), None, None]
    assert [row.run for row in rows] == ["podnet + ivt", "podnet", "podnet oracle"]
    assert runs_table(rows).texts()[0][1:] == ["cifar100", "5", "0", "68.50", "57.00", "23.00", "19 %", "61.2"]


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
        record(54.0, oracle=True),  # not ahead of the plain method
    ],
    ids=["seed", "order", "tasks", "dataset", "method", "options", "addon", "no gap"],
)
def test_gap_needs_the_oracle_of_the_same_run(other: dict[str, Any]) -> None:
    assert run_rows([record(57.0, "ivt"), record(54.0), other])[0].gap_closed is None


def test_gap_ignores_device_and_addon_options() -> None:
    oracle = record(70.0, oracle=True)
    oracle["config"] = {**oracle["config"], "device": "cuda"}
    ivt = record(62.0, "ivt")
    ivt["config"]["ivt"] = {"interval": 1}
    assert run_rows([ivt, record(54.0), oracle])[0].gap_closed == pytest.approx(0.5)


def test_markdown_of_a_single_run() -> None:
    single = record(54.0, metrics={"AA": 54.0, "LA": 54.0, "FM": None}, seconds=None)
    rows = run_rows([single], ["a/record.json"])
    assert runs_table(rows, footnotes=False).markdown().splitlines() == [
        "| run | data set | tasks | seed | AA | LA | FM | gap closed | seconds |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        "| podnet | cifar100 | 5 | 0 | 54.00 | 54.00 | – | – | – |",
    ]
    assert rows[0].path == "a/record.json"
    assert rows[0].FM is None
    assert rows[0].LA == 54.0


def test_runs_table_fits_80_columns() -> None:
    text = io.StringIO()
    rows = run_rows([record(57.0, "ivt"), record(54.0), record(70.0, oracle=True, seconds=12345.6)])
    Console(file=text, width=80).print(runs_table(rows).rich())
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("podnet + ivt" in line and "19 %" in line for line in lines)
    assert any("podnet oracle" in line and "12345.6" in line for line in lines)
    assert "…" not in text.getvalue()


def test_long_names_and_settings_leave_numbers_visible() -> None:
    changes = {"last": "skip", "head": "keep", "batchnorm": "recalibrate", "interval": 5}
    many = sample("finetune", "ivt", "fisher-merge", "magmax")
    runs = [sample("podnet", "ivt"), sample("podnet", "ivt", ivt=changes), many]
    rows = run_rows(runs, ["a/r.json", "b/r.json", "c/r.json"])
    text = io.StringIO()
    Console(file=text, width=80).print(runs_table(rows).rich())
    for row in rows:
        assert f"{row.AA:.2f}  {row.LA:.2f}  {row.FM:.2f}" in text.getvalue()
    assert "ivt.batchnorm=recalibrate" in text.getvalue()


def test_command_of_a_run() -> None:
    record = sample("podnet", "ivt", seed=2, oracle=True, order_seed=7, ivt={"interval": 5}, podnet={"lr": 0.05})
    assert run_command(record["config"]) == (
        "incvec run --method podnet --addon ivt --dataset cifar100 --tasks 5 --seed 2 --data-root DATA --oracle "
        "--set order_seed=7 --set podnet.lr=0.05 --set ivt.interval=5"
    )


def test_command_with_changes() -> None:
    config = resolve({"method": "podnet", "addons": ["ivt"], "ivt": {"interval": 5}, "podnet": {"lr": 0.07}}).resolved()
    assert run_command(config, "runs/a b", addons=[], oracle=True, seed=3) == (
        "incvec run --method podnet --dataset digits --tasks 3 --seed 3 --oracle --set podnet.lr=0.07 --out 'runs/a b'"
    )
    lite = resolve({"method": "flyp", "dataset": "cifar100", "variant": "lite"}).resolved()
    assert run_command(lite).endswith("--data-root DATA --variant lite")
    slower = resolve({"method": "ssre", "dataset": "cifar100", "ssre": {"lr": 2e-4, "base_lr": 1e-3}}).resolved()
    assert run_command(slower).endswith("--set ssre.lr=0.0002 --set ssre.base_lr=0.001")  # not the changed lr


def test_changes_of_host_and_addon() -> None:
    record = sample("podnet", "ivt", order_seed=7, ivt={"interval": 5}, podnet={"memory": 5})
    run = RunRecord("record.json", record)
    assert run.host_changes == {"order_seed": 7, "podnet.memory": 5}
    assert run.addon_changes == {"ivt.interval": 5}


def broken(**changes: Any) -> dict[str, Any]:
    return {**sample(), **changes}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (broken(metrics={**sample()["metrics"], "LA": 99.0}), "was altered: LA is 99.0, the matrix gives"),
        (broken(metrics={**sample()["metrics"], "FM": None}), "was altered: FM is None"),
        (broken(metrics={"AA": 1.0}), "metrics.LA is {'AA': 1.0}: Field required"),
        (broken(metrics={**sample()["metrics"], "a": [1.0]}), "broken record"),
        (broken(accuracy=[[80.0], [70.0, 120.0]]), "accuracy.1.1 is 120.0: Input should be less than"),
        (broken(accuracy="none"), "accuracy is 'none': Input should be a valid list"),
        (broken(config=None), "config is None: Input should be a valid dictionary"),
        (broken(environment=None), "lacks environment"),
        (broken(config={"seed": 0}), "lacks config.method and config.addons and config.dataset"),
        ({key: value for key, value in sample().items() if key != "accuracy"}, "lacks accuracy"),
    ],
)  # fmt: skip
def test_inconsistent_record_is_rejected(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, {"good": sample(seed=1), "bad": record})
    with pytest.raises(DataError, match=re.escape(words)) as raised:
        load_runs([tmp_path])
    assert str(tmp_path / "bad" / "record.json") in str(raised.value)


def test_folder_without_records_and_truncated_record_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no record in"):
        load_runs([tmp_path])
    with pytest.raises(DataError, match="does not exist"):
        load_runs([tmp_path / "nowhere"])
    write(tmp_path, {"good": sample()})
    (tmp_path / "cut.json").write_text(json.dumps(sample(seed=1))[:500])
    with pytest.raises(DataError, match=r"cut\.json is not a record"):
        load_runs([tmp_path])


def test_copies_are_read_once_and_two_results_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, {"a": sample(), "copy": sample()})
    assert len(load_runs([tmp_path])) == 1
    write(tmp_path, {"b": sample(fall=2.0)})
    with pytest.raises(DataError, match="two results of the same run"):
        load_runs([tmp_path])


def test_result_of_an_earlier_version_with_fewer_settings_is_the_same_run(tmp_path: Path) -> None:
    """A run repeated by a later version must replace its record: which of two is shown must not depend on names."""
    earlier = sample()
    earlier["config"] = {key: value for key, value in earlier["config"].items() if key != "last_batch"}
    write(tmp_path, {"earlier": earlier, "later": sample(fall=2.0)})
    with pytest.raises(DataError, match="two results of the same run"):
        load_runs([tmp_path])
