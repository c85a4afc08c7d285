"""What IVT's Fisher says about a run, and whether its second-order picture of forgetting holds.

By part of the network and task: F_t against Fbar_{t-1}, and the mean of S. And along the line from theta_{t-1} to
theta_t, the forgetting that the quadratic model predicts against the measured one:

    predicted(x) = x^2 / 2 * d' H d,    d = theta_t - theta_{t-1},    H = Fbar_{t-1} = F_1 + ... + F_{t-1}
    measured(x)  = sum over the old tasks i of  L_i(theta_{t-1} + x d) - L_i(theta_{t-1})

F is the mean square of gradients of whole batches, as in the paper. A batch's gradient is a mean over B images, so
where single gradients scatter about zero F is 1/B of the Fisher information: S does not see that factor, a
prediction does. Both are told, H = F and H = B F. L_i is the mean cross-entropy on task i's test images among the
classes known at t - 1; d and H run over the parameters that had a past.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.data import Dataset
from incvec.errors import DataError
from incvec.ivt.transform import block_scale, scale
from incvec.study import style
from incvec.study.geometry.figures import told_setting
from incvec.study.geometry.lines import FORMAT, Setting, Told
from incvec.study.geometry.paths import State, positions
from incvec.study.geometry.points import Points
from incvec.study.geometry.snapshots import (
    Rebuilt,
    command,
    distance,
    first_task,
    last_task,
    run_config,
    snapshot_model,
)

CUMULATIVE = "ivt/cumulative/"
COLUMNS = 5  # panels beside one another
LEGEND_ROWS = 12


def curvature(run: Path, dataset: Dataset, setting: Setting, told: Told | None = None) -> dict[str, Any]:
    """All tasks of one run with IVT, as plain data; tasks count from 0."""
    config = run_config(run)
    if "ivt" not in config.addons:
        raise DataError(
            f"{run} was trained without the add-on ivt, whose Fisher is looked at here. Run first:\n  "
            + command(config, None, addons=(*config.addons, "ivt"))
        )
    first, final = first_task(run), last_task(run)
    if final == first:
        raise DataError(f"{run} has a single snapshot: nothing came after. Finish it first:\n  {command(config, run)}")
    began = time.monotonic()
    before = snapshot_model(run, first, dataset, device=setting.device)
    tasks = []
    for task in range(first + 1, final + 1):
        after = snapshot_model(run, task, dataset, device=setting.device)
        past, now = fishers(before), fishers(after)
        start = snapshot_model(run, task - 1, dataset, grow_to=task, device=setting.device).state()
        tasks.append(
            {
                "task": task,
                "parts": by_part(past, now, start, after.state()),
                **forgetting(after, start, past, task, setting, told),
            }
        )
        before = after
    return {
        "format": FORMAT,
        "kind": "curvature",
        "dataset": dataset.name,
        "run": run.name,
        "name": style.label(config.method, config.addons, config.oracle),
        "method": config.method,
        "addons": list(config.addons),
        "structure": config.sections["ivt"]["structure"],
        "batch_size": config.sections[config.method].get("batch_size"),
        **setting.account(),
        "seconds": round(time.monotonic() - began, 2),
        "tasks": tasks,
    }


def fishers(rebuilt: Rebuilt) -> dict[str, Tensor]:
    """Fbar by parameter, as the add-on had it after the task."""
    rooms, device = rebuilt.rooms.get("addon", {}), rebuilt.parts.world.device
    found = {n.removeprefix(CUMULATIVE): t.to(device) for n, t in rooms.items() if n.startswith(CUMULATIVE)}
    if not found:
        raise DataError("the run's snapshots hold no Fisher; train it with --set ivt.snapshot_fisher=true.")
    return found


def is_block(fisher: Tensor, parameter: Tensor) -> bool:
    """Whether a Fisher is one matrix a kernel rather than one number a parameter."""
    return fisher.shape != parameter.shape


def diagonal(fisher: Tensor, parameter: Tensor) -> Tensor:
    return fisher.diagonal(dim1=-2, dim2=-1) if is_block(fisher, parameter) else fisher


def quadratic(fisher: Tensor, d: Tensor) -> float:
    """d' F d for a diagonal or for kernel blocks, in float64."""
    if not is_block(fisher, d):
        return float((fisher.double() * d.double().square()).sum())
    flat = d.double().reshape(*fisher.shape[:-2], fisher.shape[-1])
    return float(torch.einsum("...i,...ij,...j->", flat, fisher.double(), flat))


def by_part(past: State, now: State, start: State, end: State) -> dict[str, dict[str, float | None]]:
    """Per part (stem, stages, head) and over all: F_t / Fbar_{t-1}, mean S, distance traveled.

    Weights that IVT did not see trained in the task (PODNet's older proxies) have no F_t, and S is not applied to
    them: they are left out.
    """
    sums: dict[str, list[tuple[float, ...]]] = {}
    for name, old in past.items():
        fresh = now[name] - old
        if not fresh.any():
            continue
        far = end[name].double() - start[name].double()
        s = block_scale(old, fresh).diagonal(dim1=-2, dim2=-1) if is_block(old, far) else scale(old, fresh)
        row = (
            float(diagonal(fresh, far).double().sum()),
            float(diagonal(old, far).double().sum()),
            float(s.double().sum()),
            float(s.numel()),
            float(far.square().sum()),
        )
        for part in ("all", part_of(name)):
            sums.setdefault(part, []).append(row)
    found: dict[str, dict[str, float | None]] = {}
    for part, rows in sums.items():
        new, old_sum, s_sum, count, moved = (sum(column) for column in zip(*rows, strict=True))
        ratio = new / old_sum if old_sum > 0 else None
        found[part] = {"fisher_ratio": ratio, "scale": s_sum / count, "distance": moved**0.5}
    return found


def part_of(name: str) -> str:
    """`backbone.stages.1.blocks.0.conv1.weight` belongs to `stages.1`."""
    words = name.removeprefix("backbone.").split(".")
    return ".".join(words[:2]) if words[0] in ("stages", "blocks") else words[0]


def forgetting(
    after: Rebuilt, start: State, past: State, task: int, setting: Setting, told: Told | None
) -> dict[str, Any]:
    """Predicted and measured change of the old tasks' loss along the line to `task`."""
    end = after.state()
    names = [name for name in past if name in end]
    d = {name: end[name] - start[name] for name in names}
    half = sum(quadratic(past[name], d[name]) for name in names) / 2
    n_old = after.parts.tasks[task].n_old
    points = Points(after, setting.images, range(task), n_old, setting.way, setting.batchnorm)
    xs = positions(setting.points)
    hear = None if told is None else (lambda done: told(f"task {task + 1}", done, len(xs)))
    scores = points.evaluate([start, end], [(1 - x, x) for x in xs], hear)
    sums = [sum(row) for row in scores.loss]
    batch = after.config.sections[after.config.method].get("batch_size")
    return {
        "x": xs,
        "length": distance(start, end, names),
        "measured": [value - sums[0] for value in sums],
        "predicted": [x * x * half for x in xs],
        "predicted_per_sample": None if batch is None else [x * x * half * batch for x in xs],
        "counts": points.counts,
        "evaluated": points.used,
    }


def draw(found: Mapping[str, Any], stem: Path) -> list[Path]:
    """Above, F_t against the past and S by part and task; below, predicted and measured forgetting by task."""
    from matplotlib import colormaps

    tasks = found["tasks"]
    columns = min(len(tasks), COLUMNS)
    rows = -(-len(tasks) // columns)
    heights = (3.4, 2.6 * rows + 0.8)
    figure, _ = style.new_figure(0, 0, max(9.0, 2.6 * columns), sum(heights))
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    left, right = above.subplots(1, 2)
    panels = below.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    shades = colormaps[style.SEQUENTIAL]
    parts = sorted({part for row in tasks for part in row["parts"] if part != "all"}, key=place)
    for number, row in enumerate(tasks):
        color = shades(0.9 * number / max(1, len(tasks) - 1))
        for axes, key in ((left, "fisher_ratio"), (right, "scale")):
            values = [row["parts"].get(part, {}).get(key) for part in parts]
            axes.plot(range(len(parts)), values, color=color, marker="o", label=f"task {row['task'] + 1}")
    left.set_yscale("log")
    style.tidy(left, "Fisher of the new task over that of the past", "", "")
    style.tidy(right, "Mean S: 1 keeps the step, ½ halves it", "", "")
    right.set_ylim(0.48, 1.02)
    for axes in (left, right):
        names = [f"stage {int(part.rpartition('.')[2]) + 1}" if part.startswith("stages.") else part for part in parts]
        axes.set_xticks(range(len(parts)), names, fontsize=9)
    right.legend(
        frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=-(-len(tasks) // LEGEND_ROWS)
    )
    look = style.look(found["method"], found["addons"])
    kinds = [("predicted", "predicted, ½ d'Fd", (1.0, 1.5)), ("predicted_per_sample", "½ d'(B·F)d", (5.0, 2.0))]
    for row, axes in zip(tasks, panels, strict=False):
        for key, name, dashes in kinds:
            if row[key] is not None:
                axes.plot(row["x"], row[key], color=style.GRAY, dashes=dashes, linewidth=1.8, label=name)
        axes.plot(row["x"], row["measured"], color=look.color, marker=look.marker, markersize=4, label="measured")
        style.tidy(axes, f"On the way to task {row['task'] + 1}", "share of the way")
        axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    for axes in panels[::columns]:
        axes.set_ylabel("change of the old\ntasks' test loss", fontsize=9.5)
    style.legend_below(below, panels[0])
    style.note(figure, f"{found['name']}, {told_setting(found)}")
    return style.save(figure, stem)


def place(part: str) -> tuple[int, int, str]:
    """The order of a network: stem, stages or blocks by their numbers, head."""
    order = ("stem", "stages", "blocks", "head")
    kind, _, number = part.partition(".")
    return (order.index(kind) if kind in order else len(order), int(number) if number.isdigit() else 0, part)
