"""The command line, called in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from incvec.cli.main import app

SHORT = ["--set", "podnet.net=tiny", "--set", "podnet.epochs=1", "--set", "podnet.balance_epochs=1"]
PODNET = ["run", "--method", "podnet", "--dataset", "digits", *SHORT]


def invoke(*arguments: str | Path) -> Result:
    """Call `incvec` with these arguments."""
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, [str(a) for a in arguments], prog_name="incvec")


def message(result: Result) -> str:
    """The text on stderr, on one line."""
    return " ".join(result.stderr.split())
