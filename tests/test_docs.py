"""The documents agree with the repository: links, file names, lists, numbers of records, the trace of a step."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any

import pytest
import yaml

from incvec.addons import ADDONS
from incvec.data import DATASETS
from incvec.methods import METHODS
from incvec.presets import sweeps
from incvec.records import read_record
from incvec.study import catalog
from tests.cli.conftest import invoke
from tests.documents import DOCS, DOCUMENTS, ROOT, anchors, name_of, table, without_blocks

RESULTS = ROOT / "results"
NUMBER = re.compile(r"[+-]?\d+\.\d+")
SKIPPED = {"build", "dist", "runs"}
MARKDOWN = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part in SKIPPED or (part.startswith(".") and part != ".github") for part in path.relative_to(ROOT).parts)
]


# Links and names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", MARKDOWN, ids=name_of)
def test_links_and_anchors_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(document)):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.is_file(), f"{name_of(document)} links to {target}"
        assert not anchor or anchor in anchors(file), f"{name_of(document)} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_in_code_spans_exist(document: Path) -> None:
    for name in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/.-]+)`", without_blocks(document)):
        assert (ROOT / name).exists() or (RESULTS / name).exists(), f"{name_of(document)} names {name}"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert set(re.findall(r"[\w/-]+\.md", text)) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_adapters_are_where_the_page_says() -> None:
    shown = re.findall(r"from incvec\.ivt\.adapters\.(\w+) import (\w+)", (DOCS / "plugin-hosts.md").read_text())
    assert len(shown) == 4
    for module, name in shown:
        text = (ROOT / f"src/incvec/ivt/adapters/{module}.py").read_text()
        assert re.search(rf"^(class|def) {name}\b", text, re.MULTILINE), f"{module} has no {name}"


# Lists ------------------------------------------------------------------------------------------------------


def test_list_of_methods_is_current() -> None:
    assert (DOCS / "methods.md").read_text() == catalog.render(RESULTS), (
        "docs/methods.md is stale: python -m incvec.study.catalog > docs/methods.md"
    )


def test_readme_tables_are_current() -> None:
    text = (ROOT / "README.md").read_text()
    assert text == catalog.update_readme(text, RESULTS), (
        "the README's tables are stale: python -m incvec.study.catalog --readme README.md"
    )
    generated = text.partition(catalog.BEGIN)[2].partition(catalog.END)[0]
    for row, names in (("methods", METHODS), ("add-ons", ADDONS), ("data sets", DATASETS)):
        line = next(line for line in generated.splitlines() if line.startswith(f"| {row} |"))
        assert set(re.findall(r"`(.+?)`", line)) == set(names)


def test_list_of_sweeps_is_current() -> None:
    rows = table(DOCS / "sweeps.md", "what it varies")
    assert {name for row in rows for name in re.findall(r"`(.+?)`", row["name"])} == set(sweeps())


# Numbers ----------------------------------------------------------------------------------------------------


def expand(pattern: str) -> list[Path]:
    """The files of a pattern such as `cifar100/podnet{,+ivt}-{5,10}-s?.json` under results/."""
    parts = re.split(r"\{(.*?)\}", pattern)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    files = []
    for name in map("".join, product(*choices)):
        matches = sorted(RESULTS.glob(name))
        assert matches, f"no record matches {name}"
        files += matches
    return files


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, float):
        yield value


def texts(values: list[float]) -> set[str]:
    return {f"{value:.{digits}f}" for value in values for digits in (1, 2)}


def measured(files: list[Path]) -> set[str]:
    """The numbers that a row may state: means over seeds and, with a sign, their differences; all of a figure's."""
    groups: dict[str, list[dict[str, Any]]] = {}
    allowed: set[str] = set()
    for file in files:
        content = json.loads(file.read_text())
        if "metrics" in content:
            record = read_record(file)
            groups.setdefault(re.sub(r"-s\d", "", file.stem), []).append(record)
            parts = (part for task in record.get("statistics", []) for part in task.get("ivt", {}).values())
            allowed |= texts([part["scale"] for part in parts if isinstance(part["scale"], float)])
        else:
            values = list(numbers_in(content))
            allowed |= texts(values + [100 * (value - 1) for value in values])
    for metric in ("AA", "LA", "FM"):
        means = {name: mean(record["metrics"][metric] for record in group) for name, group in groups.items()}
        each = [record["metrics"][metric] for group in groups.values() for record in group]
        allowed |= texts([*means.values(), *each])
        allowed |= {f"{one - other:+.2f}" for one, other in product(means.values(), repeat=2)}
    return allowed


def published() -> set[str]:
    """The paper's numbers, and with a sign what IVT adds there."""
    allowed: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            rows = node.get("rows")
            for name, row in rows.items() if isinstance(rows, dict) else ():
                for tasks, values in row.items():
                    known = [value for value in values if value is not None]
                    allowed.update(texts(known))
                    with_ivt = rows.get(f"{name} + ivt", {}).get(tasks, [])
                    gains = [(a, b) for a, b in zip(with_ivt, values, strict=False) if None not in (a, b)]
                    allowed.update(f"{a - b:+.2f}" for a, b in gains)
            for child in node.values():
                visit(child)

    visit(yaml.safe_load((ROOT / "src" / "incvec" / "study" / "paper.yaml").read_text()))
    return allowed


WITH_RECORDS = [ROOT / "README.md", DOCS / "results.md", *sorted((DOCS / "hosts").glob("*.md"))]


@pytest.mark.parametrize("document", WITH_RECORDS, ids=name_of)
def test_numbers_are_those_of_their_records(document: Path) -> None:
    files: list[Path] = []
    paper = published()
    for row in table(document, "record"):
        if patterns := re.findall(r"`(.+?)`", row["record"]):
            files = [file for pattern in patterns for file in expand(pattern)]
        allowed = measured(files)
        for number in NUMBER.findall(row["ours"]):
            assert number in allowed, f"{number} is in none of {[file.name for file in files]}: {row}"
        for number in NUMBER.findall(row["paper"]):
            assert number in paper, f"{number} is not a number of the paper: {row}"


# The trace of a step ------------------------------------------------------------------------------------------


def test_training_step_takes_the_documented_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hops = [row["file: function"].strip("`") for row in table(DOCS / "architecture.md", "file: function")]
    assert 10 < len(hops) <= 20
    package = ROOT / "src" / "incvec"
    for hop in hops:
        file, _, function = hop.partition(": ")
        tree = ast.parse((package / file).read_text())
        assert function.rpartition(".")[2] in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, hop
    calls: list[str] = []
    prefix = f"{package}/"

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            calls.append(f"{frame.f_code.co_filename.removeprefix(prefix)}: {frame.f_code.co_qualname}")

    monkeypatch.chdir(tmp_path)
    short = [word for key in ("net=tiny", "epochs=1", "balance_epochs=1") for word in ("--set", f"podnet.{key}")]
    sys.setprofile(record)
    try:
        done = invoke(
            "run", "--method", "podnet", "--addon", "ivt", "--dataset", "digits", "--device", "cpu", *short,
            "--set", "ivt.interval=1", "--set", "stop_after=2",
        )  # fmt: skip
    finally:
        sys.setprofile(None)
    assert done.exit_code == 0, done.output
    remaining = iter(calls)
    for hop in hops:
        assert hop in remaining, f"{hop} is not called, or not after the hops before it"


def test_glossary_defines_the_terms_of_the_field() -> None:
    defined = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = {word.lower() for term in defined for word in re.split(r"[ ,()]+", term)}
    assert {"exemplar", "herding", "increment", "teleport", "oracle", "barrier", "seed", "gain"} <= words
