"""A report on disk: one HTML page, Markdown, LaTeX tables, and every figure as PNG and PDF."""

from __future__ import annotations

import html
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import incvec
from incvec.errors import DataError, check_out
from incvec.file_names import safe_name
from incvec.study import charts, figures, page_tables, reproduced, style
from incvec.study.charts import Bars, Chart, Heat, Lines
from incvec.study.details import panel_details
from incvec.study.gains import addon_gains, gains_table, headline
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
    charts: tuple[Lines | Bars | Heat, ...] = ()
    figures: tuple[StudyFigure, ...] = ()

    @property
    def page_charts(self) -> tuple[Chart, ...]:
        """Those of its figures included."""
        return (*self.charts, *(chart for figure in self.figures for chart in figure.charts))


def make_sections(runs: Sequence[RunRecord], study_figures: Sequence[StudyFigure] = ()) -> list[Section]:
    """The whole report, data set by data set, in the paper's order; empty sections are left out."""
    groups = group_runs(runs)
    order = [*paper_tables("scratch"), *paper_tables("pretrained")]
    datasets = sorted({group.dataset for group in groups})
    datasets.sort(key=lambda name: order.index(name) if name in order else len(order))
    gains = gains_table(addon_gains(groups))
    sections = [Section("headline", "What each add-on adds", (gains,))] if gains else []
    for dataset in datasets:
        own = [run for run in runs if run.record["dataset"] == dataset]
        sections += dataset_sections(dataset, [group for group in groups if group.dataset == dataset], own)
    tables = tuple(figure.table for figure in study_figures)
    sections.append(Section("study", "Figures of the study", tables, figures=tuple(study_figures)))
    how = (page_tables.how_table(groups), page_tables.record_table(runs))
    sections.append(Section("how-it-was-run", "How the runs were made", how))
    return [section for section in sections if section.tables or section.charts or section.figures]


def dataset_sections(dataset: str, groups: Sequence[Group], runs: Sequence[RunRecord]) -> Iterator[Section]:
    tested = [group for group in groups if not group.record["config"].get("held_out")]  # evaluated on test images
    streams = sorted({group.stream for group in tested})
    panels = make_panels(tested)

    def section(
        slug: str, title: str, tables: Sequence[Table | None], drawn: Sequence[Lines | Bars | Heat | None]
    ) -> Section:
        present = tuple(table for table in tables if table), tuple(chart for chart in drawn if chart)
        return Section(safe_name(f"{dataset}-{slug}"), f"{style.dataset(dataset)}: {title}", *present)

    in_paper = any(is_in_paper(run.record) for run in runs)
    gains = page_tables.gain_table(dataset, runs) if in_paper else None  # the page begins with ours alone
    yield section("ivt", "what IVT adds", [gains], charts.gain_charts(dataset, runs))
    last = [charts.last_accuracy_chart(stream, tested) for stream in streams]
    tables = page_tables.comparison_tables(dataset, runs)
    yield section("paper", "compared with the paper" if in_paper else "after the last task", tables, last)
    curves = [charts.accuracy_chart(panel) for panel in panels]
    yield section("tasks", "accuracy over the tasks", [page_tables.gap_table(dataset, tested)], curves)
    inside = [panel_details(panel) for panel in panels]
    yield section("training", "loss and teleports", [], [chart for each in inside for chart in each.training])
    confusion = [heat for each in inside for heat in each.confusion]
    yield section("classes", "by class", [each.classes for each in inside], confusion)
    yield section("matrices", "accuracy matrices", [], [heat for panel in panels for heat in charts.heat_charts(panel)])
    settings: list[Lines | Bars | None] = [*charts.settings_charts(tested), *charts.sweep_charts(tested)]
    settings += [charts.time_chart(stream, tested) for stream in streams]
    yield section("settings", "settings and time", [], settings)
    yield section("runs", "all runs", [page_tables.group_table(dataset, groups)], [])


def make_headline(runs: Sequence[RunRecord]) -> list[str]:
    return headline(addon_gains(group_runs(runs)))


def minus(text: str) -> str:
    """Negative numbers with minus signs; hyphens stay."""
    return re.sub(r"(?<=[ (])-(?=\d)", "−", text)


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
    first_with_charts = next((section for section in sections if section.page_charts), None)
    for section in sections:
        body.append(f'<section id="{html.escape(section.slug)}"><h2>{html.escape(section.title)}</h2>')
        body += [table.html(section.title) for table in section.tables]
        if section.page_charts:
            body += [f'<p class="hint">{HINT}</p>'] if section is first_with_charts else []
            heats = all(isinstance(chart, Heat) for chart in section.page_charts)
            body.append(f'<div class="charts{" heats" if heats else ""}">')
            body += [*map(chart_html, section.page_charts), "</div>"]
        body.append("</section>")
    data = {
        "charts": [chart_data(chart) for section in sections for chart in section.page_charts],
        "stops": figures.color_stops(),
    }
    links = [f'<a href="#{html.escape(section.slug)}">{html.escape(section.title)}</a>' for section in sections]
    light = "".join(f"--c-{color[1:]}: {style.light(color)}; " for color in style.palette())
    dark = DARK_THEME + "".join(f"--c-{color[1:]}: {style.dark(color)}; " for color in style.palette())
    content = {
        "STYLE": asset("page.css").replace("%LIGHT%", light).replace("%DARK%", dark),
        "SCRIPT": asset("page.js"),
        "TITLE": html.escape(TITLE),
        "HEADLINE": "".join(f"<li>{html.escape(minus(text))}</li>" for text in make_headline(runs)),
        "INTRODUCTION": html.escape(introduction(runs)),
        "CONTENTS": "".join(links),
        "FOOTER": f"Made by incvec {html.escape(incvec.__version__)}.",
        "DATA": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "BODY": "\n".join(body),
    }
    return re.sub(r"%([A-Z]+)%", lambda match: content[match[1]], asset("page.html"))


def chart_html(chart: Chart) -> str:
    """The frame that page.js draws a chart into."""
    note = f'<p class="note">{html.escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure id="{html.escape(chart.slug)}"><figcaption><h3>{html.escape(chart.title)}</h3>{note}</figcaption>'
        '<div class="tools"></div><div class="plot"></div><div class="legend"></div></figure>'
    )


def chart_data(chart: Chart) -> dict[str, Any]:
    """A chart for page.js, every run's name with its style."""
    data = asdict(chart)
    for members in (("lines", "levels"), ("bars",), ("marks",)):
        drawn = [each for member in members for each in data.get(member, ())]
        names = [each["name"] for each in drawn]
        styles = map(style.run_style, names) if members == ("bars",) else style.distinct(names)
        for each, own in zip(drawn, styles, strict=True):
            each["style"] = own._asdict()
    return data


def asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def render_markdown(sections: Sequence[Section], runs: Sequence[RunRecord]) -> str:
    lines = [f"# {TITLE}", "", *(f"- **{text}**" for text in make_headline(runs)), "", introduction(runs)]
    for section in sections:
        lines += ["", f"## {section.title}"]
        for table in section.tables:
            heading = [] if table.title == section.title else ["", f"### {table.title}"]
            lines += [*heading, "", *([table.note, ""] if table.note else []), table.markdown()]
        for chart in section.charts:
            lines += ["", f"![{chart.title}](figures/{chart.slug}.png)"] + (["", chart.note] if chart.note else [])
        for figure in section.figures:
            lines += ["", f"![{figure.title}](figures/{figure.slug}.png)"]
    return "\n".join(lines) + "\n"


def write_report(runs: Sequence[RunRecord], out: Path, study_figures: Sequence[StudyFigure] = ()) -> list[Path]:
    """Write the report aside, and move it into place when it is complete. Returns its files.

    Other files in the folder are left alone.
    """
    check_out(out, "a report", "-o")
    sections = make_sections(runs, study_figures)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=out if out.is_dir() else out.parent) as folder:
            aside = Path(folder) / "report"
            names = [file.relative_to(aside) for file in write_files(sections, runs, aside)]
            if out.is_dir():
                for name in reversed(names):  # the page last
                    (out / name).parent.mkdir(exist_ok=True)
                    os.replace(aside / name, out / name)
            else:
                os.replace(aside, out)
    except OSError as error:
        raise DataError(
            f"could not write the report to {out}: {error.strerror or error}. Free some space, or give another folder "
            "with -o."
        ) from error
    return [out / name for name in names]


def write_files(sections: Sequence[Section], runs: Sequence[RunRecord], folder: Path) -> Iterator[Path]:
    """Every file of a report, the page first."""
    for name in ("figures", "tables"):
        (folder / name).mkdir(parents=True)
    texts = {"report.html": render_html(sections, runs), "report.md": render_markdown(sections, runs)}
    if any(is_in_paper(run.record) for run in runs):
        texts["REPRODUCED.md"] = reproduced.render([run.record for run in runs])
    texts |= {f"tables/{table.slug}.tex": table.latex() for section in sections for table in section.tables}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
        yield folder / name
    for section in sections:
        for chart in section.charts:
            yield from figures.write_chart(chart, folder / "figures")
        for figure in section.figures:
            for ending, content in figure.pictures.items():
                file = folder / "figures" / f"{figure.slug}{ending}"
                file.write_bytes(content)
                yield file
