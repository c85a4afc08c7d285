"""`incvec show`: records side by side, as a table."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from incvec.cli.common import say_error
from incvec.errors import ConfigError
from incvec.records import read_record, readable
from incvec.study.run_table import RunRow, run_rows, show_tables, sort_rows

EXAMPLES = """[bold]Examples[/bold]

incvec show

incvec show runs --sort LA

incvec show runs/digits-podnet-3-s0 runs/digits-podnet+ivt-3-s0 --markdown

incvec show runs --csv > runs.csv

incvec show runs --json"""

RUNS = Path("runs")
SORT_HELP = "Order of the rows: name, AA, LA, FM, gain_LA, gap_closed or seconds; by a metric, the best comes first."


class Order(StrEnum):
    run = "name"
    average = "AA"
    last = "LA"
    forgetting = "FM"
    gain = "gain_LA"
    gap = "gap_closed"
    seconds = "seconds"


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(show)


def show(
    record: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RECORD", help="Folders of runs, or their record.json.", show_default="runs"),
    ] = None,
    sort: Annotated[Order, typer.Option(metavar="COLUMN", help=SORT_HELP)] = Order.run,
    each: Annotated[bool, typer.Option("--each", help="One row per run, also if there are several seeds.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with unrounded numbers, one row per run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with unrounded numbers.")] = False,
) -> None:
    """Compare records: average accuracy (AA), last accuracy (LA), forgetting (FM) and the oracle gap closed.

    AA, LA and FM are percentages; a lower FM is better. Runs that differ only in their seed are one row, with mean and
    standard deviation. The gain of an add-on in LA is that over the same method without it, paired by seed. The share
    of the gap that it closes also needs the record of the oracle, with the same settings and seed.
    """
    if markdown + as_csv + as_json > 1:
        raise ConfigError("--markdown, --csv and --json exclude each other; give one of them.")
    files = readable(record or [RUNS], say_error)
    records = [read_record(file) for file in files]
    rows = sort_rows(run_rows(records, [str(file) for file in files]), sort.value)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False))
        return
    if as_csv:
        writer = csv.DictWriter(sys.stdout, [field.name for field in fields(RunRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
        return
    for table in show_tables(rows, each, footnotes=not markdown):
        if markdown:
            typer.echo(f"**{table.title}**\n\n{table.markdown()}\n" if table.title else table.markdown())
        else:
            Console().print(table.rich())
