"""From a configuration to a record: what `incvec run` and `incvec.run` have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from incvec.config import RunConfig
from incvec.data.dataset import Dataset
from incvec.data.datasets import load_dataset
from incvec.data.store.open import is_store
from incvec.engine import events as ev
from incvec.engine.build import pick_device
from incvec.engine.checkpoint import check_finished
from incvec.engine.device_errors import translate_device_errors
from incvec.engine.distributed import init_distributed
from incvec.engine.run import Run, drain
from incvec.engine.threads import single_thread_for_small_images
from incvec.errors import DataError
from incvec.presets import check_names
from incvec.records import read_record

Consume = Callable[[Iterator[ev.Event]], dict[str, Any]]  # drives a run to its end and returns its record


def launch(
    config: RunConfig,
    out: Path,
    bases: Path | None = None,
    data_root: Path | None = None,
    download: bool = False,
    consume: Consume | None = None,
    data: Dataset | None = None,
) -> tuple[dict[str, Any], Dataset]:
    """Train or resume a run; returns its record and its data set, which other runs may use.

    `bases` is the folder of shared base tasks, or None. `consume` displays the events; by default nothing is displayed.
    """
    distributed = init_distributed(config.device)
    pick_device(config.device, distributed.local_rank)
    check_names(config)
    if data is None:
        with distributed.main_process_first():
            data = load_dataset(config.dataset, data_root, download, **config.data_options())
    with single_thread_for_small_images(data):
        record = (consume or drain)(Run(config, data, out, bases, distributed).events())
    distributed.close()
    return record, data


def load_on_device(config: RunConfig, data_root: Path | None, device: torch.device, download: bool = False) -> Dataset:
    """The run's data set, with its images on the device, for all runs that use it."""
    loaded = load_dataset(config.dataset, data_root, download, **config.data_options())
    activity = f"while the images of {config.dataset} were copied to it"
    with translate_device_errors(device, activity, "Another device may help."):
        train, test = loaded.train_images.to(device), loaded.test_images.to(device)
    return replace(loaded, train_images=train, test_images=test)


def read_finished(config: RunConfig, folder: Path, data_root: Path | None) -> dict[str, Any] | None:
    """The record of a finished run, or None. Of the data sets, only a packed store is opened and checked."""
    file = folder / "record.json"
    if not file.exists():
        return None
    record, data = read_record(file), None
    if data_root is not None and is_store(data_root):
        with contextlib.suppress(DataError):
            data = load_dataset(config.dataset, data_root, **config.data_options())
    check_finished(config, data, record, file)
    return record
