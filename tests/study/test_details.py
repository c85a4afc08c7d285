"""Losses, teleports and classes of a panel."""

from __future__ import annotations

from typing import Any

import pytest

from incvec.errors import DataError
from incvec.study import details, figures
from incvec.study.groups import Panel, group_runs, make_panels
from tests.study.samples import detailed, runs_of, sample


def panel_of(**changes: Any) -> Panel:
    records = {f"{s}": detailed(sample(seed=s)) | changes for s in (0, 1)}
    records |= {f"ivt-{s}": detailed(sample("podnet", "ivt", seed=s)) | changes for s in (0, 1)}
    (panel,) = make_panels(group_runs(runs_of(records)))
    return panel


def test_losses_are_summed_over_terms_and_averaged_over_seeds() -> None:
    chart = details.loss_chart(panel_of())
    assert chart is not None
    assert [line.label for line in chart.lines] == ["PODNet", "PODNet + IVT"]
    line = chart.lines[0]
    assert line.x[:5] == (1.0, 1.25, 1.5, 1.75, 2.0)  # 2.5 is in the middle of task 2
    assert line.y[:4] == pytest.approx([2.0 / e + 0.5 + 0.5 for e in range(1, 5)], abs=1e-4)
    assert len(line.x) == 3 * 4  # the main stages only
    figures.draw_chart(chart)


def test_long_loss_curves_are_thinned() -> None:
    record = sample()
    rows = [{"task": t, "stage": "main", "terms": {"ce": [1.0] * 160}} for t in range(26)]
    curve = details.loss_curve(record | {"losses": rows})
    assert len(curve) < 2 * details.MAX_POINTS
    assert (curve[0][0], curve[-1][0]) == (1.0, round(26 + 159 / 160, 4))


def test_teleports_are_shown_by_task_for_runs_that_have_them() -> None:
    scale, distance = details.panel_details(panel_of()).training[1:]
    (line,) = scale.lines
    assert (line.label, line.x, line.seeds) == ("PODNet + IVT", (2, 3), 2)
    assert line.y == pytest.approx((0.9, 0.8))
    assert distance.lines[0].y == pytest.approx((3.5, 2.5))
    assert distance.lines[0].errors == pytest.approx((0.5**0.5, 0.5**0.5))
    assert len(scale.commands) == 2
    assert all(command.startswith("incvec run --method podnet --addon ivt") for command in scale.commands)


def test_teleports_are_shown_one_by_one_for_records_that_have_them() -> None:
    def teleported(seed: int) -> dict[str, Any]:
        rows = {"of": 4, "epoch": [2, 4], "scale": [0.8, 0.7], "distance_before": [3.0, 2.0 + seed]}
        own = {"all": {"scale": 0.7, "distance": 1.5}, "teleports": rows | {"distance_after": [2.5, 1.5]}}
        return sample("podnet", "ivt", seed=seed) | {"statistics": [{"ivt": {}}, {"ivt": own}]}

    (panel,) = make_panels(group_runs(runs_of({str(seed): teleported(seed) for seed in (0, 1)})))
    drawn = {chart.slug: chart for chart in details.panel_details(panel).training}
    assert [slug.partition("-teleports-")[2] for slug in drawn] == ["scale", "distance"]  # and none by task
    scale, distance = (chart.lines[0] for chart in drawn.values())
    assert (scale.x, scale.y, scale.seeds) == ((2.5, 3.0), (0.8, 0.7), 2)
    assert distance.x == (2.0002, 2.5, 2.5001, 3.0, 3.0001)
    assert distance.y == (0.0, 3.0, 2.5, 2.5, 1.5)


def test_accuracy_by_class_has_names_and_tasks() -> None:
    table = details.class_table(panel_of())
    assert table is not None
    assert [column.heading for column in table.columns] == ["class", "learned in task", "PODNet", "PODNet + IVT"]
    assert table.texts()[0][:3] == ["bird 0", "1", "95.00 ± 7.07"]
    assert table.texts()[5][:3] == ["bird 5", "3", "45.00 ± 7.07"]
    old = details.class_table(panel_of(class_names=None))
    assert old is not None
    assert old.texts()[0][0] == "class 10"
    assert details.class_table(panel_of(correct=None)) is None


def test_confusion_is_in_percent_and_averaged() -> None:
    plain, with_ivt = details.confusion_charts(panel_of())
    assert (plain.label, with_ivt.label) == ("PODNet", "PODNet + IVT")
    assert plain.names[0] == "bird 0"
    assert plain.matrix[0] == pytest.approx((95.0, 5.0, 0, 0, 0, 0))
    assert all(sum(row) == pytest.approx(100) for row in plain.matrix)
    figures.draw_chart(plain).draw_without_rendering()
    assert details.confusion_charts(panel_of(confusion=None)) == []


def test_records_without_details_have_none() -> None:
    (panel,) = make_panels(group_runs(runs_of({"a": sample()})))
    assert details.panel_details(panel) == details.Details((), None, ())


@pytest.mark.parametrize(
    "damage",
    [
        {"losses": "a"}, {"losses": [{"task": 0}]}, {"losses": [{"task": "0", "stage": "main", "terms": {"a": ["b"]}}]},
        {"statistics": [3]}, {"statistics": [{"ivt": {"all": {"scale": "x"}}}]}, {"confusion": "a"},
        {"confusion": [[1, "b"]]}, {"correct": {"cnn": [["a"]]}}, {"correct": 3}, {"class_counts": [0] * 6},
        {"class_names": 3},
    ],
    ids=str,
)  # fmt: skip
def test_damaged_details_name_their_records(damage: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"ivt-0/record\.json"):
        details.panel_details(panel_of(**damage))
