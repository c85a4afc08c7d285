"""The report: its tables and its page contain the numbers of the records."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from incvec.cli import main as cli
from incvec.errors import DataError
from incvec.records import find_records
from incvec.study import charts, figures, page_tables
from incvec.study.figures.path import DISTANCE, SHARE
from incvec.study.groups import group_runs, make_panels
from incvec.study.page import Section, chart_data, make_sections, render_html, write_report
from incvec.study.page_figures import find_study_figures
from incvec.study.runs import load_runs
from incvec.study.tables import Table
from tests.study.samples import detailed, path_data, runs_of, sample, study, write

FORMAT_1 = Path(__file__).parent / "figures_format_1"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole report, made by the command."""
    folder = tmp_path_factory.mktemp("report")
    names = ("podnet-0", "podnet-1", "podnet+ivt", "podnet-oracle-0", "joint-0", "interval-5")
    write(folder / "runs", {name: record for name, record in study().items() if name.startswith(names)})
    (folder / "runs" / "notes.json").write_text('{"what": "not a record"}')
    result = CliRunner().invoke(cli.app, ["report", str(folder / "runs"), "-o", str(folder / "out")])
    assert result.exit_code == 0, result.output
    assert "report.html" in result.output
    return folder / "out"


def test_report_files(report: Path) -> None:
    names = {str(file.relative_to(report)) for file in report.rglob("*") if file.is_file()}
    assert {"report.html", "report.md", "REPRODUCED.md", "tables/cifar100-5-paper.tex", "tables/how.tex"} <= names
    drawn = {name for name in names if name.startswith("figures/")}
    assert {name.replace(".png", ".pdf") for name in drawn if name.endswith("png")} == {
        name for name in drawn if name.endswith("pdf")
    }
    for name in ("gain-LA", "5-last", "5-podnet-accuracy", "5-podnet-matrix-1", "5-ivt-interval-FM"):
        assert f"figures/cifar100-{name}.png" in drawn
    assert all((report / name).stat().st_size > 1000 for name in drawn)
    linked = set(re.findall(r"\]\((figures/.*?)\)", (report / "report.md").read_text()))
    assert linked == {name for name in drawn if name.endswith("png")}


class Addresses(HTMLParser):
    """Every address in a page, and the tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_needs_no_other_file(report: Path) -> None:
    text = (report / "report.html").read_text()
    parser = Addresses()
    parser.feed(text)
    assert parser.open == []
    assert all(address.startswith("#") for address in parser.addresses)
    assert not re.search(r"url\((?!#)|@import|%[A-Z]{4,}%", text.replace("url(#${id})", ""))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    for target in parser.addresses:
        assert f'id="{target[1:]}"' in text


def test_every_latex_row_has_all_columns(report: Path) -> None:
    for file in (report / "tables").glob("*.tex"):
        text = file.read_text()
        (spec,) = re.findall(r"\\begin\{tabular\}\{@\{\}(.+)@\{\}\}", text)
        spec = re.sub(r">\{.*?\}p\{.*?\}", "p", spec)
        for line in text.splitlines():
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) + 1 == len(spec), f"{file.name}: {line}"


def test_names_in_records_cannot_break_the_page() -> None:
    record = sample()
    record["environment"]["device"] = "</script><b>card & co %BODY%"
    runs = runs_of({"a<b": record})
    text = render_html(make_sections(runs), runs)
    assert "</script><b>" not in text
    assert "card &amp; co %BODY%" in text
    assert "a&lt;b/record.json" in text
    (data,) = re.findall(r'id="charts">(.*?)</script>', text)
    assert json.loads(data)["charts"]


HOSTILE = {
    "parents": "../../evil", "absolute": "/tmp/evil", "latex": "\\input{/etc/passwd} $x^2$ & 50% ~^ {",
    "long": "n" * 3000, "control": "a\0b\nc\ud800", "formula": "$a$ $$",
    "markup": "</script><img src=x onerror=alert(1)> %BODY%",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_names_in_records_cannot_leave_the_folder_or_break_the_report(name: str, tmp_path: Path) -> None:
    """A record of someone else, with a hostile name wherever a record has names."""
    record = detailed(sample("podnet", "ivt")) | {"dataset": name, "class_names": [name] * 6}
    record["environment"] |= {"device": name, "commit": name}
    folder = write(tmp_path / "in", {"a": record, "b": sample()})
    done = CliRunner().invoke(cli.app, ["report", str(folder), "-o", str(tmp_path / "out" / "report")])
    made = [file for file in tmp_path.rglob("*") if file.is_file() and not file.is_relative_to(folder)]
    if name in (HOSTILE["long"], HOSTILE["control"]):  # refused when the record is read
        assert done.exit_code == 1
        assert "is not a record: dataset is" in " ".join(done.output.split())
        assert not made
        return
    assert done.exit_code == 0, done.output
    assert len(made) > 20
    assert all(file.is_relative_to(tmp_path / "out" / "report") for file in made)
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,110}", file.name) for file in made)
    assert all("\\input" not in file.read_text() for file in made if file.suffix == ".tex")
    assert "<img" not in (tmp_path / "out" / "report" / "report.html").read_text()


def test_report_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, out = runs_of({"a": sample()}), tmp_path / "out"
    write_report(runs, out)
    (out / "mine.txt").write_text("kept")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    count = itertools.count()

    def full(chart: Any, folder: Path) -> list[Path]:
        if next(count) == 1:
            raise OSError(28, "No space left on device")
        return original(chart, folder)

    original = figures.write_chart
    monkeypatch.setattr(figures, "write_chart", full)
    for target in (out, tmp_path / "new"):
        with pytest.raises(DataError, match="No space left on device"):
            write_report(runs_of({"b": sample(fall=9.0)}), target)
        count = itertools.count()
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    write_report(runs_of({"b": sample(fall=9.0)}), out)  # replaces the report, not other files
    assert (out / "mine.txt").read_text() == "kept"
    assert (out / "report.html").read_bytes() != before[out / "report.html"]
    assert [path.name for path in out.glob(".*")] == []


def test_reproduced_is_about_data_sets_of_the_paper(tmp_path: Path) -> None:
    record = sample() | {"dataset": "digits"}
    record["config"] = record["config"] | {"dataset": "digits"}
    names = {file.name for file in write_report(runs_of({"a": record}), tmp_path / "a")}
    assert "report.html" in names
    assert "REPRODUCED.md" not in names
    assert "REPRODUCED.md" in {file.name for file in write_report(runs_of({"a": sample()}), tmp_path / "b")}


def test_headline_is_on_top(report: Path) -> None:
    text = (report / "report.html").read_text()
    (line,) = re.findall(r'<ul class="headline">(.*?)</ul>', text)
    assert line.startswith("<li>IVT with PODNet on CIFAR-100, 5 increments: last accuracy +")
    assert " ± " in line
    assert "forgetting −" in line
    assert "2 seeds" in line
    assert text.index(line) < text.index("<nav>")
    assert (report / "report.md").read_text().splitlines()[2].startswith("- **IVT with PODNet on CIFAR-100")


def test_every_chart_of_runs_has_their_commands(report: Path) -> None:
    (data,) = re.findall(r'id="charts">(.*?)</script>', (report / "report.html").read_text())
    shown = json.loads(data)["charts"]
    assert len(shown) > 8
    for chart in shown:
        assert chart["commands"]
        assert all(command.startswith("incvec run --method ") for command in chart["commands"])
    (curves,) = [chart for chart in shown if chart["slug"] == "cifar100-5-podnet-accuracy"]
    assert sum("--addon ivt" in command for command in curves["commands"]) == 3  # one per seed


def test_no_line_is_shown_twice(report: Path) -> None:
    (data,) = re.findall(r'id="charts">(.*?)</script>', (report / "report.html").read_text())
    for chart in json.loads(data)["charts"]:
        labels = [line["label"] for line in (*chart.get("lines", ()), *chart.get("levels", ()))]
        assert len(set(labels)) == len(labels)
    lines = [json.dumps([line["x"], line["y"]]) for c in json.loads(data)["charts"] for line in c.get("lines", ())]
    assert len(set(lines)) == len(lines)


def tables_of(sections: list[Section]) -> dict[str, Table]:
    return {table.slug: table for section in sections for table in section.tables}


def test_table_of_the_paper() -> None:
    five = tables_of(make_sections(runs_of({str(s): sample(seed=s) for s in range(3)})))["cifar100-5-paper"]
    (row,) = [row for row in five.rows if row.cells[0].text == "PODNet"]
    values = [sample(seed=s)["metrics"]["LA"] for s in range(3)]
    mean = statistics.mean(values)
    assert [cell.text for cell in row.cells[5:8]] == [
        f"{mean:.2f} ± {statistics.stdev(values):.2f} (3)", "54.47", f"{mean - 54.47:+.2f}",
    ]  # fmt: skip
    assert row.cells[5].value == pytest.approx(mean)
    assert not row.dim
    others = [row for row in five.rows if row.cells[0].text != "PODNet"]
    assert len(others) == 13
    assert all(row.dim and row.cells[2].text == "not run" for row in others)


def test_ablation_tables() -> None:
    blocks = {"structure": "kernel", "batchnorm": "recalibrate"}
    record = sample(podnet={"memory": 5})
    tables = tables_of(make_sections(runs_of({"a": record, "b": sample("pass", "ivt", ivt=blocks)})))
    memory, fisher = tables["cifar100-memory"], tables["cifar100-fisher"]
    value = f"{record['metrics']['AA']:.2f}"
    assert memory.texts()[0][:5] == ["PODNet", "podnet.memory=5", "5", value, "54.63"]
    assert memory.texts()[1][3:5] == ["not run", "55.91"]
    assert [row.dim for row in fisher.rows] == [True, True, False, True, True, True]
    assert fisher.texts()[2][:2] == ["PASS + IVT", "ivt.structure=kernel"]


def pretrained(method: str, *addons: str, **given: Any) -> dict[str, Any]:
    return {**sample(method, *addons, **given), "class_order": list(range(100))}


def test_tables_of_pretrained_models() -> None:
    clip = {"a": pretrained("flyp"), "b": pretrained("flyp", "ivt", fall=3.0, flyp={"weights": "/a/copy"})}
    sections = make_sections(runs_of(clip | {"c": pretrained("slca", tasks=10, variant="lite")}))
    tables = tables_of(sections)
    assert not [slug for slug in tables if slug.startswith(("cifar100-5-", "cifar100-10-"))]  # nothing from scratch
    assert not {"cifar100-memory", "cifar100-fisher"} & set(tables)
    own, lite = tables["cifar100-clip"], tables["cifar100-lite"]
    assert own.title.startswith("CLIP ViT-B/16: CIFAR-100")
    rows = {(row[0], row[1]): row[2:] for row in own.texts()}
    ours = [f"{clip['a']['metrics'][name]:.2f}" for name in ("AA", "LA", "FM")]
    assert rows["FLYP", "5"][:5] == [ours[0], "77.80", ours[1], "64.64", ours[2]]
    assert rows["SLCA", "10"][:2] == ["not run", "71.39"]
    assert rows["RAPF", "5"][-1] == "5.73 (FM)"
    assert "that is not CLIP" in lite.note
    assert [len(row.cells) for row in lite.rows] == [len(lite.columns)] * len(lite.rows)
    (gain,) = tables["cifar100-gains"].texts()
    assert gain[4:7:2] == ["+9.92", "+15.49"]
    assert len(gain) == 9  # FM and fm_clipped, without the paper's FM, which is another measure
    (bars,) = [chart for section in sections for chart in section.charts if chart.slug == "cifar100-5-equal-last"]
    assert isinstance(bars, charts.Bars)
    assert bars.bars[0].paper == 64.64


def test_runs_on_held_out_images_are_in_no_chart() -> None:
    """The choice of a learning rate has a table of its own; data sets come in the paper's order."""
    lite = {"a": pretrained("flyp", tasks=10, variant="lite")}
    lite["b"] = pretrained("flyp", "ivt", tasks=10, variant="lite", fall=3.0)
    for rate in (1e-3, 1e-5):
        lite[f"{rate}"] = pretrained("flyp", tasks=10, variant="lite", held_out=10, stop_after=2, flyp={"lr": rate})
    craft = pretrained("flyp", variant="lite")
    craft = {**craft, "dataset": "aircraft", "config": {**craft["config"], "dataset": "aircraft"}}
    sections = make_sections(runs_of({"0": craft, **lite}))
    order = [section.slug.partition("-")[0] for section in sections]
    assert order.index("cifar100") < order.index("aircraft")
    tables = tables_of(sections)
    assert [row[0] for row in tables["cifar100-rate"].texts()] == ["1e-05", "0.001"]
    (row,) = tables["cifar100-lite-gains"].texts()
    added = lite["b"]["metrics"]["AA"] - lite["a"]["metrics"]["AA"]
    assert row[:4] == ["FLYP", "10", f"{added:+.2f}", "+16.12"]
    assert len(row) == len(tables["cifar100-lite-gains"].columns)
    drawn = json.dumps([chart_data(chart) for section in sections for chart in section.charts])
    assert "held_out" not in drawn
    assert "variant=lite" not in drawn
    assert "lite0-minilm, not CLIP" in drawn
    titles = [section.title for section in sections]
    assert "CIFAR-100: after the last task" in titles  # no run is comparable with the paper's
    assert not [title for title in titles if "compared with the paper" in title]
    assert "held_out" in json.dumps(tables["cifar100-all"].texts())


def test_gains_are_paired_and_have_a_standard_error() -> None:
    records = {f"{s}": sample(seed=s) for s in range(3)}
    records |= {f"ivt-{s}": sample("podnet", "ivt", seed=s, fall=3.0 + 0.3 * s) for s in range(4)}
    table = page_tables.gain_table("cifar100", runs_of(records))
    assert table is not None
    (row,) = table.texts()
    gains = {
        metric: [records[f"ivt-{s}"]["metrics"][metric] - records[f"{s}"]["metrics"][metric] for s in range(3)]
        for metric in ("AA", "LA")
    }
    error = statistics.stdev(gains["AA"]) / 3**0.5
    assert row[2:5] == ["3", f"{statistics.mean(gains['AA']):+.2f} ± {error:.2f}", "+1.36"]
    bar = charts.gain_charts("cifar100", runs_of(records))[0].bars[0]
    assert bar.error == pytest.approx(statistics.stdev(gains["LA"]) / 3**0.5)
    assert bar.value == pytest.approx(statistics.mean(gains["LA"]))
    assert page_tables.gain_table("cifar100", runs_of({"0": sample()})) is None


def test_oracle_gap() -> None:
    records = {"a": sample(), "b": sample("podnet", "ivt", fall=3.0), "c": sample(fall=1.0, oracle=True)}
    table = page_tables.gap_table("cifar100", group_runs(runs_of(records)))
    assert table is not None
    (row,) = table.rows
    plain, with_ivt, oracle = (records[key]["metrics"]["LA"] for key in "abc")
    assert [cell.text for cell in row.cells[3:6]] == [f"{value:.2f}" for value in (plain, with_ivt, oracle)]
    assert row.cells[6].value == pytest.approx(100 * (with_ivt - plain) / (oracle - plain))
    assert page_tables.gap_table("cifar100", group_runs(runs_of({"a": sample()}))) is None


def test_how_the_runs_were_made() -> None:
    record = sample("podnet", "ivt", seed=2, oracle=True, order_seed=7, ivt={"interval": 5}, podnet={"lr": 0.05})
    (row,) = page_tables.how_table(group_runs(runs_of({"a": record}))).texts()
    assert row[1].startswith("incvec run --method podnet --addon ivt")
    assert row[2:] == ["2 (class order 7)", "a card", "graph bf16", "torch 2.11.0 python 3.12", "abc123"]


def test_same_records_give_the_same_files(tmp_path: Path) -> None:
    runs = runs_of({"a": sample()})
    chart = charts.accuracy_chart(make_panels(group_runs(runs))[0])
    first = [file.read_bytes() for file in figures.write_chart(chart, tmp_path)]
    assert first == [file.read_bytes() for file in figures.write_chart(chart, tmp_path)]
    assert render_html(make_sections(runs), runs) == render_html(make_sections(runs), runs)


def test_command_prints_the_page_or_one_error(tmp_path: Path) -> None:
    def report_to(name: str) -> str:
        return CliRunner().invoke(cli.app, ["report", str(tmp_path / "runs"), "-o", str(tmp_path / name)]).output

    (tmp_path / "runs").mkdir()
    assert "`incvec run` writes one" in report_to("out").replace("\n", " ")
    assert not (tmp_path / "out").exists()
    write(tmp_path / "runs", {"a": sample()})
    assert "fig[red]x/report.html" in report_to("fig[red]x")  # no markup
    (tmp_path / "file").write_text("mine")
    assert "is a file; a report needs a folder" in report_to("file").replace("\n", " ")


def test_committed_records_make_a_report() -> None:
    results = Path(__file__).parents[2] / "results"
    if not find_records([results]):
        pytest.skip("no record is committed")
    runs = load_runs([results])
    text = render_html(make_sections(runs), runs)
    for run in runs:
        assert f"{run.record['metrics']['LA']:.2f}" in text


@pytest.fixture(scope="module")
def with_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run of digits, a path beside its record, and the report."""
    folder = tmp_path_factory.mktemp("with-path")
    short = ["--set", "finetune.net=tiny", "--set", "finetune.epochs=1"]
    for command in (
        ["run", "--method", "finetune", "--out", f"{folder}/runs/a", *short],
        ["study", "path", f"{folder}/runs/a", "--points", "5", "-o", f"{folder}/runs/figures"],
        ["report", f"{folder}/runs", "-o", f"{folder}/out"],
    ):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, result.output
    return folder


def test_paths_are_shown_once_with_both_axes(with_path: Path) -> None:
    curve = json.loads((with_path / "runs" / "figures" / "path.json").read_text())["curves"][0]
    text = (with_path / "out" / "report.html").read_text()
    assert "<img" not in text  # no picture beside the charts
    (data,) = re.findall(r'id="charts">(.*?)</script>', text)
    shown = {chart["slug"]: chart for chart in json.loads(data)["charts"] if chart["slug"].startswith("study-")}
    assert set(shown) == {f"study-figures-path-{m}-{g}" for m in ("accuracy", "loss") for g in ("old", "new")}
    for name, chart in shown.items():
        metric, group = name.split("-")[-2:]
        assert chart["lines"][0]["y"] == curve[metric][group]
        assert chart["lines"][0]["x"] == curve["distance"]
        assert chart["lines"][0]["other_x"] == curve["x"]
        assert (chart["x_label"], chart["other_x_label"]) == (DISTANCE, SHARE)
    lines = (with_path / "out" / "report.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| finetune |") and f"{curve['length']:.2f}" in line]
    old = curve["accuracy"]["old"]
    expected = (old[0], min(old), old[-1], curve["barrier"]["accuracy"]["old"])
    assert [cell.strip() for cell in row.strip("|").split("|")][2:6] == [f"{value:.2f}" for value in expected]
    names = {file.name for file in (with_path / "out" / "figures").iterdir() if file.name.startswith("study")}
    assert names == {"study-figures-path.png", "study-figures-path.pdf"}
    for end in ("png", "pdf"):
        drawn = with_path / "out" / "figures" / f"study-figures-path.{end}"
        assert drawn.read_bytes() == (with_path / "runs" / "figures" / f"path.{end}").read_bytes()


def test_run_has_losses_classes_and_confusion_in_its_report(with_path: Path) -> None:
    (data,) = re.findall(r'id="charts">(.*?)</script>', (with_path / "out" / "report.html").read_text())
    shown = {chart["slug"].split("-", 4)[-1]: chart for chart in json.loads(data)["charts"]}  # after a digest
    record = json.loads((with_path / "runs" / "a" / "record.json").read_text())
    assert shown["loss"]["lines"][0]["y"][0] == pytest.approx(
        sum(values[0] for values in record["losses"][0]["terms"].values()), abs=1e-4
    )
    confusion = shown["confusion-1"]
    assert confusion["names"] == record["class_names"]
    assert confusion["matrix"][3][3] == pytest.approx(100 * record["confusion"][3][3] / record["class_counts"][3])
    assert len(list((with_path / "out" / "tables").glob("digits-3-finetune-*-classes.tex"))) == 1


@pytest.mark.parametrize("kind", ["path", "tradeoff", "plane", "gap", "curvature"])
def test_every_figure_of_the_study_has_a_table_and_charts(kind: str) -> None:
    (figure,) = [each for each in find_study_figures([FORMAT_1]) if each.data["kind"] == kind]
    assert figure.table.rows
    assert bool(figure.charts) == (kind != "gap")  # its lines are in the charts of the records
    for chart in figure.charts:
        assert chart_data(chart)["slug"].startswith("study-")
        assert "NaN" not in json.dumps(chart_data(chart))


def test_figures_of_the_same_name_get_numbers(tmp_path: Path) -> None:
    for place in ("one/figures/path", "two/figures/path", "three/figures/path-1", "four/figures/plain"):
        file = tmp_path / f"{place}.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(path_data()))
    numbered = find_study_figures([tmp_path])
    assert [figure.slug for figure in numbered] == [
        "study-figures-plain-1", "study-figures-path-2", "study-figures-path-1-3", "study-figures-path-4",
    ]  # fmt: skip
    assert len({figure.title for figure in numbered}) == 4
    runs = runs_of({"a": sample()})
    ids = re.findall(r' id="(.*?)"', render_html(make_sections(runs, numbered), runs))
    assert len(set(ids)) == len(ids)


def test_damaged_path_is_rejected(tmp_path: Path) -> None:
    data = path_data()
    del data["curves"][0]["accuracy"]
    (tmp_path / "path.json").write_text(json.dumps(data))
    with pytest.raises(DataError, match="incvec study path"):
        make_sections(runs_of({"a": sample()}), find_study_figures([tmp_path]))
    with pytest.raises(DataError, match="incvec study path"):
        _ = find_study_figures([tmp_path])[0].charts
