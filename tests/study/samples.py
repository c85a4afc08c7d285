"""Records for the tests: complete, consistent, and as varied as those of a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from incvec.metrics import summarize
from incvec.presets import resolve
from incvec.study.runs import RunRecord

COUNTS = {5: [5000, *[1000] * 5], 10: [5000, *[500] * 10], 25: [5000, *[200] * 25]}


def matrix(tasks: int, fall: float, noise: torch.Generator) -> list[list[float]]:
    """Every task starts near 80 percent and loses `fall` points with each later task."""
    jitter = torch.rand(tasks + 1, tasks + 1, generator=noise)
    return [
        [round(max(0.0, 80 - fall * (t - i) - 6 * float(jitter[t, i])), 2) for i in range(t + 1)]
        for t in range(tasks + 1)
    ]


def sample(
    method: str = "podnet", *addons: str, tasks: int = 5, seed: int = 0, fall: float = 4.0, **given: Any
) -> dict[str, Any]:
    """A record as a run writes it, without losses."""
    config = resolve(
        {"method": method, "dataset": "cifar100", "addons": list(addons), "tasks": tasks, "seed": seed, **given}
    )
    accuracy = matrix(tasks, fall, torch.Generator().manual_seed(seed))
    counts = COUNTS[tasks]
    if method == "joint":
        accuracy, counts = [[72.5 + seed]], [sum(counts)]
    return {
        "format": 2, "method": method, "addons": list(addons), "dataset": "cifar100", "tasks": tasks,
        "oracle": config.oracle, "seed": seed, "order_seed": config.order_seed, "accuracy": accuracy,
        "test_counts": counts, "metrics": dict(summarize(accuracy, counts)), "config": config.resolved(),
        "seconds": 300.0 + seed, "task_seconds": [90.0, *[40.0 + len(addons) + seed] * (len(accuracy) - 1)],
        "engine": {"kind": "graph", "precision": "bf16", "notices": []},
        "environment": {"device": "a card", "versions": {"torch": "2.11.0", "python": "3.12"}, "commit": "abc123"},
    }  # fmt: skip


def detailed(record: dict[str, Any], classes: int = 6) -> dict[str, Any]:
    """The record with what a run writes about losses, teleports and classes; two classes in each of three tasks."""
    seed, with_ivt = record["seed"], "ivt" in record["addons"]
    correct = [[9 - k + seed if k < 2 * (t + 1) else 0 for k in range(2 * (t + 1))] for t in range(classes // 2)]
    last = correct[-1]
    parts = [{"scale": 0.9 - t / 10, "fisher_ratio": 2.0, "distance": 3.0 - t + seed} for t in (0, 1)]
    statistics = [{"ivt": {"all": part}} for part in parts]
    return record | {
        "losses": [
            {"task": t, "stage": stage, "terms": {"nca": [2.0 / e + seed for e in range(1, 5)], "flat": [0.5] * 4}}
            for t in range(3) for stage in ("main", "balance")
        ],
        "statistics": [{"ivt": {}}, *statistics] if with_ivt else [{}] * 3,
        "classifier": "cnn", "correct": {"cnn": correct}, "class_counts": [10] * classes,
        "class_order": list(range(10, 10 + classes)), "class_names": [f"bird {k}" for k in range(classes)],
        "confusion": [
            [n if i == k else 10 - n if i == (k + 1) % classes else 0 for i in range(classes)]
            for k, n in enumerate(last)
        ],
    }  # fmt: skip


def study() -> dict[str, dict[str, Any]]:
    """Two hosts with and without IVT, an oracle, joint training, an interval sweep, another memory size."""
    records = {}
    for seed in range(3):
        records[f"podnet-{seed}"] = sample(seed=seed)
        records[f"podnet+ivt-{seed}"] = sample("podnet", "ivt", seed=seed, fall=3.2 + 0.2 * seed)
        records[f"podnet-oracle-{seed}"] = sample(seed=seed, fall=1.0, oracle=True)
        records[f"joint-{seed}"] = sample("joint", seed=seed)
    for interval in (1, 5, 40):
        records[f"interval-{interval}"] = sample("podnet", "ivt", fall=3.4, ivt={"interval": interval})
    records["podnet+eopc"] = sample("podnet", "eopc", fall=3.6)
    records["memory"] = sample(fall=5.0, podnet={"memory": 5})
    records["memory+ivt"] = sample("podnet", "ivt", fall=4.4, podnet={"memory": 5})
    records["mrfa-25"] = sample("mrfa", tasks=25, fall=1.5)
    records["mrfa+ivt-25"] = sample("mrfa", "ivt", tasks=25, fall=1.0)
    return records


def path_data() -> dict[str, Any]:
    """The data of a path figure: three runs, each with a dip in the middle."""
    curves = []
    x = [step / 50 for step in range(51)]
    for name, addons, oracle, dip in (
        ("podnet", [], False, 30.0),
        ("podnet", ["ivt"], False, 9.0),
        ("podnet", [], True, 2.0),
    ):
        old = [80 - 15 * v - dip * 4 * v * (1 - v) for v in x]
        new = [60 * v for v in x]
        curves.append(
            {"name": " + ".join([name, *addons]) + " oracle" * oracle,
             "method": name, "addons": addons, "oracle": oracle, "x": x, "distance": [12.5 * v for v in x],
             "length": 12.5, "accuracy": {"old": old, "new": new},
             "loss": {"old": [4 - v / 25 for v in old], "new": [4 - v / 25 for v in new]},
             "barrier": {"accuracy": {"old": dip, "new": 0.0}, "loss": {"old": dip / 25, "new": 0.0}}}
        )  # fmt: skip
    return {
        "format": 1, "kind": "path", "dataset": "cifar100", "task_from": 0, "task_to": 5, "axis": "distance",
        "start": "oracle", "images_per_task": None, "batchnorm": "interpolate", "curves": curves,
    }  # fmt: skip


def runs_of(records: dict[str, dict[str, Any]]) -> list[RunRecord]:
    return [RunRecord(f"{name}/record.json", record) for name, record in records.items()]


def write(folder: Path, records: dict[str, dict[str, Any]]) -> Path:
    for name, record in records.items():
        file = folder / name / "record.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record))
    return folder
