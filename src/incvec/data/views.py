"""Views: the float tensor a network receives for a uint8 image. Computed in batches on the device of the images.

Static tensor code, all draws from the given generator: a captured step can contain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

import torch
from torch import Generator, Tensor

from incvec.data import augment
from incvec.data.augment import normalize, to_float
from incvec.data.dataset import Dataset
from incvec.data.resize import resize_boxes, resize_on_device
from incvec.errors import ConfigError, nearest
from incvec.fused import fused

NAMES = ("train", "test", "strong", "flipped", "raw")
RANDOM = frozenset({"train", "strong"})
CROP_AREA = 0.08  # the smallest share of a large image that a training crop shows, as in torchvision
CENTER_FRACTION = 7 / 8  # of the stored side, shown by test views of large images: 224 of 256


class Views:
    """The views of one data set, by name.

    - `train`: padded random crop, flip (if the data set allows it), brightness jitter, normalize;
    - `train*3`: the same with three brightness jitters, one after the other;
    - `test`: normalize;
    - `strong`: FCS's second view: resized crop, gray with probability 0.2, color jitter of 0.4, flip (if the data set
      allows it), normalize;
    - `flipped`: `test` flipped left to right, for class means over both; the same as `test` if `flip` is False;
    - `raw`: pixels in [0, 1].

    With a `size`, images are first resized to it: short side, then the center square.
    """

    def __init__(
        self,
        pad: int,
        flip: bool,
        brightness: float,
        mean: Sequence[float],
        std: Sequence[float],
        size: int | None = None,
    ) -> None:
        if len(mean) != len(std) or not all(s > 0 for s in std):
            raise ConfigError(
                f"normalization by mean {tuple(mean)} and std {tuple(std)}: expected the same length, and every std > 0"
            )
        if pad < 0 or brightness < 0:
            raise ConfigError(f"pad is {pad} and brightness {brightness}: expected 0 or more")
        self.pad, self.flip, self.brightness, self.size = pad, flip, brightness, size
        self.channels_last = False  # set by the source
        self.mean = torch.tensor(mean, dtype=torch.float32)[:, None, None]
        self.std = torch.tensor(std, dtype=torch.float32)[:, None, None]

    def to(self, device: torch.device | str) -> Self:
        """The same views with their constants on `device`, where a captured step reads them."""
        moved = copy(self)
        vars(moved).update({name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)})
        return moved

    def __call__(self, name: str, images: Tensor, generator: Generator | None = None) -> Tensor:
        """The view of uint8 images [B, C, H, W] as floats; `generator` may be None for views without randomness."""
        name, _, jitters = name.partition("*") if name.startswith("train*") else (name, "", "1")
        if name not in NAMES:
            raise ConfigError(f"unknown view {name!r}.{nearest(name, NAMES)} Known views: {', '.join(NAMES)}.")
        if name in RANDOM and generator is None:
            raise ValueError(f"the view {name!r} is random and needs a generator; None was given")
        if self.size is not None:
            images = resize_on_device(images, self.size, len(self.mean))
        if name == "train" and generator is not None:
            return self._train(images, generator, int(jitters))
        if name == "strong" and generator is not None:
            return self._strong(images, generator)
        pixels = self._test_pixels(images)
        if name == "flipped" and self.flip:
            pixels = pixels.flip(-1)
        return pixels if name == "raw" else normalize(pixels, self.mean, self.std)

    def _test_pixels(self, images: Tensor) -> Tensor:
        """What test views show of the images, in [0, 1]."""
        return to_float(images)

    def _factors(self, images: Tensor, generator: Generator, jitters: int) -> tuple[Tensor, ...]:
        """The factors of each brightness jitter."""
        count = jitters if self.brightness else 0
        return tuple(augment.jitter_factors(images, self.brightness, generator) for _ in range(count))

    def _train(self, images: Tensor, generator: Generator, jitters: int) -> Tensor:
        """All draws first, then the pixels, which are one kernel inside a captured step."""
        top, left = augment.random_offsets(images, self.pad, generator)
        flipped = augment.bernoulli(images, 0.5, generator) if self.flip else None
        factors = self._factors(images, generator, jitters)
        return _padded_crop(images, top, left, flipped, factors, self.mean, self.std, self.channels_last)

    def _strong(self, images: Tensor, generator: Generator) -> Tensor:
        return self._strong_colors(augment.random_resized_crop(to_float(images), generator), generator)

    def _strong_colors(self, pixels: Tensor, generator: Generator) -> Tensor:
        pixels = augment.random_gray(pixels, 0.2, generator)
        pixels = augment.color_jitter(pixels, 0.4, 0.4, 0.4, 0.4, generator)
        if self.flip:
            pixels = augment.random_flip(pixels, generator)
        return normalize(pixels, self.mean, self.std)


class ResizedViews(Views):
    """Views of images that are stored larger than the network sees them.

    - `train`: RandomResizedCrop of the stored square (`crop_area` to 1 of its area), flip, brightness jitter,
      normalize;
    - `test`: the central 7/8 of the image, normalized. For images stored at 256 this is torchvision's Resize(256) and
      CenterCrop(224);
    - `strong`, `flipped`, `raw`: as in `Views`, at the size of the network's input.
    """

    def __init__(
        self,
        stored: int,
        side: int,
        flip: bool,
        brightness: float,
        mean: Sequence[float],
        std: Sequence[float],
        crop_area: float = CROP_AREA,
    ) -> None:
        super().__init__(0, flip, brightness, mean, std)
        if not 1 <= side <= stored:
            raise ConfigError(
                f"the network's input has side {side}, but images are stored with {stored}: expected less"
            )
        self.stored, self.side, self.crop_area = stored, side, crop_area
        self.inner = max(side, round(CENTER_FRACTION * stored))
        self.box = torch.tensor([(stored - self.inner) // 2, self.inner], dtype=torch.float32)

    def _test_pixels(self, images: Tensor) -> Tensor:
        if self.inner == self.side:
            first = (self.stored - self.side) // 2
            return to_float(images[:, :, first : first + self.side, first : first + self.side])
        start, extent = self.box[:1].expand(len(images)), self.box[1:].expand(len(images))
        return resize_boxes(images, (start, start, extent, extent), self.side) / 255

    def _train(self, images: Tensor, generator: Generator, jitters: int) -> Tensor:
        box = augment.draw_boxes(images, generator, scale=(self.crop_area, 1.0))
        flipped = augment.bernoulli(images, 0.5, generator) if self.flip else None
        factors = self._factors(images, generator, jitters)
        pixels = resize_boxes(images, box, self.side, flipped)
        return _finish_resized(pixels, factors, self.mean, self.std, self.channels_last)

    def _strong(self, images: Tensor, generator: Generator) -> Tensor:
        box = augment.draw_boxes(images, generator, scale=(0.2, 1.0))
        return self._strong_colors(resize_boxes(images, box, self.side) / 255, generator)


@fused
def _padded_crop(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    flipped: Tensor | None,
    factors: tuple[Tensor, ...],
    mean: Tensor,
    std: Tensor,
    channels_last: bool,
) -> Tensor:
    """Crop, flip, brightness and normalization in one kernel."""
    if flipped is None:
        flipped = torch.zeros_like(top, dtype=torch.bool)
    return _finish(augment.crop_and_flip(images, top, left, flipped), factors, mean, std, channels_last)


@fused
def _finish_resized(
    pixels: Tensor, factors: tuple[Tensor, ...], mean: Tensor, std: Tensor, channels_last: bool
) -> Tensor:
    return _finish(pixels, factors, mean, std, channels_last)


def _finish(pixels: Tensor, factors: tuple[Tensor, ...], mean: Tensor, std: Tensor, channels_last: bool) -> Tensor:
    """Brightness and normalization of pixels from 0 to 255."""
    pixels = to_float(pixels)
    for factor in factors:
        pixels = augment.adjust_brightness(pixels, factor)
    pixels = normalize(pixels, mean, std)
    return pixels.contiguous(memory_format=torch.channels_last) if channels_last else pixels


def make_views(
    dataset: Dataset,
    brightness: float,
    mean: Sequence[float],
    std: Sequence[float],
    size: int | None = None,
    crop_area: float = CROP_AREA,
) -> Views:
    """The views of a data set; `size` is the input size that the network requires, if it requires one."""
    stored = dataset.train_images.shape[-1]
    if dataset.side is None or (size is not None and size > stored):
        return Views(dataset.pad, dataset.flip, brightness, mean, std, size)
    return ResizedViews(stored, size or dataset.side, dataset.flip, brightness, mean, std, crop_area)
