"""What ImageNet costs: disk, memory and hours, from the rates of results/benchmarks/scale.json.

    python benchmarks/imagenet_cost.py [--rates results/benchmarks/scale.json] [--write docs/scale.md]

Prints the tables, or puts them between the marks in the document. Images trained by a run:

    base epochs x images of the base classes + sum over increments of epochs x (images of the task + exemplars)

and its hours are those images, each weighed by what the method does with it (`WORK`, in forward and backward passes of
the plain network), over the measured rate of the plain network. On several GPUs the rate is multiplied by their number
and by `EFFICIENCY`, which is assumed, not measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from incvec.presets import resolve

EFFICIENCY = 0.9
MARKS = ("<!-- costs: made by benchmarks/imagenet_cost.py -->", "<!-- end of costs -->")
FOLDER = Path(__file__).parent.parent


class Stream(NamedTuple):
    images: float  # a class, for training
    tests: int  # a class
    classes: int
    base: int
    increments: int
    side: int  # of the store
    seen: int  # by the network


STREAMS = {
    "tiny-imagenet-100": Stream(500, 50, 100, 50, 5, 64, 64),
    "imagenet-subset": Stream(128_856 / 100, 50, 100, 50, 5, 256, 224),
    "imagenet": Stream(1_281_167 / 1000, 50, 1000, 500, 10, 256, 224),
}
# Work on an image in the base task and in an increment, the plain network's forward and backward pass being 1: counted
# operations of a step (MRFA's by hand: one more pass to the maps, and a teacher). Rotations make four images of one.
WORK = {"podnet": (1.0, 1.33), "mrfa": (1.0, 2.0), "pass": (4.0, 5.3), "fcs": (9.3, 12.0)}


def images_trained(method: str, dataset: str, variant: str = "paper") -> tuple[float, float]:
    """Of the base task, and of all increments together."""
    config = resolve({"method": method, "dataset": dataset, "variant": variant})
    options, stream = config.sections[method], STREAMS[dataset]
    new = (stream.classes - stream.base) // stream.increments
    memory = options["memory"] if method in ("podnet", "mrfa") else 0
    base = (options["base_epochs"] or options["epochs"]) * stream.base * stream.images
    rows = sum(new * stream.images + memory * (stream.base + k * new) for k in range(stream.increments))
    return base, options["epochs"] * rows


def work(method: str, dataset: str, variant: str = "paper") -> tuple[float, float]:
    """Passes of the plain network: base task, increments."""
    base, later = images_trained(method, dataset, variant)
    return base * WORK[method][0], later * WORK[method][1]


def store_bytes(dataset: str) -> float:
    stream = STREAMS[dataset]
    return stream.classes * (stream.images + stream.tests) * 3 * stream.side**2


def read_rates(path: Path) -> dict[int, float]:
    """Images a second of the plain network by what it sees; streamed, since that is how the largest are trained."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    wanted = ("ours, streamed", "finetune", "base")
    rows = [r for r in content["rows"] if (r["what"], r.get("method"), r.get("stage")) == wanted]
    return {row["side"]: row["images_per_second"] for row in rows}


def tables(rates: dict[int, float]) -> list[str]:
    lines = ["| data set | seen at | store | a run shows the network | of that, base task |", "|---|---|---|---|---|"]
    for name, stream in STREAMS.items():
        base, later = images_trained("podnet", name)
        lines.append(
            f"| {name} | {stream.seen} | {store_bytes(name) / 1e9:.1f} GB | {(base + later) / 1e6:.1f} M images "
            f"(podnet, {stream.increments} increments) | {base / (base + later):.0%} |"
        )
    lines += ["", "Hours of one run without IVT, the base task included; with IVT the base task is shared:", ""]
    lines += ["| data set | method | passes of the plain network | 1 GPU | 8 GPUs |", "|---|---|---|---|---|"]
    for name, stream in STREAMS.items():
        for method in WORK:
            total = sum(work(method, name))
            texts = ["not measured yet"] * 2
            if stream.seen in rates:
                hours = total / rates[stream.seen] / 3600
                texts = [f"{hours:.1f} h", f"{hours / (8 * EFFICIENCY):.1f} h"]
            lines.append(f"| {name} | {method} | {total / 1e6:.0f} M | {texts[0]} | {texts[1]} |")
    told = ", ".join(f"{rate:,.0f} images/s at {side} pixels" for side, rate in sorted(rates.items()))
    lines += ["", f"Rates: {told}; 8 GPUs at {EFFICIENCY:.0%} of eight times one, which is assumed." if told else
              "No rate has been measured yet: hours are passes / (3600 x images/s of the plain network)."]  # fmt: skip
    return lines


def written(document: str, rates: dict[int, float]) -> str:
    """The document with the tables between its marks."""
    before, rest = document.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return "\n".join([before + MARKS[0], "", *tables(rates), "", MARKS[1] + after])


def main() -> None:
    parser = argparse.ArgumentParser(description="What ImageNet costs.")
    parser.add_argument("--rates", type=Path, default=FOLDER / "results" / "benchmarks" / "scale.json")
    parser.add_argument("--write", type=Path, help="a document with the marks")
    given = parser.parse_args()
    rates = read_rates(given.rates)
    if given.write is None:
        print("\n".join(tables(rates)))
    else:
        given.write.write_text(written(given.write.read_text(), rates))


if __name__ == "__main__":
    main()
