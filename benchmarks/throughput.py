"""Images trained a second, by engine, number of runs at once, and stage; ratios measured in one run.

    python benchmarks/throughput.py --json results/benchmarks/throughput.json      # on a CUDA device
    python benchmarks/throughput.py --small                                        # a CPU will do

Images are random: speed does not depend on what they show.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.many import Failed, turn
from incvec.engine.run import Run
from incvec.presets import resolve
from incvec.records import environment


def random_images(small: bool) -> Dataset:
    """As many images as CIFAR-100 has, or a handful."""
    generator = torch.Generator().manual_seed(0)
    per_class, side, classes = (20, 8, 10) if small else (500, 32, 100)
    images = torch.randint(0, 256, (per_class * classes, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.arange(classes).repeat_interleave(per_class)
    norms = {"default": ((0.5,) * 3, (0.25,) * 3)}
    names = tuple(f"class {c}" for c in range(classes))
    kept = torch.arange(0, len(images), 10)
    return Dataset("random", images, labels, images[kept], labels[kept], names, 4, True, "random", norms)


def measure(data: Dataset, runs: int, engine: str, addons: list[str], epochs: int, small: bool) -> list[dict[str, Any]]:
    """Train the base and one increment in every run, and time the epochs once all runs are in the same stage."""
    given: dict[str, Any] = {
        "method": "podnet", "dataset": "digits" if small else "cifar100", "engine": engine, "addons": addons,
        "base_classes": len(data.class_names) // 2, "tasks": 1,
        "podnet": {"epochs": epochs, "balance_epochs": 1, "normalisation": "default"},
    }  # fmt: skip
    marks: dict[str, list[tuple[float, int, int]]] = {"base": [], "increment": []}
    rows: dict[tuple[int, str], int] = {}
    with tempfile.TemporaryDirectory() as folder:
        many = [Run(resolve({**given, "seed": seed}), data, Path(folder) / str(seed)) for seed in range(runs)]
        makers = [partial(lambda run: run, run) for run in many]
        for number, event in turn(makers, runs):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, ev.StageStarted):
                rows[(number, event.stage)] = event.steps * many[number].config.sections["podnet"]["batch_size"]
            if isinstance(event, ev.EpochEnded) and event.stage == "main" and event.task < 2:
                stage = "base" if event.task == 0 else "increment"
                marks[stage].append((time.monotonic(), number, rows[(number, "main")]))
    found = []
    for stage, points in marks.items():
        last_start = max(next(t for t, n, _ in points if n == number) for number in range(runs))
        first_end = min([t for t, n, _ in points if n == number][-1] for number in range(runs))
        inside = [(t, size) for t, _, size in points if last_start < t <= first_end]
        images = sum(size for _, size in inside)
        seconds = first_end - last_start
        found.append(
            {
                "engine": engine,
                "runs": runs,
                "stage": stage,
                "addons": addons,
                "images_per_second": round(images / seconds) if seconds > 0 else None,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small network and few images")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--runs", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = random_images(arguments.small)
    rows: list[dict[str, Any]] = []
    cases: list[tuple[str, int, list[str]]] = []
    if device.type == "cuda":
        for runs in arguments.runs:
            cases += [("graph", runs, []), ("graph", runs, ["ivt"])]
    cases += [("eager", 1, []), ("eager", 1, ["ivt"])]
    for engine, runs, addons in cases:
        rows += measure(data, runs, engine, addons, arguments.epochs, arguments.small)
        for row in rows[-2:]:
            print(row, flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": rows, "environment": environment(device)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
