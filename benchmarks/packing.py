"""The speed of `incvec data pack` compared with decoding alone, on all cores, in one run.

    python benchmarks/packing.py [--root FOLDER] [--images 4000] [--workers N] [--size 256] [--out FILE]

Without --root it creates JPEG files of ImageNet's usual size (500 x 375, 110 KB; ImageNet's mean is 115): a few
different ones copied under many names, so that the page cache is warm for all variants. Three variants take turns, each
with the same number of processes and the same chunks of files, including the start of the processes:

- decode with Pillow, as torchvision's ImageFolder does: open, rotate, convert to RGB; nothing is stored;
- decode as packing does: decode, resize and crop; nothing is stored;
- pack: the same, with checksums, written and synced to disk, and opened.

Rates are the best of each variant; ratios are the median over the rounds. The CPU time of the same work on one core is
the better measure on a shared machine.
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

from incvec.data.image_files import load_square, open_image
from incvec.data.layouts import list_images
from incvec.data.listing import Listing
from incvec.data.store.chunks import cores, write_chunk
from incvec.data.store.plan import VERSIONS, Chunk
from incvec.data.store.write import CHUNK_BYTES, CHUNK_ROWS, pack

VARIANTS = ("decode, pillow", "decode, as packing does", "pack")


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


def decode_all(listing: Listing, read: Callable[[Path], object], chunk: int, workers: int) -> None:
    files = [str(file) for file, _ in (*listing.train, *listing.test)]
    pieces = [files[first : first + chunk] for first in range(0, len(files), chunk)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["incvec.data.store.chunks"])
    with ProcessPoolExecutor(workers, context) as pool:
        assert sum(pool.map(partial(decode, read=read), pieces)) == len(files)


def on_one_core(files: Sequence[Path], size: int, place: Path) -> dict[str, float]:
    """CPU milliseconds per image; the variants take turns every 32 images, so other load affects all alike."""
    piece = 32
    (place / "shard").write_bytes(bytes(piece * 3 * size * size))
    spent = dict.fromkeys(VARIANTS, 0.0)
    for first in range(0, len(files) - piece + 1, piece):
        names = tuple(str(file) for file in files[first : first + piece])
        functions: tuple[Callable[[], object], ...] = (
            partial(decode, names, open_image),
            partial(decode, names, partial(load_square, size=size)),
            partial(write_chunk, place, Chunk(0, "train", "shard", 0, size, "/", names)),
        )
        for name, function in zip(VARIANTS, functions, strict=True):
            start = time.process_time()
            function()
            spent[name] += time.process_time() - start if first else 0.0  # the first turn is a warm-up
    counted = (len(files) // piece - 1) * piece
    return {name: round(1000 * seconds / counted, 3) for name, seconds in spent.items()}


def measure(
    root: Path, size: int, workers: int, place: Path, rounds: int, save: Callable[[dict[str, object]], None]
) -> dict[str, object]:
    """The numbers; those so far are passed to `save` after each round."""
    listing = list_images(root)
    files = [file for file, _ in (*listing.train, *listing.test)]
    chunk = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (3 * size * size)))
    result: dict[str, object] = {
        "images": len(files), "bytes_an_image": round(statistics.mean(file.stat().st_size for file in files)),
        "size": size, "workers": workers, "cores": os.cpu_count(), "rounds": 0, "versions": VERSIONS,
        "load_at_start": round(os.getloadavg()[0], 2),
    }  # fmt: skip
    decode_all(listing, open_image, chunk, workers)  # fills the page cache
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}

    def ratio(variant: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates["pack"], rates[variant], strict=True)), 3)

    for turn in range(rounds):
        store = place / f"store-{turn}"
        functions: tuple[Callable[[], object], ...] = (
            partial(decode_all, listing, open_image, chunk, workers),
            partial(decode_all, listing, partial(load_square, size=size), chunk, workers),
            partial(pack, listing, store, size, workers=workers),
        )
        for name, function in zip(VARIANTS, functions, strict=True):
            start = time.perf_counter()
            function()
            rates[name].append(len(files) / (time.perf_counter() - start))
        shutil.rmtree(store)
        result |= {
            "rounds": turn + 1,
            "images_per_second": {name: round(max(values), 1) for name, values in rates.items()},
            "pack_over_decode": {name: ratio(name) for name in VARIANTS[:2]},
        }
        save(result)
    torch.set_num_threads(1)
    cpu_time = on_one_core(files[:1056], size, place)
    result |= {
        "cpu_ms_an_image": cpu_time,
        "pack_over_decode_by_cpu_time": {name: round(cpu_time[name] / cpu_time["pack"], 3) for name in VARIANTS[:2]},
    }
    save(result)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Packing compared with decoding alone.")
    parser.add_argument("--root", type=Path, help="a folder of images; synthetic ones if not given")
    parser.add_argument("--images", type=int, default=4000, help="number of synthetic images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    given = parser.parse_args(arguments)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)  # before anything is measured

    def save(result: dict[str, object]) -> None:
        if given.out is not None:
            given.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        root = given.root or place / "images"
        if given.root is None:
            root.mkdir()
            make_images(root, given.images)
        result = measure(root, given.size, given.workers, place, given.rounds, save)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
