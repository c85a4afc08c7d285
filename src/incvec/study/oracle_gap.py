"""The gap between a method and its oracle, and how much of it each add-on closes. Needs records only.

The gap closed is (LA - LA_plain) / (LA_oracle - LA_plain), for each seed (`incvec.metrics.gap_closed`). It is then
averaged over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from incvec.errors import DataError
from incvec.study.groups import Group, Panel, group_runs, make_panels
from incvec.study.runs import RunRecord, pair_with_oracle, run_command


class MissingRun(DataError):
    """There is no gap to compute: the plain method or its oracle was not run."""


def oracle_gap(runs: Sequence[RunRecord], warn: Callable[[str], None] | None = None) -> list[dict[str, Any]]:
    """The data of one gap figure per method, stream, class order and settings of the method.

    `warn` is called once if there are others without a plain run or an oracle: with the command that is missing, or
    with the methods if there are several.
    """
    panels = make_panels(group_runs(runs))
    if not panels:
        raise DataError("no record is of a class-incremental method: give the records of a run and of its oracle.")
    figures: list[dict[str, Any]] = []
    missing: list[MissingRun] = []
    methods: list[str] = []
    for panel in panels:
        try:
            figures.append(panel_gap(panel))
        except MissingRun as error:
            missing.append(error)
            methods.append(panel.first.record["method"])
    if not figures:
        raise missing[0]
    if missing and warn is not None:
        names = ", ".join(sorted(set(methods)))
        several = f"{len(missing)} streams or settings without a plain run or an oracle, of {names}"
        warn(str(missing[0]) if len(missing) == 1 else several)
    return figures


def panel_gap(panel: Panel) -> dict[str, Any]:
    """The plain method, its add-ons and its oracle on one stream, then joint training."""
    first = panel.first.record
    last = {bool(g.record["oracle"]): statistics.fmean(g.metric("LA")) for g in panel.groups if not g.record["addons"]}
    for oracle, name in ((False, "the plain method"), (True, "its oracle, which was never trained")):
        if oracle not in last:
            raise MissingRun(
                f"the gap of {first['method']} on {first['dataset']} needs the record of {name}. Run first:\n  "
                + run_command(first["config"], addons=(), oracle=oracle)
            )
    records = [run.record for group in panel.groups for run in group.runs]
    closed = {id(r): gap.closed for r, gap in zip(records, pair_with_oracle(records), strict=True) if gap is not None}
    joint = [{**group_entry(panel.joint, {}), "accuracy": []}] if panel.joint else []
    return {
        "kind": "gap",
        "dataset": first["dataset"],
        "method": first["method"],
        "tasks": first["tasks"],
        "changed": panel.first.first.host_changes,
        "gap": last[True] - last[False],
        "share_is": "(LA - LA_plain) / (LA_oracle - LA_plain), by seed, then averaged; null if there is no gap",
        "runs": [*(group_entry(group, closed) for group in panel.groups), *joint],
    }


def group_entry(group: Group, closed: Mapping[int, float | None]) -> dict[str, Any]:
    """One run over its seeds."""
    shares = [share for run in group.runs if (share := closed.get(id(run.record))) is not None]
    return {
        "name": group.label,
        **{key: group.record[key] for key in ("method", "addons", "oracle")},
        "seeds": sorted(run.record["seed"] for run in group.runs),
        "accuracy": [spread(values) for values in zip(*group.curves, strict=True)],
        "LA": spread(group.metric("LA")),
        "gap_closed": statistics.fmean(shares) if shares else None,
        "gap_closed_by_seed": shares,
    }


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard deviation, which a single value has not."""
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}
