"""The catalog of methods, add-ons and data sets, and the state of their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from incvec.errors import DataError
from incvec.presets import resolve
from incvec.study import catalog

ROOT = Path(__file__).parents[2]


def test_module_prints_the_catalog() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "incvec.study.catalog", "--results", "nowhere"],
        capture_output=True, text=True, check=True, cwd=ROOT / "src",
    )  # fmt: skip
    assert done.stdout == catalog.catalog(None)


def test_result_is_pending_without_a_record(tmp_path: Path) -> None:
    def results_of(name: str) -> str:
        line = next(line for line in catalog.catalog(tmp_path).splitlines() if line.startswith(f"| `{name}` |"))
        return line.rstrip("| ").rpartition(" | ")[2]

    def leave(folder: str, accuracy: float, given: dict[str, Any], **changes: Any) -> None:
        config = resolve({"method": "podnet", "dataset": "cifar100", **given})
        record = {
            "method": config.method, "addons": config.addons, "dataset": config.dataset, "tasks": config.tasks,
            "oracle": False, "seed": config.seed, "accuracy": [[accuracy]], "test_counts": [10],
            "metrics": {"AA": accuracy, "LA": accuracy, "FM": 10.0}, "config": config.resolved(), **changes,
        }  # fmt: skip
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "record.json").write_text(json.dumps(record))

    leave("oracle", 70.0, {}, oracle=True)
    assert results_of("podnet") == results_of("ivt") == "pending"
    leave("ivt", 60.0, {"addons": ["ivt"], "tasks": 25})
    assert results_of("podnet") == "pending"
    assert results_of("ivt") == "cifar100, 25 tasks, podnet + ivt: not reached (AA 60.00, paper 61.74)"
    leave("five", 62.6, {"tasks": 5})
    leave("ten", 60.9, {"tasks": 10})
    leave("other", 90.0, {"tasks": 25, "podnet": {"lr": 0.2}})
    leave("digits", 90.0, {"dataset": "digits"})
    assert results_of("podnet").split("; ") == [
        "cifar100, 5 tasks: reproduced (AA 62.60, paper 64.00)",
        "cifar100, 10 tasks: not reached (AA 60.90, paper 62.47)",
        "cifar100, 25 tasks: run with other settings",
        "digits, 3 tasks: run, without a number in the paper",
    ]
    leave("small", 50.0, {"method": "flyp", "variant": "lite", "tasks": 10})
    assert results_of("flyp") == "cifar100, 10 tasks: run with lite0-minilm, not the paper's model"
    assert results_of("finetune") == "pending"


def test_tables_and_markers() -> None:
    assert catalog.linked("A, B and C, https://d.org/e,f") == "[A, B and C](https://d.org/e,f)"
    assert catalog.linked("(a baseline)") == "(a baseline)"
    assert catalog.table(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |"
    text = "before\n<a>\nold\n<b>\nafter\n"
    renewed = catalog.between(text, "<a>", "<b>", r"\1 new")
    assert renewed == text.replace("old", r"\1 new")
    assert catalog.between(renewed, "<a>", "<b>", r"\1 new") == renewed
    with pytest.raises(DataError, match="no place for this: expected <a>"):
        catalog.between("nothing here", "<a>", "<b>", "new")
