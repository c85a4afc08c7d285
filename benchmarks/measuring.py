"""What the benchmarks share: images, settings of a short run, and a report that is written after every row."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from incvec.atomic_files import write_bytes
from incvec.data import Dataset
from incvec.engine import events as ev
from incvec.records import environment

Row = dict[str, Any]


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_images(small: bool, device: torch.device | None = None) -> Dataset:
    """As many images as CIFAR-100 has, or a handful. Speed does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)
    per_class, side, classes = (20, 8, 10) if small else (500, 32, 100)
    images = torch.randint(0, 256, (per_class * classes, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.arange(classes).repeat_interleave(per_class)
    norms = {"default": ((0.5,) * 3, (0.25,) * 3)}
    names = tuple(f"class {c}" for c in range(classes))
    kept = torch.arange(0, len(images), 5 if not small else 10)
    data = Dataset("random", images, labels, images[kept], labels[kept], names, 4, True, "random", norms)
    if device is None:
        return data
    return replace(data, train_images=images.to(device), test_images=images[kept].to(device))


def settings(small: bool, addons: Sequence[str] = (), engine: str = "auto", **options: Any) -> dict[str, Any]:
    """PODNet as the paper has it on CIFAR-100, half of the classes in the base task; `options` are the method's.

    The rate is small, since random labels are trained on here, and there is no balanced stage unless it is asked for.
    """
    return {
        "method": "podnet",
        "dataset": "digits" if small else "cifar100",
        "engine": engine,
        "addons": list(addons),
        "base_classes": 5 if small else 50,
        "tasks": 5,
        "podnet": {"normalization": "default", "balance_epochs": 0, "lr": 0.01, **options},
    }


def turned(events: Iterator[ev.Event]) -> Generator[ev.Event, None, None]:
    """A run's events but for ticks; rests where it can do nothing but wait for the device."""
    with closing(cast(Any, events)):
        for event in events:
            if isinstance(event, ev.Tick):
                if event.waiting:
                    time.sleep(0.0002)
                continue
            yield event


@contextmanager
def one_thread(small: bool) -> Iterator[None]:
    """Tiny networks are faster with one CPU thread; large ones keep what they have."""
    threads = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Report:
    """Rows and other findings, printed as they come and on the disk at once: a program that is cut off leaves them."""

    def __init__(self, path: Path | None, program: str, arguments: Sequence[str] | None, **facts: Any) -> None:
        self.path = path
        given = sys.argv[1:] if arguments is None else arguments
        told = [Path(word).name if Path(word).is_absolute() else word for word in given]  # folders are this machine's
        command = " ".join(["python", f"benchmarks/{program}", *told])
        self.content: dict[str, Any] = {"command": command, **facts, "rows": []}
        self.content["environment"] = environment(pick_device())

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.content["rows"]
        return rows

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(json.dumps({name: value for name, value in row.items() if name != "kernels"}), flush=True)
        self._write()

    def put(self, **found: Any) -> None:
        self.content |= found
        print(json.dumps(found), flush=True)
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            write_bytes(self.path, (json.dumps(self.content, indent=1) + "\n").encode())
