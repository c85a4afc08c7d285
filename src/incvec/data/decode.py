"""Image files to pixels, and to the square that is stored, as fast as the cores allow: for packing.

Most files are plain JPEGs. torchvision decodes those to the very pixels that Pillow makes, in less time and without
Pillow's copy to an array. Their markers are read here, a tenth of the time that Pillow takes for it; of whatever is not
certain Pillow reads the header, and everything that is not plain is left to it.
"""

from __future__ import annotations

import math
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from incvec.data.folder import LONGEST, ORIENTATION, open_image, quiet_pillow
from incvec.data.store.mapped import Bytes
from incvec.errors import DataError

RGB = 3  # torchvision.io.ImageReadMode.RGB
LARGE = 1 << 24  # pixels; Pillow shall judge what is larger, since it incompatibility some


def read_pixels(path: Path | str) -> Tensor:
    """The image as uint8 [H, W, 3], upright and RGB; a `DataError` names the file where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = bytearray(file.readall())  # torch asks for memory that could be written
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Replace it or remove it.") from error
    if (pixels := _plain_jpeg(content)) is not None:
        return pixels
    with quiet_pillow():
        return torch.from_numpy(np.array(open_image(Path(path))))


def _plain_jpeg(content: bytearray) -> Tensor | None:
    """The pixels of an upright gray or RGB JPEG; None for any other file, or a damaged one."""
    if not content.startswith(b"\xff\xd8") or not _has_decoder():
        return None
    try:
        if not _has_plain_markers(content) and not _is_plain(content):
            return None
        # What torchvision.io.decode_jpeg calls, without the checks that it makes in Python for every image.
        pixels: Tensor = torch.ops.image.decode_jpeg(torch.frombuffer(content, dtype=torch.uint8), RGB, False)
    except Exception:  # Pillow tells what is wrong with it
        return None
    return pixels.permute(1, 2, 0)


def _is_plain(content: bytearray) -> bool:
    """Whether Pillow takes this for a gray or RGB JPEG that is to be turned by nothing."""
    with quiet_pillow(), Image.open(BytesIO(content)) as image:
        if image.format != "JPEG" or image.mode not in ("L", "RGB"):
            return False
        return not ("exif" in image.info or "xmp" in image.info) or image.getexif().get(ORIENTATION, 1) == 1


def _has_plain_markers(content: bytearray) -> bool:
    """Whether all that stands before a JPEG's pixels is well formed and nothing that turns it: then it is plain.

    Where not, this says nothing: EXIF, profiles and other programs' notes are left to Pillow, as is what is odd.
    """
    place, framed = 2, False
    while content[place] == 0xFF:
        marker, length = content[place + 1], int.from_bytes(content[place + 2 : place + 4])
        data = content[place + 4 : place + 2 + length]
        if len(data) != length - 2:
            return False
        if marker == 0xDA:  # the pixels follow
            return framed
        if marker in (0xC0, 0xC1, 0xC2):  # the frame: bits, height, width, components; once
            height, width = int.from_bytes(data[1:3]), int.from_bytes(data[3:5])
            if framed or data[0] != 8 or not 0 < height * width <= LARGE or data[5] not in (1, 3):
                return False
            if len(data) != 6 + 3 * data[5]:
                return False
            framed = True
        elif marker == 0xDB:  # quantization tables, of 8 bits
            if len(data) % 65 or any(number > 3 for number in data[::65]):
                return False
        elif marker in (0xE0, 0xEE):  # JFIF's and Adobe's
            if len(data) < 12:
                return False
        elif marker not in (0xC4, 0xDD, 0xFE):  # Huffman tables, restarts, a comment
            return False
        place += 2 + length
    return False


@cache
def _has_decoder() -> bool:
    """Whether torchvision is here with its own decoder: some builds lack it."""
    try:
        import torchvision.io  # noqa: F401

        return bool(torch.ops.image.decode_jpeg)
    except (ImportError, AttributeError, RuntimeError):
        return False


def fitted(pixels: Tensor, side: int) -> Bytes:
    """Resize(side) and CenterCrop(side) of uint8 [H, W, 3] as torchvision does them with tensors, bit for bit.

    Gives [3, side, side]. With Pillow's images torchvision is slower and, in a few pixels of a thousand, one level of
    255 apart. Of very long images the middle alone is resized, since a line of pixels may else become gigabytes.
    """
    short = min(pixels.shape[:2])
    for axis in (0, 1):
        if (spare := pixels.shape[axis] - LONGEST * short) > 0:
            pixels = pixels.narrow(axis, spare // 2, LONGEST * short)
    height, width = pixels.shape[:2]
    seen = pixels[None].permute(0, 3, 1, 2)  # batch first: only so does torch see the pixels' layout, and keeps it
    if short != side:
        long = int(side * max(width, height) / short)
        height, width = (long, side) if width <= height else (side, long)
    left, top = round((width - side) / 2), round((height - side) / 2)
    if short != side:
        down, down_scale = _needed(pixels.shape[0], height, top + side)
        right, right_scale = _needed(pixels.shape[1], width, left + side)
        seen = torch.ops.aten._upsample_bilinear2d_aa(seen, [down, right], False, down_scale, right_scale)
    cut: Bytes = seen.numpy()[0, :, top : top + side, left : left + side]
    return cut


def _needed(size: int, wanted: int, seen: int) -> tuple[int, float | None]:
    """How many pixels to make of an axis that is resized from `size` to `wanted`, where the first `seen` are used.

    With the scale to give to torch. It steps by the scale's inverse, which has to be size / wanted to the last bit;
    where no scale has that inverse, all are made. So they are where `seen` is `size`: torch would not resize at all.
    """
    if seen in (size, wanted):
        return wanted, None
    near = wanted / size
    for scale in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)):
        if 1 / scale == size / wanted:
            return seen, scale
    return wanted, None
