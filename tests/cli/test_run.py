"""`incvec run` on short runs: settings, folders, resuming, errors."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from incvec.engine import events as ev
from incvec.engine import launch
from incvec.engine.run import Run
from incvec.presets import resolve, run_name
from tests.cli.conftest import PODNET, invoke, message
from tests.conftest import same_record
from tests.data.pictures import make_root, make_store

Finished = tuple[Path, Result, list[str]]


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and modification time of every file."""
    return {
        str(file.relative_to(folder)): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run, with settings given in every possible way: its folder, the command's result, the command."""
    folder = tmp_path_factory.mktemp("finished")
    file = folder / "my_run.yaml"
    file.write_text("method: finetune\naddons: [ivt]\nseed: 5\npodnet:\n  lr: 5e-2\n  epochs: 3\nivt: {interval: 7}\n")
    command = [*PODNET, "--config", str(file), "--seed", "4", "--set", "seed=1", "--set", "ivt.interval=5"]
    command += ["--tasks", "3", "--out", str(folder / "run")]
    return folder / "run", invoke(*command), command


def test_run_writes_a_record_and_prints_it(finished: Finished) -> None:
    out, result, _ = finished
    assert result.exit_code == 0, result.output
    record = json.loads((out / "record.json").read_text())
    expected = {"method": "podnet", "addons": ["ivt"], "dataset": "digits", "tasks": 3, "oracle": False}
    assert {key: record[key] for key in expected} == expected
    assert [len(row) for row in record["accuracy"]] == [1, 2, 3, 4]
    assert len(record["test_counts"]) == 4
    assert {"AA", "LA", "FM"} <= set(record["metrics"])
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert f"{record['metrics']['LA']:.2f}" in result.stdout
    assert (out.parent / "bases").is_dir()
    assert "task 2/4 balance" in result.stdout


def test_set_overrides_options_override_file_overrides_preset(finished: Finished) -> None:
    config = json.loads((finished[0] / "record.json").read_text())["config"]
    assert config["method"] == "podnet"  # option, over the file
    assert config["seed"] == 1  # --set, over the option and the file
    assert config["ivt"]["interval"] == 5
    assert config["podnet"]["epochs"] == 1
    assert config["podnet"]["lr"] == 0.05  # only in the file
    assert config["podnet"]["memory"] == 5  # only in the preset


def test_finished_run_is_reported_without_loading_data(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _, command = finished
    before = contents(out)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("data was loaded for a finished run")

    monkeypatch.setattr(launch, "load_dataset", forbidden)
    result = invoke(*command)
    assert result.exit_code == 0
    assert "already finished" in result.stdout
    assert f"{json.loads((out / 'record.json').read_text())['metrics']['AA']:.2f}" in result.stdout
    assert contents(out) == before


def test_other_settings_in_the_same_folder_are_refused(finished: Finished) -> None:
    out, _, command = finished
    before = contents(out)
    result = invoke(*command, "--set", "podnet.epochs=2")
    assert result.exit_code == 1
    assert "another configuration (podnet.epochs: 1 -> 2)" in message(result)
    assert "--out" in message(result)
    assert contents(out) == before


def test_other_method_in_the_same_folder_is_refused_briefly(finished: Finished) -> None:
    text = message(invoke("run", "--method", "finetune", "--dataset", "digits", "--out", finished[0]))
    assert (
        "(method: 'podnet' -> 'finetune'; addons: ['ivt'] -> []; finetune: section added; ivt: section removed" in text
    )
    assert len(text) - len(str(finished[0])) < 400


def test_run_started_at_its_own_base_is_the_same_run(tmp_path: Path) -> None:
    """With or without `start`, the same command reports that the run is finished."""
    short = [*PODNET, "--set", "stop_after=2", "--out"]
    assert invoke(*short, tmp_path / "first").exit_code == 0
    start = ["--set", f"start={tmp_path / 'first' / 'snapshots' / 'task-00.safetensors'}"]
    for given in (start, start, []):
        result = invoke(*short, tmp_path / "second", *given)
        assert result.exit_code == 0, result.output
    assert "already finished" in result.stdout


class Interrupted(Run):
    """A run whose user presses Ctrl-C in the second task."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, save_interval=0)

    def events(self) -> Iterator[ev.Event]:
        for event in super().events():
            yield event
            if isinstance(event, ev.EpochEnded) and event.task == 1:
                raise KeyboardInterrupt


def test_interrupted_run_resumes(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _, command = finished
    mine = [*command[:-1], str(tmp_path / "run"), "--no-share"]
    with monkeypatch.context() as patch:
        patch.setattr(launch, "Run", Interrupted)
        result = invoke(*mine)
    assert result.exit_code == 130
    assert "Interrupted. Run the same command again to resume." in message(result)
    assert not (tmp_path / "run" / "record.json").exists()
    assert not (tmp_path / "bases").exists()

    before = contents(tmp_path)
    result = invoke(*mine, "--oracle")
    assert result.exit_code == 1
    assert "another configuration (oracle: False -> True)" in message(result)
    assert contents(tmp_path) == before

    result = invoke(*mine)
    assert result.exit_code == 0, result.output
    assert "resuming from task 2" in result.stdout
    records = [json.loads((folder / "record.json").read_text()) for folder in (out, tmp_path / "run")]
    same_record(*records)


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("run", "--method", "finetune", "--set", "finetune.net=tiny", "--set", "finetune.epochs=1")
    assert result.exit_code == 0, result.output
    (folder,) = (f for f in Path("runs").iterdir() if f.name != "bases")
    assert folder.name == "digits-finetune-3-s0-net-tiny-epochs1"
    assert (folder / "record.json").exists()
    assert list(Path("runs/bases").glob("*.safetensors"))


def name(**given: Any) -> str:
    return run_name(resolve({"method": "podnet", **given}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "digits-podnet-3-s0"),
        ({"dataset": "cifar100", "addons": ["ivt"], "tasks": 10, "seed": 2}, "cifar100-podnet+ivt-10-s2"),
        ({"dataset": "cifar100", "oracle": True}, "cifar100-podnet-oracle-5-s0"),
        ({"podnet": {"memory": 5}}, "digits-podnet-3-s0"),  # the preset's value
        ({"podnet": {"memory": 4}}, "digits-podnet-3-s0-memory4"),
        ({"podnet": {"lr": 0.025}, "device": "cpu"}, "digits-podnet-3-s0-device-cpu-lr0.025"),
        ({"addons": ["ivt"], "ivt": {"interval": 2}}, "digits-podnet+ivt-3-s0-interval2"),
        ({"addons": ["ivt"], "ivt": {"memory": "host"}}, "digits-podnet+ivt-3-s0-ivt.memory-host"),
        ({"dataset": "imagenet-subset", "variant": "authors"}, "imagenet-subset-podnet-5-s0-authors"),
        ({"snapshots": False, "order_seed": None}, "digits-podnet-3-s0-order_seed-none-no-snapshots"),
        ({"podnet": {"milestones": [3, 4]}}, "digits-podnet-3-s0-milestones-3-4"),
    ],
)  # fmt: skip
def test_run_names_say_what_differs(given: dict[str, Any], expected: str) -> None:
    assert name(**given) == expected


def test_run_names_are_different_short_and_valid_file_names() -> None:
    given: list[dict[str, Any]] = [
        {"start": "../../a b"}, {"start": "../../a-b"}, {"start": "/" + 300 * "x"}, {"start": "/" + 301 * "x"},
        *({"class_order": [seed, *(c for c in range(10) if c != seed)]} for seed in range(3)),
        *({"podnet": {"lr": 0.1 + n, "margin": 0.3, "clamp": 2.0, "lambda_flat": 7.0, "lambda_spatial": 9.5,
                      "gamma": 0.5, "weight_decay": 1e-3, "brightness": 0.25, "nca": "paper"}} for n in (1e-9, 2e-9)),
    ]  # fmt: skip
    names = [name(**each) for each in given]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]{1,160}", each) for each in names), names


def test_dry_run_prints_every_setting_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("seed: 3\npodnet: {proxies: 4, lr: 9}\nivt: {interval: 7}\n")
    command = ["run", "--method", "podnet", "--addon", "ivt", "--config", "mine.yaml", "--epochs", "6"]
    command += ["--set", "podnet.lr=0.5", "--set", "method.momentum=0.25", "--base-classes", "6", "--tasks", "2"]
    result = invoke(*command, "--dry-run")
    assert result.exit_code == 0, result.output
    assert not Path("runs").exists()
    lines = {line.split(":")[0].strip(): line.split(" # ")[1] for line in result.stdout.splitlines() if ": " in line}
    expected = {
        "method": "--method", "addons": "--addon", "dataset": "default", "seed": "file mine.yaml", "tasks": "--tasks",
        "base_classes": "--base-classes", "epochs": "--epochs", "lr": "--set", "momentum": "--set",
        "proxies": "file mine.yaml", "interval": "file mine.yaml", "net": "preset podnet-digits", "margin": "default",
        "last": "preset ivt+podnet", "order_seed": "default",
    }  # fmt: skip
    assert {key: lines[key] for key in expected} == expected
    # What is printed is a configuration file for the same run.
    Path("printed.yaml").write_text(result.stdout)
    again = invoke("run", "--config", "printed.yaml", "--dry-run").stdout.splitlines()
    assert again[0] == result.stdout.splitlines()[0] == (
        "# runs/digits-podnet+ivt-2-s3-base_classes6-epochs6-lr0.5-momentum0.25-proxies4-interval7 (to do)"
    )  # fmt: skip
    values = [line.partition(" #")[0] for line in again]
    assert values == [line.partition(" #")[0] for line in result.stdout.splitlines()]
    assert {line.partition(" # ")[2] for line in again[1:] if " # " in line} == {"file printed.yaml"}
    assert "tasks: 3                                     # preset of digits" in invoke(*command[:3], "--dry-run").stdout


def test_several_seeds_are_one_run_each_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ["--set", "podnet.net=tiny", "--epochs", "1", "--memory", "2", "--batch-size", "64", "--lr", "0.1"]
    command = ["run", "--method", "podnet", *short, "--set", "stop_after=2", "--out", str(tmp_path)]
    result = invoke(*command, "--seeds", "0-1", "--log", "csv")
    assert result.exit_code == 0, result.output
    records = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*/record.json"))]
    assert [record["seed"] for record in records] == [0, 1]
    own = records[0]["config"]["podnet"]
    assert (own["epochs"], own["memory"], own["batch_size"], own["lr"]) == (1, 2, 64, 0.1)
    first, second = (record["metrics"]["LA"] for record in records)
    spread = f"{(first + second) / 2:.1f} ± {abs(first - second) / 2**0.5:.1f}"
    assert spread in result.stdout
    assert len(list(tmp_path.glob("*/csv/losses.csv"))) == 2
    again = invoke(*command, "--seeds", "1,0")
    assert again.stdout.count("already finished") == 2
    assert spread in again.stdout
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "with torchrun, give a single --seed" in message(invoke(*command, "--seeds", "0,1"))


def test_a_folder_is_cut_into_a_stream_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = make_root(tmp_path / "images", classes=7, train=5, test=2)
    command = ["run", "--method", "finetune", "--dataset", "folder", "--data-root", str(root), "--epochs", "1"]
    command += ["--set", "finetune.net=tiny", "--set", "image_size=8", "--batch-size", "4"]
    line = "stream: 7 classes: a base task of 4, then 1 task of 3 (change it with --base-classes and --tasks)"
    dry = invoke(*command, "--dry-run").stdout
    assert f"# {line}" in dry
    assert "base_classes: 4                              # the classes of the data root" in dry
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert line in result.stdout
    (record,) = (json.loads(file.read_text()) for file in Path("runs").glob("*/record.json"))
    assert [len(row) for row in record["accuracy"]] == [1, 2]
    assert (record["config"]["base_classes"], record["config"]["tasks"]) == (4, 1)
    assert "a base task of 4, then 3 tasks of 1 (change it with --base-classes)" in invoke(
        *command, "--tasks", "3", "--dry-run"
    ).stdout  # fmt: skip
    assert "stream:" not in invoke(*command, "--tasks", "2", "--base-classes", "1", "--dry-run").stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--method", "podnett"], "unknown method 'podnett'. Did you mean 'podnet'?"),
        ([], "no method was named"),
        (["--method", "podnet", "--addon", "itv"], "unknown add-on 'itv'. Did you mean 'ivt'?"),
        (["--method", "podnet", "--dataset", "cifar10"], "Did you mean 'cifar100'?"),
        (["--method", "podnet", "--dataset", "cifar100"], "Give it with --data-root DIR or the variable INCVEC_DATA."),
        (["--method", "podnet", "--set", "image_size=32"], "has no option 'image_size'. It is an option of folder"),
        (["--method", "podnet", "--set", "podnet.epocs=1"], "unknown setting podnet.epocs. Did you mean 'epochs'?"),
        (["--method", "podnet", "--set", "sed=1"], "unknown setting 'sed'. Did you mean 'seed'?"),
        (["--method", "podnet", "--set", "zzz=1"], "unknown setting 'zzz'. Known settings: addons, base_classes"),
        (["--method", "podnet", "--set", "zzz=1"], "seed, snapshots, start,"),
        (["--method", "podnet", "--set", "zzz=1"], "variant; and those of podnet."),
        (["--method", "podnet", "--set", "batch_size=8"], "Did you mean 'podnet.batch_size'?"),
        (["--method", "podnet", "--set", "ivt.interval=2"], "add-on is not part of this run"),
        (["--method", "podnet", "--set", "podnet.epochs=many"], "podnet.epochs = 'many' is not possible"),
        (["--method", "podnet", "--set", "podnet.epochs=1.5"], "podnet.epochs = 1.5 is not possible"),
        (["--method", "podnet", "--set", "podnet.epochs=0"], "podnet.epochs = 0 is not possible"),
        (["--method", "podnet", "--set", "podnet.epochs"], "--set takes key=value"),
        (["--method", "podnet", "--set", "method=5"], "method = 5 is not possible: expected a name"),
        (["--method", "podnet", "--set", "addons=5"], "addons = 5 is not possible"),
        (["--method", "podnet", "--set", "addons=ivt,itv"], "unknown add-on 'itv'"),
        (["--method", "podnet", "--variant", "autors"], "podnet has no variant 'autors'"),
        (["--method", "podnet", "--engine", "grph"], "engine = 'grph' is not possible"),
        (["--method", "podnet", "--device", "gpu"], "device 'gpu' is not known"),
        (["--method", "podnet", "--device", "mps"], "'mps' is not supported: incvec was never run on Apple's GPUs"),
        (["--method", "podnet", "--device", "meta"], "device 'meta' is not known"),
        (["--method", "podnet", "--set", "podnet.lr=1e60"], "the learning rate 1e+60 (stage 'main' of podnet)"),
        (["--method", "podnet", "--tasks", "4"], "cannot be cut into 4 equal tasks"),
        (["--method", "podnet", "--set", "podnet.net=tinny"], "Did you mean 'tiny'?"),
        (["--method", "podnet", "--dataset", "cifar100", "--set", "podnet.net=tinny"], "Did you mean 'tiny'?"),
        (["--method", "podnet", "--set", "podnet.memory=1000"], "lower podnet.memory"),
        (["--method", "podnet", "--bases", "x", "--no-share"], "exclude each other"),
        (["--method", "podnet", "--download"], "'digits' is never downloaded"),
        (["--config", "absent.yaml"], "there is no file absent.yaml"),
        (["--config", "list.yaml"], "contains no settings"),
        (["--method", "podnet", "--epochs", "0"], "podnet.epochs = 0 is not possible"),
        (["--method", "podnet", "--seeds", "0,one"], "--seeds '0,one' is not possible: expected different"),
        (["--method", "podnet", "--seeds", "1,1"], "expected different whole numbers, such as 0,1,2 or 0-4"),
        (["--method", "podnet", "--seed", "1", "--seeds", "1,2"], "--seed and --seeds exclude each other"),
        (["--config", "bad.yaml"], "bad.yaml is not valid YAML"),
        (["--config", "number.yaml"], "unknown setting podnet.5"),
        (["--config", "twice.yaml"], "the key 'method' occurs twice"),
        (["--config", "empty-section.yaml"], "unknown setting 'podnt'. Did you mean 'podnet'?"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)  # fmt: skip
def test_invalid_settings_are_refused_with_one_message(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("- podnet\n")
    Path("bad.yaml").write_text("method: [podnet\n")
    Path("number.yaml").write_text("method: podnet\npodnet: {5: 1}\n")
    Path("twice.yaml").write_text("method: podnet\nmethod: pass\n")
    Path("empty-section.yaml").write_text("method: podnet\npodnt: {}\n")
    result = invoke("run", *arguments)
    assert result.exit_code == 1, result.output
    assert expected in message(result)
    assert message(result).startswith("error: ")
    assert "Traceback" not in result.output
    assert not Path("runs").exists()


SHRINK = """
import incvec.__main__
from incvec.data.store.mapped import PackedImages
original = PackedImages.gather
def gather(self, rows, out):
    self._map(0)
    with open(self.shards[0][0], "r+b") as file:
        file.truncate(0)
    original(self, rows, out)
PackedImages.gather = gather
incvec.__main__.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is specific to Linux")
def test_store_truncated_while_it_is_read_prints_a_traceback(tmp_path: Path) -> None:
    """The kernel ends the process, so all that can be printed is where that happened."""
    store = make_store(make_root(tmp_path / "images"), tmp_path / "store", 64).root
    command = ["run", "--method", "finetune", "--dataset", "packed", "--data-root", store, "--set", "finetune.net=tiny"]
    command += ["--set", "base_classes=0", "--tasks", "3", "--out", tmp_path / "run"]
    process = subprocess.run([sys.executable, "-c", SHRINK, *map(str, command)], capture_output=True, text=True)
    assert process.returncode == -signal.SIGBUS
    assert "Bus error" in process.stderr
    assert re.search(r"mapped\.py.* in gather", process.stderr)
