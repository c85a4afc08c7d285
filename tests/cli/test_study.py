"""`incvec study` on the embedded digits, as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from incvec.cli.main import app
from incvec.data import Dataset
from incvec.engine.run import finish
from tests.conftest import make_run, quick
from tests.study.geometry.conftest import FinishedRuns, train, train_from_snapshot

FORMAT_1 = Path(__file__).parents[1] / "study" / "figures_format_1"


@pytest.fixture(scope="module")
def runs(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    return train(digits, tmp_path_factory.mktemp("digits"), base_classes=6, podnet={"epochs": 2, "batch_size": 64})


def call(*words: Any) -> str:
    result = CliRunner().invoke(app, ["study", *map(str, words)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


def written(folder: Path, name: str) -> Any:
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    return json.loads((folder / f"{name}.json").read_text())


def test_path(runs: FinishedRuns, tmp_path: Path) -> None:
    shown = call(
        "path", runs.plain, "--ivt", runs.ivt, "--oracle", runs.oracle, "--points", 5, "--axis", "share", "-o", tmp_path
    )
    data = written(tmp_path, "path")
    assert "barrier" in shown
    for curve, name in zip(data["curves"], ("plain", "ivt", "oracle"), strict=True):
        assert curve["name"] in shown
        last = runs.records[name]["classifiers"]["cnn"]["accuracy"][2]
        assert [values[-1] for values in curve["accuracy"]["tasks"]] == last


def test_path_options(runs: FinishedRuns, tmp_path: Path) -> None:
    call(
        "path", runs.plain, "--points", 3, "--task-from", 2, "--task-to", 3, "--images", 20,
        "--batchnorm", "recalibrate", "--start", "own", "--name", "later", "-o", tmp_path,
    )  # fmt: skip
    data = written(tmp_path, "later")
    assert (data["task_from"], data["task_to"], data["batchnorm"]) == (1, 2, "recalibrate")
    assert data["curves"][0]["counts"] == [20, 20, 20]


def test_tradeoff(runs: FinishedRuns, tmp_path: Path) -> None:
    shown = call(
        "tradeoff", runs.plain, "--ivt", runs.ivt, "--points", 3, "--task-to", 2, "--task-to", 3, "-o", tmp_path
    )
    assert "slope" in shown
    assert [panel["task_to"] for panel in written(tmp_path, "tradeoff")["panels"]] == [1, 2]


def test_plane(runs: FinishedRuns, tmp_path: Path) -> None:
    shown = call(
        "plane", runs.plain, "--ivt", runs.ivt, "--oracle", runs.oracle, "--size", 3, "--images", 30, "-o", tmp_path
    )
    assert "from the oracle" in shown
    assert len(written(tmp_path, "plane")["marks"]) == 4


def test_runs_that_started_at_one_snapshot(digits: Dataset, tmp_path: Path) -> None:
    """They have no snapshot of the first task; every command starts at the one they share."""
    runs = train_from_snapshot(digits, tmp_path, base_classes=4, tasks=3, podnet={"epochs": 1, "batch_size": 64})
    assert sorted(file.name[:7] for file in (runs.plain / "snapshots").iterdir()) == ["task-01", "task-02", "task-03"]
    given = ("--ivt", runs.ivt, "--oracle", runs.oracle, "--images", 10, "-o", tmp_path)
    call("plane", runs.plain, *given, "--task", 3, "--size", 3)
    data = written(tmp_path, "plane")
    assert (data["task"], [start["to_origin"] for start in data["starts"]]) == (2, [0, 0, 0])
    call("all", runs.plain, *given, "--points", 3, "--size", 3, "--name", "all")
    assert [written(tmp_path, "all-path")[key] for key in ("task_from", "task_to")] == [1, 3]
    assert [panel["task_to"] for panel in written(tmp_path, "all-tradeoff")["panels"]] == [2, 3]
    assert written(tmp_path, "all-plane")["task"] == 2
    assert [row["task"] for row in written(tmp_path, "all-curvature")["tasks"]] == [2, 3]
    for command in ("plane", "path"):
        message = refused(command, runs.plain, *given)
        assert re.search("no model after task 1 in .*: its first snapshot is that after task 2", message)


def test_gap(runs: FinishedRuns, tmp_path: Path) -> None:
    shown = call("gap", runs.plain, runs.ivt, runs.oracle, "-o", tmp_path, "--name", "gap")
    assert "gap closed" in shown
    assert [run["name"] for run in written(tmp_path, "gap")["runs"]] == [
        "PODNet", "PODNet + IVT (interval 1)", "PODNet oracle"
    ]  # fmt: skip


def test_gap_reports_a_damaged_record(runs: FinishedRuns, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "record.json").write_text('{"method": "podnet"}')
    shown = call("gap", runs.plain, runs.oracle, tmp_path, "-o", tmp_path / "fig[red]x")
    assert f"left out: {tmp_path / 'bad' / 'record.json'} is not a record" in shown
    assert "fig[red]x/podnet-2-" in shown  # no markup
    assert "is not a record" in refused("gap", tmp_path / "bad", "-o", tmp_path)


def test_curvature(runs: FinishedRuns, tmp_path: Path) -> None:
    shown = call("curvature", runs.ivt, "--points", 3, "--images", 30, "-o", tmp_path)
    assert "mean S" in shown
    assert len(written(tmp_path, "curvature")["tasks"]) == 2


def test_all_figures_are_drawn_again_without_the_runs(runs: FinishedRuns, tmp_path: Path) -> None:
    given = ("--points", 3, "--size", 3, "--images", 30, "-o", tmp_path, "--name", "few")
    call("all", runs.plain, "--ivt", runs.ivt, "--oracle", runs.oracle, *given)
    kinds = ("path", "tradeoff", "plane", "gap", "curvature")
    for kind in kinds:
        assert written(tmp_path, f"few-{kind}")["kind"] == kind
    handled = [written(tmp_path, f"few-{name}")["batchnorm"] for name in ("path", "recalibrated-path")]
    assert handled == ["interpolate", "recalibrate"]
    assert [panel["task_to"] for panel in written(tmp_path, "few-tradeoff")["panels"]] == [1, 2]
    shown = call("draw", tmp_path, "-o", tmp_path / "again")
    for kind in kinds:
        for end in ("png", "pdf"):
            name = f"few-{kind}.{end}"
            assert name in shown
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_mean_over_seeds(tmp_path: Path) -> None:
    """Needs the JSON files only, and is drawn again like any figure."""
    data = json.loads((FORMAT_1 / "path.json").read_text())
    for seed in (0, 1):
        for curve in data["curves"]:
            curve |= {"seed": seed, "run": f"{curve['run']}-s{seed}"}
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps(data))
    shown = call("mean", tmp_path / "seed-0.json", tmp_path / "seed-1.json", "-o", tmp_path / "mean")
    assert "Means of 2 seeds" in " ".join(shown.split())
    mean = written(tmp_path / "mean", "path-2-seeds")
    assert [source["seed"] for source in mean["sources"]] == [0, 1]
    assert mean["curves"][0]["accuracy"] == data["curves"][0]["accuracy"]
    call("draw", tmp_path / "mean", "-o", tmp_path / "again")
    assert (tmp_path / "again/path-2-seeds.png").read_bytes() == (tmp_path / "mean/path-2-seeds.png").read_bytes()
    assert "give each seed once" in refused("mean", *[tmp_path / "seed-0.json"] * 2, "-o", tmp_path)


def test_all_with_recalibration_has_one_path(runs: FinishedRuns, tmp_path: Path) -> None:
    given = ("--points", 2, "--size", 2, "--images", 10, "-o", tmp_path, "--batchnorm", "recalibrate")
    call("all", runs.plain, "--ivt", runs.ivt, "--oracle", runs.oracle, *given)
    assert written(tmp_path, "path")["batchnorm"] == "recalibrate"
    assert not (tmp_path / "recalibrated-path.json").exists()


def test_out_that_is_a_file_is_refused(runs: FinishedRuns, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (["path", runs.plain, "--points", 2, "--images", 5], ["gap", runs.plain], ["draw", tmp_path]):
        assert "file is a file; a figure needs a folder" in refused(*words, "-o", tmp_path / "file")


def test_damaged_snapshot_must_be_trained_again(runs: FinishedRuns, tmp_path: Path) -> None:
    content = (runs.plain / "snapshots" / "task-00.safetensors").read_bytes()
    (tmp_path / "run" / "snapshots").mkdir(parents=True)
    file = tmp_path / "run" / "snapshots" / "task-00.safetensors"
    for damaged in (content[:100], content[:-1] + bytes([content[-1] ^ 1])):
        file.write_bytes(damaged)
        message = refused("path", tmp_path / "run")
        assert f"move {tmp_path / 'run'} away, and train it again" in message
        assert "start again" not in message


def test_draw_refuses_other_files(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "damaged.json").write_text('{"format": 1, "kind": "plane"}')
    assert "is not the data of a figure" in refused("draw", tmp_path / "other.json")
    assert "make it again with `incvec study plane`" in refused("draw", tmp_path / "damaged.json")
    (tmp_path / "damaged.json").unlink()
    assert "is from `incvec study`" in refused("draw", tmp_path)


def refused(*words: Any) -> str:
    result = CliRunner().invoke(app, ["study", *map(str, words)], env={"COLUMNS": "1000"})
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)  # a message without a traceback
    return result.output


def test_all_takes_any_addon(runs: FinishedRuns, digits: Dataset, tmp_path: Path) -> None:
    settings = {"podnet": {"epochs": 1, "batch_size": 64}, "seed": 3, "base_classes": 6}
    finish(make_run(digits, tmp_path / "eopc", quick("podnet", "eopc", **settings)))
    given = ("--points", 2, "--size", 2, "--images", 5, "-o", tmp_path)
    call("all", runs.plain, "--ivt", tmp_path / "eopc", "--oracle", runs.oracle, *given)
    names = [curve["name"] for curve in written(tmp_path, "path")["curves"]]
    assert names == ["PODNet", "PODNet + EOPC", "PODNet oracle"]
    assert not (tmp_path / "curvature.json").exists()  # it shows the Fisher of IVT


def test_errors_are_one_message(runs: FinishedRuns, tmp_path: Path) -> None:
    for words in (["--ivt", tmp_path / "none"], ["--ivt", runs.plain], ["--oracle", tmp_path / "none"]):
        message = refused("path", runs.plain, *words)
        assert "Run first" in message
        assert "incvec run --method podnet" in message
    for kind in ("plane", "all"):
        message = refused(kind, runs.plain, "--ivt", tmp_path / "none", "--oracle", runs.oracle)
        assert "never trained. Run first:\n  incvec run --method podnet --addon ivt" in message
    assert "there is no task 9 in" in refused("plane", runs.plain, "--ivt", runs.ivt, "--task", 9)


def test_unavailable_devices(runs: FinishedRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device 'foo' is not known; expected auto, cpu" in refused("path", runs.plain, "--device", "foo")
    assert "finds no CUDA device" in refused("path", runs.plain, "--device", "cuda")


def test_paths_that_are_not_run_folders(runs: FinishedRuns) -> None:
    """A folder of runs, a record, or the snapshots: the folder of a run is suggested."""
    for given in (runs.plain.parent, runs.plain / "record.json", runs.plain / "snapshots"):
        message = refused("path", given)
        assert "is not the folder of a run" in message
        assert f"such as {runs.ivt if given == runs.plain.parent else runs.plain}." in message
    assert "is not the folder of a run" in refused("path", runs.plain, "--oracle", runs.oracle / "record.json")
