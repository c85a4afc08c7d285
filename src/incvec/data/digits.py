"""scikit-learn's 1,797 handwritten digits, 8 x 8 pixels: embedded, no download."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from incvec.data.dataset import Dataset
from incvec.errors import DataError

TEST_EVERY = 5


def load() -> Dataset:
    """Ten classes; every fifth image of a class, in the order of the file, is a test image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn: pip install 'incvec[lab]'") from error
    bunch = load_digits()
    # 17 gray levels, 0..16, become 0..255.
    images = torch.from_numpy(np.rint(bunch.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    one_hot = torch.nn.functional.one_hot(labels, 10)
    rank = (one_hot.cumsum(0) * one_hot).sum(1)  # 1 for the first image of its class
    test = rank % TEST_EVERY == 0
    pixels = images[~test].double() / 255
    mean, std = round(float(pixels.mean()), 4), round(float(pixels.std(correction=0)), 4)
    return Dataset(
        name="digits",
        train_images=images[~test].contiguous(),
        train_labels=labels[~test],
        test_images=images[test].contiguous(),
        test_labels=labels[test],
        class_names=tuple(str(digit) for digit in range(10)),
        pad=1,
        flip=False,
        fingerprint=hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest(),
        normalizations={"default": ((mean,), (std,))},
    )
