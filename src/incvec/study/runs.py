"""Runs, one record each: reading them, how their settings differ, and the command that reproduces one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
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
        """Of the add-ons alone."""
        return {key: value for key, value in self.changes.items() if key.partition(".")[0] in self.record["addons"]}

    @cached_property
    def host_changes(self) -> dict[str, Any]:
        """All others."""
        return {key: value for key, value in self.changes.items() if key not in self.addon_changes}

    @property
    def increments_seconds(self) -> float | None:
        """Training time after the base task, which runs share; or the total if there is only one task."""
        spent = self.record.get("task_seconds")
        if not spent or len(spent) != len(self.record["accuracy"]):
            return None
        return fsum(spent[1:] or spent)


def load_runs(paths: Sequence[Path], warn: Callable[[str], None] | None = None) -> list[RunRecord]:
    """Every record at or below the paths, each checked against its own accuracy matrix; copies are read once.

    Two results of the same settings and seed are an error, also if one of them is from a version with fewer settings.
    A broken record in a folder is an error, or a warning to `warn`.
    """
    runs: dict[tuple[str, Seed], RunRecord] = {}
    for file in readable(paths, warn):
        run = RunRecord(str(file), read_record(file, strict=True))
        other = runs.setdefault((settings_key(run.record["config"]), run.seed), run)
        if other.record["accuracy"] != run.record["accuracy"]:
            raise DataError(
                f"{other.path} and {run.path} are two results of the same run ({run.title}, "
                f"{run.record['tasks']} tasks, seed {run.record['seed']}). Remove one of them."
            )
    return list(runs.values())


def seed_of(record: Record) -> Seed:
    return record["seed"], record.get("order_seed")


def settings_key(config: Mapping[str, Any]) -> str:
    """Equal for resolved configurations that differ in seed, device and engine only."""
    named = [config[key] for key in ("method", "addons", "dataset", "tasks", "oracle")]
    return digest([*named, changed_settings(config)])


def row_name(record: Record) -> str:
    """`podnet + ivt`, for an oracle too: the name of a row in the paper's tables."""
    return " + ".join([record["method"], *record["addons"]])


class OracleGap(NamedTuple):
    """LA of a run with add-ons, of the plain method and of its oracle, with the same seed and settings."""

    plain: float
    with_addons: float
    oracle: float

    @property
    def closed(self) -> float | None:
        """(LA - LA_plain) / (LA_oracle - LA_plain); None if the oracle is not ahead of the plain method."""
        return metrics.gap_closed(self.with_addons, self.plain, self.oracle)


def pair_with_oracle(records: Sequence[Record]) -> list[OracleGap | None]:
    """The gap of each run with add-ons; None for others, and without a plain run and an oracle to compare with."""
    keys = [comparison_key(record) for record in records]
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


def comparison_key(record: Record) -> str:
    """Equal for a method, its oracle and the method with any add-on, all else (the seed included) being equal."""
    try:
        settings = RunRecord("", record).host_changes
    except (ConfigError, KeyError):  # of a method that is not installed, or of an incomplete record
        ignored = {"addons", "oracle", "device", "engine", *record["addons"]}
        settings = {key: value for key, value in record.get("config", {}).items() if key not in ignored}
    named = [record[key] for key in ("method", "dataset", "tasks", "test_counts")]
    return digest([named, seed_of(record), settings])


def settings_text(changes: Mapping[str, Any]) -> str:
    """`podnet.memory=5, ivt.stages=[main, balance]`."""
    return ", ".join(f"{key}={yaml_value(value)}" for key, value in changes.items())


def yaml_value(value: Any) -> str:
    """A value as `--set` reads it."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


def run_command(config: Mapping[str, Any], out: str | Path | None = None, **changes: Any) -> str:
    """The `incvec run` command that reproduces a resolved configuration, with some of its fields changed."""
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
