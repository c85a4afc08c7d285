"""What a data set is, regardless of where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from incvec.data.store.mapped import PackedImages
from incvec.errors import ConfigError, DataError

Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation per channel
Images = Tensor | PackedImages  # in memory, or in memory-mapped files
IMAGENET_NORMALIZATION: Normalization = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as uint8 [N, C, H, W] and labels as int64 [N], numbered in the data set's order of classes."""

    name: str
    train_images: Images
    train_labels: Tensor
    test_images: Images
    test_labels: Tensor
    class_names: tuple[str, ...]
    pad: int  # padding of the random crop
    flip: bool  # whether a flipped image still belongs to its class
    fingerprint: str  # identifies the content
    normalizations: Mapping[str, Normalization]
    side: int | None = None  # input side of the network, for resized crops; None: as stored, for padded crops
    about: Mapping[str, Any] = field(default_factory=dict)  # where it comes from, for records

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            if images.dtype != torch.uint8 or images.dim() != 4:
                raise DataError(
                    f"{self.name}: {part} images are {images.dtype} {list(images.shape)}, expected uint8 [N, C, H, W]"
                )
            if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
                raise DataError(
                    f"{self.name}: {part} labels are {labels.dtype} {list(labels.shape)}, "
                    f"expected int64 [{len(images)}], one per image"
                )
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.n_classes:
                raise DataError(
                    f"{self.name}: {part} labels range from {int(labels.min())} to {int(labels.max())}, "
                    f"expected 0 to {self.n_classes - 1}, one per class name"
                )
            for label, count in enumerate(torch.bincount(labels, minlength=self.n_classes).tolist()):
                if count == 0:
                    raise DataError(f"{self.name}: class {self.class_names[label]!r} has no {part} image")
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(
                f"{self.name}: training images are {list(self.train_images.shape[1:])}, "
                f"test images {list(self.test_images.shape[1:])}; expected the same shape"
            )
        if "default" not in self.normalizations:
            raise DataError(f"{self.name}: the normalization 'default' is missing")

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """The shape of the network's input."""
        channels, height, width = self.train_images.shape[1:]
        return (channels, height, width) if self.side is None else (channels, self.side, self.side)


def hold_out(dataset: Dataset, every: int) -> Dataset:
    """Replace the test images by every n-th training image of each class, which is no longer trained on.

    For choosing settings without using the test images.
    """
    images, labels = dataset.train_images, dataset.train_labels
    order = labels.argsort(stable=True)
    counts = torch.bincount(labels, minlength=dataset.n_classes)
    smallest = int(counts.argmin())
    if counts[smallest] < every:
        raise ConfigError(
            f"held_out is {every}, but class {dataset.class_names[smallest]!r} has only {int(counts[smallest])} "
            f"training image(s): expected {int(counts[smallest])} or less"
        )
    first = counts.cumsum(0) - counts
    position = torch.empty_like(labels)  # of each image among those of its class
    position[order] = torch.arange(len(labels)) - first[labels[order]]
    held_out = position % every == every - 1

    def select(mask: Tensor) -> Images:
        return images[mask] if isinstance(images, Tensor) else images.select(mask.nonzero().flatten().numpy())

    return replace(
        dataset,
        train_images=select(~held_out),
        train_labels=labels[~held_out],
        test_images=select(held_out),
        test_labels=labels[held_out],
        fingerprint=f"{dataset.fingerprint}, every {every}th training image held out",
    )
