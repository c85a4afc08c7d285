"""How fast `incvec data pack` is, beside decoding alone on all cores, in one run.

    python benchmarks/packing.py [--root FOLDER] [--images 4000] [--workers N] [--size 256] [--out FILE]

Without a root it makes JPEG files of ImageNet's usual size (500 x 375; 110 KB, its mean being 115), a few different
ones copied under many names: decoding does not care, and the disk's cache is warm for all contestants alike. Three
ways take turns, each in as many processes and the same chunks of files, their start included:

- decode with Pillow, as torchvision's ImageFolder does: open, turn, make RGB; nothing is kept;
- decode as packing does: the same pixels, mostly by torchvision's decoder;
- pack: decoded, brought to the store's side, hashed, on the disk (synced) and checked to open.

Rates are each way's best; ratios are the median over the rounds, whose parts see the same machine. The CPU time of the
same work on one core is told beside them: on a machine that others use, it is the better measure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from incvec.data.decode import read_pixels
from incvec.data.folder import open_image
from incvec.data.layouts import Layout, list_images
from incvec.data.store.chunks import cores, make_chunk
from incvec.data.store.plan import VERSIONS, Chunk
from incvec.data.store.write import CHUNK_BYTES, CHUNK_ROWS, pack

WAYS = ("decode, pillow", "decode, as packing does", "pack")


def make_images(root: Path, count: int) -> None:
    """`count` files in ten classes, a tenth of them for validation."""
    draw = np.random.default_rng(0)
    contents = []
    for number in range(20):
        total = np.zeros((375, 500, 3))
        for cells in (4, 12, 40, 120):
            coarse = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), np.uint8))
            total += np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), float) / 4
        file = root / f"{number}.jpg"
        Image.fromarray((total + draw.normal(0, 6, total.shape)).clip(0, 255).astype(np.uint8)).save(file, quality=95)
        contents.append(file.read_bytes())
        file.unlink()
    for i in range(count):
        folder = root / ("val" if i % 10 == 9 else "train") / f"n{i // 10 % 10:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:07d}.JPEG").write_bytes(contents[i % len(contents)])


def decode(files: Sequence[str], read: Callable[[Path], object]) -> int:
    for file in files:
        read(Path(file))
    return len(files)


def decode_all(layout: Layout, read: Callable[[Path], object], chunk: int, workers: int) -> None:
    files = [str(file) for file, _ in (*layout.listing.train, *layout.listing.test)]
    pieces = [files[first : first + chunk] for first in range(0, len(files), chunk)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["incvec.data.pack", "torchvision.io"])
    with ProcessPoolExecutor(workers, context) as pool:
        assert sum(pool.map(partial(decode, read=read), pieces)) == len(files)


def on_one_core(files: Sequence[Path], size: int, place: Path) -> dict[str, float]:
    """CPU milliseconds an image, the ways taking turns every 32 images: other work on the machine hardly shows."""
    piece = 32
    (place / "shard").write_bytes(bytes(piece * 3 * size * size))
    spent = dict.fromkeys(WAYS, 0.0)
    for first in range(0, len(files) - piece + 1, piece):
        names = tuple(str(file) for file in files[first : first + piece])
        works: tuple[Callable[[], object], ...] = (
            partial(decode, names, open_image),
            partial(decode, names, read_pixels),
            partial(make_chunk, str(place), Chunk(0, "shard", 0, size, names)),
        )
        for name, work in zip(WAYS, works, strict=True):
            began = time.process_time()
            work()
            spent[name] += time.process_time() - began if first else 0.0  # the first turn warms up
    counted = (len(files) // piece - 1) * piece
    return {name: round(1000 * seconds / counted, 3) for name, seconds in spent.items()}


def measure(
    root: Path, size: int, workers: int, place: Path, rounds: int, keep: Callable[[dict[str, object]], None]
) -> dict[str, object]:
    """The numbers; those of the rounds so far are handed to `keep` after each, so that none are lost."""
    layout = list_images(root)
    files = [file for file, _ in (*layout.listing.train, *layout.listing.test)]
    chunk = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (3 * size * size)))
    result: dict[str, object] = {
        "images": len(files), "bytes_an_image": round(statistics.mean(file.stat().st_size for file in files)),
        "size": size, "workers": workers, "cores": os.cpu_count(), "rounds": 0, "versions": VERSIONS,
        "load_at_start": round(os.getloadavg()[0], 2),
    }  # fmt: skip
    decode_all(layout, open_image, chunk, workers)  # fills the disk's cache
    rates: dict[str, list[float]] = {name: [] for name in WAYS}

    def ratio(below: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates["pack"], rates[below], strict=True)), 3)

    for turn in range(rounds):
        store = place / f"store-{turn}"
        works: tuple[Callable[[], object], ...] = (
            partial(decode_all, layout, open_image, chunk, workers),
            partial(decode_all, layout, read_pixels, chunk, workers),
            partial(pack, layout, store, size, workers=workers),
        )
        for name, work in zip(WAYS, works, strict=True):
            began = time.perf_counter()
            work()
            rates[name].append(len(files) / (time.perf_counter() - began))
        shutil.rmtree(store)
        result |= {
            "rounds": turn + 1,
            "images_per_second": {name: round(max(values), 1) for name, values in rates.items()},
            "pack_over_decode": {name: ratio(name) for name in WAYS[:2]},
        }
        keep(result)
    torch.set_num_threads(1)
    alone = on_one_core(files[:1056], size, place)
    result |= {
        "cpu_ms_an_image": alone,
        "pack_over_decode_by_cpu_time": {name: round(alone[name] / alone["pack"], 3) for name in WAYS[:2]},
    }
    keep(result)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Packing beside decoding alone.")
    parser.add_argument("--root", type=Path, help="a folder of images; made up where none is given")
    parser.add_argument("--images", type=int, default=4000, help="how many to make up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    given = parser.parse_args(arguments)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)  # before anything is measured

    def keep(result: dict[str, object]) -> None:
        if given.out is not None:
            given.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        root = given.root or place / "images"
        if given.root is None:
            root.mkdir()
            make_images(root, given.images)
        result = measure(root, given.size, given.workers, place, given.rounds, keep)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
