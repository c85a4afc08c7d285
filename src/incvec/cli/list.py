"""`incvec list`: the methods, add-ons, data sets, presets, networks and sweeps that can be named."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.text import Text

from incvec.addons import ADDONS
from incvec.cli.common import PluginFiles, load_plugins, say
from incvec.config import read_yaml
from incvec.data.datasets import DATASETS, find_dataset
from incvec.declarations import networks
from incvec.errors import ConfigError, nearest
from incvec.methods import METHODS
from incvec.presets import declared_component, load_presets, presets, sweeps
from incvec.study.runs import yaml_value

EXAMPLES = """[bold]Examples[/bold]

incvec list

incvec list methods

incvec list methods podnet

incvec list presets podnet

incvec list methods --json"""

Entry = dict[str, str]
Kind = StrEnum("Kind", ["methods", "addons", "datasets", "presets", "nets", "sweeps"])
KIND_HELP = f"What to list: {', '.join(Kind)}."


def register(app: typer.Typer) -> None:
    app.command("list", epilog=EXAMPLES)(list_)


def complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    kind = ctx.params.get("kind")
    return [] if kind is None else [name for name in names_of(Kind(kind)) if name.startswith(incomplete)]


def list_(
    kind: Annotated[
        Kind | None, typer.Argument(metavar="KIND", help=KIND_HELP, show_default="everything, briefly")
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One of them: options with defaults, values of a preset, runs of a sweep.",
            show_default=False,
            autocompletion=complete_name,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plugin: PluginFiles = None,
) -> None:
    """List the methods, add-ons, data sets, presets, networks and sweeps, or describe one.

    Each entry has a one-line summary and, if there is one, its paper. A preset holds a component's settings for one
    data set; variants other than the paper's are selected with [bold]--variant[/bold].
    """
    load_plugins(plugin)
    console = Console()
    if kind is not None and name is not None:
        details = details_of(kind, name)
        say(json.dumps(details, indent=1, ensure_ascii=False) if as_json else describe(details), console=console)
        return
    if as_json:
        catalog = {key: entries(key) for key in Kind if kind is None or key == kind}
        typer.echo(json.dumps(catalog, indent=1, ensure_ascii=False))
    elif kind is None:
        print_overview(console)
    else:
        print_entries(entries(kind), console)


# What there is ------------------------------------------------------------------------------------------------


def names_of(kind: Kind) -> list[str]:
    match kind:
        case Kind.methods:
            return list(METHODS)
        case Kind.addons:
            return list(ADDONS)
        case Kind.datasets:
            return list(DATASETS)
        case Kind.presets:
            return [*dict.fromkeys(row["component"] for row in presets()), *(row["name"] for row in presets())]
        case Kind.nets:
            return list(networks())
        case Kind.sweeps:
            return list(sweeps())
    raise ValueError(kind)


def entries(kind: Kind) -> list[Entry]:
    """Name, summary and paper of everything of a kind."""
    match kind:
        case Kind.methods | Kind.addons:
            return [component_entry(name) for name in names_of(kind)]
        case Kind.datasets:
            return [{"name": name, "summary": entry.summary, "paper": entry.source} for name, entry in DATASETS.items()]
        case Kind.presets:
            rows = [{key: value for key, value in row.items() if key != "values"} for row in presets()]
            return [{**row, **component_entry(row["component"]), "name": row["name"]} for row in rows]
        case Kind.nets:
            return [{"name": name, "summary": summary} for name, summary in networks().items()]
        case Kind.sweeps:
            return [{"name": name, "summary": read_yaml(file)["summary"]} for name, file in sweeps().items()]
    raise ValueError(kind)


def component_entry(name: str) -> Entry:
    kind = declared_component(name)
    return {"name": name, "summary": kind.summary, "paper": kind.paper}


# One of them --------------------------------------------------------------------------------------------------


def component_details(name: str) -> dict[str, Any]:
    kind = declared_component(name)
    known = load_presets(name)
    details = component_entry(name) | {
        "presets": [row["name"] for row in presets() if row["component"] == name] if known.datasets else [],
        "options": option_rows(kind.Options),
    }
    return details


def option_rows(kind: Any) -> list[dict[str, Any]]:
    """Name, default and description of every option."""
    return [
        {
            "name": name,
            "default": None if field.is_required() else json_value(field.get_default(call_default_factory=True)),
            "choices": choices(field.annotation),
            "description": field.description or "",
        }
        for name, field in kind.model_fields.items()
    ]


def choices(annotation: Any) -> list[str]:
    """The values that an option may have, if it is one of several words."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for part in get_args(annotation) for value in choices(part)]


def json_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def preset_details(name: str) -> dict[str, Any]:
    """One preset with its values, or all of a component: `podnet-cifar100`, `podnet`."""
    rows = [row for row in presets() if name in (row["name"], row["component"])]
    check_name(Kind.presets, name, bool(rows))
    return {"name": name, "values": {row["name"]: row["values"] for row in rows}}


def details_of(kind: Kind, name: str) -> dict[str, Any]:
    """All about one method, add-on, preset, data set, network or sweep."""
    if kind is Kind.presets:
        return preset_details(name)
    check_name(kind, name, name in names_of(kind))
    if kind in (Kind.methods, Kind.addons):
        return component_details(name)
    details: dict[str, Any] = next(dict(entry) for entry in entries(kind) if entry["name"] == name)
    if kind is Kind.datasets:
        details["options"] = option_rows(find_dataset(name).Options)
    if kind is Kind.sweeps:
        details["file"] = sweeps()[name].read_text()
    return details


def check_name(kind: Kind, name: str, known: bool) -> None:
    if not known:
        choices = names_of(kind)
        raise ConfigError(f"there is no {name!r} among the {kind}.{nearest(name, choices)} See `incvec list {kind}`.")


# As text ------------------------------------------------------------------------------------------------------


def print_overview(console: Console) -> None:
    """All names, on one screen."""
    component_names = dict.fromkeys(row["component"] for row in presets())
    for kind in Kind:
        names: Iterable[str] = component_names if kind is Kind.presets else names_of(kind)
        text = textwrap.fill(
            ", ".join(names), max(console.width - 1, 40), initial_indent=" " * 10, subsequent_indent=" " * 10,
            break_on_hyphens=False,
        )  # fmt: skip
        console.print(Text(f"{kind:9}", "bold").append(text[9:], "cyan"), soft_wrap=True, highlight=False)
    say("`incvec list methods` has summaries, `incvec list methods podnet` its options.", style="dim")


def print_entries(found: Iterable[Entry], console: Console) -> None:
    found = list(found)
    width = max(len(entry["name"]) for entry in found)
    lines = []
    for entry in found:
        line = Text("  ").append(entry["name"].ljust(width), "cyan").append(f"  {entry['summary']}")
        if below := second_line(entry):
            line.append(f"\n{' ' * (width + 4)}{below}", "dim")
        lines.append(line)
    console.print(Text("\n").join(lines), soft_wrap=True, highlight=False)


def second_line(entry: Entry) -> str:
    """The paper of a component; for a preset, the option that selects it."""
    variant = entry.get("variant")
    if variant is None:
        return entry.get("paper", "")
    automatic = {"paper": "", "pretrained": "applies by itself to models that start pre-trained"}
    return automatic.get(variant, f"--variant {variant}")


def option_text(row: Mapping[str, Any]) -> str:
    """The description of an option and the words it may be set to."""
    return "; ".join(filter(None, (row["description"], " | ".join(row["choices"]))))


def describe(details: Mapping[str, Any]) -> str:
    lines = [details["name"]] if "values" not in details else []
    lines += [f"  {details[key]}" for key in ("summary", "paper") if details.get(key)]
    if details.get("presets"):
        lines.append(f"  presets: {', '.join(details['presets'])}")
    if "options" in details:
        prefix = "" if details["name"] in DATASETS else f"{details['name']}."
        rows = [(f"{prefix}{row['name']}={yaml_value(row['default'])}", option_text(row)) for row in details["options"]]
        width = max((len(setting) for setting, _ in rows), default=0)
        lines.append("  options with their defaults, as --set takes them:")
        lines += [f"    {setting:<{width}}  {description}".rstrip() for setting, description in rows]
    for name, values in details.get("values", {}).items():
        lines.append(f"{name}:" if values else f"{name}: the defaults of the options")
        lines += [f"  {key}: {yaml_value(value)}" for key, value in values.items()]
    if "file" in details:
        lines.append(details["file"].rstrip())
    return "\n".join(lines)
