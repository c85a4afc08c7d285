"""What a data set is, wherever it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from incvec.data.store.mapped import PackedImages
from incvec.errors import ConfigError, DataError, nearest

Normalization = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel
Images = Tensor | PackedImages  # in memory, or in mapped files


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images as uint8 [N, C, H, W] and labels as int64 [N], in the data set's own class numbering."""

    name: str
    train_images: Images
    train_labels: Tensor
    test_images: Images
    test_labels: Tensor
    class_names: tuple[str, ...]
    pad: int  # padding of the random crop
    flip: bool  # whether a mirrored image is still an image of its class
    fingerprint: str  # the same for the same content, another for any other
    normalizations: Mapping[str, Normalization]
    side: int | None = None  # of what the network sees, in resized crops; none: as stored, in padded crops
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
                    f"expected int64 [{len(images)}], one for each image"
                )
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.n_classes:
                raise DataError(
                    f"{self.name}: {part} labels run from {int(labels.min())} to {int(labels.max())}, "
                    f"expected 0 to {self.n_classes - 1}, one for each class name"
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
            raise DataError(f"{self.name}: no normalization is called 'default'")

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """What the network sees."""
        channels, height, width = self.train_images.shape[1:]
        return (channels, height, width) if self.side is None else (channels, self.side, self.side)

    def normalization(self, name: str = "default") -> Normalization:
        if name not in self.normalizations:
            known = ", ".join(self.normalizations)
            raise ConfigError(
                f"{self.name} has no normalization {name!r}, only {known}." + nearest(name, self.normalizations)
            )
        return self.normalizations[name]


def hold_out(dataset: Dataset, every: int) -> Dataset:
    """The data set with every n-th training image of each class in the place of the test images.

    For choosing settings: what is held out is not trained on, and the test images are not looked at.
    """
    images, labels = dataset.train_images, dataset.train_labels
    order = labels.argsort(stable=True)
    counts = torch.bincount(labels, minlength=dataset.n_classes)
    fewest = int(counts.argmin())
    if counts[fewest] < every:
        raise ConfigError(
            f"held_out is {every}, but class {dataset.class_names[fewest]!r} has only {int(counts[fewest])} training "
            f"image(s), so that none would be held out: expected {int(counts[fewest])} or less"
        )
    first = counts.cumsum(0) - counts
    place = torch.empty_like(labels)  # of each image among those of its class
    place[order] = torch.arange(len(labels)) - first[labels[order]]
    aside = place % every == every - 1

    def some(chosen: Tensor) -> Images:
        return images[chosen] if isinstance(images, Tensor) else images.select(chosen.nonzero().flatten().numpy())

    return replace(
        dataset,
        train_images=some(~aside),
        train_labels=labels[~aside],
        test_images=some(aside),
        test_labels=labels[aside],
        fingerprint=f"{dataset.fingerprint}, every {every}th training image held out",
    )
