"""The overhead of IVT on a CPU, as a share of an epoch's time. Target: under 3 %.

    python benchmarks/ivt_overhead.py [--threads 1] [--json overhead.json]

Measured with the plug-in's defaults, with batchnorm="layer" (a teleport runs the network twice) and with
fisher_loss="own" (a second backward pass, in the epochs whose F is used: one in ten).

Steps with and without IVT alternate in one run, so that both see the same load of the machine. Two shares are printed:

- `inside`: the time spent in calls of IVT: squares in every step, the mean at the end of an epoch, a teleport every
  tenth epoch. It is the sum of small times that are measured one by one, hence precise.
- `outside`: the additional time of steps with IVT, plus the end of an epoch and the teleport. It includes indirect
  costs, but is noisy on a loaded machine.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from incvec import IVT, __version__

INTERVAL = 10
CLASSES = 60


@dataclass(frozen=True)
class Case:
    backbone: str
    image: tuple[int, int, int]
    epoch_steps: int  # steps per epoch of an increment


CASES = (
    Case("resnet32-rebuffi", (3, 32, 32), epoch_steps=39),  # CIFAR-100, 10 classes of 500 images
    Case("small", (1, 8, 8), epoch_steps=3),  # digits, 2 classes and the memory
)


@dataclass(frozen=True)
class Measured:
    """Medians in seconds, and shares of an epoch without IVT."""

    backbone: str
    variant: str
    parameters: int
    plain_step: float
    ivt_step: float
    accumulate: float
    end_epoch: float
    teleport: float
    inside: float
    outside: float


class Network(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        from incvec.nets import build_backbone

        self.backbone: nn.Module = build_backbone(case.backbone, channels=case.image[0])
        with torch.no_grad():
            width = self.backbone(torch.zeros(2, *case.image)).features.shape[1]
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).features)  # type: ignore[no-any-return]


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"batchnorm": "keep"},
    "layer": {"batchnorm": "layer"},
    "own": {"batchnorm": "keep", "fisher_loss": "own"},
}


def measure(case: Case, variant: str, batch: int, repeats: int) -> Measured:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, *case.image, generator=generator)
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    model = Network(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    parameters = list(model.parameters())
    ivt = IVT(model, interval=None, exclude=["head"], **VARIANTS[variant])
    own = variant == "own"

    def step(with_ivt: bool) -> tuple[float, float]:
        start = perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        before = perf_counter()
        if with_ivt and own:
            ivt.collect(loss)
        after = perf_counter()
        inside = after - before
        loss.backward()
        before = perf_counter()
        if with_ivt and not own:
            ivt.core.accumulate((parameter, parameter.grad) for parameter in parameters)
        inside += perf_counter() - before
        optimizer.step()
        return perf_counter() - start, inside

    def timed(call: Any) -> float:
        start = perf_counter()
        call()
        return perf_counter() - start

    ivt.begin_task()
    ivt.begin_epoch()
    for _ in range(3):
        step(True)
    ivt.end_epoch()
    ivt.end_task()
    ivt.begin_task()

    plain: list[float] = []
    full: list[float] = []
    accumulate: list[float] = []
    ends: list[float] = []
    teleports: list[float] = []
    for _ in range(repeats):
        # begin_epoch() zeroes the sums, which the first step of an epoch would do otherwise.
        opened = timed(ivt.begin_epoch)
        for _ in range(3):
            plain.append(step(False)[0])
            total, inside = step(True)
            full.append(total)
            accumulate.append(inside)
        ends.append(opened + timed(ivt.end_epoch))
        teleports.append(timed(ivt.teleport))

    share = 1 / INTERVAL if own else 1.0  # of the epochs, in which squares are collected
    step_time, per_step = median(plain), share * median(accumulate)
    rest = median(ends) + median(teleports) / INTERVAL
    epoch = step_time * case.epoch_steps
    return Measured(
        backbone=case.backbone,
        variant=variant,
        parameters=sum(parameter.numel() for parameter in parameters),
        plain_step=step_time,
        ivt_step=median(full),
        accumulate=per_step,
        end_epoch=median(ends),
        teleport=median(teleports),
        inside=(per_step * case.epoch_steps + rest) / epoch,
        outside=(share * median(b - a for a, b in zip(plain, full, strict=True)) * case.epoch_steps + rest) / epoch,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="IVT's share of an epoch's time on the CPU")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    measured = []
    for case in CASES:
        # A fast step is measured more often, since its noise is as large.
        repeats = options.repeats * (1 if case.image[0] == 3 else 20)
        measured += [measure(case, variant, options.batch, repeats) for variant in VARIANTS]

    print(f"incvec {__version__}, torch {torch.__version__}, {platform.machine()}, {options.threads} threads")
    titles = {"network": -18, "variant": -9, "step": 10, "squares": 10, "epoch end": 11, "teleport": 10}
    titles |= {"inside": 9, "outside": 9}
    print("".join(f"{title:<{-width}}" if width < 0 else f"{title:>{width}}" for title, width in titles.items()))
    for row in measured:
        times = (row.plain_step, row.accumulate, row.end_epoch, row.teleport)
        cells = "".join(f"{1e3 * t:>{w - 3}.2f} ms" for t, w in zip(times, (10, 10, 11, 10), strict=True))
        print(f"{row.backbone:<18}{row.variant:<9}{cells}{100 * row.inside:>7.2f} %{100 * row.outside:>7.2f} %")
    if options.json is not None:
        record = {
            "incvec": __version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "threads": options.threads,
            "batch": options.batch,
            "interval": INTERVAL,
            "cases": [asdict(case) for case in CASES],
            "measured": [asdict(row) for row in measured],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
