"""Runs, one record each: reading them, how their settings differ, the command that makes one, the oracle gap, and
the table that `incvec show` prints."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from incvec import metrics
from incvec.config import digest
from incvec.errors import ConfigError, DataError
from incvec.presets import changed_settings
from incvec.records import read_record, readable, title
from incvec.study.tables import MISSING, Cell, Column, Table, make_row, number

Record = Mapping[str, Any]
Seed = tuple[int, int | None]  # of the training and of the class order


@dataclass(frozen=True)
class RunRecord:
    """A record and its file."""

    path: str
    record: Record = field(repr=False)

    @property
    def title(self) -> str:
        """`podnet + ivt`, `podnet oracle`."""
        return title(self.record)

    @property
    def seed(self) -> Seed:
        return seed_of(self.record)

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Settings that differ from the presets', the class order among them."""
        return changed_settings(self.record["config"])

    @cached_property
    def addon_changes(self) -> dict[str, Any]:
        return addon_changes(self.record)

    @cached_property
    def host_changes(self) -> dict[str, Any]:
        return host_changes(self.record)

    @property
    def increments_seconds(self) -> float | None:
        """Training time after the base task, which runs share; of all of it if there is one task only."""
        spent = self.record.get("task_seconds")
        if not spent or len(spent) != len(self.record["accuracy"]):
            return None
        return fsum(spent[1:] or spent)


def load_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Every record at or below the paths, each checked against its own accuracy matrix; copies are read once."""
    runs: dict[str, RunRecord] = {}
    for file in readable(paths):
        run = RunRecord(str(file), read_record(file, strict=True))
        config = {key: value for key, value in run.record["config"].items() if key not in ("device", "engine")}
        other = runs.setdefault(digest(config), run)
        if other.record["accuracy"] != run.record["accuracy"]:
            raise DataError(
                f"{other.path} and {run.path} are two results of the same run ({run.title}, "
                f"{run.record['tasks']} tasks, seed {run.record['seed']}). Remove one of them."
            )
    return list(runs.values())


def seed_of(record: Record) -> Seed:
    return record["seed"], record.get("order_seed")


def row_name(record: Record) -> str:
    """`podnet + ivt`, for an oracle too: the name of a row in the paper's tables."""
    return " + ".join([record["method"], *record["addons"]])


def addon_changes(record: Record) -> dict[str, Any]:
    """Settings of the add-ons that differ from the presets'."""
    changes = changed_settings(record["config"])
    return {key: value for key, value in changes.items() if key.partition(".")[0] in record["addons"]}


def host_changes(record: Record) -> dict[str, Any]:
    """All other settings that differ from the presets'."""
    changes = changed_settings(record["config"])
    return {key: value for key, value in changes.items() if key.partition(".")[0] not in record["addons"]}


def settings_text(changes: Mapping[str, Any]) -> str:
    """`podnet.memory=5, ivt.stages=[main, balance]`."""
    return ", ".join(f"{key}={yaml_value(value)}" for key, value in changes.items())


def yaml_value(value: Any) -> str:
    """A value as `--set` reads it."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


def run_command(config: Mapping[str, Any], out: str | Path | None = None, **changes: Any) -> str:
    """The `incvec run` that makes a run of a resolved configuration, with some of its fields changed."""
    config = {**config, **changes}
    words = ["incvec", "run", "--method", config["method"]]
    words += [word for name in config["addons"] for word in ("--addon", name)]
    words += ["--dataset", config["dataset"], "--tasks", str(config["tasks"]), "--seed", str(config["seed"])]
    words += ["--data-root", "DATA"] if config["dataset"] != "digits" else []  # the digits are embedded
    words += ["--oracle"] if config["oracle"] else []
    changed = changed_settings(config)
    for section, _, key in [name.rpartition(".") for name in changed]:
        base = (config.get(section) or {}).get(f"base_{key}")
        if base is not None:  # without it, the base task would follow the changed setting
            changed.setdefault(f"{section}.base_{key}", base)
    for key, value in changed.items():
        words += ["--variant", value] if key == "variant" else ["--set", f"{key}={yaml_value(value)}"]
    words += ["--out", str(out)] if out is not None else []
    return shlex.join(words)


class OracleGap(NamedTuple):
    """LA of a run with add-ons, of the plain method and of its oracle, with the same seed and settings."""

    plain: float
    with_addons: float
    oracle: float

    @property
    def closed(self) -> float | None:
        """(LA - LA_plain) / (LA_oracle - LA_plain); None if the oracle is not ahead of the plain method."""
        return metrics.gap_closed(self.with_addons, self.plain, self.oracle)


def oracle_gaps(records: Sequence[Record]) -> list[OracleGap | None]:
    """The gap of each run with add-ons; None for others, and without a plain run and an oracle to compare with."""
    keys = [_comparison_key(record) for record in records]
    last: dict[tuple[str, bool], float] = {}
    for key, record in zip(keys, records, strict=True):
        if not record["addons"]:
            last.setdefault((key, bool(record["oracle"])), float(record["metrics"]["LA"]))
    gaps: list[OracleGap | None] = []
    for key, record in zip(keys, records, strict=True):
        plain, oracle = last.get((key, False)), last.get((key, True))
        if not record["addons"] or record["oracle"] or plain is None or oracle is None:
            gaps.append(None)
        else:
            gaps.append(OracleGap(plain, float(record["metrics"]["LA"]), oracle))
    return gaps


def _comparison_key(record: Record) -> str:
    """Equal for a method, its oracle and the method with any add-on, all else (the seed included) being equal."""
    try:
        settings = host_changes(record)
    except (ConfigError, KeyError):  # of a method that is not installed, or of an incomplete record
        ignored = {"addons", "oracle", "device", "engine", *record["addons"]}
        settings = {key: value for key, value in record.get("config", {}).items() if key not in ignored}
    named = [record[key] for key in ("method", "dataset", "tasks", "test_counts")]
    return digest([named, seed_of(record), settings])


@dataclass(frozen=True)
class RunRow:
    """One run in a table; accuracies in percent, `gap_closed` a share of 1."""

    run: str
    dataset: str
    tasks: int
    seed: int
    AA: float
    LA: float
    FM: float | None  # None if there was a single task
    gap_closed: float | None
    seconds: float | None
    path: str | None = None
    changed: str | None = None  # settings, or the folder if rows would read the same otherwise


def run_rows(records: Sequence[Record], paths: Sequence[str] | None = None) -> list[RunRow]:
    """One row per record, in the given order."""
    names = [(title(record), record["dataset"], record["tasks"], record["seed"]) for record in records]
    rows = []
    for place, (record, name, gap) in enumerate(zip(records, names, oracle_gaps(records), strict=True)):
        average, last, forgetting = (record["metrics"].get(metric) for metric in ("AA", "LA", "FM"))
        path = None if paths is None else paths[place]
        changed = _changed(record, path if names.count(name) > 1 else None)
        closed = None if gap is None else gap.closed
        rows.append(RunRow(*name, average, last, forgetting, closed, record.get("seconds"), path, changed))
    return rows


def _changed(record: Record, path: str | None) -> str | None:
    """The settings a run changed; the folder of a run with its presets' settings, if `path` is given."""
    folder = Path(path).parent.name if path else None
    try:
        changes = changed_settings(record["config"])
    except (ConfigError, KeyError):  # as in `_comparison_key`
        return folder
    return settings_text(changes) or (f"as preset, in {folder}" if folder else None)


def runs_table(rows: Sequence[RunRow], title: str = "", footnotes: bool = True) -> Table:
    """Changed settings are listed in numbered notes below the table, or after the runs' names."""
    notes: dict[str, int] = {}
    made = []
    for row in rows:
        name = row.run
        if row.changed:
            name += f" [{notes.setdefault(row.changed, len(notes) + 1)}]" if footnotes else f" ({row.changed})"
        closed = Cell(MISSING) if row.gap_closed is None else Cell(f"{100 * row.gap_closed:.0f} %", row.gap_closed)
        numbers = [*map(number, (row.AA, row.LA, row.FM)), closed, number(row.seconds, ".1f")]
        dim = row.run.endswith(" oracle")
        made.append(make_row(name, row.dataset, str(row.tasks), str(row.seed), *numbers, dim=dim))
    labels = ("tasks", "seed", "AA", "LA", "FM", "gap\nclosed", "seconds")  # 80 columns are enough
    note = "\n".join(f"[{place}] {text}" for text, place in notes.items())
    return Table(["run", "data set", *map(Column, labels)], made, title, note)
