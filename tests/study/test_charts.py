"""Groups of runs, and the charts made from them."""

from __future__ import annotations

from typing import Any

import pytest

from incvec.study import charts, figures, style
from incvec.study.groups import group_runs, make_panels
from tests.study.samples import runs_of, sample, study


def test_panels_contain_what_belongs_together() -> None:
    panels = {panel.title: panel for panel in make_panels(group_runs(runs_of(study())))}
    assert list(panels) == [
        "PODNet on CIFAR-100, 5 increments",
        "PODNet on CIFAR-100, 5 increments, podnet.memory=5",
        "MRFA on CIFAR-100, 25 increments",
    ]
    first = panels["PODNet on CIFAR-100, 5 increments"]
    # The interval sweep has a chart of its own.
    assert [group.label for group in first.groups] == ["PODNet", "PODNet + EOPC", "PODNet + IVT", "PODNet oracle"]
    assert [len(group.runs) for group in first.groups] == [3, 1, 3, 3]
    assert all(panel.joint is not None for panel in panels.values())


def test_joint_training_from_scratch_is_not_a_bound_of_pretrained_models() -> None:
    records = {"joint": sample("joint"), "scratch": sample(), "flyp": sample("flyp", variant="lite")}
    joint = {panel.first.label: panel.joint for panel in make_panels(group_runs(runs_of(records)))}
    assert [name for name, group in joint.items() if group is not None] == ["PODNet"]
    assert len(joint) == 2


def test_another_class_order_is_not_another_seed() -> None:
    groups = group_runs(runs_of({"a": sample(), "b": sample(fall=9.0, order_seed=7)}))
    assert [(g.first.host_changes, len(g.runs)) for g in groups] == [({}, 1), ({"order_seed": 7}, 1)]
    assert len(make_panels(groups)) == 2
    assert charts.sweep_charts(groups) == []


def test_curves_and_matrices_are_means_over_seeds() -> None:
    records = {str(s): sample(seed=s) for s in range(2)}
    (panel,) = make_panels(group_runs(runs_of(records)))
    (line,) = charts.accuracy_chart(panel).lines
    pair = [records[str(s)]["metrics"]["a"] for s in range(2)]
    assert line.x == (1, 2, 3, 4, 5, 6)
    assert line.y == pytest.approx([(a + b) / 2 for a, b in zip(*pair, strict=True)])
    assert line.errors == pytest.approx([abs(a - b) / 2**0.5 for a, b in zip(*pair, strict=True)])
    (heat,) = charts.heat_charts(panel)
    last = [records[str(s)]["accuracy"][5][2] for s in range(2)]
    assert heat.matrix[5][2] == pytest.approx(sum(last) / 2)
    assert [len(row) for row in heat.matrix] == [1, 2, 3, 4, 5, 6]


def test_sweep_of_a_setting_includes_the_preset() -> None:
    by_slug = {chart.slug: chart for chart in charts.sweep_charts(group_runs(runs_of(study())))}
    assert set(by_slug) == {
        f"cifar100-5-{setting}-{metric}"
        for setting in ("ivt-interval", "podnet-memory")
        for metric in ("AA", "LA", "FM")
    }
    (line,) = by_slug["cifar100-5-ivt-interval-LA"].lines
    assert line.x == (1, 5, 10, 40)
    assert line.y[0] == sample("podnet", "ivt", fall=3.4)["metrics"]["LA"]
    # The preset's value has three seeds, the others one: only the seed they share is compared.
    assert line.y[2] == sample("podnet", "ivt", fall=3.2)["metrics"]["LA"]
    assert line.errors is None
    for metric in ("AA", "LA", "FM"):
        plain, with_ivt = by_slug[f"cifar100-5-podnet-memory-{metric}"].lines
        assert (plain.label, with_ivt.label) == ("PODNet", "PODNet + IVT")
        assert plain.y[0] == sample(fall=5.0)["metrics"][metric]


def test_interval_sweep_shows_the_host_and_ivt_at_the_end_only() -> None:
    records = {name: record for name, record in study().items() if name.startswith(("podnet-0", "podnet+ivt", "int"))}
    records["end"] = sample("podnet", "ivt", fall=3.9, ivt={"interval": None})
    records["stages"] = sample("podnet", "ivt", fall=3.7, ivt={"fisher_loss": "own"})
    groups = group_runs(runs_of(records))
    chart = {chart.slug: chart for chart in charts.sweep_charts(groups)}["cifar100-5-ivt-interval-LA"]
    assert chart.lines[0].x == (1, 5, 10, 40)
    assert [(level.label, level.y) for level in chart.levels] == [
        ("PODNet", (sample()["metrics"]["LA"],)),
        ("PODNet + IVT, only at the end", (records["end"]["metrics"]["LA"],)),
    ]
    (bars,) = charts.settings_charts(groups)
    assert [bar.label for bar in bars.bars] == ["ivt.fisher_loss=own"]  # the interval is not shown twice
    figures.draw_chart(chart)


def test_settings_are_differences_from_the_preset() -> None:
    records = {"a": sample("podnet", "ivt"), "b": sample("podnet", "ivt", seed=1)}
    records["c"] = sample("podnet", "ivt", fall=3.0, ivt={"fisher_loss": "own"})
    records["d"] = sample("podnet", "ivt", fall=3.5, ivt={"interval": 20})
    (chart,) = charts.settings_charts(group_runs(runs_of(records)))
    assert [bar.label for bar in chart.bars] == ["ivt.fisher_loss=own"]
    assert chart.bars[0].value == records["c"]["metrics"]["LA"] - records["a"]["metrics"]["LA"]
    assert chart.bars[0].error is None
    del records["c"]  # numbers are drawn as a line
    assert charts.settings_charts(group_runs(runs_of(records))) == []


def test_notes_explain_the_marks_that_are_present() -> None:
    with_paper, with_error = (charts.Bar("podnet", "PODNet", 1.0, *more) for more in ((None, 1, 2.0), (0.5, 1)))
    notes = [charts.bar_note(bars, "Whiskers.") for bars in ([with_paper], [with_error], [])]
    assert notes == ["Diamonds: the paper's value.", "Whiskers.", ""]


@pytest.mark.filterwarnings("error")
def test_long_labels_leave_space_for_the_bars() -> None:
    start = "PODNet + fisher-merge (start=/a/long/way/runs-of-mine/cifar100-podnet-5-s0/snapshots/task-00.safetensors)"
    bars = [charts.Bar("podnet", label, value, None, 1) for label, value in ((start, -1.25), ("PODNet", 2.0))]
    figure = figures.draw_chart(charts.Bars("slug", "Title", "LA", tuple(bars), "points", signed=True))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_position().width > 0.5
    long, short = (label.get_text() for label in axes.get_yticklabels())
    assert (long[-7:], short) == ("  −1.25", "PODNet  +2.00")
    assert "fisher-merge" in long  # its hyphen is not a minus
    above, below = (label.get_window_extent() for label in axes.get_yticklabels())
    assert above.y0 > below.y1


def time_chart(records: dict[str, dict[str, Any]]) -> charts.Bars | None:
    groups = group_runs(runs_of(records))
    return charts.time_chart(groups[0].stream, groups)


def test_time_is_of_the_timed_sweep_only_and_excludes_the_shared_base() -> None:
    shared = {"a": sample(), "b": sample("podnet", "ivt")}
    assert time_chart(shared) is None
    chart = time_chart({"training-time/a": sample(), "training-time/b": sample("podnet", "ivt"), "c": sample("replay")})
    assert chart is not None
    assert [(bar.label, bar.value) for bar in chart.bars] == [("PODNet", 5 * 40.0), ("PODNet + IVT", 5 * 41.0)]
    without = sample()
    del without["task_seconds"]
    assert time_chart({"training-time/a": without}) is None


def test_runs_of_a_panel_differ_in_more_than_color() -> None:
    names = ["podnet", "podnet + ivt", "podnet + eopc", "podnet oracle", "joint"]
    styles = [style.run_style(name) for name in names]
    assert len({(each.marker, each.hollow) for each in styles}) == len(names)
    assert len({each.color for each in styles}) == len(names)


def test_names_of_charts_are_safe_file_names() -> None:
    assert not {"/", " "} & set(charts.Bars("../a b", "Title", "LA", (), "%").slug)
