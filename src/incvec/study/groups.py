"""Runs grouped for a report: runs that differ only in their seed are a group, the groups of one method a panel."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from incvec.config import digest
from incvec.methods import find_method
from incvec.study import style
from incvec.study.runs import RunRecord, run_command, settings_text, yaml_value

STAND_INS = {"variant=lite": "lite0-minilm, not CLIP"}  # settings that name a model in place of CLIP


@dataclass(frozen=True, order=True)
class Stream:
    """How a data set was split into tasks."""

    dataset: str
    tasks: int
    equal: bool  # no base task: all tasks have the same size

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.tasks}" + ("-equal" if self.equal else "")

    def __str__(self) -> str:
        """`CIFAR-100, 5 increments`."""
        return f"{style.dataset(self.dataset)}, {self.tasks} {'equal tasks' if self.equal else 'increments'}"


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds."""

    runs: tuple[RunRecord, ...]

    @property
    def first(self) -> RunRecord:
        return self.runs[0]

    @property
    def record(self) -> Any:
        """The first run's record, for what all have in common."""
        return self.first.record

    @property
    def title(self) -> str:
        return self.first.title

    @property
    def dataset(self) -> str:
        return str(self.record["dataset"])

    @property
    def stream(self) -> Stream:
        return Stream(self.dataset, self.record["tasks"], self.record["config"].get("base_classes", 1) == 0)

    @property
    def label(self) -> str:
        """`PODNet + IVT (interval 5)`."""
        changes = [f"{key.partition('.')[2]} {yaml_value(value)}" for key, value in self.first.addon_changes.items()]
        return style.label(self.title) + (f" ({', '.join(changes)})" if changes else "")

    @property
    def host_settings(self) -> str:
        """Changed settings of the method, for a title or a label."""
        parts = [settings_text({key: value}) for key, value in self.first.host_changes.items()]
        return ", ".join(STAND_INS.get(part, part) for part in parts)

    @property
    def order(self) -> tuple[int, int, str, str]:
        """Sort key: plain methods first, then add-ons, then oracles."""
        return int(self.record["oracle"]), len(self.record["addons"]), self.title, settings_text(self.first.changes)

    def metric(self, name: str) -> list[float]:
        values = [run.record["metrics"][name] for run in self.runs]
        return [float(value) for value in values if value is not None]

    @cached_property
    def commands(self) -> tuple[str, ...]:
        """The command of each run."""
        return tuple(run_command(run.record["config"]) for run in self.runs)

    @property
    def curves(self) -> list[list[float]]:
        """Accuracy on the classes seen after each task, one curve per seed."""
        return [[float(value) for value in run.record["metrics"]["a"]] for run in self.runs]

    @property
    def matrix(self) -> list[list[float]]:
        """The accuracy matrix, averaged over seeds."""
        matrices = [run.record["accuracy"] for run in self.runs]
        return [
            [statistics.mean(matrix[t][i] for matrix in matrices) for i in range(t + 1)]
            for t in range(len(matrices[0]))
        ]

    @property
    def seconds(self) -> list[float]:
        """Training time after the base task, one value per seed."""
        return [spent for run in self.runs if (spent := run.increments_seconds) is not None]


@dataclass(frozen=True)
class Panel:
    """What one chart shows: a method on one stream, with and without add-ons, its oracle, and joint training."""

    groups: tuple[Group, ...]
    joint: Group | None

    @property
    def first(self) -> Group:
        return self.groups[0]

    @property
    def stream(self) -> str:
        """`CIFAR-100, 5 increments`, and changed settings of the method."""
        return ", ".join(filter(None, (str(self.first.stream), self.first.host_settings)))

    @property
    def title(self) -> str:
        return f"{style.label(self.first.record['method'])} on {self.stream}"

    @property
    def name(self) -> str:
        changes = self.first.first.host_changes
        return "-".join(
            [self.first.stream.name, self.first.record["method"]] + ([digest(changes)[:6]] if changes else [])
        )


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """By data set, tasks, method and settings."""
    members: dict[str, list[RunRecord]] = {}
    for run in runs:
        key = digest([run.record["dataset"], run.record["tasks"], run.title, run.changes])
        members.setdefault(key, []).append(run)
    groups = [Group(tuple(sorted(own, key=lambda run: str(run.seed)))) for own in members.values()]
    return sorted(groups, key=lambda g: (g.dataset, g.record["tasks"], g.record["method"], g.order))


def make_panels(groups: Sequence[Group]) -> list[Panel]:
    """One panel per method, stream and setting of the method.

    An add-on with changed settings is left out if it was also run with its preset's. Joint training joins the panels of
    its data set, except those of methods that start from pre-trained weights.
    """
    members: dict[str, list[Group]] = {}
    for each in groups:
        if each.record["method"] != "joint":
            key = digest([each.dataset, each.record["tasks"], each.record["method"], each.first.host_changes])
            members.setdefault(key, []).append(each)
    panels = []
    for own in members.values():
        preset = {each.title for each in own if not each.first.addon_changes}
        shown = [each for each in own if not each.first.addon_changes or each.title not in preset]
        panels.append(Panel(tuple(sorted(shown, key=lambda g: g.order)), joint_of(shown[0], groups)))
    return panels


def joint_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """Joint training on the same images, with its preset's settings."""
    if find_method(group.record["method"]).pretrained:
        return None
    images = (group.dataset, sum(group.record["test_counts"]))
    joint = [each for each in groups if each.title == "joint" and not each.first.changes]
    return next((each for each in joint if (each.dataset, sum(each.record["test_counts"])) == images), None)
