"""Test loss on the plane through theta_{t-1}, theta_t and the model with an add-on, the oracle projected onto it.

The directions are those of the paper: u points from theta_{t-1} to the add-on's model, v is what theta_t adds to it
(`incvec.study.geometry.Plane`). At the second task all runs of one seed begin at the same theta_1; for a later one,
runs that begin at a given snapshot (`--set start=FILE`) do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from incvec.data import Dataset
from incvec.errors import ConfigError, DataError
from incvec.study import style
from incvec.study.geometry.figures import told_setting
from incvec.study.geometry.lines import FORMAT, Setting, Told, checked
from incvec.study.geometry.planes import Plane, frame, ticks
from incvec.study.geometry.points import Points
from incvec.study.geometry.snapshots import (
    check_made,
    check_seeds,
    command,
    distance,
    first_task,
    kept,
    read_snapshot,
    run_config,
    snapshot_model,
)


def landscape(
    run: Path,
    other: Path,
    oracle: Path | None,
    dataset: Dataset,
    task: int,
    size: int,
    setting: Setting,
    margin: float = 0.25,
    told: Told | None = None,
) -> dict[str, Any]:
    """The grid and the points on it as plain data; `other` is the run with the add-on, `task` counts from 0."""
    if task < 1:
        raise ConfigError(f"a plane of task {task + 1} is not possible: it begins at the task before; take 2 or more.")
    if size < 2:
        raise ConfigError(f"a grid of {size} by {size} points is not possible: take 2 or more.")
    check_addon(run, other)
    everyone = checked([run, other], oracle)
    check_seeds(everyone)
    for each in everyone:
        if first_task(each) >= task:
            raise ConfigError(
                f"a plane of task {task + 1} begins at the model after task {task}, and the first snapshot of {each} "
                f"is that after task {first_task(each) + 1}: take {first_task(each) + 2} or more."
            )
        if task not in kept(each):
            read_snapshot(each, task)  # says what is missing
    began = time.monotonic()
    beginning = oracle if oracle is not None and setting.start == "oracle" else run
    origin = snapshot_model(beginning, task - 1, dataset, grow_to=task, device=setting.device).state()
    plain = snapshot_model(run, task, dataset, device=setting.device)
    second, first = plain.state(), snapshot_model(other, task, dataset, device=setting.device).state()
    names = [name for name, _ in plain.model.named_parameters()]
    try:
        found = Plane.through(origin, first, second, names)
    except ValueError as error:
        raise DataError(f"{run} and {other} span no plane after task {task + 1}: {error}.") from None
    kinds = [("origin", beginning), ("first", other), ("second", run)]
    marks = [
        {"role": role, **look_of(where), "a": a, "b": b, "off_plane": 0.0}
        for (role, where), (a, b) in zip(kinds, found.corners, strict=True)
    ]
    states = [origin, first, second]
    if oracle is not None:
        states.append(snapshot_model(oracle, task, dataset, device=setting.device).state())
        a, b, off = found.project(states[3])
        marks.append({"role": "oracle", **look_of(oracle), "a": a, "b": b, "off_plane": off})
    ranges = frame([(mark["a"], mark["b"]) for mark in marks], margin)
    columns, rows = (ticks(low, high, size) for low, high in ranges)
    weights = [(*found.weights(a, b), *[0.0] * (len(states) - 3)) for b in rows for a in columns]
    ends = [tuple(float(k == i) for k in range(len(states))) for i in range(len(states))]
    points = Points(plain, setting.images, way=setting.way, batchnorm=setting.batchnorm)
    hear = None if told is None else (lambda done: told("plane", done, len(weights) + len(ends)))
    scores = points.evaluate(states, [*ends, *weights], hear)
    accuracy, loss = scores.pooled(points.sizes, range(len(points.sizes)))
    for k, mark in enumerate(marks):
        mark |= {"accuracy": accuracy[k], "loss": loss[k], "to_origin": distance(origin, states[k], names)}
        if oracle is not None:
            mark["to_oracle"] = distance(states[3], states[k], names)

    def own_start(each: Path) -> float:
        begins = snapshot_model(each, task - 1, dataset, grow_to=task, device=setting.device).state()
        return distance(origin, begins, names)

    def grid(values: list[float]) -> list[list[float]]:
        inner = values[len(ends) :]
        return [inner[r * size : (r + 1) * size] for r in range(size)]

    return {
        "format": FORMAT,
        "kind": "plane",
        "dataset": dataset.name,
        "task": task,
        "start_run": beginning.name,
        "starts": [{**look_of(each), "to_origin": own_start(each)} for each in everyone],  # 0: began at the origin
        **setting.account(),
        "counts": points.counts,
        "device": str(plain.parts.world.device),
        "precision": plain.parts.precision,
        "evaluated": points.used,
        "seconds": round(time.monotonic() - began, 2),
        "a": columns,
        "b": rows,
        "loss": grid(loss),
        "accuracy": grid(accuracy),
        "marks": marks,
    }


def check_addon(run: Path, other: Path) -> None:
    """Refuse a second run that is not there, or that has no add-on the first has not."""
    config = run_config(run)
    others = tuple(name for name in config.addons if name != "ivt")
    check_made(other, command(config, other, addons=(*others, "ivt")))
    if config.addons == run_config(other).addons:
        raise DataError(
            f"{run} and {other} have the same add-ons: the plain run is needed, and one with an add-on. Run "
            f"first:\n  {command(config, None, addons=('ivt',))}"
        )


def look_of(run: Path) -> dict[str, Any]:
    config = run_config(run)
    return {
        "name": style.label(config.method, config.addons, config.oracle),
        "method": config.method,
        "addons": list(config.addons),
        "oracle": config.oracle,
        "run": run.name,
    }


def told_starts(found: Mapping[str, Any]) -> str:
    """Which runs began the task elsewhere than where the plane does, and how far off; nothing where none did."""
    apart = [each for each in found.get("starts", []) if each["to_origin"] > 0]
    if not apart:
        return ""
    far = ", ".join(f"{each['name']} {each['to_origin']:.2f}" for each in apart)
    begins = f"the plane begins at the model of {found['marks'][0]['name']} after task {found['task']}"
    return f"{begins}; other runs had their own, so far from it: {far}"


def draw(found: Mapping[str, Any], stem: Path) -> list[Path]:
    """Filled contours of the loss, lines at round values, and the points with their increment vectors."""
    import numpy as np

    wide, high = (max(found[key]) - min(found[key]) for key in ("a", "b"))
    below = 1.3 + 0.22 * len(found["marks"])  # words above and below the plane
    figure, table = style.new_figure(1, 1, 6.8, below + min(max(5.2 * high / wide, 2.4), 8.0))
    axes = table[0][0]
    values = np.log10(np.clip(np.array(found["loss"]), 1e-6, None))
    least = float(values.min())
    most = max(float(np.quantile(values, 0.97)), least + 1e-3)
    filled = axes.contourf(
        found["a"], found["b"], values, levels=np.linspace(least, most, 33), cmap=style.SEQUENTIAL, extend="max"
    )
    shown = round_values(10**least, 10**most)
    levels = [math.log10(value) for value in shown]
    lines = axes.contour(
        found["a"], found["b"], values, levels=levels, colors="white", linestyles="solid", linewidths=0.6, alpha=0.8
    )
    texts = dict(zip(levels, (f"{value:g}" for value in shown), strict=True))
    axes.clabel(lines, fmt=lambda level: texts[min(levels, key=lambda known: abs(known - level))], fontsize=7.5)
    bar = figure.colorbar(filled, cax=axes.inset_axes((1.02, 0, 0.04, 1)))  # as high as the plane, whatever its shape
    bar.set_label("test loss (logarithmic colors)", fontsize=9.5)
    bar.set_ticks(levels, labels=[texts[level] for level in levels])
    bar.ax.tick_params(labelsize=9)
    before = found["task"]
    start = found["marks"][0]
    for mark in found["marks"]:
        look = style.look(mark["method"], mark["addons"], mark["oracle"])
        origin = mark["role"] == "origin"
        name = f"start, after task {before}" if origin else look.label
        name += f", projected ({mark['off_plane']:.1f} off the plane)" if mark["role"] == "oracle" else ""
        if not origin:
            axes.plot(
                [start["a"], mark["a"]], [start["b"], mark["b"]], color="white", dashes=(3, 2), linewidth=1, alpha=0.75
            )
        axes.plot(
            mark["a"], mark["b"], linestyle="", label=f"{name}: loss {mark['loss']:.2f}, {mark['accuracy']:.1f} %",
            color="black" if origin else look.color, marker="o" if origin else look.marker,
            markersize=look.size + (2 if origin else 4), markeredgecolor="white", markeredgewidth=1.3, zorder=3,
        )  # fmt: skip
    style.tidy(axes, f"Test loss on all classes seen, after task {before + 1}", "distance along u", "distance along v")
    axes.grid(visible=False)
    axes.set_aspect("equal")
    style.legend_below(figure, axes, 1)
    style.note(figure, "; ".join(filter(None, (told_setting(found), told_starts(found)))))
    return style.save(figure, stem)


def round_values(least: float, most: float) -> list[float]:
    """1, 2, 5 and their like between two losses, from coarse to fine until there are five."""
    inside: list[float] = []
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(k / 10 for k in range(10, 100))):
        every = [step * 10.0**power for power in range(-7, 7) for step in steps]
        inside = sorted({round(value, 9) for value in every if least <= value <= most})
        if len(inside) >= 5:
            break
    return inside[:: max(1, len(inside) // 6)] or [least]
