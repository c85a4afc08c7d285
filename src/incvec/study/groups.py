"""Records brought together: runs that differ in their seed alone are a group, groups of one method a panel.

Every number of a report starts here. A record whose numbers do not follow from its own accuracy matrix is refused.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from incvec.config import digest
from incvec.errors import DataError
from incvec.methods import find_method
from incvec.metrics import summarize
from incvec.presets import changed_settings
from incvec.records import REQUIRED, read_record, title
from incvec.study import style
from incvec.study.compare import METRICS, settings_text, yaml_value

TOLERANCE = 1e-6  # between a record's summaries and those of its matrix


@dataclass(frozen=True)
class Entry:
    """A record and where it lies."""

    path: str
    record: Mapping[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return title(dict(self.record))

    @property
    def seed(self) -> tuple[int, int | None]:
        return self.record["seed"], self.record.get("order_seed")

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Settings that differ from the presets, the class order among them."""
        return changed_settings(self.record["config"])

    @property
    def addon_changes(self) -> dict[str, Any]:
        return {key: value for key, value in self.changes.items() if key.partition(".")[0] in self.record["addons"]}

    @property
    def host_changes(self) -> dict[str, Any]:
        return {key: value for key, value in self.changes.items() if key not in self.addon_changes}

    @property
    def curve(self) -> list[float]:
        """Accuracy over the classes seen, after each task."""
        return [float(value) for value in self.record["metrics"]["a"]]

    @property
    def increments_seconds(self) -> float | None:
        """Time of training after the base task (which runs share); of all of it where there is one task only."""
        spent = self.record.get("task_seconds")
        if not spent or len(spent) != len(self.record["accuracy"]):
            return None
        return math.fsum(spent[1:] or spent)


@dataclass(frozen=True, order=True)
class Stream:
    """How a data set was cut into tasks."""

    dataset: str
    tasks: int
    equal: bool  # no base half: all tasks are of one size

    @property
    def slug(self) -> str:
        return f"{self.dataset}-{self.tasks}" + ("-equal" if self.equal else "")

    def __str__(self) -> str:
        """`CIFAR-100, 5 increments`."""
        return f"{style.dataset(self.dataset)}, {self.tasks} {'equal tasks' if self.equal else 'increments'}"


@dataclass(frozen=True)
class Group:
    """Runs alike in all but their seeds."""

    entries: tuple[Entry, ...]

    @property
    def first(self) -> Entry:
        return self.entries[0]

    @property
    def name(self) -> str:
        return self.first.name

    @property
    def dataset(self) -> str:
        return str(self.first.record["dataset"])

    @property
    def tasks(self) -> int:
        return int(self.first.record["tasks"])

    @property
    def stream(self) -> Stream:
        return Stream(self.dataset, self.tasks, self.first.record["config"].get("base_classes", 1) == 0)

    @property
    def label(self) -> str:
        """`PODNet + IVT (interval 5)`."""
        changes = ", ".join(
            f"{key.partition('.')[2]} {yaml_value(value)}" for key, value in self.first.addon_changes.items()
        )
        return style.label(self.name) + (f" ({changes})" if changes else "")

    @property
    def rank(self) -> tuple[int, int, str, str]:
        """Plain methods first, then add-ons, then oracles."""
        record = self.first.record
        return int(record["oracle"]), len(record["addons"]), self.name, settings_text(self.first.changes)

    def metric(self, name: str) -> list[float]:
        values = [entry.record["metrics"][name] for entry in self.entries]
        return [float(value) for value in values if value is not None]

    @property
    def curves(self) -> list[list[float]]:
        return [entry.curve for entry in self.entries]

    @property
    def matrix(self) -> list[list[float]]:
        """The accuracy matrix, averaged over seeds."""
        rows = [[row[: t + 1] for t, row in enumerate(entry.record["accuracy"])] for entry in self.entries]
        return [
            [statistics.mean(each[t][i] for each in rows) for i in range(len(rows[0][t]))] for t in range(len(rows[0]))
        ]

    @property
    def seconds(self) -> list[float]:
        return [spent for entry in self.entries if (spent := entry.increments_seconds) is not None]


def host_text(entry: Entry) -> str:
    """Changed settings of the method, for a picture: a model that stands in for CLIP is named."""
    named = {"variant=lite": "lite0-minilm, not CLIP"}
    parts = [settings_text({key: value}) for key, value in entry.host_changes.items()]
    return ", ".join(named.get(part, part) for part in parts)


@dataclass(frozen=True)
class Panel:
    """What belongs into one picture: a method on one stream, with and without add-ons, its oracle, and joint."""

    groups: tuple[Group, ...]
    joint: Group | None

    @property
    def first(self) -> Group:
        return self.groups[0]

    @property
    def host(self) -> str:
        return str(self.first.first.record["method"])

    @property
    def title(self) -> str:
        return f"{style.label(self.host)} on {self.stream}"

    @property
    def stream(self) -> str:
        """`CIFAR-100, 5 increments`, and settings of the method that were changed."""
        changes = host_text(self.first.first)
        return str(self.first.stream) + (f", {changes}" if changes else "")

    @property
    def slug(self) -> str:
        changes = self.first.first.host_changes
        parts = [self.first.stream.slug, self.host] + ([digest(changes)[:6]] if changes else [])
        return "-".join(parts)


def load(paths: Sequence[Path]) -> list[Entry]:
    """Every record at or below the paths, each checked; a broken one is an error that names the file."""
    files: set[Path] = set()
    for path in paths:
        if path.is_dir():
            files |= {file for file in path.rglob("*.json") if meant_as_record(file)}
        elif path.exists():
            files.add(path)
        else:
            raise DataError(f"{path} does not exist; give a record.json, or a folder that holds some.")
    if not files:
        raise DataError(f"no record lies in {', '.join(map(str, paths))}; `incvec run` writes one.")
    entries = []
    for file in sorted(files):
        record = read_record(file)
        check(record, file)
        entries.append(Entry(str(file), record))
    return unique(entries)


def meant_as_record(file: Path) -> bool:
    """Other JSON files may lie beside records; one that cannot be read, or that lost a part, is a broken record."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, OSError):
        return True
    return isinstance(content, dict) and sum(key in content for key in REQUIRED) > len(REQUIRED) // 2


def check(record: Mapping[str, Any], file: Path) -> None:
    """A record's summaries must be those of its accuracy matrix; otherwise a report would spread a wrong number."""
    lacking = [key for key in ("config", "environment") if not isinstance(record.get(key), Mapping)]
    if lacking:
        raise DataError(f"{file} lacks {' and '.join(lacking)}, so nobody could say how it was run. Run it again.")
    try:
        expected: Mapping[str, Any] = summarize(record["accuracy"], record["test_counts"])
        told = [(name, record["metrics"][name], expected[name]) for name in METRICS]
        told += [(f"a[{t}]", *pair) for t, pair in enumerate(zip(record["metrics"]["a"], expected["a"], strict=True))]
        wrong = [
            f"{name} is {given}, the matrix gives {value}"
            for name, given, value in told
            if (given is None) != (value is None) or (value is not None and not abs(given - value) <= TOLERANCE)
        ]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else error
        raise DataError(f"{file} is a broken record: {problem}. Run it again, or take it away.") from None
    if wrong:
        raise DataError(f"{file} was altered: {'; '.join(wrong[:3])}. Run it again, or take it away.")


def unique(entries: Sequence[Entry]) -> list[Entry]:
    """One record a run. A copy is passed over; two outcomes of the same run are for the reader to choose from."""
    found: dict[str, Entry] = {}
    for entry in entries:
        config = {key: value for key, value in entry.record["config"].items() if key not in ("device", "engine")}
        key = digest([config, entry.record.get("label")])
        other = found.setdefault(key, entry)
        if other.record["accuracy"] != entry.record["accuracy"]:
            raise DataError(
                f"{other.path} and {entry.path} are two outcomes of the same run ({entry.name}, {entry.record['tasks']}"
                f" tasks, seed {entry.record['seed']}). Take one of them away."
            )
    return list(found.values())


def group(entries: Sequence[Entry]) -> list[Group]:
    """By data set, tasks, name and settings, in reading order."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        record = entry.record
        key = digest([record["dataset"], record["tasks"], entry.name, record.get("label"), entry.changes])
        found.setdefault(key, []).append(entry)
    groups = [Group(tuple(sorted(members, key=lambda e: str(e.seed)))) for members in found.values()]
    return sorted(groups, key=lambda g: (g.dataset, g.tasks, g.first.record["method"], g.rank))


def panels(groups: Sequence[Group]) -> list[Panel]:
    """A panel for each method, stream and setting of the method; joint training joins every panel of its data
    whose method is trained from scratch, too."""
    found: dict[str, list[Group]] = {}
    for each in groups:
        if each.first.record["method"] != "joint":
            key = digest([each.dataset, each.tasks, each.first.record["method"], each.first.host_changes])
            found.setdefault(key, []).append(each)
    made = []
    for members in found.values():
        usual = {member.name for member in members if not member.first.addon_changes}
        kept = [m for m in members if not m.first.addon_changes or m.name not in usual]
        images = sum(kept[0].first.record["test_counts"])
        joint = [
            each
            for each in groups
            if each.first.record["method"] == "joint"
            and not find_method(kept[0].first.record["method"]).pretrained  # joint training begins from nothing
            and not each.first.record["addons"]
            and not each.first.changes
            and (each.dataset, sum(each.first.record["test_counts"])) == (kept[0].dataset, images)
        ]
        made.append(Panel(tuple(sorted(kept, key=lambda g: g.rank)), joint[0] if joint else None))
    return made
