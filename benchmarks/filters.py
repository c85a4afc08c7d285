"""How long a run's filters are, and how steep the norms behind them, after every task.

    python benchmarks/filters.py RUN [RUN ...] [--out FILE]

Weight decay takes filters that little depends on to nearly nothing, and a norm's slope (weight / sqrt(var + eps))
grows as its filter shrinks. Counted for every convolution with a norm behind it, from a run's snapshots: filters of
less than a hundredth of their layer's longest, and the steepest slope.
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
    """The convolution before a norm, as our networks name them: conv2 before norm2, conv before norm."""
    return re.sub(r"norm(\d*)$", r"conv\1", norm)


def layers(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """By norm of the trained model: filters, those that have vanished, and the steepest slope."""
    found = {}
    for key, var in tensors.items():
        name, _, last = key.rpartition(".")
        weight = tensors.get(f"{convolution(name)}.weight")
        if last != "running_var" or weight is None or not key.startswith("method/model."):
            continue
        lengths = weight.flatten(1).norm(dim=1)
        slope = tensors[f"{name}.weight"].abs() / (var + EPS).sqrt()
        found[name.removeprefix("method/model.")] = {
            "filters": len(lengths),
            "vanished": int((lengths < lengths.max() / 100).sum()),
            "median_length": float(f"{lengths.median():.4g}"),
            "shortest": float(f"{lengths.min():.4g}"),
            "longest": float(f"{lengths.max():.4g}"),
            "steepest": float(f"{slope.max():.4g}"),
        }
    return found


def measure(run: Path) -> list[dict[str, Any]]:
    """A row for every task."""
    rows = []
    files = sorted((run / "snapshots").glob("task-*.safetensors"))
    if not files:
        raise SystemExit(f"{run} has no snapshots: expected the folder of a run, with snapshots/task-NN.safetensors.")
    for file in files:
        found = layers(read_tensors(file)[0])
        total = {name: sum(layer[name] for layer in found.values()) for name in ("filters", "vanished")}
        steepest = max((layer["steepest"] for layer in found.values()), default=0.0)
        rows.append({"task": int(file.stem.split("-")[1]), **total, "steepest": steepest, "layers": found})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Lengths of filters, and slopes of norms, after every task.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, with their snapshots")
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    given = parser.parse_args(arguments)
    named = {run.resolve().name: run for run in given.runs}
    if len(named) < len(given.runs):
        told = ", ".join(map(str, given.runs))
        raise SystemExit(f"Two of the runs have the same name: {told}. Numbers go by the folder's; rename one.")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
    runs = {name: measure(run) for name, run in named.items()}
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
