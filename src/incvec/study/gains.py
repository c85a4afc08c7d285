"""What add-ons add to their methods: differences between runs of the same seed, with their spread over the seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from incvec.study import style
from incvec.study.groups import Group, Stream
from incvec.study.paper import MEASURED, METRICS, Comparison, by_seed, paired_gains
from incvec.study.runs import settings_text
from incvec.study.tables import Cell, Column, Table, code, mean, number

MAX_SENTENCES = 4  # more comparisons than this are counted instead


@dataclass(frozen=True)
class Gain:
    """A method without and with add-ons, on the same stream and with the same settings of the method."""

    host: Group
    with_addons: Group

    @cached_property
    def metrics(self) -> dict[str, Comparison]:
        """AA, LA, FM and `fm_clipped` with the add-ons minus those without, by seed."""
        with_addons, host = (by_seed([run.record for run in g.runs]) for g in (self.with_addons, self.host))
        return dict(zip(MEASURED, paired_gains(with_addons, host), strict=True))

    @property
    def addon(self) -> str:
        """`IVT`, `IVT (interval 5)`."""
        return self.with_addons.label.removeprefix(f"{style.label(self.host.title)} + ")


def addon_gains(groups: Sequence[Group]) -> list[Gain]:
    """Every group with add-ons that has a plain one to compare with; oracles and held-out images are left out."""

    def host_key(group: Group) -> tuple[Stream, str, str]:
        return group.stream, group.record["method"], settings_text(group.first.host_changes)

    tested = [g for g in groups if not g.record["oracle"] and not g.record["config"].get("held_out")]
    plain = {host_key(group): group for group in tested if not group.record["addons"]}
    pairs = [Gain(plain[key], g) for g in tested if g.record["addons"] and (key := host_key(g)) in plain]
    return [gain for gain in pairs if gain.metrics["LA"].ours]


def gain_sentence(name: str, last: Comparison, forgetting: Comparison) -> str:
    """`IVT: last accuracy +2.6 ± 1.6, forgetting -5.2 ± 3.0, 3 seeds`."""
    texts = [mean(values.ours, "+.1f").text for values in (last, forgetting)]
    return f"{name}: last accuracy {texts[0]}, forgetting {texts[1]}, {count_seeds(len(last.ours))}"


def count_seeds(count: int) -> str:
    return f"{count} seeds" if count > 1 else "1 seed"


def headline(gains: Sequence[Gain]) -> list[str]:
    """The result in a few sentences: each comparison, or per add-on how many of them it improves."""
    if len(gains) <= MAX_SENTENCES:
        return [describe_gain(gain) for gain in gains]
    by_addon: dict[str, list[Gain]] = {}
    for gain in gains:
        if not gain.with_addons.first.addon_changes:
            by_addon.setdefault(gain.addon, []).append(gain)
    members = sorted(by_addon.items(), key=lambda item: -len(item[1]))
    return [describe_gain(own[0]) if len(own) == 1 else describe_gains(name, own) for name, own in members]


def describe_gain(gain: Gain) -> str:
    name = f"{gain.addon} with {style.label(gain.host.title)} on {gain.host.stream}"
    return gain_sentence(name, gain.metrics["LA"], gain.metrics["FM"])


def describe_gains(name: str, gains: Sequence[Gain]) -> str:
    """`IVT: last accuracy higher in 19 of 20 comparisons (mean +2.2), ...`."""
    last, forgetting = ([m for gain in gains if (m := gain.metrics[key].mean) is not None] for key in ("LA", "FM"))
    seeds = [len(gain.metrics["LA"].ours) for gain in gains]
    count = f"{min(seeds)} to {max(seeds)} seeds" if min(seeds) < max(seeds) else count_seeds(max(seeds))
    text = f"{name}: last accuracy higher in {sum(value > 0 for value in last)} of {len(last)} comparisons"
    text += f" (mean {statistics.mean(last):+.1f})"
    if forgetting:
        lower = sum(value < 0 for value in forgetting)
        text += f", forgetting lower in {lower} of {len(forgetting)} (mean {statistics.mean(forgetting):+.1f})"
    return f"{text}, {count} each"


def gains_table(gains: Sequence[Gain]) -> Table | None:
    """Every comparison."""
    rows = []
    for gain in gains:
        cells = [Cell(gain.addon), Cell(style.label(gain.host.title)), Cell(str(gain.host.stream))]
        cells += [code(settings_text(gain.host.first.host_changes), missing="")]
        cells += [number(len(gain.metrics["LA"].ours), "d")]
        rows.append([*cells, *(mean(gain.metrics[metric].ours, "+.2f") for metric in METRICS)])
    note = (
        "With the add-on minus without, by seed, in points: mean ± standard deviation of the differences. AA: accuracy "
        "averaged over the tasks; LA: after the last one (both: more is better); FM: forgetting (less is better)."
    )
    columns: list[Column | str] = ["add-on", "method", "data", "changed", *map(Column, ("seeds", *METRICS))]
    return Table(columns, rows, "What each add-on adds", note, "gains").without_empty_columns() if rows else None
