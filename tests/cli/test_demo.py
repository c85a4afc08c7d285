"""The demo on shortened runs: the table, the picture, and that it is not done twice."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from incvec.cli.demo import LOOKS, first_task_path, run_demo, spread, steady_threads
from incvec.data import Dataset
from tests.conftest import same_record

SHORT = {
    "finetune": {"net": "tiny", "epochs": 1},
    "podnet": {"net": "tiny", "epochs": 1, "base_epochs": 4, "balance_epochs": 1},
    "ivt": {"interval": 1},
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    out, text = tmp_path_factory.mktemp("demo"), io.StringIO()
    records = run_demo(out, 1, Console(file=text, width=100), SHORT)
    return out, records, text.getvalue()


def test_it_prints_the_table_and_draws_the_picture(done: tuple[Path, list[dict[str, Any]], str]) -> None:
    out, records, text = done
    assert [(r["method"], r["addons"], r["oracle"]) for r in records] == [
        ("finetune", [], False),
        ("podnet", [], False),
        ("podnet", ["ivt"], False),
        ("podnet", [], True),
    ]
    for record, name in zip(records, LOOKS, strict=True):
        row = next(line for line in text.splitlines() if line.strip().startswith(f"{name} "))
        assert [f"{record['metrics'][key]:.2f}" in row for key in ("AA", "LA", "FM")] == [True] * 3
    assert "closed  seconds" in text
    picture = imread(out / "demo.png")
    height, width, _ = picture.shape
    assert width > 1200
    assert height > 500
    assert [file.name for file in out.rglob("*.png")] == ["demo.png"]


def test_the_three_podnets_share_one_base(done: tuple[Path, list[dict[str, Any]], str]) -> None:
    out, records, text = done
    assert text.count("base task loaded from") == 2
    assert len(list((out / "bases").glob("*.safetensors"))) == 2
    assert len({r["accuracy"][0][0] for r in records[1:]}) == 1


def test_its_paths_end_where_the_runs_ended(done: tuple[Path, list[dict[str, Any]], str], digits: Dataset) -> None:
    out, records, _ = done
    curve = first_task_path(out / "seed-1" / "podnet+ivt", digits)
    assert len(curve) == 51
    assert curve[-1] == records[2]["classifiers"]["cnn"]["accuracy"][-1][0]


def test_the_same_again_trains_nothing(
    done: tuple[Path, list[dict[str, Any]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a stage was trained again")

    monkeypatch.setattr("incvec.engine.run.train_stage", forbidden)
    out, records, _ = done
    again = run_demo(out, 1, Console(file=io.StringIO(), width=100), SHORT)
    for a, b in zip(records, again, strict=True):
        same_record(a, b)


def test_tiny_images_get_one_thread(digits: Dataset) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with steady_threads(digits):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6), st.floats(0.1, 10))
def test_labels_are_moved_apart(values: list[float], gap: float) -> None:
    placed = spread(values, gap)
    order = sorted(range(len(values)), key=lambda i: values[i])
    assert all(placed[b] - placed[a] >= gap - 1e-6 for a, b in pairwise(order))


def test_labels_far_apart_stay() -> None:
    assert spread([90.0, 10.0, 50.0], 5.0) == [90.0, 10.0, 50.0]
    assert spread([50.0, 50.0], 4.0) == [48.0, 52.0]
