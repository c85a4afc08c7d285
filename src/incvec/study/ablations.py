"""The paper's tables of single settings (memory sizes, the Fisher's structure) beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from incvec.config import RunConfig
from incvec.presets import resolve
from incvec.study import style
from incvec.study.compare import (
    METRICS,
    Comparison,
    alike,
    cell_text,
    difference_text,
    kind,
    known,
    paper_file,
    row_name,
    settings_text,
)
from incvec.study.sheet import Cell, Column, Row, Sheet, number, spread, word

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Line:
    """One row of such a table: a run, the setting it is about, and AA, LA and FM, ours beside the paper's."""

    config: RunConfig
    setting: str
    values: tuple[Comparison, ...]

    @property
    def run(self) -> str:
        return row_name(self.config.resolved())

    @property
    def seeds(self) -> int:
        return len(self.values[0].ours)


@cache
def configs(name: str) -> tuple[RunConfig, ...]:
    """The runs of a table, row by row."""
    content = paper_file()["ablations"][name]
    made = []
    for row in content["rows"]:
        method, *addons = row["run"].split(" + ")
        given = {"method": method, "addons": addons, "dataset": content["dataset"], "tasks": row["tasks"]}
        made.append(resolve(given | row.get("set", {})))
    return tuple(made)


def names(dataset: str) -> list[str]:
    return [name for name, content in paper_file()["ablations"].items() if content["dataset"] == dataset]


def kinds(dataset: str) -> set[str]:
    """What a record's `kind` is where one of the tables has it."""
    return {kind(config.resolved()) for name in names(dataset) for config in configs(name)}


def lines(name: str, records: Records) -> list[Line]:
    """A table, every row of it, run or not."""
    found = []
    for row, config in zip(paper_file()["ablations"][name]["rows"], configs(name), strict=True):
        cell = alike(config, records)
        values = [
            Comparison(known(seed[metric] for seed in cell.values()), theirs)
            for metric, theirs in zip(METRICS, row["paper"], strict=True)
        ]
        setting = {f"{part}.{key}": value for part, own in row.get("set", {}).items() for key, value in own.items()}
        found.append(Line(config, row.get("told") or settings_text(setting), tuple(values)))
    return found


def section(dataset: str, records: Records) -> list[str]:
    """The tables of a data set as Markdown, each with its heading."""
    told = []
    for name in names(dataset):
        content = paper_file()["ablations"][name]
        told += ["", f"### {content['title']}", "", f"Command: `incvec sweep {content['sweep']}`.", ""]
        told += [
            "| run | setting | tasks | AA | paper | diff | LA | paper | diff | FM | paper | diff |",
            "|---" * 12 + "|",
        ]
        for line in lines(name, records):
            cells = [line.run, f"`{line.setting}`" if line.setting else "", str(line.config.tasks)]
            for value in line.values:
                theirs = "" if value.paper is None else f"{value.paper:.2f}"
                cells += [cell_text(value), theirs, difference_text(value)]
            told.append("| " + " | ".join(cells) + " |")
    return told


def sheets(dataset: str, records: Records) -> list[Sheet]:
    """The same tables for a report."""
    made = []
    for name in names(dataset):
        content, found = paper_file()["ablations"][name], lines(name, records)
        theirs = [any(line.values[place].paper is not None for line in found) for place in range(len(METRICS))]
        rows = []
        for line in found:
            cells = [word(style.label(line.run)), Cell(line.setting or "–", code=bool(line.setting))]
            cells += [number(line.config.tasks, "d"), number(line.seeds, "d")]
            for value, there in zip(line.values, theirs, strict=True):
                cells.append(spread(value, missing="not run"))
                cells += [number(value.paper), number(value.difference, "+.2f")] if there else []
            rows.append(Row(tuple(cells), quiet=not line.seeds))
        columns = [Column("method", number=False), Column("setting", number=False), Column("increments")]
        columns.append(Column("seeds"))
        for metric, there in zip(METRICS, theirs, strict=True):
            columns += [Column(label, metric) for label in (("ours", "paper", "diff") if there else ("ours",))]
        note = f"Command: incvec sweep {content['sweep']}. Ours: mean ± standard deviation over seeds."
        title = f"{style.dataset(dataset)}: {content['title']}"
        made.append(Sheet(f"{dataset}-{name}", title, tuple(columns), tuple(rows), note))
    return made
