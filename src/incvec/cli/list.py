"""`incvec list`: the methods, add-ons, data sets, presets, networks and sweeps that can be named."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from incvec.cli.common import PluginFiles, load_plugins
from incvec.study.catalog import everything, second_line

EXAMPLES = """[bold]Examples[/bold]

incvec list methods

incvec list presets

incvec list methods --json"""


Kind = StrEnum("Kind", ["methods", "addons", "datasets", "presets", "nets", "sweeps"])


def register(app: typer.Typer) -> None:
    app.command("list", epilog=EXAMPLES)(list_)


def list_(
    kind: Annotated[Kind | None, typer.Argument(help="What to list.", show_default="everything")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plugin: PluginFiles = None,
) -> None:
    """List the methods, add-ons, data sets, presets, networks and sweeps.

    Each entry has a one-line summary and, if there is one, its paper. A preset holds a component's settings for one
    data set; variants other than the paper's are selected with [bold]--variant[/bold].
    """
    load_plugins(plugin)
    catalog = {name: entries for name, entries in everything().items() if kind is None or name == kind}
    if as_json:
        typer.echo(json.dumps(catalog, indent=1, ensure_ascii=False))
        return
    console = Console()
    for heading, entries in catalog.items():
        console.print(heading, style="bold")
        width = max(len(entry["name"]) for entry in entries)
        for entry in entries:
            line = Text("  ").append(entry["name"].ljust(width), "cyan").append(f"  {entry['summary']}")
            if below := second_line(entry):
                line.append(f"\n{' ' * (width + 4)}{below}", "dim")
            console.print(line, soft_wrap=True)
        console.print()
