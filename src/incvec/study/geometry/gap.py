"""Accuracy after each task for a method, with add-ons, for its oracle and for joint training, and the gap between.

From records alone. Several seeds become a mean and a standard deviation; the share of the gap that an add-on closes,
(LA - LA_plain) / (LA_oracle - LA_plain), is taken seed by seed and then averaged.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from incvec.config import digest
from incvec.errors import DataError
from incvec.metrics import gap_closed
from incvec.presets import changed_settings, resolve
from incvec.study import style
from incvec.study.geometry.lines import FORMAT
from incvec.study.geometry.snapshots import command

Record = Mapping[str, Any]


class Missing(DataError):
    """There is no gap to speak of: the plain method or its oracle was not run."""


def gap(records: Sequence[Record], told: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """For each method and stream among the records: its runs' curves and the shares closed, as plain data.

    A method with other settings, or on another class order, is a study of its own; an add-on with other settings is
    left out where the preset's was run. `told` hears of methods that lack their plain run or their oracle, unless
    all do.
    """
    joint = [record for record in records if record["method"] == "joint"]
    families: dict[str, list[Record]] = {}
    for record in records:
        if record["method"] != "joint":
            stream = [record.get(name) for name in ("dataset", "method", "tasks", "class_order", "test_counts")]
            families.setdefault(digest([*stream, host_changes(record)]), []).append(record)
    if not families:
        raise DataError("no record is of a method that learns task by task: give those of a run and of its oracle.")
    studies, missing = [], []
    for own in families.values():
        try:
            studies.append(study(usual_of(own), [j for j in joint if fits(j, own[0])]))
        except Missing as error:
            missing.append(error)
    if not studies:
        raise missing[0]
    for reason in missing:
        if told is not None:
            told(str(reason))
    return studies


def addon_changes(record: Record) -> dict[str, Any]:
    changes = changed_settings(record["config"])
    return {key: value for key, value in changes.items() if key.partition(".")[0] in record["addons"]}


def host_changes(record: Record) -> dict[str, Any]:
    own, config = addon_changes(record), record["config"]
    return {key: value for key, value in changed_settings(config).items() if key not in own}


def usual_of(records: Sequence[Record]) -> list[Record]:
    """Without add-ons of other settings, where the preset's are there."""
    usual = {tuple(record["addons"]) for record in records if not addon_changes(record)}
    return [record for record in records if not addon_changes(record) or tuple(record["addons"]) not in usual]


def fits(joint: Record, record: Record) -> bool:
    """Whether joint training saw the same images."""
    return joint["dataset"] == record["dataset"] and sum(joint["test_counts"]) == sum(record["test_counts"])


def study(records: Sequence[Record], joint: Sequence[Record]) -> dict[str, Any]:
    """One method on one stream."""
    plain = by_seed(records, [], False)
    oracle = by_seed(records, [], True)
    for missing, changes in ((plain, {"addons": (), "oracle": False}), (oracle, {"addons": (), "oracle": True})):
        if not missing:
            what = "its oracle, which was never trained" if changes["oracle"] else "the plain method"
            raise Missing(
                f"the gap of {records[0]['method']} on {records[0]['dataset']} needs the record of {what}. Run first:"
                f"\n  {command(resolve(records[0]['config']), None, **changes)}"
            )
    kinds = sorted({(bool(r["oracle"]), tuple(r["addons"])) for r in records}, key=lambda k: (k[0], len(k[1]), k[1]))
    runs = []
    for is_oracle, addons in kinds:
        own = by_seed(records, list(addons), is_oracle)
        shares = [
            share
            for seed, record in own.items()
            if addons and not is_oracle and seed in plain and seed in oracle
            if (share := gap_closed(last(record), last(plain[seed]), last(oracle[seed]))) is not None
        ]
        runs.append(
            {
                **described(next(iter(own.values())), sorted(own)),
                "accuracy": spread([record["metrics"]["a"] for record in own.values()]),
                "LA": spread([[last(record)] for record in own.values()])[0],
                "gap_closed": statistics.fmean(shares) if shares else None,
                "gap_closed_by_seed": shares,
            }
        )
    for record in joint[:1]:
        values = [[last(each)] for each in joint]
        seeds = sorted(each["seed"] for each in joint)
        runs.append({**described(record, seeds), "accuracy": [], "LA": spread(values)[0], "gap_closed": None})
    first = records[0]
    return {
        "format": FORMAT,
        "kind": "gap",
        "dataset": first["dataset"],
        "method": first["method"],
        "tasks": first["tasks"],
        "changed": host_changes(first),
        "gap": mean_last(oracle) - mean_last(plain),
        "share_is": "(LA - LA_plain) / (LA_oracle - LA_plain), by seed, then averaged; none where no gap is to close",
        "runs": runs,
    }


def by_seed(records: Sequence[Record], addons: list[str], oracle: bool) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for record in records:
        if list(record["addons"]) != addons or bool(record["oracle"]) != oracle:
            continue
        if record["seed"] in found:
            name = style.label(record["method"], addons, oracle)
            raise DataError(f"two records are of {name} with seed {record['seed']}: give one of them.")
        found[record["seed"]] = record
    return found


def mean_last(records: Mapping[int, Record]) -> float:
    return statistics.fmean(last(record) for record in records.values())


def last(record: Record) -> float:
    return float(record["metrics"]["LA"])


def described(record: Record, seeds: list[int]) -> dict[str, Any]:
    name = style.label(record["method"], record["addons"], record["oracle"])
    keys = ("method", "addons", "oracle")
    return {"name": name, **{key: record[key] for key in keys}, "seeds": seeds}


def spread(rows: Sequence[Sequence[float]]) -> list[dict[str, float | None]]:
    """Mean and standard deviation (none of a single seed) at each place."""
    return [
        {"mean": statistics.fmean(column), "std": statistics.stdev(column) if len(column) > 1 else None}
        for column in zip(*rows, strict=True)
    ]


def draw(found: Mapping[str, Any], stem: Path) -> list[Path]:
    """Left, accuracy over the tasks; right, bars of the last accuracy."""
    count = len(found["runs"])
    between = " " if count <= 4 else "\n"
    extra = 0.8 * max(0, count - 4)  # inches: more bars widen their panel
    figure, table = style.new_figure(1, 2, 10.5 + extra, 4.4)
    left, right = table[0]
    left.get_gridspec().set_width_ratios([5.25, 5.25 + extra])
    for place, run in enumerate(found["runs"]):
        look = style.look(run["method"], run["addons"], run["oracle"])
        means = [value["mean"] for value in run["accuracy"]]
        steps = range(1, len(means) + 1)
        if means:
            left.plot(
                steps, means, color=look.color, marker=look.marker, dashes=look.dashes, markersize=look.size,
                linewidth=2, label=look.label,
            )  # fmt: skip
            stds = [value["std"] or 0.0 for value in run["accuracy"]]
            low, high = ([m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1))
            left.fill_between(steps, low, high, color=look.color, alpha=0.15, linewidth=0)
        else:
            final = max(len(each["accuracy"]) for each in found["runs"])
            left.plot(
                final, run["LA"]["mean"], color=look.color, marker=look.marker, markersize=look.size + 4,
                linestyle="", label="joint (multi-task optimum)",
            )  # fmt: skip
        bar = right.bar(place, run["LA"]["mean"], yerr=run["LA"]["std"], color=look.color, width=0.65, capsize=4)
        share = (
            ""
            if run["gap_closed"] is None
            else f"\n{100 * run['gap_closed']:.0f} %{between}of the gap".replace("-", "−")
        )
        right.bar_label(bar, [f"{run['LA']['mean']:.1f}{share}"], fontsize=9, padding=2)
    names = [style.label(run["method"], run["addons"], run["oracle"]) for run in found["runs"]]
    right.set_xticks(range(count), [textwrap.fill(name, 10) for name in names], fontsize=9)
    lasts = [run["LA"]["mean"] for run in found["runs"]]
    lowest = max(0, 10 * math.floor((min(lasts) - 10) / 10))
    right.set_ylim(lowest, max(lasts) + (0.14 if count <= 4 else 0.2) * (max(lasts) - lowest))
    style.tidy(left, "Accuracy on all classes seen so far, %", "tasks learned")
    style.tidy(right, "Last accuracy, %" + (" (the axis does not begin at 0)" if lowest else ""), "")
    right.set_yticks([tick for tick in right.get_yticks() if lowest <= tick <= 100])
    right.grid(visible=False, axis="x")
    from matplotlib.ticker import MaxNLocator

    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.legend_below(figure, left)
    told = seeds_told(found["runs"])
    told += "".join(f"; {key} {value}" for key, value in found.get("changed", {}).items())
    style.note(figure, f"{style.dataset(found['dataset'])}; {found['tasks']} increments; {told}")
    return style.save(figure, stem)


def seeds_told(runs: Sequence[Mapping[str, Any]]) -> str:
    """`seeds 0, 1`; run by run where they differ, with those that a share of the gap is of."""
    if all(run["seeds"] == runs[0]["seeds"] for run in runs):
        return seeds_text(runs[0]["seeds"])
    compared = [set(run["seeds"]) for run in runs if not run["addons"] and run["method"] != "joint"]  # plain, oracle
    named: dict[str, list[str]] = {}
    for run in runs:
        own = sorted(set(run["seeds"]).intersection(*compared))
        share = "" if run["gap_closed"] is None or own == run["seeds"] else f" (share of the gap: {seeds_text(own)})"
        name = style.label(run["method"], run["addons"], run["oracle"])
        named.setdefault(seeds_text(run["seeds"]) + share, []).append(name)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in named.items())


def seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
