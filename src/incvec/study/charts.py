"""The charts of a report as data: `incvec.study.figures` draws them for print, page.js on the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from incvec.file_names import safe_name
from incvec.records import title
from incvec.study import style
from incvec.study.groups import Group, Panel, Stream
from incvec.study.paper import METRICS, Comparison, compare_gains, is_standard, paper_rows
from incvec.study.runs import RunRecord, run_command, settings_text

UNSET_LABELS = {"ivt.interval": "only at the end"}  # meaning of a setting that is None
TIMED_SWEEP = "training-time"  # its runs have the device to themselves


@dataclass(frozen=True)
class Line:
    """A series in the style of its run; `errors` are standard deviations over seeds, None for a single seed."""

    name: str  # the run's title, such as `podnet + ivt`
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    errors: tuple[float, ...] | None
    seeds: int
    other_x: tuple[float, ...] = ()  # the same points on the chart's other axis, if it has one


@dataclass(frozen=True)
class Bar:
    name: str
    label: str
    value: float
    error: float | None
    seeds: int
    paper: float | None = None


@dataclass(frozen=True)
class BaseChart:
    slug: str  # HTML id and file name
    title: str
    commands: tuple[str, ...] = field(default=(), kw_only=True)  # of the runs that it shows

    def __post_init__(self) -> None:
        object.__setattr__(self, "slug", safe_name(self.slug))


@dataclass(frozen=True)
class Lines(BaseChart):
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    levels: tuple[Line, ...] = ()  # horizontal lines: joint training, the host of an add-on
    log: bool = False
    dense: bool = False  # many points: only the last has a marker
    note: str = ""
    unit: str = " %"
    other_x_label: str = ""
    x_names: tuple[str, ...] = ()  # of x = 0, 1, 2, ...
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Bars(BaseChart):
    x_label: str
    bars: tuple[Bar, ...]
    unit: str
    signed: bool = False
    note: str = ""
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True)
class Heat(BaseChart):
    """A matrix in percent: accuracy by task learned (rows) and task tested, or a confusion matrix."""

    label: str
    matrix: tuple[tuple[float, ...], ...]
    low: float
    high: float
    note: str = ""
    x_label: str = "tested on task"
    y_label: str = "after learning task"
    cell_text: str = "after task {row}, on task {column}"
    names: tuple[str, ...] = ()  # of rows and columns; numbers from 1 without
    kind: Literal["heat"] = "heat"


@dataclass(frozen=True)
class Mark:
    """A model in a plane."""

    name: str
    label: str
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Plane(BaseChart):
    """Loss on a grid, with models as marks; the page has a picture of its own for it."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]  # one row per y
    marks: tuple[Mark, ...]
    x_label: str = "distance along u"
    y_label: str = "distance along v"
    note: str = ""
    kind: Literal["plane"] = "plane"


Chart = Lines | Bars | Heat | Plane


def make_line(name: str, label: str, x: Sequence[float], samples: Sequence[Sequence[float]]) -> Line:
    """Mean and standard deviation of the samples at each x, one sample per seed."""
    errors = tuple(map(statistics.stdev, samples)) if all(len(values) > 1 for values in samples) else None
    return Line(name, label, tuple(x), tuple(map(statistics.mean, samples)), errors, min(map(len, samples)))


def make_bar(name: str, label: str, values: Sequence[float], paper: float | None = None) -> Bar:
    """Mean and standard deviation over seeds."""
    error = statistics.stdev(values) if len(values) > 1 else None
    return Bar(name, label, statistics.mean(values), error, len(values), paper)


def bar_note(bars: Sequence[Bar], whiskers: str) -> str:
    """The meaning of the marks that are present."""
    notes = [whiskers] if any(bar.error is not None for bar in bars) else []
    notes += ["Diamonds: the paper's value."] if any(bar.paper is not None for bar in bars) else []
    return " ".join(notes)


def gain_chart(
    slug: str, heading: str, axis: str, gains: Mapping[tuple[str, str], Comparison], commands: Iterable[str]
) -> list[Bars]:
    """Means of paired differences by (name, label), with standard errors; an empty list if there are none."""
    bars = tuple(
        Bar(*names, statistics.mean(gain.ours), gain.error, len(gain.ours), gain.paper)
        for names, gain in gains.items()
        if gain.ours
    )
    note = f"Paired by seed. {bar_note(bars, 'Whiskers: standard error.')}".strip()
    shown = tuple(dict.fromkeys(commands))
    return [Bars(slug, heading, axis, bars, "points", True, note, commands=shown)] if bars else []


def commands_of(groups: Iterable[Group]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(command for group in groups for command in group.commands))


def accuracy_curve(group: Group) -> Line:
    """Accuracy after each task; the base is task 1."""
    samples = list(zip(*group.curves, strict=True))
    return make_line(group.title, group.label, range(1, len(samples) + 1), samples)


def accuracy_chart(panel: Panel) -> Lines:
    """The method with its add-ons, its oracle and joint training."""
    several = any(len(group.runs) > 1 for group in panel.groups)
    return Lines(
        f"{panel.name}-accuracy", panel.title, "tasks learned", "accuracy on the classes seen, %",
        tuple(map(accuracy_curve, panel.groups)), (accuracy_curve(panel.joint),) if panel.joint else (),
        note="Mean over seeds; the band is one standard deviation." if several else "",
        commands=commands_of((*panel.groups, *([panel.joint] if panel.joint else []))),
    )  # fmt: skip


def heat_charts(panel: Panel) -> list[Heat]:
    """One matrix per group of a panel, all on one scale."""
    groups = [group for group in panel.groups if len(group.matrix) > 1]
    values = [value for group in groups for row in group.matrix for value in row]
    charts = []
    for number, group in enumerate(groups, 1):
        seeds = f"Mean of {len(group.runs)} seeds" if len(group.runs) > 1 else "One seed"
        charts.append(
            Heat(
                f"{panel.name}-matrix-{number}", f"{group.label}, {panel.stream}", group.label,
                tuple(map(tuple, group.matrix)), min(values), max(values),
                f"{seeds}; dark blue is {min(values):.0f} %, yellow {max(values):.0f} %.", commands=group.commands,
            )
        )  # fmt: skip
    return charts


def last_accuracy_chart(stream: Stream, groups: Sequence[Group]) -> Bars | None:
    """Accuracy after the last task, with the paper's value marked if it has one."""
    bars, drawn = [], []
    presets = {(group.stream, group.title) for group in groups if not group.first.addon_changes}
    for group in groups:
        # Other settings of an add-on are compared with its preset in `settings_charts`.
        if group.stream != stream or (group.first.addon_changes and (group.stream, group.title) in presets):
            continue
        drawn.append(group)
        paper = paper_rows(stream.dataset, group.record["method"]).get(group.title, {}).get(stream.tasks)
        label = group.label + (f" ({group.host_settings})" if group.host_settings else "")
        known = paper is not None and is_standard(group.record)
        bars.append(make_bar(group.title, label, group.metric("LA"), paper[1] if paper and known else None))
    note = bar_note(bars, "Whiskers: one standard deviation over seeds.")
    heading = f"{stream}: accuracy after the last task"
    commands = commands_of(drawn)
    return (
        Bars(f"{stream.name}-last", heading, "LA, %", tuple(bars), "%", note=note, commands=commands) if bars else None
    )


def settings_charts(groups: Sequence[Group]) -> list[Bars]:
    """LA with other settings of an add-on minus LA with its preset's, paired by seed; settings that `sweep_charts`
    shows as a line are left out."""
    in_lines = [group for sweep in find_sweeps(groups) for group in sweep.groups]
    charts: list[Bars] = []
    for preset in groups:
        if preset.first.changes:
            continue
        reference = {run.seed: run.record["metrics"]["LA"] for run in preset.runs}
        gains, drawn = {}, [preset]
        for group in groups:
            changes = group.first.changes
            same = (group.stream, group.title) == (preset.stream, preset.title) and group not in in_lines
            if not same or not changes or changes != group.first.addon_changes:
                continue
            paired = [r.record["metrics"]["LA"] - reference[r.seed] for r in group.runs if r.seed in reference]
            gains[group.title, settings_text(changes)] = Comparison(tuple(paired))
            drawn.append(group)
        slug = f"{preset.stream.name}-{preset.title.replace(' + ', '-').replace(' ', '-')}-settings"
        heading = f"{style.label(preset.title)} on {preset.stream}: other settings"
        charts += gain_chart(slug, heading, "LA minus that of the preset, points", gains, commands_of(drawn))
    return charts


def gain_charts(dataset: str, runs: Sequence[RunRecord]) -> list[Bars]:
    """IVT's gain in LA and in FM for every host and number of increments."""
    gains = compare_gains(dataset, [run.record for run in runs])
    compared = {(title, tasks) for host, tasks in gains for title in (host, f"{host} + ivt")}
    drawn = [run for run in runs if (run.title, run.record["tasks"]) in compared and is_standard(run.record)]
    commands = [run_command(run.record["config"]) for run in drawn]
    charts: list[Bars] = []
    for place, metric, better in ((1, "LA", "more"), (2, "FM", "less")):
        named = {(f"{host} + ivt", f"{style.label(host)}, {n} incr."): own[place] for (host, n), own in gains.items()}
        heading = f"{style.dataset(dataset)}: what IVT adds to {metric} ({better} is better)"
        axis = f"{metric} with IVT minus {metric} without, points"
        charts += gain_chart(f"{dataset}-gain-{metric}", heading, axis, named, commands)
    return charts


def time_chart(stream: Stream, groups: Sequence[Group]) -> Bars | None:
    """Training time without the base task, of runs that had the device to themselves: those below a folder with the
    name of the sweep, `incvec sweep training-time --at-once 1 --out runs/training-time`."""
    bars: list[Bar] = []
    commands: list[str] = []
    for group in groups:
        timed = Group(tuple(run for run in group.runs if TIMED_SWEEP in Path(run.path).parts))
        if group.stream == stream and not group.first.changes and group.record["method"] != "joint" and timed.seconds:
            bars.append(make_bar(group.title, group.label, timed.seconds))
            commands += timed.commands
    note = f"Runs below a folder `{TIMED_SWEEP}`, without evaluation and the shared base task."
    heading = f"{stream}: training time after the base task"
    if not bars:
        return None
    return Bars(f"{stream.name}-time", heading, "seconds", tuple(bars), "s", note=note, commands=tuple(commands))


@dataclass(frozen=True)
class SettingSweep:
    """Groups that differ in one number only."""

    stream: Stream
    title: str
    setting: str
    points: tuple[tuple[float, Group], ...]  # sorted by value
    unset: Group | None  # the setting is None
    plain: Group | None  # without the add-on that has the setting

    @property
    def groups(self) -> list[Group]:
        return [group for group in (*(group for _, group in self.points), self.unset, self.plain) if group is not None]

    def line(self, metric: str) -> Line:
        samples = [self.values(group, metric) for _, group in self.points]
        return make_line(self.title, style.label(self.title), [x for x, _ in self.points], samples)

    def levels(self, metric: str) -> list[Line]:
        """Groups without a place on the axis."""
        unset = UNSET_LABELS.get(self.setting, f"{self.setting.rpartition('.')[2]} none")
        labeled = [] if self.plain is None else [(self.plain.label, self.plain)]
        labeled += [] if self.unset is None else [(f"{style.label(self.title)}, {unset}", self.unset)]
        return [make_line(group.title, label, [1.0], [self.values(group, metric)]) for label, group in labeled]

    def values(self, group: Group, metric: str) -> list[float]:
        """Of the seeds that all groups share, if they share any, so that settings are compared and not seeds."""
        shared = set.intersection(*({run.seed for run in each.runs} for each in self.groups))
        runs = [run for run in group.runs if run.seed in shared or not shared]
        return [float(v) for run in runs if (v := run.record["metrics"][metric]) is not None]


def find_sweeps(groups: Sequence[Group]) -> list[SettingSweep]:
    """Every setting with runs of at least two numbers, the preset's included."""
    changed: dict[tuple[Stream, str, str], list[Group]] = {}
    presets = {(group.stream, group.title): group for group in groups if not group.first.changes}
    for group in groups:
        if len(group.first.changes) == 1 and (setting := next(iter(group.first.changes))) != "order_seed":
            changed.setdefault((group.stream, group.title, setting), []).append(group)
    sweeps = []
    for (stream, name, setting), members in changed.items():
        members += [presets[stream, name]] if (stream, name) in presets else []
        section, _, key = setting.rpartition(".")
        configs = [group.record["config"] for group in members]
        values = [(config.get(section, {}) if section else config).get(key, "") for config in configs]
        numbers = [(float(x), group) for x, group in zip(values, members, strict=True) if type(x) in (int, float)]
        if len(numbers) > 1:
            points = sorted(numbers, key=lambda point: point[0])
            unset = members[values.index(None)] if None in values else None
            record = members[0].record
            others = [addon for addon in record["addons"] if addon != section]
            host = presets.get((stream, title({**record, "addons": others})))
            plain = host if others != record["addons"] else None
            sweeps.append(SettingSweep(stream, name, setting, tuple(points), unset, plain))
    return sweeps


def sweep_charts(groups: Sequence[Group]) -> list[Lines]:
    """AA, LA and FM against a setting (the IVT interval, the memory), one line per run that it was changed for."""
    sweeps: dict[tuple[Stream, str], list[SettingSweep]] = {}
    for sweep in find_sweeps(groups):
        sweeps.setdefault((sweep.stream, sweep.setting), []).append(sweep)
    return [
        Lines(
            f"{stream.name}-{setting.replace('.', '-')}-{metric}", f"{stream}: {metric} against {setting}", setting,
            f"{metric}, %", tuple(sweep.line(metric) for sweep in members),
            tuple({level.label: level for sweep in members for level in sweep.levels(metric)}.values()),
            log=all(x > 0 for sweep in members for x, _ in sweep.points),
            commands=commands_of(group for sweep in members for group in sweep.groups),
        )
        for (stream, setting), members in sweeps.items() for metric in METRICS
        if all(group.metric(metric) for sweep in members for group in sweep.groups)
    ]  # fmt: skip
