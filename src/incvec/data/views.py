"""Views: what a network sees of a uint8 image. Batched, each sample with its own draws, on the images' device.

All of it is static tensor code: no synchronization, a fixed number of draws, all of them from the given
generator, so a captured step can contain it. Colors and resized crops work on float images in [0, 1],
[B, C, H, W]; they agree with torchvision's transforms, save that torchvision rounds to 8 bits in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from incvec.data.prepare import fitted
from incvec.errors import ConfigError, nearest
from incvec.fused import fused

NAMES = ("train", "test", "strong", "flipped", "raw")
DRAWING = frozenset({"train", "strong"})
LUMA = (0.2989, 0.587, 0.114)


def window(images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor) -> Tensor:
    """Each image seen through a window of its own size at (top, left), black outside, mirrored where asked.

    One gather, so it runs on uint8 before any conversion. `top`, `left`: int64 [B]; `mirrored`: bool [B].
    """
    b, c, h, w = images.shape
    across = torch.arange(w, device=images.device)
    rows = (top[:, None] + torch.arange(h, device=images.device))[:, :, None]
    columns = (left[:, None] + torch.where(mirrored[:, None], w - 1 - across, across))[:, None, :]
    inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
    index = rows.clamp(0, h - 1) * w + columns.clamp(0, w - 1)
    pixels = images.flatten(2).gather(2, index.view(b, 1, h * w).expand(b, c, h * w)).view(b, c, h, w)
    return pixels * inside[:, None]


def flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirrored left to right, each with probability 1/2."""
    return torch.where(_coin(images, 0.5, generator)[:, None, None, None], images.flip(-1), images)


def _offsets(images: Tensor, pad: int, generator: Generator) -> tuple[Tensor, Tensor]:
    offsets = torch.randint(-pad, pad + 1, (2, len(images)), generator=generator, device=images.device)
    return offsets[0], offsets[1]


def _coin(images: Tensor, p: float, generator: Generator) -> Tensor:
    return torch.rand(len(images), generator=generator, device=images.device) < p


def _between(images: Tensor, low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(len(images), generator=generator, device=images.device)


def to_float(images: Tensor) -> Tensor:
    return images.float() / 255


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x - mean) / std for each channel; `mean` and `std` broadcast against [B, C, H, W]."""
    return (images - mean) / std


def gray(images: Tensor) -> Tensor:
    """Luma, [B, 1, H, W]; a single channel is its own."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def _blend(images: Tensor, other: Tensor | float, factor: Tensor) -> Tensor:
    factor = factor[:, None, None, None]
    return (factor * images + (1 - factor) * other).clamp(0, 1)


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, 0.0, factor)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, gray(images).mean((1, 2, 3), keepdim=True), factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(images, gray(images), factor)


def adjust_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by `shift` of a full circle; value and saturation stay."""
    red, green, blue = images.unbind(1)
    value, lowest = images.amax(1), images.amin(1)
    chroma = value - lowest
    safe = torch.where(chroma > 0, chroma, 1.0)
    sextant = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    sextant = sextant + 6 * shift[:, None, None]

    def channel(offset: int) -> Tensor:
        k = (sextant + offset) % 6
        return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], 1).clamp(0, 1)


def brightness_jitter(images: Tensor, amount: float, generator: Generator) -> Tensor:
    """Brightness times a factor from U(1 - amount, 1 + amount)."""
    return adjust_brightness(images, _between(images, max(0.0, 1 - amount), 1 + amount, generator))


def color_jitter(
    images: Tensor, brightness: float, contrast: float, saturation: float, hue: float, generator: Generator
) -> Tensor:
    """Brightness, contrast, saturation, hue, always in this order (torchvision shuffles it for every image).

    Images of one channel have neither saturation nor hue.
    """
    images = brightness_jitter(images, brightness, generator)
    images = adjust_contrast(images, _between(images, max(0.0, 1 - contrast), 1 + contrast, generator))
    if images.shape[1] == 1:
        return images
    images = adjust_saturation(images, _between(images, max(0.0, 1 - saturation), 1 + saturation, generator))
    return adjust_hue(images, _between(images, -hue, hue, generator))


def random_gray(images: Tensor, p: float, generator: Generator) -> Tensor:
    """Without color, with probability p."""
    return torch.where(_coin(images, p, generator)[:, None, None, None], gray(images), images)


def resized_window(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """The box of each image, stretched bilinearly to the whole image's size; float [B] each, in whole pixels.

    Sampling points are kept between the centers of the box's outermost pixels, so nothing outside shines in.
    """
    down = _centers(top, height, images.shape[2])
    right = _centers(left, width, images.shape[3])
    b, _, h, w = images.shape
    grid = torch.stack([right[:, None, :].expand(b, h, w), down[:, :, None].expand(b, h, w)], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _centers(start: Tensor, extent: Tensor, size: int) -> Tensor:
    """Sampling points along one axis in grid_sample's coordinates, which run from -1 to 1, edge to edge."""
    steps = (torch.arange(size, device=start.device) + 0.5) / size
    inside = (steps * extent[:, None]).clamp(min=0.5).minimum(extent[:, None] - 0.5)
    return 2 * (start[:, None] + inside) / size - 1


def draw_boxes(
    images: Tensor,
    generator: Generator,
    scale: tuple[float, float] = (0.2, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    attempts: int = 10,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A box in each image (top, left, height, width): share of the area from U(scale), log aspect from U(log ratio).

    As in torchvision, the first of ten drawn boxes that fits is taken, else the largest central one; here all
    ten are drawn at once, since the number of draws may not depend on their values.
    """
    b, _, h, w = images.shape
    draws = torch.rand(2, b, attempts, generator=generator, device=images.device)
    area = h * w * (scale[0] + (scale[1] - scale[0]) * draws[0])
    aspect = torch.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * draws[1])
    widths, heights = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (widths >= 1) & (widths <= w) & (heights >= 1) & (heights <= h)
    first = fits.int().argmax(1, keepdim=True)
    any_fits = fits.any(1)
    # Where none fits: as much of the image as the permitted aspect ratios allow.
    fallback_width, fallback_height = min(w, round(h * ratio[1])), min(h, round(w / ratio[0]))
    width = torch.where(any_fits, widths.gather(1, first)[:, 0], float(fallback_width))
    height = torch.where(any_fits, heights.gather(1, first)[:, 0], float(fallback_height))
    place = torch.rand(2, b, generator=generator, device=images.device)
    place = torch.where(any_fits, place, 0.5)
    top = (place[0] * (h - height + 1)).floor().minimum(h - height)
    left = (place[1] * (w - width + 1)).floor().minimum(w - width)
    return top, left, height, width


def random_resized_crop(
    images: Tensor,
    generator: Generator,
    scale: tuple[float, float] = (0.2, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    attempts: int = 10,
) -> Tensor:
    """A random box of each image, stretched to full size."""
    return resized_window(images, *draw_boxes(images, generator, scale, ratio, attempts))


def rotate90(images: Tensor) -> Tensor:
    """All four rotations of square images: [4B, C, H, W], row 4i + k being image i turned k times 90 degrees.

    Turns are anticlockwise, as `torch.rot90` has them; `rotation_labels` gives the labels in the same order.
    """
    turned = torch.stack([torch.rot90(images, k, (2, 3)) for k in range(4)], 1).flatten(0, 1)
    if images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous():
        turned = turned.contiguous(memory_format=torch.channels_last)
    return turned


def rotation_labels(labels: Tensor) -> Tensor:
    """4y + k for every label y and turn k, in the order of `rotate90`."""
    return (4 * labels[:, None] + torch.arange(4, device=labels.device)).flatten()


class Views:
    """The views of one data set, by name.

    - `train`: crop, flip (where the data allow it), brightness jitter, normalize;
    - `test`: normalize;
    - `strong`: FCS's second view: resized crop, gray with probability 0.2, color jitter of 0.4, flip (where
      the data allow it), normalize;
    - `flipped`: `test` mirrored, for class means over both; where `flip` is False it is `test` itself, since
      a mirrored image would be none of its class;
    - `raw`: pixels in [0, 1].

    With a `size`, images are brought to it before anything else: short side, then the center square.
    """

    size: int | None = None

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
                f"normalization by mean {tuple(mean)} and std {tuple(std)}: expected as many of both, and every std > 0"
            )
        if pad < 0 or brightness < 0:
            raise ConfigError(f"pad {pad} and brightness {brightness}: expected neither to be negative")
        self.pad = pad
        self.flip = flip
        self.brightness = brightness
        self.size = size
        self.channels_last = False  # the source's wish
        self.mean = torch.tensor(mean, dtype=torch.float32)[:, None, None]
        self.std = torch.tensor(std, dtype=torch.float32)[:, None, None]

    def to(self, device: torch.device | str) -> Views:
        """The same views with their constants on `device`, where a captured step needs them."""
        moved = Views.__new__(Views)
        moved.pad, moved.flip, moved.brightness = self.pad, self.flip, self.brightness
        moved.size, moved.channels_last = self.size, self.channels_last
        moved.mean, moved.std = self.mean.to(device), self.std.to(device)
        return moved

    def __call__(self, name: str, images: Tensor, generator: Generator | None = None) -> Tensor:
        """Float images for uint8 ones, [B, C, H, W]; `generator` may be None for views that draw nothing."""
        if name not in NAMES:
            raise ConfigError(f"no view is called {name!r}, only {', '.join(NAMES)}." + nearest(name, NAMES))
        if self.size is not None:
            images = fitted(images, self.size, len(self.mean))
        if name == "raw":
            return to_float(images)
        if name == "train":
            return self._train(images, _needed(name, generator))
        if name == "strong":
            return self._strong(images, _needed(name, generator))
        if name == "flipped" and self.flip:
            images = images.flip(-1)
        return normalize(to_float(images), self.mean, self.std)

    def _train(self, images: Tensor, generator: Generator) -> Tensor:
        """Draws first, pixels after: the second half is one kernel inside a captured step."""
        top, left = _offsets(images, self.pad, generator)
        mirrored = _coin(images, 0.5, generator) if self.flip else None
        amount = self.brightness
        factor = _between(images, max(0.0, 1 - amount), 1 + amount, generator) if amount else None
        return _developed(images, top, left, mirrored, factor, self.mean, self.std, self.channels_last)

    def _strong(self, images: Tensor, generator: Generator) -> Tensor:
        images = random_resized_crop(to_float(images), generator)
        images = random_gray(images, 0.2, generator)
        images = color_jitter(images, 0.4, 0.4, 0.4, 0.4, generator)
        if self.flip:
            images = flip(images, generator)
        return normalize(images, self.mean, self.std)


@fused
def _developed(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    mirrored: Tensor | None,
    factor: Tensor | None,
    mean: Tensor,
    std: Tensor,
    channels_last: bool,
) -> Tensor:
    """`window`, `adjust_brightness` and `normalize` in one."""
    if mirrored is None:
        mirrored = torch.zeros_like(top, dtype=torch.bool)
    seen = to_float(window(images, top, left, mirrored))
    if factor is not None:
        seen = adjust_brightness(seen, factor)
    seen = normalize(seen, mean, std)
    return seen.contiguous(memory_format=torch.channels_last) if channels_last else seen


def _needed(name: str, generator: Generator | None) -> Generator:
    if generator is None:
        raise ValueError(f"the view {name!r} draws, so it needs a generator; None was given")
    return generator
