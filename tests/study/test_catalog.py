"""The catalog of methods, add-ons and data sets, and the state of their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from incvec.errors import DataError
from incvec.presets import resolve
from incvec.study import catalog

ROOT = Path(__file__).parents[2]


def test_module_prints_the_catalog(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["catalog", "--results", "nowhere"])
    catalog.main()
    assert capsys.readouterr().out == catalog.render(None)


def write_record(folder: Path, accuracy: float, given: dict[str, Any], **changes: Any) -> None:
    config = resolve({"method": "podnet", "dataset": "cifar100", **given})
    record = {
        "method": config.method, "addons": config.addons, "dataset": config.dataset, "tasks": config.tasks,
        "oracle": False, "seed": config.seed, "accuracy": [[accuracy]], "test_counts": [10],
        "metrics": {"AA": accuracy, "LA": accuracy, "FM": 10.0}, "config": config.resolved(), **changes,
    }  # fmt: skip
    folder.mkdir()
    (folder / "record.json").write_text(json.dumps(record))


def status_of(name: str, results: Path) -> str:
    """The last cell of a component's row."""
    lines = catalog.render(results).splitlines()
    line = next(line for line in lines if line.startswith(f"| [`{name}`](#{name}) |"))
    return line.rstrip("| ").rpartition(" | ")[2]


def details_of(name: str, results: Path) -> list[str]:
    """The results in a component's section."""
    section = catalog.render(results).partition(f"\n### {name}\n")[2].partition("\n###")[0]
    return [line.removeprefix("- ") for line in section.splitlines() if line.startswith("- ")]


def test_results_of_a_method(tmp_path: Path) -> None:
    write_record(tmp_path / "oracle", 70.0, {}, oracle=True)
    write_record(tmp_path / "ivt", 60.0, {"addons": ["ivt"], "tasks": 25})
    assert status_of("podnet", tmp_path) == "pending"
    write_record(tmp_path / "five", 62.6, {"tasks": 5})
    write_record(tmp_path / "ten", 60.9, {"tasks": 10})
    write_record(tmp_path / "other", 90.0, {"tasks": 25, "podnet": {"lr": 0.2}})
    write_record(tmp_path / "digits", 90.0, {"dataset": "digits"})
    assert status_of("podnet", tmp_path) == "1 of 2 reproduced"
    assert details_of("podnet", tmp_path) == [
        "CIFAR-100, 5 tasks: reproduced (AA 62.60, paper 64.00)",
        "CIFAR-100, 10 tasks: not reproduced (AA 60.90, paper 62.47)",
        "CIFAR-100, 25 tasks: run with other settings",
        "digits, 3 tasks: run, not in the paper",
    ]
    assert status_of("finetune", tmp_path) == "pending"
    assert details_of("finetune", tmp_path) == []


def test_addon_is_judged_by_its_paired_gain(tmp_path: Path) -> None:
    assert status_of("ivt", tmp_path) == "pending"
    write_record(tmp_path / "ivt-25", 75.0, {"addons": ["ivt"], "tasks": 25})
    assert status_of("ivt", tmp_path) == "run"  # far above the paper's accuracy, but without its host
    assert details_of("ivt", tmp_path) == ["PODNet on CIFAR-100, 25 tasks: run, without a paired run of its host"]
    for seed, gain in enumerate((0.8, 1.2)):
        write_record(tmp_path / f"five-{seed}", 40.0, {"tasks": 5, "seed": seed})
        write_record(tmp_path / f"ivt-five-{seed}", 40.0 + gain, {"addons": ["ivt"], "tasks": 5, "seed": seed})
    write_record(tmp_path / "ten", 70.0, {"tasks": 10})
    write_record(tmp_path / "ivt-ten", 70.5, {"addons": ["ivt"], "tasks": 10})
    assert status_of("ivt", tmp_path) == "1 of 2 reproduced"
    assert details_of("ivt", tmp_path)[:2] == [
        "PODNet on CIFAR-100, 5 tasks: reproduced (+1.00 ± 0.20 in AA, 2 seeds; paper +1.36)",
        "PODNet on CIFAR-100, 10 tasks: not reproduced (+0.50 in AA, 1 seed; paper +0.98)",
    ]


def test_another_model_is_not_judged(tmp_path: Path) -> None:
    for name, addons, accuracy in (("flyp", [], 50.0), ("flyp-ivt", ["ivt"], 53.0)):
        given = {"method": "flyp", "addons": addons, "variant": "lite", "tasks": 10}
        write_record(tmp_path / name, accuracy, given)
    assert status_of("flyp", tmp_path) == status_of("ivt", tmp_path) == "run"
    assert details_of("flyp", tmp_path) == ["CIFAR-100, 10 tasks: run with lite0-minilm, not the paper's model"]
    assert details_of("ivt", tmp_path) == [
        "FLYP on CIFAR-100, 10 tasks: run with lite0-minilm, not the paper's model (+3.00 in AA, 1 seed)"
    ]


def test_rows_are_short() -> None:
    text = catalog.render(ROOT / "results")
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) < 400


def test_links_and_markers() -> None:
    assert catalog.link("A, B and C, https://d.org/e,f") == "[A, B and C](https://d.org/e,f)"
    assert catalog.link("A, https://d.org", "paper") == "[paper](https://d.org)"
    assert catalog.link("(a baseline)") == "(a baseline)"
    text = "before\n<a>\nold\n<b>\nafter\n"
    updated = catalog.replace_between(text, "<a>", "<b>", r"\1 new")
    assert updated == text.replace("old", r"\1 new")
    assert catalog.replace_between(updated, "<a>", "<b>", r"\1 new") == updated
    with pytest.raises(DataError, match="no markers: expected a line <a>"):
        catalog.replace_between("nothing here", "<a>", "<b>", "new")
