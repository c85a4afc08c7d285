"""Batched augmentation on the device of the images; each sample has its own random parameters.

Static tensor code: no synchronization and a fixed number of draws, all from the given generator, so a captured step can
contain it. Color adjustments and resized crops take float images in [0, 1], [B, C, H, W]. They agree with torchvision's
transforms, except that torchvision rounds to 8 bits between them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

LUMA = (0.2989, 0.587, 0.114)
RATIO = (3 / 4, 4 / 3)  # of width and height of a random box
ATTEMPTS = 10  # boxes drawn, of which the first that fits is taken


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, flipped: Tensor) -> Tensor:
    """A crop of the image's size at (top, left), zero outside the image, then flipped left to right if `flipped`.

    One gather, so it runs on uint8 before any conversion. `top`, `left`: int64 [B]; `flipped`: bool [B].
    """
    b, c, h, w = images.shape
    horizontal = torch.arange(w, device=images.device)
    rows = (top[:, None] + torch.arange(h, device=images.device))[:, :, None]
    columns = (left[:, None] + torch.where(flipped[:, None], w - 1 - horizontal, horizontal))[:, None, :]
    inside = (rows >= 0) & (rows < h) & (columns >= 0) & (columns < w)
    index = rows.clamp(0, h - 1) * w + columns.clamp(0, w - 1)
    pixels = images.flatten(2).gather(2, index.view(b, 1, h * w).expand(b, c, h * w)).view(b, c, h, w)
    return pixels * inside[:, None]


def random_flip(images: Tensor, generator: Generator) -> Tensor:
    """Flip left to right with probability 1/2."""
    return torch.where(bernoulli(images, 0.5, generator)[:, None, None, None], images.flip(-1), images)


def random_offsets(images: Tensor, pad: int, generator: Generator) -> tuple[Tensor, Tensor]:
    offsets = torch.randint(-pad, pad + 1, (2, len(images)), generator=generator, device=images.device)
    return offsets[0], offsets[1]


def bernoulli(images: Tensor, p: float, generator: Generator) -> Tensor:
    return torch.rand(len(images), generator=generator, device=images.device) < p


def uniform(images: Tensor, low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(len(images), generator=generator, device=images.device)


def to_float(images: Tensor) -> Tensor:
    return images.float() / 255


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x - mean) / std per channel; `mean` and `std` broadcast against [B, C, H, W]."""
    return (images - mean) / std


def gray(images: Tensor) -> Tensor:
    """Luma, [B, 1, H, W]; an image of one channel is returned as it is."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[:, None]


def blend(images: Tensor, other: Tensor | float, factor: Tensor) -> Tensor:
    factor = factor[:, None, None, None]
    return (factor * images + (1 - factor) * other).clamp(0, 1)


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, 0.0, factor)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, gray(images).mean((1, 2, 3), keepdim=True), factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    return blend(images, gray(images), factor)


def adjust_hue(images: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue by `shift` of a full circle; value and saturation stay."""
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


def jitter_factors(images: Tensor, strength: float, generator: Generator) -> Tensor:
    """One factor per image from U(max(0, 1 - strength), 1 + strength)."""
    return uniform(images, max(0.0, 1 - strength), 1 + strength, generator)


def color_jitter(
    images: Tensor, brightness: float, contrast: float, saturation: float, hue: float, generator: Generator
) -> Tensor:
    """Brightness, contrast, saturation and hue, always in this order (torchvision shuffles it for every image).

    Images of one channel have neither saturation nor hue.
    """
    images = adjust_brightness(images, jitter_factors(images, brightness, generator))
    images = adjust_contrast(images, jitter_factors(images, contrast, generator))
    if images.shape[1] == 1:
        return images
    images = adjust_saturation(images, jitter_factors(images, saturation, generator))
    return adjust_hue(images, uniform(images, -hue, hue, generator))


def random_gray(images: Tensor, p: float, generator: Generator) -> Tensor:
    """Convert to gray with probability p."""
    return torch.where(bernoulli(images, p, generator)[:, None, None, None], gray(images), images)


def resize_box(images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """The box of each image (float [B] each, in whole pixels), resized bilinearly to the size of the image.

    Sampling points stay between the centers of the box's outermost pixels, so pixels outside it do not contribute.
    """
    y = sampling_points(top, height, images.shape[2])
    x = sampling_points(left, width, images.shape[3])
    b, _, h, w = images.shape
    grid = torch.stack([x[:, None, :].expand(b, h, w), y[:, :, None].expand(b, h, w)], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def sampling_points(start: Tensor, extent: Tensor, size: int) -> Tensor:
    """Sampling points along one axis in the coordinates of grid_sample, from -1 to 1, edge to edge."""
    steps = (torch.arange(size, device=start.device) + 0.5) / size
    inside = (steps * extent[:, None]).clamp(min=0.5).minimum(extent[:, None] - 0.5)
    return 2 * (start[:, None] + inside) / size - 1


def draw_boxes(
    images: Tensor, generator: Generator, scale: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random box per image (top, left, height, width): area fraction from U(scale), log aspect from U(log RATIO).

    As in torchvision, the first of ten boxes that fits is taken, else the largest central one. All ten are drawn at
    once, because the number of draws must not depend on their values.
    """
    b, _, h, w = images.shape
    draws = torch.rand(2, b, ATTEMPTS, generator=generator, device=images.device)
    area = h * w * (scale[0] + (scale[1] - scale[0]) * draws[0])
    aspect = torch.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * draws[1])
    widths, heights = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (widths >= 1) & (widths <= w) & (heights >= 1) & (heights <= h)
    first = fits.int().argmax(1, keepdim=True)
    any_fits = fits.any(1)
    # If none fits: as much of the image as the aspect ratios allow.
    fallback_width, fallback_height = min(w, round(h * RATIO[1])), min(h, round(w / RATIO[0]))
    width = torch.where(any_fits, widths.gather(1, first)[:, 0], float(fallback_width))
    height = torch.where(any_fits, heights.gather(1, first)[:, 0], float(fallback_height))
    position = torch.rand(2, b, generator=generator, device=images.device)
    position = torch.where(any_fits, position, 0.5)
    top = (position[0] * (h - height + 1)).floor().minimum(h - height)
    left = (position[1] * (w - width + 1)).floor().minimum(w - width)
    return top, left, height, width


def random_resized_crop(images: Tensor, generator: Generator, scale: tuple[float, float] = (0.2, 1.0)) -> Tensor:
    """A random box of each image, resized to the size of the image."""
    return resize_box(images, *draw_boxes(images, generator, scale))


def rotate90(images: Tensor) -> Tensor:
    """All four rotations of square images: [4B, C, H, W], row 4i + k is image i rotated k times by 90 degrees.

    Rotations are counterclockwise, as in `torch.rot90`; `rotation_labels` gives the labels in the same order.
    """
    rotated = torch.stack([torch.rot90(images, k, (2, 3)) for k in range(4)], 1).flatten(0, 1)
    if images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous():
        rotated = rotated.contiguous(memory_format=torch.channels_last)
    return rotated


def rotation_labels(labels: Tensor) -> Tensor:
    """4y + k for every label y and rotation k, in the order of `rotate90`."""
    return (4 * labels[:, None] + torch.arange(4, device=labels.device)).flatten()
