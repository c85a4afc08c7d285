"""Image files to pixels, as fast as the cores allow: for packing, where every file is decoded once.

Most files are plain JPEGs. torchvision decodes those to the very pixels that Pillow makes, in less time and without
Pillow's copy to an array; Pillow reads their headers first, and everything that is not plain is left to it.
"""

from __future__ import annotations

from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from incvec.data.folder import ORIENTATION, open_image, quiet_pillow
from incvec.errors import DataError


def read_pixels(path: Path) -> Tensor:
    """The image as uint8 [H, W, 3], upright and RGB; a `DataError` names the file where it cannot be read."""
    try:
        content = bytearray(path.read_bytes())  # torch asks for memory that could be written
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Replace it or remove it.") from error
    with quiet_pillow():
        pixels = _plain_jpeg(content)
        return torch.from_numpy(np.array(open_image(path))) if pixels is None else pixels


def _plain_jpeg(content: bytearray) -> Tensor | None:
    """The pixels of an upright grey or RGB JPEG; None for any other file, or a damaged one."""
    if not content.startswith(b"\xff\xd8") or not _has_decoder():
        return None
    from torchvision.io import ImageReadMode, decode_jpeg

    try:
        with Image.open(BytesIO(content)) as image:
            if image.format != "JPEG" or image.mode not in ("L", "RGB"):
                return None
            if ("exif" in image.info or "xmp" in image.info) and image.getexif().get(ORIENTATION, 1) != 1:
                return None
        pixels: Tensor = decode_jpeg(torch.frombuffer(content, dtype=torch.uint8), ImageReadMode.RGB).permute(1, 2, 0)
    except Exception:  # Pillow tells what is wrong with it
        return None
    return pixels


@cache
def _has_decoder() -> bool:
    """Whether torchvision is here with its own decoder: some builds lack it."""
    try:
        import torchvision.io  # noqa: F401

        return bool(torch.ops.image.decode_jpeg)
    except (ImportError, AttributeError, RuntimeError):
        return False
