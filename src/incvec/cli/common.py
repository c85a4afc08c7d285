"""What several commands share: plain lines of text on the terminal, and common options."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from incvec.declarations import declared


def option(panel: str, text: str, *names: str, default: str | bool = False, **more: Any) -> Any:
    """An option in one panel of the help; `default` is the text shown as its default."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=default, **more)


DataRoot = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the data set's files.", envvar="INCVEC_DATA", show_default=False, rich_help_panel="Data"
    ),
]
PluginFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="Python file that registers methods, add-ons or data sets. Repeat for several files.",
        show_default=False,
        rich_help_panel="Extensions",
    ),
]
SeedList = Annotated[
    str | None,
    typer.Option(
        help="Several training seeds, such as 0,1,2 or 0-4: one run for each.",
        show_default=False,
        metavar="N,N,...",
        rich_help_panel="Experiment",
    ),
]


def complete_methods() -> list[str]:
    """Names for the shell's completion; typer selects those that begin with what was typed."""
    from incvec.methods import METHODS

    return list(METHODS)


def complete_addons() -> list[str]:
    from incvec.addons import ADDONS

    return list(ADDONS)


def complete_datasets() -> list[str]:
    from incvec.data.datasets import DATASETS

    return list(DATASETS)


def complete_sweeps() -> list[str]:
    from incvec.presets import sweeps

    return list(sweeps())


def is_torchrun() -> bool:
    """Whether this process is one of several of a run; from its environment, without importing torch."""
    return bool(declared("incvec.engine.distributed", "is_distributed")())


def load_plugins(files: Iterable[Path] | None) -> None:
    """Import the files given with --plugin, so that the names they register are known."""
    from incvec.registry import load_plugin

    for file in files or ():
        load_plugin(file)


def say(text: str, *, style: str = "", console: Console | None = None) -> None:
    """Print text verbatim: brackets are not markup, numbers are not highlighted, long lines are not wrapped."""
    text = text.encode(errors="backslashreplace").decode()  # names of files may be any bytes
    (console or Console()).print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def say_error(text: str) -> None:
    """Print one error message on stderr."""
    say(f"error: {text}", style="red", console=Console(stderr=True))
