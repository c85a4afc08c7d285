"""Help, version, error messages and exit codes of the program."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import incvec
import incvec.__main__
from incvec.cli.main import COMMANDS, app
from tests.cli.conftest import PODNET, invoke, message


def test_version() -> None:
    assert invoke("--version").stdout == f"incvec {incvec.__version__}\n"


def test_help_names_every_command_and_the_demo() -> None:
    text = invoke("--help").stdout
    for name in ("demo", "run", "sweep", "show", "study", "report", "list", "data"):
        assert re.search(rf"│ {name}\b", text), name
    assert "incvec demo" in text


def test_help_of_run_describes_options_files_and_examples() -> None:
    text = invoke("run", "--help").stdout
    for part in (
        "--oracle", "--set", "--no-share", "--data-root", "--plugin", "addons: [ivt]", "`incvec list presets`",
        "incvec run --method podnet --addon ivt",
    ):  # fmt: skip
        assert part in text


def test_help_texts_are_wrapped_by_the_terminal() -> None:
    for columns in (80, 200):
        lines = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["run", "--help"]).stdout.splitlines()
        first = next(number for number, line in enumerate(lines) if "Settings that are not given" in line)
        assert columns - 20 < len(lines[first].rstrip()) <= columns
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"]).stdout.splitlines()
    assert " oracle, and study the results." in map(str.rstrip, lines)


def test_summaries_of_commands_are_those_of_their_help() -> None:
    """Commands are imported when they are used, so `incvec --help` has their summaries from a table."""
    group: Any = get_command(app)
    for name, command in COMMANDS.items():
        assert group.load(name).help.split("\n\n")[0] == command.summary, name
    assert group.load("runs") is None


@pytest.mark.parametrize(
    ("words", "expected", "absent"),
    [
        ("incvec s", {"sweep", "show", "study"}, "run"),
        ("incvec run --method po", {"podnet"}, "icarl"),
        ("incvec run --method podnet --addon ", {"ivt", "eopc"}, "podnet"),
        ("incvec run --dataset fo", {"folder"}, "digits"),
        ("incvec run --ba", {"--batch-size", "--base-classes"}, "--method"),
        ("incvec sweep dig", {"digits"}, "memory"),
        ("incvec list presets ivt-dig", {"ivt-digits"}, "ivt-cifar100"),
    ],
)
def test_shell_completion(words: str, expected: set[str], absent: str) -> None:
    environment = {"_INCVEC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner(env=environment).invoke(app, [], prog_name="incvec")
    found = set(result.stdout.split())
    assert expected <= found
    assert absent not in found


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ([*PODNET, "--out", "file"], "a run"),
        ([*PODNET, "--out", "file/run"], "a run"),
        (["sweep", "digits", "--dry-run", "--out", "file"], "a sweep"),
        (["demo", "--out", "file"], "the demo"),
        ([*PODNET, "--bases", "file"], "a shared base task"),
    ],
)
def test_output_folder_must_not_be_a_file(
    command: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    result = invoke(*command)
    assert result.exit_code == 1
    option = "--bases" if "--bases" in command else "--out"
    assert f"file is a file; {what} needs a folder. Give another one with {option}." in message(result)


@pytest.mark.parametrize("installed", [True, False])
def test_missing_package_names_the_install_command(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if installed:
            return "1.0"
        raise metadata.PackageNotFoundError(name)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delitem(sys.modules, "incvec.cli.main")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as exit_:
        incvec.__main__.main()
    signal.signal(signal.SIGINT, handler)
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert "needs typer" in printed
    command = re.search(r"pip install '(.+)\[lab\]'", printed)
    assert command is not None
    if installed:
        assert command[1] == "incvec"
    else:  # not on an index: the source tree
        assert (Path(command[1]) / "pyproject.toml").exists()


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_without_spinning_unless_the_user_wants_it(given: str | None, expected: str) -> None:
    code = "import atexit, os, sys; sys.argv = ['incvec', 'list']; from incvec.__main__ import main\n"
    code += "atexit.register(lambda: print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])); main()"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"PYTHONPATH": str(Path(incvec.__file__).parents[1])} | (
        {} if given is None else {"OMP_WAIT_POLICY": given}
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"False {expected}"


def test_module_stops_on_ctrl_c_with_a_checkpoint(tmp_path: Path) -> None:
    source = str(Path(incvec.__file__).parents[1])
    command = [sys.executable, "-m", "incvec", *PODNET, "--set", "podnet.base_epochs=1", "--set", "podnet.epochs=9999"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore the signal
    )
    assert process.stdout is not None
    try:
        output = ""
        for line in process.stdout:
            output += line
            if "task 2/4 main epoch" in line:  # not in an import of the first epoch, where a signal ends it at once
                process.send_signal(signal.SIGINT)
                break
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "task 1/4 finished" in output, output + errors
    assert process.returncode == 130
    assert errors.strip() == "Interrupted. Run the same command again to resume."
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    assert not (tmp_path / "run" / "record.json").exists()


def exit_code(work: Callable[[], object]) -> int:
    """The exit code of a forked process that does this work."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_second_ctrl_c_ends_the_process_at_once() -> None:
    def work() -> None:
        signal.signal(signal.SIGINT, incvec.__main__.interrupt)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)

    assert exit_code(work) == 130


def test_ctrl_c_within_an_import_ends_the_process_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library may swallow the exception, or turn it into an ImportError."""
    (tmp_path / "interrupted.py").write_text(
        "from signal import *\ntry:\n    raise_signal(SIGINT)\nexcept KeyboardInterrupt:\n    raise ImportError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def work() -> None:
        signal.signal(signal.SIGINT, incvec.__main__.interrupt)
        importlib.import_module("interrupted")

    assert exit_code(work) == 130


def test_internal_error_keeps_its_traceback_and_says_where_to_report_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("incvec.engine.launch.launch", fail)
    result = invoke(*PODNET, "--out", tmp_path / "run")
    assert isinstance(result.exception, KeyError)
    assert "please open an issue" in "".join(traceback.format_exception(result.exception))


def test_misspelled_command_suggests_the_nearest() -> None:
    result = invoke("sweeep", "digits")
    assert result.exit_code == 2
    assert "No such command 'sweeep'. Did you mean 'sweep'?" in result.output


def test_usage_error_is_not_a_bug() -> None:
    result = invoke("run", "--no-such-option")
    assert result.exit_code == 2
    assert "please open an issue" not in result.output


def test_name_that_is_not_text_is_printed(tmp_path: Path) -> None:
    result = invoke("show", tmp_path / "caf\udce9")
    assert result.exit_code == 1
    assert "caf\\udce9 does not exist" in message(result)
