"""The duration of one complete run with empty caches: PODNet + IVT, 5 increments on CIFAR-100.

    python benchmarks/complete_run.py --data-root ~/data --json results/benchmarks/complete-run.json
    python benchmarks/complete_run.py --small                # digits on a CPU, one epoch per task

The command line runs in a new process with empty compiler caches. With `--out` the run is kept, with its base task in
the folder `bases` beside it. The time is divided into:

- startup: until the run has started (imports, reading and checking the data, building the network);
- capture: compiling and capturing the steps of all stages;
- base, increments: training, including balanced stages;
- ends: the rest (imprinting, herding, evaluation, snapshots, checkpoints, the record).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import Report

SMALL = ["--dataset", "digits", "--device", "cpu", "--tasks", "2"]
SMALL += [part for name in ("epochs", "balance_epochs") for part in ("--set", f"podnet.{name}=1")]


def command_line(given: argparse.Namespace, out: Path) -> list[str]:
    chosen = SMALL if given.small else ["--dataset", "cifar100", "--tasks", str(given.tasks)]
    if given.data_root is not None:
        chosen = [*chosen, "--data-root", str(given.data_root)]
    for setting in given.settings:
        chosen = [*chosen, "--set", setting]
    chosen = [*chosen, "--seed", str(given.seed), "--out", str(out)]
    return ["-m", "incvec", "run", "--method", "podnet", "--addon", "ivt", *chosen]


def run(command: Sequence[str], caches: Path) -> tuple[float, float]:
    """Seconds until the run had started, and until the process had ended. Its output is printed."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    cache_folders = {name: str(caches / name.lower()) for name in names}
    began = time.monotonic()
    startup = 0.0
    environment = {**os.environ, **cache_folders, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not startup and " engine on " in line:
                startup = time.monotonic() - began
            print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"the run failed with status {process.returncode}; its message is above.")
    return startup, time.monotonic() - began


def phases(record: dict[str, Any], startup: float, total: float) -> dict[str, float]:
    """The seconds of each phase, from the record's stages."""
    stages = record["losses"]
    capture = sum(row["capture_seconds"] for row in stages)
    base = sum(row["seconds"] for row in stages if row["task"] == 0)
    increments = sum(row["seconds"] for row in stages if row["task"] > 0)
    split = {"startup": startup, "capture": capture, "base": base, "increments": increments}
    split["ends"] = total - sum(split.values())
    return {name: round(seconds, 2) for name, seconds in split.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="digits, on a CPU")
    parser.add_argument("--data-root", type=Path, default=os.environ.get("INCVEC_DATA"), help="folder of CIFAR-100")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep the run in this new folder")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a setting, as in `incvec run`")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if not given.small and given.data_root is None:
        parser.error("--data-root is needed: the folder with CIFAR-100's files")
    if given.out is not None and (given.out.exists() or (given.out.parent / "bases").exists()):
        parser.error(
            f"{given.out} or bases beside it exists, but the run has to start from scratch: choose another --out"
        )
    report = Report(given.json, "complete_run.py", arguments)
    with tempfile.TemporaryDirectory() as folder:
        out = given.out or Path(folder) / "run"
        startup, total = run(command_line(given, out), Path(folder) / "caches")
        record = json.loads((out / "record.json").read_text())
    metrics = {name: record["metrics"][name] for name in ("AA", "LA", "FM")}
    stages = [{k: row[k] for k in ("task", "stage", "capture_seconds", "seconds")} for row in record["losses"]]
    report.add(
        {
            "engine": record["engine"]["kind"],
            "dataset": record["dataset"],
            "tasks": record["tasks"],
            "seed": record["seed"],
            "addons": record["addons"],
            "seconds": round(total, 2),
            "phases": phases(record, startup, total),
            "metrics": metrics,
            "notices": record["engine"]["notices"],
        }
    )
    report.put(stages=stages)


if __name__ == "__main__":
    main()
