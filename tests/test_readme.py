"""What the documents show works: commands, Python examples, settings files."""

from __future__ import annotations

import ast
import io
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml
from PIL import Image
from torch import nn
from typer.testing import Result

from incvec.cli.main import app
from incvec.config import validate
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.run import finish
from incvec.methods import METHODS
from incvec.presets import resolve, run_name
from incvec.presets.given import parse_seeds
from incvec.registry import ADDONS as REGISTERED_ADDONS
from incvec.registry import METHODS as REGISTERED_METHODS
from incvec.registry import PRESETS
from tests.cli.conftest import invoke
from tests.conftest import make_run, quick, same_record, same_weights
from tests.documents import ROOT, Block, Command, blocks, commands

SHORT = {"net": "tiny", "epochs": 1, "memory": 2, "batch_size": 16}
ABLATIONS = ("ivt-uniform", "ivt-shuffled", "ivt-constant", "ivt-normalized")  # of tools/ivt_ablation.py
EXAMPLES = {  # the first two are built in docs/extending.md
    "tether": REGISTERED_METHODS,
    "halfway": REGISTERED_ADDONS,
    **dict.fromkeys(ABLATIONS, REGISTERED_ADDONS),
}

RECIPES = "docs/plugin-recipes.md"  # needs checkouts of its hosts: tests/ivt/test_recipes.py runs it
BLOCKS = [block for block in blocks() if block.document != RECIPES]
COMMANDS = [command for command in commands() if not command.place.startswith(RECIPES)]
INCVEC = [command for command in COMMANDS if command.words[0] == "incvec"]
RUNS = [command for command in INCVEC if command.words[1] == "run" and len(command.words) > 3]
SWEEPS = [command for command in INCVEC if command.words[1] == "sweep" and len(command.words) > 2]
LOCAL = ("~/pictures", "aircraft20.npz")  # data that the `desk` has


def parse(words: tuple[str, ...]) -> dict[str, Any]:
    """The parameters of a command line, by its own parser; a wrong option raises."""
    command: Any = typer.main.get_command(app)
    name, rest = "incvec", list(words[1:])
    while hasattr(command, "commands"):
        assert rest, f"{' '.join(words)} lacks a command"
        if rest[0].startswith("--"):  # `incvec --help`
            return dict(command.make_context(name, rest, resilient_parsing=True).params)
        inner = command.load(rest[0]) if hasattr(command, "load") else command.commands.get(rest[0])
        assert inner is not None, f"{name} has no command {rest[0]!r}"
        assert not inner.hidden, f"{name} {rest[0]} is an old name"
        name, command, rest = rest[0], inner, rest[1:]
    mentioned = not rest or "--help" in rest  # such as `incvec report` in a sentence
    return dict(command.make_context(name, rest, resilient_parsing=mentioned).params)


def files_shown(language: str) -> dict[str, str]:
    return {block.file: block.text for block in BLOCKS if block.language == language and block.file is not None}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that the documents show, and a home folder with some images."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 3), ("test", 1)):
        for name in ("cat", "crow", "dog", "fish", "hen", "owl", "pig", "toad"):
            folder = tmp_path / "home" / "pictures" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    here = tmp_path / "here"
    here.mkdir()
    for name, text in {**files_shown("yaml"), **files_shown("python")}.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    write_aircraft(here / "aircraft20.npz")
    (here / "tools").symlink_to(ROOT / "tools")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("INCVEC_DATA", raising=False)
    yield here
    forget_examples()


def write_aircraft(path: Path) -> None:
    """Two variants with one training and one test image each, encoded."""
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "PNG")
    image = np.frombuffer(buffer.getvalue(), np.uint8)
    parts = {"label": [0, 1, 0, 1], "is_test": [False, False, True, True], "class_names": ["707-320", "MD-80"]}
    np.savez(path, png=np.tile(image, 4), offsets=len(image) * np.arange(5), **parts)


def forget_examples() -> None:
    for name, registry in EXAMPLES.items():
        for table in (registry, PRESETS):
            if name in table:
                del table[name]
    for name in [name for name in sys.modules if name.startswith("incvec_plugin_")]:
        del sys.modules[name]


def run_shortened(command: Command) -> Result:
    """The command as it is, but without download, and with settings for a run of a second."""
    given = parse(command.words)
    method = given["method"] or yaml.safe_load(given["config"].read_text())["method"]
    settings = [word for key, value in SHORT.items() for word in ("--set", f"{method}.{key}={value}")]
    return invoke(*(word for word in command.words[1:] if word != "--download"), *settings, "--device", "cpu")


# Commands ---------------------------------------------------------------------------------------------------


def test_documents_show_commands() -> None:
    assert {command.words[1] for command in INCVEC} >= {"run", "show", "list", "demo", "data", "sweep", "study"}
    assert len(RUNS) >= 10


@pytest.mark.parametrize("command", INCVEC, ids=str)
def test_command_line_is_valid(command: Command, desk: Path) -> None:
    parse(command.words)


@pytest.mark.parametrize("command", RUNS, ids=str)
def test_run_works(command: Command, desk: Path) -> None:
    """From settings to the table. A run on data that is not here names what is missing."""
    done = run_shortened(command)
    if parse(command.words)["dataset"] not in ("digits", "folder", None):
        assert done.exit_code == 1
        assert re.search(r"missing|does not exist|not found", done.output), done.output
        return
    assert done.exit_code == 0, done.output
    given = parse(command.words)
    seeds = [None] if given["seeds"] is None else parse_seeds(given["seeds"])
    assert len(list((desk / "runs").glob("*/record.json"))) == (0 if given["dry_run"] else len(seeds))
    again = run_shortened(command)
    assert again.exit_code == 0
    assert given["dry_run"] or "already finished" in again.output


@pytest.mark.parametrize("command", SWEEPS, ids=str)
def test_sweep_is_planned(command: Command, desk: Path) -> None:
    done = invoke(*(word for word in command.words[1:] if word != "--dry-run"), "--dry-run")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "command",
    [c for c in INCVEC if c.words[1] == "list" or (c.words[1] == "data" and set(LOCAL) & set(c.words))],
    ids=str,
)
def test_query_is_answered(command: Command, desk: Path) -> None:
    done = invoke(*command.words[1:])
    assert done.exit_code == 0, done.output
    assert done.output.strip()


def test_show_prints_records(desk: Path) -> None:
    command = next(command for command in RUNS if parse(command.words)["dataset"] == "digits")
    assert run_shortened(command).exit_code == 0
    for shown in (command for command in INCVEC if command.words[1:] == ("show", "runs")):
        done = invoke(*shown.words[1:])
        assert done.exit_code == 0, done.output
        assert "podnet" in done.output


def test_run_folder_has_the_documented_name() -> None:
    config = resolve({"method": "podnet", "addons": ["ivt"], "dataset": "cifar100", "tasks": 5})
    assert f"`runs/{run_name(config)}`" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_demo_makes_its_picture(desk: Path) -> None:
    done = invoke("demo")
    assert done.exit_code == 0, done.output
    assert (desk / "runs" / "demo" / "demo.png").stat().st_size > 10_000
    assert "podnet + ivt" in " ".join(done.output.split()).lower()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[0] != "incvec"], ids=str)
def test_other_command_names_what_exists(command: Command) -> None:
    program, *words = command.words
    if program == "make":
        assert set(words) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[0] == "install"
        assert {name for group in re.findall(r"\[(.*?)\]", " ".join(words)) for name in group.split(",")} <= set(extras)
    elif program == "torchrun":
        place = words.index("-m")
        assert parse(tuple(words[place + 1 :]))["method"] in METHODS
    elif program == "python" and words[0] == "-m":
        assert words[1] in ("pytest", "incvec.study.catalog", "incvec.study.reproduced")
    elif program == "python":
        source = (ROOT / words[0]).read_text()
        assert all(f'"{option}"' in source for option in words if option.startswith("--"))
    elif program != "pre-commit":
        pytest.fail(f"extend this test for the command {program!r}")


# The plug-in ------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """Four inputs, and a classifier that grows in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(x).tanh())
        return scores


def add_classes(model: Toy, task: types.SimpleNamespace) -> None:
    old = model.head
    if task.classes > old.out_features:
        model.head = nn.Linear(8, task.classes)
        with torch.no_grad():
            model.head.weight[: old.out_features] = old.weight
            model.head.bias[: old.out_features] = old.bias


def toy_tasks() -> list[types.SimpleNamespace]:
    generator = torch.Generator().manual_seed(0)

    def loader(first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        batches = []
        for _ in range(3):
            labels = torch.randint(first, first + 2, (16,), generator=generator)
            batches.append((torch.randn(16, 4, generator=generator) + labels[:, None], labels))
        return batches

    return [types.SimpleNamespace(classes=2 * t + 2, loader=loader(2 * t)) for t in range(3)]


def run_plugin(source: str, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": Toy(), "tasks": toy_tasks(), "add_classes": add_classes, "epochs": epochs}
    exec(compile(source, "README.md", "exec"), names)
    return names


LOOPS = [
    block
    for block in BLOCKS
    if block.language == "python" and "ivt.begin_task" in block.text and "ivt.adapters" not in block.text
]


@pytest.mark.parametrize("block", LOOPS, ids=lambda block: block.document)
def test_plugin_example_teleports(block: Block) -> None:
    names = run_plugin(block.text, epochs=20)
    ivt, model = names["ivt"], names["model"]
    assert (ivt.task, ivt.epoch) == (3, 20)
    assert set(ivt.cumulative) == {name for name, _ in model.named_parameters()}
    assert ivt.cumulative["head.weight"].shape == (6, 8)
    scales = [row["scale"] for row in ivt.report()]
    assert all(0.5 <= scale <= 1 for scale in scales)
    assert min(scales) < 1


@pytest.mark.parametrize("block", LOOPS, ids=lambda block: block.document)
def test_plugin_example_adds_four_lines_to_plain_training(block: Block) -> None:
    """Without the four lines, training is the same until the first teleport."""
    lines = block.text.splitlines()
    plain = [line for line in lines if not re.match(r"\s*ivt\b", line)]
    assert len(plain) == len(lines) - 4
    for epochs, equal in ((10, True), (11, False)):
        one = run_plugin(block.text, epochs)["model"]
        other = run_plugin("\n".join(plain), epochs)["model"]
        assert torch.equal(one.body.weight, other.body.weight) == equal


@pytest.mark.parametrize(
    "block",
    # Adapters need their hosts: tests/ivt/adapters/test_page.py runs these blocks.
    [b for b in BLOCKS if b.language == "python" and "ivt.adapters" not in b.text],
    ids=lambda block: f"{block.document}:{block.line}",
)
def test_python_imports_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module not in EXAMPLES:
            module = __import__(str(node.module), fromlist=["_"])
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


# docs/extending.md ------------------------------------------------------------------------------------------


@pytest.fixture
def examples(desk: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """The files of docs/extending.md as modules; the method and the add-on are registered."""
    monkeypatch.syspath_prepend(desk)
    modules = {}
    for name in ("tether", "test_tether", "halfway"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        modules[name] = __import__(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
    return modules


def test_example_test_passes(examples: dict[str, types.ModuleType]) -> None:
    examples["test_tether"].test_only_old_samples_count()


def test_example_preset_is_valid_and_the_same_in_both_forms(examples: dict[str, types.ModuleType]) -> None:
    preset = yaml.safe_load(files_shown("yaml")["tether.yaml"])
    assert preset["datasets"] == {"cifar100": {}, "digits": examples["tether"].DIGITS}
    for values in preset["datasets"].values():
        validate(examples["tether"].TetherOptions, values)


@pytest.mark.parametrize("addons", [(), ("ivt",), ("halfway",), ("ivt", "halfway")], ids="+".join)
def test_examples_resume_exactly(
    addons: tuple[str, ...], examples: dict[str, types.ModuleType], few: Dataset, tmp_path: Path
) -> None:
    given = quick("tether", *addons)
    record = finish(make_run(few, tmp_path / "whole", given))
    assert {term for row in record["losses"] for term in row["terms"]} >= {"ce", "tether"}
    resumed: dict[str, Any] = {}
    for _ in range(100):
        for event in make_run(few, tmp_path / "stopped", given, save_interval=0).events():
            if isinstance(event, ev.Finished):
                resumed = event.record
            elif isinstance(event, ev.Saved):
                break  # the next run continues from this checkpoint
        if resumed:
            break
    same_record(resumed, record)
    last = "snapshots/task-02.safetensors"
    same_weights(tmp_path / "whole" / last, tmp_path / "stopped" / last)
