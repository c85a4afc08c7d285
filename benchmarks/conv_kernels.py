"""Our 3x3 convolutions against cuDNN's, layer by layer and in the whole step; searches how to cut the work.

    python benchmarks/conv_kernels.py --json results/benchmarks/conv-kernels.json      # on a CUDA device
    python benchmarks/conv_kernels.py --seconds 60 --no-step                           # the layers only
    python benchmarks/conv_kernels.py --no-step --shapes 64,64,56,56                   # of another network

Each product of each layer of ResNet-32 is captured in a CUDA graph of many launches and replayed; a launch's time
is the median replay over the launches. `cold` goes round among more inputs than the cache holds, `hot` stays on one:
in a step, a forward product finds its input in the cache and a product to the weights finds half of it there. Every
cut is checked against float64 before it is timed. What is best is printed as lines for `incvec/nets/launch.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import random_images
from torch import Tensor

from incvec.engine import events as ev
from incvec.engine.run import Run
from incvec.nets import kernels
from incvec.nets.kernels import launch
from incvec.nets.kernels.launch import Shape, Sums, Tiles
from incvec.presets import resolve
from incvec.records import environment

SHAPES: list[Shape] = [(16, 16, 32, 32), (32, 32, 16, 16), (64, 64, 8, 8)]
LAYERS = {16: 10, 32: 9, 64: 9}  # how many such layers ResNet-32 has
KINDS = ("forward", "to input", "to weight")
CACHE = 128 * 2**20  # bytes that surely do not fit the level-2 cache
LAST = torch.channels_last

# Candidates, the most promising first: the search stops when its time is over. From the code compiled for sm_90,
# without a device: none spills registers, and all but the narrowest use warp-group products.
TILES: dict[int, list[Tiles]] = {
    16: [
        Tiles(128, 16, 1, 0, 4), Tiles(64, 16, 1, 0, 4), Tiles(256, 16, 1, 0, 8), Tiles(128, 16, 3, 0, 4),
        Tiles(128, 16, 1, 0, 8), Tiles(64, 16, 3, 0, 4), Tiles(128, 16, 3, 0, 8), Tiles(256, 16, 1, 0, 4),
        Tiles(64, 16, 1, 0, 2), Tiles(128, 16, 1, 3, 4), Tiles(32, 16, 1, 0, 1),
    ],
    32: [
        Tiles(64, 32, 1, 0, 4), Tiles(128, 32, 1, 0, 8), Tiles(128, 32, 1, 0, 4), Tiles(64, 16, 1, 0, 4),
        Tiles(64, 32, 3, 0, 4), Tiles(64, 32, 1, 3, 4), Tiles(128, 32, 3, 2, 4), Tiles(32, 32, 1, 0, 2),
    ],
    64: [
        Tiles(64, 32, 1, 0, 4), Tiles(64, 16, 1, 0, 4), Tiles(64, 64, 1, 3, 4), Tiles(128, 32, 1, 3, 8),
        Tiles(64, 64, 1, 0, 8), Tiles(64, 32, 1, 3, 4), Tiles(128, 16, 1, 0, 8), Tiles(128, 64, 1, 3, 8),
        Tiles(128, 64, 1, 0, 8),
    ],
}  # fmt: skip
SUMS: dict[int, list[Sums]] = {
    16: [
        Sums(64, 16, 3, 3, 256, 2, 4), Sums(64, 16, 3, 3, 512, 2, 4), Sums(64, 16, 3, 3, 256, 3, 4),
        Sums(128, 16, 3, 1, 128, 3, 4), Sums(128, 16, 3, 3, 256, 2, 4), Sums(64, 16, 3, 1, 256, 4, 4),
        Sums(64, 16, 3, 3, 128, 3, 4), Sums(32, 16, 3, 3, 512, 3, 4),
    ],
    32: [
        Sums(64, 32, 3, 1, 128, 3, 4), Sums(64, 32, 3, 1, 64, 3, 4), Sums(128, 32, 3, 1, 64, 2, 4),
        Sums(64, 32, 3, 3, 128, 2, 4), Sums(64, 16, 3, 3, 64, 3, 4), Sums(64, 32, 3, 3, 128, 3, 8),
        Sums(32, 32, 3, 3, 128, 3, 4), Sums(64, 32, 1, 3, 128, 2, 4),
    ],
    64: [
        Sums(64, 64, 1, 1, 32, 3, 4), Sums(64, 64, 1, 1, 16, 4, 4), Sums(64, 32, 1, 3, 32, 3, 4),
        Sums(128, 64, 1, 1, 32, 2, 4), Sums(64, 64, 1, 3, 32, 3, 8), Sums(64, 64, 1, 3, 64, 2, 4),
        Sums(64, 32, 1, 3, 16, 4, 4), Sums(64, 32, 3, 1, 32, 3, 4),
    ],
}  # fmt: skip


class Problem:
    """One layer's tensors: as many sets of maps as overflow the cache, and the truth for the first."""

    def __init__(self, shape: Shape, batch: int) -> None:
        inputs, outputs, height, width = shape
        device = torch.device("cuda")
        draw = torch.Generator(device).manual_seed(0)
        bytes_a_set = 2 * batch * height * width * (inputs + outputs)
        self.count = max(4, min(96, -(-CACHE // bytes_a_set)))

        def maps(channels: int) -> Tensor:
            drawn = torch.randn(batch, channels, height, width, generator=draw, device=device)
            return drawn.bfloat16().to(memory_format=LAST)

        self.x = [maps(inputs) for _ in range(self.count)]
        self.grad = [maps(outputs) for _ in range(self.count)]
        weight = torch.randn(outputs, inputs, 3, 3, generator=draw, device=device) / (9 * inputs) ** 0.5
        self.weight = weight.to(memory_format=LAST)
        self.rounded = self.weight.bfloat16()
        exact = [t.double().requires_grad_() for t in (self.x[0], self.rounded)]
        y = F.conv2d(exact[0], exact[1], padding=1)
        self.truth = dict(zip(KINDS, (y.detach(), *torch.autograd.grad(y, exact, self.grad[0].double())), strict=True))

    def cudnn(self, kind: str) -> Callable[[int], Tensor]:
        """torch's way, given weights already in bfloat16, and leaving their gradient in it: less than it costs."""

        def run(i: int) -> Tensor:
            if kind == "forward":
                return F.conv2d(self.x[i], self.rounded, padding=1)
            mask = [kind == "to input", kind == "to weight", False]
            one, none = [1, 1], [0, 0]
            found = torch.ops.aten.convolution_backward(
                self.grad[i], self.x[i], self.rounded, None, one, one, one, False, none, 1, mask
            )
            result: Tensor = found[0] if mask[0] else found[1]
            return result

        return run

    def ours(self, kind: str, cut: Any) -> Callable[[int], Tensor]:
        def run(i: int) -> Tensor:
            if kind == "forward":
                return launch.product(self.x[i], self.weight, tiles=cut)[0]
            if kind == "to input":
                return launch.product(self.grad[i], self.weight, mirror=True, tiles=cut)[0]
            return launch.to_weight(self.x[i], self.grad[i], self.weight, sums=cut)

        return run

    def error(self, kind: str, found: Tensor) -> float:
        wanted = self.truth[kind]
        return float((found.double() - wanted).norm() / wanted.norm())


def replay_time(run: Callable[[int], Tensor], order: list[int], repeats: int = 7) -> float:
    """Microseconds of one launch, its place in a queue of many included."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in order:
                run(i)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        graph.replay()
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        stream.synchronize()
    milliseconds = [float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]
    return 1000 * statistics.median(milliseconds) / len(order)


def times(problem: Problem, run: Callable[[int], Tensor]) -> dict[str, float]:
    cold = replay_time(run, list(range(problem.count)) * (1 if problem.count > 12 else 2))
    hot = replay_time(run, [0] * 24)
    return {"cold": round(cold, 2), "hot": round(hot, 2)}


def search(problem: Problem, kind: str, cuts: list[Any], deadline: float) -> list[dict[str, Any]]:
    """Time the cuts while there is time, and at least the first."""
    rows: list[dict[str, Any]] = []
    bound = 1e-3 if kind == "to weight" else 6e-3
    for number, cut in enumerate(cuts):
        if number and time.monotonic() > deadline:
            break
        try:
            error = problem.error(kind, problem.ours(kind, cut)(0))
            if not error < bound:
                raise ArithmeticError(f"error {error:.1e}, expected under {bound:.0e}")
            row = {"cut": tuple(cut), "error": float(f"{error:.2e}"), **times(problem, problem.ours(kind, cut))}
        except Exception as error_:  # a cut the chip cannot hold, or a compiler's fault: the others are tried
            row = {"cut": tuple(cut), "failed": f"{type(error_).__name__}: {error_}"[:300]}
        rows.append(row)
    return rows


def layers(shapes: list[Shape], batch: int, seconds: float, found: dict[str, Any], save: Callable[[], None]) -> None:
    """Every product of every layer shape; prints a table as it goes."""
    jobs = [(shape, kind) for shape in shapes for kind in KINDS]
    start = time.monotonic()
    print(
        f"{'layer':>16} {'product':>10} {'cuDNN cold/hot us':>18} {'ours cold/hot us':>17} {'times':>6}  cut",
        flush=True,
    )
    problem: Problem | None = None
    for number, (shape, kind) in enumerate(jobs):
        if number % len(KINDS) == 0:
            problem = None  # frees the last layer's maps first
            problem = Problem(shape, batch)
        assert problem is not None
        row: dict[str, Any] = {"shape": list(shape), "kind": kind, "cudnn": times(problem, problem.cudnn(kind))}
        cuts: list[Any] = [*(SUMS if kind == "to weight" else TILES)[shape[0]]]
        row["tried"] = search(problem, kind, cuts, start + seconds * (number + 1) / len(jobs))
        good = [tried for tried in row["tried"] if "failed" not in tried]
        for tried in row["tried"]:
            if "failed" in tried:
                print(f"    {tried['cut']} failed: {tried['failed'][:120]}", flush=True)
        if good:
            row["best"] = best = min(good, key=lambda tried: tried["cold"] + tried["hot"])
            theirs, ours = row["cudnn"], best
            ratio = (theirs["cold"] + theirs["hot"]) / (ours["cold"] + ours["hot"])
            row["ratio"] = round(ratio, 2)
            layer = "{} -> {}, {} x {}".format(*shape)
            print(
                f"{layer:>16} {kind:>10} {theirs['cold']:>9.2f}/{theirs['hot']:>8.2f} "
                f"{ours['cold']:>8.2f}/{ours['hot']:>8.2f} {ratio:>6.2f}  {best['cut']}  ({len(good)} cuts)",
                flush=True,
            )
        found["layers"].append(row)
        save()


def adopt(found: dict[str, Any]) -> None:
    """Use the best cuts from here on, and print them as source."""
    tables: dict[str, tuple[str, dict[Shape, Any], Any]] = {
        "forward": ("FORWARD", launch.FORWARD, Tiles),
        "to input": ("TO_INPUT", launch.TO_INPUT, Tiles),
        "to weight": ("TO_WEIGHT", launch.TO_WEIGHT, Sums),
    }
    for kind, (name, table, make) in tables.items():
        print(f"{name}:")
        for row in found["layers"]:
            if row["kind"] == kind and "best" in row:
                shape: Shape = tuple(row["shape"])
                table[shape] = make(*row["best"]["cut"])
                print(f"    {shape}: {make.__name__}{tuple(table[shape])},", flush=True)


def step_time(on: bool, epochs: int, small: bool) -> dict[str, Any]:
    """Time of a step of PODNet's base task through the engine, kernels on or off, and what the engine had to say."""
    kernels.enable(on)
    data = random_images(small)
    given: dict[str, Any] = {
        "method": "podnet", "dataset": "digits" if small else "cifar100", "engine": "auto", "tasks": 1,
        "base_classes": len(data.class_names) // 2,
        "podnet": {"epochs": epochs, "balance_epochs": 1, "normalization": "default"},
    }  # fmt: skip
    marks: list[float] = []
    notices: list[str] = []
    steps, batch, first = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(resolve(given), data, Path(folder) / "run")
        batch = run.config.sections["podnet"]["batch_size"]
        events = run.events()
        for event in events:
            if isinstance(event, ev.Notice):
                notices.append(event.text)
            if isinstance(event, ev.StageStarted):
                steps = event.steps
            if isinstance(event, ev.EpochEnded):
                marks.append(time.monotonic())
                if len(marks) == epochs:
                    break
        events.close()
    kernels.enable()
    gaps = [b - a for a, b in itertools.pairwise(marks)]
    seconds = statistics.median(gaps) / steps
    return {
        "kernels": "triton" if on else "cudnn",
        "step_us": round(1e6 * seconds, 1),
        "images_per_second": round(batch / seconds),
        "first_epoch_after_s": round(marks[0] - first, 1),
        "notices": notices,
    }


def layer_shape(text: str) -> Shape:
    """Channels in, channels out, height and width, with commas between."""
    try:
        inputs, outputs, height, width = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected four numbers, such as 64,64,56,56") from None
    if inputs not in TILES or outputs not in TILES or min(height, width) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {', '.join(map(str, TILES))} channels and a size")
    return inputs, outputs, height, width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="for the search over cuts")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--shapes", type=layer_shape, nargs="+", default=SHAPES, help="by default ResNet-32's")
    parser.add_argument("--epochs", type=int, default=8, help="of the base task, to time its step")
    parser.add_argument("--no-step", action="store_true", help="the layers only")
    parser.add_argument("--no-layers", action="store_true", help="the step only, with the cuts in the tables")
    parser.add_argument("--small", action="store_true", help="the step of a small network, to try this out on a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not (arguments.small and arguments.no_layers):
        parser.error("needs a CUDA device; on a CPU only --small --no-layers works")
    found: dict[str, Any] = {"batch": arguments.batch, "layers": [], "step": []}
    found["environment"] = environment(torch.device("cuda" if cuda else "cpu"))

    def save() -> None:
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")

    if not arguments.no_layers:
        layers(arguments.shapes, arguments.batch, arguments.seconds, found, save)
        adopt(found)
    if not arguments.no_layers and arguments.shapes == SHAPES:
        total = dict.fromkeys(("cudnn", "best"), 0.0)
        for row in found["layers"]:
            for side in total:
                total[side] += LAYERS[row["shape"][0]] * row.get(side, row["cudnn"])["cold"]
        found["convolutions_us_a_step"] = {side: round(us) for side, us in total.items()}
        print(f"these layers in a step: cuDNN {total['cudnn']:.0f} us, ours {total['best']:.0f} us", flush=True)
        save()
    if not arguments.no_step:
        torch.cuda.empty_cache()
        for on in (True, False):
            try:
                row = step_time(on, arguments.epochs, arguments.small)
            except Exception as error:
                row = {"kernels": "triton" if on else "cudnn", "failed": f"{type(error).__name__}: {error}"[:500]}
            found["step"].append(row)
            print(row, flush=True)
            save()


if __name__ == "__main__":
    main()
