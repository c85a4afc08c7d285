"""Which figures a report has, as data: matplotlib draws them for print, the page's script for the screen."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from incvec.records import title
from incvec.study import style
from incvec.study.compare import METRICS, Comparison, compare_gains, is_standard, paper_rows, settings_text
from incvec.study.groups import Entry, Group, Panel, Stream, host_text


@dataclass(frozen=True)
class Line:
    """A series with the look of its name; `errors` are standard deviations over seeds, where there are several."""

    name: str
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    errors: tuple[float, ...] | None
    seeds: int


@dataclass(frozen=True)
class Lines:
    slug: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    levels: tuple[Line, ...] = ()  # single values, drawn across: joint training, the host of a swept add-on
    log: bool = False
    dense: bool = False  # so many points that only the last is marked
    note: str = ""
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Bar:
    name: str
    label: str
    value: float
    error: float | None
    seeds: int
    paper: float | None = None


@dataclass(frozen=True)
class Bars:
    slug: str
    title: str
    x_label: str
    bars: tuple[Bar, ...]
    unit: str
    signed: bool = False
    note: str = ""
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True)
class Heat:
    """An accuracy matrix: a row for each task learned, a column for each task tested."""

    slug: str
    title: str
    label: str
    matrix: tuple[tuple[float, ...], ...]
    low: float
    high: float
    note: str = ""
    kind: Literal["heat"] = "heat"


Chart = Lines | Bars | Heat
UNSET = {"ivt.interval": "only at the end"}
TIMED = "training-time"  # the sweep whose runs have the device to themselves


def deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def curve(each: Group) -> Line:
    """Accuracy after each task; the base is task 1."""
    columns = list(zip(*each.curves, strict=True))
    errors = tuple(statistics.stdev(column) for column in columns) if len(each.entries) > 1 else None
    means = tuple(statistics.mean(column) for column in columns)
    return Line(each.name, each.label, tuple(range(1, len(means) + 1)), means, errors, len(each.entries))


def accuracy_chart(panel: Panel) -> Lines:
    """The method, with its add-ons, its oracle and joint training."""
    note = (
        "Mean over seeds; the band is one standard deviation." if any(len(g.entries) > 1 for g in panel.groups) else ""
    )
    return Lines(
        f"{panel.slug}-accuracy", panel.title, "tasks learned", "accuracy on the classes seen, %",
        tuple(curve(each) for each in panel.groups), (curve(panel.joint),) if panel.joint else (), note=note,
    )  # fmt: skip


def heat_charts(panel: Panel) -> list[Heat]:
    """A matrix for each group of a panel, all on one scale."""
    groups = [each for each in panel.groups if len(each.matrix) > 1]
    values = [value for each in groups for row in each.matrix for value in row]
    made = []
    for number, each in enumerate(groups):
        seeds = f"Mean of {len(each.entries)} seeds" if len(each.entries) > 1 else "One seed"
        note = f"{seeds}; dark blue is {min(values):.0f} %, yellow {max(values):.0f} %."
        matrix = tuple(tuple(row) for row in each.matrix)
        slug = f"{panel.slug}-matrix-{number + 1}"
        made.append(Heat(slug, f"{each.label}, {panel.stream}", each.label, matrix, min(values), max(values), note))
    return made


def last_chart(stream: Stream, groups: Sequence[Group]) -> Bars | None:
    """Accuracy after the last task, with the paper's value marked where it has one."""
    bars = []
    for each in groups:
        if each.stream != stream or each.first.addon_changes:
            continue
        values = each.metric("LA")
        record = each.first.record
        theirs = paper_rows(stream.dataset, record["method"]).get(each.name, {})
        known = theirs.get(stream.tasks) if is_standard(record) else None
        changes = host_text(each.first)
        label = each.label + (f" ({changes})" if changes else "")
        mean = statistics.mean(values)
        bars.append(
            Bar(each.name, label, mean, deviation(values), len(values), None if known is None else known[1])
        )  # fmt: skip
    title = f"{stream}: accuracy after the last task"
    note = bar_note(bars, "Whiskers: one standard deviation over seeds.")
    return Bars(f"{stream.slug}-last", title, "LA, %", tuple(bars), "%", note=note) if bars else None


def bar_note(bars: Sequence[Bar], whiskers: str) -> str:
    """What the marks on bars mean, of those that are there."""
    told = [whiskers] if any(bar.error is not None for bar in bars) else []
    told += ["Diamonds: the paper's value."] if any(bar.paper is not None for bar in bars) else []
    return " ".join(told)


def switch_charts(groups: Sequence[Group]) -> list[Bars]:
    """What other settings of an add-on do to LA, those left out that a line of `sweep_charts` shows; paired by seed."""
    lined = [each for sweep in sweeps(groups) for each in sweep.groups]
    made = []
    for usual in groups:
        others = [
            each for each in groups
            if (each.stream, each.name) == (usual.stream, usual.name) and each not in lined
            and each.first.changes and each.first.changes == each.first.addon_changes
        ]  # fmt: skip
        if usual.first.changes:
            continue
        known = {entry.seed: entry.record["metrics"]["LA"] for entry in usual.entries}
        bars = []
        for each in others:
            pairs = [e.record["metrics"]["LA"] - known[e.seed] for e in each.entries if e.seed in known]
            if pairs:
                apart = Comparison(tuple(pairs), None)
                label = settings_text(each.first.changes)
                bars.append(Bar(each.name, label, statistics.mean(pairs), apart.error, len(pairs)))
        slug = f"{usual.stream.slug}-{usual.name.replace(' + ', '-')}-switches"
        title = f"{style.label(usual.name)} on {usual.stream}: other settings"
        note = ("Paired by seed. " + bar_note(bars, "Whiskers: standard error.")).strip()
        made.append(Bars(slug, title, "LA minus that of the preset, points", tuple(bars), "points", True, note))
    return [chart for chart in made if chart.bars]


def gain_charts(dataset: str, entries: Sequence[Entry]) -> list[Bars]:
    """IVT's gain in LA and in FM for every host and number of increments."""
    found = compare_gains(dataset, [entry.record for entry in entries])
    made = []
    for place, metric, better in ((1, "LA", "more"), (2, "FM", "less")):
        bars = [gain_bar(host, tasks, values[place]) for (host, tasks), values in found.items() if values[place].ours]
        if bars:
            made.append(
                Bars(
                    f"{dataset}-gain-{metric}",
                    f"{style.dataset(dataset)}: what IVT adds to {metric} ({better} is better)",
                    f"{metric} with IVT minus {metric} without, points", tuple(bars), "points", signed=True,
                    note=("Paired by seed. " + bar_note(bars, "Whiskers: standard error.")).strip(),
                )
            )  # fmt: skip
    return made


def gain_bar(host: str, tasks: int, value: Comparison) -> Bar:
    mean = statistics.mean(value.ours)
    return Bar(f"{host} + ivt", f"{style.label(host)}, {tasks} incr.", mean, value.error, len(value.ours), value.paper)


def time_chart(stream: Stream, groups: Sequence[Group]) -> Bars | None:
    """Training time without the base task. No record tells whether its run had the device to itself, so only those
    below a folder of the sweep's name count: `incvec sweep training-time --at-once 1 --out runs/training-time`."""
    alone = [Group(own) for each in groups if (own := tuple(e for e in each.entries if TIMED in Path(e.path).parts))]
    bars = [
        Bar(each.name, each.label, statistics.mean(each.seconds), deviation(each.seconds), len(each.seconds))
        for each in alone
        if each.stream == stream and each.seconds and not each.first.changes
        and each.first.record["method"] != "joint"
    ]  # fmt: skip
    note = f"Of the runs below a folder `{TIMED}`. Evaluation and the shared base task left out."
    title = f"{stream}: training time after the base task"
    return Bars(f"{stream.slug}-time", title, "seconds", tuple(bars), "s", note=note) if bars else None


@dataclass(frozen=True)
class Sweep:
    """Groups that differ in one number alone."""

    stream: Stream
    name: str
    setting: str
    points: tuple[tuple[float, Group], ...]  # in the order of their values
    unset: Group | None  # the setting is none: an interval is then the stage
    plain: Group | None  # without the add-on whose setting it is

    @property
    def groups(self) -> list[Group]:
        return [each for each in (*(each for _, each in self.points), self.unset, self.plain) if each is not None]

    @property
    def levels(self) -> list[tuple[str, Group]]:
        """What has no place along the axis, with its label."""
        made = [] if self.plain is None else [(self.plain.label, self.plain)]
        unset = UNSET.get(self.setting, f"{self.setting.rpartition('.')[2]} none")
        return made + ([] if self.unset is None else [(f"{style.label(self.name)}, {unset}", self.unset)])


def sweeps(groups: Sequence[Group]) -> list[Sweep]:
    """Every setting of which there are at least two numbers, the preset's among them."""
    found: dict[tuple[Stream, str, str], list[Group]] = {}
    usual = {(each.stream, each.name): each for each in groups if not each.first.changes}
    for each in groups:
        if len(each.first.changes) == 1 and (setting := next(iter(each.first.changes))) != "order_seed":
            found.setdefault((each.stream, each.name, setting), []).append(each)
    made = []
    for (stream, name, setting), own in found.items():
        own += [usual[stream, name]] if (stream, name) in usual else []
        values = [(setting_of(each, setting), each) for each in own]
        points = sorted(((float(v), each) for v, each in values if is_number(v)), key=lambda point: point[0])
        if len(points) > 1:
            unset = next((each for value, each in values if value is None), None)
            record = own[0].first.record
            rest = [addon for addon in record["addons"] if addon != setting.partition(".")[0]]
            plain = usual.get((stream, title({**record, "addons": rest}))) if rest != record["addons"] else None
            made.append(Sweep(stream, name, setting, tuple(points), unset, plain))
    return made


def setting_of(each: Group, setting: str) -> Any:
    section, _, key = setting.rpartition(".")
    config = each.first.record["config"]
    return (config.get(section, {}) if section else config).get(key, "")


def sweep_charts(groups: Sequence[Group]) -> list[Lines]:
    """AA, LA and FM against a setting (the IVT interval, the memory), a line for each run that it was changed for."""
    charts: dict[tuple[Stream, str], list[Sweep]] = {}
    for sweep in sweeps(groups):
        charts.setdefault((sweep.stream, sweep.setting), []).append(sweep)
    return [
        Lines(
            f"{stream.slug}-{setting.replace('.', '-')}-{metric}", f"{stream}: {metric} against {setting}", setting,
            f"{metric}, %", tuple(sweep_line(sweep, metric) for sweep in own),
            tuple(level for sweep in own for level in sweep_levels(sweep, metric)),
            log=all(x > 0 for sweep in own for x, _ in sweep.points),
        )
        for (stream, setting), own in charts.items() for metric in METRICS
        if all(each.metric(metric) for sweep in own for each in sweep.groups)
    ]  # fmt: skip


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def sweep_line(sweep: Sweep, metric: str) -> Line:
    values = [sweep_values(sweep, each, metric) for _, each in sweep.points]
    several = all(len(v) > 1 for v in values)
    return Line(
        sweep.name, style.label(sweep.name), tuple(x for x, _ in sweep.points), tuple(map(statistics.mean, values)),
        tuple(map(statistics.stdev, values)) if several else None, min(map(len, values)),
    )  # fmt: skip


def sweep_levels(sweep: Sweep, metric: str) -> Iterator[Line]:
    for label, each in sweep.levels:
        values = sweep_values(sweep, each, metric)
        errors = (statistics.stdev(values),) if len(values) > 1 else None
        yield Line(each.name, label, (1.0,), (statistics.mean(values),), errors, len(values))


def sweep_values(sweep: Sweep, each: Group, metric: str) -> list[float]:
    """Of those seeds that all of a sweep share, where they share any: else one would compare seeds."""
    shared = set.intersection(*({entry.seed for entry in own.entries} for own in sweep.groups))
    return [
        float(entry.record["metrics"][metric]) for entry in each.entries
        if (entry.seed in shared or not shared) and entry.record["metrics"][metric] is not None
    ]  # fmt: skip


def look(name: str) -> dict[str, Any]:
    """What the page's script needs to draw a name."""
    run = style.run_style(name)
    return {"color": run.color, "marker": run.marker, "dashes": list(run.dashes), "hollow": run.hollow}
