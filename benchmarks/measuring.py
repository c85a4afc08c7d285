"""Helpers of the benchmarks: random images, settings of a short run, and a report written after every row."""

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
    """As many random images as CIFAR-100 has, or a few. Speed does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    per_class, side, classes = (20, 8, 10) if small else (500, 32, 100)
    images = torch.randint(0, 256, (per_class * classes, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.arange(classes).repeat_interleave(per_class)
    norms = {"default": ((0.5,) * 3, (0.25,) * 3)}
    names = tuple(f"class {c}" for c in range(classes))
    test = torch.arange(0, len(images), 5 if not small else 10)
    data = Dataset("random", images, labels, images[test], labels[test], names, 4, True, "random", norms)
    if device is None:
        return data
    return replace(data, train_images=images.to(device), test_images=images[test].to(device))


def settings(small: bool, addons: Sequence[str] = (), engine: str = "auto", **options: Any) -> dict[str, Any]:
    """PODNet with the paper's settings for CIFAR-100, half of the classes in the base task; `options` are PODNet's.

    The learning rate is small because the labels are random. By default there is no balanced stage.
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


def without_ticks(events: Iterator[ev.Event]) -> Generator[ev.Event, None, None]:
    """A run's events without ticks; sleeps while the run waits for the device."""
    with closing(cast(Any, events)):
        for event in events:
            if isinstance(event, ev.Tick):
                if event.waiting:
                    time.sleep(0.0002)
                continue
            yield event


@contextmanager
def one_thread(small: bool) -> Iterator[None]:
    """Use one CPU thread for small networks, which are faster with it."""
    threads = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Report:
    """Rows and other results, printed and written to disk at once, so that an interrupted program leaves them."""

    def __init__(self, path: Path | None, program: str, arguments: Sequence[str] | None, **fields: Any) -> None:
        self.path = path
        given = sys.argv[1:] if arguments is None else arguments
        words = [Path(word).name if Path(word).is_absolute() else word for word in given]  # without local folders
        command = " ".join(["python", f"benchmarks/{program}", *words])
        self.content: dict[str, Any] = {"command": command, **fields, "rows": []}
        self.content["environment"] = environment(pick_device())

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.content["rows"]
        return rows

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(json.dumps({name: value for name, value in row.items() if name != "kernels"}), flush=True)
        self._write()

    def put(self, **fields: Any) -> None:
        self.content |= fields
        print(json.dumps(fields), flush=True)
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            write_bytes(self.path, (json.dumps(self.content, indent=1) + "\n").encode())
