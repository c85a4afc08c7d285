"""Image files to the square pixels that a data set stores: the one path for `folder`, `aircraft` and packed stores.

An image is rotated according to its EXIF orientation, converted to RGB, resized so that its short side is `size`
(bicubic, antialiased) and cropped to the center square. A JPEG of four times that size or more is decoded at a reduced
scale, as Pillow's `thumbnail` does: a photograph of 12 megapixels takes a quarter of the time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from incvec.data.resize import resize_and_center_crop
from incvec.errors import DataError

T = TypeVar("T")
Progress = Callable[[int, int], None]  # images done, and their total
EXTENSIONS = frozenset({".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
MAX_ASPECT = 16  # longer images lose their ends before they are resized: the center square does not show them
MAX_THREADS = 16
ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # the transpose that makes an image of that orientation upright


def available_memory() -> int:
    """Bytes that this machine can give to a program without swapping; on other systems than Linux, all it has."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Suppress Pillow's warnings, in all threads: they concern odd tags, not pixels, and do not name the file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def open_image(path: Path, min_side: int | None = None) -> Image.Image:
    """The image, upright and RGB; with `min_side`, a JPEG may be decoded at a reduced scale, not below that side.

    Any error of a decoder becomes a `DataError` that names the file.
    """
    try:
        with Image.open(path) as image:
            if image.mode == "F" or image.mode.startswith("I"):
                # Pillow would clip such pixels at 255 without a warning.
                raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}); convert it to 8 bits")
            if min_side is not None:
                image.draft(None, (min_side, min_side))
            image.load()  # some formats store the orientation after the pixels
            transpose = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
            # Not ImageOps.exif_transpose: it rewrites all other tags and fails if one of them is invalid.
            return (image if transpose is None else image.transpose(transpose)).convert("RGB")
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} cannot be read as an image: it is too large ({error}). Make it smaller.") from error
    except Exception as error:
        raise DataError(f"{path} cannot be read as an image: {error}. Replace it or remove it.") from error


def load_square(path: Path, size: int) -> Tensor:
    """The pixels that are stored for an image file, uint8 [3, size, size]."""
    image = open_image(path, min_side=2 * size)
    try:
        return crop_square(image, size)
    except (MemoryError, RuntimeError) as error:
        raise DataError(f"{path} cannot be resized to {size} x {size}: {error}. Replace it or remove it.") from error


def crop_square(image: Image.Image, size: int) -> Tensor:
    """The short side resized to `size`, then the center square; uint8 [3, size, size]."""
    longest = MAX_ASPECT * min(image.size)
    if max(image.size) > longest:
        left, top = (max(0, side - longest) // 2 for side in image.size)
        image = image.crop((left, top, image.width - left, image.height - top))
    pixels = torch.from_numpy(np.array(image))
    return resize_and_center_crop(pixels.permute(2, 0, 1)[None], size)[0]


def map_files(
    files: Sequence[tuple[Path, int]], work: Callable[[int, Path], T], progress: Progress | None = None
) -> list[T]:
    """`work(row, path)` for every file, in threads (decoders release the GIL); raises the first error."""
    with quiet_pillow(), ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        jobs = [pool.submit(work, row, path) for row, (path, _) in enumerate(files)]
        results = []
        try:
            for job in jobs:
                results.append(job.result())
                if progress is not None:
                    progress(len(results), len(jobs))
            return results
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def load_files(files: Sequence[tuple[Path, int]], size: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, size, size] and labels int64 [N] of the listed files."""
    needed, free = len(files) * 3 * size**2, available_memory()
    if needed > free:
        raise DataError(
            f"{len(files)} images of {size} x {size} take {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are "
            "free: choose a smaller image_size, or pack them with `incvec data pack`"
        )
    images = torch.empty(len(files), 3, size, size, dtype=torch.uint8)

    def load(row: int, path: Path) -> None:
        images[row] = load_square(path, size)

    map_files(files, load)
    return images, torch.tensor([label for _, label in files], dtype=torch.int64)
