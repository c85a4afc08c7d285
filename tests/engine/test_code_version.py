"""The code version in the key of a shared base: what changes it, and that no relevant file is forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from incvec.engine.code_version import BASE_FILES, OTHER_FILES, PACKAGE, hash_files, method_files
from incvec.methods import find_method

CODE = '''"""A module."""

LIMIT = 3  # a comment


class Thing:
    """A class."""

    def scale(self, x: float) -> float:
        """A method."""
        return x * LIMIT
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("A module.", "The module, described in other words.", True),
        ("A class.", "", True),
        ('        """A method."""\n', "", True),
        ("  # a comment", "  # another comment", True),
        ("x * LIMIT", "(x\n            * LIMIT)", True),
        ("LIMIT = 3", "LIMIT = 4", False),
        ("x * LIMIT", "x + LIMIT", False),
        ("def scale", "def factor", False),
    ],
)  # fmt: skip
def test_comments_and_docstrings_do_not_change_the_version(old: str, new: str, same: bool, tmp_path: Path) -> None:
    before, after = tmp_path / "before" / "file.py", tmp_path / "after" / "file.py"
    for path, code in ((before, CODE), (after, CODE.replace(old, new))):
        path.parent.mkdir()
        path.write_text(code)
    assert (hash_files([before]) == hash_files([after])) is same


def test_method_files_are_its_own_and_those_it_is_derived_from() -> None:
    names = {file.name for file in method_files(find_method("finetune"))}
    assert {"finetune.py", "common.py"} <= names
    assert "podnet.py" not in names
    assert {"mnemonics.py", "lucir.py", "common.py"} <= {file.name for file in method_files(find_method("mnemonics"))}


TRAIN = """
import sys
from pathlib import Path
from incvec.data import load_dataset
from incvec.engine.run import Run, finish
from incvec.methods import METHODS, find_method
from incvec.presets import resolve
for name in METHODS:
    find_method(name)
settings = {"method": "slca", "dataset": "digits", "stop_after": 1, "slca": {"net": "tiny", "epochs": 1}}
finish(Run(resolve(settings), load_dataset("digits"), Path(sys.argv[1])))
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").partition(".")[0] == "incvec":
        print(module.__file__)
"""


def test_every_file_imported_while_a_base_is_trained_is_declared(tmp_path: Path) -> None:
    """Add a new file to BASE_FILES if it can change the base task's weights, otherwise to OTHER_FILES."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    imported = {Path(line).relative_to(PACKAGE).as_posix() for line in done.stdout.splitlines()}
    undeclared = {name for name in imported - set(BASE_FILES) if not name.startswith(OTHER_FILES)}
    assert not undeclared
    assert imported >= {"engine/loop.py", "methods/slca.py"}


def test_base_files_exist_and_are_declared_once() -> None:
    assert [name for name in BASE_FILES if not (PACKAGE / name).is_file()] == []
    assert not set(BASE_FILES) & set(OTHER_FILES)
