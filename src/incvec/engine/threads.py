"""The number of CPU threads for runs on small images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from incvec.data import Dataset

SMALL_IMAGE = 256  # values per image


@contextmanager
def single_thread_for_small_images(data: Dataset) -> Iterator[None]:
    """Use one CPU thread while training on images of at most `SMALL_IMAGE` values.

    With such small tensors, several threads spend their time waiting for each other (ten times slower on a busy
    machine), and the last digits of the results would depend on the number of cores.
    """
    threads = torch.get_num_threads()
    if data.train_images[0].numel() <= SMALL_IMAGE:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
