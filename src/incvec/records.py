"""What a run leaves behind: one JSON file, the only source of a number in any table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from incvec.config import upgrade_settings
from incvec.errors import DataError

FORMAT = 2  # 1 had "facts" for "statistics" and British names of settings
READABLE_FORMATS = (1, FORMAT)
REQUIRED: dict[str, type] = {
    "method": str, "addons": list, "dataset": str, "tasks": int, "oracle": bool, "seed": int, "accuracy": list,
    "test_counts": list, "metrics": dict,
}  # fmt: skip
OPTIONAL: dict[str, type] = {"config": dict, "base": dict}  # early ones lack some


def commit() -> str | None:
    """The source tree's commit, from INCVEC_COMMIT or from git; None where neither knows it.

    An installed copy may lie inside somebody else's repository (a virtual environment in it): that commit is not ours,
    so git must know this very file.
    """
    given = os.environ.get("INCVEC_COMMIT")
    if given:
        return given
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return _git("describe", "--always", "--dirty", "--abbrev=12") or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    here = Path(__file__).resolve().parent
    found = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10, check=True)
    return found.stdout.strip()


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and commit."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("incvec", "torchvision", "numpy", "transformers", "triton"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "incvec" not in versions:
        from incvec import __version__

        versions["incvec"] = __version__
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    return {
        "versions": versions,
        "device": name,
        "device_type": device.type,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "commit": commit(),
    }


def read_record(path: Path) -> dict[str, Any]:
    """A record, or a clear word on why the file is none. A folder stands for the record in it."""
    if path.is_dir():
        path = path / "record.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(f"there is no record at {path}: the run has not finished, or lies elsewhere.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} is not a record: {error}.") from None
    if not isinstance(record, dict):
        raise DataError(f"{path} is not a record: it holds a {type(record).__name__}, a mapping was expected.")
    missing = [key for key in REQUIRED if key not in record]
    # Another format may lack parts. What has none of them is no record at all: other files have a format, too.
    if len(missing) < len(REQUIRED) and record.get("format", 1) not in READABLE_FORMATS:
        raise DataError(
            f"{path} is a record of format {record['format']!r}, this version of incvec reads up to {FORMAT}: take the "
            "version that wrote it, or a newer one."
        )
    if missing:
        raise DataError(f"{path} is not a record: it lacks {', '.join(missing)}.")
    for key, kind in (REQUIRED | OPTIONAL).items():
        if key in record and not isinstance(record[key], kind):
            found = type(record[key]).__name__
            raise DataError(f"{path} is not a record: {key} is a {found}, a {kind.__name__} was expected.")
    for name in ("AA", "LA", "FM"):
        value = record["metrics"].get(name)
        if value is None and name == "FM":  # of a single task
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"{path} is not a record: its metrics have {value!r} for {name}, a number was expected.")
    return upgrade_record(record)


def upgrade_record(record: dict[str, Any]) -> dict[str, Any]:
    """A record of an earlier format under the names of the present one."""
    if record.get("format", 1) == 1:
        if "facts" in record:
            record["statistics"] = record.pop("facts")
        if "config" in record:
            record["config"] = upgrade_settings(record["config"])
    return record


def find_records(paths: Iterable[Path]) -> list[Path]:
    """Every record file at or below the given paths, sorted."""
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            found |= {p for p in path.rglob("*.json") if _looks_like_record(p)}
        elif path.exists():
            found.add(path)
        else:
            raise DataError(f"{path} does not exist; give a record.json, or a folder that holds some.")
    return sorted(found)


def readable(paths: Sequence[Path], tell: Callable[[str], None]) -> list[Path]:
    """The records at or below the paths. A broken one named outright is an error, one met in a folder is told of."""
    found = find_records(paths)
    broken = {file for path in paths if path.is_dir() for file in path.rglob("record.json")} - set(found)
    for file in sorted(broken):
        try:
            read_record(file)
        except DataError as error:
            if not found:
                raise
            tell(f"left out: {error}")
    if not found:
        raise DataError(f"no record lies in {', '.join(map(str, paths))}; `incvec run` writes one.")
    return found


def _looks_like_record(path: Path) -> bool:
    try:
        read_record(path)
    except DataError:
        return False
    return True


def title(record: dict[str, Any]) -> str:
    """`podnet + ivt`, `podnet oracle`."""
    text = " + ".join([record["method"], *record["addons"]])
    return f"{text} oracle" if record["oracle"] else text
