"""`incvec report`: tables and figures from records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from incvec.cli.common import say

EXAMPLES = """[bold]Examples[/bold]

incvec report results -o report

incvec report runs/podnet runs/podnet+ivt -o report"""


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(report)


def report(
    results: Annotated[list[Path], typer.Argument(help="Records, or folders that contain records.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder.")] = Path("report"),
) -> None:
    """Write a report from records: what each add-on adds, accuracy, losses, classes, settings, the paper's numbers.

    Writes report.html (one page that works offline), report.md, tables/*.tex (booktabs), figures/*.png and *.pdf, and
    REPRODUCED.md if a data set of the paper is among the records. Figures that `incvec study` wrote among the records
    are included. Takes about half a second per figure.
    """
    from incvec.study.page import write_report
    from incvec.study.page_figures import find_study_figures
    from incvec.study.runs import load_runs

    runs = load_runs(results)
    files = write_report(runs, out, find_study_figures(results))
    tables, figures = (sum(file.suffix == suffix for file in files) for suffix in (".tex", ".png"))
    say(f"{len(runs)} records; {tables} tables, {figures} figures; open {out / 'report.html'}")
