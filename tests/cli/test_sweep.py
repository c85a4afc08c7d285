"""Sweeps: their files, settings for some of the runs, the check, failures, several processes."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

import incvec
from incvec.atomic_files import FileLock
from incvec.cli.progress import RunStatus
from incvec.cli.sweep import plan, report_failed, run_sweep
from incvec.config import RunConfig
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.run import Run, finish
from incvec.engine.sweep import Check
from incvec.errors import ConfigError, TrainingError
from incvec.presets import sweeps
from incvec.records import read_record
from tests.cli.conftest import invoke
from tests.conftest import make_run, quick, same_record

PAPER = {
    ("zeroshot",), ("spu",), ("rapf",), ("flyp", "cofima"), ("flyp", "magmax"),
    ("flyp",), ("flyp", "ivt"), ("slca",), ("slca", "ivt"),
}  # fmt: skip


QUIET = Console(quiet=True)


def pairs(name: str) -> set[tuple[str, ...]]:
    """Method and add-ons of every run."""
    return {(config.method, *config.addons) for _, config in plan(name)}


@pytest.mark.parametrize(("name", "expected"), [("clip-cifar100", 68.25), ("clip-aircraft", 24.45)])
def test_clip_sweeps_have_the_runs_of_the_papers_table(name: str, expected: float) -> None:
    assert pairs(name) == PAPER
    configs = [config for _, config in plan(name)]
    assert {(config.tasks, config.base_classes, config.seed) for config in configs} == {(5, 0, 0), (10, 0, 0)}
    own = [config.sections[config.method] for config in configs]
    assert {(o["net"], o["weights"], o["tag"]) for o in own} == {("clip", "openai/clip-vit-base-patch16", "openai")}
    assert {o["lr"] for o, c in zip(own, configs, strict=True) if c.method != "rapf"} == {5e-6}
    result = invoke("sweep", name, "--dry-run")
    assert result.exit_code == 0
    _, check, first = result.output.splitlines()[:3]
    assert check.startswith("check: LA of ")
    assert f"{expected}, within 1.0" in check
    assert "zeroshot" in first


def test_lite_sweeps_have_the_same_rows_with_another_model() -> None:
    assert pairs("lite-cifar100") == PAPER
    assert pairs("lite-aircraft") == {("zeroshot",), ("flyp",), ("flyp", "ivt"), ("slca",), ("slca", "ivt")}
    for name, tasks in (("lite-cifar100", 10), ("lite-aircraft", 5)):
        for _, config in plan(name):
            own = config.sections[config.method]
            assert (config.tasks, config.base_classes, config.variant) == (tasks, 0, "lite")
            assert (own["net"], own["tag"]) == ("lite0-minilm", None)
    rates = [config for _, config in plan("lite-rate")]
    assert len({config.sections["flyp"]["lr"] for config in rates}) == len(rates) == 5
    assert {(c.held_out, c.stop_after, c.addons) for c in rates} == {(10, 2, ())}
    chosen = {config.sections["flyp"]["lr"] for _, config in plan("lite-cifar100") if config.method == "flyp"}
    assert chosen <= {config.sections["flyp"]["lr"] for config in rates}


def test_settings_apply_to_runs_that_have_them() -> None:
    settings = ["method.weights=mine", "ivt.interval=5", "slca.tau=0.2"]
    for _, config in plan("clip-cifar100", settings):
        own = config.sections[config.method]
        assert own["weights"] == "mine"
        assert config.sections.get("ivt", {"interval": 5})["interval"] == 5
        assert own.get("tau", 0.2) == 0.2
    with pytest.raises(ConfigError, match="no run of the sweep 'lite-aircraft' has that"):
        plan("lite-aircraft", ["rapf.lr=1"])
    with pytest.raises(ConfigError, match="unknown setting"):
        plan("lite-aircraft", ["slca.wieght=1"])


def test_lists_are_varied_unless_the_setting_is_a_list(tmp_path: Path) -> None:
    """1e-2 is a number, as in --config. A setting that is a list is varied over lists."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "runs:\n"
        "  - {method: bic, bic: {lr: [1e-2, 5e-3], bias_milestones: [10, 20]}}\n"
        "  - {method: lucir, lucir: {balance_milestones: [[10], [5, 8]]}}\n"
    )
    own = [config.sections[config.method] for _, config in plan(str(file))]
    assert [(o["lr"], o["bias_milestones"]) for o in own[:2]] == [(0.01, [10, 20]), (0.005, [10, 20])]
    assert [o["balance_milestones"] for o in own[2:]] == [[10], [5, 8]]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ("{seed: 1}", "block 2.*method = None is not possible"),
        ("{method: [[podnet]]}", r"block 2.*method = \['podnet'\] is not possible"),
        ("{method: podnet, addons: null}", "block 2.*addons = None is not possible"),
        ("{method: podnet, addons: ivt}", "block 2.*addons = 'ivt' is not possible"),
        ("{method: podnet, addons: [[[ivt]]]}", "block 2.*addons = .* is not possible"),
        ("{method: podnet, 5: 1}", "block 2.*5 is not a setting"),
        ("{method: podnet, podnet: {5: 1}}", "block 2.*podnet.5' is not a setting"),
        ("{method: podnet, podnet: {epocs: 1}}", "block 2.*unknown setting podnet.epocs. Did you mean 'epochs'"),
        ("{method: podnet, podnt: {}}", "block 2.*unknown setting 'podnt'. Did you mean 'podnet'"),
        ("podnet", "block 2.*expected a mapping of settings, given was 'podnet'"),
    ],
)
def test_invalid_block_is_named_in_the_error(runs: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"runs: [{{method: finetune}}, {runs}]")
    for settings in ([], ["seed=1", "method.epochs=1"]):
        with pytest.raises(ConfigError, match=f"mine.yaml, {message}"):
            plan(str(file), settings)


def test_file_that_is_not_a_sweep_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"runs: [{method: finetune}] # caf\xe9")
    with pytest.raises(ConfigError, match=r"mine\.yaml cannot be read as text: 'utf-8' codec"):
        plan(str(file))
    for key, message in (("run", "'run'. Did you mean 'runs'"), ("5", "5"), ("seeds", "'seeds'")):
        file.write_text(f"runs: [{{method: finetune}}]\n{key}: [0, 1]")
        with pytest.raises(ConfigError, match=f"mine.yaml: unknown key {message}.*settings belong into the blocks"):
            plan(str(file))


def write(path: Path, expected: float) -> Path:
    content: dict[str, Any] = {
        "name": "mine",
        "check": {"of": {"method": "zeroshot"}, "metric": "LA", "expected": expected, "within": 60, "hint": "Why?"},
        "runs": [
            {"method": "flyp", "dataset": "digits", "flyp": {"net": "tiny", "epochs": 1}},
            {"method": "zeroshot", "dataset": "digits", "zeroshot": {"net": "tiny"}},
        ],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def finished(folder: Path) -> list[str]:
    return sorted(path.parent.name.split("-")[1] for path in folder.glob("*/record.json"))


def test_failed_check_stops_the_sweep(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", 200.0)
    with pytest.raises(ConfigError, match=r"zeroshot has LA \d+\.?\d*, expected 200.0 within 60: nothing else.*Why\?"):
        run_sweep(str(file), tmp_path / "out", settings=["stop_after=1"], only="flyp", console=QUIET)
    assert finished(tmp_path / "out") == ["zeroshot"]
    write(file, 40)
    assert run_sweep(str(file), tmp_path / "out", settings=["stop_after=1"], only="flyp", console=QUIET) == 0
    assert finished(tmp_path / "out") == ["flyp", "zeroshot"]


def test_invalid_checks_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", 40)
    content = yaml.safe_load(file.read_text())
    for change, message in [
        ({"of": {"method": "spu"}}, "matches the settings of its check"),
        ({"wihtin": 3}, "takes of, metric, expected, within"),
        ({"of": 3}, "`of` of the check is 3; expected settings"),
        ({"metric": "AL"}, "`metric` of the check is 'AL'. .*Expected one of AA, LA, FM"),
        ({"expected": "abc"}, "`expected` of the check is 'abc'; expected a number"),
        ({"expected": float("nan")}, "`expected` of the check is nan; expected a number"),
        ({"within": True}, "`within` of the check is True; expected a number"),
    ]:
        file.write_text(yaml.safe_dump(content | {"check": content["check"] | change}))
        with pytest.raises(ConfigError, match=message):
            run_sweep(str(file), tmp_path, console=QUIET, dry_run=True)
    with pytest.raises(ConfigError, match="has FM None"):
        Check({}, "FM", 1.0, 1.0).judge({"method": "zeroshot", "metrics": {"FM": None}})


def dry_run(name: str, out: Path, *settings: str, only: str | None = None) -> str:
    text = io.StringIO()
    run_sweep(name, out, settings=settings, only=only, console=Console(file=text, width=500), dry_run=True)
    return text.getvalue()


def test_dry_run_prints_changed_settings_as_yaml(tmp_path: Path) -> None:
    shown = dry_run("digits", tmp_path, "ivt.fisher_loss=own", "ivt.interval=null", only="podnet+ivt")
    assert "ivt.interval=null, ivt.fisher_loss=own" in shown


def test_dry_run_prints_every_setting_that_changes_the_folder_name(tmp_path: Path) -> None:
    values = {
        "base_classes": "1", "order_seed": "7", "class_order": "[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]", "variant": "local",
        "device": "cpu", "precision": "fp32", "engine": "eager", "start": "there", "image_size": "16",
        "class_list": "cmc", "placement": "streamed", "held_out": "10", "stop_after": "1", "snapshots": "false",
        "sync_batchnorm": "false", "last_batch": "keep",
        "task_sizes": "[4, 6]",
    }  # fmt: skip
    in_the_name = {"method", "addons", "dataset", "tasks", "seed", "oracle"}
    assert set(values) == set(RunConfig.model_fields) - in_the_name - {"sections"}
    file = tmp_path / "mine.yaml"
    for key, value in values.items():
        dataset = "packed" if key in ("image_size", "class_list", "placement") else "digits"
        file.write_text(f"runs: [{{method: finetune, dataset: {dataset}}}]")
        shown = dry_run(str(file), tmp_path, f"{key}={value}")
        word = value if key == "variant" else f"(no-)?{key}"
        assert re.search(rf"\nto do    finetune  {dataset}-finetune-\d-s0-{word}", shown), key
        assert f" {key}={value}" in shown.splitlines()[0]


def test_dry_run_prints_common_settings_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "runs: [{method: podnet, addons: [[], [ivt]], seed: [0, 1], base_classes: 1, podnet: {epochs: 7}, "
        "ivt: {interval: 2}}]"
    )
    name = "digits-podnet+ivt-3-s1-base_classes1-epochs7-interval2"
    (tmp_path / name).mkdir()
    (tmp_path / name / "record.json").touch()
    common, *runs = dry_run(str(file), tmp_path).splitlines()
    assert common == (
        f"4 run(s) in {tmp_path}, all with dataset=digits, tasks=3, device=auto, engine=auto, base_classes=1, "
        "podnet.epochs=7"
    )
    assert runs == [
        "to do    podnet, seed=0                      digits-podnet-3-s0-base_classes1-epochs7",
        "to do    podnet, seed=1                      digits-podnet-3-s1-base_classes1-epochs7",
        "to do    podnet+ivt, seed=0, ivt.interval=2  digits-podnet+ivt-3-s0-base_classes1-epochs7-interval2",
        f"finished podnet+ivt, seed=1, ivt.interval=2  {name}",
    ]


def test_section_of_an_addon_applies_to_the_runs_that_have_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    block = "method: [podnet, icarl], addons: [[], [ivt]], ivt: {interval: [2, 3]}, podnet: {memory: [4, 6]}"
    file.write_text(f"runs: [{{{block}}}]")
    names = [name.removeprefix("digits-") for name, _ in plan(str(file))]
    podnet = ["podnet-3-s0-memory4", "podnet-3-s0-memory6"]
    podnet += [f"podnet+ivt-3-s0-podnet.memory{memory}-interval{n}" for n in (2, 3) for memory in (4, 6)]
    assert sorted(names) == sorted([*podnet, "icarl-3-s0", "icarl+ivt-3-s0-interval2", "icarl+ivt-3-s0-interval3"])
    file.write_text("runs: [{method: podnet, addons: [[], [ivt]], eopc: {epochs: 1}}]")
    with pytest.raises(ConfigError, match=r"block 1 of `runs`: unknown setting 'eopc' \(that add-on is not part"):
        plan(str(file))


def test_every_run_with_every_seed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("runs: [{method: [finetune, replay], seed: 9}]")
    names = [name for name, _ in plan(str(file), seeds="0,4")]
    assert names == [f"digits-{method}-3-s{seed}" for method in ("finetune", "replay") for seed in (0, 4)]
    result = invoke("sweep", str(file), "--seeds", "0-2", "--dry-run")
    assert result.output.count("to do") == 6
    file.write_text("runs: [{method: finetune, tasks: [1, 2, 3, 6], stop_after: [1, 2], engine: [auto, eager]}]")
    with pytest.raises(ConfigError, match="with --seeds: 16000 runs, expected at most 10000"):
        plan(str(file), seeds="0-999")


@pytest.mark.parametrize("name", sweeps())
def test_packaged_sweep_is_valid(name: str) -> None:
    assert plan(name)


@pytest.mark.parametrize("terminal", [False, True])
def test_error_of_a_failed_run_is_printed_verbatim(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets in the message are not markup. The other runs finish."""
    original = Run.events

    def events(self: Run, **options: Any) -> Iterator[ev.Event]:
        if self.config.method == "finetune":
            yield ev.Notice("found [/tmp/a]")
            raise TrainingError("no file [/tmp/x] for [red]")
        yield from original(self, **options)

    monkeypatch.setattr(Run, "events", events)
    file = tmp_path / "mine.yaml"
    run = {"method": ["finetune", "replay"], "dataset": "digits", "stop_after": 1}
    file.write_text(yaml.safe_dump({"name": "mine", "runs": [run]}))
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal, color_system=None)
    assert run_sweep(str(file), tmp_path / "out", settings=["method.epochs=1"], at_once=2, console=console) == 1
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "TrainingError: no file [/tmp/x] for [red]" in shown
    assert "found [/tmp/a]" in shown
    assert finished(tmp_path / "out") == ["replay"]


def test_reason_of_several_failures_is_printed_once() -> None:
    states = [("a", "failed", "disk full"), ("b", "finished", ""), ("c", "failed", "disk full"), ("d", "failed", "bad")]
    console = Console(file=io.StringIO(), width=200)
    assert report_failed([RunStatus(name, state, error=error) for name, state, error in states], console) == 3
    assert console.file.getvalue() == "failed a and 1 other: disk full\nfailed d: bad\n"  # type: ignore[attr-defined]


def test_failed_run_gives_exit_code_1_and_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("runs: [{method: replay, replay: {memory: 1000}}, {method: [finetune, ewc]}]")
    command = ["sweep", str(file), "--out", str(tmp_path / "out"), "--at-once", "2", "--set", "stop_after=1"]
    for other in ("finished digits-finetune", "finished digits-ewc"):
        result = invoke(*command, "--set", "method.epochs=1", "--set", "method.net=tiny")
        assert result.exit_code == 1
        assert "failed digits-replay-3-s0" in result.output
        assert "lower replay.memory" in result.output
        assert other in result.output
        assert finished(tmp_path / "out") == ["ewc", "finetune"]


@pytest.mark.slow
def test_killed_sweep_resumes(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("runs: [{method: finetune, finetune: {epochs: 1}}, {method: [replay, lwf]}]")
    settings = ["method.net=tiny", "replay.epochs=40", "lwf.epochs=1", "stop_after=1"]
    short, long, last = (tmp_path / "out" / name for name, _ in plan(str(file), settings))
    command = [sys.executable, "-m", "incvec", "sweep", str(file), "--out", str(tmp_path / "out"), "--at-once", "1"]
    command += [part for setting in settings for part in ("--set", setting)]
    source = str(Path(incvec.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not (long / "checkpoint.safetensors").exists():
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert [(run / "record.json").exists() for run in (short, long, last)] == [True, False, False]
    before = (short / "record.json").stat().st_mtime_ns

    assert run_sweep(str(file), tmp_path / "out", settings=settings, console=QUIET) == 0
    assert finished(tmp_path / "out") == ["finetune", "lwf", "replay"]
    assert (short / "record.json").stat().st_mtime_ns == before
    assert run_sweep(str(file), tmp_path / "unbroken", settings=settings, only="replay", console=QUIET) == 0
    same_record(*(read_record(out / long.name) for out in (tmp_path / "out", tmp_path / "unbroken")))


def test_sweep_uses_the_threads_of_a_single_run(tmp_path: Path) -> None:
    """One on small images, so that a base is the same whether a run or a sweep trained it."""
    file = tmp_path / "mine.yaml"
    file.write_text("runs: [{method: finetune, dataset: digits, device: cpu, stop_after: 1}]")
    torch.set_num_threads(2)
    try:
        assert run_sweep(str(file), tmp_path / "out", settings=["method.epochs=1"], console=QUIET) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    (record,) = (read_record(found) for found in (tmp_path / "out").glob("*/record.json"))
    assert record["environment"]["threads"] == 1


def test_run_of_another_process_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    run = {"method": ["finetune", "replay"], "dataset": "digits", "stop_after": 1}
    file.write_text(yaml.safe_dump({"name": "mine", "runs": [run]}))
    settings = ["method.epochs=1"]
    taken = plan(str(file), settings)[0][0]
    lock = FileLock(tmp_path / "out" / taken / ".lock")
    assert lock.acquire()
    console = Console(file=io.StringIO(), width=200)
    assert run_sweep(str(file), tmp_path / "out", settings=settings, at_once=2, console=console) == 0
    assert "in another process" in console.file.getvalue()  # type: ignore[attr-defined]
    assert finished(tmp_path / "out") == ["replay"]
    lock.release()
    assert run_sweep(str(file), tmp_path / "out", settings=settings, at_once=2, console=QUIET) == 0
    assert finished(tmp_path / "out") == ["finetune", "replay"]


def test_stop_after_gives_the_first_tasks_of_the_whole_run(few: Dataset, tmp_path: Path) -> None:
    whole = finish(make_run(few, tmp_path / "whole", quick("flyp")))
    part = make_run(few, tmp_path / "part", quick("flyp", stop_after=2, snapshots=False))
    record = finish(part)
    assert record["accuracy"] == whole["accuracy"][:2]
    assert record["config"]["stop_after"] == 2
    assert "stop_after" not in whole["config"]
    assert record["metrics"]["a"] == whole["metrics"]["a"][:2]
    assert not part.snapshot_path(0).exists()
