"""Trains a recipe of docs/plugin-recipes.md in a checkout of PyCIL and prints what the witness saw, as JSON.

Usage: run_pycil.py CHECKOUT icarl|podnet OPTIONS, in an empty folder; OPTIONS are those of IVT, as JSON.
"""

import importlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, sys.argv[1])
from recipe import recipe
from torchvision import transforms
from witness import Rows, Witness

CLASSES, IMAGES = 12, 12
EPOCHS = 3


def images(count: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    targets = np.repeat(np.arange(CLASSES), count)
    noise = generator.integers(0, 128, (len(targets), 32, 32, 3))
    return (noise + 10 * targets[:, None, None, None]).astype(np.uint8), targets


def tiny_data(name: str) -> Any:
    train, test = images(IMAGES), images(2)
    return SimpleNamespace(
        train_data=train[0], train_targets=train[1], test_data=test[0], test_targets=test[1], use_path=False,
        train_trsf=[transforms.RandomHorizontalFlip()], test_trsf=[], common_trsf=[transforms.ToTensor()],
        class_order=list(range(CLASSES)), download_data=lambda: None,
    )  # fmt: skip


def rows_of_podnet(task: int) -> Rows:
    if task == 2:
        return {"fc.fc1.weight": ["fc.weight"]}
    return {"fc.fc1.weight": ["fc.fc1.weight", "fc.fc2.weight"], "fc.fc2.weight": []}


def main(name: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    trainer = importlib.import_module("trainer")
    factory, data_manager = (importlib.import_module(f"utils.{module}") for module in ("factory", "data_manager"))
    host, base = importlib.import_module(f"models.{name}"), importlib.import_module("models.base")
    data_manager._get_idata = tiny_data
    loader = torch.utils.data.DataLoader
    base.DataLoader = lambda *args, num_workers, **kwargs: loader(*args, **kwargs)
    host.num_workers, host.batch_size, host.epochs = 0, 16, EPOCHS
    host.init_epoch, host.ft_epochs = EPOCHS, 2
    learner = recipe(f"models/{name}_ivt.py for PyCIL")["iCaRLIVT" if name == "icarl" else "PODNetIVT"]
    factory.get_model = lambda name, args: learner(args)
    with pytest.MonkeyPatch.context() as monkeypatch:
        witness = Witness(monkeypatch, rows_of_podnet) if name == "podnet" else Witness(monkeypatch)
        trainer.train(
            {
                "prefix": "test",
                "dataset": "tiny",
                "memory_size": 24,
                "memory_per_class": 2,
                "fixed_memory": False,
                "shuffle": False,
                "init_cls": 5,
                "increment": 4,
                "model_name": name,
                "device": [-1],  # the CPU
                "seed": [1],
                "convnet_type": "resnet32" if name == "icarl" else "cosine_resnet32",
                "ivt": options,
            }
        )
    print(json.dumps(witness.summary()))


main(sys.argv[2], json.loads(sys.argv[3]))
