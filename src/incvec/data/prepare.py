"""Images brought to the size a pre-trained network was made for, on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def fitted(images: Tensor, size: int, channels: int = 3) -> Tensor:
    """The short side to `size` (bicubic, antialiased), then the center square; uint8 in, uint8 out.

    The same steps as torchvision's Resize and CenterCrop, rounding to 8 bits included. Where `channels` are asked for
    and the images have one, it is repeated.
    """
    height, width = images.shape[2:]
    short = min(height, width)
    if short != size:
        shape = [size if side == short else int(size * side / short) for side in (height, width)]
        resized = F.interpolate(images.float(), size=shape, mode="bicubic", antialias=True, align_corners=False)
        images = resized.round().clamp(0, 255).to(torch.uint8)
        height, width = shape
    top, left = round((height - size) / 2), round((width - size) / 2)
    images = images[:, :, top : top + size, left : left + size]
    return images.expand(-1, channels, -1, -1) if images.shape[1] == 1 else images
