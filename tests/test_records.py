"""The commit in a record, and which files are refused as records."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from incvec import records
from incvec.errors import DataError


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, and our module in a folder of it that git does not track."""
    monkeypatch.delenv("INCVEC_COMMIT", raising=False)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "theirs.txt").write_text("theirs")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "theirs.txt")
    git(tmp_path, "commit", "-qm", "theirs")
    package = tmp_path / ".venv" / "incvec"
    package.mkdir(parents=True)
    (package / "records.py").write_text("ours")
    monkeypatch.setattr(records, "__file__", str(package / "records.py"))
    return tmp_path


def test_commit_of_another_project_is_ignored(tree: Path) -> None:
    assert records.commit() is None


def test_commit_of_a_source_tree(tree: Path) -> None:
    git(tree, "add", ".venv/incvec/records.py")
    git(tree, "commit", "-qm", "ours")
    head = git(tree, "rev-parse", "HEAD")[:12]
    assert records.commit() == head
    (tree / "theirs.txt").write_text("changed")
    assert records.commit() == f"{head}-dirty"


def test_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("INCVEC_COMMIT", raising=False)
    assert records.commit() is None
    monkeypatch.setenv("INCVEC_COMMIT", "abc123")
    assert records.commit() == "abc123"


CONFIG = {"method": "finetune", "addons": [], "dataset": "digits"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "is not a record: config is None: Input should be a valid dictionary"),
        ({"config": CONFIG | {"seed": "1"}}, "config.seed is '1', expected a value such as 0"),
        ({"config": CONFIG | {"addons": [1]}}, r"config.addons is \[1\], expected a list of names"),
        ({"config": CONFIG | {"finetune": 5}}, "config.finetune is 5, expected a mapping"),
        ({"addons": 3}, "is not a record: addons is 3: Input should be a valid list"),
        ({"metrics": {}}, "metrics.AA is {}: Field required"),
        ({"metrics": ["AA"]}, r"metrics is \['AA'\]: Input should be a valid dictionary"),
        ({"metrics": {"AA": True, "LA": 2.0}}, "metrics.AA is True: Input should be a valid number"),
        ({"metrics": {"AA": 90.0, "LA": None}}, "metrics.LA is None: Input should be a valid number"),
        ({"metrics": {"AA": 90.0, "LA": 90.0, "FM": "a lot"}}, "metrics.FM is 'a lot': Input should be a valid number"),
        ({"accuracy": [[90.0], [1.0, "x"]]}, "accuracy.1.1 is 'x': Input should be a valid number"),
        ({"accuracy": [[float("nan")]]}, "it contains NaN, which is not a number"),
        ({"accuracy": [[900.0]]}, "accuracy.0.0 is 900.0: Input should be less than or equal to 100"),
        ({"method": "a\0"}, r"method is 'a\\x00': expected printable characters"),
        ({"dataset": "\ud800"}, "dataset is .*: Input should be a valid string"),
        ({"environment": "x"}, "environment is 'x': Input should be a valid dictionary"),
        ({"seed": 10**30}, "seed is 1000.*: Input should be less than"),
        ({"format": 99}, "is a record of format 99, this version of incvec reads up to 2"),
    ],
)
def test_record_with_values_of_the_wrong_type_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    good = {
        "format": 1, "method": "finetune", "addons": [], "dataset": "digits", "tasks": 5, "oracle": False, "seed": 0,
        "accuracy": [[90.0]], "test_counts": [50], "metrics": {"AA": 90.0, "LA": 90.0}, "config": {},
    }  # fmt: skip
    file = tmp_path / "record.json"
    file.write_text(json.dumps(good))
    assert records.read_record(tmp_path) == good
    file.write_text(json.dumps(good | change))
    with pytest.raises(DataError, match=message):
        records.read_record(tmp_path)


def test_later_format_is_reported_before_missing_keys(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"format": 3, "method": "finetune", "metrics": {"AA": "another type"}}))
    with pytest.raises(DataError, match="is a record of format 3, this version of incvec reads up to 2"):
        records.read_record(file)
    file.write_text(json.dumps({"format": 3, "side": 64, "classes": []}))  # as the index of a packed store
    with pytest.raises(DataError, match="is not a record: it lacks method, addons"):
        records.read_record(file)
