"""The benchmarks of packing and of large images run on a CPU in a small version."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER.is_dir(), reason="installed without the benchmarks")]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_packing(tmp_path: Path) -> None:
    arguments = ["--images", "70", "--rounds", "1", "--workers", "1", "--size", "32"]
    importlib.import_module("packing").main([*arguments, "--out", str(tmp_path / "new" / "p.json")])
    content = json.loads((tmp_path / "new" / "p.json").read_text())
    assert (content["images"], content["size"], content["rounds"]) == (70, 32, 1)
    names = {"decode, pillow", "decode, as packing does", "pack"}
    assert set(content["images_per_second"]) == set(content["cpu_ms_an_image"]) == names
    assert all(value > 0 for value in content["cpu_ms_an_image"].values())


def test_scale(tmp_path: Path) -> None:
    rows = importlib.import_module("scale").main(
        ["--small", "--sides", "64", "--workers", "0", "--seconds", "0.1", "--json", str(tmp_path / "s.json")]
    )
    assert json.loads((tmp_path / "s.json").read_text())["rows"] == rows
    assert [row["what"] for row in rows][-3:] == ["pack", "ours, resident", "ours, streamed"]
    assert all(row["images_per_second"] > 0 for row in rows)
