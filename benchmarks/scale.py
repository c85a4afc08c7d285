"""Training throughput on images of ImageNet's size, compared with a plain PyTorch loop, in one run.

    python benchmarks/scale.py --json results/benchmarks/scale.json      # on a CUDA device; about two minutes
    python benchmarks/scale.py --small                                   # on a CPU

Synthetic JPEG files: 500 x 375 at 110 KB for networks with an input of 224 pixels, and 64 x 64. A few different ones
under many names (hard links), so that they use little disk and stay in the page cache. ResNet-18, batch size 128:

- plain loop: ImageFolder, a DataLoader with one worker per core, torchvision's transforms, float32, eager SGD; also its
  loader alone, and its training step alone on one batch;
- ours: this package's engine on a packed store, with images resident on the device or streamed to it. The rate is that
  of the whole base stage, including the start and end of every epoch, after its step has been captured.

Rows are written when they are measured, so an interrupted benchmark leaves the rows so far.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from incvec.data import load_dataset
from incvec.data.dataset import IMAGENET_NORMALIZATION
from incvec.data.layouts import list_images
from incvec.data.options import Placement
from incvec.data.store.chunks import cores
from incvec.data.store.write import pack
from incvec.engine import events as ev
from incvec.engine.run import Run
from incvec.presets import resolve
from incvec.records import environment

CLASSES = 10
PLACEMENTS: tuple[Placement, ...] = ("resident", "streamed")
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    side: int  # input side of the network
    jpeg: tuple[int, int]
    stored: int
    nets: dict[str, str]
    images: int
    epochs: int
    batch: int = 128

    @property
    def tests(self) -> int:
        return max(CLASSES, self.images // 10)


CASES = {
    224: Case(224, (500, 375), 256, {"finetune": "resnet18", "podnet": "resnet18-podnet"}, 12_800, 5),
    64: Case(64, (64, 64), 64, {"finetune": "resnet18-64", "podnet": "resnet18-64-podnet"}, 25_600, 6),
}
SMALL = {
    224: Case(32, (150, 120), 128, {"finetune": "tiny", "podnet": "tiny"}, 80, 2, 8),
    64: Case(16, (16, 16), 16, {"finetune": "tiny", "podnet": "tiny"}, 80, 2, 8),
}


def make_images(root: Path, case: Case, kinds: int = 64) -> None:
    """Noise at several scales; a tenth of the files are for validation."""
    draw = np.random.default_rng(0)
    width, height = case.jpeg
    (root / "contents").mkdir(parents=True)
    for kind in range(kinds):
        total = np.zeros((height, width, 3))
        for cells in (4, 12, 40):
            coarse = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), np.uint8))
            total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), float) / 3
        pixels = (total + draw.normal(0, 6, total.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / "contents" / f"{kind}.jpg", quality=95)
    for part, count in (("train", case.images), ("val", case.tests)):
        for label in range(CLASSES):
            folder = root / part / f"n{label:08d}"
            folder.mkdir(parents=True)
            for i in range(label, count, CLASSES):
                os.link(root / "contents" / f"{i % kinds}.jpg", folder / f"{i:07d}.JPEG")


# The plain loop ---------------------------------------------------------------------------------------------


def rate(steps: Iterator[object], batch: int, warm: int, seconds: float, device: torch.device) -> float:
    """Images per second over about that many seconds, after `warm` steps that are not counted."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in itertools.islice(steps, warm):
        pass
    start, count = now(), 0
    for _ in steps:
        count += 1
        if time.perf_counter() - start > seconds:
            break
    return batch * count / (now() - start)


def plain(root: Path, case: Case, workers: int, seconds: float, device: torch.device) -> Iterator[Row]:
    from torchvision import models, transforms
    from torchvision.datasets import ImageFolder

    crop = transforms.RandomCrop(case.side, padding=case.side // 8)
    if case.jpeg[0] != case.side:
        crop = transforms.RandomResizedCrop(case.side)
    steps = [
        crop,
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(*IMAGENET_NORMALIZATION),
    ]
    folder = ImageFolder(str(root / "train"), transforms.Compose(steps))
    loader: DataLoader[Any] = DataLoader(
        folder, case.batch, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda", drop_last=True,
        persistent_workers=workers > 0,
    )  # fmt: skip
    network = models.resnet18(num_classes=CLASSES)
    if case.jpeg[0] == case.side:
        network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    network.to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

    def train(images: Tensor, labels: Tensor) -> Tensor:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    warm = min(20, len(loader) // 5)
    common = {"side": case.side, "workers": workers, "batch": case.batch}
    stream = batches()
    first = next(stream)
    parts: list[tuple[str, Callable[[], Iterator[object]], float]] = [
        ("plain loop", lambda: (train(*batch) for batch in stream), seconds),
        ("plain loop, its loader alone", lambda: stream, seconds / 2),
        ("plain loop, its step alone", lambda: (train(*first) for _ in itertools.count()), seconds / 4),
    ]
    for what, steps_of, share in parts:
        yield {**common, "what": what, "images_per_second": rate(steps_of(), case.batch, warm, share, device)}


# Ours -------------------------------------------------------------------------------------------------------


def ours(store: Path, case: Case, method: str, placement: Placement, out: Path) -> Iterator[Row]:
    """The base stage, and the first increment of a method with a teacher."""
    teacher = method != "finetune"
    options: dict[str, Any] = {"net": case.nets[method], "epochs": case.epochs, "batch_size": case.batch, "lr": 0.01}
    options |= {"brightness": 0.0, "normalization": "default"}
    if teacher:
        options |= {"balance_epochs": 1, "memory": min(20, case.images // CLASSES // 2)}
    config = resolve(
        {
            "method": method, "dataset": "packed", "tasks": 1, "placement": placement,
            "base_classes": CLASSES // 2 if teacher else CLASSES * 8 // 10,
            "image_size": None if case.stored == case.side else case.side, method: options,
        }
    )  # fmt: skip
    run = Run(config, load_dataset("packed", store, **config.data_options()), out)
    steps: dict[int, int] = {}
    with closing(run.events()) as events:
        for event in events:
            if isinstance(event, ev.StageStarted) and event.stage == "main":
                steps[event.task] = event.steps
            if isinstance(event, ev.TaskEnded) and event.task == int(teacher):
                break
    for row in run.progress.losses:
        if row["stage"] == "main":
            images = steps[row["task"]] * case.batch * case.epochs
            yield {
                "side": case.side, "batch": case.batch, "what": f"ours, {placement}", "method": method,
                "stage": "base" if row["task"] == 0 else "increment, with teacher", "images": images,
                "images_per_second": images / row["seconds"], "engine": run.parts.engine,
                "precision": run.parts.precision, "notices": list(run.progress.notices),
            }  # fmt: skip


def measure(case: Case, methods: list[str], workers: int, seconds: float, place: Path) -> Iterator[Row]:
    """All rows of one image size."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    root, store = place / "images", place / "store"
    make_images(root, case)
    # The plain loop first: its workers are forked, before this process starts threads.
    yield from plain(root, case, workers, seconds, device)
    start = time.perf_counter()
    pack(list_images(root), store, case.stored, workers=workers)
    total = case.images + case.tests
    yield {
        "side": case.side, "what": "pack", "stored": case.stored, "workers": workers,
        "images_per_second": total / (time.perf_counter() - start),
    }  # fmt: skip
    for method in methods:
        for placement in PLACEMENTS:
            yield from ours(store, case, method, placement, place / f"{method}-{placement}")


def ratios(rows: list[Row]) -> dict[str, float]:
    """Ratios between rows of the same image size."""
    values: dict[str, float] = {}
    for side in sorted({row["side"] for row in rows}):
        mine = [row for row in rows if row["side"] == side and row.get("method", "finetune") == "finetune"]
        rates = {row["what"]: row["images_per_second"] for row in mine}
        for placement in PLACEMENTS:
            if {f"ours, {placement}", "plain loop"} <= set(rates):
                values[f"{placement} over plain loop, {side}"] = rates[f"ours, {placement}"] / rates["plain loop"]
        if {"ours, resident", "ours, streamed"} <= set(rates):
            values[f"streamed over resident, {side}"] = rates["ours, streamed"] / rates["ours, resident"]
    return {name: round(value, 3) for name, value in values.items()}


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description="ImageNet-size training compared with a plain loop.")
    parser.add_argument("--small", action="store_true", help="a small network and few images")
    parser.add_argument("--sides", type=int, nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--methods", nargs="*", choices=["finetune", "podnet"], default=["finetune"])
    parser.add_argument(
        "--workers", type=int, default=cores(), help="processes of the plain loop's loader, and of packing"
    )
    parser.add_argument("--seconds", type=float, help="duration of the plain loop's measurement")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    seconds = given.seconds if given.seconds is not None else (0.5 if given.small else 8.0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    for side in given.sides:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            case = (SMALL if given.small else CASES)[side]
            for row in measure(case, given.methods, given.workers, seconds, Path(place)):
                rows.append({**row, "images_per_second": round(row["images_per_second"], 1)})
                print(rows[-1], flush=True)
                if given.json:
                    given.json.parent.mkdir(parents=True, exist_ok=True)
                    content = {
                        "rows": rows,
                        "ratios": ratios(rows),
                        "cores": cores(),
                        "environment": environment(device),
                    }
                    given.json.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(ratios(rows), indent=1))
    return rows


if __name__ == "__main__":
    main()
