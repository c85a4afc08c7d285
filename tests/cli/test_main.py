"""The command line on real, tiny runs."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

import incvec
import incvec.__main__
from incvec.cli import main as cli
from incvec.cli.progress import Lines, Screen, follow
from incvec.engine import events as ev
from incvec.engine.run import Run
from incvec.presets import resolve
from tests.conftest import same_record
from tests.data.pictures import make_root, make_store

SHORT = ["--set", "podnet.net=tiny", "--set", "podnet.epochs=1", "--set", "podnet.balance_epochs=1"]
PODNET = ["run", "--method", "podnet", "--dataset", "digits", *SHORT]


def incvec_(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(cli.app, [str(a) for a in arguments], prog_name="incvec")


def message(result: Result) -> str:
    """What was said on stderr, in one line."""
    return " ".join(result.stderr.split())


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Hash and time of change of every file."""
    return {
        str(file.relative_to(folder)): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, list[str]]:
    """A finished run, configured in all the ways there are."""
    folder = tmp_path_factory.mktemp("done")
    file = folder / "mine.yaml"
    file.write_text("method: finetune\naddons: [ivt]\nseed: 5\npodnet:\n  lr: 5e-2\n  epochs: 3\nivt: {interval: 7}\n")
    command = [*PODNET, "--config", str(file), "--seed", "4", "--set", "seed=1", "--set", "ivt.interval=5"]
    command += ["--tasks", "3", "--out", str(folder / "run")]
    return folder / "run", incvec_(*command), command


def test_run_writes_a_record(done: tuple[Path, Result, list[str]]) -> None:
    out, result, _ = done
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


def test_set_goes_before_options_before_the_file_before_the_preset(done: tuple[Path, Result, list[str]]) -> None:
    config = json.loads((done[0] / "record.json").read_text())["config"]
    assert config["method"] == "podnet"  # the option, over the file
    assert config["seed"] == 1  # --set, over the option and the file
    assert config["ivt"]["interval"] == 5
    assert config["podnet"]["epochs"] == 1
    assert config["podnet"]["lr"] == 0.05  # the file alone
    assert config["podnet"]["memory"] == 5  # the preset alone


def test_running_it_again_says_done(done: tuple[Path, Result, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    out, _, command = done
    before = contents(out)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("data were loaded for a run that is done")

    monkeypatch.setattr(cli, "load_dataset", forbidden)
    result = incvec_(*command)
    assert result.exit_code == 0
    assert "done already" in result.stdout
    assert f"{json.loads((out / 'record.json').read_text())['metrics']['AA']:.2f}" in result.stdout
    assert contents(out) == before


def test_another_configuration_in_the_same_folder_is_refused(done: tuple[Path, Result, list[str]]) -> None:
    out, _, command = done
    before = contents(out)
    result = incvec_(*command, "--set", "podnet.epochs=2")
    assert result.exit_code == 1
    assert "another configuration (podnet.epochs: 1 -> 2)" in message(result)
    assert "--out" in message(result)
    assert contents(out) == before


def test_another_method_in_the_same_folder_is_told_briefly(done: tuple[Path, Result, list[str]]) -> None:
    told = message(incvec_("run", "--method", "finetune", "--dataset", "digits", "--out", done[0]))
    assert "(method: 'podnet' -> 'finetune'; addons: ['ivt'] -> []; finetune: a new section; ivt: a section" in told
    assert len(told) - len(str(done[0])) < 400


def test_a_run_begun_at_its_own_base_is_done_too(tmp_path: Path) -> None:
    """Which base it is makes no other run of it: with or without `start`, the same command says done."""
    short = [*PODNET, "--set", "stop_after=2", "--out"]
    assert incvec_(*short, tmp_path / "first").exit_code == 0
    start = ["--set", f"start={tmp_path / 'first' / 'snapshots' / 'task-00.safetensors'}"]
    for given in (start, start, []):
        result = incvec_(*short, tmp_path / "second", *given)
        assert result.exit_code == 0, result.output
    assert "done already" in result.stdout


SHRINKING = """
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


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_a_store_that_shrinks_while_it_is_read_is_told_of(tmp_path: Path) -> None:
    """The kernel ends the process, so what can be said is where it was."""
    store = make_store(make_root(tmp_path / "images"), tmp_path / "store", 64).root
    command = ["run", "--method", "finetune", "--dataset", "packed", "--data-root", store, "--set", "finetune.net=tiny"]
    command += ["--set", "base_classes=0", "--tasks", "3", "--out", tmp_path / "run"]
    done = subprocess.run([sys.executable, "-c", SHRINKING, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr
    assert re.search(r"mapped\.py.* in gather", done.stderr)


class Interrupted(Run):
    """A run whose user presses Ctrl-C in the second task."""

    def events(self) -> Iterator[ev.Event]:
        for event in super().events():
            yield event
            if isinstance(event, ev.EpochEnded) and event.task == 1:
                raise KeyboardInterrupt


def test_a_stopped_run_goes_on(
    done: tuple[Path, Result, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _, command = done
    mine = [*command[:-1], str(tmp_path / "run"), "--no-share"]
    with monkeypatch.context() as patch:
        patch.setattr(cli, "Run", Interrupted)
        patch.setattr(Run, "_save_due", lambda self: True)
        result = incvec_(*mine)
    assert result.exit_code == 130
    assert "stopped; run the same command again to go on" in message(result)
    assert not (tmp_path / "run" / "record.json").exists()
    assert not (tmp_path / "bases").exists()

    before = contents(tmp_path)
    result = incvec_(*mine, "--oracle")
    assert result.exit_code == 1
    assert "another configuration (oracle: False -> True)" in message(result)
    assert contents(tmp_path) == before

    result = incvec_(*mine)
    assert result.exit_code == 0, result.output
    assert "going on from task 2" in result.stdout
    records = [json.loads((folder / "record.json").read_text()) for folder in (out, tmp_path / "run")]
    same_record(*records)


def test_where_a_run_goes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = incvec_("run", "--method", "finetune", "--set", "finetune.net=tiny", "--set", "finetune.epochs=1")
    assert result.exit_code == 0, result.output
    (folder,) = (f for f in Path("runs").iterdir() if f.name != "bases")
    assert re.fullmatch(r"digits-finetune-3-s0-[0-9a-f]{8}", folder.name)
    assert (folder / "record.json").exists()
    assert list(Path("runs/bases").glob("*.safetensors"))


def test_names_of_runs() -> None:
    def name(**given: Any) -> str:
        return cli.run_name(resolve({"method": "podnet", **given}))

    assert name() == "digits-podnet-3-s0"
    assert name(dataset="cifar100", addons=["ivt"], tasks=10, seed=2) == "cifar100-podnet+ivt-10-s2"
    assert name(dataset="cifar100", oracle=True) == "cifar100-podnet-oracle-5-s0"
    assert name(podnet={"memory": 5}) == "digits-podnet-3-s0"  # what the preset says anyway
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
        (["--method", "podnet", "--set", "podnet.lr=1e60"], "a learning rate of 1e+60 (stage 'main' of podnet)"),
        (["--method", "podnet", "--tasks", "4"], "cannot be cut into 4 equal tasks"),
        (["--method", "podnet", "--set", "podnet.net=tinny"], "Did you mean 'tiny'?"),
        (["--method", "podnet", "--dataset", "cifar100", "--set", "podnet.net=tinny"], "Did you mean 'tiny'?"),
        (["--method", "podnet", "--set", "podnet.memory=1000"], "lower podnet.memory"),
        (["--method", "podnet", "--bases", "x", "--no-share"], "contradict"),
        (["--method", "podnet", "--download"], "'digits' is never downloaded"),
        (["--config", "absent.yaml"], "there is no configuration file absent.yaml"),
        (["--config", "list.yaml"], "holds no settings"),
        (["--config", "bad.yaml"], "cannot be read as YAML"),
        (["--config", "number.yaml"], "unknown setting podnet.5"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_message(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("- podnet\n")
    Path("bad.yaml").write_text("method: [podnet\n")
    Path("number.yaml").write_text("method: podnet\npodnet: {5: 1}\n")
    result = incvec_("run", *arguments)
    assert result.exit_code == 1, result.output
    assert expected in message(result)
    assert message(result).startswith("error: ")
    assert "Traceback" not in result.output
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words, what in (
        ([*PODNET, "--out", tmp_path / "file"], "a run"),
        ([*PODNET, "--out", tmp_path / "file" / "run"], "a run"),
        (["sweep", "digits", "--dry-run", "--out", tmp_path / "file"], "a sweep"),
        (["demo", "--out", tmp_path / "file"], "the demo"),
    ):
        result = incvec_(*words)
        assert result.exit_code == 1
        assert f"file is a file; {what} needs a folder. Give another one with --out." in message(result)


# list, show, data -----------------------------------------------------------------------------------------


def test_list() -> None:
    result = incvec_("list", "--json")
    assert result.exit_code == 0
    catalog = json.loads(result.stdout)
    assert list(catalog) == ["methods", "addons", "datasets", "presets", "nets", "sweeps"]
    for kind, entries in catalog.items():
        assert all(entry["name"] and entry["summary"] for entry in entries)
        assert kind in ("nets", "sweeps") or all(entry["paper"] for entry in entries)
    names = {kind: [entry["name"] for entry in entries] for kind, entries in catalog.items()}
    assert {"finetune", "podnet"} <= set(names["methods"])
    assert "ivt" in names["addons"]
    assert {"cifar100", "digits", "folder"} <= set(names["datasets"])
    assert {"podnet-cifar100", "ivt-digits"} <= set(names["presets"])
    assert {"resnet32-rebuffi", "tiny", "clip"} <= set(names["nets"])
    assert {"digits", "cifar100-podnet"} <= set(names["sweeps"])

    assert list(json.loads(incvec_("list", "addons", "--json").stdout)) == ["addons"]
    text = incvec_("list").stdout
    assert all(name in text for kind in names.values() for name in kind)
    assert "https://arxiv.org/abs/2004.13513" in text
    assert incvec_("list", "method").exit_code == 2
    lines = incvec_("list", "presets").stdout.splitlines()
    below = {line.split()[0]: after.strip() for line, after in itertools.pairwise(lines) if line.strip()}
    assert below["ewc-cifar100-pycil"] == "--variant pycil"
    assert "--variant" not in below["ewc-digits"] + below["ivt-digits-pretrained"]


def write_record(folder: Path, la: float, *addons: str, oracle: bool = False) -> None:
    folder.mkdir(parents=True)
    record = {
        "method": "podnet", "addons": addons, "dataset": "digits", "tasks": 3, "oracle": oracle, "seed": 0,
        "accuracy": [[90.0], [la, la]], "test_counts": [20, 10], "metrics": {"AA": 80.0, "LA": la, "FM": 90 - la},
        "config": {"addons": addons, "oracle": oracle, **{name: {} for name in addons}}, "seconds": 7.0,
    }  # fmt: skip
    (folder / "record.json").write_text(json.dumps(record))


def test_show(tmp_path: Path) -> None:
    write_record(tmp_path / "a", 60.0)
    write_record(tmp_path / "b", 65.0, "ivt")
    write_record(tmp_path / "c", 80.0, oracle=True)
    result = incvec_("show", tmp_path)
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if "podnet + ivt" in line)
    assert row.split() == ["podnet", "+", "ivt", "digits", "3", "0", "80.00", "65.00", "25.00", "25", "%", "7.0"]

    result = incvec_("show", tmp_path / "b" / "record.json", tmp_path / "a", "--markdown")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("| run | data set |")
    assert "| podnet + ivt | digits | 3 | 0 | 80.00 | 65.00 | 25.00 | – | 7.0 |" in lines

    rows = json.loads(incvec_("show", tmp_path, "--json").stdout)
    assert {row["run"]: row["gap_closed"] for row in rows} == {
        "podnet": None,
        "podnet + ivt": 0.25,
        "podnet oracle": None,
    }
    assert incvec_("show", tmp_path, "--json", "--markdown").exit_code == 1


def test_show_on_broken_records(tmp_path: Path) -> None:
    write_record(tmp_path / "good", 60.0)
    (tmp_path / "bad").mkdir()
    broken = tmp_path / "bad" / "record.json"
    broken.write_text((tmp_path / "good" / "record.json").read_text()[:100])
    for given in (broken, tmp_path / "bad"):
        result = incvec_("show", given)
        assert result.exit_code == 1
        assert "record.json is not a record" in message(result)
    result = incvec_("show", tmp_path)
    assert result.exit_code == 0
    assert "60.00" in result.stdout
    assert "left out" in message(result)

    broken.write_text('{"method": "podnet"}')
    assert "it lacks addons, dataset" in message(incvec_("show", broken))
    assert "does not exist" in message(incvec_("show", tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    assert "no record lies in" in message(incvec_("show", tmp_path / "empty"))


def test_data_check(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), "red").save(tmp_path / part / name / "1.png")
    result = incvec_("data", "check", tmp_path)
    assert result.exit_code == 0, result.output
    assert "2" in result.stdout
    (tmp_path / "test" / "dog" / "1.png").write_bytes(b"no image")
    result = incvec_("data", "check", tmp_path)
    assert result.exit_code == 1
    assert "1.png" in message(result)
    (tmp_path / "empty").mkdir()
    for told in (
        incvec_("data", "check", "--help").stdout,
        message(incvec_("data", "check", tmp_path / "empty")),
        message(incvec_("data", "check", tmp_path / "absent")),
    ):
        assert "fgvc-aircraft-2013b/" in told


# progress -------------------------------------------------------------------------------------------------


def story() -> Iterator[ev.Event]:
    yield ev.Started("podnet", 2, "eager", "cpu", "task 1, stage 1, epoch 3")
    yield ev.StageStarted(0, "main", 100, 3, 576, 9)
    for epoch in range(4, 101):
        yield ev.Tick()
        yield ev.EpochEnded(0, "main", epoch, 100, {"nca": 1.0, "flat": 0.25}, epoch / 200, 65.0)
    yield ev.Tick(waiting=True)
    yield ev.Notice("[bold]a notice[/bold]")
    yield ev.TaskEnded(0, 91.234, [91.234])
    yield ev.Finished({"answer": 42}, "record.json")


def test_lines_are_few() -> None:
    text = io.StringIO()
    assert follow(story(), Console(file=text, width=40)) == {"answer": 42}
    lines = text.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    said = [line[9:] for line in lines]
    assert said == [
        "podnet: 2 tasks, eager engine on cpu, going on from task 1, stage 1, epoch 3",
        "task 1/2 main: 576 images, 100 epochs of 9 steps, 3 of them done",
        "[bold]a notice[/bold]",
        "task 1/2 done: accuracy 91.23 % over the classes seen (by task: 91.2)",
        "record written to record.json",
    ]


def test_epochs_are_told_when_it_has_been_quiet() -> None:
    text = io.StringIO()
    lines = Lines(Console(file=text, width=40), quiet=0.0)
    for event in story():
        lines.show(event)
    told = [line for line in text.getvalue().splitlines() if " epoch " in line and "main epoch" in line]
    assert len(told) == 97
    assert told[-1].endswith("epoch 100/100: loss 1.25 (nca 1, flat 0.25), 50% of the run, 1 min 05 s left")


def test_a_terminal_shows_the_same() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True, color_system=None)
    screen = Screen(console)
    events = story()
    for event in events:
        screen.show(event)
        if isinstance(event, ev.EpochEnded) and event.epoch == 50:
            with console.capture() as captured:
                console.print(screen.render())
            for part in (
                "podnet",
                " 25%",
                "1 min 05 s left",
                "task 1/2 main",
                "epoch 50/100",
                "loss 1.25",
                "flat 0.25",
            ):
                assert part in captured.get()
    with console.capture() as captured:
        console.print(screen.render())
    assert "accuracy 91.2 %" in captured.get()
    screen.close()
    assert "task 1/2 done: accuracy 91.23 %" in text.getvalue()
    assert follow(story(), console) == {"answer": 42}


def test_a_run_is_closed_when_it_is_stopped() -> None:
    closed = []

    def events() -> Iterator[ev.Event]:
        try:
            yield from story()
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        follow(events(), Console(file=io.StringIO()))
    assert closed == [True]


# The program ----------------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert incvec_("--version").stdout == f"incvec {incvec.__version__}\n"
    assert "incvec demo" in incvec_("--help").stdout
    text = incvec_("run", "--help").stdout
    assert "addons: [ivt]" in text
    for option in ("--oracle", "--set", "--no-share", "--data-root", "incvec run --method podnet --addon ivt"):
        assert option in text
    assert "`incvec list presets`" in text


@pytest.mark.parametrize("installed", [True, False])
def test_without_the_lab_it_says_how_to_install_it(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if installed:
            return "1.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delitem(sys.modules, "incvec.cli.main")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as exit_:
        incvec.__main__.main()
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "needs typer" in said
    wanted = re.search(r"pip install '(.+)\[lab\]'", said)
    assert wanted is not None
    if installed:
        assert wanted[1] == "incvec"
    else:  # no index has to know it: the tree it runs from
        assert (Path(wanted[1]) / "pyproject.toml").exists()


def test_the_module_runs_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    source = str(Path(incvec.__file__).parents[1])
    command = [sys.executable, "-m", "incvec", *PODNET, "--set", "podnet.base_epochs=1", "--set", "podnet.epochs=9999"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored by jobs in the background
    )
    assert process.stdout is not None
    try:
        seen = ""
        for line in process.stdout:
            seen += line
            if "task 2/4 main" in line:
                process.send_signal(signal.SIGINT)
                break
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "task 1/4 done" in seen, seen + errors
    assert process.returncode == 130
    assert errors.strip() == "stopped; run the same command again to go on"
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "run" / "record.json").exists()
