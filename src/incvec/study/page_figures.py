"""Figures that `incvec study` wrote among the records, for the report: paths as tables and charts, the others as
pictures."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from incvec.errors import DataError
from incvec.file_names import safe_name
from incvec.records import title
from incvec.study import style
from incvec.study.charts import Line, Lines
from incvec.study.figures import find_figures, read_figure, redraw
from incvec.study.figures.tables import path_table
from incvec.study.tables import Table

KINDS = {
    "path": "Linear path",
    "tradeoff": "Accuracy on old against new classes along the linear path",
    "plane": "Loss around the solutions",
    "gap": "The oracle gap",
    "curvature": "Curvature, and the forgetting that it predicts",
}


@dataclass(frozen=True)
class StudyFigure:
    """The JSON data of one figure."""

    file: Path
    data: Mapping[str, Any] = field(repr=False)
    number: int = 0  # set for all figures if some have the same names of folder and file

    @property
    def slug(self) -> str:
        return safe_name(f"study-{self.file.parent.name}-{self.file.stem}" + (f"-{self.number}" if self.number else ""))

    @property
    def title(self) -> str:
        return f"{KINDS[self.data['kind']]} ({self.file.with_suffix('') if self.number else self.file.stem})"

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The figure drawn from its data, by file ending."""
        with tempfile.TemporaryDirectory() as folder:
            return {file.suffix: file.read_bytes() for file in redraw(self.file, Path(folder) / "picture")}

    @property
    def data_url(self) -> str:
        """The picture inside an address, so that the page needs no other file."""
        return "data:image/png;base64," + base64.b64encode(self.pictures[".png"]).decode()

    def path_table(self) -> Table:
        """Length, accuracy at both ends and barrier of every path."""
        try:
            return path_table(self.data, self.title, f"{self.slug}-table")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DataError(f"{self.file} is damaged ({error!r}): make it again with `incvec study path`.") from None

    def path_chart(self) -> Lines:
        """Accuracy on the old tasks along the paths."""
        share = self.data.get("axis") == "share"
        lines = []
        for curve in self.data["curves"]:
            x, y = curve["x" if share else "distance"], curve["accuracy"]["old"]
            lines.append(Line(title(curve), style.label(title(curve)), tuple(x), tuple(y), None, 1))
        x_label = "share of the way" if share else "distance from the start"
        return Lines(self.slug, f"{self.title}: the old tasks", x_label, "accuracy, %", tuple(lines), dense=True)


def find_study_figures(paths: Sequence[Path]) -> list[StudyFigure]:
    """Every figure at or below the folders, each with a slug of its own."""
    files = find_figures([path for path in paths if path.is_dir()])
    figures = [StudyFigure(file, data) for file in files if (data := read_figure(file))]
    figures.sort(key=lambda figure: (figure.file.parent, list(KINDS).index(figure.data["kind"])))
    if len({figure.slug for figure in figures}) < len(figures):
        return [replace(figure, number=number) for number, figure in enumerate(figures, start=1)]
    return figures
