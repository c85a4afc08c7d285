"""The `incvec` command: assembles the commands and turns errors into messages and exit codes.

The module of a command is imported when the command is used: `incvec --help` and the completion of names take their
summaries from the table below.
"""

from __future__ import annotations

import inspect
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

import incvec
from incvec.__main__ import EXIT_INTERRUPTED
from incvec.cli.common import is_torchrun, say, say_error
from incvec.errors import REPORT_AT, nearest, user_message


class Command(NamedTuple):
    """A command whose module, with a function `register(app)`, is not imported yet."""

    module: str
    panel: str
    summary: str  # the first paragraph of its help


COMMANDS = {
    "learn": Command(
        "classifier",
        "Your own classifier",
        "Learn the classes of a folder of photos: the first ones with --out, further ones with --into.",
    ),
    "adopt": Command(
        "classifier",
        "Your own classifier",
        "Make a classifier from a network that was trained elsewhere: its classes count as the first learn.",
    ),
    "predict": Command("classifier", "Your own classifier", "Name the class of photos, with its probability."),
    "evaluate": Command(
        "classifier",
        "Your own classifier",
        "Measure accuracy on class folders: by class, by when it was learned, and which classes are confused.",
    ),
    "export": Command(
        "classifier",
        "Your own classifier",
        "Write the network to a file that other programs run: labels and preprocessing are inside.",
    ),
    "info": Command(
        "classifier",
        "Your own classifier",
        "Show what a classifier knows and keeps: classes, history, accuracy then and now, memory, size.",
    ),
    "undo": Command(
        "classifier",
        "Your own classifier",
        "Go back to before the last `learn`. It cannot be repeated: one version is kept.",
    ),
    "demo": Command(
        "demo",
        "Training",
        "Train PODNet without and with IVT on embedded digits with three seeds each, and PODNet's oracle once.",
    ),
    "run": Command(
        "run", "Training", "Train one method on one data set, task by task, and write a record of the results."
    ),
    "sweep": Command(
        "sweep",
        "Training",
        "Train many runs, several at once on a GPU. Base tasks that runs have in common are trained once.",
    ),
    "show": Command(
        "show",
        "Results",
        "Compare records: average accuracy (AA), last accuracy (LA), forgetting (FM) and the oracle gap closed.",
    ),
    "study": Command("study", "Results", "Figures of finished runs: paths, trade-off, plane, gap, curvature."),
    "report": Command(
        "report",
        "Results",
        "Write a report from records: what each add-on adds, accuracy, losses, classes, settings, the paper's numbers.",
    ),
    "list": Command(
        "list", "Data and names", "List the methods, add-ons, data sets, presets, networks and sweeps, or describe one."
    ),
    "data": Command("data", "Data and names", "Check, pack and copy data sets."),
}


class Commands(TyperGroup):
    """Imports commands when they are used, and reports errors that the user can fix as one message and an exit code.
    Other errors keep their traceback.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or its summary only if its module was not imported."""
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        known = COMMANDS[cmd_name]
        return TyperCommand(cmd_name, help=known.summary, rich_help_panel=known.panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.load(args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}.{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> Any:
        """Import a command's module. None if there is no such command."""
        if name in COMMANDS and name not in self.commands:
            app = typer.Typer(rich_markup_mode="rich")
            import_module(f"incvec.cli.{COMMANDS[name].module}").register(app)
            arrange_help(app)
            self.commands.update(typer.main.get_group(app).commands)
        return self.commands.get(name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("Interrupted. Run the same command again to resume.", console=Console(stderr=True))
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except Exception as error:
            exit_if_peer_failed(error)
            message = user_message(error)
            if message is None:
                # Typer reports its own exceptions: wrong usage, and the end of a command.
                if not type(error).__module__.startswith(("typer", "click")):
                    error.add_note(REPORT_AT)
                raise
            if not (is_torchrun() and os.environ["RANK"] != "0" and not is_connected()):
                say_error(message)
        raise typer.Exit(1)


def is_connected() -> bool:
    """Whether the processes of a distributed run have met. Before that all of them have the same errors."""
    if "torch" not in sys.modules:
        return False
    import torch

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def exit_if_peer_failed(error: Exception) -> None:
    """End this process if another process of a distributed run failed; that process reports the cause."""
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:  # so does `incvec run --help` end
        return
    from incvec.engine.distributed import abort, is_main_process, is_peer_failure

    if is_peer_failure(error):
        if is_main_process():
            say_error(
                "another process of this run ended, so this one stops too. That process reports the cause, unless it "
                "was killed. Run the same command again to resume."
            )
        abort()


def arrange_help(group: typer.Typer) -> None:
    """Let the terminal wrap the help texts of commands instead of the docstrings' lines."""
    for subgroup in group.registered_groups:
        if subgroup.typer_instance is not None:
            arrange_help(subgroup.typer_instance)
    for command in group.registered_commands:
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
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="New here? [bold]incvec demo[/bold] trains seven small runs on embedded data and draws the result, in "
    "about a minute on a CPU. [bold]incvec COMMAND --help[/bold] describes a command and shows examples.",
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Class-incremental learning with Increment Vector Transformation (IVT).

    Make a classifier of your own photos that keeps learning classes.

    Train any method with or without IVT and other add-ons, compare it with its oracle, and study the results.
    """
