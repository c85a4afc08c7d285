"""The lab from Python: the same objects, folders and records as the command line's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import incvec
from incvec.errors import ConfigError, DataError, TrainingError
from tests.cli.conftest import invoke
from tests.conftest import same_record
from tests.documents import blocks

SHORT = {"podnet.epochs": 1, "podnet": {"net": "tiny", "balance_epochs": 1}, "stop_after": 2}


def test_import_is_light_and_the_plugin_needs_torch_only() -> None:
    code = (
        "import sys, incvec; assert 'torch' not in sys.modules; assert 'pydantic' not in sys.modules\n"
        "from incvec import IVT, scale, teleport\n"
        "assert not {'pydantic', 'yaml', 'rich', 'typer', 'safetensors'} & set(sys.modules)\n"
        "print(sorted(incvec.__all__))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(incvec.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in incvec.__all__:
        assert getattr(incvec, name) is not None
    with pytest.raises(AttributeError, match="module 'incvec' has no attribute 'runs'"):
        _ = incvec.runs  # type: ignore[attr-defined]


def test_run_returns_the_record_of_the_same_run_as_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = incvec.run("podnet", ["ivt"], "digits", settings={**SHORT, "ivt.interval": 1}, out=str(tmp_path / "a"))
    assert capsys.readouterr().out == ""
    assert record == incvec.load_record(tmp_path / "a") == json.loads((tmp_path / "a" / "record.json").read_text())
    command = ["run", "--method", "podnet", "--addon", "ivt", "--set", "podnet.net=tiny", "--epochs", "1"]
    command += ["--set", "podnet.balance_epochs=1", "--set", "stop_after=2", "--set", "ivt.interval=1"]
    result = invoke(*command, "--out", tmp_path / "a")
    assert "already finished" in result.stdout  # the very same configuration
    assert invoke(*command, "--out", tmp_path / "b", "--no-share").exit_code == 0
    same_record(record, incvec.load_record(str(tmp_path / "b")))


def test_finished_run_is_not_trained_again_and_progress_is_optional(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"settings": SHORT, "out": tmp_path / "a", "share": False, "progress": True}
    first = incvec.run("podnet", **given, log="csv")
    assert "task 2/2 finished" in capsys.readouterr().out
    assert (tmp_path / "a" / "csv" / "losses.csv").exists()
    written = (tmp_path / "a" / "record.json").stat().st_mtime_ns
    assert incvec.run("podnet", **given) == first
    assert (tmp_path / "a" / "record.json").stat().st_mtime_ns == written
    assert not (tmp_path / "bases").exists()
    with pytest.raises(Exception, match=r"another configuration \(seed: 0 -> 1\)"):
        incvec.run("podnet", **given, seed=1)


def test_idle_addon_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ivt changes nothing in this run: an increment has 1 epoch"):
        incvec.run("podnet", ["ivt"], settings=SHORT, out=tmp_path / "a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "podnt"}, "unknown method 'podnt'. Did you mean 'podnet'?"),
        ({"method": "podnet", "seeds": 3}, "unknown setting 'seeds'. Did you mean 'seed'?"),
        ({"method": "podnet", "settings": {"podnet.epocs": 3}}, "unknown setting podnet.epocs"),
        ({"method": "podnet", "settings": {"podnet.epochs": "3"}}, "podnet.epochs = '3' is not possible"),
        ({"method": "podnet", "settings": {"seed.a": 1}, "seed": 3}, "seed is a single value"),
        ({"method": "podnet", "addons": "itv"}, "unknown add-on 'itv'. Did you mean 'ivt'?"),
        ({"method": "podnet", "addons": 5}, "addons = 5 is not possible: expected a list of names"),
        ({"method": "podnet", "log": "xls"}, "log 'xls' is not possible: expected tensorboard, csv, wandb"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        incvec.run(**given, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("at_once", [0, -1])
def test_sweep_needs_a_positive_number_of_concurrent_runs(at_once: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"at_once is {at_once}: expected 1 or more"):
        incvec.sweep([{"method": "podnet"}], at_once=at_once, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_sweep_returns_records_and_a_frame(tmp_path: Path) -> None:
    block = {"method": "podnet", "addons": [[], ["ivt"]], "ivt": {"interval": 1}, "stop_after": 2}
    own = {"podnet": {"net": "tiny", "epochs": 1}}
    found = incvec.sweep([block | own], settings={"podnet.balance_epochs": 1}, seeds=[0, 1], out=str(tmp_path))
    assert [(record["addons"], record["seed"]) for record in found] == [([], 0), ([], 1), (["ivt"], 0), (["ivt"], 1)]
    assert {record["config"]["podnet"]["balance_epochs"] for record in found} == {1}
    again = incvec.records(tmp_path)
    assert sorted(map(str, again.paths)) == sorted(map(str, found.paths))
    assert all(record in again for record in found)
    shown = json.loads(invoke("show", tmp_path, "--json").stdout)
    assert sorted(row["LA"] for row in shown) == sorted(record["metrics"]["LA"] for record in found)

    pytest.importorskip("pandas", reason="the optional package pandas is not installed")
    frame = found.frame()
    assert list(frame.columns[:7]) == ["run", "method", "addons", "oracle", "dataset", "tasks", "seed"]
    assert list(frame["run"]) == ["podnet", "podnet", "podnet + ivt", "podnet + ivt"]
    assert frame["LA"].tolist() == [record["metrics"]["LA"] for record in found]
    assert frame["podnet.epochs"].tolist() == [1, 1, 1, 1]
    assert frame["ivt.interval"].isna().tolist() == [True, True, False, False]


def test_failed_runs_of_a_sweep_are_an_error_after_the_others(tmp_path: Path) -> None:
    runs = [{"method": "replay", "replay": {"memory": 1000}}, {"method": "finetune"}]
    quick = {"method.net": "tiny", "method.epochs": 1, "stop_after": 1}
    with pytest.raises(TrainingError, match=r"1 of 2 runs failed: digits-replay.*lower replay.memory"):
        incvec.sweep(runs, settings=quick, out=tmp_path)
    assert [record["method"] for record in incvec.records(tmp_path)] == ["finetune"]


def test_records_reads_folders_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`incvec.records` is a function although a module has that name, whichever was imported first."""
    import incvec.records as module

    assert module.read_record is not None
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="runs does not exist"):
        incvec.records()
    with pytest.raises(DataError, match="there is no record at"):
        incvec.load_record(tmp_path)


def test_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [block.text for block in blocks() if block.document == "docs/python.md" and block.language == "python"]
    assert len(shown) == 3
    for text in shown:
        short = text.replace('"podnet.epochs": 2', '"podnet.epochs": 1, "podnet.net": "tiny"')
        exec(short.replace('{"epochs": 2}', '{"epochs": 1, "net": "tiny"}'), {})
    assert len(incvec.records()) == 1 + 3 * 2
