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
