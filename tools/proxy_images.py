"""Writes the small stream of the successor study as class folders: `python tools/proxy_images.py DATA_ROOT FOLDER`.

50 classes of CIFAR-100, drawn with a fixed seed. Of each class the first 200 training images become `train/`, the next
100 training images `test/`. No test image of CIFAR-100 is used.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image

from incvec.data import load_dataset

CLASSES, TRAIN, TEST, SEED = 50, 200, 100, 28


def write(data_root: Path, folder: Path) -> None:
    data = load_dataset("cifar100", data_root)
    chosen = torch.randperm(data.n_classes, generator=torch.Generator().manual_seed(SEED))[:CLASSES].tolist()
    for label in chosen:
        rows = (data.train_labels == label).nonzero().flatten().tolist()
        for part, selected in (("train", rows[:TRAIN]), ("test", rows[TRAIN : TRAIN + TEST])):
            target = folder / part / data.class_names[label]
            target.mkdir(parents=True, exist_ok=True)
            for row in selected:
                image = data.train_images[row].permute(1, 2, 0).numpy()
                Image.fromarray(image).save(target / f"{row:05d}.png")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
