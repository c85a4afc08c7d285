"""What `incvec lab` left among the records: paths as tables and plots, and the pictures of all its commands."""

from __future__ import annotations

import base64
import itertools
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from incvec.errors import DataError
from incvec.study import style
from incvec.study.charts import Line, Lines
from incvec.study.figures import find_figures, read_figure, redraw
from incvec.study.sheet import Column, Row, Sheet, number, word

KINDS = {
    "path": "Along the line",
    "tradeoff": "Old classes against new ones along the line",
    "plane": "The loss around the solutions",
    "gap": "The oracle gap",
    "curvature": "Curvature, and forgetting as it predicts it",
}


@dataclass(frozen=True)
class Finding:
    """The numbers of one lab command."""

    file: Path
    data: Mapping[str, Any] = field(repr=False)
    number: int = 0  # among those whose folder and file have the same names; 0 where there is one alone

    @property
    def slug(self) -> str:
        return f"lab-{self.file.parent.name}-{self.file.stem}" + (f"-{self.number}" if self.number else "")

    @property
    def title(self) -> str:
        return f"{KINDS[self.data['kind']]} ({self.file.with_suffix('') if self.number else self.file.stem})"

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The command's own figure by ending, drawn from the numbers: no picture need lie beside them."""
        with tempfile.TemporaryDirectory() as folder:
            return {file.suffix: file.read_bytes() for file in redraw(self.file, Path(folder) / "picture")}


def find(paths: Sequence[Path]) -> list[Finding]:
    """Every file that a lab command left at or below the folders."""
    found = [(file, read_figure(file)) for file in find_figures([path for path in paths if path.is_dir()])]
    made = [Finding(file, data) for file, data in found if data is not None]
    ordered = sorted(made, key=lambda finding: (finding.file.parent, list(KINDS).index(finding.data["kind"])))
    return numbered(ordered)


def numbered(findings: Sequence[Finding]) -> list[Finding]:
    """Each with a slug of its own, which names its place on the page and its files."""
    count = Counter(finding.slug for finding in findings)
    taken = {slug for slug, times in count.items() if times == 1}
    kept = []
    for finding in findings:
        if count[finding.slug] > 1:
            numbers = (replace(finding, number=number) for number in itertools.count(1))
            finding = next(each for each in numbers if each.slug not in taken)
            taken.add(finding.slug)
        kept.append(finding)
    return kept


def path_sheet(finding: Finding) -> Sheet | None:
    """Length, accuracy at both ends and barrier of every line."""
    if finding.data["kind"] != "path":
        return None
    try:
        rows = [path_row(curve) for curve in finding.data["curves"]]
        tasks = finding.data["task_from"] + 1, finding.data["task_to"] + 1
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{finding.file} is broken ({error!r}): make it again with `incvec lab path`.") from None
    columns = [Column("run", number=False), Column("length")]
    columns += [Column(label, "accuracy on the old tasks, %") for label in ("start", "lowest", "end", "barrier")]
    note = (
        f"Straight lines from the model after task {tasks[0]} to that after task {tasks[1]}. Old tasks: those learned "
        "where the line begins. Barrier: the most by which accuracy falls short of the straight line between its ends. "
        f"BatchNorm statistics {finding.data.get('batchnorm', 'interpolate')}d."
    )
    return Sheet(f"{finding.slug}-table", finding.title, (*columns, Column("new tasks, end")), tuple(rows), note)


def path_row(curve: Mapping[str, Any]) -> Row:
    old, new = curve["accuracy"]["old"], curve["accuracy"]["new"]
    values = [curve["length"], old[0], min(old), old[-1], curve["barrier"]["accuracy"]["old"], new[-1]]
    return Row((word(style.label(run_name(curve))), *(number(float(value)) for value in values)))


def path_chart(finding: Finding) -> Lines | None:
    """Accuracy on the old tasks along the lines."""
    if finding.data["kind"] != "path":
        return None
    share = finding.data.get("axis") == "share"
    lines = []
    for curve in finding.data["curves"]:
        name, x = run_name(curve), curve["x" if share else "distance"]
        lines.append(Line(name, style.label(name), tuple(x), tuple(curve["accuracy"]["old"]), None, 1))
    below = "share of the way" if share else "distance from the start"
    title = f"{finding.title}: the old tasks"
    return Lines(finding.slug, title, below, "accuracy, %", tuple(lines), dense=True)


def run_name(curve: Mapping[str, Any]) -> str:
    """A record's title, for the look."""
    return " + ".join([curve["method"], *curve["addons"]]) + (" oracle" if curve["oracle"] else "")


def inline(finding: Finding) -> str:
    """Its picture as an address of its own, so that the page needs no other file."""
    return "data:image/png;base64," + base64.b64encode(finding.pictures[".png"]).decode()
