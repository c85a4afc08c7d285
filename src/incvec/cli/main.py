"""The `incvec` command: assembles the commands and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import inspect
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import incvec
from incvec.cli import classifier, data, demo, report, run, show, study, sweep
from incvec.cli import list as list_command
from incvec.cli.common import say, say_error
from incvec.errors import IncvecError

PANELS = {
    **dict.fromkeys(("learn", "predict", "evaluate", "export", "info", "undo"), "Your own classifier"),
    **dict.fromkeys(("demo", "run", "sweep"), "Training"),
    **dict.fromkeys(("show", "report", "study"), "Results"),
    **dict.fromkeys(("list", "data"), "Data and names"),
}
EXIT_INTERRUPTED = 130  # the shell convention for a program ended by Ctrl-C


class Commands(TyperGroup):
    """Reports errors that the user can fix as one message and an exit code. Other errors keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except IncvecError as error:
            say_error(str(error))
        except OSError as error:
            if error.errno == errno.EPIPE or error.filename is None:
                raise
            say_error(f"{error.filename}: {error.strerror}.")
        except RuntimeError as error:
            exit_if_peer_failed(error)
            raise
        except KeyboardInterrupt:
            say("Interrupted. Run the same command again to resume.", console=Console(stderr=True))
            raise typer.Exit(EXIT_INTERRUPTED) from None
        raise typer.Exit(1)


def exit_if_peer_failed(error: RuntimeError) -> None:
    """End this process if another process of a distributed run failed; that process reports the cause."""
    from incvec.engine.distributed import abort, is_main_process, is_peer_failure

    if is_peer_failure(error):
        if is_main_process():
            say_error(
                "another process of this run ended, so this one stops too. That process reports the cause, unless it "
                "was killed. Run the same command again to resume."
            )
        abort()


def arrange_help(group: typer.Typer) -> None:
    """Put the commands into panels, and let the terminal wrap their help texts instead of the docstrings' lines."""
    for subgroup in group.registered_groups:
        subgroup.rich_help_panel = PANELS.get(str(subgroup.name))
    for command in group.registered_commands:
        command.rich_help_panel = PANELS.get(str(command.name or getattr(command.callback, "__name__", None)))
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"incvec {incvec.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="incvec",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="New here? [bold]incvec demo[/bold] trains four runs on embedded data and draws the result, in about a "
    "minute on a CPU. [bold]incvec COMMAND --help[/bold] describes a command and shows examples.",
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Class-incremental learning with increment vectors.

    Train any method with or without IVT and other add-ons, compare it with its oracle, and study the results.
    """


for register in (module.register for module in (classifier, demo, run, sweep, show, study, report, list_command, data)):
    register(app)
for group in (app, study.app, data.app):
    arrange_help(group)
