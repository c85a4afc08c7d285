"""A report on disk: one page for the screen, Markdown, LaTeX tables, and every figure as PNG and PDF."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import incvec
from incvec.errors import check_out
from incvec.study import ablations, charts, compare, contents, figures, labs, pretrained, reproduced, sheet, style
from incvec.study.charts import Chart, Heat
from incvec.study.groups import Entry, Group, group, panels
from incvec.study.sheet import Sheet

TITLE = "incvec: what was measured"
HINT = "Drag over a plot to zoom, double-click to see all of it, point at it or tap it for values."
DARK = (
    "color-scheme: dark; --ground: #14171a; --card: #1c2126; --ink: #e8ebee; --soft: #a3adb8; --rule: #343b43; "
    "--grid: #2a3037; --accent: #5db4f0; --select: rgba(93, 180, 240, 0.2); --tip: #e8ebee; --tip-ink: #14171a; "
)


@dataclass(frozen=True)
class Section:
    slug: str
    title: str
    sheets: tuple[Sheet, ...]
    charts: tuple[Chart, ...]
    pictures: tuple[labs.Finding, ...] = ()


def sections(entries: Sequence[Entry], findings: Sequence[labs.Finding] = ()) -> list[Section]:
    """All of the report, data set by data set; parts that would be empty are left out."""
    groups = group(entries)
    found: list[Section] = []
    usual = [*compare.paper(), *compare.paper_file()["pretrained"]]  # the paper's order, then by name
    names = sorted({each.dataset for each in groups})
    for dataset in sorted(names, key=lambda name: usual.index(name) if name in usual else len(usual)):
        found += dataset_sections(dataset, groups, [e for e in entries if e.record["dataset"] == dataset])
    how = Section("how-it-was-run", "How it was run", (contents.how_sheet(groups), contents.record_sheet(entries)), ())
    tables = tuple(table for finding in findings if (table := labs.path_sheet(finding)))
    drawn = tuple(chart for finding in findings if (chart := labs.path_chart(finding)))
    lab = Section("lab", "From the lab", tables, drawn, tuple(findings))
    return [part for part in [*found, lab, how] if part.sheets or part.charts or part.pictures]


def dataset_sections(dataset: str, every: Sequence[Group], entries: Sequence[Entry]) -> Iterator[Section]:
    groups = [each for each in every if each.dataset == dataset]
    tested = [each for each in groups if not each.first.record["config"].get("held_out")]  # by test images
    streams = sorted({each.stream for each in tested})
    chosen = panels(tested)

    def part(slug: str, title: str, sheets: Sequence[Sheet | None], drawn: Sequence[Chart | None]) -> Section:
        heading = f"{style.dataset(dataset)}: {title}"
        kept = tuple(each for each in sheets if each), tuple(each for each in drawn if each)
        return Section(f"{dataset}-{slug}", heading, *kept)

    yield part("ivt", "what IVT adds", [contents.gain_sheet(dataset, entries)], charts.gain_charts(dataset, entries))
    last = [charts.last_chart(stream, tested) for stream in streams]
    scratch = [entry.record for entry in entries if not pretrained.starts_pretrained(entry.record)]
    sheets = [*contents.paper_sheets(entries), *(ablations.sheets(dataset, scratch) if scratch else [])]
    sheets += pretrained.sheets(dataset, [entry.record for entry in entries])
    clip = any(pretrained.is_clip(entry.record) for entry in entries)
    comparable = (compare.paper() if scratch else ()), (compare.paper_file()["pretrained"] if clip else ())
    known = any(dataset in names for names in comparable)
    yield part("paper", "beside the paper" if known else "after the last task", sheets, last)
    gap = contents.gap_sheet(dataset, tested)
    yield part("tasks", "task after task", [gap], [charts.accuracy_chart(panel) for panel in chosen])
    yield part("matrices", "accuracy by task", [], [heat for panel in chosen for heat in charts.heat_charts(panel)])
    settings: list[Chart | None] = [*charts.switch_charts(tested), *charts.sweep_charts(tested)]
    settings += [charts.time_chart(stream, tested) for stream in streams]
    yield part("settings", "settings and time", [], settings)
    yield part("runs", "all that was run", [contents.group_sheet(dataset, groups)], [])


def lead(entries: Sequence[Entry]) -> str:
    """What the report stands on, in a sentence."""
    records = [entry.record for entry in entries]
    devices = sorted({contents.device(record) for record in records})
    seeds = len({entry.seed for entry in entries})
    count = f"{len(records)} records" if len(records) > 1 else "one record"
    return (
        f"Made from {count} of runs on {', '.join(devices)}, {seeds} {'seeds' if seeds > 1 else 'seed'}. "
        "Accuracies are in percent; every number follows from a record named at the end."
    )


def page(parts: Sequence[Section], entries: Sequence[Entry]) -> str:
    """The whole page in one file; nothing is fetched from anywhere."""
    body = []
    for part in parts:
        body.append(f'<section id="{html.escape(part.slug)}"><h2>{html.escape(part.title)}</h2>')
        body += [sheet.markup(each, part.title) for each in part.sheets]
        if part.charts:
            body += [f'<p class="hint">{HINT}</p>'] if not any("hint" in line for line in body) else []
            heats = all(isinstance(chart, Heat) for chart in part.charts)
            body.append(f'<div class="charts{" heats" if heats else ""}">')
            body += [*map(figure, part.charts), "</div>"]
        body += [picture(each) for each in part.pictures]
        body.append("</section>")
    every = [chart for part in parts for chart in part.charts]
    data = {"charts": [chart_data(chart) for chart in every], "stops": figures.color_stops()}
    links = [f'<a href="#{html.escape(part.slug)}">{html.escape(part.title)}</a>' for part in parts]
    colors = "".join(f"--c-{color[1:]}: {color}; " for color in style.palette())
    dark = DARK + "".join(f"--c-{color[1:]}: {style.dark(color)}; " for color in style.palette())
    filled = {
        "%STYLE%": asset("page.css").replace("%LIGHT%", colors).replace("%DARKROOT%", dark),
        "%SCRIPT%": asset("page.js"),
        "%TITLE%": html.escape(TITLE),
        "%LEAD%": html.escape(lead(entries)),
        "%CONTENTS%": "".join(links),
        "%FOOTER%": f"Made by incvec {html.escape(incvec.__version__)}.",
        "%DATA%": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "%BODY%": "\n".join(body),
    }
    text = asset("page.html")
    for mark, content in filled.items():
        text = text.replace(mark, content)
    return text


def picture(finding: labs.Finding) -> str:
    """A lab command's own picture, a click away from its full size."""
    address = labs.inline(finding)
    title = html.escape(finding.title)
    return (
        f'<figure class="picture"><figcaption><h3>{title}</h3></figcaption>'
        f'<div class="scroll"><img alt="{title}" src="{address}"></div></figure>'
    )


def figure(chart: Chart) -> str:
    title = chart.title
    note = f'<p class="note">{html.escape(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure id="{html.escape(chart.slug)}"><figcaption><h3>{html.escape(title)}</h3>{note}</figcaption>'
        '<div class="tools"></div><div class="plot"></div><div class="legend"></div></figure>'
    )


def chart_data(chart: Chart) -> dict[str, Any]:
    """A chart for the page's script, every name with its look."""

    def with_looks(value: Any) -> Any:
        if isinstance(value, dict):
            look = {"look": charts.look(value["name"])} if "name" in value else {}
            return {key: with_looks(inner) for key, inner in value.items()} | look
        return [with_looks(inner) for inner in value] if isinstance(value, list | tuple) else value

    found: dict[str, Any] = with_looks(asdict(chart))
    return found


def asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def markdown(parts: Sequence[Section], entries: Sequence[Entry]) -> str:
    lines = [f"# {TITLE}", "", lead(entries)]
    for part in parts:
        lines += ["", f"## {part.title}"]
        for each in part.sheets:
            heading = [] if each.title == part.title else ["", f"### {each.title}"]
            lines += [*heading, "", *([each.note, ""] if each.note else []), sheet.markdown(each)]
        for chart in part.charts:
            lines += ["", f"![{chart.title}](figures/{chart.slug}.png)"] + (["", chart.note] if chart.note else [])
        for finding in part.pictures:
            lines += ["", f"![{finding.title}](figures/{finding.slug}-picture.png)"]
    return "\n".join(lines) + "\n"


def write(entries: Sequence[Entry], out: Path, findings: Sequence[labs.Finding] = ()) -> Iterator[Path]:
    """Write the report, file by file."""
    check_out(out, "a report", "-o")
    parts = sections(entries, findings)
    for folder in (out / "figures", out / "tables"):
        folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.html": page(parts, entries),
        "report.md": markdown(parts, entries),
        "REPRODUCED.md": reproduced.page([entry.record for entry in entries]),
    }
    texts |= {f"tables/{each.slug}.tex": sheet.latex(each) for part in parts for each in part.sheets}
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
        yield out / name
    for part in parts:
        for chart in part.charts:
            yield from figures.write_chart(chart, out / "figures")
        for finding in part.pictures:
            for ending, content in finding.pictures.items():
                file = out / "figures" / f"{finding.slug}-picture{ending}"
                file.write_bytes(content)
                yield file
