"""What the documents show is run: commands, Python, settings files; and what they point at exists."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from incvec.addons import ADDONS
from incvec.cli.main import app
from incvec.config import validate
from incvec.data import DATASETS, Dataset
from incvec.engine import events as ev
from incvec.engine.run import Run, finish
from incvec.errors import DataError
from incvec.methods import METHODS
from incvec.presets import resolve
from incvec.study import catalog as catalog
from tests.conftest import make_run, quick, same_record, same_weights
from tests.data.test_aircraft_copy import shard

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = {"net": "tiny", "epochs": 1, "memory": 2, "batch_size": 16}
EXAMPLE = "tether"  # the method that docs/adding-a-method.md builds; in no registry


@dataclass(frozen=True)
class Fence:
    """A code block of a document."""

    document: str
    line: int
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block's first line says it is."""
        found = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return found.group(1) if found else None


def fences() -> Iterator[Fence]:
    for document in DOCUMENTS:
        text = document.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 2
            yield Fence(str(document.relative_to(ROOT)), line, match.group(1), match.group(2))


FENCES = list(fences())


def test_the_adapters_are_where_the_readme_says() -> None:
    named = re.findall(r"`(incvec\.ivt\.adapters[\w.]*)`", (ROOT / "README.md").read_text())
    assert named
    for name in named:
        assert "class IVTCallback" in (ROOT / "src" / f"{name.replace('.', '/')}.py").read_text()


@dataclass(frozen=True)
class Shown:
    """A command line, and where it stands."""

    place: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place} {' '.join(self.words)}"


def command_lines() -> Iterator[Shown]:
    for fence in FENCES:
        if fence.language in ("bash", "sh", "console"):
            for number, line in enumerate(fence.text.replace("\\\n", " ").splitlines()):
                if words := shlex.split(line.removeprefix("$ "), comments=True):
                    yield Shown(f"{fence.document}:{fence.line + number}", tuple(words))


def spoken_commands() -> Iterator[Shown]:
    """Commands inside a sentence, such as `incvec list`."""
    for document in DOCUMENTS:
        plain = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        for found in re.findall(r"`(incvec [^`]+)`", plain):
            yield Shown(str(document.relative_to(ROOT)), tuple(shlex.split(found)))


COMMANDS = list(command_lines())
OURS = [shown for shown in [*COMMANDS, *spoken_commands()] if shown.words[0] == "incvec"]
RUNS = [shown for shown in OURS if shown.words[1] == "run" and len(shown.words) > 2]


def parsed(words: tuple[str, ...]) -> dict[str, Any]:
    """The parameters of a command line, by the command line's own parser; a wrong option raises."""
    command: Any = typer.main.get_command(app)
    name, rest = "incvec", list(words[1:])
    while hasattr(command, "commands"):
        assert rest, f"{' '.join(words)} stops short of a command"
        assert rest[0] in command.commands, f"there is no command {rest[0]!r} in {name}"
        name, command = rest[0], command.commands[rest[0]]
        rest = rest[1:]
    params: dict[str, Any] = command.make_context(name, rest).params
    return params


def settings_files() -> dict[str, str]:
    return {fence.file: fence.text for fence in FENCES if fence.language == "yaml" and fence.file is not None}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with the settings files the documents show, and a home with some pictures."""
    home = tmp_path / "home"
    generator = np.random.default_rng(0)
    for part, count in (("train", 3), ("test", 1)):
        for name in ("cat", "crow", "dog", "fish", "hen", "owl", "pig", "toad"):
            folder = home / "pictures" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    here = tmp_path / "here"
    here.mkdir()
    for name, text in settings_files().items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    shard(here / "aircraft20.npz")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("INCVEC_DATA", raising=False)
    return here


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def shortened(shown: Shown) -> list[str]:
    """The command with settings for a run of a second, none of what it says left out but the download."""
    given = parsed(shown.words)
    method = given["method"] or yaml.safe_load(given["config"].read_text())["method"]
    words = [word for word in shown.words[1:] if word != "--download"]
    for key, value in SHORT.items():
        words += ["--set", f"{method}.{key}={value}"]
    return [*words, "--device", "cpu"]


# Commands -------------------------------------------------------------------------------------------------


def test_there_is_something_to_test() -> None:
    assert {shown.words[1] for shown in OURS} >= {"run", "show", "list", "demo", "data"}
    assert len(RUNS) >= 5


@pytest.mark.parametrize("shown", OURS, ids=str)
def test_the_command_line_understands(shown: Shown, desk: Path) -> None:
    parsed(shown.words)
    path = [word for word in shown.words[1:3] if word.isalpha()]
    assert invoke(*(path if path[0] == "data" else path[:1]), "--help").exit_code == 0


@pytest.mark.parametrize("shown", [shown for shown in RUNS if EXAMPLE not in shown.words], ids=str)
def test_a_run_runs(shown: Shown, desk: Path) -> None:
    """From its settings to its table; what needs a large download gets as far as asking for it."""
    done = invoke(*shortened(shown))
    if parsed(shown.words)["dataset"] == "cifar100":
        assert done.exit_code == 1
        assert "cifar-100-python" in done.output
        assert "missing" in done.output
        return
    assert done.exit_code == 0, done.output
    assert len(list((desk / "runs").glob("*/record.json"))) == 1
    again = invoke(*shortened(shown))
    assert again.exit_code == 0
    assert "already finished" in again.output


@pytest.mark.parametrize("shown", [s for s in OURS if s.words[1] in ("list", "data")], ids=str)
def test_a_question_is_answered(shown: Shown, desk: Path) -> None:
    done = invoke(*shown.words[1:])
    assert done.exit_code == 0, done.output
    assert done.output.strip()


@pytest.mark.parametrize("shown", [s for s in OURS if s.words[1] == "show"], ids=str)
def test_records_are_shown(shown: Shown, desk: Path) -> None:
    run = next(run for run in RUNS if parsed(run.words)["dataset"] == "digits" and EXAMPLE not in run.words)
    assert invoke(*shortened(run)).exit_code == 0
    done = invoke(*shown.words[1:])
    assert done.exit_code == 0, done.output
    assert "podnet" in done.output


def test_the_run_folder_has_the_name_the_readme_says() -> None:
    from incvec.presets import run_name

    text = (ROOT / "README.md").read_text()
    config = resolve({"method": "podnet", "addons": ["ivt"], "dataset": "cifar100", "tasks": 5})
    assert f"`runs/{run_name(config)}`" in text


@pytest.mark.slow
def test_the_demo_as_the_readme_shows_it(desk: Path) -> None:
    done = invoke("demo")
    assert done.exit_code == 0, done.output
    assert (desk / "runs" / "demo" / "demo.png").stat().st_size > 10_000
    assert "podnet + ivt" in " ".join(done.output.split())


@pytest.mark.parametrize("shown", [s for s in COMMANDS if s.words[0] != "incvec"], ids=str)
def test_other_commands_name_what_exists(shown: Shown) -> None:
    program, *words = shown.words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words) <= set(targets)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[0] == "install"
        assert set(re.findall(r"\[(.*?)\]", " ".join(words))) <= set(extras)
    elif program == "torchrun":
        place = words.index("-m")
        assert words[place + 1] == "incvec"
        assert parsed(tuple(words[place + 1 :]))["method"] in METHODS
    elif program == "python" and words[0] == "-m":
        assert words[1] in ("pytest", "incvec", "incvec.study.catalog", "incvec.study.reproduced")
    elif program == "python":
        source = (ROOT / words[0]).read_text()
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in source
    else:
        pytest.fail(f"no test knows the command {program!r}; teach this one")


# Python ---------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """Four numbers in; a classifier that grows in place."""

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


def run_plug_in(source: str, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": Toy(), "tasks": toy_tasks(), "add_classes": add_classes, "epochs": epochs}
    exec(compile(source, "README.md", "exec"), names)
    return names


def readme_python() -> str:
    blocks = [fence.text for fence in FENCES if fence.document == "README.md" and fence.language == "python"]
    assert len(blocks) == 1
    return blocks[0]


def test_the_plug_in_example_works() -> None:
    names = run_plug_in(readme_python(), epochs=20)
    ivt, model = names["ivt"], names["model"]
    assert ivt.task == 3
    assert ivt.epoch == 20
    assert set(ivt.cumulative) == {name for name, _ in model.named_parameters()}
    assert ivt.cumulative["head.weight"].shape == (6, 8)
    rows = ivt.report()
    assert rows
    assert all(0.5 <= row["scale"] <= 1 for row in rows)
    assert any(row["scale"] < 1 for row in rows)


def test_the_plug_in_example_without_its_four_lines_is_plain_training() -> None:
    """The four lines that speak of `ivt` are all there is to it, and until the first move they change nothing."""
    source = readme_python()
    lines = source.splitlines()
    kept = [line for line in lines if not re.match(r"\s*ivt\b", line)]
    assert len(kept) == len(lines) - 4
    plain = "\n".join(kept)
    for epochs, same in ((9, True), (10, False)):
        one, other = run_plug_in(source, epochs)["model"], run_plug_in(plain, epochs)["model"]
        assert torch.equal(one.body.weight, other.body.weight) == same


@pytest.mark.parametrize("fence", [f for f in FENCES if f.language == "python"], ids=lambda f: f"{f.document}:{f.line}")
def test_python_parses_and_imports_what_exists(fence: Fence) -> None:
    for node in ast.walk(ast.parse(fence.text)):
        if isinstance(node, ast.ImportFrom) and node.module != f"incvec.methods.{EXAMPLE}":
            module = __import__(str(node.module), fromlist=["_"])
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """The files that docs/adding-a-method.md shows, as modules, the method and the add-on registered."""
    found = {}
    for fence in FENCES:
        if fence.language != "python" or fence.file is None:
            continue
        name = Path(fence.file).stem
        module = types.ModuleType(f"example_{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if name == EXAMPLE:
            monkeypatch.setitem(sys.modules, f"incvec.methods.{EXAMPLE}", module)
        exec(compile(fence.text, fence.file, "exec"), module.__dict__)
        found[name] = module
    assert set(found) == {"tether", "test_tether", "halfway"}
    monkeypatch.setitem(METHODS, "tether", "example_tether:Tether")
    monkeypatch.setitem(ADDONS, "halfway", "example_halfway:Halfway")
    return found


def test_the_example_methods_own_test_passes(example: dict[str, types.ModuleType]) -> None:
    tests = [value for name, value in vars(example["test_tether"]).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_example_preset_is_valid(example: dict[str, types.ModuleType]) -> None:
    presets = yaml.safe_load(settings_files()["src/incvec/presets/tether.yaml"])
    assert set(presets) == {"cifar100", "digits"}
    for values in presets.values():
        validate(example["tether"].TetherOptions, values)


def test_the_example_run_is_understood(example: dict[str, types.ModuleType], desk: Path) -> None:
    shown = next(shown for shown in RUNS if EXAMPLE in shown.words)
    done = invoke(*shortened(shown))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("addons", [(), ("ivt",), ("halfway",), ("ivt", "halfway")], ids="+".join)
def test_the_examples_survive_being_broken_off(
    addons: tuple[str, ...],
    example: dict[str, types.ModuleType],
    few: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Run, "_save_due", lambda self: True)
    given = quick("tether", *addons)
    whole = make_run(few, tmp_path / "whole", given)
    record = finish(whole)
    assert {term for row in record["losses"] for term in row["terms"]} >= {"ce", "tether"}
    broken: dict[str, Any] = {}
    for _ in range(100):
        for number, event in enumerate(make_run(few, tmp_path / "broken", given).events()):
            if isinstance(event, ev.Finished):
                broken = event.record
            elif number == 3:
                break
        if broken:
            break
    same_record(broken, record)
    last = "snapshots/task-02.safetensors"
    same_weights(tmp_path / "whole" / last, tmp_path / "broken" / last)


# What exists ----------------------------------------------------------------------------------------------


def test_the_list_of_methods_is_up_to_date() -> None:
    wanted = catalog.catalog(ROOT / "results")
    assert (ROOT / "docs" / "methods.md").read_text() == wanted, (
        "docs/methods.md is stale: python -m incvec.study.catalog > docs/methods.md"
    )


def test_the_readmes_tables_are_up_to_date() -> None:
    text = (ROOT / "README.md").read_text()
    assert text == catalog.renewed(text, ROOT / "results"), (
        "the README's tables are stale: python -m incvec.study.catalog --readme README.md"
    )
    table = text.partition(catalog.BEGIN)[2].partition(catalog.END)[0]
    for row, known in (("methods", METHODS), ("add-ons", ADDONS), ("data sets", DATASETS)):
        line = next(line for line in table.splitlines() if line.startswith(f"| {row} |"))
        assert set(re.findall(r"`(.+?)`", line)) == set(known)


def test_the_catalogue_is_a_program_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "incvec.study.catalog", "--results", "nowhere"],
        capture_output=True, text=True, check=True, cwd=ROOT / "src",
    )  # fmt: skip
    assert done.stdout == catalog.catalog(None)


def test_a_result_is_pending_until_a_record_shows_otherwise(tmp_path: Path) -> None:
    def results_of(name: str) -> str:
        line = next(line for line in catalog.catalog(tmp_path).splitlines() if line.startswith(f"| `{name}` |"))
        return line.rstrip("| ").rpartition(" | ")[2]

    def leave(folder: str, accuracy: float, given: dict[str, Any], **changes: Any) -> None:
        config = resolve({"method": "podnet", "dataset": "cifar100", **given})
        record = {
            "method": config.method, "addons": config.addons, "dataset": config.dataset, "tasks": config.tasks,
            "oracle": False, "seed": config.seed, "accuracy": [[accuracy]], "test_counts": [10],
            "metrics": {"AA": accuracy, "LA": accuracy, "FM": 10.0}, "config": config.resolved(), **changes,
        }  # fmt: skip
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "record.json").write_text(json.dumps(record))

    leave("oracle", 70.0, {}, oracle=True)
    assert results_of("podnet") == results_of("ivt") == "pending"
    leave("ivt", 60.0, {"addons": ["ivt"], "tasks": 25})
    assert results_of("podnet") == "pending"
    assert results_of("ivt") == "cifar100, 25 tasks, podnet + ivt: not reached (AA 60.00, paper 61.74)"
    leave("five", 62.6, {"tasks": 5})
    leave("ten", 60.9, {"tasks": 10})
    leave("other", 90.0, {"tasks": 25, "podnet": {"lr": 0.2}})
    leave("digits", 90.0, {"dataset": "digits"})
    assert results_of("podnet").split("; ") == [
        "cifar100, 5 tasks: reproduced (AA 62.60, paper 64.00)",
        "cifar100, 10 tasks: not reached (AA 60.90, paper 62.47)",
        "cifar100, 25 tasks: run with other settings",
        "digits, 3 tasks: run, without a number in the paper",
    ]
    leave("small", 50.0, {"method": "flyp", "variant": "lite", "tasks": 10})
    assert results_of("flyp") == "cifar100, 10 tasks: run with lite0-minilm, not the paper's model"
    assert results_of("finetune") == "pending"


def test_cells_and_markers() -> None:
    assert catalog.linked("A, B and C, https://d.org/e,f") == "[A, B and C](https://d.org/e,f)"
    assert catalog.linked("(a baseline)") == "(a baseline)"
    assert catalog.table(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |"
    text = "before\n<a>\nold\n<b>\nafter\n"
    renewed = catalog.between(text, "<a>", "<b>", r"\1 new")
    assert renewed == text.replace("old", r"\1 new")
    assert catalog.between(renewed, "<a>", "<b>", r"\1 new") == renewed
    with pytest.raises(DataError, match="no place for this: expected <a>"):
        catalog.between("nothing here", "<a>", "<b>", "new")


# Links ----------------------------------------------------------------------------------------------------


def anchors(document: Path) -> set[str]:
    """The names that headings have as link targets."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name} points at {target}"
        assert not anchor or anchor in anchors(file), f"{document.name} points at {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_files_named_in_passing_exist(document: Path) -> None:
    """`src/...`, `tests/...`, `docs/...`, `benchmarks/...` in code spans, but for the example's own files."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), f"{document.name} names {name}"
