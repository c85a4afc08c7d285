"""Seconds that the lab takes for a line of 51 points and a plane of 41 x 41. Targets on one H200: 10 s and 60 s.

    python benchmarks/lab_speed.py --json results/benchmarks/lab-speed.json      # on a CUDA device
    python benchmarks/lab_speed.py --small                                       # a CPU will do

PODNet with ResNet-32 on as many test images as CIFAR-100 has (random ones: the time does not depend on what they
show). The line ends after the last of five increments, 10,000 images a point; the plane is that of the second task,
which `incvec lab plane` takes unless told otherwise, 6,000 images a point, and that of the last one. Times are those
a user meets: warming up and capturing are in them. Then the line again, by the other ways.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from incvec.data import Dataset
from incvec.engine.build import build, grow
from incvec.presets import resolve
from incvec.records import environment
from incvec.study.geometry import Points, Rebuilt
from incvec.study.geometry.points import Way

LIMITS = {"path": 10.0, "plane": 60.0}  # seconds on an H200


def model_after(task: int, device: torch.device, small: bool) -> Rebuilt:
    """A method grown for its tasks up to one (counted from 0), as a snapshot gives it back."""
    draw = torch.Generator().manual_seed(0)
    classes, side, tests = (10, 8, 300) if small else (100, 32, 10_000)

    def images(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=draw)

    norm = ((0.5,) * 3, (0.25,) * 3)
    data = Dataset(
        "random", images(20 * classes), torch.arange(20 * classes) % classes, images(tests),
        torch.arange(tests) % classes, tuple(map(str, range(classes))), 4, True, "random",
        {"default": norm, "lucir": norm},
    )  # fmt: skip
    given: dict[str, Any] = {"method": "podnet", "dataset": "cifar100", "device": str(device)}
    if small:
        given |= {"base_classes": 5, "podnet": {"net": "small"}}
    config = resolve(given)
    parts = build(config, data, torch.Generator(device), device)
    for each in parts.tasks[: task + 1]:
        grow(parts, each, 0)
    parts.method.eval()
    return Rebuilt(config, parts, parts.tasks[task])


def seconds(rebuilt: Rebuilt, weights: list[tuple[float, ...]], way: Way) -> dict[str, Any]:
    """One evaluation of all points; the scores come back to the host, so nothing is still under way at the end."""
    first = rebuilt.state()
    states = [first, *({name: t + 0.01 * k for name, t in first.items()} for k in range(1, len(weights[0])))]
    points = Points(rebuilt, way=way)
    began = time.monotonic()
    points.evaluate(states, weights)
    taken = time.monotonic() - began
    told = {"points": len(weights), "images": sum(points.counts), "asked": way, "used": points.used}
    return {**told, "seconds": round(taken, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small network, few images, few points")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count, size = (11, 5) if arguments.small else (51, 41)
    line: list[tuple[float, ...]] = [(1 - k / (count - 1), k / (count - 1)) for k in range(count)]
    ticks = [-0.25 + 1.5 * k / (size - 1) for k in range(size)]
    grid: list[tuple[float, ...]] = [(1 - a - b, a, b) for b in ticks for a in ticks]
    second, last = (model_after(task, device, arguments.small) for task in (1, 5))
    cases: list[tuple[str, Rebuilt, list[tuple[float, ...]], Way]] = [
        ("path", last, line, "auto"),
        ("plane", second, grid, "auto"),
        ("plane", last, grid, "auto"),
        ("path", last, line, "loop"),
        ("path", last, line, "vmap"),
    ]
    rows = []
    for kind, rebuilt, weights, way in cases:
        row: dict[str, Any] = {"kind": kind, "task": rebuilt.task.index + 1, **seconds(rebuilt, weights, way)}
        if way == "auto" and device.type == "cuda" and not arguments.small:
            row |= {"limit": LIMITS[kind], "met": row["seconds"] < LIMITS[kind]}
        rows.append(row)
        print(row, flush=True)
        if arguments.json:  # after each, so that a time limit leaves what there is
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            account = {"precision": last.parts.precision, "rows": rows, "environment": environment(device)}
            arguments.json.write_text(json.dumps(account, indent=1) + "\n")


if __name__ == "__main__":
    main()
