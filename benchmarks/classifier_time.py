"""Time of `incvec learn` with the default backbone on a CPU, from the start of the command to its end.

    python benchmarks/classifier_time.py FOLDER [FOLDER ...] [--threads 2] [--json FILE]

The first folder, with one folder of photos per class, is learned with --out, the others with --into. Every command is a
process of its own. CPU time is user and system time as the kernel counts it; it depends less on other programs than the
time that passes. `load` is the machine's load average of the last minute at the end of the command.
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

import torch

import incvec
from incvec.atomic_files import write_bytes
from incvec.classifier.photos import list_photos
from incvec.records import environment


def measure(folders: Sequence[Path], threads: int) -> list[dict[str, Any]]:
    source = str(Path(incvec.__file__).parents[1])
    setting = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": str(threads)}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, folder in enumerate(folders):
            target = ["--out" if number == 0 else "--into", str(Path(name) / "model")]
            words = [sys.executable, "-m", "incvec", "learn", str(folder), *target, "--device", "cpu"]
            began = time.monotonic()
            process = subprocess.Popen(words, env=setting, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.monotonic() - began
            process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
            if process.returncode:
                raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
            files = list_photos(folder, at_least=1).files
            row: dict[str, Any] = {"learn": number + 1, "classes": len(files), "photos": sum(map(len, files.values()))}
            row |= {"threads": threads, "load": round(os.getloadavg()[0], 1)}
            rows.append(row | {"seconds": round(seconds, 1), "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1)})
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    rows = measure(given.folders, given.threads)
    if given.json is not None:
        torch.set_num_threads(given.threads)
        made = {**environment(torch.device("cpu")), "cpus": os.cpu_count()}
        content = {"command": "python benchmarks/classifier_time.py", "rows": rows, "environment": made}
        write_bytes(given.json, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
