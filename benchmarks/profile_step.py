"""The time of a training step by kernel, for the base task and for an increment.

    python benchmarks/profile_step.py --json results/benchmarks/profile.json      # on a CUDA device
    python benchmarks/profile_step.py --small                                     # operators on a CPU

PODNet, ResNet-32, batch 128, random images. `wall` is the time per step between two synchronizations, measured without
the profiler; `busy` is the sum of its kernels' times; `host` is the time to launch it. If `host` is close to `wall`,
the host is the bottleneck. The difference between `wall` and `busy` is the gaps between kernels. `--runs 2` repeats it
in the same process, in which a second run has been slower.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from measuring import Report, Row, one_thread, pick_device, random_images, settings, synchronize, without_ticks
from torch.profiler import ProfilerActivity, profile

from incvec.engine import events as ev
from incvec.engine.loop import StageLoop
from incvec.engine.run import Run
from incvec.presets import resolve

LAUNCHES = 8  # timed together for `host`: few enough not to fill the launch queue


def run_steps(loop: StageLoop, steps: int) -> None:
    """Run that many steps, from the beginning of the epoch."""
    loop.cursor.zero_()
    for _ in range(steps):
        loop.queue_step()


def seconds_per_step(loop: StageLoop, steps: int, waits: bool) -> float:
    """The median of five measurements. `waits`: until the steps are done, otherwise until they are launched."""
    times = []
    for _ in range(5):
        synchronize()
        began = time.perf_counter()
        run_steps(loop, steps)
        if waits:
            synchronize()
        times.append((time.perf_counter() - began) / steps)
    synchronize()
    return statistics.median(times)


def kernels_of(loop: StageLoop, steps: int) -> list[Row]:
    """Each kernel (on a CPU: operator) with its launches and microseconds per step, the most expensive first."""
    cuda = loop.world.device.type == "cuda"
    run_steps(loop, 1)
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        run_steps(loop, steps)
        synchronize()
    rows: list[Row] = []
    for average in profiler.key_averages():
        entry: Any = average
        if cuda and entry.device_type.name != "CUDA":
            continue
        time_us = entry.self_device_time_total if cuda else entry.self_cpu_time_total
        rows.append({"name": entry.key, "launches": entry.count / steps, "microseconds": round(time_us / steps, 3)})
    return sorted(rows, key=lambda row: -row["microseconds"])


def profile_stage(loop: StageLoop, stage: str, addons: list[str], max_steps: int) -> Row:
    """The profile of one stage's step."""
    steps = min(max_steps or loop.steps, loop.steps)
    kernels = kernels_of(loop, steps)
    return {
        "engine": "graph" if loop.replays else "eager",
        "stage": stage,
        "addons": addons,
        "steps": steps,
        "wall_us": round(1e6 * seconds_per_step(loop, steps, waits=True), 2),
        "busy_us": round(sum(row["microseconds"] for row in kernels), 2),
        "host_us": round(1e6 * seconds_per_step(loop, min(steps, LAUNCHES), waits=False), 2),
        "launches": round(sum(row["launches"] for row in kernels), 2),
        "kernels": kernels,
    }


def profile_run(report: Report, chosen: dict[str, Any], number: int, given: argparse.Namespace) -> None:
    """Profile the steps of the base task and of the first increment of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(resolve(chosen), random_images(given.small, pick_device()), Path(folder))
        with closing(without_ticks(run.events())) as events:
            for event in events:
                if not isinstance(event, ev.StageStarted) or run.loop is None:
                    continue
                stage = "base" if event.task == 0 else "increment"
                synchronize()  # the following is launched on another stream than the run's
                row = profile_stage(run.loop, stage, given.addon, given.steps)
                for kernel in row["kernels"][: given.top]:
                    print(f"{kernel['microseconds']:>10.1f} us {kernel['launches']:>8.1f} x  {kernel['name'][:90]}")
                report.add({"run": number, **row})
                if event.task == 1:
                    return


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small network and few images, for a CPU")
    parser.add_argument("--addon", action="append", default=[])
    parser.add_argument("--steps", type=int, default=46, help="steps to profile, at most one epoch; 0: a whole epoch")
    parser.add_argument("--runs", type=int, default=1, help="number of runs, one after the other")
    parser.add_argument("--top", type=int, default=12, help="number of kernels to print")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    report = Report(given.json, "profile_step.py", arguments)
    chosen = settings(given.small, given.addon, base_epochs=1, epochs=1)
    with one_thread(given.small):
        for number in range(1, given.runs + 1):
            profile_run(report, chosen, number, given)


if __name__ == "__main__":
    main()
