"""The gap between a method and its oracle, and how much of it each add-on closes. Needs records only.

`pair_with_oracle` finds the plain run and the oracle of every run with add-ons, `oracle_gap` averages over seeds. The
gap closed is (LA - LA_plain) / (LA_oracle - LA_plain), for each seed (`incvec.metrics.gap_closed`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from incvec import metrics
from incvec.config import digest
from incvec.errors import ConfigError, DataError
from incvec.records import title
from incvec.study import style
from incvec.study.runs import Record, addon_changes, host_changes, run_command, seed_of


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
        settings = host_changes(record)
    except (ConfigError, KeyError):  # of a method that is not installed, or of an incomplete record
        ignored = {"addons", "oracle", "device", "engine", *record["addons"]}
        settings = {key: value for key, value in record.get("config", {}).items() if key not in ignored}
    named = [record[key] for key in ("method", "dataset", "tasks", "test_counts")]
    return digest([named, seed_of(record), settings])


class MissingRun(DataError):
    """There is no gap to compute: the plain method or its oracle was not run."""


def oracle_gap(records: Sequence[Record], warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The data of one gap figure per method, stream, class order and settings of the method.

    An add-on with changed settings is left out if it was also run with those of the preset. `warn` is called for each
    method without a plain run or an oracle, unless there is no other.
    """
    joint = [record for record in records if record["method"] == "joint"]
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record["method"] != "joint":
            stream = [record.get(key) for key in ("dataset", "method", "tasks", "class_order", "test_counts")]
            groups.setdefault(digest([*stream, host_changes(record)]), []).append(record)
    if not groups:
        raise DataError("no record is of a class-incremental method: give the records of a run and of its oracle.")
    figures, missing = [], []
    for members in groups.values():
        try:
            figures.append(method_gap(with_preset_addons(members), [r for r in joint if same_images(r, members[0])]))
        except MissingRun as error:
            missing.append(error)
    if not figures:
        raise missing[0]
    for reason in missing:
        if warn is not None:
            warn(str(reason))
    return figures


def with_preset_addons(records: Sequence[Record]) -> list[Record]:
    """Without add-ons that have changed settings, if the same add-ons were run with those of the preset."""
    preset = [record["addons"] for record in records if not addon_changes(record)]
    return [record for record in records if record["addons"] not in preset or not addon_changes(record)]


def same_images(joint: Record, record: Record) -> bool:
    return joint["dataset"] == record["dataset"] and sum(joint["test_counts"]) == sum(record["test_counts"])


def method_gap(records: Sequence[Record], joint: Sequence[Record]) -> dict[str, Any]:
    """The plain method, its add-ons and its oracle on one stream, then joint training."""
    runs: dict[tuple[bool, tuple[str, ...]], dict[int, Record]] = {}
    for record in records:
        by_seed = runs.setdefault((bool(record["oracle"]), tuple(record["addons"])), {})
        if by_seed.setdefault(record["seed"], record) is not record:
            name = style.label(title(dict(record)))
            raise DataError(f"two records are of {name} with seed {record['seed']}: give one of them.")
    first = records[0]
    for oracle, name in ((False, "the plain method"), (True, "its oracle, which was never trained")):
        if (oracle, ()) not in runs:
            raise MissingRun(
                f"the gap of {first['method']} on {first['dataset']} needs the record of {name}. Run first:\n  "
                + run_command(first["config"], addons=(), oracle=oracle)
            )
    closed = {id(r): gap.closed for r, gap in zip(records, pair_with_oracle(records), strict=True) if gap is not None}
    entries = [
        run_entry(list(runs[key].values()), closed) for key in sorted(runs, key=lambda k: (k[0], len(k[1]), k[1]))
    ]
    last = {entry["oracle"]: entry["LA"]["mean"] for entry in entries if not entry["addons"]}
    return {
        "kind": "gap",
        "dataset": first["dataset"],
        "method": first["method"],
        "tasks": first["tasks"],
        "changed": host_changes(first),
        "gap": last[True] - last[False],
        "share_is": "(LA - LA_plain) / (LA_oracle - LA_plain), by seed, then averaged; null if there is no gap",
        "runs": [*entries, *([{**run_entry(joint, {}), "accuracy": []}] if joint else [])],
    }


def run_entry(records: Sequence[Record], closed: Mapping[int, float | None]) -> dict[str, Any]:
    """One run over its seeds."""
    first = records[0]
    shares = [share for record in records if (share := closed.get(id(record))) is not None]
    return {
        "name": style.label(title(dict(first))),
        **{key: first[key] for key in ("method", "addons", "oracle")},
        "seeds": sorted(record["seed"] for record in records),
        "accuracy": [spread(values) for values in zip(*(record["metrics"]["a"] for record in records), strict=True)],
        "LA": spread([float(record["metrics"]["LA"]) for record in records]),
        "gap_closed": statistics.fmean(shares) if shares else None,
        "gap_closed_by_seed": shares,
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation, which a single value has not."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}
