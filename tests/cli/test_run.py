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

from incvec.cli import run as run_command
from incvec.engine import events as ev
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

    monkeypatch.setattr(run_command, "load_dataset", forbidden)
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
        patch.setattr(run_command, "Run", Interrupted)
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
    assert re.fullmatch(r"digits-finetune-3-s0-[0-9a-f]{8}", folder.name)
    assert (folder / "record.json").exists()
    assert list(Path("runs/bases").glob("*.safetensors"))


def test_run_names() -> None:
    def name(**given: Any) -> str:
        return run_name(resolve({"method": "podnet", **given}))

    assert name() == "digits-podnet-3-s0"
    assert name(dataset="cifar100", addons=["ivt"], tasks=10, seed=2) == "cifar100-podnet+ivt-10-s2"
    assert name(dataset="cifar100", oracle=True) == "cifar100-podnet-oracle-5-s0"
    assert name(podnet={"memory": 5}) == "digits-podnet-3-s0"  # the preset's value
    changed = {name(podnet={"memory": 4}), name(podnet={"memory": 6}), name(device="cpu"), name(order_seed=7)}
    assert len(changed) == 4
    assert all(re.fullmatch(r"digits-podnet-3-s0-[0-9a-f]{8}", each) for each in changed)


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
        (["--method", "podnet", "--device", "mps"], "device 'mps' is not known"),
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
        (["--config", "bad.yaml"], "bad.yaml is not valid YAML"),
        (["--config", "number.yaml"], "unknown setting podnet.5"),
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
