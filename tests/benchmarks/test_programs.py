"""The small version of each benchmark runs on a CPU and writes the fields that readers expect."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from incvec.atomic_files import write_tensors
from incvec.engine import events as ev
from incvec.engine.scheduler import Failed
from incvec.presets import resolve

RESULTS = Path(__file__).parents[2] / "results/benchmarks"


def run_small(module: ModuleType, file: Path, *arguments: str) -> dict[str, Any]:
    """The JSON that the program writes."""
    module.main(["--small", "--json", str(file), *arguments])
    content: dict[str, Any] = json.loads(file.read_text())
    assert {"command", "rows", "environment"} <= content.keys()
    assert "--small" in content["command"]
    return content


def test_throughput(program: Any, tmp_path: Path) -> None:
    content = run_small(program("throughput"), tmp_path / "t.json", "--parts", "one,two,ivt,tasks")
    for row in content["rows"]:
        assert {"engine", "runs", "stage", "images_per_second", "addons"} <= row.keys()
        assert row["images_per_second"] > 0
    cases = [(row["runs"], row["stage"], tuple(row["addons"])) for row in content["rows"] if "part" not in row]
    assert cases == [
        (runs, stage, addons) for runs in (1, 2) for addons in ((), ("ivt",)) for stage in ("base", "increment")
    ]
    assert [row["addons"] for row in content["rows"] if row.get("part") == "ivt"] == 3 * [[], ["ivt"]]
    small, large = [row for row in content["rows"] if row.get("part") == "tasks"]
    assert (small["tasks"], large["tasks"]) == (5, 1)
    ratios = content["ratios"]
    assert ratios["small_tasks_against_large"] == pytest.approx(
        small["images_per_second"] / large["images_per_second"], abs=1e-3
    )
    assert len(ratios["ivt_on_against_off"]["layer"]["all"]) == 2


def test_unknown_part_of_throughput_is_refused(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program("throughput").main(["--parts", "one,nine"])
    assert "no part nine" in capsys.readouterr().err


def test_images_per_second_of_several_runs(program: Any) -> None:
    """Two runs of 100 images per second, the second of which begins and ends later: 200 while both are running."""
    marks = [[(float(t), 100) for t in range(5)], [(2.5 + t, 100) for t in range(4)]]
    assert program("throughput").rate(marks) == pytest.approx(200)
    assert program("throughput").rate([marks[0][:2], marks[1]]) is None  # never at the same time


def test_plain_loop(program: Any, tmp_path: Path) -> None:
    content = run_small(program("plain_loop"), tmp_path / "p.json", "--seconds", "0.05", "--workers", "0")
    assert [(row["engine"], row["stage"]) for row in content["rows"]] == [("plain", "base"), ("plain", "increment")]
    assert all(row["images_per_second"] > 0 for row in content["rows"])


def test_plain_loop_is_part_of_throughput(program: Any) -> None:
    rows = program("throughput").plain(True, 0.05)
    assert [(row["engine"], row["runs"], row["addons"]) for row in rows] == 2 * [("plain", 1, [])]


def test_complete_run(program: Any, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "run"
    (row,) = run_small(program("complete_run"), tmp_path / "c.json", "--out", str(out), "--seed", "1")["rows"]
    assert json.loads((out / "record.json").read_text())["seed"] == 1
    with pytest.raises(SystemExit):  # it needs an empty folder
        program("complete_run").main(["--small", "--out", str(out.parent / "other")])
    assert set(row["phases"]) == {"startup", "capture", "base", "increments", "ends"}
    assert sum(row["phases"].values()) == pytest.approx(row["seconds"], abs=0.05)
    assert row["phases"]["startup"] > 0
    assert row["metrics"]["AA"] > 0
    assert row["addons"] == ["ivt"]


def test_complete_run_reports_a_failure(program: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="status 3"):
        program("complete_run").run(["-c", "raise SystemExit(3)"], tmp_path)


def test_engine_accuracy(program: Any, tmp_path: Path) -> None:
    content = run_small(program("engine_accuracy"), tmp_path / "e.json", "--seeds", "2")
    runs = [(row["precision"], row["seed"]) for row in content["rows"]]
    assert sorted(runs) == [("bf16", 0), ("bf16", 1), ("fp32", 0), ("fp32", 1)]
    by_kind = {
        kind: [row["metrics"]["AA"] for row in content["rows"] if row["precision"] == kind] for kind in ("bf16", "fp32")
    }
    difference = sum(by_kind["bf16"]) / 2 - sum(by_kind["fp32"]) / 2
    assert content["difference"] == pytest.approx(difference, abs=1e-3)
    assert content["within_bar"] == (abs(difference) <= 0.5)


def test_profile(program: Any, tmp_path: Path) -> None:
    content = run_small(program("profile_step"), tmp_path / "s.json", "--top", "1")
    assert [row["stage"] for row in content["rows"]] == ["base", "increment"]
    for row in content["rows"]:
        assert {"wall_us", "busy_us", "host_us", "launches", "kernels"} <= row.keys()
        times = [kernel["microseconds"] for kernel in row["kernels"]]
        assert times == sorted(times, reverse=True)
        assert row["busy_us"] == pytest.approx(sum(times), abs=0.1)
        assert {"name", "launches", "microseconds"} == row["kernels"][0].keys()


def test_dual_speed(program: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    module, methods = program("dual_speed"), importlib.import_module("incvec.methods.dual")
    plain = methods.build_dual, methods.input_of
    content = run_small(module, tmp_path / "d.json", "--epochs", "3")
    assert (methods.build_dual, methods.input_of) == plain
    cases = [(row["model"], row["addons"], row.get("memory")) for row in content["rows"]]
    assert cases == [("vit-b16", [], None), ("vit-b16", ["ivt"], None), ("vit-b16", ["ivt"], "host")]
    for row in content["rows"]:
        assert {"engine", "parameters", "step_ms", "peak_gb", "reserved_gb", "notices"} <= row.keys()
        assert row["images_per_second"] > 0
        assert row["random_weights"] is True
    assert "random_weights" not in content  # it is in each row


def test_dual_speed_keeps_rows_from_before_a_failure(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are written to disk at once. The weights of the small dual encoder are not random."""
    module, file = program("dual_speed"), tmp_path / "d.json"

    def measured(data: Any, given: dict[str, Any], device: Any) -> dict[str, Any]:
        if given["addons"]:
            raise KeyboardInterrupt
        return {"images_per_second": 1}

    monkeypatch.setattr(module, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        module.main(["--small", "--models", "lite0-minilm", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["model"], row["random_weights"], row["images_per_second"]) == ("lite0-minilm", False, 1)
    with pytest.raises(SystemExit):
        module.main(["--small", "--epochs", "1"])


def test_filters(program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three of five filters have vanished. The largest slope of a norm is 0.5 / sqrt(0 + 1e-5)."""
    weight = torch.zeros(5, 2, 1, 1)
    weight[0, 0], weight[1, 1], weight[2, 0] = 3, -4, 0.03
    norm = {"weight": torch.tensor([1, 2, 0.5, 0, 0]), "running_var": torch.tensor([1.0, 4, 0, 0, 0])}
    tensors = {"backbone.stages.0.1.conv2.weight": weight, "head.weight": weight}
    tensors |= {f"backbone.stages.0.1.norm2.{kind}": value for kind, value in norm.items()}
    named = {f"method/model.{name}": value for name, value in tensors.items()}
    named |= {name.replace("model", "teacher"): value for name, value in named.items()}  # the teacher is ignored
    write_tensors(tmp_path / "run" / "snapshots" / "task-03.safetensors", named, {})
    program("filters").main([str(tmp_path / "run"), "--out", str(tmp_path / "new" / "f.json")])
    (row,) = json.loads((tmp_path / "new" / "f.json").read_text())["runs"]["run"]
    assert (row["task"], row["filters"], row["vanished"]) == (3, 5, 3)
    (layer,) = row["layers"].values()
    assert [layer[kind] for kind in ("median_length", "shortest", "longest")] == [pytest.approx(0.03), 0, 4]
    assert row["steepest"] == layer["steepest"] == pytest.approx(0.5 / 1e-5**0.5, rel=1e-3)
    assert "run task 3: 3 of 5 filters vanished" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="bases has no snapshots"):
        program("filters").main([str(tmp_path / "bases")])
    with pytest.raises(SystemExit, match="same folder name"):
        program("filters").main([str(tmp_path / "run"), str(tmp_path / "other" / "run")])


@pytest.mark.slow
def test_startup(program: Any, tmp_path: Path) -> None:
    """Starts each command in a fresh interpreter, so it is slow; tests/test_declarations.py does it in one."""
    content = run_small(program("startup"), tmp_path / "s.json")
    rows = {row["command"]: row for row in content["rows"]}
    assert {"python -c pass", "import torch", "incvec --help", "incvec list", "incvec show"} <= rows.keys()
    assert all(row["share_of_torch"] < 0.5 for name, row in rows.items() if name.startswith("incvec"))


def test_cluster_simulation(program: Any, tmp_path: Path) -> None:
    """The committed record, again from the records of the runs."""
    file = tmp_path / "s.json"
    program("cluster_simulation").main(["--json", str(file), "--figure", str(tmp_path / "s.png")])
    result = json.loads(file.read_text())
    committed = json.loads((RESULTS / "cluster-simulation.json").read_text())
    assert result["rows"] == committed["rows"]
    hours = {(row["gpus"], row["per_gpu"]): row["hours"] for row in result["rows"]}
    assert hours[1, 1] > hours[8, 1] > hours[64, 1] >= result["longest_run_hours"]
    assert (tmp_path / "s.png").stat().st_size > 10_000


def test_simulated_runs_wait_for_their_base(program: Any) -> None:
    """Three runs share a base of 10 s and then take 5 s each; eight at once are twice as fast as one."""
    simulation = program("cluster_simulation")
    config = resolve({"method": "podnet", "dataset": "digits"})
    runs = [simulation.Work(config, 10.0, 5.0)] * 3
    assert simulation.simulate(runs, 1, 1, 2.0)["makespan"] == pytest.approx(25)
    three = simulation.simulate(runs, 3, 1, 2.0)
    assert three["makespan"] == pytest.approx(15)
    assert three["waiting"] == pytest.approx(20 / 45)
    assert three["busy"] == pytest.approx(25 / 45)
    together = 1 + 2 / 7  # three runs
    assert simulation.simulate(runs, 1, 3, 2.0)["makespan"] == pytest.approx(10 + 15 / together)


def test_efficiency_of_several_workers(program: Any) -> None:
    def row(on: str, seconds: float, **more: int) -> dict[str, Any]:
        return {"on": on, "training_seconds": seconds, **more}

    one, two = {"workers": 1, "per_gpu": 1}, {"workers": 2, "per_gpu": 1}
    rows = [row("local", 9), row("ray", 10, **one), row("ray", 99, **one), row("ray", 11, **one), row("ray", 6, **two)]
    local, first, second = program("cluster_scaling").summarize(rows)
    assert local == {"on": "local", "training_seconds": 9}
    assert first["training_seconds"] == 11
    assert (first["efficiency"], second["efficiency"]) == (1.0, pytest.approx(11 / 12, abs=1e-3))


def test_images_per_second_of_a_sweep(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs train 10 images per second each. The second one begins later, and some of its events are missing."""
    scaling = program("cluster_scaling")
    now = 0.0

    def events() -> Iterator[tuple[int, ev.Event]]:
        nonlocal now
        for second in range(100):
            now = 50.0 + second
            for run, began in ((0, 0), (1, 5)):
                epoch = second - began
                if epoch == 0:
                    yield run, ev.Started("a", 1, "eager", "cpu")
                    yield run, ev.StageStarted(0, "main", 100, 0, 10, 1)
                elif epoch > 0 and (run, epoch % 2) != (1, 0):
                    yield run, ev.EpochEnded(0, "main", epoch, 100, {}, 0.0, None)

    monkeypatch.setattr(scaling.time, "time", lambda: now)
    row = scaling.measure(events(), together=2, seconds=4.0, began=40.0)
    assert row == {"start_seconds": 16.0, "together_seconds": 4.0, "images_per_second": 20}
    with pytest.raises(SystemExit, match="more epochs"):
        scaling.measure(events(), together=2, seconds=400.0, began=40.0)
    with pytest.raises(ValueError, match="bad"):
        scaling.measure(iter([(0, Failed(ValueError("bad")))]), 1, 1.0, 0.0)


def test_whole_sweep(program: Any, tmp_path: Path) -> None:
    """Without Ray, on the digits."""
    file = tmp_path / "s.json"
    small = ("podnet.net=tiny", "podnet.epochs=1", "podnet.balance_epochs=1")
    given = [*("--only", "podnet-3-", "--seeds", "0"), *(word for each in small for word in ("--set", each))]
    program("cluster_scaling").main([*given, "--workers", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["runs"] == 1
    assert row["wall_seconds"] > row["training_seconds"] > 0
