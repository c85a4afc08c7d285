"""`incvec report`: from records to a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

EXAMPLES = """[bold]Examples[/bold]

incvec report results -o report

incvec report runs/podnet runs/podnet+ivt -o report"""


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(report)


def report(
    results: Annotated[list[Path], typer.Argument(help="Records, or folders that hold some.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write into.")] = Path("report"),
) -> None:
    """Make tables and figures from records: ours beside the paper's, what IVT adds, the oracle gap, how it was run.

    Writes report.html (one page that works offline), report.md, tables/*.tex (booktabs), figures/*.png and *.pdf.
    What `incvec lab` left among the records is shown too.
    """
    from incvec.study import document, labs
    from incvec.study import groups as study

    entries = study.load(results)
    files = list(document.write(entries, out, labs.find(results)))
    kinds = {suffix: sum(file.suffix == suffix for file in files) for suffix in (".tex", ".png")}
    console = Console()
    console.print(
        f"{len(entries)} records; {kinds['.tex']} tables, {kinds['.png']} figures; open {out / 'report.html'}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
