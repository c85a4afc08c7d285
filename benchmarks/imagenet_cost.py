"""What ImageNet costs: packing, disk, memory and hours, from packing.json and scale*.json in results/benchmarks.

    python benchmarks/imagenet_cost.py [--rates FILE ...] [--packing FILE] [--write docs/scale.md]

Prints what was measured, or puts it between the marks in the document. Images trained by a run:

    base epochs x images of the base classes + sum over increments of epochs x (images of the task + exemplars)

and its hours are those images, each weighed by what the method does with it (`WORK`, in forward and backward passes of
the plain network), over the measured rate of the plain network. On several GPUs the rate is multiplied by their number
and by `EFFICIENCY`, which is assumed, not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from incvec.presets import resolve

EFFICIENCY = 0.9
MARKS = ("<!-- costs: made by benchmarks/imagenet_cost.py -->", "<!-- end of costs -->")
PACKING_MARKS = ("<!-- packing: made by benchmarks/imagenet_cost.py -->", "<!-- end of packing -->")
UNMEASURED = "No rate has been measured yet: hours are passes / (3600 x images/s of the plain network)."
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
# Heads are not in it: FCS's grows with the square of a task's classes, see docs/scale.md.
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


def images_packed(dataset: str) -> float:
    stream = STREAMS[dataset]
    return stream.classes * (stream.images + stream.tests)


def store_bytes(dataset: str) -> float:
    return images_packed(dataset) * 3 * STREAMS[dataset].side ** 2


class Rates(NamedTuple):
    """Images a second of the plain network by what it sees, and the GPU they were measured on."""

    by_side: dict[int, float]
    device: str = ""
    beside: tuple[str, ...] = ()  # how they compare with a plain loop's, a paragraph a size


def read_rates(paths: Sequence[Path]) -> Rates:
    """Streamed, since that is how the largest are trained. Those of a CPU would make hours that mean nothing."""
    found: dict[int, float] = {}
    devices: list[str] = []
    beside: dict[int, str] = {}
    for path in filter(Path.is_file, paths):
        content: dict[str, Any] = json.loads(path.read_text())
        place = content.get("environment", {})
        if place.get("device_type") != "cuda":
            where = place.get("device_type", "an unknown device")
            raise ValueError(
                f"{path} was measured on {where}: expected rates of a GPU. Run benchmarks/scale.py --json on one, or "
                "name its file with --rates."
            )
        if place["device"] not in devices:
            devices.append(place["device"])
        wanted = ("ours, streamed", "finetune", "base")
        rows = [r for r in content["rows"] if (r["what"], r.get("method"), r.get("stage")) == wanted]
        if again := sorted(found.keys() & {row["side"] for row in rows}):
            raise ValueError(
                f"{path} has rates at {again[0]} pixels, and so has a file before it: name one with --rates"
            )
        found |= {row["side"]: row["images_per_second"] for row in rows}
        beside |= {row["side"]: _beside(row["side"], content) for row in rows}
    if len(devices) > 1:
        raise ValueError(f"rates of {' and '.join(devices)} make no one table: name files of one GPU with --rates")
    return Rates(found, "".join(devices), tuple(beside[side] for side in sorted(beside)))


def _beside(side: int, content: dict[str, Any]) -> str:
    own = [row for row in content["rows"] if row["side"] == side and row.get("method", "finetune") == "finetune"]
    rates = {row["what"]: row["images_per_second"] for row in own}
    resident, streamed = rates["ours, resident"], rates["ours, streamed"]
    plain, step = rates["plain loop"], rates["plain loop, its step alone"]
    return (
        f"At {side} pixels a plain loop (ImageFolder, {content['cores']} workers, torchvision's transforms, float32)\n"
        f"was measured in the same run, at {plain:,.0f} images/s: ours (bfloat16, captured) is\n"
        f"{resident / plain:.1f} times as fast resident and {streamed / plain:.1f} times streamed, which is\n"
        f"{streamed / resident:.0%} of resident. The plain loop's training step alone, on one batch again and\n"
        f"again, reaches {step:,.0f} images/s."
    )


def _told(hours: float) -> str:
    return (
        f"{hours:.1f} h" if hours >= 0.995 else f"{60 * hours:.0f} min" if hours >= 1 / 60 else f"{3600 * hours:.0f} s"
    )


def tables(rates: Rates, measured: dict[str, Any]) -> list[str]:
    """What packing (as measured by benchmarks/packing.py) and runs take."""
    pack = measured["images_per_second"]["pack"]
    lines = [
        f"| data set | seen at | store | packing, {measured['cores']} cores | a run shows the network "
        "| of that, base task |",
        "|---|---|---|---|---|---|",
    ]
    for name, stream in STREAMS.items():
        base, later = images_trained("podnet", name)
        packed = _told(images_packed(name) / pack / 3600) if stream.side == measured["size"] else ""
        lines.append(
            f"| {name} | {stream.seen} | {store_bytes(name) / 1e9:.1f} GB | {packed} "
            f"| {(base + later) / 1e6:.1f} M images (podnet, {stream.increments} increments) "
            f"| {base / (base + later):.0%} |"
        )
    reads, writes = pack * measured["bytes_an_image"] / 1e9, pack * 3 * measured["size"] ** 2 / 1e9
    lines += [
        "",
        f"Packing at the {pack:,.0f} images/s above, with images of {measured['bytes_an_image'] / 1000:.0f} KB brought",
        f"to {measured['size']} x {measured['size']} and a disk that reads {reads:.1f} and writes {writes:.1f} GB/s.",
    ]
    lines += ["", "Hours of one run without IVT, the base task included; with IVT the base task is shared:", ""]
    lines += ["| data set | method | passes of the plain network | 1 GPU | 8 GPUs |", "|---|---|---|---|---|"]
    for name, stream in STREAMS.items():
        for method in WORK:
            total = sum(work(method, name))
            texts = ["not measured yet"] * 2
            if stream.seen in rates.by_side:
                hours = total / rates.by_side[stream.seen] / 3600
                texts = [_told(hours), _told(hours / (8 * EFFICIENCY))]
            lines.append(f"| {name} | {method} | {total / 1e6:.0f} M | {texts[0]} | {texts[1]} |")
    told = ", ".join(f"{rate:,.0f} images/s at {side} pixels" for side, rate in sorted(rates.by_side.items()))
    assumed = f"8 GPUs at {EFFICIENCY:.0%} of eight times one, which is assumed"
    lines += ["", f"Rates: {told}, on one {rates.device}; {assumed}." if told else UNMEASURED]
    for sentence in rates.beside:
        lines += ["", sentence]
    return lines


def packing(content: dict[str, Any]) -> list[str]:
    """How fast packing is, in two sentences from what benchmarks/packing.py wrote."""
    pillow, own = "decode, pillow", "decode, as packing does"
    lines = [
        f"Measured with {content['workers']} processes on {content['cores']} cores, with a load of "
        f"{content['load_at_start']:.1f} at the start",
        f"([packing.json](../results/benchmarks/packing.json)): {content['images_per_second']['pack']:.0f} images/s,",
        f"{content['pack_over_decode'][pillow]:.0%} of the rate of Pillow's decoding alone.",
    ]
    if "cpu_ms_an_image" in content:  # measured last
        spent, share = content["cpu_ms_an_image"], content["pack_over_decode_by_cpu_time"][pillow]
        size = content["bytes_an_image"] / 1000
        lines += [
            f"By CPU time, measured separately on one core, it is {share:.0%}: an image of {size:.0f} KB takes Pillow "
            f"{spent[pillow]:.2f} ms",
            f"to decode, and packing {spent['pack']:.2f} ms, its own decoding ({spent[own]:.2f} ms) included.",
        ]
    return lines


def between(document: str, marks: tuple[str, str], lines: Sequence[str]) -> str:
    before, rest = document.split(marks[0])
    _, after = rest.split(marks[1])
    return "\n".join([before + marks[0], "", *lines, "", marks[1] + after])


def written(document: str, rates: Rates, measured: dict[str, Any]) -> str:
    """The document with the tables, and with how fast packing is, between their marks."""
    return between(between(document, PACKING_MARKS, packing(measured)), MARKS, tables(rates, measured))


def main(arguments: Sequence[str] | None = None) -> None:
    results = FOLDER / "results" / "benchmarks"
    parser = argparse.ArgumentParser(description="What ImageNet costs.")
    parser.add_argument(
        "--rates", type=Path, nargs="+", default=sorted(results.glob("scale*.json")), help="of benchmarks/scale.py"
    )
    parser.add_argument("--packing", type=Path, default=results / "packing.json", help="of benchmarks/packing.py")
    parser.add_argument("--write", type=Path, help="a document with the marks")
    given = parser.parse_args(arguments)
    if not given.packing.is_file():
        parser.error(f"{given.packing} is missing: benchmarks/packing.py --out writes it")
    missing = [str(path) for path in given.rates if not path.is_file()]
    if missing and len(missing) < len(given.rates):
        parser.error(f"{missing[0]} is missing: benchmarks/scale.py --json writes it")
    try:
        rates = read_rates(given.rates)
    except ValueError as error:
        parser.error(str(error))
    measured = json.loads(given.packing.read_text())
    if given.write is None:
        print("\n".join([*packing(measured), "", *tables(rates, measured)]))
        return
    document = given.write.read_text()
    if not rates.by_side and UNMEASURED not in document:
        parser.error(
            f"{', '.join(map(str, given.rates)) or results} has no rates, and {given.write} has hours that would be "
            "lost: have benchmarks/scale.py measure them (--json), or name its file with --rates"
        )
    given.write.write_text(written(document, rates, measured))


if __name__ == "__main__":
    main()
