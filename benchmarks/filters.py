"""Norms of a run's filters, and slopes of the BatchNorm layers after them, after every task.

    python benchmarks/filters.py RUN [RUN ...] [--out FILE]

Weight decay shrinks unused filters to almost zero, and the slope of their BatchNorm, weight / sqrt(var + eps), grows
accordingly. For every convolution with a BatchNorm after it, from a run's snapshots: the number of filters shorter than
a hundredth of the longest one of their layer (`vanished`), and the steepest slope.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from incvec.atomic_files import read_tensors
from incvec.records import environment

EPS = 1e-5


def convolution(norm: str) -> str:
    """The convolution before a BatchNorm, by the names of our networks: conv2 before norm2, conv before norm."""
    return re.sub(r"norm(\d*)$", r"conv\1", norm)


def layers(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """For each BatchNorm of the trained model: filters, vanished filters, and the steepest slope."""
    measured = {}
    for key, var in tensors.items():
        name, _, last = key.rpartition(".")
        weight = tensors.get(f"{convolution(name)}.weight")
        if last != "running_var" or weight is None or not key.startswith("method/model."):
            continue
        lengths = weight.flatten(1).norm(dim=1)
        slope = tensors[f"{name}.weight"].abs() / (var + EPS).sqrt()
        measured[name.removeprefix("method/model.")] = {
            "filters": len(lengths),
            "vanished": int((lengths < lengths.max() / 100).sum()),
            "median_length": float(f"{lengths.median():.4g}"),
            "shortest": float(f"{lengths.min():.4g}"),
            "longest": float(f"{lengths.max():.4g}"),
            "steepest": float(f"{slope.max():.4g}"),
        }
    return measured


def measure(run: Path) -> list[dict[str, Any]]:
    """One row per task."""
    rows = []
    files = sorted((run / "snapshots").glob("task-*.safetensors"))
    if not files:
        raise SystemExit(f"{run} has no snapshots: expected the folder of a run with snapshots/task-NN.safetensors.")
    for file in files:
        by_layer = layers(read_tensors(file)[0])
        total = {name: sum(layer[name] for layer in by_layer.values()) for name in ("filters", "vanished")}
        steepest = max((layer["steepest"] for layer in by_layer.values()), default=0.0)
        rows.append({"task": int(file.stem.split("-")[1]), **total, "steepest": steepest, "layers": by_layer})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Norms of filters, and slopes of BatchNorm layers, after every task.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs with snapshots")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    given = parser.parse_args(arguments)
    by_name = {run.resolve().name: run for run in given.runs}
    if len(by_name) < len(given.runs):
        paths = ", ".join(map(str, given.runs))
        raise SystemExit(f"Two runs have the same folder name: {paths}. Results are listed by this name; rename one.")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    runs = {name: measure(run) for name, run in by_name.items()}
    for name, rows in runs.items():
        for row in rows:
            print(
                f"{name} task {row['task']}: {row['vanished']} of {row['filters']} filters vanished, "
                f"steepest slope {row['steepest']:.4g}"
            )
    if given.out is not None:
        given.out.write_text(json.dumps({"environment": environment(torch.device("cpu")), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
