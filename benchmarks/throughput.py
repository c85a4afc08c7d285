"""Images per second, by engine, number of concurrent runs, stage and add-ons; and ratios of them.

    python benchmarks/throughput.py --json results/benchmarks/throughput.json      # on a CUDA device
    python benchmarks/throughput.py --small                                        # for a CPU

PODNet, ResNet-32, batch 128, random images. `--parts` selects some of these parts:

- one, eight: base task and increment (of 10 classes, with teacher), without and with IVT; `two` and `four` on request;
- ivt: IVT on against off in the increment, as the median ratio of times: as PODNet's preset has it, with
  `batchnorm=layer`, with `fisher_loss=own`. Two runs alternate in one process, ten epochs with one teleport at a time,
  without checkpoints within the stage;
- tasks: increments of 2 classes against increments of 10, including everything from the end of the base task to the end
  of the last increment: balanced stages, herding, capture, evaluation, files. With the paper's 160 and 20 epochs, for
  the first increments only;
- eager: the same step without capture; plain: a loop as usually written (`plain_loop.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import Report, Row, one_thread, pick_device, random_images, settings, synchronize, without_ticks

from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.engine.device_errors import release_memory
from incvec.engine.run import Run
from incvec.engine.scheduler import Failed, run_concurrently
from incvec.presets import resolve

PARTS = ("one", "ivt", "eight", "tasks", "eager", "plain")
COUNTS = {"one": 1, "two": 2, "four": 4, "eight": 8}
INTERVAL = 10  # epochs between teleports, and of a turn

Mark = tuple[float, int]  # the time at which an epoch ended, and its number of images


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    base_epochs: int
    epochs: int
    turns: int  # of each run, in part ivt
    tasks: tuple[int, int]  # number of increments of the two runs in part tasks
    increments: tuple[int, int]  # number of those that are measured
    task_epochs: int
    balance_epochs: int
    plain_seconds: float


LARGE = Size(8, 24, 5, (25, 5), (2, 1), 160, 20, 5.0)
SMALL = Size(4, 4, 2, (5, 1), (2, 1), 3, 1, 0.2)


def rate(marks: Sequence[Sequence[Mark]]) -> float | None:
    """Images per second of all runs together, while all were in the stage. Between marks the rate is constant."""
    first, last = max(own[0][0] for own in marks), min(own[-1][0] for own in marks)
    if last <= first:
        return None
    total = 0.0
    for own in marks:
        for (before, _), (after, images) in itertools.pairwise(own):
            inside = min(after, last) - max(before, first)
            total += images * max(inside, 0.0) / (after - before)
    return total / (last - first)


def measure(data: Dataset, given: dict[str, Any], runs: int) -> Iterator[Row]:
    """Base task and first increment of every run, all runs at once."""
    epochs = given["podnet"]["epochs"]
    images: dict[tuple[int, int], int] = {}
    marks: list[dict[int, list[Mark]]] = [{0: [], 1: []} for _ in range(runs)]
    with tempfile.TemporaryDirectory() as folder:
        many = [Run(resolve({**given, "seed": seed}), data, Path(folder) / str(seed)) for seed in range(runs)]
        with closing(run_concurrently([lambda run=run: run for run in many], runs)) as events:  # type: ignore[misc]
            for number, event in events:
                if isinstance(event, Failed):
                    raise event.error
                loop = many[number].loop
                if isinstance(event, ev.StageStarted) and loop is not None:
                    images[(number, event.task)] = loop.steps * loop.batch
                if isinstance(event, ev.EpochEnded) and event.task < 2:  # one run may be ahead of the others
                    marks[number][event.task].append((time.perf_counter(), images[(number, event.task)]))
                if min(len(own[1]) for own in marks) == epochs:
                    synchronize()
                    break
        notices = sorted({text for run in many for text in run.progress.notices})
    for task, stage in enumerate(("base", "increment")):
        per_second = rate([own[task] for own in marks])
        yield {
            "engine": many[0].parts.engine,
            "runs": runs,
            "stage": stage,
            "addons": given["addons"],
            "images_per_second": None if per_second is None else round(per_second),
            "epochs": len(marks[0][task]),
            **({"notices": notices} if notices else {}),
        }


# IVT on against off ---------------------------------------------------------------------------------------------


def increment_of(run: Run) -> Generator[ev.Event, None, None]:
    """The run's events from the first epoch of its first increment."""
    events = without_ticks(run.events())
    for event in events:
        if isinstance(event, ev.StageStarted) and event.task == 1:
            return events
    raise RuntimeError("the run has no increment")


def ten_epochs(events: Iterator[ev.Event]) -> float:
    """Seconds of the next ten epochs. The engine is one epoch ahead of its events, before and after."""
    synchronize()
    began = time.perf_counter()
    seen = 0
    while seen < INTERVAL:
        seen += isinstance(next(events), ev.EpochEnded)
    synchronize()
    return time.perf_counter() - began


IVT_VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "layer": {"batchnorm": "layer"},
    "own": {"fisher_loss": "own"},
}


def compare_ivt(data: Dataset, small: bool, engine: str, size: Size, variant: str) -> tuple[list[Row], dict[str, Any]]:
    """Rows without and with IVT, and the median ratio of times."""
    epochs = INTERVAL * (size.turns + 1) + 1
    seconds: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Run(
                resolve(
                    settings(small, addons, engine, base_epochs=1, epochs=epochs)
                    | ({"ivt": IVT_VARIANTS[variant]} if addons else {})
                ),
                data, Path(folder) / str(number), Path(folder) / "bases", save_interval=math.inf,
            )
            for number, addons in enumerate(([], ["ivt"]))
        ]  # fmt: skip
        both = [increment_of(run) for run in runs]
        loop = runs[0].loop
        assert loop is not None
        steps, batch = INTERVAL * loop.steps, loop.batch
        for events in both:
            ten_epochs(events)
        for number in range(size.turns):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                seconds[which].append(ten_epochs(both[which]))
        for events in both:
            events.close()
    rows = [
        {
            "engine": engine,
            "runs": 1,
            "stage": "increment",
            "addons": addons,
            "images_per_second": round(steps * batch / statistics.median(own)),
            "part": "ivt",
            "variant": variant,
            "milliseconds_a_step": round(1e3 * statistics.median(own) / steps, 4),
            "seconds": [round(value, 4) for value in own],
        }
        for addons, own in zip(([], ["ivt"]), seconds, strict=True)
    ]
    ratios = [on / off for off, on in zip(*seconds, strict=True)]
    median = round(statistics.median(ratios), 5)
    return rows, {"median": median, "all": [round(ratio, 5) for ratio in ratios], "turns_of_epochs": INTERVAL}


# Small tasks against large ones ---------------------------------------------------------------------------------


def increments(
    data: Dataset, given: dict[str, Any], count: int, folder: Path, bases: Path
) -> tuple[int, float, list[str]]:
    """Images trained in the first `count` increments, and seconds from the end of the base to the end of the last."""
    run = Run(resolve(given), data, folder, bases)
    images, began, done = 0, 0.0, -1
    events = without_ticks(run.events())
    for event in events:
        if isinstance(event, ev.StageStarted) and event.task > 0 and run.loop is not None:
            images += event.epochs * run.loop.steps * run.loop.batch
        if isinstance(event, ev.TaskEnded):
            done = event.task
        if isinstance(event, ev.Saved) and done == 0 and not began:  # the task's checkpoint follows its evaluation
            synchronize()
            began = time.perf_counter()
        if isinstance(event, ev.Saved) and done == count:
            break
    events.close()  # waits for the checkpoint writer
    synchronize()
    return images, time.perf_counter() - began, run.progress.notices


def compare_tasks(data: Dataset, small: bool, engine: str, size: Size) -> tuple[list[Row], float]:
    """Rows of the two numbers of increments, and the ratio of their images per second."""
    rows: list[Row] = []
    addons = ["ivt"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        short = settings(small, addons, engine, base_epochs=1, epochs=1, balance_epochs=1)
        increments(data, short, 1, folder / "warm", folder / "bases")  # compiles the code that both use
        options = {"base_epochs": 1, "epochs": size.task_epochs, "balance_epochs": size.balance_epochs}
        for tasks, count in zip(size.tasks, size.increments, strict=True):
            release_memory()
            given = {**settings(small, addons, engine, **options), "tasks": tasks}
            images, seconds, notices = increments(data, given, count, folder / str(tasks), folder / "bases")
            rows.append(
                {
                    "engine": engine,
                    "runs": 1,
                    "stage": "increment",
                    "addons": addons,
                    "images_per_second": round(images / seconds),
                    "part": "tasks",
                    "tasks": tasks,
                    "increments": count,
                    "epochs": [size.task_epochs, size.balance_epochs],
                    "seconds": round(seconds, 3),
                    **({"notices": notices} if notices else {}),
                }
            )
    return rows, round(rows[0]["images_per_second"] / rows[1]["images_per_second"], 4)


# All of it ------------------------------------------------------------------------------------------------------


def plain(small: bool, seconds: float) -> list[Row]:
    """The plain loop in its own process, since it forks workers."""
    program = Path(__file__).with_name("plain_loop.py")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plain.json"
        command = [sys.executable, str(program), "--seconds", str(seconds), "--json", str(file)]
        subprocess.run([*command, *(["--small"] if small else [])], check=True, stdout=subprocess.DEVNULL)
        rows: list[Row] = json.loads(file.read_text())["rows"]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small network and few images, for a CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, in this order")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    parts = given.parts.split(",")
    unknown = sorted(set(parts) - {*PARTS, *COUNTS})
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; expected some of {', '.join([*PARTS, 'two', 'four'])}")
    size = SMALL if given.small else LARGE
    device = pick_device()
    engine = "graph" if device.type == "cuda" else "eager"
    data = random_images(given.small, device)
    report = Report(given.json, "throughput.py", arguments, batch=32 if given.small else 128, ratios={})
    clock = time.perf_counter()

    def case(runs: int, engine: str, addons: list[str], base_epochs: int, epochs: int, **more: Any) -> None:
        release_memory()
        for row in measure(
            data, settings(given.small, addons, engine, base_epochs=base_epochs, epochs=epochs) | more, runs
        ):
            report.add(row)

    def ratio(**values: Any) -> None:
        report.put(ratios={**report.content["ratios"], **values})

    with one_thread(given.small):
        for part in parts:
            release_memory()
            if part in COUNTS:
                shorter = 1 if part == "one" else 2  # many runs train more images per epoch
                for addons in ([], ["ivt"]):
                    case(
                        COUNTS[part],
                        engine,
                        addons,
                        max(3, size.base_epochs // shorter),
                        max(3, size.epochs // shorter),
                    )
            elif part == "eager":
                for addons in ([], ["ivt"]):
                    case(1, "eager", addons, 3, 3, base_classes=5 if given.small else 10)
            elif part == "ivt":
                compared = {}
                for variant in IVT_VARIANTS:
                    rows, compared[variant] = compare_ivt(data, given.small, engine, size, variant)
                    for row in rows:
                        report.add(row)
                ratio(ivt_on_against_off=compared)
            elif part == "tasks":
                rows, share = compare_tasks(data, given.small, engine, size)
                for row in rows:
                    report.add(row)
                ratio(small_tasks_against_large=share)
            elif part == "plain":
                for row in plain(given.small, size.plain_seconds):
                    report.add(row)
            report.put(seconds=round(time.perf_counter() - clock, 1))


if __name__ == "__main__":
    main()
