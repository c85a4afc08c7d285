"""Text that somebody else wrote: only regular files of a bounded size are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from incvec.errors import ConfigError, DataError
from incvec.text_files import read_bytes, read_text


def test_regular_file_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9\n")
    assert read_text(tmp_path / "a.txt") == "café\n"


def test_pipe_without_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe cannot be read: it is a pipe, expected a file"):
        read_text(tmp_path / "pipe", ConfigError)


def test_folders_and_devices_are_refused(tmp_path: Path) -> None:
    for path, kind in ((tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(DataError, match=f"it is {kind}, expected a file"):
            read_bytes(path)


def test_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(101))
    with pytest.raises(DataError, match="more than 100 bytes"):
        read_bytes(tmp_path / "a", limit=100)
    assert len(read_bytes(tmp_path / "a", limit=101)) == 101


def test_text_that_is_not_utf8_and_names_with_nul_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(DataError, match="cannot be read as text"):
        read_text(tmp_path / "a")
    with pytest.raises(DataError, match="is not the name of a file"):
        read_text(Path("a\0b"))


def test_missing_file_is_left_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "absent")
