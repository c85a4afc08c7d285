"""`--plugin FILE`: a method from a single file, in `run`, `sweep` and `list`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from incvec.registry import METHODS, PRESETS
from tests.cli.conftest import invoke, message

PLUGIN = """
from functools import partial

from incvec.methods.finetune import Finetune
from incvec.registry import register_method

PRESET = {"datasets": {"digits": {"net": "tiny", "epochs": 1, "batch_size": 64}}}


@partial(register_method, preset=PRESET)
class Smooth(Finetune):
    name = "smooth"
    summary = "fine-tuning, renamed"
    paper = "(a test)"
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    """A plug-in file; its method is unregistered afterwards."""
    file = tmp_path / "smooth.py"
    file.write_text(PLUGIN)
    yield file
    for registry in (METHODS, PRESETS):
        registry.pop("smooth", None)


def test_run_with_a_method_from_a_plugin(plugin: Path, tmp_path: Path) -> None:
    command = ["run", "--method", "smooth", "--addon", "ivt", "--set", "stop_after=2", "--out", tmp_path / "run"]
    assert "unknown method 'smooth'" in message(invoke(*command))
    result = invoke(*command, "--plugin", plugin)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["method"], record["addons"]) == ("smooth", ["ivt"])
    assert record["config"]["smooth"]["net"] == "tiny"
    assert "already finished" in invoke(*command, "--plugin", plugin).stdout


def test_sweep_over_a_method_from_a_plugin(plugin: Path, tmp_path: Path) -> None:
    file = tmp_path / "my_sweep.yaml"
    file.write_text("runs: [{method: [finetune, smooth], stop_after: 1}]")
    result = invoke("sweep", file, "--plugin", plugin, "--out", tmp_path / "out", "--set", "smooth.lr=0.05")
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "out").glob("digits-smooth-*/record.json"))) == 1


def test_list_names_the_methods_of_a_plugin(plugin: Path) -> None:
    assert "fine-tuning, renamed" in invoke("list", "methods", "--plugin", plugin).stdout


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("absent.py", None, "does not exist"),
        ("broken.py", "import nothing_of_that_name", "cannot be loaded: ModuleNotFoundError"),
        ("notes.txt", "text", "has to end in .py"),
    ],
)
def test_invalid_plugin_is_refused(name: str, content: str | None, expected: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    result = invoke("list", "--plugin", tmp_path / name)
    assert result.exit_code == 1
    assert expected in message(result)
