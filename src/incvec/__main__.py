"""`python -m incvec` and the console script: the command line, or how to install the packages that it needs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from importlib import metadata
from pathlib import Path
from types import FrameType

EXIT_INTERRUPTED = 130  # the shell's convention for a program ended by Ctrl-C
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


def interrupt(_: int, frame: FrameType | None) -> None:
    """Ctrl-C: end the command in an orderly way; while packages are imported, or the second time, at once.

    A process may end at any time: files are replaced as a whole, and the kernel releases locks. An exception within an
    import may be lost or become an `ImportError`.
    """
    signal.signal(signal.SIGINT, end_at_once)
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            end_at_once()
        frame = frame.f_back
    raise KeyboardInterrupt


def end_at_once(*_: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(EXIT_INTERRUPTED)


def main() -> None:
    """Run the command line and exit with its exit code."""
    # Read by OpenMP when torch is imported. By default its threads wait for each other by spinning, which
    # makes a command several times slower while another program uses one of the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGINT, interrupt)
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
        end_at_once()
    finally:
        signal.signal(signal.SIGINT, end_at_once)  # the interpreter's own shutdown


if __name__ == "__main__":
    main()
