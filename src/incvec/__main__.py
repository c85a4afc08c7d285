"""`python -m incvec` and the console script: the command line, or how to install the packages that it needs."""

from __future__ import annotations

import faulthandler
import sys
from importlib import metadata
from pathlib import Path

# Import names of the packages that the extra `lab` installs.
LAB_PACKAGES = {
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


def install_command() -> str:
    """The command that installs the lab: by name if incvec is installed, else from the source tree."""
    try:
        metadata.version("incvec")
    except metadata.PackageNotFoundError:
        return f"pip install '{Path(__file__).resolve().parents[2]}[lab]'"
    return "pip install 'incvec[lab]'"


def main() -> None:
    """Run the command line and exit with its exit code."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # an unreadable memory-mapped file kills the process: print where
    try:
        from incvec.cli.main import app

        app(prog_name="incvec")
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LAB_PACKAGES:
            raise
        print(
            f"incvec: the command line needs {missing} ({error}). Install the lab with\n\n    {install_command()}\n",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
