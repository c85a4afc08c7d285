"""A training loop as it is usually written, for comparison: images per second.

    python benchmarks/plain_loop.py [--workers 8] [--seconds 10] [--json plain.json] [--small]

PIL images through torchvision's transforms in the workers of a DataLoader, float32, the default memory layout, an
eager step with `loss.backward()` and SGD, and the loss read in every step for the log. Network and losses are those of
this package's PODNet (with its teacher in the increment), called without the engine, so only the loop differs. Images
are random.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from measuring import Report, one_thread, pick_device, random_images, settings, synchronize
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms

from incvec.contracts import Batch, Task
from incvec.data import Dataset
from incvec.engine.build import RunParts, build, grow
from incvec.presets import resolve

MEMORY = 20  # exemplars per class
WARMUP = 10  # steps that are not timed


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Rows of a data set, opened, cropped, flipped, jittered and normalized one by one."""

    def __init__(self, data: Dataset, rows: Tensor, side: int) -> None:
        images = cast(Tensor, data.train_images)[rows]
        self.arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels: list[int] = data.train_labels[rows].tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(side, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(brightness=63 / 255),
                transforms.ToTensor(),
                transforms.Normalize((0.5,) * 3, (0.25,) * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.arrays[index])), self.labels[index]


def rows_of(data: Dataset, task: Task) -> Tensor:
    """The rows of the task's classes, and a few of each earlier class."""
    labels = data.train_labels
    new = ((labels >= task.n_old) & (labels < task.n_seen)).nonzero().flatten()
    old = [(labels == label).nonzero().flatten()[:MEMORY] for label in range(task.n_old)]
    return torch.cat([new, *old])


def measure(data: Dataset, parts: RunParts, task: Task, workers: int, seconds: float) -> float:
    """Images per second of the task's main stage, after a warm-up."""
    method, device = parts.method, parts.world.device
    stage = method.stages(task)[0]
    pictures = Pictures(data, rows_of(data, task), cast(Tensor, data.train_images).shape[-1])
    loader = DataLoader(
        pictures, batch_size=stage.batch_size, shuffle=True, num_workers=workers, drop_last=True,
        pin_memory=device.type == "cuda", persistent_workers=workers > 0,
    )  # fmt: skip
    trained = {n: p for n, p in method.named_parameters() if any(group.owns(n) for group in stage.groups)}
    optimizer = torch.optim.SGD(trained.values(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    method.train()
    steps, logged, began = 0, 0.0, 0.0
    for images, labels in forever(loader):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        terms = method.loss(Batch((images,), labels, labels))
        loss = torch.stack(list(terms.values())).sum()
        optimizer.zero_grad()
        loss.backward()
        method.gradients(trained)
        optimizer.step()
        logged += loss.item()
        steps += 1
        if steps == WARMUP:
            synchronize()
            began = time.perf_counter()
        elif steps > WARMUP and time.perf_counter() - began > seconds:
            break
    synchronize()
    return (steps - WARMUP) * stage.batch_size / (time.perf_counter() - began)


def forever(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small network and few images, for a CPU")
    parser.add_argument("--workers", type=int, default=None, help="default: 8, or the number of cores if smaller")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the two stages")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    workers = given.workers if given.workers is not None else min(8, os.cpu_count() or 1)
    if given.small:
        workers = min(workers, 1)
    device = pick_device()
    data = random_images(given.small)
    config = resolve({**settings(given.small), "precision": "fp32", "engine": "eager", "class_order": None})
    report = Report(given.json, "plain_loop.py", arguments, workers=workers)
    with one_thread(given.small):
        parts = build(config, data, torch.Generator(device), device)
        cast(Any, parts.method).to(memory_format=torch.contiguous_format)
        for task, stage in zip(parts.tasks, ("base", "increment"), strict=False):
            grow(parts, task, 0)
            rate = measure(data, parts, task, workers, given.seconds)
            row = {"engine": "plain", "runs": 1, "stage": stage, "addons": [], "images_per_second": round(rate)}
            report.add({**row, "workers": workers})


if __name__ == "__main__":
    main()
