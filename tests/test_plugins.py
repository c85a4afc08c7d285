"""Methods, add-ons, data sets and presets of other packages: through entry points and from a single file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import incvec
from incvec.addons import ADDONS, find_addon
from incvec.contracts import AddOn
from incvec.data import Dataset
from incvec.engine.run import finish
from incvec.errors import ConfigError
from incvec.methods import METHODS, find_method
from incvec.methods.finetune import Finetune
from incvec.methods.lwf import LwF
from incvec.presets import resolve
from incvec.registry import DATASETS, PRESETS, Registry, load_plugin, register_addon, register_dataset, register_method
from tests.conftest import make_run, preset, quick

CLASSES = """
from pydantic import Field

from incvec.contracts import AddOn, Batch, Terms
from incvec.config import Options
from incvec.methods.finetune import Finetune, FinetuneOptions


class ScaledOptions(FinetuneOptions):
    factor: float = Field(2.0, gt=0)


class Scaled(Finetune):
    name = "scaled"
    summary = "fine-tuning with a scaled loss"
    paper = "(a test)"
    Options = ScaledOptions

    def loss(self, batch: Batch) -> Terms:
        return {name: self.options.factor * term for name, term in super().loss(batch).items()}


class CountingOptions(Options):
    pass


class Counting(AddOn):
    name = "counting"
    summary = "counts the tasks"
    paper = "(a test)"
    Options = CountingOptions

    def statistics(self) -> dict:
        return {"task": self.method.task.index}
"""
REGISTER = """
from incvec.registry import register_addon, register_dataset, register_method

register_method(Scaled, preset={"datasets": {"digits": {"net": "tiny", "epochs": 2, "batch_size": 64, "factor": 3.0}}})
register_addon(Counting)
"""
PRESET = "datasets:\n  few: {net: tiny, epochs: 2, batch_size: 64, factor: 3.0}\n"
IVT_PRESET = "hosts:\n  scaled: {interval: 1}\n"
ENTRY_POINTS = {
    "incvec.methods": 'scaled = "scaled_pkg.classes:Scaled"',
    "incvec.addons": 'counting = "scaled_pkg.classes:Counting"',
    "incvec.datasets": 'few = "scaled_pkg.data:FEW"',
    "incvec.presets": 'scaled_pkg = "scaled_pkg.presets"',
}
DATASET = """
from incvec.data import datasets

FEW = datasets.DATASETS["digits"]
"""


@pytest.fixture(autouse=True)
def restored_registries() -> Iterator[None]:
    """Whatever a test registers is removed afterwards."""
    registries: tuple[Registry[Any], ...] = (METHODS, ADDONS, DATASETS, PRESETS)
    before = [set(registry) for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry) - names:
            del registry[name]


def test_method_and_addon_of_a_plugin_file(few: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "my_method.py"
    file.write_text(CLASSES + REGISTER)
    load_plugin(file)
    load_plugin(file)  # a second time changes nothing
    assert preset("scaled", "digits")["factor"] == 3.0
    given = {**quick("scaled", "ivt", "counting"), "scaled": {}}
    record = finish(make_run(few, tmp_path / "run", given))
    assert record["config"]["scaled"]["net"] == "tiny"
    assert [row["counting"]["task"] for row in record["statistics"]] == [0, 1, 2]
    assert 0.5 <= record["statistics"][1]["ivt"]["all"]["scale"] <= 1
    plain = finish(make_run(few, tmp_path / "plain", quick("finetune", finetune={"epochs": 2, "batch_size": 64})))
    first, other = (r["losses"][0]["terms"]["ce"][0] for r in (record, plain))
    assert first > 2 * other


@pytest.mark.parametrize("how", ["dist-info", pytest.param("pip", marks=pytest.mark.slow)])
def test_installed_package(how: str, tmp_path: Path) -> None:
    """The entry points of a package that is installed in a folder on the path, in a process of its own."""
    source = tmp_path / "source"
    package, target = source / "scaled_pkg", tmp_path / "site"
    (package / "presets").mkdir(parents=True)
    for name, text in {
        "__init__.py": "", "classes.py": CLASSES, "data.py": DATASET,
        "presets/__init__.py": "", "presets/scaled.yaml": PRESET, "presets/ivt.yaml": IVT_PRESET,
    }.items():  # fmt: skip
        (package / name).write_text(text)
    if how == "pip":
        groups = "".join(f'[project.entry-points."{group}"]\n{line}\n' for group, line in ENTRY_POINTS.items())
        (source / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[project]\nname = "scaled-pkg"\nversion = "1.0"\n{groups}'
            '[tool.setuptools]\npackages = ["scaled_pkg", "scaled_pkg.presets"]\n'
            '[tool.setuptools.package-data]\n"scaled_pkg.presets" = ["*.yaml"]\n'
        )
        install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(target), str(source)]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    else:
        info = source / "scaled_pkg-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scaled-pkg\nVersion: 1.0\n")
        groups = "".join(f"[{group}]\n{line.replace(chr(34), '')}\n" for group, line in ENTRY_POINTS.items())
        (info / "entry_points.txt").write_text(groups)
        target = source
    paths = [str(target), str(Path(incvec.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = ["run", "--method", "scaled", "--addon", "ivt", "--addon", "counting", "--dataset", "few"]
    command += ["--set", "base_classes=4", "--tasks", "2"]
    subprocess.run(
        [sys.executable, "-m", "incvec", *command, "--out", str(tmp_path / "run")],
        check=True, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert (record["method"], record["dataset"]) == ("scaled", "few")
    assert record["config"]["scaled"]["factor"] == 3.0
    assert record["config"]["ivt"]["interval"] == 1  # the package's preset of a built-in add-on
    assert record["statistics"][2]["counting"] == {"task": 2}


def named(base: type, **attributes: Any) -> Any:
    return type("Mine", (base,), {"summary": "", "paper": "", "Options": Finetune.Options, **attributes})


def test_names_of_built_ins_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method name 'podnet' is built in: give your method another name"):
        register_method(named(Finetune, name="podnet"))
    with pytest.raises(ConfigError, match="add-on name 'ivt' is built in"):
        register_addon(named(AddOn, name="ivt"))
    with pytest.raises(ConfigError, match="data set name 'digits' is built in"):
        register_dataset("digits", "mine")
    register_dataset("mine", "one")
    with pytest.raises(ConfigError, match="data set name 'mine' is registered already"):
        register_dataset("mine", "other")
    register_method(named(Finetune, name="mine", __module__="one"))
    with pytest.raises(ConfigError, match="method name 'mine' is registered already"):
        register_method(named(Finetune, name="mine", __module__="other"))


def test_entry_point_with_the_name_of_a_built_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("podnet", "other:PODNet", "incvec.methods")
    monkeypatch.setattr("incvec.registry.installed_entry_points", lambda group: (point,))
    registry: Registry[str] = Registry("method", "incvec.methods", lambda point: point.value)
    registry.add_builtins({"podnet": "incvec.methods.podnet:PODNet"})
    with pytest.raises(ConfigError, match=r"entry point 'other:PODNet' of .*: the method name 'podnet' is built in"):
        list(registry)


def test_entry_points_are_imported_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_package:Broken", "incvec.methods")
    monkeypatch.setitem(METHODS, "broken", point.value)
    assert "broken" in METHODS
    with pytest.raises(ConfigError, match=r"method 'broken' cannot be imported from 'no_such_package:Broken'"):
        find_method("broken")


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (AddOn, "is not a method: expected a subclass of incvec.contracts.Method"),
        (named(Finetune), None),
        (type("Nameless", (AddOn,), {}), "is not a method"),
    ],
)
def test_classes_are_checked(cls: type, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="method name 'finetune' is built in"):  # inherited
            register_method(cls)
        return
    with pytest.raises(ConfigError, match=expected):
        register_method(cls)
    with pytest.raises(ConfigError, match="has no `name`: set it as a class attribute"):
        register_addon(type("Nameless", (AddOn,), {}))


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'podnett'. Did you mean 'podnet'\? Methods: bic, ewc"):
        find_method("podnett")
    with pytest.raises(ConfigError, match=r"unknown add-on 'itv'. Did you mean 'ivt'\? Add-ons: carry, cofima"):
        find_addon("itv")


class Importable(Finetune):
    name = "importable"


def test_preset_of_a_registered_method_is_used() -> None:
    register_method(Importable, preset={"datasets": {"digits": {"variants": {"long": {"epochs": 9}}}}})
    config = resolve({"method": "importable", "dataset": "digits", "variant": "long"})
    assert config.sections["importable"]["epochs"] == 9


def test_entry_and_class_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "other", "incvec.methods.finetune:Finetune")
    with pytest.raises(ConfigError, match=r"the method 'other' is a class with the name 'finetune'"):
        find_method("other")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("missing.py", None, "does not exist: give the path of a Python file"),
        (".", None, "is a folder: give the path of a Python file"),
        ("notes.txt", "", "has to end in .py"),
        ("broken.py", "x = (", "SyntaxError"),
        ("imports.py", "import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
    ],
)
def test_plugin_files_that_cannot_be_loaded(name: str, content: str | None, expected: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        load_plugin(file)


class Variation(LwF):
    name = "variation"


def test_variation_starts_with_the_preset_of_a_packaged_method() -> None:
    register_method(Variation, preset=str(files("incvec.presets") / "lwf.yaml"))
    options = [resolve({"method": name, "dataset": "digits"}).sections[name] for name in ("variation", "lwf")]
    assert options[0] == options[1]
    assert options[0]["net"] == "small"
