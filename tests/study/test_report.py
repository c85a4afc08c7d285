"""A report says what the records say, and incompatibility records that contradict themselves."""

from __future__ import annotations

import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from incvec.cli import main as cli
from incvec.errors import ConfigError, DataError
from incvec.presets import changed_settings
from incvec.records import find_records
from incvec.study import charts, contents, document, figures, labs, reproduced, sheet, style
from incvec.study.compare import Comparison
from incvec.study.groups import Entry, group, load, panels
from tests.study.samples import sample, study, walk, write


def entries_of(records: dict[str, dict[str, Any]]) -> list[Entry]:
    return [Entry(f"{name}/record.json", record) for name, record in records.items()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole report, by the command."""
    folder = tmp_path_factory.mktemp("made")
    wanted = ("podnet-0", "podnet-1", "podnet+ivt", "podnet-oracle-0", "joint-0", "interval-5")
    write(folder / "runs", {name: record for name, record in study().items() if name.startswith(wanted)})
    (folder / "runs" / "notes.json").write_text('{"what": "no record"}')
    result = CliRunner().invoke(cli.app, ["report", str(folder / "runs"), "-o", str(folder / "out")])
    assert result.exit_code == 0, result.output
    assert "report.html" in result.output
    return folder / "out"


def test_everything_is_written(made: Path) -> None:
    names = {str(file.relative_to(made)) for file in made.rglob("*") if file.is_file()}
    assert {"report.html", "report.md", "REPRODUCED.md", "tables/cifar100-5-paper.tex", "tables/how.tex"} <= names
    drawn = {name for name in names if name.startswith("figures/")}
    assert {name.replace(".png", ".pdf") for name in drawn if name.endswith("png")} == {
        name for name in drawn if name.endswith("pdf")
    }
    for name in ("gain-LA", "5-last", "5-podnet-accuracy", "5-podnet-matrix-1", "5-ivt-interval-FM"):
        assert f"figures/cifar100-{name}.png" in drawn
    assert all((made / name).stat().st_size > 1000 for name in drawn)
    linked = set(re.findall(r"\]\((figures/.*?)\)", (made / "report.md").read_text()))
    assert linked == {name for name in drawn if name.endswith("png")}


class Addresses(HTMLParser):
    """Every address a page names, and the tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(made: Path) -> None:
    text = (made / "report.html").read_text()
    parser = Addresses()
    parser.feed(text)
    assert parser.open == []
    assert all(address.startswith("#") for address in parser.found)
    assert not re.search(r"url\((?!#)|@import|%[A-Z]{4,}%", text.replace("url(#${id})", ""))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    for target in parser.found:
        assert f'id="{target[1:]}"' in text


def test_names_in_records_cannot_break_the_page() -> None:
    record = sample()
    record["environment"]["device"] = "</script><b>card & co"
    text = document.page(document.sections(found := entries_of({"a<b": record})), found)
    assert "</script><b>" not in text
    assert "card &amp; co" in text
    assert "a&lt;b/record.json" in text
    (data,) = re.findall(r'id="charts">(.*?)</script>', text)
    assert json.loads(data)["charts"]


def test_the_paper_s_table() -> None:
    (five,) = contents.paper_sheets(entries_of({str(s): sample(seed=s) for s in range(3)}))
    (row,) = [row for row in five.rows if row.cells[0].text == "PODNet"]
    values = [sample(seed=s)["metrics"]["LA"] for s in range(3)]
    mean = statistics.mean(values)
    assert row.cells[1].text == "3"
    assert row.cells[5].text == f"{mean:.2f} ± {statistics.stdev(values):.2f}"
    assert row.cells[6].text == "54.47"
    assert row.cells[7].text == f"{mean - 54.47:+.2f}"
    assert not row.quiet
    others = [row for row in five.rows if row.cells[0].text != "PODNet"]
    assert len(others) == 13
    assert all(row.quiet and row.cells[2].text == "not run" for row in others)


def test_the_paper_s_tables_of_single_settings() -> None:
    blocks = {"structure": "kernel", "batchnorm": "recalibrate"}
    entries = entries_of({"a": sample(podnet={"memory": 5}), "b": sample("pass", "ivt", ivt=blocks)})
    part = next(part for part in document.sections(entries) if part.slug == "cifar100-paper")
    memory, fisher = (next(s for s in part.sheets if s.slug == f"cifar100-{name}") for name in ("memory", "fisher"))
    texts = [[cell.text for cell in row.cells] for row in memory.rows]
    value = f"{entries[0].record['metrics']['AA']:.2f}"
    assert texts[0][:6] == ["PODNet", "podnet.memory=5", "5", "1", value, "54.63"]
    assert texts[1][3:6] == ["0", "not run", "55.91"]
    assert [row.quiet for row in fisher.rows] == [True, True, False, True, True, True]
    assert [cell.text for cell in fisher.rows[2].cells[:2]] == ["PASS + IVT", "ivt.structure=kernel"]


def pretrained(method: str, *addons: str, **given: Any) -> dict[str, Any]:
    record = sample(method, *addons, **given)
    record["class_order"] = list(range(100))
    return record


def test_pretrained_models_stand_beside_the_paper_s_table_of_them() -> None:
    clip = {"a": pretrained("flyp"), "b": pretrained("flyp", "ivt", fall=3.0, flyp={"weights": "/a/copy"})}
    entries = entries_of(clip | {"c": pretrained("slca", tasks=10, variant="lite")})
    parts = document.sections(entries)
    sheets = {sheet.slug: sheet for part in parts for sheet in part.sheets}
    assert not [slug for slug in sheets if slug.startswith(("cifar100-5-", "cifar100-10-"))]  # nothing from scratch
    assert not {"cifar100-memory", "cifar100-fisher"} & set(sheets)
    own, alone = sheets["cifar100-clip"], sheets["cifar100-lite"]
    assert own.title.startswith("CLIP ViT-B/16: CIFAR-100")
    rows = {(row.cells[0].text, row.cells[1].text): [cell.text for cell in row.cells[2:]] for row in own.rows}
    measured = [f"{clip['a']['metrics'][name]:.2f}" for name in ("AA", "LA", "FM")]
    assert rows["FLYP", "5"][:6] == ["1", measured[0], "77.80", measured[1], "64.64", measured[2]]
    assert rows["SLCA", "10"][:3] == ["0", "not run", "71.39"]
    assert rows["RAPF", "5"][-1] == "5.73 (FM)"
    assert "that is not CLIP" in alone.note
    assert [len(row.cells) for row in alone.rows] == [len(alone.columns)] * len(alone.rows)
    (gain,) = sheets["cifar100-gains"].rows
    assert [cell.text for cell in gain.cells[4::2]] == ["+9.92", "+15.49", "–"]  # its FM is another measure
    (bars,) = [chart for part in parts for chart in part.charts if chart.slug == "cifar100-5-equal-last"]
    assert isinstance(bars, charts.Bars)
    assert bars.bars[0].paper == 64.64


def test_what_was_looked_at_on_held_out_images_is_in_no_picture() -> None:
    """The choice of a rate has a table of its own; the data sets come in the paper's order."""
    lite = {"a": pretrained("flyp", tasks=10, variant="lite")}
    lite["b"] = pretrained("flyp", "ivt", tasks=10, variant="lite", fall=3.0)
    for rate in (1e-3, 1e-5):
        lite[f"{rate}"] = pretrained("flyp", tasks=10, variant="lite", held_out=10, stop_after=2, flyp={"lr": rate})
    craft = pretrained("flyp", variant="lite")
    craft = {**craft, "dataset": "aircraft", "config": {**craft["config"], "dataset": "aircraft"}}
    parts = document.sections(entries_of({"0": craft, **lite}))
    order = [part.slug.partition("-")[0] for part in parts]
    assert order.index("cifar100") < order.index("aircraft")
    sheets = {sheet.slug: sheet for part in parts for sheet in part.sheets}
    assert [row.cells[1].text for row in sheets["cifar100-rate"].rows] == ["1e-05", "0.001"]
    (row,) = sheets["cifar100-lite-gains"].rows
    added = lite["b"]["metrics"]["AA"] - lite["a"]["metrics"]["AA"]
    assert [cell.text for cell in row.cells[:5]] == ["FLYP", "10", "1", f"{added:+.2f}", "+16.12"]
    assert len(row.cells) == len(sheets["cifar100-lite-gains"].columns)
    drawn = json.dumps([document.chart_data(chart) for part in parts for chart in part.charts])
    assert "held_out" not in drawn
    assert "variant=lite" not in drawn
    assert "lite0-minilm, not CLIP" in drawn
    titles = [part.title for part in parts]
    assert "CIFAR-100: after the last task" in titles  # beside the paper stands what is comparable with it
    assert not [title for title in titles if "beside the paper" in title]
    assert "held_out" in json.dumps([[c.text for c in r.cells] for r in sheets["cifar100-all"].rows])


def test_gains_are_paired_with_their_standard_error() -> None:
    records = {f"{s}": sample(seed=s) for s in range(3)}
    records |= {f"ivt-{s}": sample("podnet", "ivt", seed=s, fall=3.0 + 0.3 * s) for s in range(4)}
    found = contents.gain_sheet("cifar100", entries_of(records))
    assert found is not None
    (row,) = found.rows
    pairs = [records[f"ivt-{s}"]["metrics"]["AA"] - records[f"{s}"]["metrics"]["AA"] for s in range(3)]
    assert row.cells[2].text == "3"
    assert row.cells[3].text == f"{sum(pairs) / 3:+.2f} ± {statistics.stdev(pairs) / 3**0.5:.2f}"
    assert row.cells[4].text == "+1.36"
    bar = charts.gain_charts("cifar100", entries_of(records))[0].bars[0]
    assert bar.error == pytest.approx(statistics.stdev(r := la_pairs(records)) / 3**0.5)
    assert bar.value == pytest.approx(sum(r) / 3)
    assert contents.gain_sheet("cifar100", entries_of({"0": sample()})) is None


def la_pairs(records: dict[str, dict[str, Any]]) -> list[float]:
    return [records[f"ivt-{s}"]["metrics"]["LA"] - records[f"{s}"]["metrics"]["LA"] for s in range(3)]


def test_the_oracle_gap() -> None:
    records = {"a": sample(), "b": sample("podnet", "ivt", fall=3.0), "c": sample(fall=1.0, oracle=True)}
    found = contents.gap_sheet("cifar100", group(entries_of(records)))
    assert found is not None
    (row,) = found.rows
    plain, own, oracle = (records[key]["metrics"]["LA"] for key in "abc")
    assert [cell.text for cell in row.cells[3:6]] == [f"{value:.2f}" for value in (plain, own, oracle)]
    assert row.cells[6].value == pytest.approx(100 * (own - plain) / (oracle - plain))
    assert contents.gap_sheet("cifar100", group(entries_of({"a": sample()}))) is None


def test_panels_hold_what_belongs_together() -> None:
    found = {panel.title: panel for panel in panels(group(entries_of(study())))}
    assert list(found) == [
        "PODNet on CIFAR-100, 5 increments",
        "PODNet on CIFAR-100, 5 increments, podnet.memory=5",
        "MRFA on CIFAR-100, 25 increments",
    ]
    first = found["PODNet on CIFAR-100, 5 increments"]
    # The interval sweep stays out: a chart of its own shows it.
    assert [each.label for each in first.groups] == ["PODNet", "PODNet + EOPC", "PODNet + IVT", "PODNet oracle"]
    assert [len(each.entries) for each in first.groups] == [3, 1, 3, 3]
    assert all(panel.joint is not None for panel in found.values())


def test_joint_training_from_scratch_is_no_bound_of_pretrained_models() -> None:
    records = {"joint": sample("joint"), "scratch": sample(), "flyp": pretrained("flyp", variant="lite")}
    found = {panel.groups[0].label: panel.joint for panel in panels(group(entries_of(records)))}
    assert [name for name, joint in found.items() if joint is not None] == ["PODNet"]
    assert len(found) == 2


def test_curves_are_means_over_seeds() -> None:
    records = {str(s): sample(seed=s) for s in range(2)}
    (panel,) = panels(group(entries_of(records)))
    (line,) = charts.accuracy_chart(panel).lines
    pair = [records[str(s)]["metrics"]["a"] for s in range(2)]
    assert line.x == (1, 2, 3, 4, 5, 6)
    assert line.y == pytest.approx([(a + b) / 2 for a, b in zip(*pair, strict=True)])
    assert line.errors == pytest.approx([abs(a - b) / 2**0.5 for a, b in zip(*pair, strict=True)])
    (heat,) = charts.heat_charts(panel)
    last = [records[str(s)]["accuracy"][5][2] for s in range(2)]
    assert heat.matrix[5][2] == pytest.approx(sum(last) / 2)
    assert [len(row) for row in heat.matrix] == [1, 2, 3, 4, 5, 6]


def test_sweeps_of_one_setting_include_the_preset() -> None:
    found = {chart.slug: chart for chart in charts.sweep_charts(group(entries_of(study())))}
    assert set(found) == {
        f"cifar100-5-{setting}-{metric}"
        for setting in ("ivt-interval", "podnet-memory")
        for metric in ("AA", "LA", "FM")
    }
    (line,) = found["cifar100-5-ivt-interval-LA"].lines
    assert line.x == (1, 5, 10, 40)
    assert line.y[0] == sample("podnet", "ivt", fall=3.4)["metrics"]["LA"]
    # The preset's value has three seeds, the others one: only the seed they share is compared.
    assert line.y[2] == sample("podnet", "ivt", fall=3.2)["metrics"]["LA"]
    assert line.errors is None
    for metric in ("AA", "LA", "FM"):
        plain, with_ivt = found[f"cifar100-5-podnet-memory-{metric}"].lines
        assert (plain.label, with_ivt.label) == ("PODNet", "PODNet + IVT")
        assert plain.y[0] == sample(fall=5.0)["metrics"][metric]


def test_a_sweep_of_the_interval_has_the_host_and_the_transform_at_the_end() -> None:
    records = {name: record for name, record in study().items() if name.startswith(("podnet-0", "podnet+ivt", "int"))}
    records["end"] = sample("podnet", "ivt", fall=3.9, ivt={"interval": None})
    records["stages"] = sample("podnet", "ivt", fall=3.7, ivt={"stages": ["main", "balance"]})
    found = {chart.slug: chart for chart in charts.sweep_charts(group(entries_of(records)))}
    chart = found["cifar100-5-ivt-interval-LA"]
    assert chart.lines[0].x == (1, 5, 10, 40)
    assert [(level.label, level.y) for level in chart.levels] == [
        ("PODNet", (sample()["metrics"]["LA"],)),
        ("PODNet + IVT, only at the end", (records["end"]["metrics"]["LA"],)),
    ]
    (switches,) = charts.switch_charts(group(entries_of(records)))
    assert [bar.label for bar in switches.bars] == ["ivt.stages=[main, balance]"]  # the interval is not told twice
    figures.draw_chart(chart)


def test_switches_are_differences_from_the_preset() -> None:
    records = {"a": sample("podnet", "ivt"), "b": sample("podnet", "ivt", seed=1)}
    records["c"] = sample("podnet", "ivt", fall=3.0, ivt={"stages": ["main", "balance"]})
    records["d"] = sample("podnet", "ivt", fall=3.5, ivt={"interval": 20})
    (chart,) = charts.switch_charts(group(entries_of(records)))
    assert [bar.label for bar in chart.bars] == ["ivt.stages=[main, balance]"]
    assert chart.bars[0].value == records["c"]["metrics"]["LA"] - records["a"]["metrics"]["LA"]
    assert chart.bars[0].error is None
    del records["c"]  # numbers alone are drawn as a line
    assert charts.switch_charts(group(entries_of(records))) == []


def test_notes_tell_of_marks_that_are_there() -> None:
    first, second = (
        charts.Bar("podnet", "PODNet", 1.0, error, 1, paper) for error, paper in ((None, 2.0), (0.5, None))
    )
    assert charts.bar_note([first], "Whiskers.") == "Diamonds: the paper's value."
    assert charts.bar_note([second], "Whiskers.") == "Whiskers."
    assert charts.bar_note([], "Whiskers.") == ""


@pytest.mark.filterwarnings("error")
def test_long_labels_leave_the_bars_their_room() -> None:
    start = "PODNet + fisher-merge (start=/a/long/way/runs-of-mine/cifar100-podnet-5-s0/snapshots/task-00.safetensors)"
    bars = [charts.Bar("podnet", label, value, None, 1) for label, value in ((start, -1.25), ("PODNet", 2.0))]
    chart = charts.Bars("slug", "Title", "LA", tuple(bars), "points", signed=True)
    figure = figures.draw_chart(chart)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_position().width > 0.5
    long, short = (label.get_text() for label in axes.get_yticklabels())
    assert (long[-7:], short) == ("  −1.25", "PODNet  +2.00")
    assert "fisher-merge" in long  # a hyphen is no minus
    above, below = (label.get_window_extent() for label in axes.get_yticklabels())
    assert above.y0 > below.y1


def test_time_is_of_runs_that_had_the_device_alone() -> None:
    """A record does not tell; the sweep's folder does."""
    shared = {"a": sample(), "b": sample("podnet", "ivt"), "training-time/c": sample("podnet", "eopc", seed=1)}
    groups = group(entries_of(shared))
    chart = charts.time_chart(groups[0].stream, groups)
    assert chart is not None
    assert [bar.label for bar in chart.bars] == ["PODNet + EOPC"]
    groups = group(entries_of({"a": sample(), "b": sample("podnet", "ivt")}))
    assert charts.time_chart(groups[0].stream, groups) is None


def test_time_leaves_the_shared_base_out() -> None:
    groups = group(entries_of({"training-time/a": sample(), "training-time/b": sample("podnet", "ivt")}))
    chart = charts.time_chart(groups[0].stream, groups)
    assert chart is not None
    assert [bar.value for bar in chart.bars] == [5 * 40.0, 5 * 41.0]
    without = sample()
    del without["task_seconds"]
    groups = group(entries_of({"training-time/a": without}))
    assert charts.time_chart(groups[0].stream, groups) is None


def test_how_it_was_run() -> None:
    record = sample("podnet", "ivt", seed=2, oracle=True, order_seed=7, ivt={"interval": 5}, podnet={"lr": 0.05})
    assert contents.command(record) == (
        "incvec run --method podnet --addon ivt --dataset cifar100 --tasks 5 --seed 2 --oracle --set order_seed=7 "
        "--set podnet.lr=0.05 --set ivt.interval=5"
    )
    (row,) = contents.how_sheet(group(entries_of({"a": record}))).rows
    assert [cell.text for cell in row.cells[2:]] == [
        "2 (class order 7)", "a card", "graph bf16", "torch 2.11.0 python 3.12", "abc123",
    ]  # fmt: skip


def test_another_base_is_another_experiment() -> None:
    assert changed_settings(sample(base_classes=40)["config"]) == {"base_classes": 40}
    assert changed_settings(sample(seed=3, tasks=10, device="cpu", engine="eager")["config"]) == {}


def test_another_class_order_is_no_other_seed() -> None:
    entries = entries_of({"a": sample(), "b": sample(fall=9.0, order_seed=7)})
    assert [(g.first.host_changes, len(g.entries)) for g in group(entries)] == [({}, 1), ({"order_seed": 7}, 1)]
    assert len(panels(group(entries))) == 2
    assert charts.sweep_charts(group(entries)) == []
    (five,) = contents.paper_sheets(entries)
    (row,) = [row for row in five.rows if row.cells[0].text == "PODNet"]
    assert row.cells[2].text == f"{sample()['metrics']['AA']:.2f}"
    assert "order_seed=7" in reproduced.page([entry.record for entry in entries])


def test_latex_is_ready_to_paste() -> None:
    cells = [sheet.word("A & B_1"), sheet.spread(Comparison((1.0, 2.0), None)), sheet.number(-0.5, "+.2f")]
    cells += [sheet.Cell("x=#1", code=True), sheet.number(None)]
    columns = [sheet.Column("run", number=False), sheet.Column("ours", "AA ↑"), sheet.Column("diff", "AA ↑")]
    columns += [sheet.Column("set", number=False), sheet.Column("last")]
    text = sheet.latex(sheet.Sheet("s", "50 % off", tuple(columns), (sheet.Row(tuple(cells)),), "Note"))
    assert text.splitlines() == [
        r"\begin{table}[t]",
        r"\centering",
        r"\caption{50 \% off. Note}",
        r"\label{tab:s}",
        r"\begin{tabular}{@{}lrrlr@{}}",
        r"\toprule",
        r" & \multicolumn{2}{c}{AA $\uparrow$} &  & " + r" \\",
        r"\cmidrule(lr){2-3}",
        r"run & ours & diff & set & last \\",
        r"\midrule",
        r"A \& B\_1 & $1.50_{\pm 0.71}$ & $-0.50$ & \texttt{x=\#1} & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_commits_are_short_in_latex_alone() -> None:
    record = sample()
    record["environment"]["commit"] = full = "0123456789abcdef0123456789abcdef01234567"
    how = contents.how_sheet(group(entries_of({"a": record, "b": sample(seed=1)})))
    assert "& 0123456789, abc123 " in sheet.latex(how)
    assert full in sheet.markdown(how)
    assert full in sheet.markup(how)
    dated = sheet.Sheet("s", "t", (sheet.Column("n"),), (sheet.Row((sheet.word("1234567890123456"),)),))
    assert "1234567890123456" in sheet.latex(dated)


def test_every_latex_row_has_all_columns(made: Path) -> None:
    for file in (made / "tables").glob("*.tex"):
        text = file.read_text()
        (spec,) = re.findall(r"\\begin\{tabular\}\{@\{\}(.+)@\{\}\}", text)
        spec = re.sub(r">\{.*?\}p\{.*?\}", "p", spec)
        for line in text.splitlines():
            if line.endswith(r"\\"):
                spans = [int(width) for width in re.findall(r"\\multicolumn\{(\d+)\}", line)]
                count = len(re.findall(r"(?<!\\)&", line)) + 1 + sum(spans) - len(spans)
                assert count == len(spec), f"{file.name}: {line}"


def test_the_same_records_give_the_same_files(tmp_path: Path) -> None:
    found = entries_of({"a": sample()})
    chart = charts.accuracy_chart(panels(group(found))[0])
    first = [file.read_bytes() for file in figures.write_chart(chart, tmp_path)]
    assert first == [file.read_bytes() for file in figures.write_chart(chart, tmp_path)]
    assert document.page(document.sections(found), found) == document.page(document.sections(found), found)


# From the lab -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run of digits, and a lab's line beside its record."""
    folder = tmp_path_factory.mktemp("walked")
    short = ["--set", "finetune.net=tiny", "--set", "finetune.epochs=1"]
    for command in (
        ["run", "--method", "finetune", "--out", f"{folder}/runs/a", *short],
        ["lab", "path", f"{folder}/runs/a", "--points", "5", "-o", f"{folder}/runs/lab"],
        ["report", f"{folder}/runs", "-o", f"{folder}/out"],
    ):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, result.output
    return folder


def test_lines_of_the_lab_are_shown(walked: Path) -> None:
    found = json.loads((walked / "runs" / "lab" / "path.json").read_text())["curves"][0]
    text = (walked / "out" / "report.html").read_text()
    assert "data:image/png;base64," in text
    (data,) = re.findall(r'id="charts">(.*?)</script>', text)
    (chart,) = [chart for chart in json.loads(data)["charts"] if chart["slug"] == "lab-lab-path"]
    assert chart["lines"][0]["y"] == found["accuracy"]["old"]
    assert chart["lines"][0]["x"] == found["distance"]
    table = (walked / "out" / "report.md").read_text()
    (row,) = [
        line for line in table.splitlines() if line.startswith("| finetune |") and f"{found['length']:.2f}" in line
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:6] == [f"{value:.2f}" for value in (
        found["accuracy"]["old"][0], min(found["accuracy"]["old"]), found["accuracy"]["old"][-1],
        found["barrier"]["accuracy"]["old"],
    )]  # fmt: skip
    names = {file.name for file in (walked / "out" / "figures").iterdir()}
    assert {"lab-lab-path.png", "lab-lab-path.pdf", "lab-lab-path-picture.png", "lab-lab-path-picture.pdf"} <= names
    assert (walked / "out" / "figures" / "lab-lab-path-picture.png").read_bytes() == (
        walked / "runs" / "lab" / "path.png"
    ).read_bytes()


def test_findings_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    for place in ("one/figures/path", "two/figures/path", "three/figures/path-1", "four/figures/plain"):
        file = tmp_path / f"{place}.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(walk()))
    found = labs.find([tmp_path])
    assert [finding.slug for finding in found] == [
        "lab-figures-plain", "lab-figures-path-2", "lab-figures-path-1", "lab-figures-path-3",
    ]  # fmt: skip
    assert len({finding.title for finding in found}) == 4
    entries = entries_of({"a": sample()})
    ids = re.findall(r' id="(.*?)"', document.page(document.sections(entries, found), entries))
    assert len(set(ids)) == len(ids)


def test_a_broken_line_is_refused(walked: Path, tmp_path: Path) -> None:
    data = json.loads((walked / "runs" / "lab" / "path.json").read_text())
    del data["curves"][0]["accuracy"]
    (tmp_path / "path.json").write_text(json.dumps(data))
    with pytest.raises(DataError, match="incvec lab path"):
        document.sections(entries_of({"a": sample()}), labs.find([tmp_path]))


# Broken and missing records ---------------------------------------------------------------------------------------


def broken(**changes: Any) -> dict[str, Any]:
    return {**sample(), **changes}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (broken(metrics={**sample()["metrics"], "LA": 99.0}), "was altered: LA is 99.0, the matrix gives"),
        (broken(metrics={**sample()["metrics"], "FM": None}), "was altered: FM is None"),
        (broken(metrics={"AA": 1.0}), "its metrics have None for LA"),
        (broken(metrics={**sample()["metrics"], "a": [1.0]}), "broken record"),
        (broken(accuracy=[[80.0], [70.0, 120.0]]), "broken record: "),
        (broken(accuracy="none"), "accuracy is a str, a list was expected"),
        (broken(config=None), "config is a NoneType, a dict was expected"),
        (broken(environment=None), "lacks environment"),
        ({key: value for key, value in sample().items() if key != "accuracy"}, "lacks accuracy"),
    ],
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_refused(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    write(tmp_path, {"good": sample(seed=1), "bad": record})
    with pytest.raises(DataError, match=re.escape(words)) as raised:
        load([tmp_path])
    assert str(tmp_path / "bad" / "record.json") in str(raised.value)


def test_a_cut_off_record_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {"good": sample()})
    (tmp_path / "cut.json").write_text(json.dumps(sample(seed=1))[:500])
    with pytest.raises(DataError, match=r"cut\.json is not a record"):
        load([tmp_path])


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no record lies in"):
        load([tmp_path])
    with pytest.raises(DataError, match="does not exist"):
        load([tmp_path / "nowhere"])
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path), "-o", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "incvec run" in result.stderr
    assert not (tmp_path / "out").exists()


def test_two_outcomes_of_one_run(tmp_path: Path) -> None:
    write(tmp_path, {"a": sample(), "copy": sample()})
    assert len(load([tmp_path])) == 1
    write(tmp_path, {"b": sample(fall=2.0)})
    with pytest.raises(DataError, match="two outcomes of the same run"):
        load([tmp_path])


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConfigError, match="is a file; a report needs a folder"):
        list(document.write(entries_of({"a": sample()}), tmp_path / "out"))


def test_a_folder_with_brackets_is_told_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "runs", {"a": sample()})
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "runs"), "-o", str(tmp_path / "fig[red]x")])
    assert "fig[red]x/report.html" in result.output


# Looks ------------------------------------------------------------------------------------------------------------


def test_colors_stand_out_from_a_dark_ground() -> None:
    for color in style.palette():
        ratio = style.contrast(style.channels(style.dark(color)), style.channels(style.DARK_BACKGROUND))
        assert ratio >= style.CONTRAST
    assert style.contrast([255, 255, 255], [0, 0, 0]) == pytest.approx(21)
    assert style.dark("#FFFFFF") == "#FFFFFF"


def test_a_panel_never_tells_two_runs_apart_by_color_alone() -> None:
    names = ["podnet", "podnet + ivt", "podnet + eopc", "podnet oracle", "joint"]
    looks = [(charts.look(name)["marker"], charts.look(name)["hollow"]) for name in names]
    assert len(set(looks)) == len(names)
    assert len({charts.look(name)["color"] for name in names}) == len(names)


def test_the_committed_records_make_a_report() -> None:
    results = Path(__file__).parents[2] / "results"
    if not find_records([results]):
        pytest.skip("no record of a run is committed yet")
    entries = load([results])
    text = document.page(document.sections(entries), entries)
    for entry in entries:
        assert f"{entry.record['metrics']['LA']:.2f}" in text
