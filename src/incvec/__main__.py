"""`python -m incvec`, and the console script: the command line, or how to install what it needs."""

from __future__ import annotations

import faulthandler
import sys
from importlib import metadata
from pathlib import Path

# What the extra `lab` brings, by the names one imports.
LAB = {
    "annotated_doc",
    "click",
    "matplotlib",
    "numpy",
    "pydantic",
    "pydantic_core",
    "rich",
    "safetensors",
    "sklearn",
    "torchvision",
    "typer",
    "yaml",
}


def command() -> str:
    """What installs the lab: by name where incvec is installed, else from the source tree it is run from."""
    try:
        metadata.version("incvec")
    except metadata.PackageNotFoundError:
        return f"pip install '{Path(__file__).resolve().parents[2]}[lab]'"
    return "pip install 'incvec[lab]'"


def main() -> None:
    """Run the command line and exit with its status."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a mapped file that cannot be read ends the process: say where
    try:
        from incvec.cli.main import app

        app(prog_name="incvec")
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LAB:
            raise
        print(
            f"incvec: the command line needs {missing} ({error}). Install the lab with\n\n    {command()}\n",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
