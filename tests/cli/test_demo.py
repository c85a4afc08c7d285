"""The demo with shortened runs: its table, its figure, and that nothing is trained twice."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from incvec.cli.demo import RUNS, first_task_path, run_demo
from incvec.data import Dataset
from incvec.engine.threads import single_thread_for_small_images
from tests.conftest import same_record

SHORT = {
    "finetune": {"net": "tiny", "epochs": 1},
    "podnet": {"net": "tiny", "epochs": 1, "base_epochs": 4, "balance_epochs": 1},
    "ivt": {"interval": 1},
}
Demo = tuple[Path, list[dict[str, Any]], str]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo's folder, records and text."""
    out, text = tmp_path_factory.mktemp("demo"), io.StringIO()
    records = run_demo(out, 1, Console(file=text, width=100), SHORT)
    return out, records, text.getvalue()


def test_demo_prints_a_table_and_draws_a_figure(demo: Demo) -> None:
    out, records, text = demo
    for record, name in zip(records, RUNS, strict=True):
        row = next(line for line in text.splitlines() if line.strip().startswith(f"{name} "))
        assert [f"{record['metrics'][key]:.2f}" in row for key in ("AA", "LA", "FM")] == [True] * 3
    assert "closed  seconds" in text
    height, width, _ = imread(out / "demo.png").shape
    assert width > 1200
    assert height > 500
    assert [file.name for file in out.rglob("*.png")] == ["demo.png"]


def test_demo_trains_the_base_of_podnet_once(demo: Demo) -> None:
    out, records, _ = demo
    assert len(list((out / "bases").glob("*.safetensors"))) == 2  # of finetune and of podnet
    assert [bool(r["base"] and r["base"]["shared"]) for r in records] == [False, False, True, True]
    assert len({r["accuracy"][0][0] for r in records[1:]}) == 1


def test_demo_paths_end_at_the_last_models(demo: Demo, digits: Dataset) -> None:
    out, records, _ = demo
    curve = first_task_path(out / "seed-1" / "podnet+ivt", digits)
    assert len(curve) == 51
    assert curve[-1] == records[2]["classifiers"]["cnn"]["accuracy"][-1][0]


def test_second_demo_trains_nothing(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a stage was trained again")

    monkeypatch.setattr("incvec.engine.run.train_stage", forbidden)
    out, records, _ = demo
    again = run_demo(out, 1, Console(file=io.StringIO(), width=100), SHORT)
    for a, b in zip(records, again, strict=True):
        same_record(a, b)


def test_small_images_use_one_thread(digits: Dataset) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_thread_for_small_images(digits):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
