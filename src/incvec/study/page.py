"""A report on disk: one HTML page, Markdown, LaTeX tables, and every figure as PNG and PDF."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import incvec
from incvec.errors import check_out
from incvec.file_names import safe_name
from incvec.study import charts, figures, page_tables, reproduced, style
from incvec.study.charts import Chart, Heat
from incvec.study.groups import Group, group_runs, make_panels
from incvec.study.page_figures import StudyFigure
from incvec.study.paper import is_in_paper, paper_tables
from incvec.study.runs import RunRecord
from incvec.study.tables import Table

TITLE = "incvec: results"
HINT = "Drag over a plot to zoom, double-click to reset it, point at a mark or tap it for its value."
DARK_THEME = (
    "color-scheme: dark; --ground: #14171a; --card: #1c2126; --ink: #e8ebee; --soft: #a3adb8; --rule: #343b43; "
    "--grid: #2a3037; --accent: #5db4f0; --select: rgba(93, 180, 240, 0.2); --tip: #e8ebee; --tip-ink: #14171a; "
)


@dataclass(frozen=True)
class Section:
    slug: str
    title: str
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    figures: tuple[StudyFigure, ...] = ()


def make_sections(runs: Sequence[RunRecord], study_figures: Sequence[StudyFigure] = ()) -> list[Section]:
    """The whole report, data set by data set, in the paper's order; empty sections are left out."""
    groups = group_runs(runs)
    order = [*paper_tables("scratch"), *paper_tables("pretrained")]
    datasets = sorted({group.dataset for group in groups})
    datasets.sort(key=lambda name: order.index(name) if name in order else len(order))
    sections: list[Section] = []
    for dataset in datasets:
        own = [run for run in runs if run.record["dataset"] == dataset]
        sections += dataset_sections(dataset, [group for group in groups if group.dataset == dataset], own)
    paths = [figure for figure in study_figures if figure.data["kind"] == "path"]
    tables, drawn = tuple(path.path_table() for path in paths), tuple(path.path_chart() for path in paths)
    sections.append(Section("study", "Figures of the study", tables, drawn, tuple(study_figures)))
    how = (page_tables.how_table(groups), page_tables.record_table(runs))
    sections.append(Section("how-it-was-run", "How the runs were made", how))
    return [section for section in sections if section.tables or section.charts or section.figures]


def dataset_sections(dataset: str, groups: Sequence[Group], runs: Sequence[RunRecord]) -> Iterator[Section]:
    tested = [group for group in groups if not group.record["config"].get("held_out")]  # evaluated on test images
    streams = sorted({group.stream for group in tested})
    panels = make_panels(tested)

    def section(slug: str, title: str, tables: Sequence[Table | None], drawn: Sequence[Chart | None]) -> Section:
        present = tuple(table for table in tables if table), tuple(chart for chart in drawn if chart)
        return Section(safe_name(f"{dataset}-{slug}"), f"{style.dataset(dataset)}: {title}", *present)

    yield section("ivt", "what IVT adds", [page_tables.gain_table(dataset, runs)], charts.gain_charts(dataset, runs))
    last = [charts.last_accuracy_chart(stream, tested) for stream in streams]
    tables = page_tables.comparison_tables(dataset, runs)
    in_paper = any(is_in_paper(run.record) for run in runs)
    yield section("paper", "compared with the paper" if in_paper else "after the last task", tables, last)
    curves = [charts.accuracy_chart(panel) for panel in panels]
    yield section("tasks", "accuracy over the tasks", [page_tables.gap_table(dataset, tested)], curves)
    yield section("matrices", "accuracy matrices", [], [heat for panel in panels for heat in charts.heat_charts(panel)])
    settings: list[Chart | None] = [*charts.settings_charts(tested), *charts.sweep_charts(tested)]
    settings += [charts.time_chart(stream, tested) for stream in streams]
    yield section("settings", "settings and time", [], settings)
    yield section("runs", "all runs", [page_tables.group_table(dataset, groups)], [])


def introduction(runs: Sequence[RunRecord]) -> str:
    devices = sorted({page_tables.origin(run.record)[0] for run in runs})
    seeds = len({run.seed for run in runs})
    count = f"{len(runs)} records" if len(runs) > 1 else "one record"
    return (
        f"Made from {count} of runs on {', '.join(devices)}, {seeds} {'seeds' if seeds > 1 else 'seed'}. "
        "Accuracies are in percent; every number follows from a record listed at the end."
    )


def render_html(sections: Sequence[Section], runs: Sequence[RunRecord]) -> str:
    """The whole page in one file, which loads nothing else."""
    body: list[str] = []
    first_with_charts = next((section for section in sections if section.charts), None)
    for section in sections:
        body.append(f'<section id="{html.escape(section.slug)}"><h2>{html.escape(section.title)}</h2>')
        body += [table.html(section.title) for table in section.tables]
        if section.charts:
            body += [f'<p class="hint">{HINT}</p>'] if section is first_with_charts else []
            heats = all(isinstance(chart, Heat) for chart in section.charts)
            body.append(f'<div class="charts{" heats" if heats else ""}">')
            body += [*map(chart_html, section.charts), "</div>"]
        body += [*map(figure_html, section.figures), "</section>"]
    data = {
        "charts": [chart_data(chart) for section in sections for chart in section.charts],
        "stops": figures.color_stops(),
    }
    links = [f'<a href="#{html.escape(section.slug)}">{html.escape(section.title)}</a>' for section in sections]
    light = "".join(f"--c-{color[1:]}: {color}; " for color in style.palette())
    dark = DARK_THEME + "".join(f"--c-{color[1:]}: {style.dark(color)}; " for color in style.palette())
    content = {
        "STYLE": asset("page.css").replace("%LIGHT%", light).replace("%DARK%", dark),
        "SCRIPT": asset("page.js"),
        "TITLE": html.escape(TITLE),
        "INTRODUCTION": html.escape(introduction(runs)),
        "CONTENTS": "".join(links),
        "FOOTER": f"Made by incvec {html.escape(incvec.__version__)}.",
        "DATA": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "BODY": "\n".join(body),
    }
    return re.sub(r"%([A-Z]+)%", lambda match: content[match[1]], asset("page.html"))


def figure_html(figure: StudyFigure) -> str:
    title = html.escape(figure.title)
    return (
        f'<figure class="picture"><figcaption><h3>{title}</h3></figcaption>'
        f'<div class="scroll"><img alt="{title}" src="{figure.data_url}"></div></figure>'
    )


def chart_html(chart: Chart) -> str:
    """The frame that page.js draws a chart into."""
    note = f'<p class="note">{html.escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure id="{html.escape(chart.slug)}"><figcaption><h3>{html.escape(chart.title)}</h3>{note}</figcaption>'
        '<div class="tools"></div><div class="plot"></div><div class="legend"></div></figure>'
    )


def chart_data(chart: Chart) -> dict[str, Any]:
    """A chart for page.js, every run's name with its style."""

    def with_styles(value: Any) -> Any:
        if isinstance(value, dict):
            run_style = {"style": style.run_style(value["name"])._asdict()} if "name" in value else {}
            return {key: with_styles(inner) for key, inner in value.items()} | run_style
        return [with_styles(inner) for inner in value] if isinstance(value, list | tuple) else value

    data: dict[str, Any] = with_styles(asdict(chart))
    return data


def asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def render_markdown(sections: Sequence[Section], runs: Sequence[RunRecord]) -> str:
    lines = [f"# {TITLE}", "", introduction(runs)]
    for section in sections:
        lines += ["", f"## {section.title}"]
        for table in section.tables:
            heading = [] if table.title == section.title else ["", f"### {table.title}"]
            lines += [*heading, "", *([table.note, ""] if table.note else []), table.markdown()]
        for chart in section.charts:
            lines += ["", f"![{chart.title}](figures/{chart.slug}.png)"] + (["", chart.note] if chart.note else [])
        for figure in section.figures:
            lines += ["", f"![{figure.title}](figures/{figure.slug}-picture.png)"]
    return "\n".join(lines) + "\n"


def write_report(runs: Sequence[RunRecord], out: Path, study_figures: Sequence[StudyFigure] = ()) -> Iterator[Path]:
    """Write the report, file by file."""
    check_out(out, "a report", "-o")
    sections = make_sections(runs, study_figures)
    for folder in (out / "figures", out / "tables"):
        folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.html": render_html(sections, runs),
        "report.md": render_markdown(sections, runs),
        "REPRODUCED.md": reproduced.render([run.record for run in runs]),
    }
    texts |= {f"tables/{table.slug}.tex": table.latex() for section in sections for table in section.tables}
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
        yield out / name
    for section in sections:
        for chart in section.charts:
            yield from figures.write_chart(chart, out / "figures")
        for figure in section.figures:
            for ending, content in figure.pictures.items():
                file = out / "figures" / f"{figure.slug}-picture{ending}"
                file.write_bytes(content)
                yield file
