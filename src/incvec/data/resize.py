"""Resized crops with antialiasing, each sample with a box of its own, as matrix products on the images' device.

Resizing is separable: out = V X H^T, where row i of V weighs the rows of the image by a triangle around the place of
output row i,

    V[i, j] ~ max(0, 1 - |j + 1/2 - c_i| / s),   c_i = top + (i + 1/2) height / out,   s = max(1, height / out),

over the rows of the box alone, each row of V summing to 1; so do torchvision and Pillow (bilinear, antialiased). Two
batched products of dense matrices cost a few percent of a network's work and need no kernel of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from incvec.data import views as v
from incvec.data.views import Views, draw_boxes
from incvec.errors import ConfigError
from incvec.fused import fused

CENTER = 7 / 8  # the part of the side that a test image shows: 224 of 256


@fused
def resizing(start: Tensor, extent: Tensor, size: int, out: int, mirrored: Tensor | None = None) -> Tensor:
    """The matrices V [B, out, size] for boxes from `start` of `extent` pixels along an axis of `size` pixels."""
    steps = torch.arange(out, device=start.device) + 0.5
    places = steps[None, :].expand(len(start), out)
    if mirrored is not None:
        places = torch.where(mirrored[:, None], out - places, places)
    scale = (extent / out)[:, None, None]
    centers = start[:, None, None] + places[:, :, None] * scale
    pixels = torch.arange(size, device=start.device) + 0.5
    weight = (1 - (pixels - centers).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (pixels > start[:, None, None]) & (pixels < (start + extent)[:, None, None])
    weight = weight * inside
    return weight / weight.sum(2, keepdim=True)


def resized_boxes(
    images: Tensor, box: tuple[Tensor, Tensor, Tensor, Tensor], out: int, mirrored: Tensor | None = None
) -> Tensor:
    """The box (top, left, height, width: float [B] each, in whole pixels) of each image, brought to out x out.

    Takes uint8 or float images [B, C, H, W] and gives float32 in the same units.
    """
    b, c, h, w = images.shape
    top, left, height, width = box
    with torch.autocast(images.device.type, enabled=False):
        down = resizing(top, height, h, out)
        across = resizing(left, width, w, out, mirrored)
        rows = torch.bmm(images.reshape(b, c * h, w).float(), across.transpose(1, 2)).view(b, c, h, out)
        return torch.matmul(down[:, None], rows)


class ResizedViews(Views):
    """Views of images that are stored larger than the network sees them.

    - `train`: RandomResizedCrop of the stored square (a share of 0.08 to 1 of its area), flip, brightness jitter,
      normalize;
    - `test`: the central 7/8 of the image, which is torchvision's Resize(256) and CenterCrop(224) where images were
      packed at 256, normalized;
    - `strong`, `flipped`, `raw`: as in `Views`, at the network's size.
    """

    def __init__(
        self, stored: int, side: int, flip: bool, brightness: float, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__(0, flip, brightness, mean, std)
        if not 1 <= side <= stored:
            raise ConfigError(f"images of side {side} are asked for, but they are stored with {stored}: expected less")
        self.stored, self.side = stored, side
        self.inner = max(side, round(CENTER * stored))
        self.box = torch.tensor([(stored - self.inner) // 2, self.inner], dtype=torch.float32)

    def to(self, device: torch.device | str) -> ResizedViews:
        moved = ResizedViews.__new__(ResizedViews)
        vars(moved).update(vars(self))
        moved.mean, moved.std, moved.box = self.mean.to(device), self.std.to(device), self.box.to(device)
        return moved

    def __call__(self, name: str, images: Tensor, generator: Generator | None = None) -> Tensor:
        if name in v.DRAWING or name not in v.NAMES:
            return super().__call__(name, images, generator)
        seen = self._center(images)
        if name == "flipped" and self.flip:
            seen = seen.flip(-1)
        return seen if name == "raw" else v.normalize(seen, self.mean, self.std)

    def _center(self, images: Tensor) -> Tensor:
        """The middle of the image, in [0, 1]."""
        if self.inner == self.side:
            first = (self.stored - self.side) // 2
            return v.to_float(images[:, :, first : first + self.side, first : first + self.side])
        start, extent = self.box[:1].expand(len(images)), self.box[1:].expand(len(images))
        return resized_boxes(images, (start, start, extent, extent), self.side) / 255

    def _train(self, images: Tensor, generator: Generator) -> Tensor:
        box = draw_boxes(images, generator, scale=(0.08, 1.0))
        mirrored = v._coin(images, 0.5, generator) if self.flip else None
        amount = self.brightness
        factor = v._between(images, max(0.0, 1 - amount), 1 + amount, generator) if amount else None
        pixels = resized_boxes(images, box, self.side, mirrored)
        return _finished(pixels, factor, self.mean, self.std, self.channels_last)

    def _strong(self, images: Tensor, generator: Generator) -> Tensor:
        box = draw_boxes(images, generator, scale=(0.2, 1.0))
        seen = resized_boxes(images, box, self.side) / 255
        seen = v.random_gray(seen, 0.2, generator)
        seen = v.color_jitter(seen, 0.4, 0.4, 0.4, 0.4, generator)
        if self.flip:
            seen = v.flip(seen, generator)
        return v.normalize(seen, self.mean, self.std)


@fused
def _finished(pixels: Tensor, factor: Tensor | None, mean: Tensor, std: Tensor, channels_last: bool) -> Tensor:
    """Brightness and normalization of pixels from 0 to 255, in one pass."""
    seen = pixels / 255
    if factor is not None:
        seen = v.adjust_brightness(seen, factor)
    seen = v.normalize(seen, mean, std)
    return seen.contiguous(memory_format=torch.channels_last) if channels_last else seen
