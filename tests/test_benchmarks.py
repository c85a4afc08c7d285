"""The benchmark programs still run: their small forms, in process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (FOLDER / f"{name}.py").is_file():
            del sys.modules[name]


def test_scale_tells_every_row_and_ratio(program: Callable[[str], Any], tmp_path: Path) -> None:
    scale = program("scale")
    file = tmp_path / "scale.json"
    rows = scale.main(["--small", "--workers", "0", "--seconds", "0.05", "--json", str(file)])
    told = {(row["side"], row["what"]) for row in rows}
    ways = {"plain loop", "plain loop, its loader alone", "plain loop, its step alone", "pack"}
    assert told == {(s, w) for s in (32, 16) for w in ways | {"ours, resident", "ours, streamed"}}
    assert all(row["images_per_second"] > 0 for row in rows)
    content = json.loads(file.read_text())
    assert content["rows"] == rows
    assert content["ratios"].keys() >= {"streamed over resident, 32", "streamed over plain loop, 32"}


def test_costs_follow_from_the_rates(program: Callable[[str], Any], tmp_path: Path) -> None:
    cost = program("imagenet_cost")
    # Counted by hand: 50 classes x 500 images, then 10 classes each and 20 exemplars of each class before.
    rows = sum(10 * 500 + 20 * old for old in (50, 60, 70, 80, 90))
    assert cost.images_trained("podnet", "tiny-imagenet-100") == (90 * 25_000, 90 * rows)
    assert cost.images_trained("pass", "tiny-imagenet-100", "short") == (15 * 25_000, 15 * 25_000)
    assert cost.store_bytes("imagenet") == pytest.approx(1_331_167 * 3 * 256**2)
    file = tmp_path / "scale.json"
    row = {"what": "ours, streamed", "method": "finetune", "stage": "base", "side": 224, "images_per_second": 5000.0}
    file.write_text(json.dumps({"rows": [row, {**row, "what": "ours, resident", "images_per_second": 9000.0}]}))
    (line,) = [line for line in cost.tables(cost.read_rates(file)) if line.startswith("| imagenet | pass |")]
    base, later = 100 * 500 * 1281.167, 100 * 500 * 1281.167
    hours = (4 * base + 5.3 * later) / 5000 / 3600
    assert f"| {hours:.1f} h | {hours / 7.2:.1f} h |" in line
    assert cost.read_rates(tmp_path / "none.json") == {}


def test_the_documents_costs_are_current(program: Callable[[str], Any]) -> None:
    cost = program("imagenet_cost")
    document = (FOLDER.parent / "docs" / "scale.md").read_text()
    rates = cost.read_rates(FOLDER.parent / "results" / "benchmarks" / "scale.json")
    assert cost.written(document, rates) == document, (
        "stale: run python benchmarks/imagenet_cost.py --write docs/scale.md"
    )
