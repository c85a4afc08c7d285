"""How fast `incvec data pack` is, beside decoding alone on all cores, in one run.

    python benchmarks/packing.py [--root FOLDER] [--images 8000] [--workers N] [--size 256] [--out FILE]

Without a root it makes JPEG files of ImageNet's usual size (500 x 375, quality 90), a few different ones copied under
many names: decoding does not care, and the disk's cache is warm for all contestants alike. Three ways, each in as many
processes and the same chunks of files, their start included:

- decode: open, turn, make RGB; nothing is kept;
- decode and resize: the same, and brought to the store's side;
- pack: the store, on the disk (synced) and checked to open.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import PIL
from PIL import Image

from incvec.data.folder import open_image
from incvec.data.layouts import Layout, list_images
from incvec.data.pack import CHUNK_BYTES, CHUNK_ROWS, cores, fitted, pack


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
        Image.fromarray((total + draw.normal(0, 6, total.shape)).clip(0, 255).astype(np.uint8)).save(file, quality=90)
        contents.append(file.read_bytes())
        file.unlink()
    for i in range(count):
        folder = root / ("val" if i % 10 == 9 else "train") / f"n{i // 10 % 10:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:07d}.JPEG").write_bytes(contents[i % len(contents)])


def decode(files: Sequence[str], size: int | None = None) -> int:
    for file in files:
        image = open_image(Path(file))
        if size is not None:
            fitted(image, size)
    return len(files)


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def decode_all(layout: Layout, size: int | None, chunk: int, workers: int) -> None:
    files = [str(file) for file, _ in (*layout.listing.train, *layout.listing.test)]
    pieces = [files[first : first + chunk] for first in range(0, len(files), chunk)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["incvec.data.pack"])
    with ProcessPoolExecutor(workers, context) as pool:
        assert sum(pool.map(partial(decode, size=size), pieces)) == len(files)


def measure(root: Path, size: int, workers: int, place: Path) -> dict[str, object]:
    layout = list_images(root)
    total = len(layout.listing.train) + len(layout.listing.test)
    chunk = max(1, min(CHUNK_ROWS, CHUNK_BYTES // (3 * size * size)))
    decode_all(layout, None, chunk, workers)  # fills the disk's cache
    rates: dict[str, list[float]] = {"decode": [], "decode and resize": [], "pack": []}
    for turn in range(2):
        store = place / f"store-{turn}"
        contestants: dict[str, Callable[[], object]] = {
            "decode": partial(decode_all, layout, None, chunk, workers),
            "decode and resize": partial(decode_all, layout, size, chunk, workers),
            "pack": partial(pack, layout, store, size, workers=workers),
        }
        for name, work in contestants.items():
            rates[name].append(total / seconds_of(work))
        shutil.rmtree(store)
    best = {name: max(values) for name, values in rates.items()}
    return {
        "images": total, "size": size, "workers": workers, "cores": os.cpu_count(), "pillow": PIL.__version__,
        "images_per_second": {name: round(rate, 1) for name, rate in best.items()},
        "pack_over_decode": round(best["pack"] / best["decode"], 3),
        "pack_over_decode_and_resize": round(best["pack"] / best["decode and resize"], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Packing beside decoding alone.")
    parser.add_argument("--root", type=Path, help="a folder of images; made up where none is given")
    parser.add_argument("--images", type=int, default=8000, help="how many to make up")
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        root = given.root or place / "images"
        if given.root is None:
            root.mkdir()
            make_images(root, given.images)
        result = measure(root, given.size, given.workers, place)
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
