"""Tables of REPRODUCED.md about runs of packaged sweeps: other settings than the default, and oracles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from incvec.presets import changed_settings, resolve
from incvec.records import title
from incvec.study import paper
from incvec.study.comparisons import NOT_RUN, metric_cells
from incvec.study.paper import METRICS, BySeed, Records
from incvec.study.runs import Record, pair_with_oracle, row_name, seed_of, settings_key, settings_text
from incvec.study.tables import Cell, Table, make_row, mean, number

Config = Mapping[str, Any]  # resolved
OTHER_BASE = "† Started from another base task than its host, despite the same seed: the gain includes that difference."


def configs_of(sweeps: Iterable[str], dataset: str) -> list[Config]:
    """The runs of sweeps on a data set, each once, whatever its seeds."""
    configs = (config.resolved() for sweep in sweeps for config in paper.sweep_configs(sweep))
    return list({settings_key(config): config for config in configs if config["dataset"] == dataset}.values())


def default_of(config: Config, *addons: str) -> Config:
    """The run with the settings of its row in the paper's table."""
    given = {key: config[key] for key in ("method", "dataset", "tasks")} | {"addons": list(addons)}
    return resolve({**given, "variant": paper.row_variant(config["dataset"], row_name(given))}).resolved()


def without_addons(config: Config) -> Config:
    return {key: value for key, value in config.items() if key not in config["addons"]} | {"addons": []}


def settings_table(sweeps: Sequence[str], dataset: str, records: Records) -> Table | None:
    """Runs of sweeps with other settings than the default, below the paper's numbers and the default itself.

    A run with add-ons is compared with the same run without them, any other with the default, both paired by seed. All
    rows of a run are of the seeds that one of its other settings was run with. A dagger marks runs that started from
    another base task than the one they are compared with. The note lists what was not run.
    """
    members: dict[tuple[str, int], list[Config]] = {}
    for config in configs_of(sweeps, dataset):
        members.setdefault((row_name(config), config["tasks"]), []).append(config)
    rows: list[list[str | Cell]] = []
    other_base, missing = False, []
    for (name, tasks), configs in members.items():
        default = default_of(configs[0], *configs[0]["addons"])
        others = [config for config in configs if settings_key(config) != settings_key(default)]
        run = [config for config in others if paper.records_of(config, records)]
        if left := [f"`{settings_text(changed_settings(config))}`" for config in others if config not in run]:
            missing.append(f"{name}, {tasks} tasks: {'; '.join(left)}")
        if others and not run:
            continue
        seeds = {seed_of(record) for config in run for record in paper.records_of(config, records)}
        rows.append([name, number(tasks, "d"), "the paper", "3", *paper_cells(dataset, name, tasks)])
        for config in (default, *run):
            own = [r for r in paper.records_of(config, records) if not seeds or seed_of(r) in seeds]
            reference: list[Record] = []
            if config["addons"] or config is not default:
                reference = paper.records_of(without_addons(config) if config["addons"] else default, records)
            dagger = " †" if config["addons"] and has_other_base(own, reference) else ""
            other_base |= bool(dagger)
            setting = "default" if config is default else f"`{settings_text(changed_settings(config))}`"
            cells = compared_cells(paper.by_seed(own), paper.by_seed(reference), published(dataset, name, tasks))
            rows.append([name, number(tasks, "d"), setting + dagger, str(len(own)), *cells])
    labels = (label for metric in METRICS for label in (metric, "gain", "vs paper"))
    columns = ["run", "tasks", "setting", "seeds", *labels, "clipped"]
    notes = [OTHER_BASE] * other_base + ([f"Not run: {'. '.join(missing)}."] if missing else [])
    return Table(columns, rows, note="\n\n".join(notes)) if rows or missing else None


def published(dataset: str, row: str, tasks: int) -> Sequence[float | None]:
    values: Sequence[float | None] = paper.paper_tables("scratch")[dataset]["rows"].get(row, {}).get(tasks, [None] * 3)
    return values


def paper_cells(dataset: str, row: str, tasks: int) -> list[Cell]:
    """The paper's numbers, and its gain of IVT over the host."""
    host = row.removesuffix(" + ivt")
    cells = []
    for ours, plain in zip(published(dataset, row, tasks), published(dataset, host, tasks), strict=True):
        gain = paper.subtract(ours, plain) if host != row else None
        cells += [number(ours, missing=""), number(gain, "+.2f", ""), Cell()]
    return [*cells, Cell()]


def compared_cells(cell: BySeed, reference: BySeed, theirs: Sequence[float | None]) -> list[Cell]:
    """For each metric ours, the paired difference to the reference, and the difference to the paper's."""
    cells = []
    *compared, clipped = paper.compare_cell(cell, theirs)
    for ours, gain in zip(compared, paper.paired_gains(cell, reference), strict=False):
        paired = f" ({len(gain.ours)})" if 0 < len(gain.ours) < len(cell) else ""  # seeds with something to compare
        text = mean(gain.ours, "+.2f", error=True, missing="").text + paired
        cells += [mean(ours.ours, missing=NOT_RUN), Cell(text, gain.mean), number(ours.difference, "+.2f", "")]
    return [*cells, mean(clipped.ours, missing="")]


def has_other_base(records: Iterable[Record], reference: Iterable[Record]) -> bool:
    """Whether a run started from another base task than that of the reference with the same seed."""
    base = {seed_of(record): record["accuracy"][0][0] for record in reference}
    pairs = ((base.get(seed_of(record)), record["accuracy"][0][0]) for record in records)
    return any(expected is not None and not paper.same_base(expected, value) for expected, value in pairs)


def bounds_table(sweeps: Sequence[str], dataset: str, records: Records) -> Table | None:
    """Every method with an oracle, without and with IVT, its oracle, and joint training; the paper has no numbers."""
    configs = configs_of(sweeps, dataset)
    shown: list[Config] = []
    missing = []
    for bound in sorted(configs, key=lambda c: (not c["oracle"], c["method"], c["tasks"])):
        if bound["oracle"] or bound["method"] == "joint":
            if not paper.records_of(bound, records):
                missing.append(title(bound) + (f", {bound['tasks']} tasks" if bound["oracle"] else ""))
            elif bound["oracle"]:
                shown += [default_of(bound), default_of(bound, "ivt"), bound]
            else:
                shown.append(bound)
    members = [paper.records_of(config, records) for config in shown]
    every = [record for own in members for record in own]
    closed = {id(record): gap.closed for record, gap in zip(every, pair_with_oracle(every), strict=True) if gap}
    rows = []
    for config, own in zip(shown, members, strict=True):
        shares = [100 * share for record in own if (share := closed.get(id(record))) is not None]
        gap = mean(shares, ".0f", error=True, missing="").text + (" %" if shares else "")
        gap += f" ({len(shares)} of {len(own)} seeds)" if 0 < len(shares) < len(own) else ""
        length = "1" if config["method"] == "joint" else str(config["tasks"])
        rows.append(make_row(title(config), length, *metric_cells(paper.by_seed(own)), gap))
    note = f"Not run: {'; '.join(missing)}." if missing else ""
    return Table(["run", "tasks", *METRICS, "clipped", "gap closed"], rows, note=note) if rows or missing else None
