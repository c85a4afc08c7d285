"""What a lab command leaves: a figure, and all numbers behind it, from which the figure is drawn again at any time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from incvec.errors import DataError
from incvec.study.geometry import curvature, gap, landscape
from incvec.study.geometry.figures import draw_path, draw_tradeoff

DRAW: dict[str, Callable[[Mapping[str, Any], Path], list[Path]]] = {
    "path": draw_path,
    "tradeoff": draw_tradeoff,
    "plane": landscape.draw,
    "gap": gap.draw,
    "curvature": curvature.draw,
}


def leave(found: Mapping[str, Any], stem: Path) -> list[Path]:
    """`STEM.png`, `STEM.pdf` and `STEM.json`."""
    file = stem.with_name(stem.name + ".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(written(found) + "\n", encoding="utf-8")
    return [*DRAW[found["kind"]](found, stem), file]


def redraw(file: Path, stem: Path) -> list[Path]:
    """The figure of a JSON that `leave` wrote, as `STEM.png` and `STEM.pdf`; no snapshot or data set is needed."""
    found = read(file)
    if found is None:
        raise DataError(f"{file} was not written by a command of `incvec lab`: it has none of {', '.join(DRAW)} in it.")
    try:
        return DRAW[found["kind"]](found, stem)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{file} is broken ({error!r}): make it again with `incvec lab {found['kind']}`.") from None


def read(file: Path) -> dict[str, Any] | None:
    """The numbers in a file, or None where it is something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}.") from None
    return found if isinstance(found, dict) and found.get("kind") in DRAW and "format" in found else None


def findings(paths: Iterable[Path]) -> list[Path]:
    """The files among these, and below these folders, that `leave` wrote."""
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            found |= {file for file in path.rglob("*.json") if read(file) is not None}
        elif path.exists():
            found.add(path)
        else:
            raise DataError(f"{path} does not exist; give a JSON of `incvec lab`, or a folder that holds some.")
    return sorted(found)


def written(value: Any, depth: int = 0) -> str:
    """JSON with one line for a row of numbers, so that a file stays small and a change in it readable."""
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, dict) and value:
        rows = [f"{json.dumps(key)}: {written(item, depth + 1)}" for key, item in value.items()]
        return "{" + inner + f",{inner}".join(rows) + inner[:-1] + "}"
    if isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
        return "[" + inner + f",{inner}".join(written(item, depth + 1) for item in value) + inner[:-1] + "]"
    return json.dumps(value, ensure_ascii=False)
