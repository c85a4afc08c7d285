"""The demo with shortened runs: its table, its figure, its sentence, and that nothing is trained twice."""

from __future__ import annotations

import io
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from typer.testing import CliRunner

from incvec.cli import main as cli
from incvec.cli.demo import Records, first_task_path, run_demo
from incvec.data import Dataset
from incvec.engine.threads import single_thread_for_small_images
from incvec.study.gains import addon_gains
from incvec.study.groups import group_runs
from incvec.study.runs import load_runs
from tests.conftest import same_record

ROOT = Path(__file__).parents[2]
TEN_SEEDS = ROOT / "results" / "digits"
SHORT = {
    "podnet": {"net": "tiny", "epochs": 1, "base_epochs": 4, "balance_epochs": 1},
    "ivt": {"interval": 1},
}
SEEDS = [1, 2]
Demo = tuple[Path, Records, str]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo's folder, records and text."""
    out, text = tmp_path_factory.mktemp("demo"), io.StringIO()
    records = run_demo(out, SEEDS, Console(file=text, width=100), SHORT)
    return out, records, text.getvalue()


def test_demo_prints_a_table_and_draws_a_figure(demo: Demo) -> None:
    out, records, text = demo
    assert [len(own) for own in records.values()] == [2, 2, 1]  # the oracle has the first seed only
    for name, own in records.items():
        row = next(line for line in text.splitlines() if line.strip().startswith(f"{name} "))
        for key in ("AA", "LA", "FM"):
            values = [record["metrics"][key] for record in own]
            assert f"{statistics.mean(values):.2f}" in row
            assert len(values) == 1 or f"± {statistics.stdev(values):.2f}" in row
    height, width, _ = imread(out / "demo.png").shape
    assert width > 1200
    assert height > 500
    assert [file.name for file in out.rglob("*.png")] == ["demo.png"]


def test_demo_ends_with_the_gain_of_ivt(demo: Demo) -> None:
    _, records, text = demo
    texts = []
    for key in ("LA", "FM"):
        pairs = zip(records["podnet + ivt"], records["podnet"], strict=True)
        gains = [with_ivt["metrics"][key] - plain["metrics"][key] for with_ivt, plain in pairs]
        texts.append(f"{statistics.mean(gains):+.1f} ± {statistics.stdev(gains):.1f}")
    assert text.splitlines()[-1] == f"IVT: last accuracy {texts[0]}, forgetting {texts[1]}, 2 seeds"


def test_demo_trains_the_base_of_podnet_once_per_seed(demo: Demo) -> None:
    out, records, _ = demo
    assert len(list((out / "bases").glob("*.safetensors"))) == 2
    shared = {name: [bool(r["base"] and r["base"]["shared"]) for r in own] for name, own in records.items()}
    assert shared == {"podnet": [False, False], "podnet + ivt": [True, True], "podnet oracle": [True]}


def test_demo_paths_end_at_the_last_models(demo: Demo, digits: Dataset) -> None:
    out, records, _ = demo
    curve = first_task_path(out / "seed-1" / "podnet+ivt", digits)
    assert len(curve) == 51
    assert curve[-1] == records["podnet + ivt"][0]["classifiers"]["cnn"]["accuracy"][-1][0]


def test_second_demo_trains_nothing(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a stage was trained again")

    monkeypatch.setattr("incvec.engine.run.train_stage", forbidden)
    out, records, _ = demo
    again = run_demo(out, SEEDS, Console(file=io.StringIO(), width=100), SHORT)
    for name, own in records.items():
        for a, b in zip(own, again[name], strict=True):
            same_record(a, b)


@pytest.mark.parametrize("seeds", ["", "a", "1,,2", "-1", "1,1", "٣", "0-9999999999999"])
def test_seeds_are_checked(seeds: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["demo", "--seeds", seeds, "--out", str(tmp_path / "demo")])
    assert done.exit_code == 1
    assert "expected different whole numbers" in done.output.replace("\n", " ")
    assert not (tmp_path / "demo").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_shows_what_it_installs(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "-n", "demo", f"VENV={tmp_path / 'env'}"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "GB" in lines[0]
    assert "minutes" in lines[0]
    (install,) = [line for line in lines if "[lab]" in line]
    assert "--quiet" not in install
    assert lines[-1].endswith("incvec demo")


@pytest.mark.skipif(not TEN_SEEDS.is_dir(), reason="the records are not part of this copy")
def test_outcome_of_the_demo_is_robust_over_ten_seeds() -> None:
    """The committed records of its setting: IVT improves LA and FM with each of ten seeds."""
    runs = load_runs([TEN_SEEDS])
    assert not any(run.changes for run in runs)  # the settings of the demo
    (gain,) = addon_gains(group_runs(runs))
    assert {run.seed[0] for run in runs} == set(range(10))
    assert min(gain.metrics["LA"].ours) > 0
    assert max(gain.metrics["FM"].ours) < 0
    assert len(gain.metrics["LA"].ours) == len(gain.metrics["FM"].ours) == 10


def test_small_images_use_one_thread(digits: Dataset) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_thread_for_small_images(digits):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
