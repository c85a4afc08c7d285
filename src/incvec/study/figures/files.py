"""Figure files: `NAME.json` with all numbers of a figure, and `NAME.png` and `NAME.pdf` drawn from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from incvec.errors import DataError
from incvec.records import format_json
from incvec.study.figures.canvas import save
from incvec.study.figures.curvature import draw_curvature
from incvec.study.figures.gap import draw_gap
from incvec.study.figures.path import draw_path, draw_tradeoff
from incvec.study.figures.plane import draw_plane

FORMAT = 1
DRAW = {"path": draw_path, "tradeoff": draw_tradeoff, "plane": draw_plane, "gap": draw_gap, "curvature": draw_curvature}


def write_figure(data: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write `STEM.png`, `STEM.pdf` and `STEM.json`."""
    file = stem.with_name(stem.name + ".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(format_json({"format": FORMAT, **data}) + "\n", encoding="utf-8")
    return [*save(DRAW[data["kind"]](data), stem), file]


def redraw(file: Path, stem: Path) -> list[Path]:
    """Draw the figure of a JSON file again, as `STEM.png` and `STEM.pdf`; needs neither snapshots nor data sets."""
    data = load_figure(file)
    try:
        return save(DRAW[data["kind"]](data), stem)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        kind = data["kind"]
        raise DataError(f"{file} is damaged ({error!r}): make it again with `incvec study {kind}`.") from None


def read_figure(file: Path) -> dict[str, Any] | None:
    """The numbers of a figure, or None if the JSON file is something else."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON: {error}.") from None
    return data if isinstance(data, dict) and data.get("kind") in DRAW and "format" in data else None


def load_figure(file: Path) -> dict[str, Any]:
    """The numbers of a figure; anything else is refused."""
    data = read_figure(file)
    if data is None:
        raise DataError(
            f"{file} is not the data of a figure: expected a JSON that `incvec study` wrote, of kind {', '.join(DRAW)}."
        )
    return data


def find_figures(paths: Iterable[Path]) -> list[Path]:
    """The given JSON files, and all figure data below the given folders, sorted."""
    files: set[Path] = set()
    for path in paths:
        if path.is_dir():
            files |= {file for file in path.rglob("*.json") if read_figure(file) is not None}
        elif path.exists():
            files.add(path)
        else:
            raise DataError(f"{path} does not exist; give a JSON file of `incvec study`, or a folder with such files.")
    return sorted(files)
