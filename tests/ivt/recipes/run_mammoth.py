"""Trains a recipe of docs/plugin-recipes.md in a checkout of mammoth and prints what the witness saw, as JSON.

Usage: run_mammoth.py CHECKOUT MODEL ARGUMENTS..., with more arguments of mammoth's main.py.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

checkout = Path(sys.argv[1]).resolve()
os.chdir(checkout)
sys.path.insert(0, str(checkout))
from witness import Witness  # noqa: E402

PER_CLASS = 12
MEMORY = "witness.pt"  # what the witness knew after each task, for a run that resumes


def tiny(
    dataset: Any, root: str, train: bool = True, transform: Any = None, target_transform: Any = None, **_: Any
) -> None:
    generator = np.random.default_rng(int(train))
    dataset.train, dataset.transform, dataset.target_transform = train, transform, target_transform
    dataset.targets = np.repeat(np.arange(10), PER_CLASS if train else 2).tolist()
    noise = generator.integers(0, 128, (len(dataset.targets), 32, 32, 3))
    dataset.data = (noise + 10 * np.array(dataset.targets)[:, None, None, None]).astype(np.uint8)


def main(model: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    host = importlib.import_module("main")
    data = importlib.import_module("datasets.seq_cifar10")
    not_augmented = data.transforms.Compose([data.transforms.ToTensor()])
    for name in ("MyCIFAR10", "TCIFAR10"):
        getattr(data, name).__init__ = tiny
        getattr(data, name).not_aug_transform = not_augmented
    command = (
        f"--model {model} --dataset seq-cifar10 --backbone reduced-resnet18 --buffer_size 20 --lr 0.05 --n_epochs 3"
    )
    command += " --batch_size 8 --num_workers 0 --seed 0 --non_verbose 1 --base_path . --stop_after 3"
    command += " --lr_scheduler multisteplr --lr_milestones 2 --ivt_interval 1"
    sys.argv = ["main.py", *command.split(), *arguments]
    with pytest.MonkeyPatch.context() as monkeypatch:
        witness = Witness(monkeypatch)
        if "--start_from" in arguments:
            witness.cumulative = torch.load(MEMORY)[int(arguments[arguments.index("--start_from") + 1]) - 1]
        host.main()
    torch.save(witness.endings, MEMORY)
    assert witness.ivt is not None
    print(json.dumps({**witness.summary(), "task": witness.ivt.task}))


main(sys.argv[2], sys.argv[3:])
