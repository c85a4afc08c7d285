"""The campaign of bad inputs: no traceback, no hang, nothing accepted that must be refused, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FAILURES = ("unclear", "traceback", "hang", "wrong", "lost")


def run(program: Any, file: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The row of each kind of input, once no case has failed."""
    try:
        program("campaign").main(["--json", str(file), "--jobs", "2", *arguments])
    except SystemExit:
        failures = json.loads(file.read_text())["failures"]
        pytest.fail("\n".join(f"{row['outcome']}: {row['kind']}: {row['case']}: {row['detail']}" for row in failures))
    rows = {row["kind"]: row for row in json.loads(file.read_text())["rows"]}
    assert all(row[name] == 0 for row in rows.values() for name in FAILURES)
    return rows


def test_short_campaign(program: Any, tmp_path: Path) -> None:
    kinds = "settings,sweeps,YAML files,records,checkpoints,data"
    rows = run(program, tmp_path / "c.json", "--cases", "60", "--seed", "1", "--kinds", kinds)
    assert sum(row["tried"] for row in rows.values()) > 50
    assert all(row["refused"] > 0 for row in rows.values())


@pytest.mark.slow
def test_long_campaign(program: Any, tmp_path: Path) -> None:
    run(program, tmp_path / "c.json", "--cases", "250", "--seed", "2")


def test_the_judge_finds_what_the_campaign_is_looking_for(program: Any, tmp_path: Path) -> None:
    """A campaign without failures means nothing if the judge would not see one."""
    campaign, inputs = program("campaign"), program("bad_inputs")
    case = inputs.Case("x", ["run"], "refused", ("podnet.lr",))
    ended, message = campaign.Ended, "error: setting podnet.lr = nan is not possible"
    for outcome, end in {
        "refused": ended(1, "", message),
        "unclear": ended(1, "", "error: no"),
        "traceback": ended(1, "", f"Traceback (most recent call last):\n{message}"),
        "hang": ended(None, "", message),
        "wrong": ended(0, "", ""),
    }.items():
        assert campaign.judge(case, tmp_path, end)[0] == outcome, outcome
    assert campaign.judge(case, tmp_path, ended(-11, "", ""))[0] == "traceback"
    (tmp_path / "out").mkdir()
    record = {"metrics": {"AA": float("nan"), "LA": 1.0}, "accuracy": [[1.0]], "config": {}}
    (tmp_path / "out" / "record.json").write_text(json.dumps(record))
    accepted = inputs.Case("x", ["run"])
    assert campaign.judge(accepted, tmp_path, ended(0, "", ""))[0] == "wrong"


def test_table_of_the_documentation_is_that_of_the_stored_campaign(program: Any) -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "results" / "benchmarks" / "campaign.json").read_text())["rows"]
    assert program("campaign").markdown(rows) in (root / "docs" / "reliability.md").read_text()
