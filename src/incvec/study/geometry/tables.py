"""The few numbers of a lab command that matter, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from incvec.study.geometry.landscape import told_starts


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        shown.add_row(*row)
    return shown


def path_table(found: dict[str, Any]) -> Table:
    rows = []
    for curve in found["curves"]:
        accuracy, barrier = curve["accuracy"], curve["barrier"]
        rows.append(
            [curve["name"], f"{curve['length']:.2f}", f"{accuracy['old'][0]:.2f}", f"{min(accuracy['old']):.2f}",
             f"{accuracy['old'][-1]:.2f}", f"{barrier['accuracy']['old']:.2f}", f"{barrier['loss']['old']:.3f}",
             f"{accuracy['new'][-1]:.2f}"]
        )  # fmt: skip
    until = found["task_from"] + 1
    title = f"From task {until} to task {found['task_to'] + 1}: accuracy on the classes up to task {until}"
    headings = ["run", "length", "start", "lowest", "end", "barrier", "in loss", "new, end"]
    return table(headings, rows, title)


def tradeoff_table(found: dict[str, Any]) -> Table:
    rows = []
    for curve in found["curves"]:
        accuracy, fit = curve["accuracy"], curve["fit"]
        fitted = ["–" if fit[key] is None else f"{fit[key]:.3f}" for key in ("slope", "r2")]
        rows.append([curve["name"], f"{accuracy['old'][-1]:.2f}", f"{accuracy['new'][-1]:.2f}", *fitted])
    title = f"From task {found['task_from'] + 1} to task {found['task_to'] + 1}: fit of new on old"
    return table(["run", "old: end", "new: end", "slope", "r²"], rows, title)


def plane_table(found: dict[str, Any]) -> Table:
    rows = []
    for mark in found["marks"]:
        far = f"{mark['to_oracle']:.2f}" if "to_oracle" in mark else "–"
        who = f"start, after task {found['task']}" if mark["role"] == "origin" else mark["name"]
        numbers = (mark["loss"], mark["accuracy"], mark["to_origin"])
        rows.append([who, *(f"{value:.2f}" for value in numbers), far])
    shown = table(["model", "loss", "accuracy", "from the start", "from the oracle"], rows)
    shown.caption = told_starts(found) or None
    return shown


def gap_table(found: dict[str, Any]) -> Table:
    rows = []
    for run in found["runs"]:
        share = "–" if run["gap_closed"] is None else f"{100 * run['gap_closed']:.0f} %"
        std = "" if run["LA"]["std"] is None else f" ± {run['LA']['std']:.2f}"
        rows.append([run["name"], str(len(run["seeds"])), f"{run['LA']['mean']:.2f}{std}", share])
    return table(["run", "seeds", "LA", "gap closed"], rows)


def curvature_table(found: dict[str, Any]) -> Table:
    rows = []
    for row in found["tasks"]:
        whole, sample = row["parts"]["all"], row["predicted_per_sample"]
        ratio = "–" if whole["fisher_ratio"] is None else f"{whole['fisher_ratio']:.3g}"
        rows.append(
            [str(row["task"] + 1), ratio, f"{whole['scale']:.3f}", f"{row['length']:.2f}",
             f"{row['predicted'][-1]:.3g}", "–" if sample is None else f"{sample[-1]:.3g}",
             f"{row['measured'][-1]:.3g}"]
        )  # fmt: skip
    return table(["task", "F / past", "mean S", "moved", "½ d'Fd", "½ d'(B F)d", "measured"], rows)


TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "path": lambda found: [path_table(found)],
    "tradeoff": lambda found: [tradeoff_table(panel) for panel in found["panels"]],
    "plane": lambda found: [plane_table(found)],
    "gap": lambda found: [gap_table(found)],
    "curvature": lambda found: [curvature_table(found)],
}
