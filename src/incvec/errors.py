"""Errors for the user: the command line prints them without a traceback.

A message contains what was given, what was expected and what to do. Mistakes in code that calls this package (a wrong
shape, a missing generator) are `ValueError` or `TypeError`, with a traceback.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from pathlib import Path


class IncvecError(Exception):
    """Base class of all errors that a user can fix."""


class DataError(IncvecError):
    """Data that is missing, damaged, unreadable or not enough."""


class ConfigError(IncvecError):
    """An unknown name, or a value that is not possible."""


class CheckpointError(IncvecError):
    """A checkpoint that is damaged or belongs to another run."""


class Busy(CheckpointError):
    """The folder of a run that another process is working on."""


class StorageError(CheckpointError):
    """Storage of a cluster that cannot be read or written."""


class TrainingError(IncvecError):
    """Training that cannot continue, for example because the loss is not finite."""


class DeviceMemoryError(TrainingError):
    """The device's memory is full. With fewer runs at once it may suffice."""


REPORT_AT = "This is a bug in incvec: please open an issue in its repository, with the command and the lines above."


def user_message(error: BaseException) -> str | None:
    """What the command line prints instead of a traceback; None if the error is not one that a user can fix.

    The only place that decides this. An error of the operating system has a number and concerns the user's files; an
    `OSError` without one comes from a library.
    """
    if isinstance(error, IncvecError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None:  # a library that cleans up after a failed write may fail again
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            place = f"{cause.filename}: " if cause.filename else ""
            return f"{place}{cause.strerror}. Free some space, then run the same command again."
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, MemoryError):
        return "the memory of this machine is full. Close other programs, or use smaller settings or images."
    if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    return None


def no_root(name: str, what: str) -> DataError:
    """The error for a data set that needs a root folder."""
    return DataError(f"{name} needs a data root: {what}. Give it with --data-root DIR or the variable INCVEC_DATA.")


def check_out(out: Path, what: str, option: str = "--out") -> None:
    """Refuse an output folder if it, or a parent of it, is a file."""
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; {what} needs a folder. Give another one with {option}.")


def shorten(value: object, length: int = 80) -> str:
    """`repr(value)`, its middle left out if it is long: for messages about something given."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 4 :]}"


def nearest(name: object, choices: Iterable[str]) -> str:
    """The end of an error message, `" Did you mean 'podnet'?"`, or "" if no choice is similar.

    `name` may be a number or a date, if a file has one in place of a name.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    text = str(name)[:100].lower()
    longer = [choice for choice in by_lower if choice.startswith(text)] if len(text) > 2 else []
    close = longer or difflib.get_close_matches(text, by_lower, n=1)
    return f" Did you mean '{by_lower[close[0]]}'?" if close else ""
