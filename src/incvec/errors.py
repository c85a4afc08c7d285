"""Errors meant for the user: the command line prints them without a traceback.

A message says what was given, what was expected and what to do. Mistakes of a caller in code (a wrong shape,
a missing generator) stay `ValueError` or `TypeError`, whose traceback is wanted.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class IncvecError(Exception):
    """The base of every error a user can put right."""


class DataError(IncvecError):
    """Missing, truncated, altered, unreadable or too few data."""


class ConfigError(IncvecError):
    """A name that does not exist, or a value that cannot work."""


class CheckpointError(IncvecError):
    """A checkpoint that is damaged or belongs to another run."""


class Busy(CheckpointError):
    """A run's folder in which another process is at work."""


class TrainingError(IncvecError):
    """Training that cannot go on: a loss or a feature that is not finite."""


class DeviceMemoryError(TrainingError):
    """A device whose memory does not suffice; with fewer runs beside it, it might."""


def no_root(name: str, what: str) -> DataError:
    """What to say where a data set is asked for without a place."""
    return DataError(f"{name} needs a data root: {what}. Give it with --data-root DIR or the variable INCVEC_DATA.")


def check_out(out: Path, what: str, option: str = "--out") -> None:
    """Refuse a file where a folder is to be written, or above it."""
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; {what} needs a folder. Give another one with {option}.")


def nearest(name: object, choices: Iterable[str]) -> str:
    """The tail of an error message, `" Did you mean 'podnet'?"`, or nothing where no choice is close.

    A file may hold a number or a date where a name should be; it is read as it would be written.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f" Did you mean '{by_lower[close[0]]}'?" if close else ""
