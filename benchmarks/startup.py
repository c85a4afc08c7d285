"""CPU time of commands that train nothing, compared with `python -c pass` and with `import torch`, in one run.

    python benchmarks/startup.py [--repeats 5] [--json FILE] [--small]

Every command is started in a fresh interpreter, in turns. The CPU time is that of the process, user and system, as the
kernel counts it; it depends less on other programs than the time that passes. Each figure is the least of the repeats.
Bytecode is written by one start before. A command fails the benchmark if it needs more than 0.7 s and more than half of
what `import torch` needs on the same machine. `predict`, which needs torch, has 3 s; its classifier has the default
backbone and two classes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import incvec

LIMIT = 0.7  # seconds of CPU
PREDICT = "predict planes photos/a/0.png"
PREDICT_LIMIT = 3.0
RECORD = {
    "method": "podnet", "addons": ["ivt"], "dataset": "digits", "tasks": 3, "oracle": False, "seed": 0,
    "accuracy": [[90.0], [60.0, 60.0]], "test_counts": [20, 10], "metrics": {"AA": 75.0, "LA": 60.0, "FM": 30.0},
    "config": {"method": "podnet", "addons": ["ivt"], "dataset": "digits", "podnet": {}, "ivt": {}},
}  # fmt: skip
REFERENCES = {"python -c pass": ["-c", "pass"], "import torch": ["-c", "import torch"]}
COMMANDS = (
    "--help",
    "list",
    "list methods",
    "list methods podnet",
    "list presets",
    "show",
    "run --help",
    "run --method podnet --addon ivt --dry-run",
    "run --method podnt",
    "run --method podnet --set podnet.epocs=1",
    "run --method podnet --epochs 0",
    "run --method joint --addon ivt",
    "sweep digits --dry-run",
    "sweep digitz",
    PREDICT,
)
QUICK = ("--help", "list", "show", "run --method podnt")


def cpu_seconds(arguments: Sequence[str], folder: Path) -> float:
    """User and system time of one interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(Path(incvec.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # it has been waited for
    return usage.ru_utime + usage.ru_stime


def make_classifier(folder: Path) -> None:
    """A model folder with the default backbone, from pictures of two colors."""
    from PIL import Image

    from incvec import Classifier

    for name, color in (("a", "red"), ("b", "blue")):
        (folder / "photos" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (64, 64 + i), color).save(folder / "photos" / name / f"{i}.png")
    Classifier.fit(folder / "photos", folder / "planes", device="cpu")


def measure(commands: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    cases = REFERENCES | {f"incvec {words}": ["-m", "incvec", *words.split()] for words in commands}
    times: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "runs").mkdir()
        (folder / "runs" / "record.json").write_text(json.dumps(RECORD))
        if PREDICT in commands:
            make_classifier(folder)
        for turn in range(repeats + 1):
            for case, arguments in cases.items():
                seconds = cpu_seconds(arguments, folder)
                times[case] += [seconds] if turn else []
    bare, torch = (min(times[name]) for name in REFERENCES)
    return [
        {
            "command": case,
            "seconds": round(min(values), 3),
            "times_python": round(min(values) / bare, 1),
            "share_of_torch": round(min(values) / torch, 3),
        }
        for case, values in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="CPU time of commands that train nothing.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="four commands, once")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    rows = measure(QUICK if given.small else COMMANDS, 1 if given.small else given.repeats)
    for row in rows:
        print(f"{row['seconds']:6.2f} s  {row['times_python']:6.1f} x python  {row['command']}")
    own = [row for row in rows if row["command"].startswith("incvec")]
    slow = [
        row for row in own if row["seconds"] > LIMIT and row["share_of_torch"] > 0.5 and PREDICT not in row["command"]
    ]
    slow += [row for row in own if row["seconds"] > PREDICT_LIMIT and PREDICT in row["command"]]
    if given.json is not None:
        environment = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
        command = "python benchmarks/startup.py" + (" --small" if given.small else "")
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"command": command, "rows": rows, "environment": environment}, indent=1))
    if slow:
        raise SystemExit(f"over {LIMIT} s ({PREDICT_LIMIT} s for predict): {', '.join(row['command'] for row in slow)}")


if __name__ == "__main__":
    main()
