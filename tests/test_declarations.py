"""Components as their source declares them are the real ones, and what needs no torch does not import it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import incvec
from incvec.addons import ADDONS
from incvec.declarations import Names
from incvec.errors import ConfigError
from incvec.methods import METHODS
from incvec.nets import BACKBONES
from incvec.nets.dual import DUALS
from incvec.registry import find_class

FLAGS = ("name", "summary", "paper", "exemplars", "joint", "pretrained", "trains", "frozen_encoder")

# Runs commands in one process, in which torch and other large packages may not be imported.
COMMANDS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from incvec.__main__ import main

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "matplotlib", "sklearn", "torchvision"):
            raise AssertionError(f"{name} is imported by {sys.argv}")

sys.meta_path.insert(0, Forbidden())
results = []
for words in json.loads(sys.stdin.read()):
    sys.argv = ["incvec", *words]
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as exit_:
        results.append([exit_.code or 0, out.getvalue(), err.getvalue()])
import incvec, incvec.data
results.append([len(incvec.records(*sys.path[-1:])), "", ""])
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def declared() -> dict[str, Any]:
    """Every built-in component, read from its source although its module may be imported."""
    modules = {name: value for name, value in sys.modules.items() if name.partition(".")[0] in ("torch", "incvec")}
    light = ("config", "errors", "registry", "declarations", "lazy", "methods", "addons")
    for name in modules:
        if name != "incvec" and name.removeprefix("incvec.") not in light:
            del sys.modules[name]
    try:
        found = {}
        for address in [*METHODS.values(), *ADDONS.values()]:
            module, _, attribute = address.partition(":")
            cls = Names(module)[attribute]
            found[cls.name] = cls
        assert "torch" not in sys.modules
        return found
    finally:
        sys.modules.update(modules)


@pytest.mark.parametrize("name", [*METHODS, *ADDONS])
def test_declared_components_are_the_real_ones(name: str, declared: dict[str, Any]) -> None:
    real, read = find_class(METHODS if name in METHODS else ADDONS, name), declared[name]
    assert read is not real
    for flag in FLAGS:
        assert getattr(read, flag, None) == getattr(real, flag, None), flag
    assert read.Options.model_json_schema() == real.Options.model_json_schema()
    assert read.Options.model_config == real.Options.model_config
    validators = [
        sorted(each.__pydantic_decorators__.model_validators | each.__pydantic_decorators__.field_validators)
        for each in (read.Options, real.Options)
    ]
    assert validators[0] == validators[1]


def test_validators_of_declared_options_are_run(declared: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"unknown dual encoder 'foo'\. Available: clip, lite0-minilm"):
        declared["flyp"].Options(net="foo")
    assert declared["ivt"].incompatibility(declared["joint"], [])
    assert declared["ivt"].incompatibility(declared["podnet"], []) is None


def test_commands_without_training_do_not_import_torch(tmp_path: Path) -> None:
    """Help, lists, tables and errors in settings; in one fresh interpreter, where importing torch is an error."""
    record = {
        "method": "podnet", "addons": ["ivt"], "dataset": "digits", "tasks": 3, "oracle": False, "seed": 0,
        "accuracy": [[90.0], [60.0, 60.0]], "test_counts": [20, 10], "metrics": {"AA": 75.0, "LA": 60.0, "FM": 30.0},
        "config": {"method": "podnet", "addons": ["ivt"], "dataset": "digits", "podnet": {"lr": 0.5}, "ivt": {}},
    }  # fmt: skip
    (tmp_path / "record.json").write_text(json.dumps(record))
    podnet = ["run", "--method", "podnet"]
    commands: list[tuple[list[str], int, str]] = [
        (["--help"], 0, "incvec demo"),
        (["--version"], 0, incvec.__version__),
        (["list"], 0, "zeroshot"),
        *((["list", kind], 0, "") for kind in ("methods", "addons", "datasets", "presets", "nets", "sweeps")),
        (["list", "methods", "slca"], 0, "slca.tau"),
        (["list", "presets", "podnet-digits"], 0, "net: small"),
        (["show", str(tmp_path)], 0, "podnet + ivt"),
        (["show", str(tmp_path), "--csv"], 0, "podnet.lr=0.5"),
        (["run", "--help"], 0, "--base-classes"),
        (["sweep", "--help"], 0, "--at-once"),
        (["data", "--help"], 0, "Check, pack and copy data sets"),
        (["data", "pack", "--help"], 0, "tiny-imagenet"),
        (["data", "pack", "photos"], 2, "Missing argument 'DST'"),
        (["data", "pack", "photos", str(tmp_path), "--classes", "imagenet-subst"], 1, "Did you mean 'imagenet-subset'"),
        ([*podnet, "--addon", "ivt", "--dry-run"], 0, "preset ivt+podnet"),
        (["sweep", "digits", "--dry-run"], 0, "to do"),
        ([*podnet, "--epoch", "3"], 2, "No such option"),
        (["run", "--method", "podnt"], 1, "Did you mean 'podnet'?"),
        ([*podnet, "--addon", "itv"], 1, "Did you mean 'ivt'?"),
        ([*podnet, "--dataset", "cifar10"], 1, "Did you mean 'cifar100'?"),
        ([*podnet, "--set", "podnet.epocs=1"], 1, "Did you mean 'epochs'?"),
        ([*podnet, "--epochs", "0"], 1, "podnet.epochs = 0 is not possible"),
        ([*podnet, "--set", "podnet.net=tinny"], 1, "podnet.net: unknown backbone 'tinny'. Did you mean 'tiny'?"),
        ([*podnet, "--tasks", "100", "--dry-run"], 1, "cannot be cut into 100 equal tasks"),
        ([*podnet, "--set", "class_order=[0, 1, 2]", "--dry-run"], 1, "not a permutation of the 10 classes"),
        (["sweep", "digits", "--set", "task_sizes=[9, 2]", "--dry-run"], 1, "tasks of [9, 2] classes for 10 classes"),
        (["run", "--method", "flyp", "--set", "flyp.net=tinny"], 1, "Did you mean 'tiny'?"),
        (["run", "--method", "joint", "--addon", "ivt"], 1, "cannot be combined with joint"),
        (["sweep", "digitz"], 1, "Did you mean 'digits'?"),
        (["show", str(tmp_path / "absent")], 1, "does not exist"),
        (["study", "all", "--help"], 0, "--batchnorm"),
        (["study", "path", "--epoch", "3"], 2, "No such option"),
        (["study", "draw", str(tmp_path / "absent")], 1, "does not exist"),
        (["study", "mean", str(tmp_path / "record.json")], 1, "is not the data of a figure"),
        (["study", "gap", str(tmp_path)], 1, "lacks environment"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(incvec.__file__).parents[1]), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r})\n{COMMANDS}"],
        input=json.dumps([words for words, _, _ in commands]), env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *results, (records, _, _) = json.loads(done.stdout)
    for (words, code, text), (given, out, err) in zip(commands, results, strict=True):
        assert given == code, (words, out, err)
        assert text in out + err, words
    assert records == 1


def test_networks_are_read_without_torch(declared: dict[str, Any]) -> None:
    assert {name: plan.summary for name, plan in Names("incvec.nets.backbones")["BACKBONES"].items()} == {
        name: plan.summary for name, plan in BACKBONES.items()
    }
    assert Names("incvec.nets.dual")["DUALS"] == DUALS
