"""Seconds that the study needs for a path of 51 points and a plane of 41 x 41. Targets on one H200: 10 s and 60 s.

    python benchmarks/lab_speed.py --json results/benchmarks/lab-speed.json      # on a CUDA device
    python benchmarks/lab_speed.py --small                                       # on any CPU

PODNet with ResNet-32 on random images, as many as CIFAR-100 has test images. The path ends after the last of five
increments, with 10,000 images per point. The plane is that of the second task, the default of `incvec study plane`,
with 6,000 images per point, and that of the last one. Warm-up and capture are included. Then the path again, without a
CUDA graph.
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
from incvec.study.geometry import Snapshot, StateEvaluator
from incvec.study.geometry.evaluation import Backend

LIMITS = {"path": 10.0, "plane": 60.0}  # seconds on an H200
Weights = list[tuple[float, ...]]


def model_after(task: int, device: torch.device, small: bool) -> Snapshot:
    """A method grown up to a task (counted from 0), as restored from a snapshot."""
    generator = torch.Generator().manual_seed(0)
    classes, side, tests = (10, 8, 300) if small else (100, 32, 10_000)

    def images(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)

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
    return Snapshot(config, parts, parts.tasks[task])


def measure(snapshot: Snapshot, weights: Weights, backend: Backend) -> dict[str, Any]:
    """Time one evaluation of all points; reading the scores synchronizes with the device."""
    first = snapshot.state()
    states = [first, *({name: t + 0.01 * k for name, t in first.items()} for k in range(1, len(weights[0])))]
    evaluator = StateEvaluator(snapshot, backend=backend)
    start = time.monotonic()
    evaluator.evaluate(states, weights)
    seconds = time.monotonic() - start
    setup = {"points": len(weights), "images": sum(evaluator.counts), "asked": backend, "used": evaluator.used}
    return {**setup, "seconds": round(seconds, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small network, few images, few points")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count, size = (11, 5) if arguments.small else (51, 41)
    line: Weights = [(1 - k / (count - 1), k / (count - 1)) for k in range(count)]
    ticks = [-0.25 + 1.5 * k / (size - 1) for k in range(size)]
    grid: Weights = [(1 - a - b, a, b) for b in ticks for a in ticks]
    second, last = (model_after(task, device, arguments.small) for task in (1, 5))
    cases: list[tuple[str, Snapshot, Weights, Backend]] = [
        ("path", last, line, "auto"),
        ("plane", second, grid, "auto"),
        ("plane", last, grid, "auto"),
        ("path", last, line, "loop"),
    ]
    rows = []
    for kind, snapshot, weights, backend in cases:
        row: dict[str, Any] = {"kind": kind, "task": snapshot.task.index + 1, **measure(snapshot, weights, backend)}
        if backend == "auto" and device.type == "cuda" and not arguments.small:
            row |= {"limit": LIMITS[kind], "met": row["seconds"] < LIMITS[kind]}
        rows.append(row)
        print(row, flush=True)
        if arguments.json:  # after each case, so that a time limit loses nothing
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            content = {"precision": last.parts.precision, "rows": rows, "environment": environment(device)}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
