"""`incvec show`: records side by side, as a table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from incvec.cli.common import say_error
from incvec.errors import ConfigError
from incvec.records import read_record, readable
from incvec.study.run_table import run_rows, runs_table

EXAMPLES = """[bold]Examples[/bold]

incvec show runs

incvec show runs/digits-podnet-3-s0 runs/digits-podnet+ivt-3-s0 --markdown

incvec show runs --json"""


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(show)


def show(
    record: Annotated[list[Path], typer.Argument(help="Records, or folders that contain records.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with unrounded numbers.")] = False,
) -> None:
    """Compare records: average accuracy (AA), last accuracy (LA), forgetting (FM) and the oracle gap closed.

    AA, LA and FM are percentages; a lower FM is better. The share of the gap that an add-on closes needs the record of
    the plain method and that of its oracle, with the same settings and seed.
    """
    if markdown and as_json:
        raise ConfigError("--markdown and --json exclude each other; give one of them.")
    files = readable(record, say_error)
    rows = run_rows([read_record(file) for file in files], [str(file) for file in files])
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False))
    elif markdown:
        typer.echo(runs_table(rows, footnotes=False).markdown())
    else:
        Console().print(runs_table(rows).rich())
