"""Which errors become messages, and which keep their traceback."""

from __future__ import annotations

import errno
import os

import pytest

from incvec.errors import CheckpointError, shorten, user_message


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_errors_of_the_user_are_messages() -> None:
    assert user_message(CheckpointError("it is damaged")) == "it is damaged"
    assert user_message(PermissionError(errno.EACCES, "Permission denied", "out")) == "out: Permission denied."
    assert "Free some space" in (user_message(full_disk()) or "")
    assert "memory of this machine is full" in (user_message(MemoryError()) or "")


def test_full_disk_is_named_when_cleaning_up_fails_as_well() -> None:
    error = AttributeError("no attribute 'pos'")
    error.__context__ = full_disk()
    assert "No space left" in (user_message(error) or "")


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("config"), OSError("of a library"), BrokenPipeError(32, "")]
)
def test_other_errors_are_not(error: Exception) -> None:
    assert user_message(error) is None


def test_what_was_given_is_shortened_in_messages() -> None:
    assert shorten("abc") == "'abc'"
    assert len(shorten("x" * 10_000)) < 80
