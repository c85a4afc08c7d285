"""Resizing of image tensors. `resize_and_center_crop` is the one way an image becomes a square: files use it when they
are decoded, views when a network expects another size. `resize_boxes` cuts a different box out of each image.

Resizing a box is separable: out = V X H^T, where row i of V weighs the rows of the image by a triangle around the
position of output row i,

    V[i, j] ~ max(0, 1 - |j + 1/2 - c_i| / s),   c_i = top + (i + 1/2) height / out,   s = max(1, height / out),

restricted to the rows of the box, each row of V summing to 1. torchvision and Pillow (bilinear, antialiased) compute
the same. Two batched products of dense matrices cost a few percent of a network's time and need no custom kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from incvec.fused import fused


def resize_and_center_crop(images: Tensor, size: int) -> Tensor:
    """Resize the short side of [B, C, H, W] to `size` (bicubic, antialiased) and crop the center square.

    The geometry is that of torchvision's Resize and CenterCrop. Takes float images, or uint8 on a CPU.
    """
    height, width = images.shape[2:]
    short = min(height, width)
    if short != size:
        height, width = (size if side == short else int(size * side / short) for side in (height, width))
        images = F.interpolate(images, (height, width), mode="bicubic", antialias=True, align_corners=False)
    top, left = round((height - size) / 2), round((width - size) / 2)
    return images[:, :, top : top + size, left : left + size]


def resize_on_device(images: Tensor, size: int, channels: int) -> Tensor:
    """`resize_and_center_crop` for uint8 images on any device; a single channel is repeated `channels` times."""
    if min(images.shape[2:]) == size:
        images = resize_and_center_crop(images, size)
    else:
        images = resize_and_center_crop(images.float(), size).round().clamp(0, 255).to(torch.uint8)
    return images.expand(-1, channels, -1, -1) if images.shape[1] == 1 else images


@fused
def resize_matrix(start: Tensor, extent: Tensor, size: int, out: int, flipped: Tensor | None = None) -> Tensor:
    """The matrices V [B, out, size] for boxes from `start` of `extent` pixels along an axis of `size` pixels."""
    steps = torch.arange(out, device=start.device) + 0.5
    positions = steps[None, :].expand(len(start), out)
    if flipped is not None:
        positions = torch.where(flipped[:, None], out - positions, positions)
    scale = (extent / out)[:, None, None]
    centers = start[:, None, None] + positions[:, :, None] * scale
    pixels = torch.arange(size, device=start.device) + 0.5
    weight = (1 - (pixels - centers).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (pixels > start[:, None, None]) & (pixels < (start + extent)[:, None, None])
    weight = weight * inside
    return weight / weight.sum(2, keepdim=True)


def resize_boxes(
    images: Tensor, box: tuple[Tensor, Tensor, Tensor, Tensor], out: int, flipped: Tensor | None = None
) -> Tensor:
    """The box (top, left, height, width: float [B] each, in whole pixels) of each image, resized to out x out.

    Takes uint8 or float images [B, C, H, W] and returns float32 in the same units.
    """
    b, c, h, w = images.shape
    top, left, height, width = box
    with torch.autocast(images.device.type, enabled=False):
        vertical = resize_matrix(top, height, h, out)
        horizontal = resize_matrix(left, width, w, out, flipped)
        rows = torch.bmm(images.reshape(b, c * h, w).float(), horizontal.transpose(1, 2)).view(b, c, h, out)
        return torch.matmul(vertical[:, None], rows)
